"""RA3: an expert's text gets the thoughts that make its next line likelier, and is then imitated with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import part
from panoply.recipes import Recipe, Stage
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, recipe
from panoply.slots.credit.groups import group
from panoply.slots.sample.groups import greedy_groups
from panoply.worlds.world import earned

if TYPE_CHECKING:
    from panoply.data_folder import Row
    from panoply.loops.making import Maker
    from panoply.rollout.text import Collector

AT_ONCE = 256
"""Texts that are read together."""

# ------------------------------------------------------------------ E: which thoughts make the expert likelier


@part(
    "sample",
    equation="before every line of {prompts} expert texts {group} marks at temperature {temperature}",
    needs=lambda held: frozenset({"world:text", "world:lines", "acts@reference"}),
    gives={"signal:likelihood"},
    bounds={"prompts": "at least 1", "group": "at least 1", "temperature": "above 0 to 100"},
    impossible=greedy_groups,
)
def marks(collect: Collector, *, prompts: int = 16, group: int = 8, temperature: float = 1.0) -> Experience:
    """Whether to go on or to think first, and what: several marks z of each line's state, drawn by the policy.

    States are prefixes of an expert's text with the policy's own marks in it. How likely the line is that follows is
    asked of the start of this run, which stays as it is: asked of itself, the policy would chase its own tail.
    """
    from panoply.rollout.lines import read_through

    read = read_through(collect, collect.tasks(prompts), group, temperature=temperature, by="reference")
    return Experience.mix(read.found)


@part(
    "reward",
    equation="log π(next line | text, z) − {cost}·[z thinks]",
    needs={"signal:likelihood", "signal:commented"},
    bounds={"cost": "at least 0"},
)
def next_line(experience: Experience, *, cost: float = 0.05) -> Tensor:
    """How likely the expert's next line is after a mark, less a fixed price for every mark that is a thought.

    cost   in nats, c: what a prior that likes to keep an intent makes of every new one
    """
    return experience["signal:likelihood"] - cost * experience["signal:commented"]


PUBLISHED: Published = {"arXiv 2509.25810": {"reward.cost": 0.05}}
"""The paper tried 0.01 and 0.2, too. Its code is not public, and how E is optimised is reconstructed."""
TINY = {
    **{path: value for path, value in GRPO_TINY.items() if not path.startswith("regularise")},
    "update.lr": 1e-3,
    "update.schedule.warmup": 0,
    "run.steps": 10,
}
"""Few steps, and large ones."""


@method(
    "ra3-intents@1",
    base="grpo",
    presets={"tiny": TINY},
    published=PUBLISHED,
    tags=("reward=implicit", "reward=process"),
)
def ra3_intents() -> OnPolicy:
    """The E-step of RA3 (arXiv 2509.25810): learn when a thought makes the expert's next line likelier.

    r = log π(a_t | s_t, z_t) − c·[z_t is a thought], A = r − mean over marks of the same state, and a policy gradient
    on the marks alone. π is the start of the run, frozen. By the paper a few steps are enough.
    """
    return grpo().but(
        sample=marks(prompts=16, group=8),
        reward=next_line(),
        credit=group(baseline="mean", scale="none"),
        regularise=(),
    )


# ------------------------------------------------------------------ M: the text with its thoughts


@part(
    "make",
    equation=lambda held: (
        f"{held.prompts} expert texts, " + (f"marked by {held.policy}" if held.marks else "as they are")
    ),
    needs={"world:text", "world:lines"},
    bounds={"prompts": "at least 1", "temperature": "above 0 to 100"},
    inert=lambda held, method: (
        [] if held.marks else [(name, "texts stay as they are") for name in ("policy", "temperature")]
    ),
)
def marked(
    maker: Maker,
    *,
    policy: str = "start",
    prompts: int = 640,
    marks: bool = True,
    temperature: float = 1.0,
) -> Iterator[Row]:
    """An expert's texts with a mark before every line, each drawn before its line was seen. In numbers: `commented`.

    marks   whether there are any; without, the texts are as the expert wrote them, for next-token prediction
    """
    from panoply.rollout.lines import read_through

    collect = maker.collect(policy)
    for first in range(0, prompts, AT_ONCE):
        places = [collect.place(i) for i in range(first, min(first + AT_ONCE, prompts))]
        tasks = [collect.task(place) for place in places]
        if marks:
            texts = read_through(collect, tasks, temperature=temperature).texts
        else:
            texts = [collect.world.gold(task) for task in tasks]
        for place, task, text in zip(places, tasks, texts, strict=True):
            commented = earned(collect.world.grade(task, text)["commented"])
            yield maker.answer(place, task, text, commented=commented)


# ------------------------------------------------------------------ the recipe

IMITATE = {"data": "stored", "data.batch": 64, "update.schedule": "constant"}
ROUNDS, FIND, LEARN, TRY = 2, 10, 5, 10
"""Rounds of E and M, the steps of each, and of the trial and error after them. E has settled after ten, not after five;
more imitation than this is all it takes to solve nearly everything, with marks or without."""


def _round(number: str = "", **start: str) -> tuple[Stage, ...]:
    """E, the texts that it marks, and M, which goes on from E."""
    intents, texts = f"intents{number}", f"mark{number}"
    return (
        Stage(intents, "ra3-intents", {}, {"steps": FIND, **start}),
        Stage(texts, make=marked(policy=f"@{intents}")),
        Stage(
            f"imitate{number}",
            "sft",
            {**IMITATE, "data.folder": f"@{texts}"},
            {"steps": LEARN, "model": f"@{intents}"},
        ),
    )


CLAIM = Learns(
    "After two rounds of thoughts that make an expert's next line likelier, and imitation of its texts with them, "
    "trial and error gets further than after imitation of the texts as they are, in as many steps in all.",
    over="next tokens=next-token",
    world="registers",
    budget="steps=40",
    metric="success",
    tune={},
    fixed="recipes have a rate for each stage, the same on both sides; of three rates of imitation it is the one "
    "with which next-token prediction got furthest",
    also=("area", "world:nats", "world:thinks", "world:informs", "commented", "total_decisions"),
    shows=(Shows("success", least=0.2, most=0.95),),
)


@recipe("ra3@1", paper=105, world="registers", claim=CLAIM)
def ra3() -> Recipe:
    """RA3 (arXiv 2509.25810): mid-training that finds the intents behind an expert's text, and imitates both.

    Text is a sequence of lines a_t, each chosen with an intent z_t that the expert did not write down. With a prior
    that mostly keeps the last intent, log p(text) ≥ E_q[Σ_t log π(a_t | s_t, z_t) − KL(q ‖ p)], and the KL is about a
    fixed price c for every intent that is new. So a mark before each line either goes on (`.`) or thinks (`#` and a
    word, then `.`). E: trial and error on the marks, r_t = log π(a_t | s_t, z_t) − c·[z_t thinks], against the mean of
    other marks of the same state, π frozen. M: imitation of (…, z_t, a_t, …), z drawn by what E learned. Two rounds,
    and then ordinary GRPO.

    What is surprising: a mark never sees its line, so that a thought can tell no more than the text before it does; it
    gains where working something out first makes what is known easier to use. The reward is the very next line's and
    not that of all that follows, which would drown it in noise. In the paper a model thinks everywhere at c = 0.01, on
    fewer than 0.4 of lines at 0.05, and nearly nowhere at 0.2, which is next-token prediction; a text of one line would
    be BRiTE. In `registers` a true comment is worth more than a nat, and nearly every line gets one.

    Reconstructed: the optimiser of E, rounds, steps and rates; that M goes on from E's weights; and that marks of a
    state are credited for their own line alone (γ = 0). The price stands for the whole KL term: its entropy is not
    added (`intents.regularise=entropy` does). In the paper a mark is a new line, or one that begins with a comment
    sign, in a language model's own words; here a thought is one digit, whose meaning is the policy's affair. The
    theory's bounds on regret are not computed.
    """
    return Recipe(
        (
            *_round(),
            *_round("-2", model="@imitate"),
            Stage("try", "grpo", {}, {"steps": TRY, "model": "@imitate-2"}),
        )
    )


@recipe("next-token@1", world="registers")
def next_token() -> Recipe:
    """What RA3 is compared with: next-token prediction on the same texts as they are, then GRPO, in as many steps."""
    steps = ROUNDS * (FIND + LEARN)
    return Recipe(
        (
            Stage("mark", make=marked(marks=False)),
            Stage("imitate", "sft", {**IMITATE, "data.folder": "@mark"}, {"steps": steps}),
            Stage("try", "grpo", {}, {"steps": TRY, "model": "@imitate"}),
        )
    )
