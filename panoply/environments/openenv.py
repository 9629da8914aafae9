"""A server of OpenEnv's, by its address: one connection an episode, JSON over it. Nothing of OpenEnv is needed here."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from typing import Any

from panoply.environments.environment import NoSuch

PATIENCE = 30.0
"""Seconds for a connection."""


def make(id: str, options: Mapping[str, Any]) -> Remote:
    if not re.match(r"(http|ws)s?://.", id):
        raise NoSuch(f"An OpenEnv server is named by its address, openenv:http://HOST:PORT, not '{id}'.")
    return Remote(id.rstrip("/"))


class Remote:
    """What is said goes into the text of the server's action, where it has one text, and else is its action in JSON."""

    def __init__(self, address: str):
        self.address = address
        self.socket: Any = None
        self.field = self._text_of_actions()

    def reset(self, seed: int) -> str:
        from websockets.sync.client import connect

        if self.socket is not None:
            self.socket.close()
        where = re.sub("^http", "ws", self.address)
        self.socket = connect(f"{where}/ws", open_timeout=PATIENCE, max_size=2**24)
        return _shown(self._ask({"type": "reset", "data": {"seed": seed % 2**31}}))

    def step(self, said: str) -> tuple[str, float, bool]:
        try:
            action = {self.field: said} if self.field else json.loads(said)
        except ValueError:
            return "An action is a JSON object.", 0.0, False
        found = self._ask({"type": "step", "data": action})
        return _shown(found), float(found.get("reward") or 0.0), bool(found.get("done"))

    def expert(self) -> str | None:
        return None

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.socket.send(json.dumps(message))
        answer = json.loads(self.socket.recv())
        if answer.get("type") == "error":
            raise RuntimeError(str(answer.get("data", {}).get("message", "the server refused")))
        found: dict[str, Any] = answer.get("data", {})
        return found

    def _text_of_actions(self) -> str:
        """The field of an action that is its text; nothing where there is none, or are several."""
        address = re.sub("^ws", "http", self.address)
        try:
            with urllib.request.urlopen(f"{address}/schema", timeout=PATIENCE) as answer:
                schema = json.load(answer)
        except (OSError, ValueError) as error:
            raise NoSuch(f"There is no OpenEnv server at {self.address}: {error}.") from error
        fields = schema.get("action", {}).get("properties", {})
        texts = [name for name, kind in fields.items() if kind.get("type") == "string"]
        return texts[0] if len(texts) == 1 else ""


def _shown(found: Mapping[str, Any]) -> str:
    """The text of an observation, where it has one text, and else all of it."""
    fields = {
        k: v for k, v in found.get("observation", {}).items() if k not in ("metadata", "done", "reward")
    }
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 and len(fields) == 1 else json.dumps(fields)
