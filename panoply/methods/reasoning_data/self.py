"""SELF: only prompts that the greedy answer gets wrong are learned from; and how steps on some prompts hurt others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens, own_episodes
from panoply.errors import PanoplyError
from panoply.evaluation.pass_at_k import mean_pass_at_k
from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.kinds import is_text
from panoply.methods.base.grpo import CONTROL as GRPO_CONTROL
from panoply.methods.base.grpo import grpo
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, protocol
from panoply.slots.credit.groups import group
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.evaluation.judged import Judged
    from panoply.rollout.text import Collector

# ------------------------------------------------------------------ the filter


def _cost(held: Any, of: Lengths) -> Tokens:
    """With as many rounds as it may take, and all prompts failing."""
    sampled, trained = own_episodes(held, of)
    return sampled + held.prompts * of.answer * (held.rounds if held.refill else 1), trained


@part(
    "sample",
    equation=lambda held: (
        f"of {held.prompts} prompts those whose greedy answer fails, × {held.group} episodes at temperature "
        f"{held.temperature:g}"
    ),
    needs=lambda held: frozenset({"world:verify", f"signal:{held.name}"}),
    bounds={**LIMITS, "temperature": "above 0 to 100", "rounds": "at least 1"},
    impossible=greedy_groups,
    inert=greedy_cuts,
    cost=_cost,
)
def greedy_failed(
    collect: Collector,
    *,
    prompts: int = 128,
    group: int = 8,
    rounds: int = 10,
    refill: bool = False,
    name: str = "success",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
) -> Experience:
    """Answer every prompt greedily first, and sample groups only for those that this gets wrong.

    A batch in which none fails is passed over, and the next is drawn; after `rounds` of them there is nothing left to
    learn: in the first step that is refused, later a step without a gradient goes by. Greedy answers count as
    episodes. Metrics: `failed`, the share of prompts that fail; `groups_asked`, how many are learned from.

    rounds   batches that are drawn at most
    refill   whether more are drawn until there are as many failing prompts as `prompts`
    name     the signal that is 1 where an answer is right
    """
    hard: list[Any] = []
    drawn = 0
    for _ in range(rounds):
        tasks = collect.tasks(prompts)
        drawn += len(tasks)
        hard += wrong(collect.episodes(tasks, 1, temperature=0.0, max_tokens=max_tokens), tasks, name)
        if len(hard) >= (prompts if refill else 1):
            break
    if not hard and collect.version == 0:
        raise PanoplyError(
            f"None of {drawn} prompts is answered wrongly by greedy decoding, so that there is nothing to learn from: "
            "take harder problems."
        )
    asked = hard[:prompts] or tasks[:1]
    collect.notes = {"failed": len(hard) / drawn, "groups_asked": len(hard[:prompts])}
    found = collect.episodes(
        asked,
        group,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
    )
    return found if hard else found.with_columns(train=torch.zeros(len(found), dtype=torch.bool))


def wrong(told: Experience, tasks: Sequence[Any], name: str) -> list[Any]:
    """The tasks whose only episode did not earn 1, in their order."""
    episodes = told.by("episode")
    order = Segments(episodes.first(told["group"]))
    earned = order.sum(episodes.sum(told[f"signal:{name}"]).double())
    return [task for task, right in zip(tasks, (earned == 1).tolist(), strict=True) if not right]


# ------------------------------------------------------------------ the diagnosis


def slopes(policy: Any, rows: Experience, weight: Tensor, of: Tensor) -> Tensor:
    """[groups of `of`, weights]: the gradient of Σ weight·log π over each group of rows."""
    moving = [p for _, p in policy.named_parameters() if p.requires_grad]
    found = []
    for key in Segments(of).keys.tolist():
        mine = of == key
        value = (policy.score(rows.take(mine), frozenset())["logp"] * weight[mine]).sum()
        pieces = torch.autograd.grad(value, moving, allow_unused=True)
        found.append(
            torch.cat(
                [
                    torch.zeros_like(p).flatten() if g is None else g.flatten()
                    for p, g in zip(moving, pieces, strict=True)
                ]
            )
        )
    return torch.stack(found).double()


def interference_matrix(policy: Any, solutions: Experience, sampled: Experience) -> Tensor:
    """K[x, x′]: by how much a step of size 1 on the answers to x′ raises log π of the solution to x, to first order.

    K[x, x′] = ⟨∇log π(y*_x|x), mean of A(x′, y′)·∇log π(y′|x′)⟩ with A in deviations of its group. Problems are groups
    of both, in the order of their keys.
    """
    advantage = group()(sampled)
    sampled_of = sampled["group"]
    episodes = Segments(sampled.by("episode").first(sampled_of))
    sizes = Segments(sampled_of).rows(episodes.count)
    here = slopes(policy, solutions, torch.ones(len(solutions)), solutions["group"])
    return here @ slopes(policy, sampled, advantage / sizes, sampled_of).T


def of_run(
    judged: Judged, *, problems: int = 16, answers: int = 32, k: int = 16, seed: int = 0
) -> dict[str, float]:
    """What training did to single held-out problems between a run's first and last kept checkpoint.

    problems   how many are looked at
    answers    sampled to each, more than k
    k          of pass@k
    """
    from panoply.rollout.text import Collector

    if not is_text(judged.world) or "reference" not in judged.world.access:
        raise PanoplyError(
            "Interference is measured on reference answers, which only some worlds of text have."
        )
    if answers <= k:
        raise PanoplyError(f"pass@{k} is estimated by more than {k} answers, not by {answers}.")
    steps = judged.steps()
    if len(steps) < 2:
        raise PanoplyError(
            "Interference needs two kept checkpoints: train with run.checkpoint_every below run.steps."
        )
    tasks = judged.world.held_out(problems)
    rates, likely = [], []
    for step in (steps[0], steps[-1]):
        policy = judged.policy(step)
        collect = Collector(judged.world, policy, seed, split="test")
        into = torch.arange(problems)
        solutions = collect.answers(tasks, [judged.world.gold(task) for task in tasks], into=into)
        with torch.no_grad():
            likely.append(solutions.by("group").sum(policy.score(solutions)["logp"].double()))
            sampled = collect.episodes(tasks, answers, into=into)
        episodes = sampled.by("episode")
        right = episodes.sum(sampled["signal:success"]).double()
        rates.append(Segments(episodes.first(sampled["group"])).mean(right))
    matrix = interference_matrix(policy, solutions, sampled.with_columns(reward=sampled["signal:success"]))
    return {
        **told(rates[0], rates[1], likely[1] - likely[0], answers, k),
        "steps on one problem that hurt another": hurt(matrix),
    }


def told(before: Tensor, after: Tensor, change: Tensor, answers: int, k: int) -> dict[str, float]:
    """The numbers of the paper, of success rates and of changes in the solutions' log-probability."""
    found: dict[str, float] = {}
    for when, rate in (("first", before), ("last", after)):
        counts = (rate * answers).round().long().tolist()
        found |= {f"pass@{n} {when}": mean_pass_at_k(counts, [answers] * len(counts), n) for n in (1, k)}
    gain = after - before
    varies = bool(before.std() > 0) and bool(gain.std() > 0)
    return {
        **found,
        "solutions that became less likely": float((change < 0).double().mean()),
        "mean change of their log-probability": float(change.mean()),
        "problems lost": float((after < 0.1 * before).sum()),
        "correlation of first success and gain": float(np.corrcoef(before, gain)[0, 1]) if varies else 0.0,
    }


def hurt(matrix: Tensor) -> float:
    """Of the effects of a step on one problem upon others, which is what is off the diagonal, the share below 0."""
    others = matrix[~torch.eye(len(matrix), dtype=torch.bool)]
    moved = others[others != 0]
    return float((moved < 0).double().mean()) if len(moved) else 0.0


def exact_matrix(logits: Tensor, features: Tensor, right: Tensor) -> Tensor:
    """The same of a softmax over φ(x, a)·θ, without samples: [problems, answers], their features, and which are right.

    ∇log π(a*|x) = φ(x, a*) − E φ, here with a* drawn among the right ones, and ∇E[r|x′] = E[(r − p)φ(x′, ·)].
    """
    policy = logits.softmax(-1)
    mean = (policy[..., None] * features).sum(1)
    solved = (policy * right).sum(-1, keepdim=True)
    of_right = ((policy * right / solved)[..., None] * features).sum(1)
    gain = ((policy * (right - solved))[..., None] * features).sum(1)
    return (of_right - mean) @ gain.T


@protocol("interference@1", paper=7, judge=of_run)
def interference(problems: int = 40, answers: int = 20, seed: int = 0) -> dict[str, dict[str, float]]:
    """Interference in learning by reward (arXiv 2510.02230): K[x, x′], what a step on x′ does to the solution of x.

    Shown exactly, for a softmax over random features of answers, two of which are right: where problems share few
    features, nearly every second step on one problem makes another's solutions less likely; where each has its own,
    none does. Of a run (`panoply eval RUN --by interference`) it says how many held-out solutions became less likely,
    how many problems were lost (success below a tenth of what it was), whether those gained that were solved often
    already (a positive correlation: the winner takes all), pass@1 and pass@k, and the share of K below 0 off its
    diagonal.
    """
    dice = torch.Generator().manual_seed(seed)
    right = torch.zeros(problems, answers, dtype=torch.double)
    right[:, :2] = 1
    found = {}
    for width in (5, 40, problems * answers):
        features = torch.randn(problems, answers, width, generator=dice, dtype=torch.double) / width**0.5
        if width == problems * answers:
            features = torch.eye(width, dtype=torch.double).view(problems, answers, width)
        logits = features @ torch.randn(width, generator=dice, dtype=torch.double) * 2
        matrix = exact_matrix(logits, features, right)
        others = matrix[~torch.eye(problems, dtype=torch.bool)]
        found[f"{width} features"] = {
            "steps that hurt another problem": hurt(matrix),
            "mean effect on itself": float(matrix.diagonal().mean()),
            "mean size of the effect on others": float(others.abs().mean()),
        }
    return found


# ------------------------------------------------------------------ the method

TINY = {
    "sample.prompts": 16,
    "surrogate.high": 0.28,
    "reduce": "token_mean",
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.minibatches": 1,
    "run.steps": 150,
}
CONTROL = {
    **{path: value for path, value in GRPO_CONTROL.items() if path != "regularise.kl"},
    "sample.prompts": 16,
    "sample.name": "reward",
}
"""A start is left out where acting greedily earns exactly 1."""


CLAIM = Learns(
    "Where problems share what is learned, GRPO raises mean success and loses some problems to others; learning only "
    "from those that the likeliest answer gets wrong solves more of them in 16 tries after as many steps.",
    over="grpo",
    world="bandit",
    budget="steps=200",
    metric="world:pass@16",
    settings={
        "world.variant": "problems",
        "world.arms": 20,
        "world.features": 40,
        "world.seen": "features",
        "policy.shared": True,
        "policy.hidden": (),
        "sample.prompts": 16,
        "sample.group": 8,
        "update.epochs": 1,
        "update.minibatches": 1,
    },
    tune={"update.lr": (0.03, 0.1, 0.3)},
    best=1.0,
    also=("success", "world:pass@1", "total_episodes"),
    shows=(Shows("world:pass@16", most=0.8),),
    waives={
        "problems": "all problems share their features, and pass@16 is computed of all of them, not sampled"
    },
)


PUBLISHED: Published = {
    "mail-research/SELF-llm-interference, slurm/train_max_ppo.sh": {
        "sample.prompts": 128,
        "sample.group": 8,
        "sample.temperature": 1.0,
        "credit.scale": "std",
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.minibatches": 2,
    },
}
"""Mini-batches of 64 prompts. The script's kl_coef is of a reward that has no such term there."""


@method(
    "self@1",
    paper=7,
    base="grpo",
    presets={"tiny": TINY, "control": CONTROL},
    claim=CLAIM,
    published=PUBLISHED,
)
def self_method() -> OnPolicy:
    """SELF (arXiv 2510.02230). GRPO on the prompts with r(x, greedy(x)) ≠ 1, averaged over those alone.

    Reinforcing what is solved already makes right answers to other prompts less likely, and the more often a prompt is
    solved the more it is reinforced: mean success rises, while with many tries fewer problems are solved than before.
    So a prompt whose likeliest answer is right is left out. That is told by one greedy answer before anything is
    sampled, and is another set than that of prompts with a low success rate.

    What is surprising: it gives up success in one try for success in many, and by how much a batch shrinks depends on
    the policy (`failed`, `groups_asked`; `sample.refill` draws on). Look at pass@k with more answers than k, on prompts
    it was not trained on; `panoply eval RUN --by interference` shows what became of single problems.

    The paper's name for it speaks of a forward KL, KL(π_ref‖π), whose form and weight are not known here, and the
    release has it off: `--regularise kl` with estimator k3 descends that divergence on the policy's own answers, not on
    the reference's.
    """
    return grpo().but(
        sample=greedy_failed(),
        regularise=(),
        update=adam(lr=1e-6, minibatches=2),
    )
