"""The verdicts that ship with the package: what was measured of each claim, without the single runs.

`make docs` writes them from results/claims. What was measured below the current folder comes first.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

from panoply.evidence.trials import STORE, stored
from panoply.files import read_json

FILE = "verdicts.json"
DETAIL = ("runs", "tuning", "curves", "history", "replications", "versions")
"""What stays in results/claims."""


def known(slug: str, store: Path = STORE) -> dict[str, Any] | None:
    """What was measured of a claim: here, or before it was shipped."""
    return stored(slug, store) or shipped().get(slug)


@functools.cache
def shipped() -> dict[str, dict[str, Any]]:
    """The shipped verdicts by the name of their work."""
    with resources.as_file(resources.files("panoply.evidence") / FILE) as path:
        return read_json(path, dict[str, dict[str, Any]])


def shipment(claims: Path) -> str:
    """What is to be shipped, a line a work."""
    lines = []
    for path in sorted(claims.glob("*.json")):
        facts = read_json(path, dict[str, Any])
        kept = {name: value for name, value in facts.items() if name not in DETAIL}
        lines.append(f" {json.dumps(path.stem)}: {json.dumps(kept, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
