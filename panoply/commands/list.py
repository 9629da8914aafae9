"""`panoply list`: what there is."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from panoply import tags
from panoply.commands.parser import Commands, add_json, add_plugins, command, load_plugins
from panoply.errors import PanoplyError, unknown
from panoply.index import KINDS
from panoply.report.layout import indent, page_width, table

if TYPE_CHECKING:
    from panoply.index import Listed

EXAMPLES = """\
  panoply list                          everything, a line each
  panoply list --tag feedback=offline   by a tag; panoply list --tags says which there are and what they mean
  panoply list methods --tag critic     methods with a critic
  panoply list --family preferences     of one family
  panoply list --needs teacher          what needs a teacher in its world
  panoply list --search "clip ratio"    with all of these words in its line
  panoply list parts                    parts by slot
  panoply list --json                   for programs"""
PLURAL = {kind: f"{kind}s" for kind in KINDS}


def add(commands: Commands) -> None:
    parser = command(commands, "list", "list methods, worlds, parts and other works", _list, EXAMPLES)
    option = parser.add_argument
    option("what", nargs="?", default="all", choices=["all", *PLURAL.values(), "parts"])
    option("--family", help="only works of a family, such as control")
    option("--tag", action="append", default=[], help="only works with a tag; given twice, with both")
    option("--needs", help="only methods that need this: teacher, logp@reference, entropy, …")
    option("--search", metavar="WORDS", help="only works in whose line all of these words occur")
    option(
        "--tags",
        action="store_true",
        help="list the tags there are, what each means and how many works have it",
    )
    add_plugins(parser)
    add_json(parser)


def _list(chosen: argparse.Namespace) -> int:
    from panoply import registry
    from panoply.parts import SLOTS

    load_plugins(chosen)
    if chosen.what == "parts":
        _refuse_filters(chosen)
        parts = {slot: sorted(registry.parts(slot)) for slot in SLOTS}
        print(json.dumps(parts, indent=1) if chosen.json else _listed_parts())
        return 0
    kinds = [kind for kind, plural in PLURAL.items() if chosen.what in ("all", plural)]
    every = [w for kind in kinds for w in registry.works(kind)]
    if not every:
        raise PanoplyError(f"There are no {chosen.what} yet: a plug-in may register some.")
    found = chosen_of(every, chosen)
    if chosen.tags:
        print(json.dumps(_counted(found), indent=1) if chosen.json else _listed_tags(found))
        return 0
    print(json.dumps([_facts(w) for w in found], indent=1) if chosen.json else _listed(found))
    return 0


def _facts(work: Listed) -> dict[str, Any]:
    """What is known of a work, with the verdict on its claim and earlier ones, oldest first."""
    from panoply.evidence.verdicts import known

    if not work.claimed:
        return work.facts()
    found = known(work.id.split("@")[0]) or {}
    return {**work.facts(), "verdict": found.get("verdict"), "history": found.get("history", [])}


def _refuse_filters(chosen: argparse.Namespace) -> None:
    for name in ("family", "tag", "needs", "search", "tags"):
        if getattr(chosen, name):
            raise PanoplyError(f"--{name} has no effect on parts: it chooses among works.")


def chosen_of(works: Sequence[Listed], chosen: argparse.Namespace) -> list[Listed]:
    """The works that all filters let through; a word that no work has is named, with what was probably meant."""
    filters: list[tuple[str, str, set[str], Callable[[Listed], bool]]] = []
    if chosen.family:
        filters.append(("family", chosen.family, _all(works, "family"), lambda w: w.family == chosen.family))
    for tag in chosen.tag:
        filters.append(("tag", tag, _all(works, "tags"), lambda w, tag=tag: tag in w.tags))  # type: ignore[misc]
    if chosen.needs:
        filters.append(("need", chosen.needs, _all(works, "needs"), lambda w: w.asks(chosen.needs)))
    found = list(works)
    for kind, word, known, keep in filters:
        if not any(map(keep, works)):
            raise unknown(kind, word, known)
        found = [w for w in found if keep(w)]
    if chosen.search:
        found = [w for w in found if w.mentions(chosen.search)]
    if not found:
        raise PanoplyError("No work passes all of these filters: leave one out.")
    return found


def _all(works: Iterable[Listed], field: str) -> set[str]:
    """Every word that some work has in a field."""
    held = (getattr(w, field) for w in works)
    return {word for value in held if value for word in ([value] if isinstance(value, str) else value)}


def _listed(works: Sequence[Listed]) -> str:
    """A line a work; sources other than arXiv are on its own page."""
    said = (re.sub(r" \([^()]*\d{4}[^()]*\)", "", w.summary) for w in works)
    rows = [(w.id, w.kind, w.base or "–", w.arxiv or "–", what) for w, what in zip(works, said, strict=True)]
    return _lines([("id", "kind", "base", "arXiv", "what it is"), *rows])


def _counted(works: Sequence[Listed]) -> dict[str, dict[str, int | str]]:
    """Every tag that some work has: how many have it, and what it means."""
    means = tags.meanings()
    return {
        tag: {"works": sum(tag in w.tags for w in works), "means": means.get(tag, "")}
        for tag in sorted(_all(works, "tags"))
    }


def _listed_tags(works: Sequence[Listed]) -> str:
    """Tags below the question that they answer, then the others."""
    counted = _counted(works)
    asked = [(f"{axis.asks} ({axis.survey})", [*axis.tags()]) for axis in tags.AXES]
    answers = {tag for _, known in asked for tag in known}
    pieces = []
    for heading, known in [*asked, ("others", [tag for tag in counted if tag not in answers])]:
        if rows := [
            (tag, str(counted[tag]["works"]), str(counted[tag]["means"])) for tag in known if tag in counted
        ]:
            pieces += [heading, indent(table(rows)), ""]
    return "\n".join(pieces[:-1])


def _listed_parts() -> str:
    """A line a part."""
    from panoply import registry
    from panoply.parts import SLOTS

    known = {slot: registry.parts(slot) for slot in SLOTS}
    rows = [(slot, name, of.summary(name)) for slot, of in known.items() for name in sorted(of)]
    return _lines([("slot", "part", "what it does"), *rows])


def _lines(rows: Sequence[Sequence[str]]) -> str:
    """A table whose last column ends where the page does, with what is left out marked."""
    before = sum(max(len(row[i]) for row in rows) + 2 for i in range(len(rows[0]) - 1))
    room = max(24, page_width() - before)
    return table([(*row[:-1], textwrap.shorten(row[-1], room, placeholder=" …")) for row in rows], margin=0)
