"""How text is laid out on a terminal's page: tables, paragraphs, equations."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from panoply.errors import plain
from panoply.report import shown


def page_width() -> int:
    """The terminal's width, at most 100 columns, and 100 where there is no terminal."""
    return max(50, min(100, shutil.get_terminal_size((100, 24)).columns))


LEAST = 24
"""Characters that a column which is wrapped has at least."""


def table(rows: Sequence[Sequence[str]], gap: str = "  ", margin: int = 2) -> str:
    """Left-aligned columns of printable text; the last one is wrapped where the page, less a margin, ends.

    Where the others leave it too little, the widest of them is wrapped as well.
    """
    if not rows:
        return ""
    if (kept := shown.collected.get()) is not None:
        kept.append(rows)
        return shown.MARK.format(len(kept) - 1)
    rows = [[*map(plain, row[:-1]), row[-1]] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    room = page_width() - margin - sum(widths) - len(gap) * len(widths)
    if room < LEAST < max(widths, default=0):
        widest = widths.index(max(widths))
        widths[widest] = max(LEAST, widths[widest] - (LEAST - room))
    widths.append(max(LEAST, room))
    lines = []
    for row in rows:
        cells = [[c] if len(c) <= w else _wrap(c, w) for c, w in zip(row[:-1], widths, strict=False)]
        cells.append(_wrap(row[-1], widths[-1]) or [""])
        for texts in zip_longest(*cells, fillvalue=""):
            lines.append(gap.join(text.ljust(w) for text, w in zip(texts, widths, strict=True)).rstrip())
    return "\n".join(lines)


def prose(text: str, margin: int = 2) -> str:
    """Text fitted to the page; lines that are indented or part of a list are wrapped on their own."""
    room = page_width() - margin
    blocks = []
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if any(line.startswith(" ") for line in lines[1:]):
            blocks.append("\n".join("\n".join(_wrap(line, room, hang=4)) for line in lines))
        else:
            blocks.append("\n".join(_wrap(" ".join(lines), room)))
    return "\n\n".join(blocks)


def equations(lines: Sequence[str], margin: int = 2) -> str:
    return "\n".join("\n".join(_wrap(line, page_width() - margin, hang=10)) for line in lines)


def _wrap(text: str, width: int, hang: int = 0) -> list[str]:
    """Printable lines of at most some width."""
    return textwrap.wrap(
        plain(text, lines=True),
        width,
        subsequent_indent=" " * hang,
        drop_whitespace=True,
        break_long_words=True,
        break_on_hyphens=False,
    )


def indent(text: str, by: str = "  ") -> str:
    return "\n".join(by + line if line else line for line in text.split("\n"))
