"""ARPO by replay: a group that failed as a whole gets back a success of the same task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.episodes import Episodes
from panoply.errors import PanoplyError
from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import LIMITS, greedy_groups
from panoply.slots.surrogate.ratios import clip

if TYPE_CHECKING:
    from panoply.policies.text import TextPolicy
    from panoply.rollout.text import Collector


class Successes(Episodes):
    """Episodes that earned a signal, the newest few of each task; one of them stands in where a whole group failed.

    size    episodes kept of a task
    batch   how many stand in
    least   what an episode must earn, by its signals, to be kept
    flat    a group has failed where its episodes' signals deviate by less than this,
    low     and their mean is below that
    """

    def __init__(self, name: str, size: int, batch: int, least: float, flat: float, low: float, seed: int):
        super().__init__(size, batch, "asked", self._worth, seed)
        self.name, self.least, self.flat, self.low = name, least, flat, low

    def _worth(self, rows: Experience) -> Tensor:
        episodes = rows.by("episode")
        return episodes.rows(episodes.sum(rows[f"signal:{self.name}"])) > self.least

    def staying(self, held: Experience) -> Tensor:
        """First in, first out, in every task for itself."""
        episodes = held.by("episode")
        newest = Segments(episodes.first(held["task"]).flip(0)).grid()[:, : self.size]
        return episodes.keys.flip(0)[newest[newest >= 0]]

    def beside(self, experience: Experience) -> Experience:
        """What was collected, and in groups that failed one episode of another step in the place of one of theirs."""
        self._new = experience
        if self.held is None:
            return experience
        generator = torch_rng("replay", self.seed, self.steps)
        known, kept = self.held.by("episode"), []
        task_of = known.first(self.held["task"])
        out: list[Tensor] = []
        for group, task, members in self._failed(experience):
            stored = known.keys[task_of == task]
            n = min(self.batch, len(stored), len(members))
            chosen, leaving = (
                keys[torch.randperm(len(keys), generator=generator)[:n]] for keys in (stored, members)
            )
            again = self.held.take(torch.isin(self.held["episode"], chosen))
            kept.append(again.with_columns(group=torch.full_like(again["group"], group)))
            out.append(leaving)
        if not out or not len(gone := torch.cat(out)):
            return experience
        left = experience.take(~torch.isin(experience["episode"], gone))
        return Experience.mix([left, *kept])

    def _failed(self, rows: Experience) -> list[tuple[int, int, Tensor]]:
        """Groups that failed as a whole: key, task, and keys of their episodes."""
        episodes = rows.by("episode")
        earned = episodes.sum(rows[f"signal:{self.name}"])
        groups, task = Segments(episodes.first(rows["group"])), episodes.first(rows["task"])
        fails = (groups.std(earned, correction=0) < self.flat) & (groups.mean(earned) < self.low)
        of, keys = groups.first(task).tolist(), groups.keys.tolist()
        return [
            (keys[g], of[g], episodes.keys[groups.index == g]) for g in fails.nonzero().flatten().tolist()
        ]


@part(
    "replay",
    unit="episode",
    equation=lambda held: (
        f"in a group without {held.name}, {held.batch} of its task's last {held.size} successes for a failure each"
    ),
    needs=lambda held: frozenset({"world:text", f"signal:{held.name}"}),
    bounds={
        "size": "at least 1",
        "batch": "at least 1",
        "least": "any number",
        "flat": "at least 0",
        "low": "any number",
    },
)
def successes(
    _policy: TextPolicy,
    seed: int,
    *,
    size: int = 8,
    batch: int = 1,
    name: str = "success",
    least: float = 0.1,
    flat: float = 0.05,
    low: float = 0.2,
) -> Episodes:
    """Own successes of each task, one of which takes the place of a failure where the task's whole group has failed.

    size    successes that are kept of a task; the oldest leave first
    batch   how many of them stand in for as many failures
    name    the signal that says what failed; format and penalties do not count
    least   an episode is kept that earned more than this
    flat    a group has failed when its episodes deviate by less than this
    low     and earned less than this on the mean
    """
    return Successes(name, size, batch, least, flat, low, seed)


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.pool < held.prompts:
        return [("pool", f"a pool of {held.pool} tasks is smaller than a batch of {held.prompts} prompts")]
    return greedy_groups(held, method)


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes, of the same {held.pool}"
        + (f" as far as one of {held.tries} first attempts succeeded" if held.tries else "")
    ),
    needs={"world:text", "signal:success"},
    state=dict,
    impossible=_impossible,
    bounds={**{n: LIMITS[n] for n in ("prompts", "group", "temperature", "pool")}, "tries": "at least 0"},
)
def solvable(
    state: dict[str, Any],
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    pool: int = 369,
    tries: int = 16,
) -> tuple[dict[str, Any], Experience]:
    """Groups on tasks that come again and again, without those that the first policy never solves.

    pool    how many tasks there are
    tries   attempts at each of them before the first step; tasks without a success are left out. The attempts count as
            episodes, and nothing is learned from them. 0: all tasks stay
    """
    tasks = collect.different(pool)
    if tries and not state:
        found = collect.episodes(tasks, tries, temperature=temperature)
        episodes = found.by("episode")
        solved = Segments(episodes.first(found["task"])[episodes.sum(found["signal:success"]) > 0]).keys
        if not len(solved):
            raise PanoplyError(
                f"None of {pool} tasks was solved in {tries} attempts each, so that none is left to train on. Raise "
                "sample.pool or sample.tries, or keep all tasks with sample.tries=0."
            )
        state = {"solved": solved}
    if tries:
        known = set(state["solved"].tolist())
        tasks = [task for task in tasks if task.id in known]
    asked = [tasks[i] for i in collect.shuffled(prompts, len(tasks))]
    collect.notes = {"tasks_left": float(len(tasks))}
    return state, collect.episodes(asked, group, temperature=temperature)


@part(
    "reward",
    equation="{name}, less {weight} in episodes with a turn that is {broken}",
    needs=lambda held: frozenset({"world:verify", f"signal:{held.name}", f"signal:{held.broken}"}),
    bounds={"weight": "above 0"},
)
def outcome_and_format(
    experience: Experience, *, name: str = "success", broken: str = "invalid", weight: float = 0.5
) -> Tensor:
    """R = r_outcome + ½·r_format of a whole episode, on its last decision; r_format is −1 where a turn meant nothing.

    broken: the world's signal that is 1 for such a turn
    """
    episodes = experience.by("episode")
    earned = episodes.sum(experience[f"signal:{name}"])
    bad = episodes.max(experience[f"signal:{broken}"].float()) > 0
    return episodes.rows(earned - weight * bad.float()) * episodes.is_last()


CLAIM = Learns(
    "Where nearly every group fails as a whole and tasks come again, a success that is kept and put back into a failed "
    "group of its task learns more from as many episodes than new episodes alone.",
    race="recurring",
    also=("success", "mean:entropy"),
    shows=(Shows("mean:degenerate_groups", least=0.3),),
)


PUBLISHED: Published = {
    "reported of arXiv 2505.16282": {
        "sample.prompts": 16,
        "sample.group": 8,
        "sample.temperature": 1.0,
        "sample.tries": 16,
        "sample.pool": 369,
        "surrogate.low": 0.2,
        "surrogate.high": 0.3,
        "update.lr": 1e-6,
        "update.epochs": 1,
        "update.minibatches": 2,
        "regularise": None,
    },
    "reported of dvlab-research/ARPO, verl/trainer": {
        "replay.size": 8,
        "replay.batch": 1,
        "replay.least": 0.1,
        "replay.flat": 0.05,
        "replay.low": 0.2,
        "reward.weight": 0.5,
    },
}
"""A mini-batch is 8 of the step's 16 tasks. c = 3 of the dual clip is EasyR1's, on which the code is built."""
ARPO_TINY = {
    **{path: value for path, value in TINY.items() if not path.startswith("regularise")},
    "sample.group": 4,
    "sample.pool": 32,
    "sample.tries": 0,
    "reward": "signal",
    "surrogate.high": 0.3,
    "update.minibatches": 1,
}
"""All tasks stay: of the first attempts from a hard start hardly any succeeds."""


@method(
    "arpo-replay@1",
    paper=36,
    base="grpo",
    world="keydoor:hard",
    presets={"tiny": ARPO_TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def arpo_replay() -> OnPolicy:
    """ARPO: agentic replay policy optimization (arXiv 2505.16282).

    A group in which every episode failed has no variance, and GRPO learns nothing from it. So successes are kept, the
    last eight of every task, and where a task's whole group fails again one of them takes the place of a failure: in a
    group of eight its advantage is √7 ≈ 2.6 deviations. A group that has a success of its own is left alone. Whether a
    group failed is said by the outcome alone, not by the format's share of the reward.

    The stored episode is scored again under the weights of now (`against="old"`), so its ratio is 1 like that of all
    others: a bias that lets it pull with full strength, where the log-probabilities it was drawn with would be cut off
    by the clip. Tasks must come again for any of this (`sample.pool`); those that the first policy never solves in
    `sample.tries` attempts are left out, and the attempts are counted as episodes.

    The released buffer is written under one id field and read under another; here both are the task's id. Screenshots
    and virtual machines are not here: any text world of one turn or several will do.
    """
    return grpo().but(
        sample=solvable(),
        replay=successes(),
        reward=outcome_and_format(),
        surrogate=clip(low=0.2, high=0.3, dual=3.0, against="old"),
        reduce=token_mean(),
        regularise=(),
        update=grpo().update.but(minibatches=2),
    )
