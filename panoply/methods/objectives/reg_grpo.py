"""Regressive GRPO: log-ratios regressed on advantages, and prompts that are made easier or harder until they teach."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from panoply.batch import Batch, Values
from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import CONTROL as GRPO_CONTROL
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import numpy_rng
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import LIMITS, greedy_groups, groups
from panoply.slots.sample.repair import episodes_of, replaced, tasks_of
from panoply.slots.surrogate.ratios import needs_against, ratio_stats
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task


@part(
    "surrogate",
    equation="−mean_group (A − {scale}·Â)²,  Â = (s − mean_group(s)) / √(var_group(s) + {floor}²),  s = Σ log ρ",
    unit="group",
    idle="advantage",
    needs=needs_against,
    bounds=dict.fromkeys(("scale", "floor", "weight"), "above 0"),
)
def standardised(
    batch: Batch,
    *,
    scale: float = 1.0,
    floor: float = 1.0,
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """The log-ratios of a group's episodes, standardised, regressed on their advantages (arXiv 2506.07464).

    Of max E R − β·KL(π‖π_old) the solution has R = β·log π/π_old + β·log Z; standardised over a group, neither β nor Z
    is left. There is no clip, and so no episode without a gradient. What is surprising: where the policy has not moved,
    all s are 0, and so is their deviation; the floor stands in its place, and the first gradient is REINFORCE's times
    2·scale/floor. Far beyond the floor only the shape of s counts and not its size, so the floor says how far a group
    moves, in nats of whole episodes. A group whose advantages are all 0 is left out: it would be drawn together.

    scale: what the standardised log-ratio is multiplied with
    floor: the deviation of log-ratios below which they are not blown up to 1
    """
    episodes = batch.by("episode")
    peers = Segments(episodes.first(batch["group"]))
    advantage, moved = episodes.mean(batch["advantage"]), batch.episode_log_ratio(against)
    deviation = (peers.var(moved) + floor**2).sqrt()
    predicted = (moved - peers.rows(peers.mean(moved))) / peers.rows(deviation)
    missed = peers.mean((advantage - scale * predicted) ** 2)
    taught = peers.max(advantage.abs()) > 0
    stats = {**ratio_stats(batch, against), "log_ratio_std": peers.std(moved.detach())}
    return -missed.where(taught, torch.zeros_like(missed)), stats


# ------------------------------------------------------------------ difficulty


def _noisy(task: Task, share: float, vocabulary: int, *seed: object) -> Task:
    """The same problem with some of its prompt's tokens replaced by any others; it is graded as it was."""
    rng, prompt = numpy_rng("noise", *seed, task.id), list(task.prompt)
    for at in rng.permutation(len(prompt))[: round(share * len(prompt))].tolist():
        prompt[at] = int(rng.integers(vocabulary))
    return dataclasses.replace(task, prompt=tuple(prompt))


def _equation(held: Any) -> str:
    easier, harder = f"{held.hints:g}·|Δ| of the answer given", f"{held.noise:g}·Δ of the prompt noise"
    return (
        f"{held.prompts} prompts × {held.group} episodes, asked again where |Δ| > {held.band:g}: {easier} if Δ < 0, "
        f"{harder} if Δ > 0;  Δ = a group's mean {held.name} − that of the last {held.window} steps"
    )


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return 2 * sampled, trained


def _impossible(held: Any, method: Any) -> list[Finding]:
    found = greedy_groups(held, method)
    if not found and held.hints == 0 and held.noise == 0:
        return [("hints", "with noise 0 as well nothing is made easier or harder: take sample=groups")]
    return found


@part(
    "sample",
    equation=_equation,
    needs=lambda held: frozenset({"world:verify", "world:hint", f"signal:{held.name}"}),
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "temperature", "max_tokens")},
        **dict.fromkeys(("band", "hints", "noise"), "at least 0"),
        "window": "at least 1",
    },
    impossible=_impossible,
    cost=_cost,
    state=lambda: {"rewards": []},
)
def adjusted(
    state: dict[str, Any],
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    window: int = 10,
    band: float = 0.1,
    hints: float = 1.0,
    noise: float = 0.1,
    name: str = "success",
) -> tuple[dict[str, Any], Experience]:
    """Groups that are harder or easier than usual are asked again with a hint, or with noise (arXiv 2506.07464).

    What is usual is the mean of the last steps, before anything was adjusted; in the first step nothing is. The new
    episodes stand in the place of the old ones and are learned under the prompt they were given. Relative to what is
    usual: where nothing at all is solved, nothing is hard, and no hint is given.

    window: steps over which a usual reward is the mean
    band: how far a group may be off and stay as it is
    hints: the share of the reference answer that is given, for each |Δ| of 1 below the usual; in whole steps
    noise: the share of the prompt's tokens that are replaced at random, for each Δ of 1 above it
    name: the signal by which groups are judged
    """
    tasks = collect.tasks(prompts)
    found = collect.episodes(tasks, group, temperature=temperature, max_tokens=max_tokens)
    episodes = found.by("episode")
    peers = Segments(episodes.first(found["group"]))
    rewards = peers.mean(episodes.sum(found[f"signal:{name}"].double()))
    usual, step = state["rewards"], collect.version
    kept = {"rewards": [*usual, float(rewards.mean())][-window:]}
    off = rewards - (sum(usual) / len(usual)) if usual else torch.zeros_like(rewards)
    hard, easy = (off < -band) & (hints > 0), (off > band) & (noise > 0)
    again = peers.keys[hard | easy]
    collect.notes = {"hinted": float(hard.double().mean()), "noised": float(easy.double().mean())}
    if not len(again):
        return kept, found
    words = collect.world.tokenizer.vocab_size
    asked = [
        collect.world.hint(task, min(1.0, -hints * by))
        if by < 0
        else _noisy(task, min(1.0, noise * by), words, collect.seed, step)
        for task, by in zip(tasks_of(found, again, tasks), off[hard | easy].tolist(), strict=True)
    ]
    more = collect.episodes(asked, group, into=again, temperature=temperature, max_tokens=max_tokens)
    return kept, replaced(found, episodes_of(found, again), more)


# ------------------------------------------------------------------ methods

_BARRED = ("surrogate.high", "reduce")
TINY = {
    **{path: value for path, value in GRPO_TINY.items() if path not in _BARRED},
    "sample.prompts": 16,
    "update.epochs": 4,
}
CONTROL = {
    **{path: value for path, value in GRPO_CONTROL.items() if path not in _BARRED},
    "update.minibatches": 1,
}
PUBLISHED: Published = {
    "arXiv 2506.07464, by two independent notes": {
        "surrogate.scale": 1.0,
        "surrogate.against": "behaviour",
        "credit.baseline": "mean",
        "credit.scale": "std",
        "sample.group": 8,
        "regularise.kl.weight": 0.04,
    },
}
"""The KL's weight is said to be like GRPO's. Neither the paper's tables nor its code could be read."""


@method(
    "reg-grpo@1",
    paper=160,
    base="grpo",
    presets={"tiny": TINY, "control": CONTROL},
    claim=Learns(
        "With four passes over each batch, log-ratios regressed on advantages learn more than GRPO's clip.",
        over="grpo:update.epochs=4",
        world="chain:frontier",
        budget="episodes=5120",
        also=("success", "mean:entropy", "mean:ratio_off"),
    ),
    published=PUBLISHED,
)
def reg_grpo() -> OnPolicy:
    """Reg-GRPO (DeepVideo-R1, arXiv 2506.07464): (A − Â)², Â the standardised log-ratio of an answer in its group.

    GRPO's clip and minimum leave answers without a gradient once they have moved; here each is regressed on its
    advantage, and its gradient fades as it gets there. It fixes which answers gain on which, and not how much all of
    them together: the KL term to the reference holds the rest. It is a penalty, though some notes print it with a minus
    inside of a loss. Long answers have larger sums of log-ratios, and are regressed as a whole all the same. The floor
    under the deviation is chosen here: without it the first step would divide 0 by 0.
    """
    return grpo().but(
        sample=groups(prompts=16, group=8),
        surrogate=standardised(),
        regularise=(kl(weight=0.04, estimator="k3"),),
        update=adam(lr=1e-6, epochs=4),
    )


@method(
    "deepvideo-r1@1",
    paper=160,
    base="reg-grpo",
    presets={"tiny": TINY},
    claim=Learns(
        "With prompts made easier or harder by how far their group is from the usual, fewer groups are without a "
        "difference than in Reg-GRPO at as many decisions, and held-out success is at most a tenth less.",
        over="reg-grpo",
        world="chain:frontier",
        budget="decisions=120k",
        metric="mean:degenerate_groups",
        lower=True,
        best=0.0,
        shows=(Shows("mean:degenerate_groups", least=0.3),),
        keeps={"success": 0.1},
        also=("area", "mean:hinted", "mean:noised"),
        tune={},
        fixed="tuned for groups that differ, the rate that learns least would win: both have the preset's",
    ),
    published=PUBLISHED,
)
def deepvideo_r1() -> OnPolicy:
    """DeepVideo-R1 (arXiv 2506.07464): Reg-GRPO on prompts that are brought to a difficulty that can be learned from.

    Groups that earn less than usual are asked again with the beginning of an answer, those that earn more with noise
    in the prompt, each in proportion. The authors put noise on frames of video and take hints from traces that
    succeeded; here noise replaces tokens of the prompt, and a hint is the beginning of the world's reference answer.
    Window, band and strengths are reconstructed.
    """
    return reg_grpo().but(sample=adjusted())
