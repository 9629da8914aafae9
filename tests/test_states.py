"""What parts remember can be saved, or is refused when it is first returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from panoply.errors import PanoplyError
from panoply.states import as_tensors, from_tensors, handed_back


def test_what_can_be_saved_comes_back_as_it_was() -> None:
    state = {
        "price": 0.1,
        "seen": [1, "x", None, True, {"a": []}],
        "mean": torch.ones(2).double(),
        "a:b": torch.ones(1),
    }
    kept, result = handed_back("credit.toy", (state, 7))
    assert (kept, result) == (state, 7)
    again = from_tensors(as_tensors({"toy": state, "other": {}}))
    assert again.pop("other") == {}
    for name, value in again["toy"].items():
        assert type(value) is type(state[name])
        assert torch.equal(value, state[name]) if isinstance(value, torch.Tensor) else value == state[name]
    assert again["toy"].keys() == state.keys()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({1, 2}, "a set"),
        ((1, 2), "a tuple"),
        (np.float32(1), "a float32"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ([torch.ones(1)], "a list with something else inside"),
        ({1: 2.0}, "a dict with something else inside"),
        (open, "a builtin_function_or_method"),
    ],
)
def test_what_cannot_is_refused_in_a_sentence(value: Any, shown: str) -> None:
    with pytest.raises(PanoplyError) as caught:
        handed_back("credit.toy", ({"fine": 1, "seen": value}, None))
    assert str(caught.value).startswith(
        f"credit.toy returned a state that cannot be saved: 'seen' is {shown}. A state"
    )


@pytest.mark.parametrize("returned", [torch.ones(2), ({}, 1, 2), ([], 1), None, {"price": 1.0}])
def test_a_part_that_forgets_to_hand_its_state_back(returned: Any) -> None:
    with pytest.raises(PanoplyError, match=r"credit.toy remembers, so it has to return \(state, result\)"):
        handed_back("credit.toy", returned)


def test_a_run_refuses_it_in_the_step_that_returned_it(tmp_path: Path, registries: None) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "import panoply as pp\n\n\n@pp.part('credit', state=dict)\ndef hoarding(state, experience):\n"
        "    return {'seen': set(experience['task'].tolist())}, experience['reward']\n"
    )
    with pytest.raises(
        PanoplyError, match=r"hoarding returned a state that cannot be saved: 'seen' is a set\."
    ):
        tiny.train(tmp_path / "run", steps=2, credit="hoarding", plugins=[str(plugin)])
    assert tiny.checkpoints(tmp_path / "run") == []
