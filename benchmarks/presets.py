"""The baselines' curves on presets with room, measured, and the table of docs/worlds.md that is made of them.

python benchmarks/presets.py                           every preset, five seeds, then the table
python benchmarks/presets.py --world chain:wall --seeds 1
python benchmarks/presets.py --table                   the table alone, from results/worlds/presets.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from panoply import registry
from panoply.checkpoint import write_atomically
from panoply.evidence import pool, scores
from panoply.evidence.arms import Arm, Budget
from panoply.evidence.statistics import interquartile_mean
from panoply.run import versions
from panoply.worlds.presets import Preset

ROOT = Path(__file__).parent.parent
STORED, PAGE = ROOT / "results/worlds/presets.json", ROOT / "docs/worlds.md"
BEGIN, END = "<!-- presets: made by benchmarks/presets.py -->\n", "<!-- end of presets -->\n"
POINTS = 8


def presets() -> Iterator[tuple[str, Preset]]:
    """`chain:wall`, … with what is known about them."""
    for entry in registry.entries("world"):
        for name, preset in getattr(entry.build, "presets", {}).items():
            yield f"{entry.name}:{name}", preset


def measure(name: str, preset: Preset, seeds: int, cache: Path, workers: int | None) -> dict[str, Any]:
    """The baseline's curve: at each of some shares of the budget the interquartile mean over seeds."""
    arm, budget = Arm.parse(preset.baseline), Budget.parse(preset.budget)
    orders = [pool.Order(f"{name} s{s}", arm.plan(name, s, budget, greedy=False)) for s in range(seeds)]
    pool.run_all(orders, cache, workers)
    pool.check_any(orders, name)
    found = [scores.read(o.folder, "success", budget.unit, budget.amount) for o in orders if not o.problem]
    places = [budget.amount * i / POINTS for i in range(POINTS + 1)]
    rows = [[_at(scored.curve, place) for place in places] for scored in found]
    curve = [round(float(interquartile_mean([[row[i]] for row in rows])), 4) for i in range(POINTS + 1)]

    def share(reached: float) -> float:
        """Of the room between start and ceiling."""
        return round((reached - curve[0]) / (preset.ceiling - curve[0]), 3)

    return {
        "use": preset.use,
        "settings": json.loads(json.dumps(dict(preset.settings))),
        "baseline": preset.baseline,
        "budget": {budget.unit: budget.amount},
        "ceiling": preset.ceiling,
        "curve": curve,
        "filled": {"at its best": share(max(curve)), "at its end": share(curve[-1])},
        "seeds": len(found),
        "seconds": round(sum(s.seconds for s in found) / len(found), 1),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
    }


def _at(curve: scores.Curve, place: float) -> float:
    """The last value that was measured up to a place."""
    return [y for x, y in curve if x <= place][-1]


def table(stored: Mapping[str, Any]) -> str:
    """Every preset with its settings, what it is for, and its baseline's curve."""
    lines = [
        "| preset | settings | for | baseline | success at its start, and at each eighth of the budget |"
    ]
    lines += ["|---|---|---|---|---|"]
    for name, of in stored.items():
        settings = ", ".join(f"`{k}={_word(v)}`" for k, v in of["settings"].items())
        unit, amount = next(iter(of["budget"].items()))
        curve = " ".join(f"{y:.2f}".lstrip("0") or "0" for y in of["curve"])
        base = f"`{of['baseline']}`, {amount:.0f} {unit}, {of['seeds']} seed{'s' * (of['seeds'] > 1)}"
        lines.append(f"| `{name}` | {settings} | {of['use']} | {base} | {curve} |")
    return "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    """As `--set` takes it."""
    if isinstance(value, list) and any(isinstance(one, list) for one in value):
        return json.dumps(value, separators=(",", ":"))
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def page(text: str, made: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--world", action="append", help="a preset, such as chain:wall; all of them otherwise"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cache", type=Path, default=ROOT / "runs/.cache")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    chosen = parser.parse_args()
    stored: dict[str, Any] = json.loads(STORED.read_text()) if STORED.is_file() else {}
    for name, preset in [] if chosen.table else presets():
        if not chosen.world or name in chosen.world:
            found = stored[name] = measure(name, preset, chosen.seeds, chosen.cache, chosen.workers)
            filled = ", ".join(f"{share:.0%} {when}" for when, share in found["filled"].items())
            print(f"{name}: {found['curve']}; of its room the baseline fills {filled}", flush=True)
            STORED.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(STORED, json.dumps(stored, indent=1) + "\n")
    write_atomically(PAGE, page(PAGE.read_text(), table(stored)))


if __name__ == "__main__":
    main()
