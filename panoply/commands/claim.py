"""`panoply claim`: put what papers found to the test."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from panoply.commands.parser import Commands, add_cluster, add_json, add_plugins, command, load_plugins
from panoply.errors import PanoplyError, plain

if TYPE_CHECKING:
    from panoply.evidence.claims import Claim
    from panoply.evidence.contest import Desk
    from panoply.registry import Entry

EXAMPLES = """\
  panoply claim                        every claim, and the verdicts stored so far
  panoply claim gigpo                  measure one: tune both sides, pair by seed, decide
  panoply claim --family agents        all of a family
  panoply claim --all                  everything that is not up to date; the same command goes on
  panoply claim --all --cluster auto   the same with runs on all machines of a Ray cluster
  panoply claim --check gigpo          run it again; does the stored verdict still stand?
  panoply claim --replicate gigpo      the same on new seeds, added to its replications

Verdicts with their numbers go to results/claims/NAME.json. Runs are kept in runs/.cache and found again."""


def add(commands: Commands) -> None:
    parser = command(commands, "claim", "put what papers found to the test", _claim, EXAMPLES)
    option = parser.add_argument
    option("methods", nargs="*", metavar="METHOD")
    option(
        "--all",
        action="store_true",
        help="every method that carries a claim, but for those measured with this code",
    )
    option("--family", metavar="NAME", help="those of one family, such as agents")
    option(
        "--check", action="store_true", help="run again without cached runs, and compare with what is stored"
    )
    option("--replicate", action="store_true", help="measure on new seeds, and add what is found")
    option(
        "--most",
        type=int,
        default=20,
        metavar="N",
        help="the most seeds to go to while undecided (default 20)",
    )
    option("--workers", type=int, metavar="N", help="processes at a time (default: the cores there are)")
    add_cluster(parser)
    option("--store", metavar="DIR", default="results/claims", help="where verdicts are kept")
    add_plugins(parser)
    option("--quiet", action="store_true", help="print only the result")
    add_json(parser)


def _claim(chosen: argparse.Namespace) -> int:
    from panoply.evidence import pool
    from panoply.evidence.contest import Desk
    from panoply.evidence.trials import claimed

    load_plugins(chosen)
    if (bool(chosen.methods) + chosen.all + bool(chosen.family)) > 1:
        raise PanoplyError("Name methods, or --family, or --all: one of the three.")
    if chosen.most < 2:
        raise PanoplyError(f"--most must be at least 2, not {chosen.most}.")
    nothing_named = not (chosen.methods or chosen.all or chosen.family)
    found = claimed(chosen.methods, chosen.family, chosen.all or nothing_named)
    if nothing_named:
        return _list(found, chosen)
    watch = pool.Watch() if chosen.quiet or chosen.json else None
    desk = Desk(workers=chosen.workers, cluster=chosen.cluster, watch=watch, most=chosen.most)
    if chosen.check and chosen.replicate:
        raise PanoplyError(
            "--check repeats the same seeds and --replicate takes new ones: name one of the two."
        )
    return _check(found, desk, chosen) if chosen.check else _measure(found, desk, chosen)


def _measure(found: Sequence[tuple[Entry, Claim]], desk: Desk, chosen: argparse.Namespace) -> int:
    from panoply.evidence.trials import is_fresh, put_to_test, replicate, sentence, store_result

    lost, done, store = [], [], Path(chosen.store)
    for entry, claim in found:
        try:
            if chosen.all and not chosen.replicate and is_fresh(entry, claim, desk, store):
                desk.say(f"{entry.name} is measured already, with this code and by this rule.")
                continue
            if chosen.replicate:
                facts = replicate(entry, claim, desk, store)
            else:
                store_result(facts := put_to_test(entry, claim, desk), store)
        except PanoplyError as error:
            if len(found) == 1:
                raise
            lost.append(f"{entry.name}: {error}")
            continue
        done.append(facts)
        if not chosen.json:
            print(f"{sentence(facts)}\n  {store / f'{entry.name}.json'}")
    if chosen.json:
        print(json.dumps(done, indent=1))
    elif len(found) > 1:
        print(f"\n{_overview(found, store)}")
    if lost:
        raise PanoplyError("Not measured: " + " ".join(lost))
    return 0


def _overview(found: Sequence[tuple[Entry, Claim]], store: Path) -> str:
    """Verdicts before and after, of claims that have one."""
    from panoply.evidence.history import before_and_now
    from panoply.evidence.verdicts import stored
    from panoply.report.layout import table

    facts = [(entry.name, stored(entry.name, store)) for entry, _ in found]
    rows = [(name, *before_and_now(known)) for name, known in facts if known is not None]
    return table([("claim", "before", "now"), *rows], margin=0)


def _check(found: Sequence[tuple[Entry, Claim]], desk: Desk, chosen: argparse.Namespace) -> int:
    from panoply.evidence.trials import check, sentence

    all_stand, told = True, []
    for entry, claim in found:
        stands, before, now = check(entry, claim, desk, Path(chosen.store))
        all_stand &= stands
        told.append({"id": entry.id, "stands": stands, "before": before["verdict"], "now": now["verdict"]})
        if not chosen.json:
            print(f"{entry.name}: the stored verdict {'still stands' if stands else 'no longer stands'}.")
            print(f"  before  {plain(sentence(before))}\n  now     {plain(sentence(now))}")
    if chosen.json:
        print(json.dumps(told, indent=1))
    return 0 if all_stand else 1


def _list(found: Sequence[tuple[Entry, Claim]], chosen: argparse.Namespace) -> int:
    from panoply.evidence.verdicts import known
    from panoply.report.layout import table

    facts = [(entry, claim, known(entry.name, Path(chosen.store))) for entry, claim in found]
    if chosen.json:
        told = [
            {"id": e.id, "kind": c.kind, "says": c.says, "verdict": (f or {}).get("verdict")}
            for e, c, f in facts
        ]
        print(json.dumps(told, indent=1))
        return 0
    rows = [("method", "kind", "verdict", "what is claimed")]
    rows += [(e.name, c.kind, f["verdict"] if f else "not measured", c.says) for e, c, f in facts]
    print(table(rows, margin=0))
    return 0
