"""Lumos: a planner that says subgoals and a grounder that does them, each a model of its own."""

from __future__ import annotations

from panoply.evidence.claims import Ranks
from panoply.recipes import Recipe, Stage
from panoply.registry import recipe

FRESH = {"model": "fresh"}
GOLD = {"world.slip": 0.0, "data.batch": 32, "update.schedule.warmup": 0.03}
"""Annotations are those of a teacher who does not slip."""
PLAN, GROUND, ALONE = 120, 120, 240
"""Steps of the two modules, and of one policy that learns both."""

CLAIM = Ranks(
    "On errands in orders that were never seen, behind doors that stick, a planner that sees what came of its subgoals "
    "and a grounder that sees one subgoal at a time do more than one model that learned both from the same "
    "annotations, whether it says the subgoal first or not, and than a planner and a grounder that work in one pass.",
    ("", "integrated", "direct", "one pass=lumos:world.form=onetime"),
    "errands",
    f"steps={ALONE}",
    metric="success",
    leads=True,
    tune={},
    fixed="all are imitation of the same annotations, at the rate of sft for such a model",
    also=("held_out_greedy",),
)


@recipe("lumos@1", paper=102, world="errands", claim=CLAIM)
def lumos() -> Recipe:
    """Lumos (arXiv 2311.05657): planner and grounder, two models that learn by imitation from annotated subgoals.

    In turns (Lumos-I) a planner says the next subgoal after what came of those before, a grounder makes actions of it,
    and these are carried out:

        s_i ~ π_plan(T, s_1, e_1, …, s_{i−1}, e_{i−1}),   A_i ~ π_ground(T, s_i),   e_i = exec(A_i)

    In one pass (Lumos-O, `world.form=onetime`) all subgoals are said first, S ~ π_plan(T), all actions follow from
    them, A ~ π_ground(T, S), and nobody sees what came of anything. Both learn by −mean log π over what they say
    themselves: what the other module said, and what came of actions, are prompts.

    What is surprising: nothing is learned by trial and error, and neither module knows what the other does. A grounder
    that sees no subgoal but its own cannot mix up orders, and a planner that does not see addresses has nothing else
    to learn; orders that were never annotated are then as good as others.

    The grounder is trained first and opens doors for the planner whenever that is judged; demonstrations are carried
    out as they were annotated. The paper shows a grounder the earlier subgoals and their actions, too; here they
    have no bearing on an action, and prompts leave them out. Its annotations are made by GPT-4 from solutions of benchmarks;
    here they are the world's own (`slip` is 0). Two epochs at a rate of 2e-5 on models of 7 billion weights are
    published, with a warm-up of 3 %, a linear schedule, and batches of 128; steps and batches of 32 are chosen here.
    """
    ground = Stage("ground", "sft", {**GOLD, "world.module": "grounder"}, {**FRESH, "steps": GROUND})
    plan = {**GOLD, "world.module": "planner", "world.grounder": "@ground"}
    return Recipe((ground, Stage("plan", "sft", plan, {**FRESH, "steps": PLAN})))


@recipe("integrated@1", world="errands")
def integrated() -> Recipe:
    """One model that says a subgoal and then does it, from the same annotations as `lumos` and as many steps in all."""
    settings = {**GOLD, "world.module": "integrated"}
    return Recipe((Stage("learn", "sft", settings, {**FRESH, "steps": ALONE}),))


@recipe("direct@1", world="errands")
def direct() -> Recipe:
    """One model that does what is to be done without saying it first, in as many steps as both modules of `lumos`."""
    settings = {**GOLD, "world.module": "whole"}
    return Recipe((Stage("learn", "sft", settings, {**FRESH, "steps": ALONE}),))
