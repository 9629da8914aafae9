"""Results that show themselves: as tables in a terminal, as HTML in a notebook, both from what the commands print."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar

Rows = Sequence[Sequence[str]]
collected: ContextVar[list[Rows] | None] = ContextVar("collected", default=None)
"""Tables of a page that is being made for a browser; `table` puts its rows here and a mark into the text."""
MARK = "\x00{}\x00"


class Shown:
    """Something whose page, text with tables, is how it prints itself."""

    def _page(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        try:
            return self._page()
        except Exception as error:  # a run's folder may be gone; a debugger wants to print it all the same
            return f"<{type(self).__name__}, which cannot be shown: {error}>"

    def _repr_html_(self) -> str:
        try:
            return as_html(self._page)
        except Exception:
            return f"<pre>{html.escape(repr(self))}</pre>"


def as_html(page: Callable[[], str]) -> str:
    """A page with its tables as those of HTML; every text is escaped."""
    token = collected.set([])
    try:
        text = page()
        tables = collected.get() or []
    finally:
        collected.reset(token)
    pieces = re.split(r"\x00(\d+)\x00", text)
    found = [_prose(piece) if i % 2 == 0 else _table(tables[int(piece)]) for i, piece in enumerate(pieces)]
    return f"<div>{''.join(found)}</div>"


def _prose(text: str) -> str:
    return f"<pre>{html.escape(text.strip(chr(10)))}</pre>" if text.strip() else ""


def _table(rows: Rows) -> str:
    if rows and all(len(row) == 1 for row in rows):
        return "".join(f"<p>{html.escape(str(row[0]))}</p>" for row in rows)
    cells = (
        "".join(f'<td style="text-align:left">{html.escape(str(cell))}</td>' for cell in row) for row in rows
    )
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
