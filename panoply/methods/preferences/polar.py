"""POLAR: a reward model that first learns who wrote what, and then judges an answer beside a reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from panoply.costs import Lengths, Tokens
from panoply.errors import PanoplyError
from panoply.evidence import races
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import Experience
from panoply.methods.base.reward_model import TINY as JUDGE_TINY
from panoply.parts import part
from panoply.recipes import Recipe, Stage
from panoply.regimes import Dataset
from panoply.registry import Published, method, recipe
from panoply.seeds import numpy_rng
from panoply.slots.loss.values import bradley_terry
from panoply.slots.model.values import beside
from panoply.slots.reduce.averages import token_mean
from panoply.slots.schedule.schedules import cosine
from panoply.slots.update.optimisers import adam
from panoply.worlds.world import Task, earned

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

Triple = tuple[list[int], list[int], list[int]]
"""Answers to one prompt: what is read first, the one that is to be judged higher, and the other."""
TRIES = 64
"""How often three answers are drawn anew that cannot be told apart."""

# ------------------------------------------------------------------ three answers to one prompt


def writers(rng: np.random.Generator, number: int, among: int, split: str) -> list[int]:
    """Different policies by lot: 0, 1, … in training, and others, −1, −2, …, in evaluations."""
    drawn = rng.choice(among, number, replace=False).tolist()
    return [-1 - who if split == "test" else who for who in drawn]


def compared(
    collect: Collector,
    numbers: Sequence[int],
    draw: Callable[[Task, np.random.Generator], Triple | None],
    reference: bool,
) -> Experience:
    """Triples by number as pairs, with the first answer in the prompt; one that does not fit is drawn again."""
    tasks, told = collect.numbered(numbers), []
    for number, task in zip(numbers, tasks, strict=True):
        rng = numpy_rng("triple", collect.seed, collect.split, number)
        found = next((made for _ in range(TRIES) if (made := draw(task, rng))), None)
        if found is None:
            raise PanoplyError(
                f"The scripted policies of {collect.world.name} answer a task so much alike that no three answers of "
                "theirs can be compared."
            )
        told.append(found)
    if reference:
        tasks = [beside(task, first) for task, (first, _, _) in zip(tasks, told, strict=True)]
    return collect.preferred(tasks, [better for _, better, _ in told], [worse for _, _, worse in told])


def _taken(collect: Collector, batch: int) -> list[int]:
    first: int = collect.state["tasks"]
    collect.state["tasks"] += batch
    return list(range(first, first + batch))


def _cost(held: Any, of: Lengths) -> Tokens:
    """The task stands in the prompt twice, with the reference between."""
    read = 2 * of.prompt + of.answer if getattr(held, "reference", True) else of.prompt
    return 0, held.batch * (read + 2 * of.context)


@part(
    "data",
    equation="{batch} triples a step of {policies} policies: y₁, y₂ ~ A and y₃ ~ B, y₂ over y₃ beside y₁",
    needs={"world:writers"},
    gives={"pairs"},
    cost=_cost,
    bounds={"batch": "at least 1", "policies": "from 2 to 1000000"},
)
def same_policy(collect: Collector, *, batch: int = 64, policies: int = 30) -> Experience:
    """Who wrote it? Two different answers of one policy and one of another, to one prompt; nobody is asked.

    Prompts become x y₁ x: what is judged is whether y₂ or y₃ is of who wrote y₁. Always new ones; in evaluations
    prompts and policies are others than in training.

    policies   how many there are in training, and as many others in evaluations
    """

    def draw(task: Task, rng: np.random.Generator) -> Triple | None:
        a, b = writers(rng, 2, policies, collect.split)
        first, same, other = (collect.world.written_by(task, who, rng) for who in (a, a, b))
        return None if same in (first, other) else (first, same, other)

    return compared(collect, _taken(collect, batch), draw, reference=True)


@part(
    "data",
    equation=lambda held: (
        f"{held.batch} {f'of {held.triples} ' if held.triples else ''}triples a step of {held.policies} policies, "
        f"y_ref ⪰ y_w ≻ y_l by {held.name}{'; y_w over y_l beside y_ref' if held.reference else '; y_ref is left out'}"
    ),
    needs=lambda held: frozenset({"world:writers", "world:verify", f"signal:{held.name}"}),
    gives={"pairs"},
    cost=_cost,
    bounds={"batch": "at least 1", "triples": "at least 0", "policies": "from 3 to 1000000"},
)
def ranked_triples(
    collect: Collector,
    *,
    batch: int = 64,
    triples: int = 0,
    policies: int = 30,
    name: str = "true",
    reference: bool = True,
) -> Experience:
    """Three policies answer one prompt, and somebody has put the answers in order; the best one is the reference.

    triples     how many there are, gone through in a new order again and again; 0 makes new ones for ever. Evaluations
                always have new ones, with other prompts and of other policies
    policies    how many there are in training, and as many others in evaluations
    name        the signal that the order goes by; the second answer is strictly better than the third
    reference   whether the best answer is read before the one that is judged
    """

    def draw(task: Task, rng: np.random.Generator) -> Triple | None:
        said = [collect.world.written_by(task, who, rng) for who in writers(rng, 3, policies, collect.split)]
        worth = [earned(collect.world.grade(task, answer)[name]) for answer in said]
        best, second, last = sorted(range(3), key=lambda i: -worth[i])
        return (said[best], said[second], said[last]) if worth[second] > worth[last] else None

    known = triples and collect.split != "test"
    numbers = collect.shuffled(batch, triples) if known else _taken(collect, batch)
    return compared(collect, numbers, draw, reference)


# ------------------------------------------------------------------ the work

PUBLISHED: Published = {
    "InternLM/POLAR, examples/xtuner_configs/POLAR_1_8B_full_varlenattn_custom_dataset.py": {
        "data.reference": True,
        "losses.bradley_terry.centre": 0.0,
        "update.lr": 1e-5,
        "update.beta1": 0.9,
        "update.beta2": 0.95,
        "update.weight_decay": 0.0,
        "update.clip": 1.0,
        "update.schedule": "cosine",
        "update.schedule.end": 0.1,
        "update.schedule.warmup": 0.03,
    },
}
"""Of fine-tuning. No code of pre-training was released; its batches, rates and steps are chosen here."""


@method(
    "polar-model@1",
    paper=163,
    world="strings",
    presets={"tiny": JUDGE_TINY},
    published=PUBLISHED,
    tags=("data=prefs", "feedback=annotators"),
)
def polar_model() -> Dataset:
    """A reward model that reads a reference first (arXiv 2507.05197). −log σ(r(x, y_ref, y_w) − r(x, y_ref, y_l)).

    It reads x y_ref x y, in this order, and is asked after the last token: the end of an answer parts the two, and is
    where the number is read (the authors have a token of its own for each). The best of three answers is the reference.
    With `data=same_policy` it learns instead whether two answers are of the same policy, which is POLAR's pre-training.
    What is measured held out is how often it orders two answers right, of other policies and to other prompts.
    """
    return Dataset(
        data=ranked_triples(batch=64),
        losses=(bradley_terry(),),
        reduce=token_mean(),
        update=adam(lr=1e-5, beta2=0.95, schedule=cosine(end=0.1, warmup=0.03)),
    )


FEW = {"data.triples": 64}
_ALIKE = {"data": "same_policy", "data.batch": 32, "update.lr": 3e-3}
_PRETRAIN = Stage("pretrain", "polar-model", _ALIKE, {"steps": 300})
_TUNE = Stage("tune", "polar-model", FEW, {"model": "@pretrain"})

CLAIM = Ranks(
    "Fine-tuned on 64 ordered triples, a reward model that has learned to tell policies apart orders more answers "
    "of new policies to new prompts right than one from scratch does, with or without a reference before the answer.",
    ("", "polar-scratch", "no reference=polar-scratch:tune.data.reference=false"),
    "strings",
    "tune.steps=60",
    metric="success",
    leads=True,
    best=1.0,
    settings={"tune.data.batch": 32, "tune.run.held_out": 512},
    tune={"tune.update.lr": (1e-4, 3e-4, 1e-3)},
    also=("loss",),
    shows=(Shows("success", least=0.52, most=0.85),),
    waives={"problems": races.SIX_PROMPTS},
)


@recipe("polar@1", paper=163, world="strings", claim=CLAIM)
def polar() -> Recipe:
    """POLAR (arXiv 2507.05197): a reward model learns who wrote what, and then from few preferences.

    Pre-training asks nobody: of two answers of a policy A and one of B, y₁, y₂ ~ A and y₃ ~ B, it learns
    −log σ(r(x, y₁, y₂) − r(x, y₁, y₃)). Fine-tuning has the same form, −log σ(r(x, y_ref, y_w) − r(x, y_ref, y_l)),
    with an order that somebody gave: the best of three answers is the reference. Why that is a reward: the best policy
    near π_ref is π* ∝ π_ref·e^{r/β}, so r is up to a constant how much likelier an answer is of π*; and who tells
    whether two answers are of the same policy says how likely one is of the reference's.

    What is surprising: nothing of the first stage knows good from bad. Two samples of A must be different, or copies
    are found; formats must overlap, or length and brackets alone tell who wrote (of the policies here nobody does
    anything always or never). The reward is relative to a reference, so that its mean differs from prompt to prompt:
    compare answers to one prompt alone (`polar-rl` takes advantages of groups).

    The authors' 184 policies are language models and their reward models of 1.8 and 7 billion weights; here 30 are
    scripts with skills and styles of their own. How triples are drawn for pre-training is reconstructed. The paper's
    curves over sizes of model and data are not here; fewer or more preferences are `--set tune.data.triples=16`.
    """
    return Recipe((_PRETRAIN, _TUNE))


@recipe("polar-scratch@1", paper=163, world="strings")
def polar_scratch() -> Recipe:
    """What POLAR (arXiv 2507.05197) is compared with: the same fine-tuning from the start, without pre-training.

    `--set tune.data.reference=false` leaves the reference out, too: a plain Bradley–Terry reward model.
    """
    return Recipe((dataclasses.replace(_TUNE, options={}),))


@recipe("polar-rl@1", paper=163, world="strings")
def polar_rl() -> Recipe:
    """Reinforcement fine-tuning with POLAR (arXiv 2507.05197): earn r(x, y*, y), with y* the prompt's reference answer.

    The world's reference answer is put before each of the policy's own when it is judged. Rewards are relative to it,
    so advantages are of groups (GRPO). The authors use PPO with a critic, γ = λ = 1 and no KL term:
    `panoply train ppo --reward-model RUN --set models.reward_model.reference=true` on a run of `polar`.
    """
    judge = {"models.reward_model.folder": "@tune", "models.reward_model.reference": True}
    return Recipe((_PRETRAIN, _TUNE, Stage("optimise", "grpo", {**judge, "reward.name": "model"})))
