"""B-Coder: a language model's logits read as advantages, learned as a Q-function from programs that were scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply import checkpoint
from panoply.batch import Batch, Values
from panoply.costs import WITH_POLICY, Lengths, Tokens
from panoply.errors import PanoplyError
from panoply.evidence.claims import Identity, Ranks, Shows
from panoply.experience import REPLAY, TEACHER, Experience, Segments
from panoply.parts import Finding, Part, part
from panoply.policies.taps import Pass, tap
from panoply.regimes import Dataset, Fit
from panoply.registry import Published, method, protocol
from panoply.rollout.collector import in_epochs
from panoply.seeds import torch_rng
from panoply.slots.credit.returns import in_time
from panoply.slots.data.lists import lists
from panoply.slots.loss.imitation import nll
from panoply.slots.loss.lists import ordered
from panoply.slots.model.model import Model
from panoply.slots.reduce.averages import sequence_mean
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.evaluation.judged import Judged
    from panoply.loops.seat import Seat
    from panoply.rollout.text import Collector

# ------------------------------------------------------------------ what is read off the logits


@tap
def top_logp(seen: Pass) -> Tensor:
    """log π of the likeliest token."""
    return seen.over_vocabulary(lambda logp: logp.amax(-1))


@tap
def favourite(seen: Pass) -> Tensor:
    """The likeliest token."""
    return seen.over_vocabulary(lambda logp: logp.argmax(-1))


@tap
def logp_of_favourite(seen: Pass, of: str) -> Tensor:
    """log π of the token that a snapshot finds likeliest (its column `favourite@SNAPSHOT`)."""
    return seen.logp_of(seen.column(f"favourite@{of}"))


def after(batch: Batch, value: Tensor) -> Tensor:
    """For each decision a number of the one after it in its episode; 0 after the last."""
    order = in_time(batch.experience)
    found = torch.zeros_like(value)
    found[order] = Segments(batch["episode"][order]).following(value[order], found[order])
    return found


# ------------------------------------------------------------------ losses


def _q_needs(held: Any) -> frozenset[str]:
    of = {"logp_of_favourite:reference", "favourite@reference"} if held.target == "checkpoint" else set[str]()
    whole = "whole:group"  # programs for one task are compared
    return frozenset(
        {"top_logp", "residual", "column:value", "world:verify", f"signal:{held.name}", whole, *of}
    )


def _q_equation(held: Any) -> str:
    chosen = "argmax π_reference" if held.target == "checkpoint" else "argmax Q"
    return (
        f"(r + {held.gamma:g}·sg min({held.most:g}, Q(s′, {chosen})) − Q(s, a))²,  Q = {held.alpha:g}·(log π(a) − "
        "max log π) + V^r + V_φ"
    )


@part(
    "loss",
    equation=_q_equation,
    stream="joint",
    scores="policy",
    needs=_q_needs,
    bounds={"weight": "above 0", "alpha": "above 0", "gamma": "from 0 to 1", "most": "any number"},
)
def q_of_logits(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    alpha: float = 1.0,
    gamma: float = 0.999,
    most: float = 1.0,
    target: Literal["checkpoint", "own"] = "checkpoint",
    name: str = "score",
) -> Values:
    """The Bellman error of Q(s, a) = A + V, where A = α·(ℓ_a − max ℓ) is read off the logits and V is beside them.

    max_a Q is V, and softmax(Q/α) is the policy itself, whatever V is.

    target   the token that is taken to follow: the checkpoint's likeliest (π_reference), so that what is learned is the
             value of going on as the checkpoint would; or the likeliest of the policy as it is now, as in DQN
    most     no reward is higher, and so no value that is bootstrapped from
    name     the signal that is the reward, on a program's last token

    Metrics: how often the better of two programs for one task is put first, `right_order` by R̃ = Σ Q(s, a) − γ·V(s′),
    `inverse_order` by the same with Q of the token that is taken to follow in place of V, and `likely_order` by log π.
    """
    now = batch.now
    value = now["residual"] + batch["value"].to(now["residual"].dtype)
    q = alpha * (now["logp"] - now["top_logp"]) + value
    greedy = now["logp_of_favourite:reference"] if target == "checkpoint" else now["top_logp"]
    bootstrap = (alpha * (greedy - now["top_logp"]) + value).detach().clamp(max=most)
    error = batch[f"signal:{name}"].to(q.dtype) + gamma * after(batch, bootstrap) - q
    by = {
        "right_order": implied_reward(batch, q, value, gamma),
        "inverse_order": implied_reward(batch, q, bootstrap, gamma),
        "likely_order": batch.by("episode").sum(now["logp"].detach()),
    }
    stats = {"bellman_error": error.detach().abs(), "q": q.detach()}
    return error**2, stats | {column: _ordered(batch, score, name) for column, score in by.items()}


def implied_reward(batch: Batch, q: Tensor, value: Tensor, gamma: float) -> Tensor:
    """Σ_t Q(s_t, a_t) − γ·V(s_t+1) of each episode: the reward that the learned values say it has."""
    return batch.by("episode").sum((q - gamma * after(batch, value)).detach())


def _ordered(batch: Batch, score: Tensor, name: str) -> Tensor:
    """Of each group with programs of unequal worth: the share of pairs of which the better one has the higher score."""
    episodes = batch.by("episode")
    worth = episodes.sum(batch[f"signal:{name}"].double())
    grid = Segments(episodes.first(batch["group"])).grid()
    pairs = ordered(worth[grid.clamp(min=0)], grid >= 0)
    placed = score[grid.clamp(min=0)]
    first = (pairs & (placed[:, :, None] > placed[:, None, :])).sum((1, 2))
    some = pairs.any(2).any(1)
    return first[some] / pairs.sum((1, 2))[some]


@part(
    "loss",
    equation="Σ |A|,  A = log π(a) − max log π, of reference programs",
    unit="episode",
    stream="imitation",
    scores="policy",
    needs={"top_logp"},
    bounds={"weight": "above 0"},
)
def small_advantage(batch: Batch, *, weight: float | Part = 0.1) -> Values:
    """Reference programs are to be greedy: no token of them is to be less likely than another. (α is in the weight.)"""
    gap = batch.now["top_logp"] - batch.now["logp"]
    return batch.by("episode").sum(gap), {"reference_gap": gap.detach()}


@part(
    "loss",
    equation="(r + γ·sg min({most}, V(s′)) − A_reference − V)²",
    stream="joint",
    scores="none",
    needs=lambda held: frozenset({"value", "top_logp@reference", "logp@reference", f"signal:{held.name}"}),
    bounds={"weight": "above 0", "alpha": "above 0", "gamma": "from 0 to 1", "most": "any number"},
)
def checkpoint_value(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    alpha: float = 1.0,
    gamma: float = 0.999,
    most: float = 1.0,
    name: str = "score",
) -> Values:
    """The same error with the checkpoint's advantages, which moves V alone. Its own likeliest token has advantage 0."""
    value = batch.now["value"]
    advantage = alpha * (batch["logp@reference"] - batch["top_logp@reference"]).to(value.dtype)
    bootstrap = after(batch, value.detach().clamp(max=most))
    error = batch[f"signal:{name}"].to(value.dtype) + gamma * bootstrap - advantage - value
    return error**2, {"error": error.detach().abs(), "value": value.detach()}


# ------------------------------------------------------------------ values beside the logits


def _q_of(method: Any) -> Part | None:
    losses = getattr(method, "losses", ())
    return next((loss for loss in losses if loss.info.name == "q_of_logits"), None)


def _without_q(held: Any, method: Any) -> list[Finding]:
    if _q_of(method) is None:
        return [("", "it is a part of the values that losses.q_of_logits learns")]
    return []


_UPDATE = adam(lr=1e-5)


@part(
    "model",
    equation="V_φ(s), which learns for {warmup} steps before the policy and then stays",
    gives={"column:value"},
    needs={"top_logp@reference", "logp@reference"},
    impossible=_without_q,
    bounds={"warmup": "at least 0"},
    cost=lambda held: held.update,
)
def pretrained_value(seat: Seat, *, update: Part = _UPDATE, warmup: int = 1000) -> Model:
    """V_φ: the checkpoint with a head of zeros, fitted so that its Bellman error is small before logits move at all.

    A softmax does not see V, and the Bellman error sees little else. With no steps it stays 0.
    """
    q = _q_of(seat.method)
    assert q is not None
    shared = {name: q.settings()[name] for name in ("alpha", "gamma", "most", "name")}
    options = seat.options
    model, columns = seat.kind.critic(seat.policy, lambda: seat.open(options.model), options.seed, ("value",))
    fit = Fit((checkpoint_value(**shared),), sequence_mean(), update)
    return Model(model, columns, fit, warmup, stays=True)


@part(
    "model",
    equation="V^r(s), 0 at first, which learns with the policy",
    impossible=_without_q,
    cost=lambda held: WITH_POLICY,
)
def residual_value(seat: Seat) -> Model:
    """V^r: what V_φ lacks once logits move. The checkpoint with a head of zeros, moved by the policy's own update."""
    options = seat.options
    model, _ = seat.kind.critic(seat.policy, lambda: seat.open(options.model), options.seed, ("residual",))
    return Model(model, joins=True)


# ------------------------------------------------------------------ the data


def _cost(held: Any, of: Lengths) -> Tokens:
    return 0, held.batch * (of.prompt + (held.answers + 1) * of.context)


@part(
    "data",
    equation="{batch} of {prompts} tasks a step: {answers} programs of the policy at its start, and the reference",
    needs=lambda held: frozenset({"world:reference", "world:verify", f"signal:{held.name}"}),
    state=dict,
    gives={"lists"},
    cost=_cost,
    bounds={
        "batch": "at least 1",
        "answers": "at least 2",
        "prompts": "at least 1",
        "temperature": "above 0",
    },
)
def scored_programs(
    state: dict[str, Any],
    collect: Collector,
    *,
    batch: int = 16,
    answers: int = 8,
    prompts: int = 625,
    temperature: float = 1.0,
    name: str = "score",
) -> tuple[dict[str, Any], Experience]:
    """Programs that were written once, before the first step, and scored: the policy's own and the reference's.

    Both are learned from; the reference's are a teacher's, which imitation may learn from too.
    """
    first = state.get("next", 0)
    generated = lists(
        batch=batch, answers=answers, prompts=prompts, whose="policy", temperature=temperature, name=name
    )
    state, written = generated(state, collect)
    tasks = collect.numbered(state["first"] + row for row in in_epochs(collect.seed, first, batch, prompts))
    groups = written.by("group").keys
    right = collect.answers(tasks, [collect.world.gold(t) for t in tasks], into=groups, source=TEACHER)
    ours = written.with_columns(source=torch.full((len(written),), REPLAY)).without("logp")
    return state, Experience.cat([ours, right])


# ------------------------------------------------------------------ the best of many programs


def of_run(
    judged: Judged, *, problems: int = 32, answers: int = 32, temperature: float = 1.0, seed: int = 0
) -> dict[str, float]:
    """How often the first of many programs succeeds, by what puts them in order: R̃ in two forms, log π, or chance."""
    from panoply.policies.value import ValueModel
    from panoply.rollout.text import Collector

    q, step = _q_of(judged.run.plan().method), max(judged.steps())
    if q is None:
        raise PanoplyError(f"{judged.run.folder} has no values of programs: b-coder learns them.")
    policy, alpha, gamma = judged.policy(step), q.settings()["alpha"], q.settings()["gamma"]
    folder = next(c for c in checkpoint.listed(judged.run.checkpoints) if c.step == step).model.parent
    values = [ValueModel.load(folder / "models" / name) for name in ("pretrained_value", "residual_value")]
    collect = Collector(judged.world, policy, seed, split="test")
    made = collect.episodes(judged.world.held_out(problems), answers, temperature=temperature).unaltered()
    with torch.no_grad():
        made = made.with_columns(
            **{"favourite@reference": judged.start().score(made, frozenset({"favourite"}))["favourite"]}
        )
        now = policy.score(made, frozenset({"top_logp", "logp_of_favourite:reference"}))
        value = torch.stack([one.score(made)["value"] for one in values]).sum(0)
    batch, episodes, top = Batch(made, now), made.by("episode"), now["top_logp"]
    own = alpha * (now["logp"] - top) + value
    best = {
        "by R̃": implied_reward(batch, own, value, gamma),
        "by the operator's inverse": implied_reward(
            batch, own, alpha * (now["logp_of_favourite:reference"] - top) + value, gamma
        ),
        "by likelihood": episodes.sum(now["logp"]),
    }
    right = (episodes.sum(made["signal:success"]) > 0).float()
    grid = Segments(episodes.first(made["group"])).grid()
    found = {name: float(right[grid.gather(1, by[grid].argmax(1, True))].mean()) for name, by in best.items()}
    return {**found, "by chance": float(right.mean()), "any": float(right[grid].amax(1).mean())}


def planted(seed: int, depth: int = 4, tokens: int = 3) -> dict[str, float]:
    """Exact values of a random tree of programs, whose leaves score 1 or −0.3: how often the better of two is put first
    by R̃, by the inverse of the operator that the values are of, and by likelihood; and how far that inverse is from the
    rewards."""
    rng = torch_rng("programs", seed)
    size = tokens**depth
    reward = torch.where(torch.rand(size, generator=rng) < 0.3, 1.0, -0.3).double()
    prior = [
        torch.randn(tokens**level, tokens, generator=rng).double().log_softmax(1) for level in range(depth)
    ]
    published, inverse, likely = torch.zeros(3, size, dtype=torch.float64)
    q = reward.view(-1, tokens)
    for level in reversed(range(depth)):
        each = size // tokens ** (level + 1)
        likely += prior[level].flatten().repeat_interleave(each)
        for total in (published, inverse):
            total += q.flatten().repeat_interleave(each)
        if level:  # what was added a level below, less what follows here
            greedy = q.gather(1, prior[level].argmax(1, True)).flatten()
            published -= q.amax(1).repeat_interleave(each * tokens)
            inverse -= greedy.repeat_interleave(each * tokens)
            q = greedy.view(-1, tokens)
    better = reward[:, None] > reward[None, :]
    by = {"by R̃": published, "by the operator's inverse": inverse, "by likelihood": likely}
    found = {n: float((x[:, None] > x[None, :])[better].double().mean()) for n, x in by.items()}
    return {"apart": float((inverse - reward).abs().max()), **found}


@protocol(
    "b-coder-ranking@1",
    paper=148,
    judge=of_run,
    claim=Identity(
        "Exact values of going on as the checkpoint would, turned round with the same operator, Σ Q(s, a) − γ·Q(s′, "
        "argmax π_ref), are the rewards of programs.",
        planted,
        within=1e-9,
    ),
)
def b_coder_ranking(*, seed: int = 0) -> dict[str, float]:
    """The best of many programs by what the learned values say they earn, R̃ = Σ Q(s, a) − γ·V(s′) (B-Coder).

    Shown on exact values of a random tree. `panoply eval RUN --by b-coder-ranking` takes the first of 32 programs for
    each of a run's held-out problems: by R̃, by likelihood, and by chance. No program is run for that.

    What is surprising: with γ = 1 all V but the first cancel, and R̃ = V(s₀) + Σ A, so that programs of one task are put
    in order by how far they are from the greedy one. V is the highest Q, while the values that are learned go on with
    the checkpoint's token; where the two differ, R̃ takes from a good program what the checkpoint would have missed on
    its way, and with exact values it can order programs worse than chance. The inverse of the operator itself takes Q
    of that token for V.
    """
    return planted(seed)


# ------------------------------------------------------------------ the method

CLAIM = Ranks(
    "From five thousand scored programs of its start, a policy whose values are bootstrapped from the start's greedy "
    "tokens comes to more right programs than one whose values are bootstrapped from its own.",
    order=("", "own greedy token=b-coder:losses.q_of_logits.target=own"),
    world="program:stack",
    budget="steps=90",
    metric="success",
    shows=(Shows("right_order", least=0.5),),
    also=("area", "right_order", "inverse_order", "likely_order", "bellman_error"),
)

TINY = {
    "data.batch": 8,
    "losses.q_of_logits.alpha": 0.3,
    "losses.small_advantage.weight": 0.01,
    "losses.nll.weight": 0.1,
    "models.pretrained_value.update.lr": 1e-3,
    "models.pretrained_value.update.beta2": 0.95,
    "models.pretrained_value.warmup": 30,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "run.steps": 100,
}
PUBLISHED: Published = {
    "reported of arXiv 2310.03173": {
        "losses.q_of_logits.target": "checkpoint",
        "losses.q_of_logits.most": 1.0,
    },
}


@method(
    "b-coder@1",
    paper=148,
    world="program:stack",
    claim=CLAIM,
    presets={"tiny": TINY},
    published=PUBLISHED,
    tags=("optimisation=value", "granularity=token"),
)
def b_coder() -> Dataset:
    """B-Coder (arXiv 2310.03173): Q-learning on scored programs that starts as exactly the model's own policy.

        A = α·(ℓ_a − max ℓ),  Q = A + V^r + V_φ,  L = (r + γ·sg Q(s′, argmax π_ref) − Q)² + β_adv·Σ|A*| + β_ce·L_ce

    A language model's logits are advantages but for a constant in every state. So nothing is lost at the start; only
    the constant, V, is not known, and is learned first while logits stay (V_φ). Then both move, towards targets that
    go on as the frozen checkpoint would and not as the best of what was learned: programs that the data does not have
    cannot be overrated. Its fixed point is the value of the checkpoint's greedy programs, and what improves is one
    step: which token to take before going on like that. Turned round, the values say what a program earns,
    R̃ = Σ Q(s, a) − γ·V(s′), by which the best of many samples is chosen (`b-coder-ranking`, which says when it errs).

    The paper starts from CodeRL's T5 with one frozen encoder for all networks; here V_φ and V^r are decoders of their
    own. α, γ, β_adv and β_ce are chosen here. A head of values from new weights, which the paper also compares with, is
    not built.
    """
    return Dataset(
        data=scored_programs(),
        losses=(q_of_logits(), small_advantage(), nll(weight=0.5)),
        reduce=sequence_mean(),
        update=adam(lr=2e-5),
        models=(pretrained_value(), residual_value()),
    )
