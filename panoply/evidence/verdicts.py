"""What was measured of each claim: below the current folder, or else before it was shipped with the package.

Verdicts are shipped without their single runs; `make docs` writes them from results/claims. Nothing here loads torch.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

from panoply.files import BadFile, is_file, read_json

STORE = Path("results") / "claims"
FILE = "verdicts.json"
DETAIL = ("runs", "tuning", "curves", "replications", "versions")
"""What stays in results/claims."""


def stored(slug: str, store: Path = STORE) -> dict[str, Any] | None:
    """What was measured of a claim, if anything."""
    path = store / f"{slug}.json"
    if not is_file(path):
        return None
    try:
        return read_json(path, dict[str, Any], finite=False)
    except BadFile as error:
        raise BadFile(f"{error} Measure the claim again.") from error


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
