"""Bad inputs from fixed seeds, of every kind: none ends in a traceback or hangs. More: `python tests/fuzz.py`."""

from __future__ import annotations

import fuzz
import fuzz_inputs
import pytest

INPUTS = 300
KINDS = fuzz_inputs.KINDS


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[kind.__name__ for kind in KINDS])
def test_bad_input_is_answered_with_a_sentence(kind: int) -> None:
    found = [fuzz.problem(seed) for seed in range(kind, INPUTS, len(KINDS))]
    assert [wrong for wrong in found if wrong is not None] == []


def test_the_fuzzer_finds_what_it_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(rng: object, place: object) -> None:
        raise KeyError("x")

    def hangs(rng: object, place: object) -> None:
        while True:
            pass

    for kind, says in ((raises, "KeyError"), (hangs, "no answer in 0.1 s")):
        monkeypatch.setattr(fuzz_inputs, "KINDS", (kind,))
        assert says in str(fuzz.problem(7, seconds=0.1 if kind is hangs else 10))
