"""Which decoder of captured graphs a model gets, asked without a GPU: of those, nothing is captured here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from panoply.rollout import graphs


class Uncaptured(graphs.GraphDecoder):
    """As large as it is asked to be, and nothing else."""

    def __init__(self, model: nn.Module, rows: int, capacity: int, burst: int):
        self.rows, self.capacity, self.longest_burst = graphs.bucket(rows), capacity, burst
        self._addresses, self.asked = graphs.addresses(model), self.rows

    def prepare(self, model: nn.Module) -> None: ...


@pytest.mark.parametrize(("room", "rows"), [(1, 1), (40, 32), (97, 96), (128, 128), (900, 128)])
def test_where_memory_is_short_a_decoder_takes_no_more_and_is_made_once(
    monkeypatch: pytest.MonkeyPatch, room: int, rows: int
) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setattr(graphs, "why_not", lambda _: None)
    monkeypatch.setattr(graphs, "_kind", lambda _: Uncaptured)
    monkeypatch.setattr(graphs, "fitting", lambda _, rows, __: min(rows, room))
    made = graphs.graph_decoder(model, 128, 640, 32)  # type: ignore[arg-type]
    assert made is not None
    assert made.rows == rows
    for asked in (128, 100, 1):
        assert graphs.graph_decoder(model, asked, 640, 32) is made  # type: ignore[arg-type]
    assert graphs.graph_decoder(model, 129, 640, 32) is not made  # type: ignore[arg-type]


def test_what_has_no_room_for_its_graphs_gets_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = nn.Linear(2, 2), []

    class Large(Uncaptured):
        def prepare(self, model: nn.Module) -> None:
            tried.append(self.rows)
            if self.rows > 32:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    model.device = torch.device("cpu")  # type: ignore[assignment]
    monkeypatch.setattr(graphs, "why_not", lambda _: None)
    monkeypatch.setattr(graphs, "_kind", lambda _: Large)
    monkeypatch.setattr(graphs, "_resume", lambda _: None)
    monkeypatch.setattr(graphs, "fitting", lambda _, rows, __: rows)
    made = graphs.graph_decoder(model, 100, 640, 32)  # type: ignore[arg-type]
    assert made is not None
    assert tried == [128, 64, 32]
    assert graphs.graph_decoder(model, 100, 640, 32) is made  # type: ignore[arg-type]
