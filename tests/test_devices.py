"""Devices by name: one that is not here can be planned for, and nothing is made for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_cli import Terminal
from test_cli import panoply as panoply  # the fixture

import panoply as pp
from panoply import devices
from panoply.costs import cost, device_memory
from panoply.policies import build
from panoply.policies.control import open_policy
from panoply.rollout import engine
from tests.rollout.test_engine import make_model

ABSENT = "cuda:999"
SENTENCE = f"There is no device '{ABSENT}' that torch"


@pytest.mark.parametrize(("method", "world"), [("grpo", "chain"), ("ppo", "cartpole"), ("rlhf", "chain")])
def test_a_device_that_is_not_here_is_planned_for_and_not_trained_on(
    panoply: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, world: str
) -> None:
    monkeypatch.setattr("panoply.training.Run.create", lambda *_: pytest.fail("a folder was made"))
    words = [method, "--world", world, "--device", ABSENT]
    code, out, err = panoply.run("plan", *words)
    assert (code, err) == (0, "")
    assert SENTENCE in " ".join(out.split())
    assert "here it would be refused" in " ".join(out.split())
    code, out, err = panoply.run("train", *words, "--run", str(tmp_path / "run"))
    assert (code, out) == (2, "")
    assert err.startswith(f"panoply: {SENTENCE}")
    assert not list(tmp_path.iterdir())


def test_a_plan_for_a_gpu_counts_passes_of_a_gpu() -> None:
    assert device_memory(ABSENT) is None
    settings = {"sample.prompts": 1000, "sample.group": 8}
    there, here = (
        cost(pp.plan("grpo", device=device, settings=settings)).activations.tokens
        for device in (ABSENT, "cpu")
    )
    assert (there, here) == (9216, 16384)


def test_names_are_checked_on_any_machine() -> None:
    for name in ("auto", "cpu", "cuda", "cuda:3"):
        devices.check_name(name)
    for name, hint in (("gpu", "'cuda'"), ("GPU:1", "'cuda:1'"), ("moon", "There is: auto")):
        with pytest.raises(pp.PanoplyError, match=f"Unknown device '{name}'.*{hint}"):
            pp.plan("grpo", device=name)
    with pytest.raises(pp.PanoplyError, match=SENTENCE):
        open_policy("fresh", pp.plan("ppo", "cartpole").world(), 0, ABSENT)  # type: ignore[arg-type]


def test_a_gpu_that_is_named_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches kernels there, and torch captures graphs there, wherever their tensors lie."""
    current: list[torch.device] = []
    monkeypatch.setattr(devices, "check", lambda _: None)
    monkeypatch.setattr(build, "begin", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cuda", "cuda:1", "cpu"):
        build.pick_device(name)
    assert current == [torch.device("cuda:1")]


def test_threads_sample_on_the_gpu_of_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[torch.device] = []
    current = engine._current
    monkeypatch.setattr(engine, "_current", lambda device: there.append(device) or current(device))  # type: ignore[func-returns-value]
    model = make_model()
    engine.TextEngine(model).generate([engine.Request([1], [0])], engine.Sampling(max_tokens=1))
    assert there == [model.device]
    guard = current(torch.device("cuda:1"))
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1
