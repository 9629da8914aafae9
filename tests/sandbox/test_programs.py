"""What a program gets and what comes of it, the same in every sandbox."""

from __future__ import annotations

import pytest

from panoply.sandbox import Program, Wanted


@pytest.mark.parametrize("name", ["monty", "namespaces", "landlock"])
def test_results_come_in_the_order_of_programs(name: str) -> None:
    box = Wanted(name).find()
    results = box.run_many([Program(f"print({n} * 2)") for n in range(6)])
    assert [r.said for r in results] == [f"{n * 2}\n" for n in range(6)]
    assert all(r.ok for r in results)
