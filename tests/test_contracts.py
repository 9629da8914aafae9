"""Slots are contracts: every part can be called as its slot calls it, and one that cannot is refused in a sentence."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from panoply import registry
from panoply.contracts import SLOTS, TERMS, Slot, contract, slot_table
from panoply.errors import PanoplyError
from panoply.parts import Part, part


def every_part() -> list[type[Part]]:
    registry.entries()
    return [
        cls
        for slot in SLOTS
        for cls in registry.parts(slot).values()
        if cls.__module__.startswith("panoply.")
    ]


@pytest.mark.parametrize("held", every_part(), ids=lambda cls: cls.info.id)
def test_every_part_is_called_as_its_slot_says(held: type[Part]) -> None:
    """Positional arguments by name, keywords that others read, a state only where one is kept."""
    info = held.info
    slot, state = contract(info.slot, info.unit), [] if info.state is None else ["state"]
    settings = dict.fromkeys(held.annotations())
    called = inspect.signature(info.function).bind(
        *([] if info.slot in TERMS else state), *slot.takes, **settings
    )
    for name, value in called.arguments.items():
        assert name in settings or name.lstrip("_") == value
    assert slot.settings <= settings.keys()
    assert info.state is None or slot.remembers
    if info.prepare is not None:
        called = inspect.signature(info.prepare).bind(*state, *slot.takes, **settings)
        assert called.arguments["batch"] == "batch"


def wrong(slot: str, function: Callable[..., Any], **declared: Any) -> str:
    function.__name__ = "toy"
    with pytest.raises(PanoplyError) as caught:
        part(slot, **declared)(function)
    assert "toy" not in registry.parts(slot)
    return str(caught.value)


def test_a_part_that_is_not_its_slots_is_refused_by_name() -> None:
    assert wrong("credit", lambda batch: batch) == (
        "credit.toy takes (batch), but a part of credit is called with (experience)."
    )
    assert wrong("schedule", lambda step: 1.0) == (
        "schedule.toy takes (step), but a part of schedule is called with (step, total)."
    )
    assert wrong("reward", lambda *rows: rows) == (
        "reward.toy takes (*rows), but a part of reward is called with (experience)."
    )
    assert wrong("reward", lambda experience: experience, state=dict) == (
        "reward.toy takes (experience), but a part of reward is called with (state, experience)."
    )
    assert wrong("loss", lambda batch: batch, unit="transition") == (
        "loss.toy takes (batch), but a part of loss is called with (learned, rows)."
    )


def test_only_what_is_called_whole_remembers() -> None:
    assert wrong("reduce", lambda state, experience, mask: (state, mask), state=dict) == (
        "reduce.toy declares a state, but a part of reduce cannot remember."
    )
    assert wrong("regularise", lambda batch: batch, state=dict) == (
        "regularise.toy declares a state but no prepare: a term sees a mini-batch in pieces, and only prepare, which "
        "sees it whole, can remember."
    )
    assert wrong("regularise", lambda batch: batch, state=dict, prepare=lambda batch: {}) == (
        "The prepare of regularise.toy takes (batch), but it is called with (state, batch)."
    )


def test_columns_that_scores_are_made_of_are_not_a_parts_own() -> None:
    with pytest.raises(PanoplyError, match=r"gives column:cut, which says how a decision was drawn"):
        part("credit", gives={"column:cut"})


def test_a_keyword_that_others_read_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLOTS, "reduce", Slot(("experience", "mask"), "weights", frozenset({"width"})))
    assert wrong("reduce", lambda experience, mask: mask) == (
        "reduce.toy has no setting 'width', which every part of reduce has."
    )


def test_an_argument_that_is_not_used_may_say_so(registries: None) -> None:
    @part("schedule")
    def toy_steady(_step: int, _total: int) -> float:
        return 0.5

    assert toy_steady()(3, 9) == 0.5


def test_the_documented_table_is_that_of_the_code() -> None:
    page = Path(__file__).parents[1] / "docs" / "architecture.md"
    assert slot_table() in page.read_text(), slot_table()


def test_slots_import_no_loops() -> None:
    """A part is called by a loop and does not know it; names of types alone may be imported for checking."""
    for file in sorted((Path(__file__).parents[1] / "panoply" / "slots").rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        imported = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        imported += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        assert not [name for name in imported if name.startswith("panoply.loops")], file
