"""Which sandbox is taken: the one asked for, or the first that is safe and has what programs need; or none, and why."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from panoply.errors import PanoplyError, unknown
from panoply.sandbox.contract import Sandbox, Unavailable

NEEDS = {
    "python": "all of Python's standard library",
    "stdin": "an input that programs read",
    "files": "files",
}
"""What programs may need beside a part of the language."""
Make = Callable[..., Sandbox]
"""Called with `preload`; gives a sandbox that has been tried, or raises `Unavailable`."""


@dataclass(frozen=True)
class Kind:
    """A way to have walls."""

    name: str
    make: Make
    gives: frozenset[str]
    modules: bool = True
    """Whether installed packages can be loaded in it."""


def _monty(**asked: Any) -> Sandbox:
    from panoply.sandbox.monty import Monty

    return Monty(**asked)


def _namespaces(**asked: Any) -> Sandbox:
    from panoply.sandbox.locked import Namespaces

    return Namespaces(**asked)


def _landlock(**asked: Any) -> Sandbox:
    from panoply.sandbox.locked import Landlock

    return Landlock(**asked)


def _wasi(**asked: Any) -> Sandbox:
    from panoply.sandbox.wasi import Wasi

    return Wasi(**asked)


def _containers(**asked: Any) -> Sandbox:
    from panoply.sandbox.containers import Containers

    return Containers(**asked)


ALL = frozenset(NEEDS)
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("monty", _monty, frozenset(), modules=False),
        Kind("namespaces", _namespaces, ALL),
        Kind("landlock", _landlock, ALL - {"files"}),
        Kind("wasi", _wasi, ALL, modules=False),
        Kind("containers", _containers, ALL, modules=False),
    )
}
"""In the order in which `auto` tries them."""
_found: dict[tuple[str, tuple[str, ...]], Sandbox | Unavailable] = {}


@dataclass(frozen=True)
class Wanted:
    """What somebody who runs code of others asks for. `find` gives the sandbox."""

    name: str = "auto"
    """`auto`, or one of the sandboxes by name."""
    needs: frozenset[str] = frozenset()
    """Names of `NEEDS`; none where monty's part of the language is enough."""
    preload: tuple[str, ...] = ()
    """Installed packages that programs may import, loaded before the first of them."""
    kinds: Sequence[Kind] = field(default=(), compare=False, repr=False)
    """Those there are; all that are known where nothing is said."""

    def find(self) -> Sandbox:
        """The sandbox, started and tried, the same for all who ask alike; a sentence for each that cannot be had."""
        kinds = list(self.kinds) or list(known().values())
        if self.name != "auto":
            kinds = [kind for kind in kinds if kind.name == self.name]
            if not kinds:
                raise unknown("sandbox", self.name, ["auto", *known()])
        reasons = []
        for kind in kinds:
            reason = self._lacks(kind)
            if not reason:
                held = _made(kind, self.preload)
                if not isinstance(held, Unavailable):
                    return held
                reason = str(held)
            reasons.append(f"{kind.name}: {reason}")
        if self.name != "auto":
            why = reasons[0].removeprefix(f"{self.name}: ")
            raise PanoplyError(f"The sandbox {self.name} cannot be used here: {why}.")
        raise PanoplyError(f"There is no safe way to run code here. {'; '.join(reasons)}.")

    def _lacks(self, kind: Kind) -> str:
        """What programs need and a sandbox has not."""
        missing = [NEEDS[need] for need in NEEDS if need in self.needs - kind.gives]
        if self.preload and not kind.modules:
            missing.append(", ".join(self.preload))
        return (
            f"it has no {' and no '.join(missing)}".replace("no all of", "only a part of") if missing else ""
        )


def known() -> dict[str, Kind]:
    """Every sandbox by name, those of installed packages and plug-ins last."""
    from panoply import extensions

    extensions.load_installed()
    return KINDS


def register(name: str, make: Make, gives: Sequence[str] = ("python", "stdin", "files")) -> None:
    """Add a service that runs programs elsewhere, from a plug-in (`--plugin FILE.py`) or an installed package.

    `make(preload=…)` gives an object with `name`, `version`, `run`, `run_many` and `close`, or raises `Unavailable`.
    """
    if name in KINDS or name == "auto":
        raise PanoplyError(f"There is a sandbox '{name}' already.")
    KINDS[name] = Kind(name, make, frozenset(gives))


def _made(kind: Kind, preload: tuple[str, ...]) -> Sandbox | Unavailable:
    """Made once a process: to try one takes a moment, and its workers serve all."""
    key = (kind.name, preload)
    if key not in _found:
        try:
            _found[key] = kind.make(preload=preload)
        except Unavailable as reason:
            _found[key] = reason
        # a broken installation is a reason like others, and the next sandbox is tried
        except Exception as problem:
            _found[key] = Unavailable(f"it does not start ({type(problem).__name__}: {problem})")
    return _found[key]


@atexit.register
def close_all() -> None:
    """End all workers; who asks again gets new ones."""
    for held in _found.values():
        if not isinstance(held, Unavailable):
            held.close()
    _found.clear()
