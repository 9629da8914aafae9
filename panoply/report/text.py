"""What the command line prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from panoply import compose, planning, registry
from panoply.errors import unknown
from panoply.parts import SLOTS, Part, show_value
from panoply.planning import Plan
from panoply.regimes import Method
from panoply.registry import Entry
from panoply.run import Run

if TYPE_CHECKING:
    from panoply.api import Trained
    from panoply.evaluation.held_out import Evaluation


def table(rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """Left-aligned columns."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        gap.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def indent(text: str, by: str = "  ") -> str:
    return "\n".join(by + line if line else line for line in text.split("\n"))


# ------------------------------------------------------------------ show


def shown(name: str, preset: str | None = None) -> str:
    """A method, a world, or a part (`credit.group`)."""
    slot, _, rest = name.partition(".")
    if rest and slot in SLOTS:
        return _part_page(registry.find_part(slot, rest))
    names = {e.name for e in registry.entries()} | {e.id for e in registry.entries()}
    if name not in names:
        every = names | {f"{s}.{p}" for s in SLOTS for p in registry.parts(s)}
        raise unknown("method, world or part", name, every)
    entry = next(e for e in reversed(registry.entries()) if name in (e.id, e.name))
    return _world_page(entry) if entry.kind == "world" else _method_page(entry, preset)


def _method_page(entry: Entry, preset: str | None) -> str:
    resolved = compose.resolve(entry.id, preset=preset).method
    pieces = [
        f"{entry.id}  ({resolved.regime})",
        indent(entry.doc),
        "equation",
        indent("\n".join(resolved.equation())),
    ]
    pieces += ["parts", indent(_parts(resolved))]
    if entry.base is not None:
        base = compose.resolve(entry.base, preset=preset).method
        rows = [(path, b or "–", "→", a or "–") for path, a, b in resolved.diff(base)]
        pieces += [f"changes from {entry.base}", indent(table(rows) or "none")]
    for name, settings in entry.presets.items():
        changes = [(path, show_value(value)) for path, value in settings.items()]
        pieces += [f"preset {name}", indent(table(changes))]
    descended = _descended(resolved)
    if descended:
        pieces += ["divergence really descended", indent(descended)]
    return "\n".join(pieces)


def _parts(method: Method) -> str:
    rows = []
    for path, held in method.parts():
        slot = path.split(".")[0]
        rows.append((slot, str(held), held.info.summary))
    empty = [(slot, "none", "") for slot, value in method.slots().items() if value == ()]
    return table(rows + empty)


def _descended(method: Method) -> str:
    from panoply.slots.regularise.terms import DIVERGENCE, descended

    found = [held for _, held in method.parts() if held.info.id == "regularise.kl"]
    return "\n".join(DIVERGENCE[descended(held)].format(of=held.settings()["to"]) for held in found)


def _part_page(cls: type[Part]) -> str:
    info = cls.info
    rows = []
    for field_name, annotation in cls.annotations().items():
        from panoply.parts import describe

        default = getattr(cls, field_name, None)
        rows.append((field_name, show_value(default), describe(annotation)))
    import inspect

    pieces = [info.id, indent(inspect.getdoc(info.function) or "")]
    if rows:
        pieces += ["settings", indent(table([("name", "default", "takes"), *rows]))]
    facts = (
        [("unit", info.unit), ("stream", info.stream)]
        if info.slot in ("surrogate", "regularise", "loss")
        else []
    )
    if facts:
        pieces.append(indent(table(facts)))
    return "\n".join(pieces)


def _world_page(entry: Entry) -> str:
    import dataclasses

    cls: Any = entry.build
    rows = [(f.name, show_value(f.default)) for f in dataclasses.fields(cls)]
    built = cls()
    task = built.task("train", 0)
    example = built.render(task, built.gold(task)) if "reference" in built.access else built.render(task, [])
    access = ", ".join(sorted(built.access))
    return "\n".join([f"{entry.id}  (world)", indent(entry.doc), "options", indent(table(rows)),
                      f"gives  {access}", f"example  {example}"])  # fmt: skip


# ------------------------------------------------------------------ plan


def planned(made: Plan) -> str:
    """The resolved method, its equation, what it needs, and settings without effect."""
    needed = planning.cost(made)
    memory = [(name, _bytes(size)) for name, size in needed.memory_bytes.items()]
    options = made.options
    rows = [
        ("parameters", f"{needed.parameters:,}"),
        ("tokens a step", f"at most {needed.sampled_tokens:,} sampled, {needed.trained_tokens:,} trained"),
        ("steps", f"{options.steps}" + (f", or {options.minutes:g} minutes" if options.minutes else "")),
        (
            "memory",
            ", ".join(f"{n} {s}" for n, s in memory) + f": {_bytes(sum(needed.memory_bytes.values()))}",
        ),
        ("time", f"at least {_seconds(needed.seconds)} (arithmetic alone on this machine's CPU)"),
    ]
    pieces = [
        f"{made.method_id} on {made.world_id}, seed {options.seed}",
        indent("\n".join(made.method.equation())),
        "parts",
        indent(_parts(made.method)),
        "needs",
        indent(table([*rows, *(("extra", e) for e in needed.extra_forwards)])),
    ]
    idle = planning.inert(made)
    if idle:
        pieces += ["defaults without effect here", indent(table([(path, reason) for path, reason in idle]))]
    return "\n".join(pieces)


def _bytes(size: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size = size / 1000  # type: ignore[assignment]
    raise AssertionError


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


# ------------------------------------------------------------------ lists and results


def listed(entries: Sequence[Entry]) -> str:
    rows = [(e.id, e.kind, e.family or "", e.base or "", e.doc.split("\n")[0]) for e in entries]
    return table([("id", "kind", "family", "base", ""), *rows])


def listed_parts() -> str:
    rows = [
        (slot, name, cls.info.summary) for slot in SLOTS for name, cls in sorted(registry.parts(slot).items())
    ]
    return table([("slot", "part", ""), *rows])


def trained(result: Trained) -> str:
    before, after = result.before, result.after
    rows = [("held-out success", "before", "", "after")]
    for name in ("greedy", "sampled"):
        low, high = after[f"{name}_interval"]
        rows.append(
            (name, f"{before[name]:.3f}", "→", f"{after[name]:.3f}  (95 % interval {low:.2f}–{high:.2f})")
        )
    run = result.run
    nexts = [
        (f"panoply eval {run} --attempts 16 --k 1,16", "pass@k with intervals"),
        (f"panoply export {run} my-model", "a folder that transformers opens"),
        ("panoply show grpo", "the equation and the parts that just ran"),
        ("panoply train grpo --credit reinforce", "swap one part for another method's"),
    ]
    return "\n".join(
        [
            table(rows),
            f"{result.seconds:.0f} s of training, run folder {run}",
            "what next",
            indent(table(nexts)),
        ]
    )


def evaluated(found: Evaluation) -> str:
    facts = found.to_json()
    rows = [("problems", str(found.problems)), ("attempts", str(found.attempts))]
    for name in ("greedy", "sampled"):
        low, high = facts[f"{name}_interval"]
        rows.append((name, f"{facts[name]:.3f}  (95 % interval {low:.3f}–{high:.3f})"))
    rows += [(f"pass@{k}", f"{v:.3f}") for k, v in found.pass_at.items()]
    return table(rows) + "\nsome greedy answers\n" + indent("\n".join(found.samples))


def run_facts(run: Run) -> dict[str, Any]:
    config, result, latest = run.config.get("plan", {}), run.result() or {}, run.latest()
    state = latest.state() if latest else {}
    return {
        "run": str(run.folder),
        "method": config.get("method", {}).get("id"),
        "world": config.get("world", {}).get("id"),
        "seed": config.get("run", {}).get("seed"),
        "status": run.status(),
        "step": result.get("steps", state.get("step")),
        "of": config.get("run", {}).get("steps"),
        "before": state.get("before", {}).get("sampled"),
        "after": state.get("after", {}).get("sampled"),
        "created": run.config.get("created"),
    }


def runs_table(runs: Sequence[Run]) -> str:
    if not runs:
        return "No runs yet. Make one: panoply train grpo --world chain"
    rows = [("run", "method", "status", "step", "held-out success")]
    for facts in map(run_facts, runs):
        pair = [f"{v:.2f}" if v is not None else "–" for v in (facts["before"], facts["after"])]
        step = f"{facts['step'] if facts['step'] is not None else 0}/{facts['of']}"
        rows.append((facts["run"], str(facts["method"]), facts["status"], step, " → ".join(pair)))
    return table(rows)
