"""Data that one stage of a recipe makes for others: a folder with `data.jsonl`, a row a line.

A row names its task by its place in the training split (`task`) and by what it is (`id`), so that it is only ever taken
for that very problem. It has what its maker gave: an `answer` in tokens, or a pair (`chosen`, `rejected`), and numbers
by name. `prompt` and `text` are for readers.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError
from panoply.files import is_file, read_lines

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

FILE = "data.jsonl"


class Row(TypedDict):
    """A line of `data.jsonl`."""

    task: int
    id: int
    prompt: str
    answer: NotRequired[list[int]]
    text: NotRequired[str]
    chosen: NotRequired[list[int]]
    rejected: NotRequired[list[int]]
    numbers: NotRequired[dict[str, float]]


def write(folder: Path, rows: Iterable[Row]) -> str:
    """Write all rows at once, and return a short hash of them; no rows are no data."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if not text:
        raise PanoplyError(
            "No row of data came out of it: ask for more tasks or answers, or for easier or harder ones."
        )
    write_atomically(folder / FILE, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(folder: str, needs: str) -> list[Row]:
    """The rows of a folder, each of which has the field that is needed."""
    path = Path(folder) / FILE
    if not folder or not is_file(path):
        named = f"'{folder}'" if folder else "no folder"
        raise PanoplyError(
            f"Stored data is a folder with {FILE}, which a make stage writes; {named} is none."
        )
    rows = _rows(str(path), path.stat().st_mtime_ns)
    if not rows or any(needs not in row for row in rows):
        raise PanoplyError(f"{path} has rows without '{needs}': it was made for something else.")
    return rows


@functools.lru_cache(maxsize=8)
def _rows(path: str, _changed: int) -> list[Row]:
    return [line.value for line in read_lines(path, Row)]


def tasks_of(rows: Iterable[Row], collect: Collector) -> list[Task]:
    """The tasks of rows, in the collector's world; of another world's rows they would be other problems."""
    found: list[Any] = []
    for row in rows:
        task = collect.task(row["task"])
        if task.id != row["id"]:
            raise PanoplyError(
                f"Stored data was made in another world than {collect.world.name} with these settings: its problem "
                f"'{row['prompt'][:40]}' is not the one at its place."
            )
        found.append(task)
    return found
