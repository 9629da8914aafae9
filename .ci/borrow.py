"""Lend another environment what an installed package needs, and nothing else: `borrow.py PACKAGE SITE_PACKAGES`.

What is lent is linked, not copied or installed again, so that the environment that tries the wheel is made in a second.
A dependency that the package does not declare is missing there as it would be anywhere else.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def required(name: str, extra: str = "") -> set[str]:
    """The names of all packages that one needs on this machine, directly or through others; not its own."""
    found: set[str] = set()
    waiting = [(name, extra)]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        try:
            wanted = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, wanted):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                found.add(requirement.name)
                more = {(requirement.name, of) for of in ("", *requirement.extras)} - seen
                seen |= more
                waiting += more
    return found


def lend(name: str, place: Path) -> None:
    """Link the files and folders of a package that lie directly in its site-packages."""
    try:
        held = distribution(name)
    except PackageNotFoundError:
        return
    for top in {path.parts[0] for path in held.files or ()} - {"..", "__pycache__"}:
        if not (place / top).exists():
            (place / top).symlink_to(Path(str(held.locate_file(top))).resolve())


if __name__ == "__main__":
    for package in sorted(required(sys.argv[1])):
        lend(package, Path(sys.argv[2]))
