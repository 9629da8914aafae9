"""The one exception a user is meant to see: a sentence, not a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class PanoplyError(Exception):
    """Bad input, an impossible plan, a broken file. The command line prints it and exits with code 2."""


class DeviceError(PanoplyError):
    """A GPU failed or has too little memory. What was saved before is untouched, and the run can be resumed."""


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Turn what a driver says into a sentence."""
    try:
        yield
    except RuntimeError as problem:
        if type(problem).__name__ not in ("AcceleratorError", "OutOfMemoryError"):
            raise
        said = str(problem).strip().splitlines()[0].rstrip(".")
        raise DeviceError(
            f"The GPU failed while {doing}: {said}. The run can be resumed from its last checkpoint."
        ) from problem


def unknown(kind: str, name: str, known: Iterable[str]) -> PanoplyError:
    """An error for a name that does not exist, with the nearest one that does."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return PanoplyError(f"Unknown {kind} '{name}'. Did you mean '{near[0]}'?")
    listing = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return PanoplyError(f"Unknown {kind} '{name}'. There is: {listing or 'nothing yet'}.")


def needs_extra(package: str, extra: str, purpose: str) -> PanoplyError:
    """An error for an optional library that is not installed, with the line that installs it."""
    return PanoplyError(f"{purpose} needs {package}: pip install 'panoply-rl[{extra}]'.")
