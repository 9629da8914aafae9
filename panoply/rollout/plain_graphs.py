"""Graphs of models that this library has no decoding kernels for: their own forward pass, captured as it is.

Models that transformers runs, adapters that PEFT runs, heads that are too large. Keys and values lie at fixed
addresses. Where a layer's attention can be replaced, a kernel looks at what is there; where not, a step looks at all
positions there is room for, and a mask hides those to come. Nothing else is fused, but Python is out of the way while
tokens are drawn. A pass that asks the host something cannot be captured: such a model is
decoded eagerly, and why is told once.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from panoply.policies.attention import Cache, Newest
from panoply.rollout.graphs import GraphDecoder


class PlainGraphDecoder(GraphDecoder):
    def _bind(self, model: Any) -> None:
        self._model = weakref.ref(model)  # whose life the graphs must not prolong
        self.glances = bool(getattr(model, "glances", False))

    def _place(self) -> None:
        """The model turns positions into angles itself."""

    def _logits(self, size: int) -> Tensor:
        model = self._model()
        assert model is not None
        token, position = self.state.token[:size, None], self.state.position[:size, None]
        logits: Tensor = model.logits(model.hidden(token, position, cache=self._kept(position))[:, 0])
        return logits

    def _kept(self, position: Tensor) -> Cache | Newest:
        """What the newest tokens are put into, and look at."""
        if self.glances:
            return Newest(self.cache, position[:, 0], (self.state.holder, self.state.held))
        self.cache.begin(position, self.capacity)
        return self.cache
