"""What an environment of another library must say, and which libraries are known.

An environment speaks text: it shows some, is told some, and says what that earned. All of it runs in a process of its
own (`worker.py`), and this file imports none of the libraries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from panoply.errors import PanoplyError, needs_extra, unknown


class Environment(Protocol):
    """One episode at a time. The same seed and the same words give the same episode."""

    def reset(self, seed: int) -> str:
        """Begin an episode; what is shown first."""

    def step(self, said: str) -> tuple[str, float, bool]:
        """What is shown then, what was earned by it, and whether the episode is over."""

    def expert(self) -> str | None:
        """What should be said now; None where nobody knows."""


@dataclass(frozen=True)
class Library:
    """A library of environments, as far as it is known without importing it."""

    module: str
    """What has `make(id, options) → Environment`."""
    package: str
    extra: str
    hint: str
    """What a model is told before the first text, where the environment does not say it."""
    turns: int = 1
    """The most turns of an episode, unless `world.cap` says otherwise."""
    expert: bool = False
    network: bool = False
    by_text: bool = False
    """Problems are cheap and told apart by their text, so that held-out ones are held out by a hash of it; otherwise by
    their seeds."""
    spoken: bool = True
    """It shows text; otherwise whole conversations, as agents ask them."""
    costly: bool = False
    """A problem takes seconds to make: there are `world.seeds` of them, and few are held out."""


LIBRARIES: Mapping[str, Library] = {
    "reasoning-gym": Library(
        "panoply.environments.reasoning_gym",
        "reasoning_gym",
        "reasoning-gym",
        "Give the answer itself between <answer> and </answer>.",
        expert=True,
        by_text=True,
    ),
    "textworld": Library(
        "panoply.environments.textworld",
        "textworld",
        "textworld",
        "You play a text adventure. Say one command in each turn, alone on the last line.",
        turns=20,
        expert=True,
        costly=True,
    ),
    "textarena": Library("panoply.environments.textarena", "textarena", "textarena", "", turns=30),
    "gem": Library("panoply.environments.gem", "gem", "gem", "", turns=30),
    "openenv": Library("panoply.environments.openenv", "websockets", "openenv", "", turns=30, network=True),
    "babyai": Library(
        "panoply.environments.babyai",
        "minigrid",
        "babyai",
        "You are an agent in rooms on a grid. Say one action in each turn.",
        turns=64,
        expert=True,
    ),
    "sqlite": Library(
        "panoply.environments.sqlite",
        "sqlite3",
        "",
        "Answer the question about these tables. In each turn write either one SQL query, whose rows you will see, or "
        "ANSWER: followed by the answer.",
        turns=6,
        expert=True,
    ),
    "agent": Library("panoply.environments.agent", "panoply", "", "", turns=30, network=True, spoken=False),
    "own": Library("panoply.environments.own", "panoply", "", "", turns=30, expert=True),
}
"""By the word before the colon of a world's name."""


def parse(name: str) -> tuple[str, str, dict[str, Any]] | None:
    """`LIBRARY:ID,OPTION=VALUE,…` as its three pieces; None where no library of that name is known."""
    library, colon, rest = name.partition(":")
    if not colon or library not in LIBRARIES:
        return None
    if library == "openenv":  # an address may hold anything
        return library, rest, {}
    from panoply.values import yaml_value

    words = [word for word in re.split(r",(?=[^,=]+(?:=|$))", rest) if word]
    options = {k: yaml_value(v) for k, _, v in (word.partition("=") for word in words if "=" in word)}
    ids = [word for word in words if "=" not in word]
    if len(ids) > 1:
        raise PanoplyError(
            f"'{name}' names {len(ids)} environments: it is {library}:NAME,OPTION=VALUE, with one name."
        )
    return library, "".join(ids), options


def library_of(name: str) -> Library:
    """What is known of an environment's library, which is installed here."""
    found = parse(name)
    if found is None:
        raise unknown("library of environments", name.partition(":")[0], LIBRARIES)
    library = LIBRARIES[found[0]]
    if find_spec(library.package) is None:
        raise needs_extra(library.package, library.extra, f"The world {name}")
    return library


class NoSuch(PanoplyError):
    """An environment, or an option of one, that its library does not know."""


def known(kind: str, name: str, names: Any) -> None:
    """Refuse a name that is not among those there are, with the nearest one."""
    if name not in names:
        raise NoSuch(str(unknown(kind, name, names)))
