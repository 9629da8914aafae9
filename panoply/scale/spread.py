"""A run that is spread: its cluster, who plays and who learns there, and what is told of them after every step."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from panoply.errors import PanoplyError
from panoply.kinds import is_text
from panoply.scale.cluster import SEES, Cluster, Handle, open_cluster

if TYPE_CHECKING:
    from panoply.experience import Experience
    from panoply.kinds import Collector
    from panoply.loops.learner import Learner
    from panoply.loops.seat import Seat
    from panoply.planning import Options, Plan
    from panoply.records import Worker
    from panoply.scale.ahead import Ahead
    from panoply.scale.group import Group, Ranks

GLANCE = 2.0
"""Seconds between two looks at the object store, each of which takes some milliseconds."""
WEIGHTS = ".weights"
"""Where samplers on other machines find new weights in the midst of answers, in the run folder."""


class Spread:
    """The workers of one run. The driver keeps all that decides; `collector` and `learner` say who does the work."""

    def __init__(self, plan: Plan, found: Path | None = None):
        options = self.options = plan.options
        self.cluster: Cluster = open_cluster(options)
        try:
            self.gpus = gpus_each(options, self.cluster.gpus())
        except PanoplyError:
            self.cluster.close()
            raise
        """Of each worker."""
        self.folder = Path()
        """Of the run; what workers on other machines find there they must see."""
        self.aheads: list[Ahead] = []
        self._looked, self._bytes = -math.inf, 0
        self.ranks: Ranks | None = None
        """Those who learn, where they are elsewhere."""
        if options.learners:
            from panoply.scale.group import Ranks

            try:
                self.ranks = Ranks(self.cluster, plan, self.gpus, str(found) if found else None)
            except BaseException:
                self.cluster.close()
                raise

    def check_shared(self, folder: Path) -> None:
        """Learners on other machines read checkpoints: refuse a run folder that they do not see."""
        self.folder = folder.resolve()
        if self.ranks is not None:
            self._elsewhere(self.ranks.handles)

    def _elsewhere(self, handles: Iterable[Handle]) -> bool:
        """Whether any of these workers are on other machines; those must see the run folder."""
        far = [handle for handle in handles if handle.node != platform.node()]
        for handle in far:
            if not handle.call(SEES, str(self.folder)).result():
                raise PanoplyError(
                    f"The run folder {self.folder} is not on {handle.node}, where {handle.name} is: name one on a disk "
                    "that all machines share, --run DIR."
                )
        return bool(far)

    def collector(self, seat: Seat) -> Callable[..., Collector]:
        """What makes the seat's collector, called as that of its kind is."""
        if not self.options.samplers:
            own: Any = seat.kind.collector
            if self.options.engine != "native":
                own = partial(own, engine=self.options.engine)
            made: Callable[..., Collector] = own
            return made
        if not is_text(seat.world):
            from panoply.scale.fragments import Fragments

            return partial(Fragments, plan=seat.plan, spread=self, source=seat.found_model)
        from panoply.scale.fleet import Fleet

        return partial(Fleet, plan=seat.plan, spread=self, source=seat.found_model)

    def ahead(self, seat: Seat) -> Ahead | None:
        """Who samples a seat's batches before it is their step's turn, where that is asked for."""
        if not self.options.staleness:
            return None
        from panoply.scale.ahead import Ahead
        from panoply.scale.fleet import Fleet
        from panoply.scale.weights import Files

        options, fleet, board = self.options, cast(Fleet, seat.collect), None
        if options.inflight:
            far = self._elsewhere(member.handle for member in fleet.crew.members)
            board = Files(self.folder / WEIGHTS if far else None, own=True)
        made = Ahead(seat, fleet, options.staleness, options.steps, board)
        self.aheads.append(made)
        return made

    def learner(self, seat: Seat, model: str = "") -> Callable[..., Learner]:
        """What makes the learner of a seat's policy, or of a model beside it, called as `Learner` is."""
        from panoply.loops.learner import Learner

        if self.ranks is None:
            return Learner
        from panoply.scale.group import Group

        return partial(Group, self.ranks, (seat.name, model))

    def compared(self, seat: Seat, experience: Experience) -> Experience:
        """Experience with the columns of other selves of a seat's policy, by whoever learns."""
        if self.ranks is None:
            return seat.snapshots.score(experience)
        return cast("Group", seat.learner).compare(experience)

    def renew(self, seat: Seat, step: int, best: bool) -> None:
        """After a step: other selves of a seat's policy become what their rules say."""
        if self.ranks is not None:
            self.ranks.all("become", seat.name, step, best)

    def resume(self, folder: Path) -> None:
        """Let learners take up the checkpoint that the driver has taken up."""
        if self.ranks is not None:
            self.ranks.all("resume", str(folder))

    def told(self, step: int, seats: list[Seat]) -> list[Worker]:
        """What the workers of all seats did in this step: `workers(step)` of a `Fleet` and of a `Group` say it."""
        those: list[Any] = [self.ranks, *(seat.collect for seat in seats)]
        return [line for one in those if hasattr(one, "workers") for line in one.workers(step)]

    def metrics(self, told: list[Worker]) -> dict[str, float]:
        """For the step's line: how long either side waited on average, and what the object store held at most
        `GLANCE` seconds ago."""
        found: dict[str, float] = {}
        for role in ("learner", "sampler"):
            waited = [line["wait"] for line in told if line["role"] == role]
            if waited:
                found[f"seconds_wait_{role}s"] = round(sum(waited) / len(waited), 4)
        now = time.monotonic()
        if now >= self._looked + GLANCE:
            self._looked, self._bytes = now, self.cluster.store_bytes()
        return found | {"store_bytes": self._bytes}

    def close(self) -> None:
        for one in self.aheads:
            one.close()
        self.cluster.close()


def gpus_each(options: Options, there: int) -> int:
    """How many GPUs a worker has: one each where the run is on GPUs and the cluster has as many as workers."""
    if options.device.startswith("cpu") or (options.device == "auto" and not there):
        return 0
    workers = {"learners": options.learners, "samplers": options.samplers}
    asked = " and ".join(f"{n} {role[:-1] if n == 1 else role}" for role, n in workers.items() if n)
    if sum(workers.values()) > there:
        raise PanoplyError(
            f"{asked} must have a GPU each, and the cluster has {there or 'none'}: ask for fewer, or compute with "
            "--device cpu."
        )
    return 1
