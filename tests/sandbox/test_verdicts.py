"""Verdicts are made outside: a program that cheats is not right, the honest one is."""

from __future__ import annotations

import pytest
from sandbox.boxes import NAMES, box

from panoply.sandbox import Result
from panoply.sandbox.verdicts import Calls, Value, same

CASES, EXPECTED = [[3], [10], [0]], [6, 20, 0]
HONEST = "def double(n):\n    return n * 2\n"
FORGED = {
    "printing that it passed": "def double(n):\n    print('passed')\n    return None\nprint('all tests passed')",
    "leaving early": "import os\ndef double(n):\n    return 1\nprint('ok')\nos._exit(0)",
    "a patched json": (
        "import json\njson.dumps = lambda *a, **k: 'true'\njson.loads = lambda *a: [[1], [2], [3]]\n"
        "def double(n):\n    return 0\n"
    ),
    "equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def double(n):\n    return Any(5)\n"
    ),
    "searching memory": (
        "import gc, sys\n"
        "def double(n):\n"
        "    for held in gc.get_objects():\n"
        "        if isinstance(held, list) and len(held) == 3 and held[0] == 6 and held[2] == 0:\n"
        "            return held[[3, 10, 0].index(n)]\n"
        "    return None\n"
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_forgeries_do_not_count_and_the_honest_program_does(name: str) -> None:
    calls = [Calls(code, "double", CASES) for code in (HONEST, *FORGED.values())]
    results = box(name).run_many([one.program for one in calls])
    verdicts = [one.verdicts(result, EXPECTED) for one, result in zip(calls, results, strict=True)]
    assert verdicts[0] == [True] * 3
    assert dict(zip(FORGED, verdicts[1:], strict=True)) == {name: [False] * 3 for name in FORGED}


def test_nothing_expected_goes_in() -> None:
    program = Calls(HONEST, "double", CASES).program
    assert "[[3], [10], [0]]" in program.code
    assert "20" not in program.code.replace(Calls(HONEST, "double", CASES).mark, "")
    assert program.stdin == ""
    assert not program.files


def test_a_call_that_raises_costs_its_own_verdict_and_what_is_missing_says_why() -> None:
    calls = Calls("def f(n):\n    print('no line', end='')\n    return [1 / n]\n", "f", [[2], [0], [4]])
    result = box("monty").run_many([calls.program])[0]
    assert calls.values(result) == [
        Value([0.5]),
        Value(error="ZeroDivisionError: division by zero"),
        Value([0.25]),
    ]
    assert calls.verdicts(result, [[0.5], [0], [0.25 + 1e-12]]) == [True, False, True]
    late = Result(-9, "time", f"\n{calls.mark}=[0.5]\n", 2.0, 0)
    assert [v.error for v in calls.values(late)] == ["", "it took too long", "it took too long"]
    broken = Result(1, "", "SyntaxError: invalid syntax\n", 0.1, 0)
    assert calls.values(broken)[0].error == "SyntaxError: invalid syntax"


@pytest.mark.parametrize(
    ("given", "wanted", "equal"),
    [
        (1, True, False),
        (True, True, True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.30001, 0.3, False),
        (10**400, 1.0, False),
        ("1", 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, 0, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_same_data(given: object, wanted: object, equal: bool) -> None:
    assert same(given, wanted) is equal
