"""The RLHF trilemma: whom a policy serves, what that takes, and what shakes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from panoply.errors import PanoplyError
from panoply.evaluation import trilemma
from panoply.evidence.claims import Ahead
from panoply.registry import algorithm, having, here, survey
from panoply.seeds import numpy_rng

if TYPE_CHECKING:
    from panoply.evaluation.judged import Judged
    from panoply.worlds.control.world import Array
    from panoply.worlds.world import Task

BITS = (2, 4, 6, 8)
GROUPS, TARGET, MANY = 3, 0.05, 1 << 12


@algorithm("labels-needed@1", paper=179)
def labels_needed(
    bits: tuple[int, ...] = BITS, groups: int = GROUPS, target: float = TARGET, seed: int = 0
) -> dict[str, dict[str, float]]:
    """How many labels it takes to serve every group (arXiv 2511.19504): 2^d without structure, a few with it.

    A user of one of some groups comes with a context of d bits, and one of two answers is worth more to him. A label
    says which; one in ten is an adversary's and says the opposite. Counted are the labels of all groups together until
    the worst-served one loses at most `target`, in steps of a quarter of a doubling; what is lost is exact, over all
    2^d contexts, and averaged over twenty sets of labels.

    `unstructured`: what answers are worth is drawn for every context and group, and each is learned for itself.
    `linear`: worth is a linear function of the bits, and so is what is learned of it. `linear, as a table`: the same
    worth, learned without knowing that; so it is the learner's assumption that saves labels. `one for all`: what the
    worst-served group loses where one answer is to suit all groups and contexts, after thousands of labels.
    """
    if not bits or min(bits) < 1 or max(bits) > 12:
        raise PanoplyError("labels-needed.bits are numbers from 1 to 12.")
    if groups < 1 or not 0 < target < 1:
        raise PanoplyError("labels-needed has at least one group, and a target between 0 and 1.")
    table: dict[str, dict[str, float]] = {}
    for d in bits:
        free, linear = (trilemma.gaps_of(d, kind, groups, seed) for kind in ("table", "linear"))
        table[f"{d} bits"] = {
            "unstructured": trilemma.labels_needed(free, "table", target=target, seed=seed).labels,
            "linear": trilemma.labels_needed(linear, "linear", target=target, seed=seed).labels,
            "linear, as a table": trilemma.labels_needed(linear, "table", target=target, seed=seed).labels,
            "one for all": trilemma.worst_regret(free, "one", MANY, numpy_rng("one for all", seed, d)),
        }
    return table


def measure(seed: int) -> dict[str, float]:
    """The least of three margins: over 0.75 doublings a bit, below the square of bits, over the target."""
    found = labels_needed(seed=seed)
    labels = {name: [math.log2(row[name]) for row in found.values()] for name in ("unstructured", "linear")}
    growth = {name: trilemma.slope(BITS, logs) for name, logs in labels.items()}
    degree = trilemma.slope([math.log2(d) for d in BITS], labels["linear"])
    lost = min(row["one for all"] for row in found.values())
    return {
        "least margin": min(growth["unstructured"] - 0.75, 2 - degree, lost - TARGET),
        "doublings a bit, unstructured": growth["unstructured"],
        "doublings a bit, linear": growth["linear"],
        "degree in bits, linear": degree,
        "lost with one for all": lost,
    }


# ------------------------------------------------------------------ of a run


def of_run(
    judged: Judged, *, problems: int = 64, attempts: int = 8, seed: int = 0
) -> dict[str, dict[str, float]]:
    """ε, labels and updates, and δ, of the policy that a run began with and of its last one."""
    if problems < 4 or attempts < 2:
        raise PanoplyError("The trilemma is measured on at least 4 problems with 2 attempts each.")
    steps = judged.steps()
    if not steps:
        raise PanoplyError(f"{judged.run.folder} has no whole checkpoint to judge.")
    rows = {"start": _measured(judged, judged.start(), problems, attempts, seed)}
    trained = _measured(judged, judged.policy(steps[-1]), problems, attempts, seed)
    metrics = [row for row in judged.run.metrics() if row["step"] <= steps[-1]]
    episodes = metrics[-1].get("total_episodes", 0) if metrics else 0
    method = judged.run.plan().method
    rows["trained"] = trained | trilemma.spent(method.settings(), method.regime, steps[-1], episodes)
    return rows


def _measured(judged: Judged, policy: Any, problems: int, attempts: int, seed: int) -> dict[str, float]:
    from panoply.kinds import is_text, kind_of
    from panoply.slots.sample.answers import answers_of

    world = judged.world
    kind = kind_of(world)

    def collected(tasks: Sequence[Any], times: int, temperature: float) -> Any:
        collect: Any = kind.collector(world, policy, seed, split="test")
        try:
            return collect.episodes(tasks, times, temperature=temperature)
        finally:
            collect.close()

    if is_text(world):

        def ask(tasks: Sequence[Task], times: int, temperature: float) -> list[list[list[int]]]:
            said = answers_of(collected(tasks, times, temperature))
            return [said[i : i + times] for i in range(0, len(said), times)]

        one_turn = "fork" in kind.affords(world)
        return trilemma.of_text(world, ask, world.held_out(problems), attempts=attempts, one_turn=one_turn)

    starts = [world.task("test", i) for i in range(problems)]

    def returns(temperature: float) -> Array:
        played = collected(starts, attempts, temperature)
        found: Array = played.by("episode").last(played["earned"]).double().numpy()
        return np.reshape(found, (problems, -1))

    if getattr(world, "variant", "") != "bits":
        return trilemma.of_control(returns, best=world.solved)
    return trilemma.of_control(returns, *world.users(np.array([start.seed for start in starts])))


CLAIM = Ahead(
    "Three groups of users with contexts of 2, 4, 6 and 8 bits, one label in ten an adversary's: labels by which the "
    "worst-served group loses at most 0.05 grow at least 0.75 doublings a bit where worth has no structure, and more "
    "slowly than the square of the bits where it is linear and learned so; one answer for all leaves the worst-served "
    "group above 0.05 whatever the labels.",
    measure,
)


@survey("rlhf-trilemma@1", paper=179, claim=CLAIM, judge=of_run)
def rlhf_trilemma() -> dict[str, tuple[str, ...]]:
    """The RLHF trilemma (arXiv 2511.19504): no procedure serves all groups of people (ε), is affordable, and cannot be
    shaken (δ), all at once; works here by what they hold on to.

    The bound, |H|·2^d·log(1/δ)/ε² labels, rests on groups and contexts that share nothing: `panoply run labels-needed`
    counts labels with and without structure. It is a position paper, and no published system is measured in it.

    `panoply eval RUN --by rlhf-trilemma` gives all three of a run. ε: what the worst-served group of the world's
    annotators or users loses against the best for it, the reference answer or a better one that was drawn; `minority`,
    how much of what is said the smallest group likes most, over its share of people. Labels and updates. δ: the most
    that is lost if only the worst-served quarter of problems is asked, if another problem stands before each, or at a
    temperature of 1.5. The definitions are ours, for the paper states them for ideal procedures. Not there: how far
    answers have become alike; sycophancy, since no world has users who state a view; and flipped labels, for which a
    run is trained again (`--set world.noise=0.1`).
    """
    return {
        "one reward for everybody: affordable": having("reward=learned data=prefs"),
        "one preference for everybody, without a reward model": having("reward=implicit data=prefs"),
        "preferences of a population as they are, in a game": having("reward=pairwise"),
        "groups or users told apart": here("maxmin-rlhf", "vpl", "parl"),
        "several rewards kept apart, or limits": having(
            "optimisation=constrained", "reward=several reward=learned"
        ),
        "labels that may be wrong": here("robust-dpo", "pf-ppo", "rpo"),
    }
