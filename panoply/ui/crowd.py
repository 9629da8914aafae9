"""Many clients, slow ones among them: a reader is answered promptly, whatever the others do or do not do."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Any

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

AT_ONCE = 2
"""Answers that are made at the same time; more would only take turns on one interpreter."""
WAITING = 100
"""Questions that wait for their turn; the oldest beyond them is sent away."""
CONNECTIONS = 128
"""Connections that are kept open; beyond them the oldest are closed. A browser has six."""
PATIENCE = 10.0
"""Seconds in which a client must have asked its question, or taken some more of its answer."""
NEW = 2.0
"""Seconds in which a client that says nothing yet counts as one that asks."""


class Turns:
    """Whoever asked last is answered first: those who wait already have either gone or can wait.

    async with turns:
        …
    """

    def __init__(self, at_once: int = AT_ONCE, waiting: int = WAITING):
        self._free, self._most = at_once, waiting
        self._waiting: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> None:
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        if len(self._waiting) > self._most:
            self._waiting.pop(0).set_exception(HTTPException(503, "Too many questions at once: ask again."))
        try:
            await mine
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            elif not mine.cancelled() and mine.exception() is None:  # its turn had just come
                self._pass_on()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            last = self._waiting.pop()
            if not last.done():
                last.set_result(None)
                return
        self._free += 1


class Connection(H11Protocol):
    """One that knows its place among all that came."""

    _count = itertools.count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.place = next(self._count)
        super().connection_made(transport)


class Door:
    """Closes connections whose clients neither ask nor read, and the oldest where there are too many."""

    def __init__(self, most: int = CONNECTIONS, patience: float = PATIENCE):
        self.most, self.patience = most, patience
        self._seen: dict[Any, tuple[float, Any]] = {}
        """When a connection last moved, and what it looked like then."""
        self._came: dict[Any, float] = {}

    def look(self, connections: Iterable[Any], now: float | None = None) -> None:
        """Called again and again with the open connections."""
        now = time.monotonic() if now is None else now
        seen: dict[Any, tuple[float, Any]] = {}
        for connection in connections:
            if connection.transport is not None and not connection.transport.is_closing():
                state = (connection.cycle, connection.transport.get_write_buffer_size())
                since, before = self._seen.get(connection, (now, state))
                seen[connection] = (since if state == before else now, state)
        self._seen = seen
        self._came = {connection: self._came.get(connection, now) for connection in seen}
        surplus = len(seen) - self.most
        for i, connection in enumerate(sorted(seen, key=lambda each: self._worth(each, now))):
            blameless, since, _ = self._worth(connection, now)
            if i < surplus or (not blameless and now - since > self.patience):
                connection.transport.abort()

    def _worth(self, connection: Any, now: float) -> tuple[bool, float, int]:
        """Whether it is not its client that is waited for, since when it stands as it does, and when it came.

        Who has just come may still be about to ask.
        """
        since, (cycle, unread) = self._seen[connection]
        new = now - self._came[connection] < NEW
        return new or (cycle is not None and not unread), since, connection.place
