"""CAPO: a judge lists the wrong steps of every answer, and their tokens pay for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import numpy_rng
from panoply.selves import LEARNER, acts, by_whom
from panoply.slots.credit.groups import token_group
from panoply.slots.sample.answers import answers_of, judged_steps, on_tokens
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

Vote = Literal["intersection", "majority", "average"]


def blamed(wrong: Tensor, vote: Vote) -> Tensor:
    """How much each step is blamed, 0 to 1, by [critiques, steps] of which finds which wrong."""
    share = wrong.double().mean(0)
    if vote == "average":
        return share
    return ((share == 1) if vote == "intersection" else (share > 0.5)).double()


def _equation(held: Any) -> str:
    voted = {"intersection": "all of them", "majority": "most of them", "average": "each, in part,"}[
        held.vote
    ]
    said = f"{held.critiques} critiques" if held.critiques > 1 else "a critique"
    return (
        f"{held.prompts} prompts × {held.group} episodes at temperature {held.temperature:g}{by_whom(held.by)}, "
        f"{said} of every answer; a step is wrong if {voted if held.critiques > 1 else 'it'} says so"
    )


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = [("vote", "there is one critique (sample.critiques=1)")] if held.critiques == 1 else []
    if getattr(world, "judge_noise", None) == 0:
        sure = f"the judge of {world.name} never errs, so that critiques agree (world.judge_noise=0)"
        found = [("critiques", sure), ("vote", sure)]
    return [*greedy_cuts(held, method, world), *found]


@part(
    "sample",
    equation=_equation,
    needs=lambda held: frozenset({"world:judge"}) | acts(held.by),
    gives={"signal:wrong"},
    bounds={**LIMITS, "critiques": "at least 1"},
    impossible=greedy_groups,
    inert=_inert,
)
def criticised(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
    critiques: int = 4,
    vote: Vote = "intersection",
    by: str = LEARNER,
) -> Experience:
    """Groups of own answers, each read by the world's judge as often as said; the signal `wrong` is on tokens.

    The judge is given the task and what was said, and nothing of what it earned. Every step is judged by itself: those
    after a wrong one may be right. Tokens between steps, such as the end of an answer, are never wrong.

    critiques  how often an answer is read
    vote       a step is wrong if all critiques say so, or more than half; or as much as the share that does
    """
    tasks = collect.tasks(prompts)
    with collect.acted_by(by):
        found = collect.episodes(
            tasks,
            group,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=max_tokens,
        )
    episodes, known = found.by("episode"), {task.id: task for task in tasks}
    asked = [known[i] for i in episodes.first(found["task"]).tolist()]
    marks: list[list[float]] = []
    for key, task, said in zip(episodes.keys.tolist(), asked, answers_of(found), strict=True):
        rngs = [numpy_rng("critique", collect.seed, key, number) for number in range(critiques)]
        spans, verdicts = judged_steps(collect.world, task, said, rngs)
        marks.append([0.0] * len(said))
        for (start, end), blame in zip(spans, blamed(~verdicts, vote).tolist(), strict=True):
            marks[-1][start:end] = [blame] * (end - start)
    return found.with_columns(**{"signal:wrong": on_tokens(found, marks)})


@part(
    "reward",
    equation="R_t = {correct}·{name} − {wrong}·[t is in a wrong step]",
    needs=lambda held: frozenset({"world:verify", f"signal:{held.name}", "signal:wrong"}),
    bounds={"correct": "above 0", "wrong": "at least 0"},
)
def by_step(
    experience: Experience, *, name: str = "success", correct: float = 2.0, wrong: float = 1.0
) -> Tensor:
    """On every token what the whole answer earned, less the penalty for its own step.

    correct   C, of an answer that is right; more than P, or being right with a flaw would not pay
    wrong     P, of a token in a wrong step
    """
    episodes = experience.by("episode")
    outcome = episodes.rows(episodes.sum(experience[f"signal:{name}"].float()))
    return correct * outcome - wrong * experience["signal:wrong"]


CLAIM = Learns(
    "Where an answer may end right by luck, four critiques of a judge who errs in a fifth of his verdicts learn more "
    "from as many answers than outcomes alone do, and no fewer steps are right.",
    over="grpo",
    world="chain:frontier",
    budget="episodes=7680",
    settings={"world.strict": False, "world.judge_noise": 0.2},
    keeps={"steps": 0.0},
    also=("success", "steps", "total_decisions"),
    shows=(Shows("steps", most=0.95),),
)
PUBLISHED: Published = {
    "arXiv 2508.02298": {
        "sample.critiques": 4,
        "sample.vote": "intersection",
        "reward.correct": 2.0,
        "reward.wrong": 1.0,
        "credit.scale": "std",
    }
}
"""For larger policies; smaller ones had `sample.vote=majority`. The repository has no code yet: over what tokens are
normalised, and the vote, are as reviews and an independent implementation have them; the rest is GRPO's."""


@method("capo@1", paper=82, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def capo() -> OnPolicy:
    """CAPO, generative credit assignment (arXiv 2508.02298). R_t = C·correct − P·[t is in a wrong step]; A_t is R_t
    against the mean and deviation over all tokens of the group.

    A judge that is not trained reads a whole answer once and lists its wrong steps; several such critiques are put
    together by vote. So a right answer with a flaw earns less on the flaw, and a wrong one keeps what is right in it.

    What is surprising: a group in which all answers are wrong still has a gradient, by its wrong steps. C must be more
    than P: an answer that risks no step would else be worth as much as one that is right. Compared answer by answer and
    not over the group, tokens would lose what the outcome says. The judge does not see the outcome, which would colour
    its verdicts on steps; here it is the world's own (`world.judge`), which `world.judge_noise` lets err, and a
    language model behind the same two functions, `spans` and `judge`, of a world of one's own.
    """
    return grpo().but(sample=criticised(group=64), reward=by_step(), credit=token_group())
