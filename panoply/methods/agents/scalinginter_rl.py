"""ScalingInter-RL: the turns an episode may have grow during training."""

from __future__ import annotations

from panoply.evidence.claims import Learns, Shows
from panoply.methods.base.grpo import TINY, grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import staged

CLAIM = Learns(
    "Where tasks take three turns to fifteen, episodes that may have 6, then 13 and then 20 turns learn more from as "
    "many decisions than episodes that may have 20 from the start.",
    method="scalinginter-rl:sample.turns.every=6",
    over="grpo",
    world="keydoor:wide",
    budget="decisions=4k",
    settings={"sample.prompts": 4, "sample.group": 4},
    also=("success", "mean:truncated", "mean:episode_length"),
    shows=(Shows("mean:episode_length", least=6),),
    reworded="With 60,000 decisions GRPO filled 99 % of the room, with 24,000 95 % and with 10,000 94 %; now there are "
    "4,000, in steps of sixteen episodes.",
)


PUBLISHED: Published = {
    "reported of WooooDyy/AgentGym-RL, examples/train/ScalingInter-RL (BabyAI)": {
        "sample.prompts": 32,
        "sample.group": 4,
        "sample.turns.values": (6, 13, 20),
        "sample.turns.every": 100,
        "regularise.kl.weight": 0.001,
        "regularise.kl.estimator": "k3",
        "update.lr": 1e-6,
        "update.epochs": 2,
        "update.minibatches": 4,
    },
}
"""A mini-batch is 8 of the step's 32 tasks."""
SCALING_TINY = {
    **TINY,
    "sample.group": 4,
    "sample.turns.every": 50,
    "update.epochs": 1,
    "update.minibatches": 1,
}


@method(
    "scalinginter-rl@1",
    paper=213,
    base="grpo",
    world="keydoor:wide",
    presets={"tiny": SCALING_TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("curriculum",),
)
def scalinginter_rl() -> OnPolicy:
    """ScalingInter-RL of AgentGym-RL (arXiv 2509.08755). An episode of step s has at most h[min(⌊s/Δ⌋, K − 1)] turns.

    A small cap at first: what can be done in few turns is learned from many short episodes. Then the cap rises in
    stages, and what takes longer comes into reach. The authors found that a large cap from the start is quicker at
    first and collapses, and that a small one stays behind. Everything else is GRPO, and the schedule
    (`sample.turns=staged`) can be had with any method that samples groups. Evaluation always has the world's own cap.

    An episode that is cut off is truncated, not over: it earns what it has earned, and a critic would look on. Compare
    at equal decisions, since short episodes are cheap (`--budget decisions=…`). The caps are those of BabyAI; the
    authors' others are 10, 20, 30 (SciWorld, TextCraft), 8, 12, 15 (WebArena) and 5, 8, 10 (SearchQA). In the released
    code the cap after a resumption is one step off around a border; here it follows from the step. The servers through
    which AgentGym reaches its environments are not here.
    """
    return grpo().but(
        sample=groups(prompts=32, group=4, turns=staged(values=(6, 13, 20), every=100)),
        regularise=(kl(weight=0.001, estimator="k3"),),
        update=grpo().update.but(epochs=2, minibatches=4),
    )
