"""LMRL-Gym: worlds of several turns with logs, the baselines that learn from them, and one table of all."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply.errors import PanoplyError, unknown
from panoply.evidence.claims import Ranks, Shows
from panoply.regimes import Dataset
from panoply.registry import Published, method, protocol
from panoply.slots.data.log import log
from panoply.slots.loss.token_values import implicit_q, returned_q
from panoply.slots.model.token_values import token_values
from panoply.slots.reduce.averages import token_mean
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.evaluation.judged import Judged

TINY = {"update.lr": 1e-3, "update.clip": 1.0, "run.steps": 300, "losses.implicit_q.target": "ema:0.1"}
"""A mean of weights that moves by 0.005 would stand still in so few steps."""
TAGS = ("data=scores", "feedback=environment", "reward=environment", "optimisation=value", "source=given")
PUBLISHED: Published = {
    "abdulhaim/LMRL-Gym, llm_rl_scripts/maze/ilql/train_ilql.py": {
        "data.batch": 32,
        "losses.implicit_q.gamma": 0.99,
        "losses.implicit_q.expectile": 0.95,
        "losses.implicit_q.target": "ema:0.005",
        "models.token_values.heads": 2,
        "update.lr": 1e-4,
        "update.beta2": 0.95,
        "update.clip": 0.0,
        "update.weight_decay": 0.0,
    },
    "abdulhaim/LMRL-Gym, llm_rl_scripts/wordle/ilql/train_ilql_gpt2.py": {"losses.implicit_q.cql": 0.01},
    "abdulhaim/LMRL-Gym, llm_rl_scripts/maze/ilql/eval_ilql.py": {"models.token_values.beta": 16.0},
}
MC_PUBLISHED: Published = {
    "abdulhaim/LMRL-Gym, llm_rl_scripts/maze/mc_returns/train_mc.py": {
        "data.batch": 32,
        "losses.returned_q.gamma": 0.99,
        "models.token_values.heads": 1,
        "update.lr": 1e-4,
        "update.beta2": 0.95,
    },
}


@method("ilql@1", world="maze", presets={"tiny": TINY}, tags=TAGS, published=PUBLISHED)
def ilql() -> Dataset:
    """ILQL: implicit language Q-learning (arXiv 2206.11871), as LMRL-Gym has it (arXiv 2311.18232).

    A token is a step of time, within a turn and across turns; what a world says between turns is none. Twin Q learn
    r + γ·V(next token) and V a high expectile of the targets' lesser Q, from logged episodes alone, so that good pieces
    of bad episodes are put together. What acts is a policy that imitates the log and stays as it is, with logits
    + β·min(Q₁, Q₂); whoever opens the model later has the values with it.

    Surprising: without the conservative term (`cql=0`) a policy of tokens falls apart, for nothing keeps down the Q of
    tokens that nobody ever said, and β makes much of it. The released scripts for the maze have no such term because
    they choose among its four moves by Q − V alone; those for Wordle, which sample tokens, have it, and so it is here.

    Where this differs from the released code: an episode that a cap cut off teaches Q nothing at its last token, where
    the released worlds call it over (`losses.implicit_q.capped`). The start should imitate the log, as the warm starts
    of `maze` and of `guess`, kind wordle, do; in the paper that is GPT-2 after behaviour cloning.
    """
    return Dataset(
        data=log(),
        losses=(implicit_q(),),
        reduce=token_mean(),
        update=adam(lr=1e-4, beta2=0.95, clip=0.0),
        models=(token_values(),),
    )


@method("mc-returns@1", base="ilql", world="maze", tags=TAGS, published=MC_PUBLISHED)
def mc_returns() -> Dataset:
    """Monte-Carlo returns (LMRL-Gym, arXiv 2311.18232): Q of tokens regressed on what their own episodes earned later.

    No bootstrapping, no targets, one Q: the value of who played, by which the same policy is steered. A good move in an
    episode that is lost later looks bad, and so it does not stitch; on long dialogues the paper found it ahead of ILQL.
    """
    return ilql().but(losses=(returned_q(),), models=(token_values(heads=1, v=False),))


# ------------------------------------------------------------------ the table

IMITATION = {"data": "log", "update.lr": 1e-3, "update.schedule": "constant"}
BASELINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bc": ("sft", IMITATION),
    "percent-bc": ("sft", {**IMITATION, "data.best": 0.1}),
    "mc": ("mc-returns", {}),
    "ilql": ("ilql", {}),
    "ppo": ("ppo", {"reward.name": "score", "credit.gamma": 0.99, "credit.lam": 0.95, "sample.group": 1}),
}
"""Methods and settings by the paper's names; only PPO acts while it learns."""
WORLDS = ("maze", "maze:hidden", "guess:words")


def trained(world: str, baseline: str, steps: int, seed: int) -> dict[str, float]:
    """Return and normalised score of one baseline on one world, from the world's warm start."""
    from panoply.api import train
    from panoply.planning import named_world
    from panoply.policies.build import open_policy
    from panoply.progress import Progress

    if baseline not in BASELINES:
        raise unknown("baseline", baseline, BASELINES)
    name, settings = BASELINES[baseline]
    with tempfile.TemporaryDirectory() as kept:
        quiet = {"run.evaluate_every": 0, "run.held_out": 32}
        done = train(
            name, world, run=Path(kept) / "run", settings={**settings, **quiet}, steps=steps, seed=seed, threads=1,
            progress=Progress(),
        )  # fmt: skip
        made = named_world(world)
        policy = open_policy(str(done.run), made, seed, "cpu")
        return {
            "return": made.measure("return", policy, seed),
            "normalised": made.measure("normalised", policy, seed),
        }


def of_run(judged: Judged, *, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return and normalised score of a run's policies, from the start to the last checkpoint."""
    world = judged.world
    if "normalised" not in world.measures() or "writers" not in world.access:
        raise PanoplyError(f"{world.name} has no log to normalise by: train on {', '.join(WORLDS)}.")
    policies = {"start": judged.start(), **{f"step {step}": judged.policy(step) for step in judged.steps()}}
    return {
        name: {measure: world.measure(measure, policy, seed) for measure in ("return", "normalised")}
        for name, policy in policies.items()
    }


CLAIM = Ranks(
    "From a log of a maze in which nobody went a whole shortest way, ILQL comes to a higher return than Monte-Carlo "
    "returns, those to one no worse than imitation of the best tenth, and that to a higher one than imitation of all.",
    (
        "ilql",
        "mc=mc-returns",
        "percent=sft:data=log,data.best=0.1,update.schedule=constant",
        "bc=sft:data=log,update.schedule=constant",
    ),
    "maze",
    "steps=300",
    metric="world:normalised",
    margins=(0.0, 2.0, 0.0),
    best=100.0,
    settings={"run.held_out": 100},
    also=("success", "world:return", "seconds"),
    shows=(Shows("success", least=0.1, most=0.6),),
)


@protocol("lmrl-gym@1", paper=211, claim=CLAIM, judge=of_run)
def lmrl_gym(
    worlds: tuple[str, ...] = WORLDS,
    baselines: tuple[str, ...] = tuple(BASELINES),
    steps: int = 300,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """LMRL-Gym (arXiv 2311.18232): one table of worlds × baselines, all from logs but PPO, in normalised scores.

    A score is a mean return over sampled held-out episodes on a scale of three points: 0 is the least (an episode in
    which nothing succeeds), 50 the log's mean, 100 the best (the expert's mean); straight between them and beyond. Raw
    returns of different worlds do not compare. `panoply run lmrl-gym` trains all baselines, a minute each;
    `--set baselines=bc,ilql` some. `panoply eval RUN --by lmrl-gym` scores a run. Any world may be named that has a log
    (`worlds`); the least, the mean and the best of it are the world's own (`world:normalised`).

    Baselines: BC, %BC (the best tenth), Monte-Carlo returns, ILQL, and
    PPO as the paper's maze has it, γ = 0.99 and λ = 0.95 by tokens, without its small KL term. `iterated-filtered-bc`
    is its online %BC.

    What the paper found: values learned by bootstrapping are best where pieces of episodes must be put together, as in
    the maze; on dialogues the simpler Monte-Carlo returns beat them; PPO is strong and unstable. Of its eight tasks the
    maze is here, with full and with partial view, smaller and with eight goals where theirs has one, so that problems
    can be held out; and Wordle (`guess:words`), with 64 words of three letters and a first guess that is given, for the
    same reason. Not here: text navigation, chess, and the three dialogues whose partners are language
    models (`guess` has such games with rules). The released maze is scored by its least legal return, and so it is
    here: illegal text can fall below 0.
    """
    return {
        world: {name: trained(world, name, steps, seed)["normalised"] for name in baselines}
        for world in worlds
    }
