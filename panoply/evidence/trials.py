"""Putting claims to the test, keeping what was found, and testing again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from panoply import extensions, registry
from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError, unknown
from panoply.evidence import cache, pool
from panoply.evidence.claims import NOT_ABLE, SEEDS, Claim, Found, Identity, Measured, Ranks, Verdict
from panoply.evidence.closure import closure
from panoply.evidence.compare import CACHE
from panoply.evidence.contest import Contest, Desk
from panoply.evidence.history import by_former_rule, commit, with_history
from panoply.evidence.verdicts import STORE, stored
from panoply.given import CHANGED, method_of
from panoply.registry import Entry
from panoply.report.layout import table
from panoply.report.shown import Shown
from panoply.run import versions

UNASKED = ("measure", "reaches", "reworded")
"""Fields of a claim that a stamp finds in the code, or that ask nothing."""
NEW_SEEDS = 100_000
"""Each replication begins its seeds so much further on."""


def claimed(
    names: Sequence[str] = (), family: str | None = None, everything: bool = False
) -> list[tuple[Entry, Claim]]:
    """The works named, or of a family, or all, that carry a claim."""
    every = [(e, e.claim) for e in registry.entries() if e.claim is not None]
    if everything:
        return every
    if family is not None:
        found = [(e, c) for e, c in every if e.family == family]
        if not found:
            raise unknown("family with claims", family, {str(e.family) for e, _ in every})
        return found
    chosen = []
    for name in names:
        match = [(e, c) for e, c in every if name in (e.name, e.id)]
        if not match:
            if any(name in (e.name, e.id) for e in registry.entries()):
                raise PanoplyError(
                    f"'{name}' carries no claim. Those that do: {', '.join(e.name for e, _ in every)}."
                )
            raise unknown("method with a claim", name, [e.name for e, _ in every])
        chosen += match[-1:]
    return chosen


def store_result(facts: Mapping[str, Any], store: Path = STORE) -> Path:
    """Keep a result, and what was found before it."""
    slug = facts["id"].split("@")[0]
    path = store / f"{slug}.json"
    store.mkdir(parents=True, exist_ok=True)
    try:
        before = stored(slug, store)
    except PanoplyError:  # what has just been measured is not lost to a broken file, nor the file to it
        path.replace(path.with_suffix(".json.broken"))
        before = None
    return _write(with_history(facts, before), store)


def _write(facts: Mapping[str, Any], store: Path) -> Path:
    """One line a field, so that a change can be read."""
    path = store / f"{facts['id'].split('@')[0]}.json"
    lines = [f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in facts.items()]
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def sentence(facts: Mapping[str, Any]) -> str:
    """A result in one line."""
    if facts["verdict"] == NOT_ABLE:
        return f"{facts['id'].split('@')[0]} is not able to tell: {facts['why'].rstrip('.')}"
    if facts["kind"] == "identity":
        name, found = facts["id"].split("@")[0], f"{facts['metric']} at most {facts['difference']:.2g}"
        return f"{name} {facts['verdict']}: {found} over {facts['seeds']} seeds"
    low, high = facts["interval"]
    asides = [f", {facts['room']['filled']:.0%} of the room there was"] if facts.get("room") else []
    asides += [f", where {-facts['margin']:+g} is enough"] if facts.get("margin") else []
    aside = "".join(asides) + "," if asides else ""
    level = 95 if by_former_rule(facts) else 98
    return (
        f"{facts['id'].split('@')[0]} {facts['verdict']}: {facts['metric']} {facts['difference']:+.4g} "
        f"({level} % interval {low:+.4g} to {high:+.4g}){aside} over {facts['seeds']} seeds{not_kept(facts)}"
    )


def not_kept(facts: Mapping[str, Any]) -> str:
    """What was to be kept or reached and is not, or not for certain."""
    words = []
    for metric, kept in facts.get("keeps", {}).items():
        found = Found(kept["difference"], tuple(kept["interval"]))
        if found.verdict(kept["margin"]) != "holds":
            low, high = found.interval
            change = f"{metric} {found.difference:+.3g} ({low:+.3g} to {high:+.3g})"
            words.append(f"; {change}, which may lose {kept['margin']:g}")
    if "reaches" in facts:
        mark, (low, high) = facts["reaches"]["mark"], facts["reaches"]["interval"]
        words.append(f"; {low:+.3g} to {high:+.3g} from the mark {mark:.4g}" if low <= 0 else "")
    return "".join(words)


def put_to_test(
    entry: Entry, claim: Claim, desk: Desk, known: Mapping[str, Any] | None = None, method: Any = None
) -> dict[str, Any]:
    """Measure a claim. `known` is an earlier result, whose tuning and number of seeds are then taken over.

    method   a value that carries the claim in the entry's place
    """
    facts: dict[str, Any] = {"id": entry.id, "paper": entry.paper, "kind": claim.kind, "says": claim.says}
    begun = time.monotonic()
    if isinstance(claim, Ranks):
        facts |= contest(entry, claim, desk, method).run(known)
    else:
        assert isinstance(claim, Measured)
        facts |= _measured(claim, desk, known)
    if facts["verdict"] == "undecided" and desk.most < SEEDS[-1]:
        facts["note"] = f"Not taken beyond {facts['seeds']} seeds: --most {desk.most}."
    if claim.reworded:
        facts["reworded"] = claim.reworded
    return {
        **facts,
        "stamp": stamp(entry, claim, desk),
        "command": f"panoply claim {entry.name}",
        "seconds": round(time.monotonic() - begun, 1),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": versions(),
    }


def contest(entry: Entry, claim: Ranks, desk: Desk, method: Any = None) -> Contest:
    """The arms of a claim on a method, or on a value in its place."""
    return Contest(claim, tuple(word or method or entry.name for word in claim.order), desk)


def stamp(entry: Entry, claim: Claim, desk: Desk) -> str:
    """A hash of the question, of the code that answers it, and of the rule: with the same one a result is not stale."""
    rule = _rule()
    asked = {f.name: repr(getattr(claim, f.name)) for f in dataclasses.fields(claim) if f.name not in UNASKED}
    if isinstance(claim, Ranks):
        held = contest(entry, claim, desk)
        code = [cache.identity(held.plan(arm, 0)) for arm in held.arms]
    else:
        assert isinstance(claim, Measured)
        code = [cache.file_hash(path) for path in closure((claim.measure.__module__,))]
    text = json.dumps([entry.id, asked, code, rule], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_fresh(entry: Entry, claim: Claim, desk: Desk, store: Path = STORE) -> bool:
    """Whether a claim was measured with this very code, question and rule, to as many seeds as may be taken."""
    known = stored(entry.name, store)
    if known is None or known.get("stamp") != stamp(entry, claim, desk):
        return False
    return bool(known["verdict"] != "undecided" or known["seeds"] >= desk.most)


def _rule() -> list[str]:
    """Hashes of the files that decide."""
    names = ("claims", "contest", "gates", "scores", "statistics", "tuning")
    return [cache.file_hash(Path(__file__).with_name(f"{name}.py")) for name in names]


def check(
    entry: Entry, claim: Claim, desk: Desk, store: Path = STORE
) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """Run a claim again, without cached runs, and say whether its stored verdict still stands."""
    known = _known(entry, store)
    desk.cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=desk.cache.parent, prefix=".check-") as fresh:
        again = None if known["verdict"] == NOT_ABLE else known
        found = put_to_test(entry, claim, dataclasses.replace(desk, cache=Path(fresh)), again)
    return found["verdict"] == known["verdict"], known, found


def _known(entry: Entry, store: Path) -> dict[str, Any]:
    known = stored(entry.name, store)
    if known is None:
        raise PanoplyError(
            f"Nothing is stored for {entry.name} yet: measure it with panoply claim {entry.name}."
        )
    return known


def replicate(entry: Entry, claim: Claim, desk: Desk, store: Path = STORE) -> dict[str, Any]:
    """Measure a claim on seeds that it has not seen, tuned as before, and add what is found to its replications."""
    known = _known(entry, store)
    if known["verdict"] == NOT_ABLE:
        raise PanoplyError(f"There is nothing to replicate: {sentence(known)}.")
    done = list(known.get("replications", ()))
    fresh = dataclasses.replace(desk, first=NEW_SEEDS * (len(done) + 1))
    found = put_to_test(entry, claim, fresh, {**known, "seeds": None})
    kept = ("date", "commit", "verdict", "metric", "difference", "interval", "p", "seeds")
    numbers = {name: found[name] for name in kept if name in found}  # an identity has no p
    done.append({"first seed": fresh.first, **numbers})
    _write({**known, "replications": done}, store)
    return found


# ------------------------------------------------------------------ from Python


class Claimed(Shown):
    """What was measured of a claim; `facts` has the numbers of every seed."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts
        self.verdict: Verdict = facts["verdict"]
        self.difference: float = facts.get("difference", math.nan)
        self.interval: tuple[float, float] = tuple(facts.get("interval", (math.nan, math.nan)))

    def _page(self) -> str:
        names = {
            "says": "claim",
            "verdict": "verdict",
            "world": "world",
            "metric": "metric",
            "seeds": "seeds",
        }
        rows = [(shown, str(self.facts[name])) for name, shown in names.items() if name in self.facts]
        rows += [(f"  {label}", spelled) for label, spelled in self.facts.get("order", {}).items()]
        runs = self.facts.get("runs") or []
        heads = list(runs[0]) if runs else []
        seeds = [tuple(f"{run[h]:g}" for h in heads) for run in runs]
        pieces = [table(rows, margin=0), sentence(self.facts)]
        return "\n\n".join([*pieces, table([tuple(heads), *seeds], margin=0)] if runs else pieces)


def claim(
    method: Any,
    says: Claim | None = None,
    *,
    most: int = SEEDS[-1],
    workers: int | None = None,
    cluster: str | None = None,
    cache: str | Path = CACHE,
    watch: pool.Watch | None = None,
) -> Claimed:
    """Put what a paper found, or what you say of a method of your own, to the test.

    method   a name, or a value such as `grpo().but(credit=…)`
    says     `Learns("…", over="grpo", world="chain", budget="episodes=20k")`; else what the method carries
    most     the most seeds to go to while undecided
    cluster  where its runs are made, as that of `panoply.train`; here where it is left out
    """
    extensions.check_not_loading()
    id, differing = method_of(method)
    if says is not None:
        entry = _entry(id)
    elif differing:
        raise PanoplyError(
            f"A changed {id.split('@')[0]} carries no claim: say what it should do, says=Learns(…)."
        )
    else:
        ((entry, says),) = claimed([id])
    entry = dataclasses.replace(entry, id=entry.id + CHANGED) if differing else entry
    desk = Desk(cache=Path(cache), workers=workers, cluster=cluster, watch=watch, most=most)
    return Claimed(put_to_test(entry, says, desk, method=method if differing else None))


def _entry(id: str) -> Entry:
    return next((e for e in registry.entries() if id in (e.id, e.name)), None) or registry.find("method", id)


# ------------------------------------------------------------------ what a function measures


def _measured(claim: Measured, desk: Desk, known: Mapping[str, Any] | None) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    differences: list[float] = []
    for n in desk.rounds(known):
        seeds = range(desk.first + len(runs), desk.first + n)
        workers = desk.workers if claim.at_once else 1
        for seed, measured in zip(seeds, pool.called(claim.measure, seeds, workers), strict=True):
            found = {name: float(value) for name, value in measured.items()}
            runs.append({"seed": seed, **found})
            differences.append(claim.difference(next(iter(found.values()))))
            desk.say(f"seed {seed}: " + "; ".join(f"{name} {value:.4g}" for name, value in found.items()))
        verdict, gap = _ruled(claim, differences)
        if verdict != "undecided":
            break
    metric = next(name for name in runs[0] if name != "seed")
    return {
        "metric": metric,
        "verdict": verdict,
        "difference": gap.difference,
        "interval": list(gap.interval),
        **({} if isinstance(claim, Identity) else {"p": gap.to_json()["p"]}),
        "seeds": len(runs),
        "runs": runs,
    }


def _ruled(claim: Measured, differences: Sequence[float]) -> tuple[Verdict, Found]:
    """An identity must be one on every seed, and its difference is the largest; the rest goes by the interval."""
    if isinstance(claim, Identity):
        found = [claim.within - d for d in differences]
        return ("holds" if max(found) <= claim.within else "fails"), Found(
            max(found), (min(found), max(found))
        )
    gap = Found.of(differences)
    return gap.verdict(), gap
