"""Pages of `panoply show`: a method, a recipe, a world, a part, or the settings of a run and of adapters."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

from panoply import compose, functions, published, registry
from panoply.errors import PanoplyError, unknown
from panoply.kinds import is_control
from panoply.lora import Lora
from panoply.parts import SLOTS, Part, kind, show_value
from panoply.planning import Options
from panoply.ranges import merged
from panoply.recipes import Recipe
from panoply.regimes import Method
from panoply.registry import Entry
from panoply.report import meanings
from panoply.report.layout import equations, indent, prose, table
from panoply.worlds.control.world import show_space

SCORES = {
    "sampled": "of the distribution sampled from",
    "policy": "of the policy itself, at temperature 1",
    "none": "not used",
}
"""Whose log-probabilities a term is about."""


def shown(name: str, preset: str | None = None) -> str:
    """A method, a world, a part (`credit.group`, or `group` where only one has that name), `run`, or `lora`."""
    slot, _, rest = name.partition(".")
    if rest and slot in SLOTS:
        return _part_page(registry.find_part(slot, rest))
    if name in OPTIONS:
        return _options_page(name)
    if (entry := registry.find_any(name)) is not None:
        return _method_page(entry, preset) if entry.kind == "method" else PAGES[entry.kind](entry)
    if name in SLOTS:
        return _slot_page(name)
    bare = [registry.parts(slot)[name] for slot in SLOTS if name in registry.parts(slot)]
    if len(bare) == 1:
        return _part_page(bare[0])
    if (world := registry.implied(name)) is not None:
        return _world_page(world)
    parts = {cls.info.id: cls for slot in SLOTS for cls in registry.parts(slot).values()}
    holders = [path for path, cls in parts.items() if name in cls.annotations()]
    if holders:
        more = f" and {len(holders) - 4} more" if len(holders) > 4 else ""
        raise PanoplyError(
            f"'{name}' is a setting of {', '.join(holders[:4])}{more}: panoply show {holders[0]}."
        )
    every = [word for known in registry.works() for word in (known.name, known.id)]
    raise unknown("method, world or part", name, [*every, *parts, *OPTIONS])


def _slot_page(slot: str) -> str:
    known = registry.parts(slot)
    rows = [(f"{slot}.{name}", known.summary(name)) for name in sorted(known)]
    called = f"called with ({', '.join(SLOTS[slot].takes)}), returns {SLOTS[slot].returns.replace('`', '')}"
    return "\n".join([f"{slot}  (slot)", indent(called), "", "parts that fit", indent(table(rows))])


OPTIONS: dict[str, tuple[Any, str]] = {
    "run": (
        Options,
        "How a method is run. None of these changes what its gradient is. Set one with --set run.NAME=VALUE.",
    ),
    "lora": (
        Lora,
        "What low-rank adapters are made of, of any run with --lora RANK: they alone learn then. Set one with --set "
        "lora.NAME=VALUE.",
    ),
}
"""Settings that belong to no part, by what their names begin with."""


def _options_page(name: str) -> str:
    of, about = OPTIONS[name]
    known, hints = meanings.of_fields(of), typing.get_type_hints(of)
    rows = [
        (
            f"{name}.{f.name}",
            kind(hints[f.name], of.bounds.get(f.name)),
            show_value(f.default),
            known.get(f.name, ""),
        )
        for f in dataclasses.fields(of)
    ]
    return "\n".join([f"{name}  (settings)", indent(prose(about)), "", indent(_settings(rows))])


def _settings(rows: Sequence[tuple[str, str, str, str]]) -> str:
    """Settings with what they take, their default and their meaning; long words go to the last column, which wraps."""
    made = [("name", "takes", "default", "meaning")]
    for name, takes, default, meaning in rows:
        if len(takes) > 36:
            takes, meaning = "one of", ". ".join(text for text in (takes, meaning) if text)
        if len(default) > 28:
            default, meaning = "…", ". ".join(text for text in (f"default {default}", meaning) if text)
        made.append((name, takes, default, meaning))
    return table(made if any(row[-1] for row in made[1:]) else [row[:-1] for row in made])


def _function_page(entry: Entry) -> str:
    """A work that is a function: what it takes, and how it is called."""
    pieces = [f"{entry.id}  ({entry.kind})", indent(prose(entry.doc)), *_measured(entry)]
    rows = [
        (name, functions.takes(of), functions.default(of), "")
        for name, of in functions.settings(entry).items()
    ]
    if rows:
        pieces += ["", "settings", indent(_settings(rows))]
    nexts = [(f"panoply run {entry.name}", "call it and print what it gives")]
    if entry.judge is not None:
        nexts.append((f"panoply eval RUN --by {entry.name}", "judge a run by it"))
    where = f"{entry.build.__module__}.{entry.build.__name__}"
    return "\n".join([*pieces, "", "more", indent(table(nexts)), "", "from Python", indent(f"{where}()")])


MANY = 12
"""So many works below a heading have a line each; of more, only the names stand there."""


def _survey_page(entry: Entry) -> str:
    """The works that a survey orders, below its headings, with what each of them is."""
    pieces = [f"{entry.id}  (survey)", indent(prose(entry.doc)), *_measured(entry)]
    for heading, listed in functions.ordered(entry).items():
        rows = [(of.name, of.kind, of.summary) for of in listed]
        names = prose(", ".join(of.name for of in listed))
        pieces += ["", heading]
        pieces += [indent(names if len(rows) > MANY else table(rows) or "none of them is here")]
    if entry.judge is not None:
        pieces += ["", "more", indent(table([(f"panoply eval RUN --by {entry.name}", "judge a run by it")]))]
    return "\n".join(pieces)


def _recipe_page(entry: Entry) -> str:
    recipe: Recipe = entry.build()
    rounds = "" if recipe.rounds == 1 else f", all of them {recipe.rounds} times"
    rounds += f", until {recipe.until}" if recipe.until else ""
    pieces = [f"{entry.id}  (recipe)", indent(prose(entry.doc)), "", f"stages{rounds}"]
    for stage in recipe.stages:
        rows = [(path, show_value(value)) for path, value in stage.choices().items()]
        pieces.append(indent(prose(f"{stage.name}: {stage.does}")))
        pieces += [indent(table(rows), "    ")] if rows else []
        pieces += [
            indent(f"from the second round on {path}: {show_value(value)}", "      ")
            for path, value in stage.again.items()
        ]
    pieces += [
        "",
        "@NAME is the run of an earlier stage, or the data it made. Change one with --set STAGE.PATH=VALUE.",
    ]
    return "\n".join(pieces)


def _method_page(entry: Entry, preset: str | None) -> str:
    if preset not in (None, "published", *entry.presets):
        raise unknown(f"preset of {entry.name}", str(preset), [*entry.presets, "published"])
    resolved = compose.resolve(entry.id, preset=preset).method
    pieces = [
        f"{entry.id}  ({resolved.regime.replace('_', '-')} method)",
        indent(prose(entry.doc)),
        "",
        "equation",
        indent(equations(resolved.equation())),
        "",
    ]
    pieces += ["parts, as published" if preset is None else f"parts, set for {preset}"]
    pieces += [indent(table(_parts(resolved)))]
    pieces += ["", "settings, and who says so", indent(table(_origins(entry, preset)))]
    if entry.base is not None:
        base = compose.resolve(entry.base, preset=preset).method
        rows = [(path, b or "–", "→", a or "–") for path, a, b in resolved.diff(base)]
        pieces += ["", f"changes from {entry.base}", indent(table(rows) or "none")]
    for name, settings in entry.presets.items():
        changes = [(path, show_value(value)) for path, value in settings.items()]
        pieces += ["", f"preset {name} changes", indent(table(changes))]
    if resolved.regime in ("on_policy", "dataset"):
        terms = [(t.info.name, f"each {t.info.unit}", SCORES[t.info.scores]) for t in resolved.terms()]
        pieces += ["", "terms, and whose log-probabilities they take", indent(table(terms))]
    descended = _descended(resolved)
    if descended:
        pieces += ["", "divergence really descended", indent(descended)]
    pieces += _measured(entry)
    part = next(iter(resolved.parts()))[1].info.id
    nexts = [(f"panoply show {part}", "one part"), ("panoply show run", "the settings of any run")]
    pieces += ["", "more", indent(table(nexts))]
    return "\n".join(pieces)


def _parts(method: Method) -> list[tuple[str, str, str]]:
    """Every part with its place and what it does."""
    seats = method.seated()
    places = ((path.split("."), held) for path, held in method.parts())
    return [(".".join(at[: 1 + (at[0] in seats)]), held.info.name, held.info.summary) for at, held in places]


def _origins(entry: Entry, preset: str | None) -> list[tuple[str, str, str]]:
    asked = preset if preset in entry.presets else None
    return [(o.path, show_value(o.value), o.says) for o in published.origins(entry, asked)]


def _measured(entry: Entry) -> list[str]:
    """A work's claim and its verdict: the one stored below the current folder, or else the one that was shipped."""
    if entry.claim is None:
        return []
    from panoply.evidence.trials import sentence
    from panoply.evidence.verdicts import known

    found = known(entry.name)
    verdict = sentence(found) if found else f"not measured yet: panoply claim {entry.name}"
    return ["", "claim", indent(prose(entry.claim.says)), indent(prose(verdict))]


def _descended(method: Method) -> str:
    from panoply.slots.regularise.terms import DIVERGENCE, descended

    found = [held for _, held in method.parts() if held.info.id == "regularise.kl"]
    return "\n".join(DIVERGENCE[descended(held)].format(of=held.settings()["to"]) for held in found)


def _part_page(cls: type[Part]) -> str:
    info, known = cls.info, meanings.of_part(cls)
    rows = [
        (name, kind(annotation, info.bounds.get(name)), _default(cls, name), known.get(name, ""))
        for name, annotation in cls.annotations().items()
    ]
    pieces = [f"{info.id}  (part)", indent(prose(meanings.split_doc(cls)[0]))]
    if rows:
        pieces += ["", "settings", indent(_settings(rows))]
    if info.slot in ("surrogate", "regularise", "loss"):
        scored = ("log-probabilities", SCORES[info.scores])
        pieces += ["", indent(table([("unit", info.unit), ("stream", info.stream), scored]))]
    return "\n".join(pieces)


def _default(cls: type[Part], name: str) -> str:
    return show_value(getattr(cls, name)) if hasattr(cls, name) else "needed"


def _world_page(entry: Entry) -> str:
    cls: Any = entry.build
    known, hints, bounds = meanings.of_fields(cls), typing.get_type_hints(cls), merged(cls)
    rows = []
    for option in sorted(dataclasses.fields(cls), key=lambda f: bool(f.kw_only)):  # what all have comes last
        needed = option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING
        made = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
        default = "needed" if needed else show_value(made)
        takes = kind(hints[option.name], bounds.get(option.name))
        rows.append((f"world.{option.name}", takes, default, known.get(option.name, "")))
    facts = []
    with contextlib.suppress(PanoplyError, TypeError):  # a world with an option to be given has no example
        facts = _world_facts(cls())
    pieces = [f"{entry.id}  (world)", indent(prose(entry.doc)), ""]
    if rows:
        pieces += ["settings", indent(_settings(rows)), ""]
    presets = getattr(cls, "presets", {})
    if presets:
        said = [(f"{entry.name}:{name}", f"start {p.start:g}", p.use) for name, p in presets.items()]
        pieces += ["presets with room", indent(table(said)), ""]
    return "\n".join([*pieces, table(facts, margin=0)])


def _world_facts(built: Any) -> list[tuple[str, str]]:
    facts = [("gives", ", ".join(sorted(built.access)))]
    if is_control(built):
        facts += [("sees", show_space(built.observation)), ("does", show_space(built.action))]
        limit = "none" if built.horizon is None else f"{built.horizon} steps"
        facts += [("time limit", limit), ("solved at", "–" if built.solved is None else f"{built.solved:g}")]
        return facts
    task = built.task("train", 0)
    return [*facts, ("example", built.render(task, built.gold(task) if "reference" in built.access else []))]


PAGES: dict[str, Callable[[Entry], str]] = {
    "world": _world_page,
    "recipe": _recipe_page,
    "survey": _survey_page,
    **dict.fromkeys(("algorithm", "system", "protocol"), _function_page),
}
"""Who writes the page of a work that is no method."""
