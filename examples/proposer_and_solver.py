"""Two learners in one run: a proposer says how hard the next problems are to be, and a solver learns on them.

panoply train propose-solve --plugin examples/proposer_and_solver.py --set solver.update.lr=1e-3
"""

import dataclasses
from collections.abc import Mapping

import panoply as pp
from panoply.methods.base.grpo import TINY, grpo
from panoply.rollout.text import Collector
from panoply.seeds import stable_hash
from panoply.slots.reward.signals import signal
from panoply.slots.sample.dealt import dealt
from panoply.slots.turn.turns import all_
from panoply.worlds.world import Task


@pp.part(
    "game",
    equation="{tasks} problems × {group} answers; the proposer earns 1 − |2·success − 1|",
    gives={"signal:paid"},
    bounds={"tasks": "at least 2", "group": "at least 2"},
    cost=lambda held, of: (held.tasks * held.group * of.context, held.tasks * held.group * of.context),
)
def propose(
    collectors: Mapping[str, Collector], *, tasks: int = 16, group: int = 8
) -> dict[str, pp.Experience]:
    """Asked `*`, the proposer says a token, which stands for a number of products in a problem that the solver gets.

    It is paid most where the solver is right half of the time.
    """
    proposer, solver = collectors["proposer"], collectors["solver"]
    world, number = solver.world, stable_hash("proposed", solver.seed, solver.state["groups"])
    ask = Task(0, tuple(world.tokenizer.encode("*")), 0, {"problem": "0+0="})
    said = proposer.episodes([ask], tasks, max_tokens=1)
    levels = (said["action"] % (world.operations + 1)).tolist()
    variants = [dataclasses.replace(world, levels=(level, level)) for level in levels]
    solved = solver.episodes([of.task("train", number + i) for i, of in enumerate(variants)], group)
    episodes = solved.by("episode")
    groups = pp.Segments(episodes.first(solved["group"]))
    success = groups.mean(episodes.sum(solved["signal:success"]))
    return {"solver": solved, "proposer": said.with_columns(**{"signal:paid": 1 - (2 * success - 1).abs()})}


SMALL = {path: value for path, value in TINY.items() if not path.startswith(("sample.", "run."))}
BOTH = {f"{seat}.{path}": value for seat in ("solver", "proposer") for path, value in SMALL.items()}


@pp.method("propose-solve@1", presets={"tiny": BOTH})
def propose_solve() -> pp.Several:
    """GRPO for both; the proposer's reward is what the game pays it."""
    solver = grpo().but(sample=dealt())
    return pp.Several(
        seats=(("solver", solver), ("proposer", solver.but(reward=signal(name="paid")))),
        turn=all_(),
        game=propose(),
    )
