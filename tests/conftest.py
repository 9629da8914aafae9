"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import forks
import pytest
import torch

from panoply import extensions, parts, registry
from panoply.evidence import pool
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.worlds.text.chain import Chain

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is no folder is looked up nowhere
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(
    prefix="panoply-state-"
)  # what tests run is not remembered for good
pool.subprocess = forks  # type: ignore[assignment]  # workers of comparisons need not import torch first
os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no test cuts the power, and a disk makes them wait
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell has it ignored
os.environ["COLUMNS"] = "100"  # what is printed is compared, whatever terminal the tests run in


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `gpu` waits for one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))


@pytest.fixture
def registries() -> Iterator[None]:
    """What a test registers, or loads as a plug-in, is forgotten after it."""
    registry.entries()  # modules are imported once only: what is built in must be in the copies
    extensions._points.cache_clear()
    held = {slot: dict(known) for slot, known in parts._PARTS.items()}
    entries, points = dict(registry.ENTRIES), set(extensions._loaded)
    yield
    for slot, known in parts._PARTS.items():
        known.clear()
        known.update(held[slot])
    registry.ENTRIES.clear()
    registry.ENTRIES.update(entries)
    extensions._loaded.clear()
    extensions._loaded.update(points)
    extensions._points.cache_clear()
    for name in [n for n in sys.modules if n.startswith("panoply_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def tiny_collector() -> Collector:
    """A collector on a small chain with new weights."""
    world = Chain(operations=2)
    policy = TextPolicy.fresh(DecoderConfig(**world.default_model()), world.tokenizer, seed=1)
    return Collector(world, policy, seed=0)
