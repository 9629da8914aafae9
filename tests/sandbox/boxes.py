"""The sandboxes that start here, each named; the others with their reason."""

from __future__ import annotations

import functools

import pytest

from panoply.sandbox import Sandbox, Unavailable
from panoply.sandbox.choice import KINDS

NAMES = ("monty", "namespaces", "landlock")
"""Those that can be tried in seconds."""


@functools.cache
def started(name: str) -> Sandbox | str:
    """A sandbox with one worker, so that one program follows another in it; or why there is none."""
    try:
        return KINDS[name].make(workers=1)
    except Unavailable as reason:
        return str(reason)


def box(name: str) -> Sandbox:
    held = started(name)
    if isinstance(held, str):
        pytest.skip(f"{name}: {held}")
    return held
