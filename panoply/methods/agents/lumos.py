"""Lumos: a planner that says subgoals and a grounder that does them, each a model of its own."""

from __future__ import annotations

from collections.abc import Mapping

from panoply.evidence.claims import Ranks
from panoply.methods.base.sft import TINY, sft
from panoply.recipes import Recipe, Stage
from panoply.regimes import Dataset
from panoply.registry import Published, method, recipe
from panoply.slots.schedule.schedules import linear
from panoply.slots.update.optimisers import adam

PUBLISHED: Published = {
    "allenai/lumos, scripts/train/finetune_llama2_plan_iterative.sh": {
        "data.batch": 128,
        "update.lr": 2e-5,
        "update.weight_decay": 0.0,
        "update.schedule": "linear",
        "update.schedule.warmup": 0.03,
    },
    "reported of arXiv 2311.05657, the loss": {"reduce": "token_mean"},
}
"""The grounder's script has the same, and both make two epochs. Their loss is a mean over two dialogues at a time, and
then over those means; here it is one mean over a batch."""


@method(
    "lumos-module@1",
    paper=102,
    base="sft",
    world="errands",
    presets={
        "tiny": {"update.lr": TINY["update.lr"], "update.beta2": TINY["update.beta2"], "data.batch": 32}
    },
    published=PUBLISHED,
)
def lumos_module() -> Dataset:
    """One module of Lumos (arXiv 2311.05657) learns: imitation of what it says itself, in all turns of a dialogue.

        L = − Σ_j 1[x_j is said by the module] log π(x_j | x_<j) / Σ_j 1[x_j is said by the module]

    What other modules said, and what came of actions, are prompts: there is no loss on them and they are in no count.
    Which module it is, the world says: `world.module=planner` or `grounder`. The recipe `lumos` trains both.
    """
    return sft().but(update=adam(lr=2e-5, schedule=linear(warmup=0.03)))


GOLD = {"world.slip": 0.0}
"""Annotations are those of a teacher who does not slip."""
STEPS = 12
"""Of each model, so that all see the same annotated tasks."""

CLAIM = Ranks(
    "On errands in orders that were never seen, behind doors that stick, a planner that sees what came of its subgoals "
    "and a grounder that sees one subgoal at a time do more than one model that learned from the same annotations, "
    "whether it says the subgoal first or not, and than a planner and a grounder that work in one pass.",
    ("", "integrated", "direct", "one pass=lumos:world.form=onetime"),
    "errands",
    f"act.steps={STEPS}",
    metric="success",
    leads=True,
    tune={},
    fixed="all models imitate annotations of the same tasks, at the rate of sft for such a model",
    also=("held_out_greedy",),
)


@recipe("lumos@1", paper=102, world="errands", claim=CLAIM)
def lumos() -> Recipe:
    """Lumos (arXiv 2311.05657): planner and grounder, two models that learn by imitation from annotated subgoals.

    In turns (Lumos-I) a planner says the next subgoal after what came of those before, a grounder makes actions of it,
    and these are carried out:

        s_i ~ π_plan(T, s_1, e_1, …, s_{i−1}, e_{i−1}),   A_i ~ π_ground(T, s_1, A_1, …, s_i),   e_i = exec(A_i)

    In one pass (Lumos-O, `world.form=onetime`) all subgoals are said first, S ~ π_plan(T), all actions follow from
    them, A ~ π_ground(T, S), and nobody sees what came of anything. Each is a `lumos-module`, whose loss is on what it
    says itself.

    What is surprising: nothing is learned by trial and error, and neither module knows what the other does. A grounder
    that sees no subgoal but its own cannot mix up orders, and a planner that does not see addresses has nothing else
    to learn; orders that were never annotated are then as good as others.

    The grounder is trained first and opens doors for the planner whenever that is judged, by what it finds likeliest;
    demonstrations are carried out as they were annotated. Where it differs from the paper: a grounder there reads the
    task and the earlier subgoals with their actions, too, which have no bearing on an action here, and prompts leave
    them out; a planner reads its last subgoal and result alone, which is all that matters. Annotations are made by
    GPT-4 there, from solutions of benchmarks; here they are the world's own (`slip` is 0), so neither conversion nor
    bad annotations are studied. One world is one kind of task: training on several together, and transfer to new
    kinds, is not rebuilt. All models start from one that knows every module's form and the habits of a careless
    teacher. Every model sees the same annotated tasks; both modules together then have twice the weights, and the
    steps, of one policy, as in the paper. Steps, and the batch and rate of small models, are chosen here.
    """
    return Recipe((_stage("ground", "grounder"), _stage("act", "planner", {"world.grounder": "@ground"})))


@recipe("integrated@1", world="errands")
def integrated() -> Recipe:
    """One model that says a subgoal and then does it, from the same annotations as the modules of `lumos`."""
    return Recipe((_stage("act", "integrated"),))


@recipe("direct@1", world="errands")
def direct() -> Recipe:
    """One model that does what is to be done without saying it first, from the tasks that `lumos` learns from."""
    return Recipe((_stage("act", "whole"),))


def _stage(name: str, module: str, more: Mapping[str, str] | None = None) -> Stage:
    settings = {**GOLD, "world.module": module, **(more or {})}
    return Stage(name, "lumos-module", settings, {"steps": STEPS, "model": "start"})
