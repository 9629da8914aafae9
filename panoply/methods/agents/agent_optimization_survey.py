"""A survey of how agents are optimised, as an order of the works that are here, and the loops that it names."""

from __future__ import annotations

from panoply.evidence.claims import Ranks, Shows
from panoply.recipes import Recipe, Stage
from panoply.registry import having, recipe, survey
from panoply.slots.make.answers import answered_by, first_difference, kept_by, relabel, solved_for
from panoply.tags import AGENTS, AXES

PROMPTS, ANSWERS, STEPS = 320, 8, 40
"""As many episodes as GRPO collects in as many steps with groups of eight for eight tasks."""
STORED = {"data": "stored", "update.schedule": "constant"}
PAIRS = {"data": "stored_pairs"}


@recipe("filtered-bc@1", world="keydoor:aliased", tags=("reward=rule", "optimisation=rejection"))
def filtered_bc() -> Recipe:
    """Filtered behaviour cloning: explore once, keep the episodes that earn enough, imitate them.

    L = −E[1(R ≥ least)·Σ_t log π(a_t | s_t)]. What fails teaches nothing, and what the start never does is not
    learned. `--set explore.name=progress --set explore.least=0.5` keeps by another signal.
    """
    return Recipe(
        (
            Stage("explore", make=kept_by(prompts=PROMPTS, answers=ANSWERS)),
            Stage("learn", "sft", {**STORED, "data.folder": "@explore"}, {"steps": STEPS}),
        )
    )


@recipe("iterated-filtered-bc@1", world="keydoor:aliased", tags=("reward=rule", "optimisation=rejection"))
def iterated_filtered_bc() -> Recipe:
    """Filtered behaviour cloning in four rounds: the policy that has learned explores the next tasks, and goes on.

    Each round has a quarter of the episodes and of the steps that `filtered-bc` has, and its data are of the latest
    policy alone: with better ones come more of them.
    """
    rounds = 4
    return Recipe(
        (
            Stage("explore", make=kept_by(policy="@last", prompts=PROMPTS // rounds, answers=ANSWERS)),
            Stage("learn", "sft", {**STORED, "data.folder": "@explore"}, {"steps": STEPS // rounds}),
        ),
        rounds=rounds,
    )


EXPLORE = Stage("explore", make=answered_by(prompts=PROMPTS, answers=ANSWERS))
OPPOSED = Stage("pairs", make=relabel(data="@explore", judge="success"))
OWN = ("data=rules", "feedback=program", "reward=rule", "reward=implicit")


@recipe("trajectory-dpo@1", world="keydoor:aliased", tags=OWN)
def trajectory_dpo() -> Recipe:
    """DPO on whole episodes of the starting policy, one that succeeds over one that fails at the same task.

    L = −log σ(β·[Σ_t log π/π₀(a_t^w) − Σ_t log π/π₀(a_t^l)]); sums are over what the policy said, not over what it was
    shown. A task that all episodes solve, or none, makes no pair. With pairs of the policy as it is, that is
    `online-dpo`.
    """
    align = Stage("learn", "dpo", {**PAIRS, "data.folder": "@pairs"}, {"steps": STEPS})
    return Recipe((EXPLORE, OPPOSED, align))


@recipe("step-dpo@1", world="keydoor:aliased", tags=(*OWN, "granularity=turn"))
def step_dpo() -> Recipe:
    """DPO on the first turn in which a success and a failure at the same task differ.

    All that comes before is the same in both and cancels. It is surprising that this may be too early: after a detour
    an episode can still succeed, and then the turn that decided lies behind the one that is blamed.
    """
    cut = Stage("cut", make=first_difference(data="@pairs"))
    align = Stage("learn", "dpo", {**PAIRS, "data.folder": "@cut"}, {"steps": STEPS})
    return Recipe((EXPLORE, OPPOSED, cut, align))


@recipe("sft-then-grpo@1", world="keydoor:aliased")
def sft_then_grpo() -> Recipe:
    """Imitation of 64 right episodes of a teacher, then GRPO: the hybrid of most agents.

    A recipe is any list of such stages on one policy; one on preferences may follow.
    """
    return Recipe(
        (
            Stage("shown", make=solved_for(prompts=64)),
            Stage("imitate", "sft", {**STORED, "data.folder": "@shown"}, {"steps": 10}),
            Stage("learn", "grpo", {}, {"model": "@imitate", "steps": STEPS}),
        )
    )


CLAIM = Ranks(
    "A quest of which the start solves one in fourteen, 2560 episodes and 40 steps for each: GRPO ends no worse than "
    "filtered imitation in four rounds, that no worse than DPO on own episodes, that no worse than filtered imitation "
    "once, and that ahead of imitation of a careless teacher.",
    (
        "rl=grpo:sample.prompts=8",
        "iterated=iterated-filtered-bc",
        "dpo=trajectory-dpo",
        "filtered=filtered-bc",
        "bc=sft:update.schedule=constant,data.batch=64",
    ),
    "keydoor:aliased",
    f"steps={STEPS}",
    settings={"run.held_out": 128},
    metric="success",
    margins=(0.05, 0.05, 0.05, 0.0),
    also=("area", "seconds"),
    shows=(Shows("success", least=0.1, most=0.9),),
)

BRANCHES = {
    "fine-tuning on what somebody showed": "stage=sft source=expert",
    "fine-tuning on own episodes": "stage=sft source=self",
    "RL, rewards of an environment": "stage=rl reward=environment",
    "RL, rewards by a rule": "stage=rl reward=rule",
    "RL, rewards of a model": "stage=rl reward=learned",
    "RL, rewards of a judge": "stage=rl reward=judge",
    "RL, how often an answer is preferred": "stage=rl reward=pairwise",
    "preference alignment, pairs given before": "stage=preference feedback=offline",
    "preference alignment, pairs of own answers": "stage=preference feedback=online",
    "hybrid: imitation and RL or preferences, in turn": "stage=hybrid",
}
"""The branches of the survey, by tags."""


@survey("agent-optimization-survey@1", paper=48, claim=CLAIM)
def agent_optimization_survey() -> dict[str, tuple[str, ...]]:
    """The optimisation of LLM-based agents (arXiv 2503.12434): works by whether weights learn, by fine-tuning, rewards
    or preferences, by whose episodes, and by what becomes of those that fail.

    The tree overlaps, DPO being both RL and preference alignment, so it is no tree here: five questions are tags of
    every method and recipe (`source`, `granularity`, `stage`, `failures`, `param_free`), and branches are crossings of
    them (`panoply list --tag stage=preference --tag source=self`). Where a reward comes from, and who filters episodes,
    are asked by other surveys already (`reward`, `feedback`).

    The loops that it names are recipes: `filtered-bc`, `iterated-filtered-bc`, `trajectory-dpo`, `step-dpo`, and
    `sft-then-grpo`. Of its parameter-free branch (memories, reflection, retrieval, prompts) works stand here only where
    they say so (`param_free=yes`). Adapters are an option of any method (`--lora`), and benchmarks are worlds. Names of
    categories are reconstructed from its abstract. It reports no experiment; the claim puts five of its entries
    on one axis of episodes, with those of the teacher counted for imitation.
    """
    found = {branch: having(line) for branch, line in BRANCHES.items()}
    for axis in AXES:
        if axis.survey == AGENTS:
            found |= {f"{tag}: {meaning}": having(tag) for tag, meaning in axis.tags().items()}
    return found
