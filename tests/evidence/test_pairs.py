"""The table of pairs: what it says is what is stored, and every pair of it can be trained."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import tiny

from panoply import cli
from panoply.errors import PanoplyError
from panoply.evidence import pairs
from panoply.evidence.arms import Arm, Budget
from panoply.files import is_file, read_json


def stored(cell: dict[tuple[str, str], list[float]], failed: dict[str, str] | None = None) -> dict[str, Any]:
    arms = [
        {
            "settings": {"credit": credit, "surrogate": surrogate},
            "areas": {pairs.WORLD: {str(i): value for i, value in enumerate(values)}},
        }
        for (credit, surrogate), values in cell.items()
    ]
    versions = {"panoply": "0.1", "torch": "2"}
    return {
        "command": "panoply compare",
        "date": "2026-01-31",
        "versions": versions,
        "arms": arms,
        "failed": failed or {},
    }


def additive(credit: float, surrogate: float, pair: float) -> dict[tuple[str, str], list[float]]:
    """Areas to which credits, surrogates and single pairs add; the last of each adds most, and two seeds differ."""
    found = {}
    for i, c in enumerate(pairs.CREDITS):
        for j, s in enumerate(pairs.SURROGATES):
            mean = 0.2 + credit * i + surrogate * j + (pair if (i + j) % 2 else 0.0)
            found[c, s] = [mean - 0.01, mean + 0.01]
    return found


def test_the_page_is_what_the_results_say() -> None:
    path = tiny.ROOT / pairs.RESULT
    known = read_json(path, pairs.Result) if is_file(path) else None
    assert (tiny.ROOT / pairs.PAGE).read_text() == pairs.page(known), "python -m panoply.evidence.pairs"


def test_numbers_stand_in_their_cells() -> None:
    page = pairs.page(stored(additive(0.01, 0.001, 0.0)))
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:-1]
        for line in page.splitlines()
        if "±" in line and "|" in line
    }
    assert list(rows) == [f"`{credit}`" for credit in pairs.CREDITS]
    assert rows["`rloo`"][2].strip() == "0.212 ± 0.014"
    assert rows["`dcpo`"][6].strip() == "**0.256** ± 0.014"
    assert page.count("**") == 2, "one is the best"
    (means,) = (line.split("|")[2:-1] for line in page.splitlines() if line.startswith("| mean "))
    assert [float(m) for m in means] == pytest.approx(
        [0.225, 0.226, 0.227, 0.228, 0.229, 0.230, 0.231, 0.228]
    )
    assert "Between seeds of one pair the deviation is 0.014" in page


@pytest.mark.parametrize(
    ("slopes", "where"), [((0.1, 0.0, 0.0), 0), ((0.0, 0.1, 0.0), 1), ((0.0, 0.0, 0.1), 2)]
)
def test_variance_is_divided(slopes: tuple[float, float, float], where: int) -> None:
    found = pairs.shares(additive(*slopes))
    assert found is not None
    assert sum(found) == pytest.approx(1.0)
    assert found[where] > 0.95


def test_what_has_not_finished_is_said() -> None:
    cells = additive(0.01, 0.01, 0.0)
    del cells["grpo", "gspo"]
    page = pairs.page(stored(cells, {"grpo gspo s0": "killed"}))
    assert "Not finished: grpo gspo s0." in page
    assert "| – |" in page
    assert "Of the variance" not in page, "of a whole table alone"
    assert "not been measured" in pairs.page(None)
    with pytest.raises(PanoplyError, match="no pair that has finished"):
        pairs.areas(stored({("grpo", "grpo"): []}))


def test_every_pair_can_be_planned_and_the_command_is_the_comparison() -> None:
    """At least twelve, no two the same, each with the one's credit and the other's surrogate."""
    words = shlex.split(pairs.command())
    chosen = cli._parser(("compare",)).parse_args(words[1:])
    assert chosen.methods == pairs.arms()
    assert len(set(pairs.arms())) == len(pairs.CREDITS) * len(pairs.SURROGATES) >= 12
    assert (chosen.world, chosen.budget, chosen.seeds) == ([pairs.WORLD], pairs.BUDGET, pairs.SEEDS)
    seen = set()
    for word in (
        f"grpo+credit={c}+surrogate={s}" for c, s in zip(pairs.CREDITS, pairs.SURROGATES, strict=False)
    ):
        made: Any = Arm.parse(word).plan(pairs.WORLD, 0, Budget.parse(pairs.BUDGET), settings=pairs.SETTINGS)
        seen.add((made.method.credit, made.method.surrogate))
    assert len(seen) == len(pairs.CREDITS)


def test_measuring_keeps_what_the_page_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of every seed, and how they came about; no curves, and no paths of the machine."""
    asked: dict[str, Any] = {}

    class Found:
        def to_json(self) -> dict[str, Any]:
            kept = stored(additive(0.01, 0.0, 0.0))
            arms = [
                {**arm, "label": "x", "scores": {}, "curves": {}, "runs": ["/somewhere"]}
                for arm in kept["arms"]
            ]
            return {**kept, "arms": arms, "kind": "comparison", "worlds": [], "budget": {}, "seeds": []}

    def compare(*methods: str, **choices: Any) -> Found:
        asked.update(choices, methods=methods)
        return Found()

    monkeypatch.setattr("panoply.evidence.compare.compare", compare)
    pairs.measure(tmp_path / "pairs.json")
    assert asked["methods"] == tuple(pairs.arms())
    assert (asked["seeds"], asked["settings"], asked["metric"]) == (pairs.SEEDS, pairs.SETTINGS, "area")
    assert "/somewhere" not in (tmp_path / "pairs.json").read_text()
    pairs.write(tmp_path / "pairs.json", tmp_path / "pairs.md")
    assert "| `grpo` | 0.200 ± 0.014 |" in (tmp_path / "pairs.md").read_text()
