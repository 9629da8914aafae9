"""Direct Advantage Policy Optimization: log-ratios of single steps, regressed on a critic's advantages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.costs import Lengths, Tokens
from panoply.errors import PanoplyError
from panoply.evidence.claims import Learns, Shows
from panoply.experience import DEMONSTRATION, OPEN, TERMINATED, Column, Experience, Ragged, Segments, Table
from panoply.parts import Finding, Part, part
from panoply.policies.value import ValueModel
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.rollout.collector import in_epochs
from panoply.seeds import torch_rng
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.answers import answers_of
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task, TextWorld


# ------------------------------------------------------------------ states, and what may be said next


class Candidate(NamedTuple):
    """A step that may follow a state, an answer as far as it has come."""

    state: int
    said: list[int]
    logp: list[float]
    times: int
    """How many continuations begin with it."""
    worth: float
    """Their mean success."""
    over: bool
    """Whether it ends the answer."""


def step_ends(world: TextWorld, task: Task, answer: Sequence[int]) -> list[int]:
    """Where each step of an answer ends, which is where the next one begins; what follows the last one is its own."""
    starts = [start for start, _ in world.spans(task, answer)]
    return [*starts[1:], len(answer)]


def balanced(success: Sequence[bool], number: int) -> list[int]:
    """Places of so many answers, half of them right where there are as many, and the earlier ones first."""
    right = [i for i, good in enumerate(success) if good]
    wrong = [i for i, good in enumerate(success) if not good]
    fewer = min(len(right), number // 2)
    fewer = max(fewer, min(len(right), number - len(wrong)))
    return sorted([*right[:fewer], *wrong[: number - fewer]])


def advantages(worth: Tensor, times: Tensor, states: Segments) -> Tensor:
    """Â = V(s∘a) less the mean of V over all that was drawn in s: a step that was drawn twice counts twice there."""
    drawn = states.sum(worth * times) / states.sum(times)
    return worth - states.rows(drawn)


def _unique(states: Iterable[tuple[Task, tuple[int, ...]]]) -> list[tuple[Task, tuple[int, ...]]]:
    return list({(task.id, said): (task, said) for task, said in states}.values())


def _states(
    collect: Collector, tasks: Sequence[Task], solutions: int, keep: int
) -> list[tuple[Task, tuple[int, ...]]]:
    """The starts of all steps of some own answers to each task."""
    found = collect.episodes(tasks, solutions)
    episodes = found.by("episode")
    said, success = answers_of(found), (episodes.sum(found["signal:success"]) > 0).tolist()
    group = episodes.first(found["group"])
    known, states = {task.id: task for task in tasks}, []
    for key in sorted(set(group.tolist())):
        mine = (group == key).nonzero().flatten().tolist()
        for place in balanced([success[i] for i in mine], keep):
            answer = said[mine[place]]
            task = known[int(episodes.first(found["task"])[mine[place]])]
            ends = step_ends(collect.world, task, answer)[:-1]
            states += [(task, tuple(answer[:end])) for end in (0, *ends)]
    return _unique(states)


def _candidates(
    collect: Collector, states: Sequence[tuple[Task, tuple[int, ...]]], samples: int
) -> tuple[list[Candidate], Tensor]:
    """The different first steps of continuations of each state, and of each state how often these succeed."""
    tasks, prefixes = [task for task, _ in states], [said for _, said in states]
    rollouts, success = collect.continued(tasks, prefixes, samples)
    logp = Ragged(rollouts.decisions.tensor("logp"), rollouts.sampled.offsets)
    drawn: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    ends: list[bool] = []
    for row, rest in enumerate(rollouts.completions()):
        state = int(rollouts.request[row])
        before = len(prefixes[state])
        whole = [*prefixes[state], *rest]
        end = next(e for e in step_ends(collect.world, tasks[state], whole) if e > before or e == len(whole))
        ends.append(end == len(whole))
        if not success[row].isnan() and end > before:
            drawn.setdefault((state, tuple(whole[before:end])), []).append(row)
    found = [
        Candidate(
            state,
            [*said],
            logp[rows[0]][: len(said)].tolist(),
            len(rows),
            float(success[rows].mean()),
            ends[rows[0]],
        )
        for (state, said), rows in drawn.items()
    ]
    worth, graded = success.nan_to_num(), (~success.isnan()).float()
    sums = torch.zeros(len(states), 2).index_add(0, rollouts.request, torch.stack([worth, graded], dim=1))
    return found, sums[:, 0] / sums[:, 1].clamp(min=1)


def as_rows(
    tasks: Sequence[Task],
    prefixes: Sequence[Sequence[int]],
    candidates: Sequence[Candidate],
    first: tuple[int, int] = (0, 0),
) -> Experience:
    """Steps as short episodes after their states, the steps of one state a group that shares its prefix."""
    prompts = [(*tasks[c.state].prompt, *prefixes[c.state]) for c in candidates]
    shared = torch.tensor([len(prompt) for prompt in prompts])
    lengths = torch.tensor([len(c.said) for c in candidates])
    row = torch.arange(len(candidates)).repeat_interleave(lengths)
    inside = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
    state = torch.tensor([c.state for c in candidates])
    decisions: dict[str, Column] = {
        "task": torch.tensor([tasks[c.state].id for c in candidates])[row],
        "group": first[0] + state[row],
        "episode": first[1] + row,
        "turn": torch.zeros_like(row),
        "context": row,
        "position": shared[row] + inside,
        "action": torch.tensor([token for c in candidates for token in c.said]),
        "logp": torch.tensor([x for c in candidates for x in c.logp]),
        "source": torch.full_like(row, DEMONSTRATION),
        "end": torch.where(inside == lengths[row] - 1, TERMINATED, OPEN),
    }
    tokens = Ragged.from_lists([[*prompt, *c.said] for prompt, c in zip(prompts, candidates, strict=True)])
    return Experience(Table(decisions), Table({"tokens": tokens, "prompt": state, "shared": shared}))


# ------------------------------------------------------------------ the critic


def fitted(
    policy: Any, rows: Experience, target: Tensor, *, lr: float, batch: int, epochs: int, seed: int
) -> ValueModel:
    """A critic that begins as the policy, fitted by cross-entropy to how often states lead to success.

    rows     a decision taken in each state, whose value is read before it
    """
    critic = ValueModel.of(policy.apart())
    optimiser = torch.optim.Adam([p for _, p in critic.named_parameters()], lr=lr)
    for epoch in range(epochs):
        order = torch.randperm(len(rows), generator=torch_rng("critic", seed, epoch))
        for some in order.split(batch):  # type: ignore[no-untyped-call]
            said = critic.score(rows.take(some))["value"]
            loss = F.binary_cross_entropy_with_logits(said, target[some].to(said))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return critic


# ------------------------------------------------------------------ data and loss


def _equation(held: Any) -> str:
    whose = "a critic's" if held.values == "critic" else "the mean success of continuations,"
    again = f", anew every {held.refresh} steps" if held.refresh else ""
    return (
        f"{held.batch} states a step, from {held.keep} of {held.solutions} own answers to {held.prompts} prompts each"
        f"{again}; in each the different first steps of {held.samples} continuations, Â = V(s∘a) − mean V, V {whose} "
        f"where Â differs by {held.spread:g} or more"
    )


def _inert(held: Any, method: Any) -> list[Finding]:
    if held.values == "critic":
        return []
    names = ("critic_lr", "critic_batch", "critic_epochs")
    return [(name, "there is no critic (data.values=samples)") for name in names]


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.keep > held.solutions:
        return [("keep", f"there are {held.solutions} answers to a prompt (data.solutions)")]
    return []


def _cost(held: Any, of: Lengths) -> Tokens:
    """At most: every token of a kept answer a step of its own, when the data is made."""
    made = held.prompts * of.answer * (held.solutions + held.keep * of.answer * held.samples)
    return made // max(1, held.refresh or 1), held.batch * (of.prompt + held.samples * of.answer)


@part(
    "data",
    equation=_equation,
    needs={"world:verify", "world:judge", "world:one turn", "signal:success"},
    gives={"episodes", "column:advantage"},
    state=dict,
    inert=_inert,
    impossible=_impossible,
    cost=_cost,
    bounds={
        **dict.fromkeys(("batch", "prompts", "solutions", "keep"), "at least 1"),
        "samples": "at least 2",
        "spread": "from 0 to 1",
        "refresh": "at least 0",
        "critic_lr": "above 0",
        "critic_batch": "at least 1",
        "critic_epochs": "at least 1",
    },
)
def step_candidates(
    state: dict[str, Any],
    collect: Collector,
    *,
    batch: int = 64,
    prompts: int = 256,
    solutions: int = 32,
    keep: int = 6,
    samples: int = 16,
    spread: float = 0.1,
    refresh: int = 0,
    values: Literal["critic", "samples"] = "critic",
    critic_lr: float = 5e-6,
    critic_batch: int = 512,
    critic_epochs: int = 1,
) -> tuple[dict[str, Any], Experience]:
    """Steps that the policy may say next in states of its own answers, with the advantage of each; made once.

    Every state is a group, in one batch as a whole: without the others of its state an advantage says nothing. Their
    `logp` is that of who drew them, the policy that is regressed from. A step that ends an answer is worth what the
    answer earned, any other what the critic says of it, and never more than that: it is no reward of its own.

    prompts    of which the states are
    solutions, keep   own answers to a prompt, and those whose steps are looked at, half of them right if possible
    samples    continuations of a state, whose first steps are the candidates
    spread     states whose advantages differ by less than this are left out
    refresh    after so many steps all is made anew by the policy as it is then, with further prompts; 0: never. What
               was made before stays where steps differ in no state any more
    values     of a state by a critic fitted to the success of continuations; `samples`: that success itself
    """
    if not state or (refresh and state["steps"] >= refresh):
        fitting = (values, critic_lr, critic_batch, critic_epochs)
        made = _made(collect, prompts, solutions, keep, samples, spread, *fitting)
        if not made and not state:
            raise PanoplyError(
                f"In no state of {prompts} prompts do the steps differ by {spread:g}: ask for more prompts, or a "
                "smaller data.spread."
            )
        state = {**(made or state), "next": 0, "steps": 0}
    number = int(state["of"].max()) + 1
    chosen = torch.tensor(in_epochs(collect.seed, state["next"], min(batch, number), number))
    stored, prefixes = (Ragged(state[name], state[f"{name}@offsets"]) for name in ("said", "prefix"))
    logp = Ragged(state["logp"], stored.offsets)
    tasks = collect.numbered(state["task"][chosen].tolist())
    candidates, advantage = [], []
    for place, one in enumerate(chosen.tolist()):
        for row in (state["of"] == one).nonzero().flatten().tolist():
            candidates.append(Candidate(place, stored[row].tolist(), logp[row].tolist(), 1, 0.0, False))
            advantage.append(state["advantage"][row])
    first = (collect.state["groups"], int(collect._number(len(candidates))[0]))
    collect.state["groups"] += len(chosen)
    rows = as_rows(tasks, [prefixes[one].tolist() for one in chosen.tolist()], candidates, first)
    rows = rows.with_columns(advantage=torch.stack(advantage)[rows["context"]])
    return {**state, "next": state["next"] + len(chosen), "steps": state["steps"] + 1}, rows


def _made(
    collect: Collector,
    prompts: int,
    solutions: int,
    keep: int,
    samples: int,
    spread: float,
    values: str,
    lr: float,
    batch: int,
    epochs: int,
) -> dict[str, Tensor]:
    """The data set, as it is remembered: states, and candidates one after another with their advantages.

    Nothing where the steps differ in no state, as once all answers are right.
    """
    begun = collect.state["tasks"]
    numbers = {task.id: begun + i for i, task in reversed(list(enumerate(collect.tasks(prompts))))}
    asked = collect.numbered(sorted(numbers.values()))
    states = _states(collect, asked, solutions, keep)
    found, success = _candidates(collect, states, samples)
    tasks, prefixes = [task for task, _ in states], [said for _, said in states]
    rows = as_rows(tasks, prefixes, found)
    of, times = torch.tensor([c.state for c in found]), torch.tensor([float(c.times) for c in found])
    worth = torch.tensor([c.worth for c in found])
    if values == "critic":
        seen = Segments(of)
        once = rows.by("episode").first(torch.arange(len(rows)))[seen.first(torch.arange(len(of)))]
        critic = fitted(
            collect.policy,
            rows.take(once),
            success[seen.keys],
            lr=lr,
            batch=batch,
            epochs=epochs,
            seed=collect.seed,
        )
        with torch.no_grad():
            judged = critic.judge(rows).sigmoid().to(worth)
        worth = torch.where(torch.tensor([c.over for c in found]), worth, judged)
    together = Segments(of)
    advantage = advantages(worth, times, together)
    apart = together.max(advantage) - together.min(advantage) >= max(spread, 1e-9)
    if not bool(apart.any()):
        return {}
    kept = together.rows(apart).nonzero().flatten()
    number = torch.cumsum(apart, 0) - 1
    chosen = [found[i] for i in kept.tolist()]
    keys = together.keys[apart].tolist()
    said, before = (
        Ragged.from_lists([c.said for c in chosen]),
        Ragged.from_lists([[*prefixes[k]] for k in keys]),
    )
    return {
        "said": said.values,
        "said@offsets": said.offsets,
        "logp": torch.tensor([x for c in chosen for x in c.logp]),
        "prefix": before.values,
        "prefix@offsets": before.offsets,
        "of": together.rows(number)[kept],
        "task": torch.tensor([numbers[tasks[k].id] for k in keys]),
        "advantage": advantage[kept],
    }


@part(
    "loss",
    equation="½ mean_a (Â/{beta} − Σ log π/π_ref)²,  a over the candidates of a state",
    unit="group",
    stream="imitation",
    needs={"column:advantage"},
    bounds={"beta": "above 0", "weight": "above 0"},
)
def advantage_regression(batch: Batch, *, beta: float = 0.01, weight: float | Part = 1.0) -> Values:
    """The log-ratio of every candidate step to who drew it, regressed on its advantage (arXiv 2412.18279).

    Log-probabilities are summed over a step's tokens: their mean would make β depend on how long a step is. Where π is
    still π_ref, the gradient is that of the policy gradient with Â, over β.

    beta: how much KL to the policy that is regressed from an advantage is worth
    """
    episodes = batch.by("episode")
    states = Segments(episodes.first(batch["group"]))
    moved = batch.episode_log_ratio("behaviour")
    missed = episodes.first(batch["advantage"]).to(moved) / beta - moved
    return 0.5 * states.mean(missed**2), {"moved": moved.detach().abs()}


TINY = {
    "data.prompts": 16,
    "data.solutions": 4,
    "data.keep": 2,
    "data.samples": 4,
    "data.batch": 64,
    "data.refresh": 8,
    "data.critic_lr": 1e-3,
    "data.critic_batch": 64,
    "data.critic_epochs": 8,
    "losses.advantage_regression.beta": 0.2,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "run.steps": 80,
}
"""Small sets that are made anew, so that advantages are of the policy as it is; a larger β, for a model that moves."""
CLAIM = Learns(
    "Regressing single steps on the advantages of a critic, fitted to continuations, learns more than GRPO from as "
    "many sampled tokens, those of continuations included.",
    race="chain",
    also=("success", "total_decisions"),
    shows=(Shows("success", most=0.95),),
)
PUBLISHED: Published = {
    "arXiv 2412.18279": {
        "data.solutions": 32,
        "data.keep": 6,
        "data.samples": 16,
        "data.spread": 0.1,
        "data.values": "critic",
        "data.critic_lr": 5e-6,
        "data.critic_batch": 512,
        "data.critic_epochs": 1,
        "losses.advantage_regression.beta": 0.01,
        "update.lr": 5e-7,
    },
}
"""The paper has 7.5 thousand prompts and batches of 2048 examples; how many states that is, is not said. β is 0.02 for
one of its models. A second iteration, π_ref ← π, is `data.refresh`."""


@method(
    "dapo-direct@1",
    paper=90,
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=(
        "data=rules",
        "dynamics=known",
        "feedback=program",
        "reward=rule",
        "reward=process",
        "optimisation=direct",
    ),
)
def dapo_direct() -> Dataset:
    """Direct Advantage Policy Optimization (arXiv 2412.18279), which is not the DAPO of decoupled clips (`dapo`).

    L(θ) = ½ E_s E_a [(A(s, a)/β − log π/π_ref)²], a a whole step of reasoning and s what came before it. The policy
    that is improved on is frozen; how often it succeeds from a state is found by continuing, a critic is fitted to
    that by cross-entropy, and the policy is fitted by least squares to the critic's advantages, in every state alone.

    What is surprising: whatever the distribution over steps is that the squares are averaged with, if it leaves none
    out, the minimiser is nowhere worse than the policy it was fitted to; on random trees with known values a test finds
    no state that is. V(s) itself is not used: against the mean over the steps that were drawn in s, errors of the
    critic that all of them share cancel.

    On `chain` expect it to lose to GRPO at equal cost: an answer has six to eight steps of three tokens, so that the
    continuations that value its states cost many times the answer, and tell less about them than as many answers would.
    Steps are those that a world knows (`spans`).
    """
    return Dataset(
        data=step_candidates(),
        losses=(advantage_regression(),),
        reduce=token_mean(),
        update=adam(lr=5e-7),
    )
