"""How a run uses the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import panoply as pp
from panoply.progress import Progress
from panoply.threads import pick_threads, with_threads, without_denormals


def vanishes() -> bool:
    return bool((torch.tensor([1e-38]) * 0.1 == 0).item())


def test_denormals_are_nothing_for_a_while_on_one_thread() -> None:
    assert not vanishes()
    with with_threads(1), without_denormals():
        assert vanishes()
    with with_threads(2), without_denormals():
        assert not vanishes()
    assert not vanishes()


class Looks(Progress):
    seen = False

    def step(self, *_: object) -> None:
        self.seen = vanishes()


def test_a_run_leaves_arithmetic_as_it_was(tmp_path: Path) -> None:
    small = {"sample.length": 8, "run.steps": 1, "run.held_out": 1, "policy.hidden": (4,)}
    looks = Looks()
    pp.train("ppo", "cartpole", run=tmp_path / "run", threads=1, settings=small, progress=looks)
    assert looks.seen
    assert not vanishes()
    with pytest.raises(pp.PanoplyError):
        pp.train("ppo", "cartpole", run=tmp_path / "other", model="nowhere", threads=1, progress=Progress())
    assert not vanishes()


def test_beside_a_gpu_the_processor_has_one_thread() -> None:
    with with_threads(2):
        assert pick_threads(device="cuda") == 1
        assert torch.get_num_threads() == 2
