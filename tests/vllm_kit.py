"""A stand-in for vLLM where it is not installed: the part of its interface that we use, over our own decoder.

Like the real one it keeps what it has read of a prompt when it gets new weights, under the prompt and its salt.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from panoply.policies.decoder import Decoder, DecoderConfig


class RequestOutputKind(enum.Enum):
    CUMULATIVE, DELTA, FINAL_ONLY = 0, 1, 2


class SamplingParams(SimpleNamespace):
    """As it was made; what is asked of it and was not given is an error."""

    def __init__(self, **given: Any):
        super().__init__(**given)
        if self.temperature > 2:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}")


class LLMEngine:
    """One token of every running request a step."""

    def __init__(self, model: Decoder, modes: dict[str, Any]):
        self.model, self.modes = model, modes
        self.read: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.running: dict[str, SimpleNamespace] = {}
        self.asked: list[SimpleNamespace] = []

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> str:
        assert request_id not in self.running
        assert params.max_tokens > 0
        tokens = list(prompt["prompt_token_ids"])
        made = torch.Generator().manual_seed(params.seed)
        held = SimpleNamespace(
            tokens=tokens, salt=prompt.get("cache_salt", ""), params=params, chance=made, said=[], told=0
        )
        self.asked.append(held)
        self.running[request_id] = held
        return f"{request_id}-{len(self.asked):08x}"  # of its own, and not what outputs are called

    def abort_request(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self.running.pop(name, None)

    @torch.no_grad()
    def step(self) -> list[SimpleNamespace]:
        told = (self._next(name, held) for name, held in list(self.running.items()))
        return [out for out in told if out is not None]

    def _next(self, name: str, held: SimpleNamespace) -> SimpleNamespace | None:
        params, said = held.params, [token for token, _ in held.said]
        logits = self._logits(held, said)
        tempered = (logits / (params.temperature or 1.0)).log_softmax(-1)
        assert self.modes["logprobs_mode"] == "processed_logprobs"
        noise = torch.empty_like(tempered).exponential_(generator=held.chance)
        token = int((tempered if params.temperature == 0 else tempered.exp() / noise).argmax())
        held.said.append((token, {token: SimpleNamespace(logprob=float(tempered[token]))}))
        finished = token in params.stop_token_ids or len(held.said) >= params.max_tokens
        if finished:
            del self.running[name]
        if params.output_kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        new, held.told = held.said[held.told :], len(held.said)
        output = SimpleNamespace(token_ids=[t for t, _ in new], logprobs=[p for _, p in new])
        return SimpleNamespace(request_id=name, outputs=[output], finished=finished)

    def _logits(self, held: SimpleNamespace, said: list[int]) -> Tensor:
        found: Callable[[], Tensor] = lambda: self.model(torch.tensor([held.tokens + said]))[0, -1].float()  # noqa: E731
        if said:
            return found()
        key = held.salt, tuple(held.tokens)
        if key not in self.read:
            self.read[key] = found()
        return self.read[key]


class LLM:
    """`lost` names a weight that never arrives."""

    lost = ""

    def __init__(self, model: str, **modes: Any):
        raw = json.loads((Path(model) / "config.json").read_text())
        if raw["model_type"] == "unknown":
            raise ValueError("1 validation error\n  architectures ['Unknown'] are not supported")
        self.model = Decoder(DecoderConfig.from_hf(raw, model)).to(getattr(torch, modes["dtype"])).eval()
        self.modes, self.llm_engine = modes, LLMEngine(self.model, modes)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[None]:
        assert method == "reload_weights"
        own = self.model.state_dict()
        with torch.no_grad():
            for name, weight in kwargs["weights_iterator"]:
                if name != self.lost:
                    own[name].copy_(weight)
        return [None]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        return [func(self.model)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LLM]]:
    """`import vllm` gives the stand-in."""
    made, inner = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    made.LLM, made.SamplingParams, made.sampling_params = LLM, SamplingParams, inner  # type: ignore[attr-defined]
    inner.RequestOutputKind = RequestOutputKind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", made)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", inner)
    yield LLM
    LLM.lost = ""
