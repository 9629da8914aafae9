"""SSP: search self-play. One policy asks questions that are hard to answer, and learns to answer them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from panoply.costs import Lengths, Tokens
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import OWN, Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import Several
from panoply.registry import Published, method
from panoply.seeds import numpy_rng
from panoply.slots.credit.groups import group as against_group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.regularise.terms import kl
from panoply.slots.reward.signals import signal
from panoply.slots.sample.answers import answers_of
from panoply.slots.sample.dealt import dealt
from panoply.slots.sample.groups import LIMITS, greedy_groups
from panoply.slots.schedule.schedules import constant
from panoply.slots.surrogate.ratios import clip
from panoply.slots.turn.turns import filled
from panoply.slots.update.optimisers import adam
from panoply.worlds.world import Proposal, Task
from panoply.worlds.world import earned as total

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

Gate = Literal["policy", "world", "rules"]
Pays = Literal["failure", "middle", "rules"]
PAID: dict[str, str] = {"failure": "1 − p", "middle": "4·(left + p)·(right − p)", "rules": "1"}


def _cost(held: Any, of: Lengths) -> Tokens:
    asked = held.prompts * held.tries
    read = asked if held.gate == "policy" else 0
    rows = asked * (1 + held.group)
    return (rows + read) * of.answer, 2 * asked * of.prompt + rows * of.context


def _impossible(held: Any, method: Any) -> list[Finding]:
    if {"solver", "proposer"} != set(method.seated()):
        return [("prompts", "it deals to seats called solver and proposer")]
    if held.tries > 1 and held.propose == 0:
        return [("propose", f"all {held.tries} questions about an answer would be the same")]
    return greedy_groups(held, method)


def _inert(held: Any, method: Any) -> list[Finding]:
    found = [("noise", "nobody reads documents (game.gate=rules)")] if held.gate == "rules" else []
    if held.pays != "middle":
        found += [(name, f"it belongs to game.pays=middle, not {held.pays}") for name in ("left", "right")]
    if not held.refill:
        found += [
            (name, "nothing is asked again (game.refill=false)") for name in ("easiest", "clear", "keep")
        ]
    return found


@part(
    "game",
    equation=lambda held: (
        f"{held.prompts} answers × {held.tries} questions, those that pass the gate ({held.gate}) × {held.group} "
        f"solvers; a proposer earns {PAID[held.pays]}, rejected {held.penalty:g}"
    ),
    needs={"world:proposals", "world:verify", "signal:success"},
    gives={"signal:paid"},
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "temperature")},
        "tries": "at least 1",
        "propose": "from 0 to 100",
        "noise": "at least 0",
        "searches": "at least 0",
        "left": "from 0 to 1",
        "right": "from 0 to 1",
        "penalty": "from -10 to 0",
        "easiest": "from 0 to 1",
        "clear": "at least 1",
        "keep": "from 0 to 1",
    },
    impossible=_impossible,
    inert=_inert,
    state=lambda: {"step": 0, "pool": []},
    cost=_cost,
)
def search_self_play(
    state: dict[str, Any],
    collectors: Mapping[str, Collector],
    *,
    prompts: int = 256,
    tries: int = 1,
    group: int = 5,
    temperature: float = 1.0,
    propose: float = 0.8,
    gate: Gate = "policy",
    noise: int = 4,
    searches: int = 2,
    pays: Pays = "failure",
    left: float = 0.0,
    right: float = 1.0,
    penalty: float = 0.0,
    refill: bool = True,
    easiest: float = 1.0,
    clear: int = 10,
    keep: float = 0.0,
) -> tuple[dict[str, Any], dict[str, Experience]]:
    """From bare answers the proposer searches its way to questions; those that pass the gate are the solver's.

    Metrics: `accepted`, the share that passes; `sound`, the share of those whose answer is the given one; `hops`, their
    length; `replayed`, the share of questions asked again, and `staleness`, how many steps ago they were written.

    tries         questions about each answer
    group         answers to each question
    temperature   of solvers; `propose` is that of proposers. Who reads for the gate says what is likeliest
    gate          who answers a question from documents alone: the policy; the world's own reader, as an outside judge;
                  or nobody, so that only the rules are left
    noise         other proposals whose documents are mixed with the question's own
    searches      the fewest a question takes, all different: the first of the rules. That the answer is not in the
                  question, and that there is one, are the others
    pays          failure: 1 − p; middle: 4·(left + p)·(right − p) where 0 < p < 1; rules: 1 to all that pass
    penalty       what a proposer earns whose question is rejected
    refill        whether a rejected question's place is taken by an earlier one
    easiest       the largest p of a question that is asked again, as long as there are such
    clear, keep   every so many steps only this share of earlier questions is kept, the newest
    """
    solver, proposer = collectors["solver"], collectors["proposer"]
    world, step = solver.world, state["step"]
    rng = numpy_rng("self-play", solver.seed, step)
    answers = [world.proposal(task) for task in solver.tasks(prompts)]
    written = proposer.episodes(answers, tries, temperature=propose)
    told = [answer for answer in answers for _ in range(tries)]
    offered = [world.proposed(task, said) for task, said in zip(told, answers_of(written), strict=True)]
    passed = [by_rules(each, searches) for each in offered]
    if gate != "rules":
        passed = supported(solver, offered, passed, gate, noise, rng)
    questions = [each.question for each, ok in zip(offered, passed, strict=True) if ok and each.question]
    pool: list[dict[str, Any]] = state["pool"] if refill else []
    again = drawn(pool, len(offered) - len(questions), easiest, rng)
    asked = [*questions, *(task_of(kept) for kept in again)]
    solved = (
        solver.episodes(asked, group, temperature=temperature)
        if asked
        else solver.answers([], [], source=OWN)
    )
    p = success_of(solved) if asked else torch.zeros(0)
    earned = torch.full((len(offered),), float(penalty))
    earned[torch.tensor(passed, dtype=torch.bool)] = worth(p[: len(questions)], pays, left, right)
    episodes = written.by("episode")
    paid = {"signal:paid": episodes.rows(earned) * episodes.is_last()}
    solver.notes = _notes(episodes.sum(written["signal:success"]).tolist(), passed, questions, again, step)
    rates = p.tolist()
    fresh = [kept_as(task, rate, step) for task, rate in zip(questions, rates, strict=False)]
    seen = {each["id"]: rate for each, rate in zip(again, rates[len(questions) :], strict=True)}
    pool = [{**each, "rate": seen.get(each["id"], each["rate"])} for each in pool]
    new = {each["id"] for each in fresh}
    pool = [*(each for each in pool if each["id"] not in new), *{each["id"]: each for each in fresh}.values()]
    if (step + 1) % clear == 0:
        pool = pool[len(pool) - int(keep * len(pool)) :]
    state = {"step": step + 1, "pool": pool if refill else []}
    return state, {"solver": solved, "proposer": written.with_columns(**paid)}


def worth(p: torch.Tensor, pays: Pays, left: float, right: float) -> torch.Tensor:
    """What accepted questions earn their proposer, by the share of solvers who answer them."""
    if pays == "failure":
        return 1 - p
    if pays == "rules":
        return torch.ones_like(p)
    return torch.where((p > 0) & (p < 1), 4 * (left + p) * (right - p), 0.0)


def success_of(solved: Experience) -> torch.Tensor:
    """The share of each question's answers that are right, in the order in which questions were asked."""
    episodes = solved.by("episode")
    right = (episodes.sum(solved["signal:success"].float()) > 0).float()
    return Segments(episodes.first(solved["group"])).mean(right)


# ------------------------------------------------------------------ the gate


def by_rules(offer: Proposal, searches: int) -> bool:
    """There is a question, which does not tell its answer, after enough searches, all different."""
    enough = len(offer.searches) >= searches and len(set(offer.searches)) == len(offer.searches)
    return offer.question is not None and not offer.tells and enough and bool(offer.documents)


def supported(
    collect: Collector,
    offered: Sequence[Proposal],
    passed: Sequence[bool],
    gate: Gate,
    noise: int,
    rng: np.random.Generator,
) -> list[bool]:
    """Whether what passed so far is answered from its own documents, among those of others, without a search."""
    world, sure = collect.world, list(passed)
    places = [i for i, ok in enumerate(passed) if ok]
    readings = []
    for i in places:
        others = [j for j, each in enumerate(offered) if each.documents and j != i]
        some = rng.choice(others, min(noise, len(others)), replace=False).tolist() if others else []
        documents = [text for j in (i, *some) for text in offered[j].documents]
        question = offered[i].question
        assert question is not None
        readings.append(world.reading(question, [documents[k] for k in rng.permutation(len(documents))]))
    if gate == "world":
        right = [total(world.grade(task, world.gold(task))["success"]) for task in readings]
    elif readings:
        right = success_of(collect.episodes(readings, 1, temperature=0.0)).tolist()
    else:
        right = []
    for i, ok in zip(places, right, strict=True):
        sure[i] = ok > 0
    return sure


# ------------------------------------------------------------------ questions that are asked again


def kept_as(task: Task, rate: float, step: int) -> dict[str, Any]:
    """A question as the pool has it: the task, how many solve it, and when it was written."""
    plain = {"id": task.id, "prompt": list(task.prompt), "level": task.level, "data": dict(task.data)}
    return {**plain, "rate": rate, "step": step}


def task_of(kept: Mapping[str, Any]) -> Task:
    return Task(kept["id"], tuple(kept["prompt"]), kept["level"], kept["data"])


def drawn(
    pool: Sequence[dict[str, Any]], n: int, easiest: float, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """So many questions by lot, each of those that are hard enough, or of all where none is."""
    among = [each for each in pool if each["rate"] <= easiest] or pool
    return [among[int(i)] for i in rng.integers(len(among), size=n)] if among else []


def _notes(
    true: Sequence[float], passed: Sequence[bool], fresh: Sequence[Task], again: Sequence[Any], step: int
) -> dict[str, float]:
    notes = {"accepted": sum(passed) / len(passed), "replayed": len(again) / len(passed)}
    if fresh:
        sound = [right for right, ok in zip(true, passed, strict=True) if ok]
        notes["sound"] = sum(sound) / len(sound)
        notes["hops"] = sum(task.level for task in fresh) / len(fresh)
    if again:
        notes["staleness"] = sum(step - each["step"] for each in again) / len(again)
    return notes


TINY = {
    "game.prompts": 16,
    "game.group": 8,
    **{
        f"{seat}.{path}": value
        for seat in ("solver", "proposer")
        for path, value in {
            "regularise.kl": "none",
            "update.lr": 3e-4,
            "update.beta2": 0.95,
            "update.schedule.warmup": 10,
        }.items()
    },
    "solver.update.minibatches": 1,
    "run.steps": 100,
}

PUBLISHED: Published = {
    "Alibaba-Quark/SSP, examples/train_ssp.sh": {
        "game.prompts": 256,
        "game.tries": 1,
        "game.group": 5,
        "game.noise": 4,
        "game.pays": "failure",
        "game.left": 0.0,
        "game.right": 1.0,
        "game.penalty": 0.0,
        "game.refill": True,
        "game.easiest": 1.0,
        "game.clear": 10,
        "game.keep": 0.0,
        "solver.surrogate.high": 0.285,
        "solver.regularise.kl.weight": 0.01,
        "solver.regularise.kl.estimator": "k3",
        "solver.update.lr": 1e-6,
        "solver.update.schedule.warmup": 5,
        "solver.update.minibatches": 2,
        "solver.credit.baseline": "mean",
        "solver.credit.scale": "std",
        "proposer.credit.baseline": "none",
        "proposer.credit.scale": "none",
        "proposer.update.minibatches": 1,
    },
    "Alibaba-Quark/SSP, quarl/config/rl_config.yaml": {"game.temperature": 1.0, "game.propose": 0.8},
    "Alibaba-Quark/SSP, quarl/utils/problem_extraction.py": {"game.searches": 2},
    "arXiv 2510.18821, reconstructed": {"game.gate": "policy"},
    "verl, ppo_trainer.yaml": {
        "solver.reduce": "token_mean",
        "solver.surrogate.low": 0.2,
        "solver.update.clip": 1.0,
    },
}
"""Mini-batches of 128 questions have 5 answers each: two of the solver's, while 256 proposals are one."""

CLAIM = Ranks(
    "From answers alone, self-play with a gate gets more held-out questions of two and three hops right than without "
    "it, where the proposer is paid best for what has another answer, and than GRPO on given questions of one hop.",
    ("", "no gate=ssp:game.gate=rules", "given questions=grpo"),
    "graph",
    "decisions=16000",
    leads=True,
    tune={},
    fixed="two roles move one optimiser, whose rate stands in both: all have 3e-4, GRPO's own for such a model",
    also=("hops", "accepted", "sound", "success"),
    shows=(Shows("sound", most=0.5),),
)


@method(
    "ssp@1",
    paper=209,
    base="grpo",
    world="graph",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("source=self", "curriculum"),
)
def ssp() -> Several:
    """SSP: search self-play (arXiv 2510.18821). The policy writes its own questions, from answers and searches alone.

    As proposer it is given an answer a*, searches, and writes a question q. If q passes the gate, it answers q n times
    as solver. With p the share that is right, the solver's answers are credited as in GRPO, and the proposer's episode
    by REINFORCE, without a baseline:

        A_solver = (r − p) / std(r),   A_proposer = 1 − p if q passed, else 0

    The gate makes of two opponents a game worth playing: 1 − p is largest for what nobody can answer, so nonsense would
    win. A question has to be answered, without a search, from the documents that its proposer found, and among those of
    four others, for among few documents a wrong question may lead to the answer as well. Places of rejected questions
    are filled with earlier ones, which are forgotten every ten steps.

    What is surprising: nobody says which questions are right. A wrong one that passes is graded by the answer its
    proposer was given, so that its solvers fail and it pays; how good the game is depends on the gate alone.

    Who reads for the gate is the policy itself (`gate=policy`); the released code asks another model, whose part the
    world's own reader has here (`gate=world`), and takes errors of that model for a pass, which cannot happen here.
    Rules on the number of words are of no use to questions in letters, and are left out. Where there is no earlier
    question the released code asks a dummy one; here the place stays empty. A question that is written twice stands
    once in the pool. The solver moves the weights first, and the proposer's ratios are then to an earlier self; the
    released code does it the other way round and scores anew in between. Its options to merge the two updates, to let
    the proposer learn alone at first, and to propose until there are enough questions are not built.
    """
    update = adam(lr=1e-6, schedule=constant(warmup=5))
    solver = grpo().but(
        sample=dealt(),
        surrogate=clip(low=0.2, high=0.285),
        regularise=(kl(weight=0.01, estimator="k3"),),
        reduce=token_mean(),
        update=update.but(minibatches=2),
    )
    proposer = solver.but(
        reward=signal(name="paid"),
        credit=against_group(baseline="none", scale="none"),
        update=update,
    )
    both = (("solver", solver), ("proposer", proposer))
    return Several(both, filled(episodes=(1, 1)), search_self_play(), share=True)
