"""A reader is served promptly while others hold connections, ask without end, or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException

from panoply.ui.crowd import CONNECTIONS, Door, Turns


def in_a_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """In a thread of its own: a browser of another test may leave a loop running in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def test_who_asked_last_is_answered_first_and_the_oldest_are_sent_away() -> None:
    async def crowd() -> list[int]:
        turns, order, sent_away = Turns(at_once=1, waiting=3), list[int](), list[int]()

        async def ask(i: int) -> None:
            try:
                async with turns:
                    order.append(i)
                    await asyncio.sleep(0.01)
            except HTTPException:
                sent_away.append(i)

        await asyncio.gather(*(ask(i) for i in range(6)))
        assert sent_away == [1, 2]
        return order

    assert in_a_loop(crowd()) == [0, 5, 4, 3]


def test_a_turn_that_is_given_up_goes_to_the_next() -> None:
    async def crowd() -> None:
        turns = Turns(at_once=1)
        async with turns:
            gone = asyncio.create_task(turns.__aenter__())
            kept = asyncio.create_task(turns.__aenter__())
            chosen = asyncio.create_task(turns.__aenter__())
            await asyncio.sleep(0)
            gone.cancel()
        chosen.cancel()  # its turn has come, and it does not know yet
        await asyncio.wait_for(kept, 2)
        assert chosen.cancelled() or chosen.exception() is None

    in_a_loop(crowd())


class Connection:
    def __init__(self, cycle: object = None, unread: int = 0, place: int = 0):
        self.place = place
        self.cycle, self.unread, self.open = cycle, unread, True
        self.transport = SimpleNamespace(
            is_closing=lambda: not self.open, get_write_buffer_size=lambda: self.unread, abort=self.abort
        )

    def abort(self) -> None:
        self.open = False


def test_the_door_closes_on_those_who_neither_ask_nor_read() -> None:
    door = Door(patience=10)
    silent, deaf, slow, asking = Connection(), Connection("q", 9), Connection("q", 9), Connection("q")
    everyone = (silent, deaf, slow, asking)
    for now in range(0, 40, 5):
        slow.unread += 1
        door.look(everyone, float(now))
        if now == 10:
            assert [c.open for c in everyone] == [True] * 4
    assert [c.open for c in everyone] == [False, False, True, True]


def test_the_door_closes_on_the_silent_first_where_there_are_too_many() -> None:
    door = Door(most=7)
    silent = [Connection(place=9) for _ in range(5)]
    asking = [Connection("q", place=i) for i in range(4)]
    door.look([*silent, *asking[3:]], 0.0)
    door.most = 2
    door.look([*silent, *reversed(asking)], 3.0)
    assert not any(c.open for c in silent)
    assert [c.open for c in asking] == [False, True, True, False]


def test_who_has_just_come_may_be_about_to_ask() -> None:
    """A reader's new connection is kept, though many that came before have asked and wait."""
    door, reader = Door(most=3), Connection(place=9)
    asking = [Connection("q", place=i) for i in range(3)]
    door.look(asking, 0.0)
    door.look([*asking, reader], 1.0)
    assert [c.open for c in (*asking, reader)] == [False, True, True, True]


@pytest.fixture
def held() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for each in sockets:
        each.close()


def work(seconds: float) -> list[str]:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return []


def test_two_hundred_clients_that_do_not_read(serving: Any, held: list[socket.socket]) -> None:
    """Each asks for what takes 30 ms of work: one after another that would be six seconds."""
    token = serving.address.rpartition("=")[2]
    cookie, once = {f"panoply-{serving.port}": token}, {"connection": "close"}
    plain, base = serving.answers.index.strangers, f"http://127.0.0.1:{serving.port}"
    with httpx.Client(base_url=base, cookies=cookie, headers=once, timeout=30) as reader:
        reader.get("/api/runs")
        serving.answers.index.strangers = lambda: [*work(0.03), *plain()]
        try:
            for _ in range(200):
                held.append(socket.create_connection(("127.0.0.1", serving.port)))
                lines = ("GET /api/runs HTTP/1.1", f"Host: 127.0.0.1:{serving.port}",
                         f"Cookie: panoply-{serving.port}={token}")  # fmt: skip
                held[-1].sendall("\r\n".join((*lines, "", "")).encode())
            begun = time.monotonic()
            assert reader.get("/").status_code == 200
            assert reader.get("/api/runs").json()["runs"]
            assert time.monotonic() - begun < 3
        finally:
            serving.answers.index.strangers = plain


def test_silent_clients_do_not_keep_a_reader_out(serving: Any, held: list[socket.socket]) -> None:
    held += [socket.create_connection(("127.0.0.1", serving.port)) for _ in range(CONNECTIONS + 50)]
    time.sleep(0.3)
    with httpx.Client(base_url=f"http://127.0.0.1:{serving.port}", timeout=10) as reader:
        assert reader.get("/").status_code == 401
    closed = 0
    for each in held:
        each.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                closed += each.recv(1) == b""
            except ConnectionResetError:
                closed += 1
    assert closed >= 50
