"""An environment of yours: a class in a file, with `reset(seed)`, `step(text)` and, if it knows one, `expert()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from panoply.environments.environment import NoSuch
from panoply.rewards.worker import load


def make(id: str, options: Mapping[str, Any]) -> Own:
    file, colon, name = id.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise NoSuch(f"An environment of yours is own:FILE.py:CLASS, not own:{id}.")
    try:
        built = load(file, name)
    except FileNotFoundError:
        raise NoSuch(f"There is no file '{file}'.") from None
    except ImportError as error:
        raise NoSuch(f"{error}.") from error
    return Own(built(**options))


class Own:
    """As it is, with an expert who knows nothing where it has none."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.reset, self.step = inner.reset, inner.step

    def expert(self) -> str | None:
        found: str | None = getattr(self.inner, "expert", lambda: None)()
        return found
