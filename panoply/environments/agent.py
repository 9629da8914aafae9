"""An agent of yours as an environment: a function that asks an OpenAI-style endpoint, and returns what it earned.

The endpoint is in the agent's own process. Each question of the agent's is what the policy sees next; the policy's
answer is what the question returns. So with whatever framework an agent was written, every method can learn from it.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from panoply.environments.environment import NoSuch
from panoply.rewards.worker import _awaited, accepted, load
from panoply.serving.endpoint import Endpoint
from panoply.serving.protocol import Asked, Refused, Said, chunks, completion

MODEL = "policy"


def make(id: str, options: Mapping[str, Any]) -> Agent:
    file, colon, name = id.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise NoSuch(f"An agent of yours is agent:FILE.py:FUNCTION, not agent:{id}.")
    try:
        return Agent(load(file, name), options)
    except FileNotFoundError:
        raise NoSuch(f"There is no file '{file}'.") from None
    except ImportError as error:
        raise NoSuch(f"{error}.") from error


class Gone(Exception):
    """Nobody goes on with the episode."""


class Agent:
    """The function is called with `seed`, `base_url`, `api_key` and `model`, as far as it takes them, and options."""

    def __init__(self, function: Any, options: Mapping[str, Any]):
        self.function, self.options = function, dict(options)
        self.key, self.model = secrets.token_urlsafe(16), MODEL
        self.endpoint = Endpoint(self, self.key).start()
        self.life = 0
        self._events: queue.Queue[tuple[int, str, Any]] = queue.Queue()
        self._said: queue.Queue[str | None] = queue.Queue()
        self._one = threading.Lock()

    # -------------------------------------------------------------- as an environment

    def reset(self, seed: int) -> dict[str, Any]:
        self._said.put(None)  # an episode that somebody left ends with an error in its agent
        self.life += 1
        self._events, self._said = queue.Queue(), queue.Queue()
        threading.Thread(target=self._run, args=(seed, self.life, self._events), daemon=True).start()
        kind, found = self._next()
        if kind != "asked":
            raise RuntimeError("it returned before it asked the policy anything")
        return {"messages": found.messages, "tools": found.tools}

    def step(self, said: str) -> tuple[dict[str, Any] | str, float, bool]:
        self._said.put(said)
        kind, found = self._next()
        if kind == "earned":
            return "", float(found), True
        return {"messages": found.messages, "tools": found.tools}, 0.0, False

    def expert(self) -> str | None:
        return None

    def _next(self) -> tuple[str, Any]:
        _, kind, found = self._events.get()
        if kind == "raised":
            raise found
        return kind, found

    def _run(self, seed: int, life: int, events: queue.Queue[tuple[int, str, Any]]) -> None:
        given = {"seed": seed, "base_url": self.endpoint.address, "api_key": self.key, "model": MODEL}
        try:
            earned = self.function(**accepted(self.function, {**given, **self.options}))
            if hasattr(earned, "__await__"):
                earned = _awaited(earned)
            events.put((life, "earned", float(earned)))
        except BaseException as error:
            events.put((life, "raised", error))

    # -------------------------------------------------------------- as who answers

    def answer(self, asked: Asked) -> dict[str, Any]:
        if asked.n != 1:
            raise Refused("One answer at a time: leave 'n' out.")
        with self._one:  # an agent that asks several things at once is answered one by one
            said = self._said
            self._events.put((self.life, "asked", asked))
            text = said.get()
        if text is None:
            raise Refused("The episode is over.", 410)
        return completion(asked, [Said([], [], text, True)], MODEL, str(self.life))

    def stream(self, asked: Asked) -> Iterator[dict[str, Any]]:
        yield from chunks(self.answer(asked), streamed=False)

    def reward(self, episode: str, reward: float) -> dict[str, Any]:
        raise Refused("In training an agent returns what it earned: its rewards are not posted.")
