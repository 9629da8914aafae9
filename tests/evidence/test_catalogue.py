"""The catalogue is made of the registry and of what was measured, and is current."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny

from panoply import registry
from panoply.evidence import catalogue, pictures, trials, verdicts
from panoply.evidence.claims import Found, together
from panoply.evidence.history import by_former_rule, is_former
from panoply.evidence.statistics import interquartile_mean, interval
from panoply.report.pages import shown

DOCS, CLAIMS = tiny.ROOT / "docs", tiny.ROOT / "results" / "claims"


def test_the_pages_are_current() -> None:
    """If this fails: make docs."""
    made = catalogue.pages(CLAIMS)
    for name, text in made.items():
        assert (DOCS / name).read_text() == text, name
    there = {f"methods/{p.name}" for p in (DOCS / "methods").glob("*.md")}
    assert there == set(made) - {"methods.md"}


def test_the_shipped_verdicts_are_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`make docs` writes them; outside of the repository `show` and `claim` tell the same as in it."""
    shipped = Path(verdicts.__file__).with_name(verdicts.FILE).read_text(encoding="utf-8")
    assert shipped == verdicts.shipment(CLAIMS)
    assert len(shipped) < 2_000 * len(json.loads(shipped)), "a wheel carries what `show` tells, and no more"
    monkeypatch.chdir(tiny.ROOT)
    inside = shown("gigpo")
    monkeypatch.chdir(tmp_path)
    assert shown("gigpo") == inside
    found = verdicts.known("gigpo")
    assert found is not None
    assert " ".join(trials.sentence(found).split()) in " ".join(inside.split())


def test_every_result_belongs_to_a_claim_and_follows_from_its_numbers() -> None:
    known = {e.name: (e, c) for e, c in trials.claimed(everything=True)}
    for path in CLAIMS.glob("*.json"):
        found = json.loads(path.read_text())
        entry, claim = known[path.stem]
        assert (found["id"], found["paper"]) == (entry.id, entry.paper)
        assert found["says"] == claim.says or claim.reworded
        assert len(found["runs"]) == found["seeds"]
        if is_former(found, claim.says, claim.reworded) or found["verdict"] == "not able to tell":
            continue
        assert found["kind"] == claim.kind
        if found["kind"] == "learns":
            sign = -1 if claim.lower else 1  # type: ignore[attr-defined]
            first, second = found["order"]
            differences = [sign * (run[first] - run[second]) for run in found["runs"]]
            gap = Found.of(differences)
            if by_former_rule(found):
                gap = Found(float(interquartile_mean(differences)), interval(differences))
            assert found["difference"] == pytest.approx(gap.difference, abs=1e-5)
            assert found["interval"] == pytest.approx(gap.interval, abs=1e-5)
            room = (found.get("room") or {}).get("size")
            kept = [
                Found(k["difference"], tuple(k["interval"])).verdict(k["margin"])
                for k in found["keeps"].values()
            ]
            assert found["verdict"] == together([gap.verdict(found.get("margin", 0.0), room), *kept])


def test_the_table_of_verdicts_is_current() -> None:
    """If this fails: make docs."""
    page = (DOCS / "evidence.md").read_text()
    assert catalogue.with_verdicts(page, CLAIMS) == page


def test_a_page_of_a_claim_that_is_not_able_to_tell(tmp_path: Path) -> None:
    """Its gate, the question it was before, and the table of verdicts."""
    gate = {"gate": "room", "passed": False, "measured": "grpo ends at the top"}
    waived = {"gate": "problems", "passed": False, "measured": "6 problems", "waived": "there are no more"}
    asked = {
        name: FOUND[name]
        for name in ("id", "kind", "paper", "world", "settings", "order", "metric", "better")
    }
    asked |= {name: FOUND[name] for name in ("budget", "command", "date", "versions")}
    tuning = {"runs": 0, "grid": {}, "chosen": {}, "fixed": "it is a regime"}
    unable = {
        "verdict": "not able to tell",
        "why": "the gate of room: grpo ends at the top.",
        "seeds": 0,
        "runs": [],
    }
    ((_, claim),) = trials.claimed(["gigpo"])
    facts = {
        **asked,
        **unable,
        "says": claim.says,
        "reworded": claim.reworded,
        "gates": [gate, waived],
        "tuning": tuning,
    }
    trials.store_result(FOUND, tmp_path)
    trials.store_result(facts, tmp_path)
    page = catalogue.pages(tmp_path)["methods/gigpo.md"]
    for words in (
        "**Not able to tell**: the gate of room: grpo ends at the top.",
        "| gate of room | grpo ends at the top |",
        "| gate of problems | waived, since there are no more: 6 problems |",
        "| tuning | none, it is a regime |",
        "Reworded after a verdict: ",
        "| 2026-01-31 | – | undecided | area +0.0123",
    ):
        assert words in page
    table = catalogue.with_verdicts("a\n" + "".join(catalogue.MARKS) + "b\n", tmp_path)
    row = "| [gigpo](methods/gigpo.md) | undecided (2026-01-31) | not able to tell (2026-01-31) | yes |"
    assert row in table
    assert (table[:2], table[-2:]) == ("a\n", "b\n")
    assert "1 are not able to tell" in catalogue.pages(tmp_path)["methods.md"]


def test_a_page(tmp_path: Path) -> None:
    page = catalogue.pages(tmp_path)["methods/gigpo.md"]
    for words in (
        "[arXiv 2505.10978](https://arxiv.org/abs/2505.10978)",
        "| `credit` | `group` | `episode_and_anchor` |",
        "R_t = Σ_k≥t 0.95^(k−t)·r_k",
        "`panoply train gigpo --world keydoor`",
        "Not measured yet: `panoply claim gigpo`.",
    ):
        assert words in page


FOUND: dict[str, Any] = {
    "id": "gigpo@1", "paper": 81, "kind": "learns", "says": "…", "world": "keydoor", "settings": {"world.size": "6"},
    "order": {"gigpo": "gigpo", "grpo": "grpo"}, "metric": "area", "better": "higher", "budget": {"episodes": 2560.0},
    "verdict": "undecided", "difference": 0.0123, "interval": [-0.01, 0.03], "p": 0.2, "seeds": 2,
    "runs": [{"seed": 0, "gigpo": 0.8, "grpo": 0.7}, {"seed": 1, "gigpo": 0.81234, "grpo": 0.8}],
    "keeps": {"success": {"margin": 0.02, "difference": 0.0, "interval": [0, 0], "gigpo": 1.0, "grpo": 1.0}},
    "also": {},
    "seconds_a_run": {"gigpo": 7.0, "grpo": 6.0}, "diverged": {"gigpo": 1, "grpo": 0}, "failed": {},
    "curves": {"gigpo": [[[0, 0.1], [2560, 0.9]], [[0, 0.1], [2560, 0.8]]], "grpo": [[[0, 0.1], [2560, 0.5]]] * 2},
    "tuning": {"grid": {"update.lr": [1e-4, 1e-3]}, "seeds": [1001, 1002], "runs": 8, "seconds": 1.0,
               "chosen": {"gigpo": {"update.lr": 1e-3}, "grpo": {"update.lr": 1e-4}}},
    "command": "panoply claim gigpo", "date": "2026-01-31", "versions": {"panoply": "0.1.0", "torch": "2.13.0"},
}  # fmt: skip


def test_a_page_with_a_verdict_and_its_curves(tmp_path: Path) -> None:
    trials.store_result(FOUND, tmp_path / "claims")
    catalogue.write(tmp_path / "docs", tmp_path / "claims")
    page = (tmp_path / "docs" / "methods" / "gigpo.md").read_text()
    for words in (
        "**Undecided**: area +0.0123 (-0.01 to +0.03), 2 seeds against grpo.",
        "| every run | 2,560 episodes |",
        "`world.size=6`",
        "| 1 | 0.8123 | 0.8 |",
        "gigpo: `update.lr=0.001`; grpo: `update.lr=0.0001`",
        "may lose 0.02",
        "| diverged | gigpo: 1 |",
        "| after episodes | 0 | 640 | 1,280 | 1,920 | 2,560 |",
        "| gigpo | 0.1 (0.1 to 0.1) | 0.288 (0.275 to 0.3) |",
        "| 0.85 (0.8 to 0.9) |",
    ):
        assert words in page
    index = (tmp_path / "docs" / "methods.md").read_text()
    assert "1 claims were tested: 1 are undecided." in index
    assert "Of the 1 that rest on chance, 0 differences" in index
    assert not list((tmp_path / "docs" / "methods").glob("*.svg"))
    (tmp_path / "claims" / "gigpo.json").unlink()
    (tmp_path / "docs" / "methods" / "gone.md").write_text("# gone")
    catalogue.write(tmp_path / "docs", tmp_path / "claims")
    assert not (tmp_path / "docs" / "methods" / "gone.md").exists()


@pytest.mark.parametrize("by", ["matplotlib", "plainly"])
def test_pictures_with_and_without_a_library(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "matplotlib":
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setattr(pictures, "_drawn_by_matplotlib", lambda *_: None)
    lines = [pictures.learning_line(label, curves, 2560) for label, curves in FOUND["curves"].items()]
    for name in ("a.svg", "b.svg"):
        pictures.draw(tmp_path / name, lines, "episodes", "held-out success on keydoor")
    text = (tmp_path / "a.svg").read_text()
    assert all(
        words in text for words in ("gigpo", "grpo", "episodes", "held-out success on keydoor", "</svg>")
    )
    assert ("polyline" in text) == (by == "plainly")
    assert (tmp_path / "b.svg").read_text() == text, "the same numbers give the same picture"


def test_every_work_has_a_page() -> None:
    made = catalogue.pages(CLAIMS)
    for kind in ("method", "recipe", "system"):
        for entry in registry.entries(kind):
            if entry.build.__module__.startswith("panoply.methods."):
                assert f"methods/{entry.name}.md" in made
                assert f"(methods/{entry.name}.md)" in made["methods.md"]


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [t for t in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in t]
    assert targets
    for target in targets:
        file, _, anchor = target.partition("#")
        text = (page.parent / file).resolve().read_text()
        assert not anchor or f"\n## {anchor}\n" in text, target
