"""A group of learners: the driver weighs a mini-batch as a whole, and others make the passes over its parts.

Every term's weights are computed once, on all rows; a rank gets its rows with their weights and only sums, and then
gradients are summed over ranks. So a method's numbers are those of one process, up to the order of floating-point sums.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.batch import Totals
from panoply.errors import LearnersDied, PanoplyError
from panoply.experience import Experience
from panoply.loops.learner import REMEMBERED, Learner, in_order
from panoply.loops.micro_batches import unit_labels, unit_tokens
from panoply.loops.mover import Masters
from panoply.loops.objective import Active, Weighed
from panoply.parts import Part
from panoply.policies import divergence
from panoply.policies.low_rank import adapters
from panoply.scale import wire
from panoply.scale.cluster import Cluster, Future, Handle, WorkerDied, WorkerFailed
from panoply.scale.meeting import MEMORY, leave
from panoply.scale.placement import chosen_layout
from panoply.scale.plain import heard, to_array, to_tensor, told
from panoply.scale.rank import AGAIN, Diary, Key, Rank, not_learned
from panoply.scale.travel import packed

if TYPE_CHECKING:
    from panoply.planning import Plan
    from panoply.records import Worker


GAP = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}
"""The largest mean difference between what driver and learners say that is rounding and not a fault."""


def deal(rows: Experience, terms: Sequence[Part], hands: int) -> list[Experience | None]:
    """Rows to each of some hands: what a term must see whole stays together, the dearest first to whoever has least.

    Inside of a hand rows keep their order. A hand may stay empty.
    """
    if hands == 1:
        return [rows if len(rows) else None]
    if not len(rows):
        return [None] * hands
    label = unit_labels(rows, terms)
    costs = unit_tokens(rows, label)
    owner = torch.empty_like(costs)
    least = [(0, hand) for hand in range(hands)]
    for unit in costs.argsort(descending=True, stable=True).tolist():
        held, hand = heapq.heappop(least)
        owner[unit] = hand
        heapq.heappush(least, (held + int(costs[unit]), hand))
    whose = owner[label]
    sizes = whose.bincount(minlength=hands).tolist()
    dealt = whose.argsort(stable=True).split(sizes)  # type: ignore[no-untyped-call]
    return [rows.take(some) if len(some) else None for some in dealt]


class Ranks:
    """The learners of one run: they begin together, and where one of them dies all end."""

    def __init__(self, cluster: Cluster, plan: Plan, gpus: float = 0, found: str | None = None):
        self.cluster, self.number = cluster, plan.options.learners
        layout = chosen_layout(plan)
        self.in_step = layout == "sharded"
        """Whether all must make as many passes, since weights are gathered in each."""
        placed = dataclasses.replace(plan, options=dataclasses.replace(plan.options, layout=layout))
        handles = cluster.place("learner", self.number, Rank, packed(placed), gpus=gpus)
        self.handles: list[Handle] = sorted(handles, key=lambda handle: handle.node)
        self.address = f"{MEMORY}{id(self)}"
        if plan.options.cluster != "threads":
            self.address = self.first("address")
        nodes = len({handle.node for handle in self.handles})
        nodes = 1 if self.number % nodes else nodes
        places = [(number, self.number, self.address, found, nodes) for number in range(self.number)]
        self._open: list[Future] = []
        """Of what was asked for without waiting."""
        self._diaries: list[Diary] = []
        self.each("join", places)
        self._began = time.monotonic()

    def begin(self, method: str, *args: Any) -> None:
        """Ask every rank for something that has no answer; whoever asks next hears what went wrong with it."""
        self._open += [handle.call(method, *args) for handle in self.handles]

    def each(self, method: str, told: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Ask every rank for its part; all answers, in the order of the ranks."""
        asked = [handle.call(method, *args) for handle, args in zip(self.handles, told, strict=True)]
        waiting, self._open = [*self._open, *asked], []
        try:
            while waiting:
                for future in self.cluster.wait(waiting):
                    future.result()
                    waiting.remove(future)
            return [future.result() for future in asked]
        except (WorkerDied, WorkerFailed) as error:
            gone = error if isinstance(error, WorkerDied) else self._gone()
            if gone is None:
                raise
            self.end()
            raise LearnersDied(f"{gone} All learners end with it.") from error
        except PanoplyError:
            self.end()
            raise

    def all(self, method: str, *args: Any) -> list[Any]:
        return self.each(method, [args] * self.number)

    def first(self, method: str, *args: Any) -> Any:
        """What the first rank says, for all that every rank has."""
        try:
            return self.handles[0].call(method, *args).result()
        except WorkerDied as error:
            self.end()
            raise LearnersDied(f"{error} All learners end with it.") from error

    def _gone(self) -> WorkerDied | None:
        """Who has died, where another only noticed that it did not answer."""
        for handle in self.handles:
            try:
                handle.call("diary").result(timeout=10.0)
            except WorkerDied as error:
                return error
            except TimeoutError:
                pass
        return None

    def note(self, diaries: Sequence[Diary]) -> None:
        """What ranks said of themselves beside an answer, added to what they have said in this step."""
        before = self._diaries or [{} for _ in diaries]
        added = ("busy", "tokens")
        self._diaries = [
            {**said, **{name: round(said[name] + was.get(name, 0), 4) for name in added}}
            for was, said in zip(before, diaries, strict=True)
        ]

    def workers(self, step: int) -> list[Worker]:
        """What each did in this step."""
        now = time.monotonic()
        took, self._began = now - self._began, now
        diaries, self._diaries = self._diaries or self.all("diary"), []
        found: list[Worker] = []
        for handle, said in zip(self.handles, diaries, strict=True):
            found.append(
                {
                    "step": step,
                    "worker": handle.name,
                    "role": handle.role,
                    "node": handle.node,
                    "wait": round(max(0.0, took - said["busy"]), 4),
                    "busy": said["busy"],
                    "tokens": said["tokens"],
                    "memory_mb": said["memory_mb"],
                    "version": step,
                    "restarts": 0,
                }
            )
        return found

    def end(self) -> None:
        """Let all of them go."""
        for handle in self.handles:
            handle.kill()
        leave(self.address)


class Afar(Masters):
    """The driver's weights, which others move: nothing is kept of them here."""

    def __init__(self, weights: Mapping[str, torch.nn.Parameter], adapted: Any = ()):
        super().__init__({}, adapted)
        self.moving = dict(weights)
        self.scale = 1.0


class Group(Learner):
    """A learner whose passes are made by `ranks`, where it is known by its `key`."""

    def __init__(self, ranks: Ranks, key: Key, *args: Any, **settings: Any):
        self.ranks, self.key = ranks, key
        super().__init__(*args, **settings)
        self._step, self._version = 0, 0
        self._behind = False
        """Whether the learners have moved since the driver took over their weights."""
        self._agreed = False
        self._dealt: Experience | None = None
        """The rows that the ranks hold: epochs without mini-batches pass over the same ones again."""
        self._known = self._versions()

    def _masters(self, learning: dict[str, torch.nn.Parameter], copies: bool) -> Masters:
        return Afar(learning, (layer for _, layer in adapters(getattr(self.policy, "model", None))))

    # -------------------------------------------------------------- a step

    def weigh(self, experience: Experience, step: int) -> Weighed:
        self._step = step
        self._tell_changes()
        return super().weigh(experience, step)

    @torch.no_grad()
    def scored(self, rows: Experience, active: Sequence[Active]) -> dict[str, Tensor]:
        numbered = rows.with_columns(row=torch.arange(len(rows), device=rows["action"].device))
        shares = _never_empty(deal(numbered, self.terms, self.ranks.number))
        asked = [(self.key, self._step, wire.packed(share)) for share, _ in shares]
        found: dict[str, list[Tensor]] = {}
        for said, (share, own) in zip(self.ranks.each("scored", asked), shares, strict=True):
            at = {"row": share["row"], "episode": share.by("episode").keys}
            for name, column in {**heard(said), **at}.items() if own else ():
                found.setdefault(name, []).append(column)
        device = rows["action"].device
        return in_order({name: torch.cat([c.to(device) for c in columns]) for name, columns in found.items()})

    @torch.no_grad()
    def _agree(self, weighed: Weighed) -> None:
        """Before the first passes: driver and learners must say the same of some rows.

        They have made the same models of the same plan; a part that changed the driver's in the meantime, in a way
        that nobody is told of, would otherwise let them learn something else in silence.
        """
        rows, self._agreed = weighed.rows, True
        if not len(rows):
            return
        rows = rows.take(unit_labels(rows, self.terms) == 0)
        # outputs of other selves are with the learners alone
        others = frozenset(need for need, _, _ in divergence.parse(self.objective.needs))
        here = self.now(self._beside(rows), weighed.active, but=others)
        there = heard(self.ranks.all("scored", self.key, self._step, wire.packed(rows))[0])
        for name, column in here.items():
            gap = float((column.cpu().float() - there[name].float()).abs().mean())
            if gap > GAP[column.dtype]:
                raise PanoplyError(
                    f"Learners and the driver disagree on '{name}' of unchanged weights by {gap:.2g}: a part has "
                    "changed the policy where learners do not see it, so that this method cannot be spread. Leave "
                    "--learners out."
                )

    def passes(self, weighed: Weighed) -> Totals:
        if not self._agreed:
            self._agree(weighed)
        prepared = told(weighed.prepared)
        watched = to_array(self.watch.episodes) if self.watch is not None else None
        asked = [(self.key, self._step, *share, prepared, watched) for share in self._shares(weighed.rows)]
        answers = self.ranks.each("passes", asked)
        totals = Totals()
        for said, norm, seen in answers:
            totals.hear(said)
            self.mover.measured(norm)
            if self.watch is not None:
                self.watch.hear(seen)
        return totals

    def _shares(self, rows: Experience) -> list[tuple[wire.Packed | str | None, bool]]:
        """What each rank is to pass over, and whether it is its own."""
        if rows is self._dealt:
            return [(AGAIN, True)] * self.ranks.number
        self._dealt = rows
        dealt = deal(rows, self.terms, self.ranks.number)
        if self.ranks.in_step and len(rows):
            return [(wire.packed(share), own) for share, own in _never_empty(dealt)]
        return [(None if share is None else wire.packed(share), True) for share in dealt]

    def _clip(self) -> float:
        return self.mover.norm

    def _move(self, experience: Experience, step: int) -> None:
        self.ranks.begin("move", self.key, step)
        self._behind, self._version = True, step + 1
        for hook in self.mover.optimiser._optimizer_step_post_hooks.values():
            hook(self.mover.optimiser, (), {})

    def gradient(self, experience: Experience, step: int = 0) -> dict[str, Tensor]:
        self.passes(self.weigh(experience, step))
        found = {n: to_tensor(g) for said in self.ranks.all("gradient", self.key) for n, g in said.items()}
        return {name: found[name].to(p.device) for name, p in self.masters.named().items()}

    # -------------------------------------------------------------- weights

    @torch.no_grad()
    def settle(self) -> None:
        """The driver's weights are those that the learners have."""
        super().settle()
        if not self._behind:
            return
        self._behind = False
        answers = self.ranks.all("weights", self.key)
        self.ranks.note([diary for _, diary in answers])
        for said, _ in answers:
            for name, array in said.items():
                self.masters.moving[name].copy_(to_tensor(array))
        self.masters.publish()

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        return {name: (t, t._version) for name, t in not_learned(self.policy).items()}

    def _tell_changes(self) -> None:
        """Tell the ranks what of the driver's models has changed without being learned."""
        now = self._versions()
        changed = [n for n, (t, v) in now.items() if self._known[n][0] is not t or self._known[n][1] != v]
        if changed:
            self.ranks.all("take", self.key, {name: to_array(now[name][0]) for name in changed})
        self._known = now

    def compare(self, experience: Experience) -> Experience:
        """Add the columns of other selves of the policy, each rank those of some rows."""
        rows = experience.with_columns(row=torch.arange(len(experience), device=experience["action"].device))
        shares = _never_empty(deal(rows, (), self.ranks.number))
        asked = [(self.key[0], self._version, wire.packed(share.without("row"))) for share, _ in shares]
        found: dict[str, list[Tensor]] = {"row": [share["row"] for share, own in shares if own]}
        for said, (_, own) in zip(self.ranks.each("compare", asked), shares, strict=True):
            for name, column in heard(said).items() if own else ():
                found.setdefault(name, []).append(column)
        columns = {name: torch.cat(parts) for name, parts in found.items()}
        order = columns.pop("row").argsort()
        return experience.with_columns(**{n: c.to(order.device)[order] for n, c in columns.items()})

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        kept = {n: to_tensor(a) for said in self.ranks.all("state", self.key) for n, a in said.items()}
        return {**kept, **super().state()}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        """What terms remember; the rest is taken up by the ranks, where it belongs."""
        super().load_state({n: v for n, v in named.items() if n.startswith(REMEMBERED)})
        self._known = self._versions()


def _never_empty(shares: Sequence[Experience | None]) -> list[tuple[Experience, bool]]:
    """Every rank has something to look at; whether it is its own."""
    some = next(share for share in shares if share is not None)
    return [(some, False) if share is None else (share, True) for share in shares]
