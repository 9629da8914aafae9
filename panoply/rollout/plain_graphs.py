"""Graphs of models that this library has no decoding kernels for: their own forward pass, captured as it is.

Models that transformers runs, adapters that PEFT runs, heads that are too large. Keys and values lie at fixed
addresses, every step looks at all positions there is room for, and a mask hides those to come. Nothing is fused, but
Python is out of the way while tokens are drawn. A pass that asks the host something cannot be captured: such a model is
decoded eagerly, and why is told once.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from panoply.rollout.graphs import GraphDecoder


class PlainGraphDecoder(GraphDecoder):
    def _bind(self, model: Any) -> None:
        self._model = weakref.ref(model)  # whose life the graphs must not prolong

    def _place(self) -> None:
        """The model turns positions into angles itself."""

    def _logits(self, size: int) -> Tensor:
        model = self._model()
        assert model is not None
        token, position = self.state.token[:size, None], self.state.position[:size, None]
        self.cache.begin(position, self.capacity)
        logits: Tensor = model.logits(model.hidden(token, position, cache=self.cache)[:, 0])
        return logits
