"""Kinds of works beside methods, and how all of them are listed, shown and called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import panoply as pp
from panoply import functions, index, registry
from panoply.cli import main
from panoply.errors import PanoplyError

pytestmark = pytest.mark.usefixtures("registries")

PLUGIN = '''
import panoply as pp

@pp.algorithm("halving@1", family="toys", tags=("exact", "feedback=offline"))
def halving(low: float = 0.0, high: float = 2.0, steps: int = 40) -> dict[str, dict[str, float]]:
    """Halving: the root of x² − 2 by bisection."""
    found = {}
    for step in range(1, steps + 1):
        middle = (low + high) / 2
        low, high = (middle, high) if middle**2 < 2 else (low, middle)
        found[f"after {step}"] = {"low": low, "high": high}
    return found

@pp.survey("two-ways@1", family="toys")
def two_ways() -> dict[str, tuple[str, ...]]:
    """Two ways to learn from answers, as a survey orders them."""
    return {"from rewards": ("grpo", "ppo"), "from pairs": ("dpo",)}
'''


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "toys.py").write_text(PLUGIN)
    return str(tmp_path / "toys.py")


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == code, err
    return out if code == 0 else err


def test_an_algorithm_is_called_shown_and_listed(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "run", "halving", "--set", "steps=3", "--plugin", plugin)
    assert [line.split() for line in out.splitlines()][-1] == ["after", "3", "1.25", "1.5"]
    assert out.split()[:2] == ["low", "high"]
    found = json.loads(said(capsys, "run", "halving", "--json"))
    assert found["after 40"]["low"] == pytest.approx(2**0.5)

    page = said(capsys, "show", "halving")
    assert "halving@1  (algorithm)" in page
    assert "panoply run halving" in page
    assert "steps  a whole number  40" in page
    assert "halving@1" in said(capsys, "list", "--tag", "feedback=offline")
    listed = [line.split()[:3] for line in said(capsys, "list", "algorithms").splitlines()]
    assert ["halving@1", "algorithm", "–"] in listed

    for words, sentence in {
        ("halvng",): "Unknown algorithm, system or protocol 'halvng'. Did you mean 'halving'?",
        ("halving", "--set", "step=3"): "Unknown setting of halving 'step'. Did you mean 'steps'?",
        ("halving", "--set", "steps=x"): "halving.steps takes a whole number, not 'x'.",
        (
            "halving",
            "--set",
            "steps=0",
        ): "halving gives an object, which is no table: numbers by name, or rows of them.",
        ("halving", "--seed", "1"): "halving draws nothing, so a seed has no effect: leave it out.",
        ("grpo",): "'grpo' is a method, which is not called: panoply train grpo.",
        ("two-ways",): "'two-ways' is a survey, which is not called: panoply show two-ways.",
    }.items():
        assert said(capsys, "run", *words, code=2) == f"panoply: {sentence}\n"


def test_a_survey_orders_works_that_are_here(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "show", "two-ways", "--plugin", plugin)
    order = [page.index(word) for word in ("from rewards", "grpo  ", "ppo  ", "from pairs", "dpo  ")]
    assert order == sorted(order)

    @pp.survey("wrong@1")
    def wrong() -> dict[str, tuple[str, ...]]:
        """Names what is not there."""
        return {"all": ("gripo",)}

    assert said(capsys, "show", "wrong", code=2) == (
        "panoply: Unknown work in the survey wrong 'gripo'. Did you mean 'grpo'?\n"
    )


def test_what_a_function_raises_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    @pp.system("halves@1")
    def halves(parts: int = 2) -> dict[str, float]:
        """One over a number."""
        return {"half": 1 / parts}

    assert functions.call("halves") == {"half": 0.5}
    assert said(capsys, "run", "halves", "--set", "parts=0", code=2) == (
        "panoply: halves cannot be computed with that: ZeroDivisionError: division by zero.\n"
    )


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        ({"a": 1, "b": 0.25}, [["", "value"], ["a", "1"], ["b", "0.25"]]),
        ({"a": {"x": 1}, "b": {"y": 2.0}}, [["", "x", "y"], ["a", "1", "–"], ["b", "–", "2"]]),
        ([{"x": 1, "y": [1, 2]}], [["x", "y"], ["1", "1, 2"]]),
    ],
)
def test_results_are_tables(found: Any, rows: list[list[str]]) -> None:
    assert functions.rows_of(found, "toy") == rows


@pytest.mark.parametrize("found", [3.0, [], {}, [1, 2], {"a": {"x": 1}, "b": 2}])
def test_what_is_no_table_is_refused(found: Any) -> None:
    with pytest.raises(PanoplyError, match="which is no table"):
        functions.rows_of(found, "toy")


def test_filters_choose_among_works(capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*words: str) -> set[str]:
        return {of["id"] for of in json.loads(said(capsys, "list", "--json", *words))}

    preferences = ids("--family", "preferences")
    assert preferences == {w.id for w in registry.works() if w.family == "preferences"} != set()
    assert "sac@1" in ids("--tag", "critic", "--tag", "off-policy")
    assert "a2c@1" not in ids("--tag", "critic", "--tag", "off-policy")
    assert ids("--needs", "teacher") == ids("--needs", "world:teacher") != ids()
    assert ids("--search", "2503.14476") == {"dapo@1"}
    assert "grpo@1" in ids("methods", "--search", "relative GROUP")
    for words, sentence in {
        ("--tag", "critick"): "Unknown tag 'critick'. Did you mean 'critic'?",
        ("--family", "preference"): "Unknown family 'preference'. Did you mean 'preferences'?",
        ("--needs", "techer"): "Unknown need 'techer'. Did you mean 'world:teacher'?",
        ("worlds", "--search", "quaternions"): "No work passes all of these filters: leave one out.",
        ("parts", "--tag", "critic"): "--tag has no effect on parts: it chooses among works.",
    }.items():
        assert said(capsys, "list", *words, code=2) == f"panoply: {sentence}\n"


def test_every_work_has_tags_and_decorators_refuse_what_is_none() -> None:
    assert all(line.tags for line in registry.works())
    for tags in ("critic", ("Has Blanks",), (3,)):
        with pytest.raises(PanoplyError, match="Tags of 'toy@1' are words"):
            pp.algorithm("toy@1", tags=tags)(dict)  # type: ignore[arg-type]


def test_every_decorator_is_exported() -> None:
    for kind in index.KINDS:
        assert getattr(pp, kind) is getattr(registry, kind)
        assert kind in pp.__all__
