"""A run that is spread: its cluster, who plays and who learns there, and what is told of them after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from panoply.errors import PanoplyError
from panoply.scale.cluster import Cluster, open_cluster

if TYPE_CHECKING:
    from panoply.kinds import Collector
    from panoply.loops.learner import Learner
    from panoply.loops.seat import Seat
    from panoply.planning import Options
    from panoply.records import Worker


class Spread:
    """The workers of one run. The driver keeps all that decides; `collector` and `learner` say who does the work."""

    def __init__(self, options: Options):
        self.options = options
        self.cluster: Cluster = open_cluster(options)
        on_gpus = not options.device.startswith("cpu") and self.cluster.gpus() > 0
        self.gpus = 1 if on_gpus else 0
        """Of each worker."""

    def collector(self, seat: Seat) -> Callable[..., Collector]:
        """What makes the seat's collector, called as that of its kind is."""
        if not self.options.samplers:
            return seat.kind.collector
        raise PanoplyError("Samplers are not there yet.")  # partial(Fleet, plan=seat.plan, spread=self)

    def learner(self, seat: Seat) -> Callable[..., Learner]:
        """What makes the seat's learner, called as `Learner` is."""
        from panoply.loops.learner import Learner

        if not self.options.learners:
            return Learner
        raise PanoplyError("Learners are not there yet.")  # partial(Group, plan=seat.plan, spread=self)

    def told(self, step: int, seats: list[Seat]) -> list[Worker]:
        """What the workers of all seats did in this step: `workers(step)` of a `Fleet` and of a `Group` say it."""
        those: list[Any] = [one for seat in seats for one in (seat.collect, seat.learner)]
        return [line for one in those if hasattr(one, "workers") for line in one.workers(step)]

    def metrics(self, told: list[Worker]) -> dict[str, float]:
        """For the step's line: how long either side waited on average, and what the object store holds."""
        found: dict[str, float] = {}
        for role in ("learner", "sampler"):
            waited = [line["wait"] for line in told if line["role"] == role]
            if waited:
                found[f"seconds_wait_{role}s"] = round(sum(waited) / len(waited), 4)
        return found | {"store_bytes": self.cluster.store_bytes()}

    def close(self) -> None:
        self.cluster.close()
