"""Advantage Shaping Policy Optimization: a small bias of advantages makes an agent call its tool earlier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.dapo import TINY as DAPO_TINY
from panoply.methods.base.dapo import dapo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reward.shaping import overlong, verdict
from panoply.slots.sample.dynamic import dynamic

_GROUP, _VERDICT = group(), verdict()


def standing_out(experience: Experience, name: str, where: str) -> tuple[Tensor, Tensor, Tensor, Segments]:
    """Of each episode the statistic; which are in C, right and with some `where`; how many that are, in groups.

    An episode that is alone in C is its own mean, and nothing comes of it.
    """
    episodes = experience.by("episode")
    statistic = episodes.sum(experience[f"signal:{name}"].float())
    right = episodes.sum(experience["signal:success"].float()) > 0
    right &= episodes.sum(experience[f"signal:{where}"].float()) > 0
    groups = Segments(episodes.first(experience["group"]))
    number = groups.sum(right.float())
    return statistic, right, number.clamp(min=1), groups


def _needs(held: Any) -> frozenset[str]:
    return frozenset({"world:verify", "signal:success", f"signal:{held.name}", f"signal:{held.where}"})


def _impossible(held: Any, method: Any) -> list[Finding]:
    return [] if held.credit.info.slot == "credit" else [("credit", "it gives no advantages")]


@part(
    "credit",
    equation=lambda held: (
        f"{held.credit.equation()}; right answers with {held.where}: "
        f"+ clip({held.delta:g}·({held.name} − mean)/mean |y|, ±{held.k:g}·|A|)"
    ),
    needs=_needs,
    impossible=_impossible,
    bounds={"delta": "any number", "k": "from 0 up to 1"},
)
def shaped(
    experience: Experience,
    *,
    credit: Part = _GROUP,
    name: str = "first_call",
    where: str = "calls",
    delta: float = -2.0,
    k: float = 0.7,
) -> Tensor:
    """Another credit's advantages, and for right answers a bias by how a signal stands to that of the others.

    credit   the credit that is shaped
    name     the signal, such as the number of tokens before the first call
    where    only answers that have earned some of this signal are shaped, and compared with
    delta    how strongly; below 0 less of the signal is better
    k        the bias is at most this share of |A|, so that it never turns an advantage around
    """
    advantage: Tensor = credit(experience)
    statistic, chosen, number, groups = standing_out(experience, name, where)
    episodes = experience.by("episode")

    def mean(x: Tensor) -> Tensor:
        return groups.rows(groups.sum(x * chosen) / number)

    bias = delta * (statistic - mean(statistic)) / mean(episodes.count.float()).clamp(min=1)
    most = k * advantage.abs()
    return advantage + torch.minimum(torch.maximum(episodes.rows(bias * chosen), -most), most)


@part(
    "reward",
    equation=lambda held: (
        f"{held.reward.equation()}; right answers with {held.where}: "
        f"+ {held.delta:g}·clip(z({held.name}), ±{held.most:g})"
    ),
    needs=_needs,
    bounds={"delta": "any number", "most": "above 0"},
)
def earlier(
    experience: Experience,
    *,
    reward: Part = _VERDICT,
    name: str = "first_call",
    where: str = "calls",
    delta: float = -0.2,
    most: float = 1.0,
) -> Tensor:
    """What the paper warns of: the same wish in the reward, δ·clip((p − mean p)/std p, ±most) for right answers.

    In a group of right answers alone, group credit takes away what they all have and divides by what is left, so that
    the wish becomes the whole of the signal, whatever δ is, and half of the right answers are punished.
    """
    earned: Tensor = reward(experience)
    statistic, chosen, number, groups = standing_out(experience, name, where)
    mean = groups.rows(groups.sum(statistic * chosen) / number)
    variance = groups.rows(groups.sum((statistic - mean) ** 2 * chosen) / (number - 1).clamp(min=1))
    z = torch.where(variance > 0, (statistic - mean) / variance.clamp(min=1e-12).sqrt(), 0.0)
    episodes = experience.by("episode")
    return earned + episodes.rows(delta * z.clamp(-most, most) * chosen) * episodes.is_last()


ROOM = {"reward.limit": 64, "reward.cache": 8}
"""Of an episode of `tools:dawdle`, so that its length is not what is punished."""
CLAIM = Learns(
    "Where a call may come sooner or later, a bounded bias of advantages towards early calls brings the first call "
    "forward, in tokens, against the same method without it, and loses at most three points of success.",
    over="dapo",
    world="tools:dawdle",
    budget="episodes=7680",
    settings=ROOM,
    metric="first_call",
    lower=True,
    keeps={"success": 0.03},
    also=("success", "calls"),
    shows=(Shows("first_call", least=0.5),),
    reworded="Without the bias the first call comes after 0.69 tokens at the end, where 0.8 had been asked for; "
    "half a token leaves enough to bring forward.",
)

PUBLISHED: Published = {
    "arXiv 2508.19201, §5.1": {
        "sample.prompts": 96,
        "sample.group": 8,
        "sample.temperature": 1.0,
        "credit.delta": -2.0,
        "credit.k": 0.7,
        "reward.limit": 16384,
    },
}
"""The conservative setting; the aggressive one is δ −2.5, k 0.9. Legends of figures say 1.5 and 2 for the same two."""


@method(
    "aspo-tir@1",
    paper=42,
    base="dapo",
    world="tools",
    presets={"tiny": {**DAPO_TINY, **ROOM}},
    claim=CLAIM,
    published=PUBLISHED,
)
def aspo_tir() -> OnPolicy:
    """Advantage Shaping Policy Optimization, for tool-integrated reasoning (arXiv 2508.19201).

    To make an agent call its tool earlier, the advantage of a right answer that calls is moved. After everything has
    been normalised,

        A ← A + clip(δ·(p − mean_C p) / mean_C |y|,  −k·|A|,  +k·|A|)

    with p the number of tokens before the first call, and C the right answers of the group that call. As k < 1, a right
    answer is never punished for being late, and in a group of right answers, where A is 0, nothing happens. The same
    wish in the reward does the opposite (`reward.aspo_tir/earlier`). Any signal may stand for p (`credit.name`).

    Tokens are the policy's own; the paper's also count what the interpreter says. Its theory, that a value of m bits
    which a tool gives has 2^−m of that chance without one, has no setting and no part here. Another work of the same
    short name (asymmetric importance sampling, arXiv 2510.06062) is a different one.
    """
    return dapo().but(
        sample=dynamic(prompts=96, group=8),
        reward=overlong(reward=verdict(), limit=16384, cache=4096),
        credit=shaped(),
    )
