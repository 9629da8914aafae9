"""Samplers as a crew: shares go to who has least to do, and whoever dies or hangs is stood in for."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from panoply.errors import PanoplyError
from panoply.policies.moving import Weights
from panoply.scale.cluster import Cluster, Future, Handle, WorkerDied
from panoply.scale.weights import Parcel, Publisher
from panoply.selves import LEARNER

S = TypeVar("S")
THRICE = 3
"""Deaths over one task, after which it is left out."""
IN_VAIN = 16
"""Deaths one after another, without an answer between, after which it is not the tasks."""


@dataclass
class Published:
    """Weights that are on their way to whoever is asked to act with them."""

    who: str
    version: int
    checksum: str
    parcel: Parcel
    weights: Weights | None = None
    """Where a publisher has to send them itself."""


@dataclass
class Member:
    """What the driver knows of one sampler."""

    handle: Handle
    has: dict[str, str] = field(default_factory=dict)
    """The checksum of whose weights it has, by who they are of."""
    load: float = 0.0
    """Episodes that it was asked for and has not answered."""
    busy: float = 0.0
    tokens: int = 0
    memory_mb: float = 0.0
    version: int = 0


@dataclass
class _Asked(Generic[S]):
    """A share under way, and those who were asked for it."""

    index: int
    share: S
    deaths: int
    since: float = 0.0
    by: list[Member] = field(default_factory=list)


class Crew(Generic[S]):
    """`n` samplers. `place` makes some more of them, `split` cuts a share in two where it can be cut."""

    def __init__(
        self,
        cluster: Cluster,
        n: int,
        place: Callable[[int], list[Handle]],
        publisher: Publisher,
        patience: float,
        split: Callable[[S], list[S]],
        size: Callable[[S], float],
    ):
        self.cluster, self.n, self.place, self.publisher = cluster, n, place, publisher
        self.patience, self.split, self.size = patience, split, size
        self.members = [Member(handle) for handle in place(n)]
        self.restarts: Counter[str] = Counter()
        self.deaths = 0
        """One after another, since somebody last answered."""
        self.left_out: list[S] = []
        """Shares of one task that killed whoever played them, of the last call."""

    # -------------------------------------------------------------- weights

    def published(self, who: str, version: int, checksum: str, weights: Weights) -> Published:
        return Published(who, version, checksum, self.publisher.parcel(weights, version), weights)

    def _deliver(self, member: Member, published: Published) -> Future | None:
        """Have a sampler take weights that it does not have yet; it will before it does anything else."""
        if member.has.get(published.who) == published.checksum:
            return None
        member.has[published.who] = published.checksum
        parcel = dict(published.parcel)
        content = parcel.pop("content", None)
        sent = member.handle.call("take", published.who, published.version, parcel, content)
        if published.weights is not None:
            self.publisher.flow(published.weights)
        return sent

    @staticmethod
    def _check(member: Member, sent: Future | None, published: Published) -> None:
        member.version = published.version if published.who == LEARNER else member.version
        if sent is not None and (found := sent.result()) != published.checksum:
            raise PanoplyError(
                f"{member.handle.name} has other weights ({found}) than it was given ({published.checksum}) at step "
                f"{published.version}: it would sample from another policy than the one that learns."
            )

    # -------------------------------------------------------------- shares

    def asked(self, method: str, shares: Sequence[S], published: Published) -> list[tuple[S, Any]]:
        """Every share with its answer, in their order; one that was cut is several. Some may be `left_out`."""
        self.left_out, found = [], defaultdict[int, list[tuple[S, Any]]](list)
        open_ = [_Asked(i, share, 0) for i, share in enumerate(shares)]
        waiting, running = open_[::-1], dict[int, tuple[Future, Future | None, Member, _Asked[S]]]()
        over: set[int] = set()
        self._fill_up()
        while waiting or any(id(asked) not in over for *_, asked in running.values()):
            while waiting:
                asked = waiting.pop()
                self._ask(method, asked, published, running)
            done = self.cluster.wait([entry[0] for entry in running.values()], self._timeout(running, over))
            for future in done:
                _, sent, member, asked = running.pop(id(future))
                member.load -= self.size(asked.share)
                try:
                    answer = future.result()
                    self._check(member, sent, published)
                except WorkerDied:
                    waiting += self._bury(member, asked, over, running)
                    continue
                self.deaths = 0
                self._note(member, answer)
                if id(asked) not in over:  # the first answer counts, and others are equal
                    over.add(id(asked))
                    found[asked.index].append((asked.share, answer))
            self._look_for_hung(method, published, running, over)
        return [one for i in range(len(shares)) for one in self._in_order(found[i])]

    def _in_order(self, found: list[tuple[S, Any]]) -> list[tuple[S, Any]]:
        return sorted(found, key=lambda one: one[0]["first"])  # type: ignore[index]

    def _ask(self, method: str, asked: _Asked[S], published: Published, running: dict[int, Any]) -> None:
        """Ask the one with least to do, of those who were not asked for it yet."""
        free = [member for member in self.members if member not in asked.by] or self.members
        member = min(free, key=lambda one: one.load)
        member.load += self.size(asked.share)
        asked.since = time.monotonic()
        asked.by.append(member)
        sent = self._deliver(member, published)
        future = member.handle.call(method, asked.share)
        running[id(future)] = (future, sent, member, asked)

    def _timeout(self, running: dict[int, Any], over: set[int]) -> float:
        since = [asked.since for *_, asked in running.values() if id(asked) not in over]
        return max(0.01, min(since, default=0.0) + self.patience - time.monotonic())

    def _look_for_hung(
        self, method: str, published: Published, running: dict[int, Any], over: set[int]
    ) -> None:
        """What has taken longer than `patience` is asked elsewhere, too."""
        late = time.monotonic() - self.patience
        for _, _, _, asked in list(running.values()):
            if id(asked) not in over and asked.since <= late:
                self._ask(method, asked, published, running)

    # -------------------------------------------------------------- deaths

    def _bury(
        self, member: Member, asked: _Asked[S], over: set[int], running: dict[int, Any]
    ) -> list[_Asked[S]]:
        """Somebody died over a share: a new one comes, and the share is asked again, in two halves where it has two."""
        self.deaths += 1
        self._lose(member)
        if self.deaths >= IN_VAIN:
            raise WorkerDied(
                f"Samplers died {self.deaths} times one after another without an answer: it is not the tasks.",
                member.handle.name,
            )
        self._fill_up()
        if id(asked) in over or any(other is asked for *_, other in running.values()):
            return []
        deaths, parts = asked.deaths + 1, self.split(asked.share)
        if len(parts) == 1 and deaths >= THRICE:
            over.add(id(asked))
            self.left_out.append(asked.share)
            return []
        over.add(id(asked))
        return [_Asked(asked.index, part, deaths) for part in parts[::-1]]

    def _lose(self, member: Member) -> None:
        if member in self.members:
            self.members.remove(member)
            self.restarts[member.handle.name] += 1

    def _fill_up(self) -> None:
        """Make up for those who are missing; where there is no room for them, others do their work."""
        missing = self.n - len(self.members)
        if missing <= 0:
            return
        try:
            self.members += [Member(handle) for handle in self.place(missing)]
        except PanoplyError:
            if not self.members:
                raise

    # -------------------------------------------------------------- who did what

    def _note(self, member: Member, answer: Any) -> None:
        member.busy += answer["busy"]
        member.tokens += answer["tokens"]
        member.memory_mb = answer["memory_mb"]
        if answer.get("has") is not None:  # it has taken newer weights itself
            member.has[LEARNER], member.version = answer["has"], answer["version"]

    def workers(self, step: int, seconds: float) -> list[dict[str, Any]]:
        """A line for each, of what it did since the last call, `seconds` ago."""
        lines = []
        for member in self.members:
            name = member.handle.name
            lines.append(
                {
                    "step": step,
                    "worker": name,
                    "role": "sampler",
                    "node": member.handle.node,
                    "busy": round(member.busy, 4),
                    "wait": round(max(0.0, seconds - member.busy), 4),
                    "tokens": member.tokens,
                    "memory_mb": float(member.memory_mb),
                    "version": member.version,
                    "restarts": self.restarts[name],
                }
            )
            member.busy, member.tokens = 0.0, 0
        return lines

    def close(self) -> None:
        for member in self.members:
            member.handle.kill()
        self.members = []
        self.publisher.close()
