"""The catalogue: every method with its equation, its parts as a diff, and what was measured of its claim.

`python -m panoply.evidence.catalogue` writes docs/methods.md and a page for each work, from the registry and from
results/claims. Learning curves stand there as numbers, which every reader of a repository can see, and compare between
two versions of a page; as a picture they are drawn by `panoply ui`, from the same stored numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from panoply import compose, published, registry
from panoply.checkpoint import write_atomically
from panoply.evidence import statistics, verdicts
from panoply.evidence.claims import NOT_ABLE, Claim
from panoply.evidence.history import before_and_now, by_former_rule, is_former
from panoply.evidence.statistics import false_discoveries
from panoply.evidence.trials import not_kept
from panoply.evidence.verdicts import stored
from panoply.parts import show_value
from panoply.recipes import Recipe
from panoply.regimes import Method
from panoply.registry import Entry

FAMILIES = {
    "base": "What others build on",
    "objectives": "Objectives",
    "agents": "Agents of several turns",
    "applied-agents": "Agents put to a use",
    "preferences": "Preferences",
    "reasoning-data": "Reasoning and data",
    "control": "Control",
    "generative-offline": "Logged data",
    "world": "Worlds",
}
TALLIED = {
    "holds": "hold",
    "fails": "fail",
    "undecided": "are undecided",
    "too small to matter": "are too small to matter",
    "not able to tell": "are not able to tell",
}
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the budget: where a page says how far the runs of a claim had come."""
HEAD = """# Methods

Made from the code and from `results/claims` by `make docs`. A method's page has its equation, its parts as a diff
from the method it builds on, its settings, and its claim: what its paper found, put to the test in a small world
([how](evidence.md)). Works without a verdict are the common ground on which the others are compared.
"""


def works() -> list[Entry]:
    """Everything that has a page: methods, recipes, systems, other published works, and worlds that have a claim."""
    ours = (e for e in registry.entries() if e.build.__module__.startswith("panoply."))
    return [e for e in ours if e.kind != "world" or e.claim]


def pages(claims: Path) -> dict[str, str]:
    """Every page by its path below docs/."""
    found = {entry.name: stored(entry.name, claims) for entry in works()}
    made = {"methods.md": _index(found)}
    for entry in works():
        made[f"methods/{entry.name}.md"] = "\n".join(_page(entry, found[entry.name])).rstrip() + "\n"
    return made


# ------------------------------------------------------------------ the list


def _index(found: Mapping[str, Mapping[str, Any] | None]) -> str:
    pieces = [HEAD, _tally([f for f in found.values() if f])]
    families = dict.fromkeys([*FAMILIES, *(e.family or e.kind for e in works())])
    for family in families:
        mine = [e for e in works() if (e.family or e.kind) == family]
        if mine:
            rows = [_row(e, found[e.name]) for e in mine]
            pieces += [
                f"## {FAMILIES.get(family, family)}\n",
                table(("work", "", "verdict", "measured"), *rows),
            ]
    return "\n".join(pieces).rstrip() + "\n"


def _tally(results: Sequence[Mapping[str, Any]]) -> str:
    """How many claims were tested and what they came to, so that a reader can expect the false ones."""
    if not results:
        return "No claim has been tested yet.\n"
    counts = Counter(f["verdict"] for f in results)
    came = ", ".join(f"{n} {words}" for verdict, words in TALLIED.items() if (n := counts[verdict]))
    chances = [f["p"] for f in results if "p" in f]
    expected = 0.05 * len(chances) / 2
    share = "fewer than one" if expected < 1 else f"about {expected:.0f}"
    standing = false_discoveries(chances)
    again = sum(len(f.get("replications", ())) for f in results)
    former = sum(by_former_rule(f) for f in results)
    waiting = (
        f" {former} verdicts rest on a former rule and wait to be measured by this one." if former else ""
    )
    return (
        f"{len(results)} claims were tested: {came}. Of the {len(chances)} that rest on chance, {standing} differences "
        f"stand where one in\ntwenty of those that stand may be false (Benjamini and Hochberg); if no method made any "
        f"difference, {share} would still\nbe said to hold. {again} replications on new seeds were made.{waiting}\n"
    )


def _row(entry: Entry, found: Mapping[str, Any] | None) -> tuple[str, ...]:
    about = " ".join(entry.doc.split("\n\n")[0].split())
    verdict = f"**{found['verdict']}**" if found else "not measured" if entry.claim else "–"
    return (f"[{entry.name}](methods/{entry.name}.md)", about, verdict, _numbers(found) if found else "")


def _numbers(found: Mapping[str, Any]) -> str:
    if found["verdict"] == NOT_ABLE:
        return str(found["why"]).rstrip(".")
    low, high = found["interval"]
    if found["kind"] == "identity":
        return f"{found['metric']} at most {found['difference']:.1e}, {found['seeds']} seeds"
    against = f" against {', '.join(list(found['order'])[1:])}" if found.get("order") else ""
    gap = f"{found['metric']} {found['difference']:+.3g} ({low:+.3g} to {high:+.3g})"
    filled = f", {found['room']['filled']:.0%} of the room" if found.get("room") else ""
    return f"{gap}{filled}, {found['seeds']} seeds{against}{not_kept(found)}"


# ------------------------------------------------------------------ one work


def _page(entry: Entry, found: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"# {entry.name}\n\n{entry.doc}\n"
    yield table(("", ""), *_facts(entry))
    if entry.kind == "method":
        yield from _method(entry)
    elif entry.kind == "recipe":
        yield from _recipe(entry.build())
    if entry.claim is not None:
        yield from _claim(entry, entry.claim, found)
    where = f"{entry.build.__module__.replace('.', '/')}.py"
    yield f"Source: [`{where}`](../../{where}). All methods: [methods.md](../methods.md)."


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    paper = re.search(r"arXiv (\d{4}\.\d{4,5})", entry.doc)
    yield "id", f"`{entry.id}`"
    if paper:
        yield "paper", f"[arXiv {paper[1]}](https://arxiv.org/abs/{paper[1]})"
    yield "family", entry.family or "–"
    yield "kind", entry.kind
    if entry.base:
        yield "builds on", f"[{entry.base}]({entry.base}.md)"
    if entry.world:
        yield "at home in", _world(entry.world)
    if entry.kind in ("method", "recipe"):
        yield "run it", f"`panoply train {entry.name}{f' --world {entry.world}' if entry.world else ''}`"


def _world(name: str) -> str:
    """A world's name, and where it is described at length."""
    entry = next((e for e in registry.entries("world") if e.name == name), None)
    described = entry is not None and getattr(entry.build, "medium", None) == "text"
    return f"[{name}](../worlds.md#{name})" if described else f"`{name}`"


def _method(entry: Entry) -> Iterator[str]:
    made: Method = compose.resolve(entry.id).method
    yield "## Equation\n\n```text\n" + "\n".join(made.equation()) + "\n```\n"
    if entry.base:
        changes = made.diff(compose.resolve(entry.base).method)
        rows = [(f"`{path}`", _code(theirs), _code(mine)) for path, mine, theirs in changes]
        yield f"## Changes from {entry.base}\n"
        yield table(("setting", entry.base, entry.name), *rows) if rows else "None.\n"
    rows = [(path.split(".")[0], f"`{held.info.name}`", held.info.summary) for path, held in made.parts()]
    yield f"## Parts, as published\n\n{table(('slot', 'part', 'what it does'), *rows)}"
    rows = [(f"`{o.path}`", f"`{show_value(o.value)}`", o.says) for o in published.origins(entry)]
    yield f"## Settings, and who says so\n\n{table(('setting', 'value', 'from'), *rows)}"
    for name, preset in entry.presets.items():
        words = ", ".join(f"`{path}={show_value(value)}`" for path, value in preset.items())
        models = ", for models of about a million parameters," if name == "tiny" else ""
        yield f"The preset `{name}`{models} sets {words}.\n"


def _recipe(recipe: Recipe) -> Iterator[str]:
    rows = [
        (s.name, f"`{s.does}`", ", ".join(f"`{k}={show_value(v)}`" for k, v in s.choices().items()))
        for s in recipe.stages
    ]
    yield f"## Stages\n\n{table(('stage', 'method', 'settings'), *rows)}"
    if recipe.rounds > 1:
        enough = f", or until `{recipe.until}`" if recipe.until else ""
        later = [f"`{s.name}`: `{k}={show_value(v)}`" for s in recipe.stages for k, v in s.again.items()]
        rest = f" From the second round on {', '.join(later)}." if later else ""
        yield f"All of them {recipe.rounds} times{enough}, each round going on from the one before.{rest}\n"


def _claim(entry: Entry, claim: Claim, found: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"## Claim\n\n> {claim.says}\n"
    if claim.reworded:
        yield f"Reworded after a verdict: {claim.reworded}\n"
    if found is None:
        yield f"Not measured yet: `panoply claim {entry.name}`.\n"
        return
    if is_former(found, claim.says, claim.reworded):
        yield f"Not measured since then: `panoply claim {entry.name}`. What follows is of the former question:\n"
        yield f"> {found['says']}\n"
    yield f"**{found['verdict'].capitalize()}**: {_numbers(found)}.\n"
    if found.get("curves"):
        yield _curves(found)
    yield table(("", ""), *_measured(found))
    if runs := found["runs"]:
        names = list(runs[0])
        yield table(names, *([f"{r[n]:.4g}" if n != "seed" else str(r[n]) for n in names] for r in runs))
    if found.get("replications"):
        rows = [_earlier(again)[:4] for again in found["replications"]]
        yield f"Replications on new seeds:\n\n{table(('date', 'commit', 'verdict', 'measured'), *rows)}"
    if found.get("history"):
        rows = [_earlier(past) for past in found["history"]]
        yield "Earlier verdicts:\n"
        yield table(("date", "commit", "verdict", "measured", "asked differently since then"), *rows)


def _curves(found: Mapping[str, Any]) -> str:
    """The stored learning curves in numbers; the page of `panoply ui` draws them."""
    ((unit, amount),) = found["budget"].items()
    places = [share * amount for share in SHARES]
    rows = []
    for label, curves in found["curves"].items():
        runs = np.stack([statistics.on_grid(curve, places) for curve in curves])
        cells = [f"{of.mean():.3g} ({of.min():.3g} to {of.max():.3g})" for of in runs.T]
        rows.append((label, *cells))
    head = (f"after {unit}", *(f"{place:,.0f}" for place in places))
    return f"What was measured on the way, the mean over seeds and their range:\n\n{table(head, *rows)}"


def _earlier(past: Mapping[str, Any]) -> tuple[str, ...]:
    if past["verdict"] == NOT_ABLE:
        gap = str(past["why"])
    else:
        low, high = past["interval"]
        gap = f"{past['metric']} {past['difference']:+.3g} ({low:+.3g} to {high:+.3g}), {past['seeds']} seeds"
    asked = ", ".join(past.get("asked differently since", ())) or "nothing"
    return past["date"], past.get("commit") or "–", past["verdict"], gap, asked


def _measured(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "world" in found:
        options = "".join(f", `{k}={v}`" for k, v in found["settings"].items() if k.startswith("world."))
        yield "world", f"{_world(found['world'])}{options}"
        ((unit, amount),) = found["budget"].items()
        yield "every run", f"{amount:,.0f} {unit}"
        yield "metric", f"`{found['metric']}`, {found['better']} is better"
        yield from ((label, f"`{spelled}`") for label, spelled in found["order"].items() if spelled != label)
        yield from _tuning(found["tuning"])
        yield from ((f"gate of {gate['gate']}", _gated(gate)) for gate in found.get("gates", ()))
        if found.get("varied"):
            yield "from seed to seed", found["varied"]
    if by_former_rule(found):
        yield (
            "rule",
            "a former one: the interquartile mean of the differences and its 95 % bootstrap interval",
        )
    if len(found.get("parts", {})) > 1:
        yield "parts", "; ".join(f"{part}: {verdict}" for part, verdict in found["parts"].items())
    for metric, gap in found.get("keeps", {}).items():
        yield f"must keep `{metric}`", f"{_gap(gap)}; may lose {gap['margin']:g}"
    if "reaches" in found:
        beyond, (low, high) = found["reaches"]["difference"], found["reaches"]["interval"]
        yield (
            f"must reach {found['reaches']['mark']:.5g}",
            f"{beyond:+.4g} beyond ({low:+.4g} to {high:+.4g})",
        )
    for metric, gap in found.get("also", {}).items():
        yield f"also `{metric}`", _gap(gap)
    if found.get("seconds_a_run"):
        yield "seconds a run", ", ".join(f"{k} {v:.1f}" for k, v in found["seconds_a_run"].items())
    for words, count in (("diverged", found.get("diverged") or {}), ("failed", found.get("failed") or {})):
        if any(count.values()):
            yield words, ", ".join(f"{k}: {v}" for k, v in count.items() if v)
    if found.get("note"):
        yield "note", found["note"]
    yield (
        "measured",
        f"{found['date']} with Panoply {found['versions']['panoply']}, torch {found['versions']['torch']}",
    )
    yield "again", f"`{found['command']}`, or `panoply claim --check {found['id'].split('@')[0]}`"


def _gap(gap: Mapping[str, Any]) -> str:
    sides = ", ".join(
        f"{k} {v:.4g}" for k, v in gap.items() if k not in ("margin", "difference", "interval", "p")
    )
    if "interval" not in gap:
        return f"{sides}; the other side does not measure it"
    low, high = gap["interval"]
    return f"{gap['difference']:+.3g} ({low:+.3g} to {high:+.3g}); {sides}"


def _gated(gate: Mapping[str, Any]) -> str:
    if gate["passed"]:
        return f"passed: {gate['measured']}"
    return f"waived, since {gate['waived']}: {gate['measured']}" if "waived" in gate else gate["measured"]


def _tuning(tuning: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not tuning["runs"]:
        yield "tuning", f"none, {tuning['fixed']}" if tuning.get("fixed") else "none"
        return
    grid = "; ".join(
        f"`{path}` of {', '.join(map(show_value, values))}" for path, values in tuning["grid"].items()
    )
    chosen = "; ".join(
        f"{arm}: {', '.join(f'`{p}={show_value(v)}`' for p, v in point.items())}"
        for arm, point in tuning["chosen"].items()
    )
    runs = f"{tuning['runs']} runs"
    if "by" in tuning:
        runs += f", chosen by `{tuning['by']}` on validation problems"
    yield (
        "tuning",
        f"{grid}, alike for all on seeds {', '.join(map(str, tuning['seeds']))} ({runs})",
    )
    yield "chosen", chosen
    if outside := [arm for arm, inside in tuning.get("inside", {}).items() if not inside]:
        yield "still at an end of the grid", ", ".join(outside)


def _code(text: str | None) -> str:
    return f"`{text}`" if text else "–"


def table(head: Sequence[str], *rows: Iterable[str]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]]) + "\n"


# ------------------------------------------------------------------ verdicts before and now

MARKS = ("<!-- verdicts, made by make docs -->\n", "<!-- end of verdicts -->\n")
"""Around the table in docs/evidence.md."""


def with_verdicts(text: str, claims: Path) -> str:
    """A page with its table of verdicts as they are stored now."""
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    found = ((entry, stored(entry.name, claims)) for entry in works() if entry.claim is not None)
    rows = [(f"[{e.name}](methods/{e.name}.md)", *_passed(e, known)) for e, known in found]
    return before + MARKS[0] + table(("claim", "before", "now", "reworded"), *rows) + MARKS[1] + after


def _passed(entry: Entry, known: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """The verdict before, the one of now, and whether the question is another one since either."""
    assert entry.claim is not None
    before, now = ("–", "not measured") if known is None else before_and_now(known)
    if known is not None and is_former(known, entry.claim.says, entry.claim.reworded):
        before, now = now, "not measured since it was reworded"
    return before, now, "yes" if entry.claim.reworded else ""


def write(docs: Path, claims: Path) -> None:
    """Write every page, and remove those of works that are gone."""
    made = pages(claims)
    (docs / "methods").mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        write_atomically(docs / name, text)
    if (docs / "evidence.md").is_file():
        page = (docs / "evidence.md").read_text(encoding="utf-8")
        write_atomically(docs / "evidence.md", with_verdicts(page, claims))
    for old in (docs / "methods").iterdir():
        if f"methods/{old.name}" not in made and old.suffix in (".md", ".svg"):
            old.unlink()


if __name__ == "__main__":
    write(Path("docs"), Path("results") / "claims")
    shipped = Path(verdicts.__file__).with_name(verdicts.FILE)
    write_atomically(shipped, verdicts.shipment(Path("results") / "claims"))
