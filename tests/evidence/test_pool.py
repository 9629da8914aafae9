"""What a person watching many runs sees."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

import panoply as pp
from panoply.evidence import pool, worker


@pytest.fixture
def orders() -> list[pool.Order]:
    made = [pool.Order(f"run {i}", pp.plan("grpo", "chain")) for i in range(4)]
    made[0].done, made[1].done, made[1].score = 1.0, 0.5, 0.25
    made[2].problem = "It died."
    return made


def test_lines_say_how_many_are_done_and_how_long_it_takes(
    orders: list[pool.Order], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    lines = pool.Lines(every=10)
    lines.show(orders, [orders[1]])
    lines.show(orders, [orders[1]])
    now[0], orders[1].done, orders[3].done = 120.0, 0.75, 0.25
    lines.show(orders, [orders[1], orders[3]])
    first, second = capsys.readouterr().err.splitlines()
    assert first == "2/4 runs done; running run 1 50%"
    assert second == "2/4 runs done, 80 s left; running run 1 75%, run 3 25%", "half a run in 20 s, two to go"


def test_bars_in_a_terminal(orders: list[pool.Order], capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as shown:
        console.print(pool.Bars()._render(orders, [orders[1]]))
    everything, running = shown.get().rstrip().splitlines()
    assert everything.split()[:2] == ["all", "runs"]
    assert "2/4" in everything
    assert "run 1" in running
    assert "held out 0.25" in running


def test_as_many_processes_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert pool.cores() == 3


def test_nothing_to_do_starts_no_process(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_Worker", None)
    pool.run_all([], tmp_path / "cache")


def test_a_function_is_called_with_several_seeds_at_a_time() -> None:
    """In processes of their own where it can be imported there, and here where it cannot; in order either way."""
    from panoply.methods.generative_offline.sharpe_ratio_at_k import measure

    here = [measure(seed) for seed in (3, 1)]
    assert list(pool.called(measure, [3, 1], workers=2)) == here
    assert list(pool.called(lambda seed: os.getpid(), [3, 1], workers=2)) == [os.getpid()] * 2


@pytest.mark.parametrize(
    ("options", "spent", "share"),
    [
        ({"steps": 10}, {}, 0.2),
        ({"steps": 10, "episodes": 40}, {"episodes": 30}, 0.75),
        ({"steps": 10, "signal": "calls=50"}, {"episodes": 30, "signal:calls": 45}, 0.9),
    ],
)
def test_what_of_its_budget_a_run_has_spent(
    options: dict[str, Any], spent: dict[str, int], share: float
) -> None:
    plan = pp.plan("grpo", "tools", **options)
    assert worker.share(SimpleNamespace(plan=plan, spent=spent, step=2, seconds=0.0)) == share  # type: ignore[arg-type]
