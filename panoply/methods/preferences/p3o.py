"""Pairwise PPO: two answers to a prompt, weighed by how much more one of them earned."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from panoply.batch import LOG_RATIO_LIMIT, Batch, Values
from panoply.evidence.claims import Identity, Learns
from panoply.evidence.races import SIX_PROMPTS
from panoply.experience import Segments
from panoply.methods.base.rloo import CONTROL as RLOO_CONTROL
from panoply.methods.base.rloo import TINY as RLOO_TINY
from panoply.methods.base.rloo import rloo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import STAYS, needs_against, ratio_stats, stays_at_one
from panoply.slots.update.optimisers import adam


def _equation(held: Any) -> str:
    gap = f"Δ = r̃_1 − r̃_2,  r̃ = r − {held.beta:g}·log π/π_{held.to}" if held.beta else "Δ = r_1 − r_2"
    if held.joint:
        return f"½·min(Az, A·clip(z, z_old ± {held.epsilon:g})),  z = log π(y_1)/π(y_2),  A = sg(Δ·ρ_1ρ_2),  {gap}"
    bounded = f"clip(ρ_i, {1 - held.epsilon:g}, {1 + held.epsilon:g})"
    return f"½·Σ_i min(A_iρ_i, A_i·{bounded}),  A_i = sg(±Δ·ρ_j),  {gap}"


def _needs(held: Any) -> frozenset[str]:
    return needs_against(held) | (frozenset({f"logp@{held.to}"}) if held.beta else frozenset())


def _impossible(held: Any, method: Any) -> list[Finding]:
    if method.sample.settings().get("group") == 1:
        return [("", "an answer needs another one to the same prompt (sample.group is 1)")]
    return []


def _inert(held: Any, method: Any) -> list[Finding]:
    found = [("to", "the KL has no weight (surrogate.beta is 0)")] if not held.beta else []
    still = [("epsilon", STAYS), ("joint", STAYS)] if stays_at_one(held.against, method) else []
    return found + still


@part(
    "surrogate",
    equation=_equation,
    unit="group",
    needs=_needs,
    impossible=_impossible,
    inert=_inert,
    bounds={"beta": "at least 0", "epsilon": "above 0", "weight": "above 0"},
)
def pairwise(
    batch: Batch,
    *,
    beta: float = 0.1,
    joint: bool = False,
    epsilon: float = 0.2,
    against: str = "behaviour",
    to: str = "reference",
    weight: float | Part = 1.0,
) -> Values:
    """The policy gradient of two answers' difference, with ratios of whole answers (arXiv 2310.00212).

    beta      weight of log π/π_to in the reward, which is taken at the weights of now and has no gradient
    joint     whether one bound is on how far log π(y_1)/π(y_2) has moved (V2), or one on each answer's ratio (V1)
    epsilon   that bound

    Each answer's weight has the other's ratio in it: without it the estimate would be biased once the policy has moved.
    Of groups of more than two, the mean over all pairs.
    """
    episodes = batch.by("episode")
    peers = Segments(episodes.first(batch["group"]))
    moved = batch.episode_log_ratio(against).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    reward = episodes.sum(batch["reward"].to(moved.dtype))
    cost = beta * batch.episode_log_ratio(to).detach() if beta else torch.zeros_like(moved)
    grid = peers.grid()
    there, at = grid >= 0, grid.clamp(min=0)
    pairs = (there[:, :, None] & there[:, None, :]).triu(1)
    s, r, c = moved[at], reward[at], cost[at]
    gap = (r[:, :, None] - r[:, None, :]) - (c[:, :, None] - c[:, None, :])
    first, second = s[:, :, None].expand_as(gap), s[:, None, :].expand_as(gap)
    if joint:
        A = gap * (first + second).detach().exp()
        z = first - second
        free, bounded = A * z, A * z.clamp(-epsilon, epsilon)
        value, acted = torch.minimum(free, bounded), free > bounded
    else:
        sides = [(gap * second.detach().exp(), first.exp()), (-gap * first.detach().exp(), second.exp())]
        values, gates = [], []
        for A, ratio in sides:
            free, bounded = A * ratio, A * ratio.clamp(1 - epsilon, 1 + epsilon)
            values.append(torch.minimum(free, bounded))
            gates.append(free > bounded)
        value, acted = values[0] + values[1], gates[0] | gates[1]
    number = pairs.sum((1, 2)).clamp(min=1)
    total = torch.where(pairs, value, 0.0).sum((1, 2)) / (2 * number)
    stats = {"pair_clipped": acted[pairs].float(), "reward_gap": gap[pairs].abs()}
    return total, {**ratio_stats(batch, against), **stats}


# ------------------------------------------------------------------ offsets


def apart(seed: int, name: str = "p3o-joint", steps: int = 4) -> dict[str, float]:
    """How far weights are apart after training with and without what a reward adds to all answers to a prompt.

    By plain gradient steps: rewards are stored in float32, and where there is no gradient Adam blows up what rounding
    leaves of a difference of large numbers (to 2e-6 after three steps). `moved` is how far they have come.
    """
    from safetensors.torch import load_file

    from panoply.policies.build import warm_start
    from panoply.progress import Progress
    from panoply.training import train
    from panoply.worlds.text.strings import Strings

    found = []
    for offset in (0.0, 10.0):
        settings: dict[str, Any] = {
            "world.pays": "proxy",
            "world.proxy_offset": offset,
            "run.held_out": 4,
            "run.evaluate_every": 0,
            "sample.prompts": 16,
            "update": "sgd",
            "update.lr": 0.1,
        }
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder) / "run"
            done = train(
                name,
                "strings",
                run=at,
                seed=seed,
                steps=steps,
                settings=settings,
                threads=1,
                device="cpu",
                progress=Progress(),
            )
            last = max((done.run / "checkpoints").glob("step-*"))
            found.append(load_file(last / "model" / "model.safetensors"))
    start = warm_start(Strings())
    assert start is not None
    plain, shifted, before = (*found, load_file(start / "model.safetensors"))
    return {
        "apart": max(float((plain[n].double() - shifted[n].double()).abs().max()) for n in plain),
        "moved": max(float((plain[n].double() - before[n].double()).abs().max()) for n in plain),
    }


# ------------------------------------------------------------------ methods

_BARRED = ("reward.beta", "reduce")
TINY: dict[str, Any] = {
    **{path: value for path, value in RLOO_TINY.items() if path not in _BARRED},
    "sample.prompts": 64,
    "sample.group": 2,
    "update.minibatches": 2,
}
CONTROL: dict[str, Any] = {
    **{path: value for path, value in RLOO_CONTROL.items() if path not in _BARRED},
    "sample.prompts": 16,
    "sample.group": 2,
    "surrogate.beta": 0.0,
    "update.minibatches": 2,
}
PRESETS = {"tiny": TINY, "control": CONTROL}

CLAIM = Learns(
    "Where a reward adds something of its own to all answers to a prompt, ten times as much as answers differ, "
    "Pairwise PPO learns more from as many answers than PPO, whose critic has to learn what is added.",
    over="ppo:sample.prompts=128,sample.group=1",
    world="strings",
    budget="episodes=6400",
    settings={"world.pays": "proxy", "world.bonus": 0.0, "world.proxy_offset": 10.0},
    also=("success", "true", "world:kl"),
    waives={"problems": SIX_PROMPTS},
)


def _published(joint: bool) -> Published:
    return {
        "arXiv 2310.00212, by notes on it": {
            "sample.group": 2,
            "surrogate.joint": joint,
            "surrogate.epsilon": 0.2,
            "surrogate.to": "reference",
        },
    }


@method("p3o@1", paper=110, base="rloo", presets=PRESETS, claim=CLAIM, published=_published(False))
def p3o() -> OnPolicy:
    """Pairwise PPO (arXiv 2310.00212), V1. ½·Σ_i min(A_iρ_i, A_i·clip(ρ_i)), A_i = sg((r̃_i − r̃_j)·ρ_j).

    A reward model that was fitted to comparisons is known up to something of each prompt's own, and what PPO does
    depends on that until its critic has learned it. Here two answers to a prompt are sampled, and only the difference
    of their rewards is used: r + δ(x) trains to the same weights as r. There is no critic and no step of its own
    inside of an answer; a ratio is of a whole answer, so one or two passes over a batch are enough. On policy it is
    RLOO with two answers. r̃ = r − β·log π/π_ref at the weights of now.

    `p3o-joint` is V2, one bound for both. β was varied in the paper; it, rates and batches are chosen here.
    """
    return rloo().but(
        sample=groups(prompts=128, group=2),
        reward=signal(),
        surrogate=pairwise(),
        update=adam(lr=1e-6, minibatches=4),
    )


@method(
    "p3o-joint@1",
    paper=110,
    base="p3o",
    claim=Identity(
        "Trained on rewards to each of which a number of its prompt is added, ten times as large as answers differ, "
        "Pairwise PPO comes to the same weights.",
        apart,
        within=1e-6,
    ),
    published=_published(True),
)
def p3o_joint() -> OnPolicy:
    """Pairwise PPO (arXiv 2310.00212), V2. ½·min(Az, A·clip(z, z_old ± ε)), z = log π(y_1)/π(y_2), A = sg(Δ·ρ_1ρ_2).

    One bound, on how far the two answers have moved apart: a pair whose answers have moved together is not cut.
    """
    return p3o().but(surrogate=pairwise(joint=True))
