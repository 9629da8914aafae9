"""INSPO: instructions that compete for questions, and are rewritten from failures, while the policy learns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import Experience, transcript
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import numpy_rng
from panoply.slots.sample.groups import LIMITS, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

State = dict[str, Any]
EVOLVING = ("keep", "candidates", "failures", "memory", "verify")
"""Settings that are of no use where instructions stay what they are."""
TRIES = 64
"""How often a proposer may repeat what is known before it is left alone."""


def _equation(held: Any) -> str:
    drawn = f"{held.prompts} prompts × {held.group} episodes, I ~ softmax(w/{held.tau:g}) of {held.population} a prompt"
    if held.every is None:
        return drawn
    new = f"{held.candidates} rewritten from {held.failures} failures and tried on {held.verify}"
    return f"{drawn}; every {held.every} steps the best {held.keep:g} stay, {new}"


def _cost(held: Any, of: Lengths) -> Tokens:
    """Episodes that verify are sampled, and not trained on."""
    sampled, trained = own_episodes(held, of)
    tried = held.candidates * held.verify / held.every if held.every else 0
    return sampled + round(tried * of.answer), trained


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.every is not None and _staying(held.population, held.keep) == held.population:
        return [("keep", f"all {held.population} would stay, and no new instruction would find a place")]
    return greedy_groups(held, method)


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    fixed = [(name, "instructions stay what they are") for name in EVOLVING if held.every is None]
    alone = [(name, "there is one instruction") for name in ("tau", "rate", "first") if held.population == 1]
    return [*fixed, *(alone if held.every is None else [])]


@part(
    "sample",
    equation=_equation,
    state=lambda: {"population": [], "weights": [], "failures": [], "step": 0},
    needs=lambda held: frozenset({"world:verify", "world:instructions", f"signal:{held.name}"}),
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "temperature")},
        "population": "at least 1",
        "tau": "above 0",
        "rate": "above 0 to 1",
        "every": "at least 1",
        "keep": "above 0 to 1",
        "candidates": "at least 1",
        "failures": "at least 1",
        "memory": "at least 1",
        "verify": "at least 1",
        "first": "any number",
    },
    impossible=_impossible,
    inert=_inert,
    cost=_cost,
)
def instructed(
    state: State,
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    population: int = 7,
    tau: float = 0.1,
    rate: float = 0.2,
    first: float = 1.0,
    every: int | None = 20,
    keep: float = 0.5,
    candidates: int = 4,
    failures: int = 4,
    memory: int = 64,
    verify: int = 200,
    name: str = "success",
) -> tuple[State, Experience]:
    """Groups of episodes, each group under one instruction that is drawn by how well it has done lately.

    Numbers for the metrics: `under_best`, what was earned under the instruction that had the largest weight before the
    step, on tasks that are new (left out where nobody was asked under it); `best_weight`, and `spread`, by how much the
    worst is below it; `instructions_new`, how many joined in this step; and `verified`, the episodes that this took,
    which count as sampled, and are not learned from.

    population   instructions at most; the first ones are the world's, drawn by the run's seed
    tau          temperature of the draw: low, and what is ahead by chance stays ahead; high, and all are alike
    rate         η of w ← (1 − η)·w + η·(mean of the signal under it in this step)
    first        w of an instruction that was never asked: high, so that each is tried
    every        steps from one revision to the next; none: the instructions stay
    keep         share of the population that stays in a revision, by w
    candidates   rewritings of the best instruction that are tried
    failures     episodes without any of the signal that the proposer reads
    memory       the last so many such episodes are remembered
    verify       tasks on which the current policy tries each candidate: always the same, none of which it learns from
    name         the signal that instructions are judged by
    """
    step = int(state["step"])
    held: State = dict(state) if state["population"] else {**state, **_seeds(collect, population, first)}
    notes: dict[str, float] = {}
    if every is not None and step and step % every == 0:
        held, notes = _revised(
            held, collect, population, keep, candidates, failures, verify, temperature, name
        )
    known, weights = list(held["population"]), list(held["weights"])
    rng = numpy_rng("instructions", collect.seed, step)
    drawn = rng.choice(len(known), prompts, p=chances(weights, tau))
    world: Any = collect.world
    tasks = [world.instruct(t, known[i]) for t, i in zip(collect.tasks(prompts), drawn, strict=True)]
    found = collect.episodes(tasks, group, temperature=temperature)

    earned = _earned(found, name).reshape(prompts, group)
    best = int(np.argmax(weights))
    if (drawn == best).any():
        notes["under_best"] = float(earned[drawn == best].mean())
    notes |= {"best_weight": weights[best], "spread": weights[best] - min(weights)}
    collect.notes = {**collect.notes, **notes}
    held["weights"] = attributed(weights, drawn, earned.mean(-1), rate)
    if every is not None:
        held["failures"] = [*held["failures"], *_failed(found, earned, drawn, known, world)][-memory:]
    return {**held, "step": step + 1}, found


def chances(weights: list[float], tau: float) -> np.ndarray:
    """softmax(w/τ): how likely each instruction is drawn for a question."""
    shifted = np.exp((np.array(weights) - max(weights)) / tau)
    return np.asarray(shifted / shifted.sum())


def attributed(weights: list[float], drawn: np.ndarray, earned: np.ndarray, rate: float) -> list[float]:
    """w ← (1 − η)·w + η·mean, of every instruction that was asked, over its questions; others keep theirs."""
    return [
        (1 - rate) * w + rate * float(earned[drawn == i].mean()) if (drawn == i).any() else w
        for i, w in enumerate(weights)
    ]


def _seeds(collect: Collector, population: int, first: float) -> State:
    """The world's instructions to begin with, all different."""
    world: Any = collect.world
    rng = numpy_rng("first instructions", collect.seed)
    drawn = dict.fromkeys(world.instruction(rng) for _ in range(TRIES * population))
    known = list(drawn)[:population]
    return {"population": known, "weights": [first] * len(known)}


def _revised(
    held: State,
    collect: Collector,
    population: int,
    keep: float,
    candidates: int,
    failures: int,
    verify: int,
    temperature: float,
    name: str,
) -> tuple[State, dict[str, float]]:
    """Prune, reflect, verify, refill: the population after a revision, and what it took."""
    world: Any = collect.world
    ranked = sorted(zip(held["weights"], held["population"], strict=True), key=lambda pair: -pair[0])
    stays = ranked[: _staying(population, keep)]
    gone = ranked[len(stays) :]
    rng = numpy_rng("proposer", collect.seed, int(held["step"]))
    read = [held["failures"][i] for i in sorted(rng.permutation(len(held["failures"]))[:failures].tolist())]
    proposed: dict[str, None] = {}
    for _ in range(TRIES * candidates):
        if len(proposed) < candidates:
            new = world.revised(ranked[0][1], read, rng)
            proposed |= {} if new in held["population"] else {new: None}
    probe = collect.numbered(range(-verify, 0))  # what lies before the first task that was taken
    tried = [world.instruct(task, new) for new in proposed for task in probe]
    verified: list[tuple[float, str]] = []
    if tried:
        scores = _earned(collect.episodes(tried, 1, temperature=temperature), name).reshape(-1, verify)
        verified = list(zip(scores.mean(-1).tolist(), proposed, strict=True))
    joins = joining(verified, [w for w, _ in gone], population - len(stays))
    after = [*stays, *joins]
    notes = {"instructions_new": float(len(joins)), "verified": float(len(tried))}
    return {**held, "population": [said for _, said in after], "weights": [w for w, _ in after]}, notes


def joining(verified: list[tuple[float, str]], gone: list[float], places: int) -> list[tuple[float, str]]:
    """The best candidates for as many places, which must have done better than those that left did on average.

    What a candidate did is its weight from then on: the same policy, the same signal.
    """
    least = sum(gone) / len(gone) if gone else -np.inf
    better = sorted((pair for pair in verified if pair[0] > least), key=lambda pair: -pair[0])
    return better[:places]


def _staying(population: int, keep: float) -> int:
    return max(1, round(keep * population))


def _earned(found: Experience, name: str) -> np.ndarray:
    """What each episode earned, in the order in which they were asked for."""
    episodes = found.by("episode")
    return np.asarray(episodes.sum(found[f"signal:{name}"].double()).cpu().numpy())


def _failed(
    found: Experience, earned: np.ndarray, drawn: np.ndarray, known: list[str], world: Any
) -> list[dict[str, str]]:
    """Of each group one episode that earned nothing, where there is one: under which instruction, and its text."""
    keys = found.by("episode").keys.view(earned.shape)
    return [
        {
            "instruction": known[int(drawn[g])],
            "text": world.tokenizer.decode(transcript(found, int(keys[g][int(np.argmin(row))]))[0]),
        }
        for g, row in enumerate(earned)
        if row.min() <= 0
    ]


CLAIM = Ranks(
    "Where how well a question is answered depends on the instruction before it, drawing instructions by what they "
    "earned lately and rewriting the best of them answers more questions under the best instruction of the time, over "
    "equal episodes with those that verify, than the same first instructions drawn evenly, and than one of them alone.",
    (
        "",
        "evenly=inspo:sample.tau=1e6,sample.every=none",
        "one instruction=inspo:sample.population=1,sample.every=none",
    ),
    world="tools:instructed",
    budget="episodes=3072",
    metric="mean:under_best",
    leads=True,
    tuned_by="mean:under_best",
    best=1.0,
    also=("under_best", "world:instructed", "success"),
    shows=(Shows("mean:spread", least=0.1),),
)
PUBLISHED: Published = {
    "reported of arXiv 2512.01945": {
        "sample.population": 7,
        "sample.failures": 4,
        "sample.verify": 200,
    },
}
"""The code was not to be had. That weights are running means, τ, η, when and how much is pruned, and that candidates
must do better than those that left, are reconstructed; about eleven revisions in a run are reported."""


@method(
    "inspo@1",
    paper=3,
    base="grpo",
    world="tools:instructed",
    presets={"tiny": {**TINY, "sample.every": 4, "sample.verify": 16}},
    claim=CLAIM,
    published=PUBLISHED,
)
def inspo() -> OnPolicy:
    """INSPO (arXiv 2512.01945): a population of instructions evolves in the loop in which the policy learns.

    Each question gets an instruction, p(I_j) = exp(w_j/τ)/Σ_k exp(w_k/τ), and all episodes of its group have the same
    one, so that GRPO compares answers and not instructions. w_j follows what its questions earned. Every so many
    steps the weak half leaves; a proposer reads remembered failures and rewrites the best instruction; candidates are
    tried by the policy as it is now, and the best join if they do better than those that left. The loss is GRPO's, and
    an instruction is part of a prompt: nobody drew it, and it has no gradient.

    Surprising: w is no mean over all time. What an instruction earns rises as the policy learns, so that an old mean
    would count for one that is new. A low τ locks in whichever instruction the first policy happened to follow best.

    The paper's proposer is a large model; here it is the world's (`world.revised`), which changes one letter and avoids
    letters that failures had. Whoever uses a policy afterwards gives it the instruction with the largest weight, which
    is in the last checkpoint's state of `sample`; held-out success in a run is under any instruction.
    """
    return grpo().but(sample=instructed(prompts=16, group=64))
