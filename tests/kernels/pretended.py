"""A GPU that is not here: what asks for one is told that there is one, and Triton's interpreter runs the kernels.

Numbers stay on the CPU and in float32. A graph is not captured but played step by step. So decoding and learning of
models go the way that they go on a GPU, without its rounding and its races.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from panoply.kernels import decode, experts, quantised, sample, train
from panoply.kernels.launching import Often
from panoply.policies import attention, fused, packing, reading
from panoply.policies import experts as mixtures
from panoply.policies.decoder import Decoder
from panoply.policies.scoring import Head
from panoply.rollout import graphs
from panoply.rollout.generation import Generation
from panoply.rollout.rollouts import RUNNING


def launch_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter knows neither chains of kernels nor a launcher that is passed by."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "start this by make test-kernels"

    def often(self: Often, grid: Any, _: Any, *given: Any, **options: Any) -> None:
        self.kernel[grid](*given, **options)

    monkeypatch.setattr(Often, "__call__", often)
    for module in (decode, quantised):
        monkeypatch.setattr(module, "chained", lambda: False)


class _Glance:
    """The status of slots at some moment, which the host knows at once."""

    def __init__(self, status: Tensor):
        self.status = status.clone()

    of = classmethod(lambda cls, status: cls(status))

    def any_ended(self) -> bool:
        return bool((self.status > RUNNING).any())


def _capture(self: graphs.GraphDecoder, size: int, masked: bool) -> tuple[Any, sample.Record]:
    self._idle()
    record = sample.Record.empty(self.longest_burst, size, self.device, bool(self.rule))
    self._step(size, record, masked)
    return SimpleNamespace(replay=partial(self._step, size, record, masked)), record


def _reader(model: Any, blocks: reading.Plain | None) -> reading.Read | None:
    return None if blocks is None else partial(reading._read, model, blocks)


def decode_in_graphs(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[Any], bool]) -> None:
    """Generations of the models `chosen` draw by a `GraphDecoder`, and read prompts end to end."""
    allocate = Generation._allocate

    def in_graphs(self: Generation, capacity: int, whole: int, patience: int) -> None:
        allocate(self, capacity, whole, patience)
        if chosen(self.model):
            made = graphs.graph_decoder(self.model, self.size, whole, patience)
            assert made is not None
            self.graphs, self.host, self.size = made, None, min(self.size, made.rows)
            self.cache, self.history = made.cache, made.history
            made.configure(self.stops, self.temperatures, self.sampling)

    def cache(like: Tensor, *shape: int) -> Tensor:
        return like.new_zeros(shape)

    monkeypatch.setattr(Generation, "_allocate", in_graphs)
    monkeypatch.setattr(attention, "_zeros", cache)
    monkeypatch.setattr(graphs, "why_not", lambda model: None)
    monkeypatch.setattr(graphs, "fitting", lambda model, rows, capacity: rows)
    monkeypatch.setattr(graphs, "Glance", _Glance)
    monkeypatch.setattr(graphs.GraphDecoder, "_capture", _capture)
    monkeypatch.setattr(graphs.GraphDecoder, "_rehearse", lambda self, model: None)
    monkeypatch.setattr(graphs, "reader", _reader)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    _attend_by_kernels(monkeypatch)


def learn_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows go through fused blocks, and scores, by the kernels of a GPU."""
    monkeypatch.setattr(Decoder, "fuses", property(lambda self: self.fusing))
    monkeypatch.setattr(fused, "_kernels", lambda device: train)
    monkeypatch.setattr(fused.host, "angles", lambda cos, sin: (cos, sin))
    monkeypatch.setattr(mixtures, "_kernels", lambda device: experts)
    monkeypatch.setattr(Head, "fused", lambda self, hidden: self.said is None and self.factor == 1)
    _attend_by_kernels(monkeypatch)


def _attend_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_has_kernel", lambda x: True)
