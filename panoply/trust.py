"""Which Python a run folder may have run, and which servers asked: only what this user has named or allowed before.

A run folder is data but for the Python files that its `run.json` names: plug-ins, reward functions, and modules of
Gymnasium environments; and for the addresses of environments that others serve (`openenv:http://…`). Whoever made the
folder chose them. So a file runs without being asked about only if a command of this user's has named it, and if it
still says what it said then; and so is a server asked. Everything else is named, and refused, until `--trust` (in
Python `trust=True`) allows it.

What was run is remembered by its hash, a line each, in `$XDG_STATE_HOME/panoply/trusted` (`~/.local/state/panoply/`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from panoply.environments.environment import LIBRARIES
from panoply.errors import PanoplyError, plain
from panoply.files import BadFile, is_file, read_bytes

_given: ContextVar[bool] = ContextVar("trust", default=False)
OURS = ("logged:", *(f"{library}:" for library in LIBRARIES))
"""Names of worlds whose Python is this library's, or one's that it knows."""
SERVED = "openenv:"
"""So begins the name of a world that is on a server."""
NO_FILES = ("module ", SERVED)
"""What is known by its name and not by what is in it."""
_known: set[str] = set()
"""What this process has run, also where the file that remembers cannot be written."""


class Untrusted(PanoplyError):
    """Python or a server that a record of others names, and that this user has not named before."""


@contextlib.contextmanager
def trusting(given: bool) -> Iterator[None]:
    """Whether what a record names is to be trusted without having been seen before."""
    token = _given.set(given or _given.get())
    try:
        yield
    finally:
        _given.reset(token)


def check(where: str | Path, record: Mapping[str, Any]) -> None:
    """Refuse a record of others that names Python which this user has not run before."""
    named = sorted(code_in(record))
    if _given.get():
        remember(record)
        return
    strange = [name for name in named if not _is_known(name)]
    servers = [name for name in strange if name.startswith(SERVED)]
    if code := [plain(name) for name in strange if name not in servers]:
        raise Untrusted(
            f"{plain(where)} has Python run that you have not run before, or that has changed since: "
            f"{', '.join(code)}. Read it, and allow it with --trust (in Python trust=True)."
        )
    if servers:
        raise Untrusted(
            f"{plain(where)} has a server asked that you have not named before: {', '.join(map(plain, servers))}. "
            "It sees all that the policy says; allow it with --trust (in Python trust=True)."
        )


def remember(record: Mapping[str, Any]) -> None:
    """Note that a user's own command has run what a plan names."""
    for name in code_in(record):
        remember_key(_key(name), name)


def remember_key(key: str | None, name: str) -> None:
    if key is None or key in _known or key in _stored():
        return
    _known.add(key)
    with contextlib.suppress(OSError):  # a home that cannot be written: the next process asks again
        store = _store()
        store.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(store, "a", encoding="utf-8") as file:
            file.write(f"{key}  {plain(name)}\n")


def code_in(record: Any) -> set[str]:
    """What a plan, or a recipe's choices, name of others' Python and servers.

    Files are paths, modules of environments `module X`, and servers their worlds' names, `openenv:http://…`.
    """
    found: set[str] = set()
    waiting = [("", record)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(str(k), v) for k, v in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(name, v) for v in value]
        elif isinstance(value, str):
            if name == "plugins":
                found.add(value)
            elif value.startswith(SERVED):
                found.add(re.sub(r"@\d+$", "", value))
            elif file := re.fullmatch(r"(?:(?:own|agent):)?(.+\.py)(:.*)?", value, re.DOTALL):
                found.add(file[1])
            elif name in ("id", "env", "world") and ":" in value and not value.startswith(OURS):
                found.add(f"module {value.partition(':')[0]}")
    return found


def _is_known(name: str) -> bool:
    if not name.startswith(NO_FILES):
        if not is_file(name):
            return True  # nothing can be run; that it is missing is said where it is needed
        if not os.path.isabs(name):
            return False  # it would be another file in another folder
    key = _key(name)
    return key is not None and (key in _known or key in _stored())


def _key(name: str) -> str | None:
    if name.startswith(NO_FILES):
        return hashlib.sha256(name.encode()).hexdigest()
    with contextlib.suppress(BadFile):
        return hashlib.sha256(read_bytes(name)).hexdigest()
    return None


def _store() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "panoply" / "trusted"


def _stored() -> set[str]:
    with contextlib.suppress(BadFile):
        return {line[:64] for line in read_bytes(_store()).decode("utf-8", "replace").splitlines()}
    return set()
