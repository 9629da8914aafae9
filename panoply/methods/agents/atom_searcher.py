"""Atom-Searcher: a judge's word on single thoughts, mixed with the outcome and less and less of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.evidence.claims import Ranks
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Finding, Part, part, show_value
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import linear

_FADING = linear()


def _needs(held: Any) -> frozenset[str]:
    used = {held.outcome, *((held.malformed,) if held.malformed else ())}
    used |= {held.process} if held.first else set()
    return frozenset({"world:verify", *(f"signal:{name}" for name in used)})


def _inert(held: Any, method: Any) -> list[Finding]:
    nobody = [(name, "the judge is not listened to (first is 0)") for name in ("process", "fades")]
    return (nobody if held.first == 0 else []) + (
        [] if held.malformed else [("otherwise", "nothing counts as malformed")]
    )


@part(
    "reward",
    equation=lambda held: (
        f"α·{held.process} + (1 − α)·{held.outcome},  α = {held.first:g}·({show_value(held.fades)})"
        + (f"; {held.otherwise:g} where {held.malformed}" if held.malformed else "")
    ),
    needs=_needs,
    inert=_inert,
    bounds={"first": "from 0 to 1", "fades": "from 0 to 1", "otherwise": "any number"},
)
def mixed(
    experience: Experience,
    *,
    process: str = "process",
    outcome: str = "success",
    first: float = 0.5,
    fades: float | Part = _FADING,
    malformed: str | None = "invalid",
    otherwise: float = -1.0,
) -> Tensor:
    """A judge's score of how an episode went and its outcome, in shares that change with the steps of the run.

    process     the signal that is the judge's, the mean over what it has looked at
    first       α at the beginning
    fades       what α is multiplied with: a schedule, or 1, and the mixture stays as it is
    malformed   the signal of turns without grammar; an episode that has one earns `otherwise`, whatever else
    """
    alpha = first and first * float(fades)  # type: ignore[arg-type]  # of a schedule, what it says in this step
    earned = (1 - alpha) * experience[f"signal:{outcome}"].float()
    if alpha:
        earned = earned + alpha * experience[f"signal:{process}"].float()
    if malformed is None:
        return earned
    episodes = experience.by("episode")
    broken = episodes.rows(episodes.sum(experience[f"signal:{malformed}"].float()) > 0)
    return torch.where(broken, otherwise * episodes.is_last(), earned)


CLAIM = Ranks(
    "Where success is rare and a judge of single calls, taken in by length, can be asked, a share of its word that "
    "fades learns more from as many episodes than the outcome alone, and ends with no less success than a share that "
    "stays.",
    ("", "outcome alone=atom-searcher:reward.first=0", "a share that stays=atom-searcher:reward.fades=1.0"),
    world="tools:hard",
    budget="episodes=7680",
    settings={"world.process": (0.1, 0.3)},
    leads=True,
    margins=(0.0, 0.02),
    also=("success", "calls"),
)

PUBLISHED: Published = {
    "reported of arXiv 2508.12800, its reward": {
        "reward.first": 0.5,
        "reward.fades": "linear",
        "reward.otherwise": -1.0,
    },
    "reported of arXiv 2508.12800, its experiments (DeepResearcher's setting)": {
        "sample.group": 16,
        "update.lr": 1e-6,
    },
}
"""α and −1 are reconstructed: the released repository has no training code."""


@method(
    "atom-searcher@1",
    paper=184,
    base="grpo",
    world="tools",
    presets={"tiny": {**TINY, "sample.prompts": 16}},
    claim=CLAIM,
    published=PUBLISHED,
)
def atom_searcher() -> OnPolicy:
    """Atom-Searcher (arXiv 2508.12800): a judge scores single thoughts, and counts the less the further training is.

    An agent marks small units of its thinking, a judge scores each, and the mean is mixed with the outcome:

        R = α·R_atom + (1 − α)·R_outcome,  α = ½·(1 − step / steps);  −1 where the format is broken

    At first, when hardly any episode succeeds, the judge says which were on the way; in the end only the outcome
    counts, so that what the judge is taken in by pays no longer. Despite the name all tokens of an episode share one
    advantage. What the judge adds to it depends on how much its scores differ in a group, not on α alone.

    The judge is the world's signal `process` (`tools` with `world.process=NOISE,BIAS`, or any other that is named). It
    must not know the answer, or it is an outcome itself. Imitation of marked traces comes before, as `sft`; the
    paper's adaptive entropy regulation is not described well enough to be built (`regularise.entropy` is a plain one).
    """
    return grpo().but(
        sample=groups(prompts=16, group=16),
        reward=mixed(),
        regularise=(kl(weight=0.001, estimator="k3"),),
    )
