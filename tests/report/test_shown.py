"""Results print as tables, and as HTML in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply.evidence import pool
from panoply.methods.base.grpo import grpo
from panoply.report.layout import table
from panoply.report.shown import Shown, as_html
from panoply.slots.credit.groups import group


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> pp.Trained:
    return tiny.train(tmp_path_factory.mktemp("shown") / "run", steps=1)


def test_a_run_its_plan_and_its_evaluation(done: pp.Trained) -> None:
    shown = pp.evaluate(done, problems=2, attempts=2)
    for result, words in (
        (done, ("held-out success", "before", "sampled", "run folder")),
        (pp.plan("grpo"), ("grpo@1 on chain@1", "parameters", "tokens a step")),
        (shown, ("problems", "pass@2")),
        (pp.runs(done.run.parent), ("status", "finished", "1/1")),
    ):
        text, page = repr(result), result._repr_html_()  # type: ignore[attr-defined]
        assert all(word in text for word in words), text
        assert all(word in page for word in words), page
        assert page.count("<table>") >= 1
        assert "\x00" not in text + page


def test_what_a_page_says_is_escaped() -> None:
    page = as_html(lambda: "a < b\n" + table([("<b>x</b>", "y")]) + table([("note & more",)]))
    assert "<pre>a &lt; b</pre>" in page
    assert "&lt;b&gt;x&lt;/b&gt;</td>" in page
    assert "<p>note &amp; more</p>" in page
    assert table([("a", "b")]) == "a  b", "text again"


def test_what_cannot_be_shown_can_still_be_printed() -> None:
    gone = pp.Trained(Path("nowhere"), {}, {}, 0.0, "")
    assert repr(gone) == "<Trained, which cannot be shown: There is no run folder 'nowhere'.>"
    assert "&lt;Trained" in gone._repr_html_()
    assert "cannot be shown" in repr(Shown())


def test_a_claim_of_ones_own_and_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def run_all(orders: Any, root: Path, *_: Any) -> None:
        from panoply.evidence import cache

        for order in orders:
            order.folder = cache.place(order.plan, root)
            if not order.folder.exists():
                pp.train(order.plan, run=order.folder, progress=pp.Progress())
            order.done = 1.0
            made.append(order.plan.method_id)

    monkeypatch.setattr(pool, "run_all", run_all)
    settings = {
        "world.operations": 2,
        "run.held_out": 4,
        "sample.prompts": 2,
        "sample.group": 4,
        "run.model": "fresh",
    }
    says = pp.Learns(
        "No scale helps.",
        over="grpo",
        world="chain",
        budget="steps=1",
        settings=settings,
        tune={},
        fixed="one step is no time to tune",
        waives={"problems": "four will do", "property": "it is always there"},
        metric="entropy",
    )
    method = grpo().but(credit=group(scale="none"))
    found = pp.claim(method, says, most=2, cache=tmp_path, watch=pool.Watch())
    assert set(made) == {"grpo@1", "grpo@1+changed"}
    assert found.verdict in ("holds", "fails", "undecided")
    assert found.facts["order"] == {"grpo:credit.scale=none": "grpo:credit.scale=none", "grpo": "grpo"}
    assert "No scale helps." in repr(found)
    assert "<table>" in found._repr_html_()
    with pytest.raises(pp.PanoplyError, match="A changed grpo carries no claim: say what it should do"):
        pp.claim(method)
    with pytest.raises(pp.PanoplyError, match="carries no claim"):
        pp.claim("ppo")
