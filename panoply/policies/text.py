"""A language model as a policy: it scores the decisions of an experience, loads, saves and copies itself."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError
from panoply.experience import Experience, moved
from panoply.policies import divergence
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.folder import generation_config, load_model, save_model
from panoply.policies.foreign import Foreign
from panoply.policies.layout import Rows, lay_out
from panoply.policies.scoring import Head, score_actions
from panoply.policies.tokenizer import Tokenizer


class TextPolicy:
    """A model and its tokenizer. `shared=False` scores each sequence in its own row: slower, and equal."""

    def __init__(
        self,
        model: Decoder | Foreign,
        tokenizer: Tokenizer,
        *,
        shared: bool = True,
        files_beside: dict[str, bytes] | None = None,
    ):
        if tokenizer.vocab_size > model.config.vocab_size:
            raise PanoplyError(
                f"The tokenizer has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size}."
            )
        self.model, self.tokenizer, self.shared = model, tokenizer, shared
        self.files_beside = dict(files_beside or {})
        self.outputs: dict[str, Tensor] = {}
        """Output weights of snapshots that whole distributions are compared with."""

    @classmethod
    def load(
        cls, folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> TextPolicy:
        _check_dtype(dtype, torch.device(device))
        model = load_model(folder, dtype, device)
        return cls(model, Tokenizer.load(folder), files_beside=generation_config(folder))

    @classmethod
    def fresh(
        cls,
        config: DecoderConfig,
        tokenizer: Tokenizer,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> TextPolicy:
        """Random weights that depend on config and seed only: no global generator is read or moved."""
        with torch.device("meta"):
            model = Decoder(config)
        model.to_empty(device="cpu")
        model.tie()
        model.initialise(seed)
        return cls(model.to(device=device, dtype=dtype).eval(), tokenizer)

    def save(self, folder: str | Path) -> None:
        """A Hugging Face folder, replaced as a whole: a crash leaves the old one."""
        files_beside = {**self.files_beside, **self.tokenizer.files}
        save_model(self.model, folder, files_beside=files_beside, roles=self.tokenizer.roles)

    @property
    def context_length(self) -> int:
        return self.model.config.max_positions

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def packs(self) -> bool:
        """Whether sequences are scored end to end in one row, without padding."""
        return bool(getattr(self.model, "packs", False))

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in self.model.parameters() if p.requires_grad)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    @torch.no_grad()
    def load_weights(self, folder: str | Path) -> None:
        """Overwrite the weights in place with those of a folder of the same layout."""
        saved = dict(load_model(folder, self.model.head_weight.dtype, self.device).named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.copy_(saved[name])

    def copy(self) -> TextPolicy:
        """A frozen snapshot that later training does not touch."""
        model = copy.deepcopy(self.model).requires_grad_(False).eval()
        return TextPolicy(model, self.tokenizer, shared=self.shared, files_beside=self.files_beside)

    @torch.no_grad()
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any bit of any weight."""
        return fingerprint(self.model.state_dict().items())

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """What the model says of each decision: `logp`, and of `needs` `entropy` and `hidden:K`.

        Under the distribution that was sampled from: the columns `temperature` and `allowed` apply.
        `hidden:K` is the state, after K blocks, that the decision was predicted from. `divergence:Q@SNAPSHOT`
        compares the whole distribution with that of a snapshot (see `remember`).
        """
        taps = _taps(needs)
        found: dict[str, list[Tensor]] = {}
        order = []
        for rows, part, last, tapped in self._passes(experience, taps):
            scores = self._score_rows(experience, rows.decision, _pick(last, part.state), needs)
            scores |= {f"hidden:{k}": _pick(state, part.state) for k, state in tapped.items()}
            for name, column in scores.items():
                found.setdefault(name, []).append(column)
            order.append(part.decision)
        if not order:
            return self._nothing(needs)
        back = torch.cat(order).argsort()
        return {name: torch.cat(columns)[back] for name, columns in found.items()}

    def states(self, experience: Experience) -> Tensor:
        """The last hidden state [decisions, width] that each decision was predicted from."""
        passes = list(self._passes(experience))
        order = torch.cat([part.decision for _, part, _, _ in passes])
        return torch.cat([_pick(last, part.state) for _, part, last, _ in passes])[order.argsort()]

    def _passes(
        self, experience: Experience, taps: Sequence[int] = ()
    ) -> Iterator[tuple[Rows, Rows, Tensor, dict[int, Tensor]]]:
        """Forward passes over all contexts: rows, the same beside the model, last states, and those at `taps`."""
        self._check_length(experience)
        # Attention costs as much as the rest of a block on rows of about six times the width.
        dense, packed = 6 * self.model.config.width, self.packs
        for rows in lay_out(experience, shared=self.shared, dense=dense, packed=packed):
            part = rows.to(self.device)
            laid: dict[str, Any] = {"packing": part.packing} if packed else {"segments": part.segments}
            last, tapped = self.model.hidden_states(part.tokens, part.positions, **laid, taps=taps)
            yield rows, part, last, tapped

    def remember(self, name: str, snapshot: TextPolicy, experience: Experience) -> Tensor:
        """The column `distribution@NAME`: the states a snapshot predicts decisions from. Its output weights stay."""
        self.outputs[name] = snapshot.model.head_weight.detach().clone()
        return snapshot.states(experience)

    def _score_rows(
        self, experience: Experience, decision: Tensor, states: Tensor, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        at = decision.to(experience["action"].device)
        temperature = (
            moved(experience["temperature"][at], states.device) if "temperature" in experience else None
        )
        allowed = None
        if "allowed" in experience:
            allowed = experience.decisions.ragged("allowed").take(at).to(states.device)
        action = moved(experience["action"][at], states.device)
        head, softcap = self.model.head_weight, self.model.softcap
        entropy = "entropy" in needs
        found = score_actions(states, head, action, temperature, allowed, entropy, softcap=softcap)
        for need, q, to in divergence.parse(needs):
            other = moved(experience[f"distribution@{to}"][at], states.device)
            drawn = Head(temperature, allowed, softcap)
            found[need] = divergence.of_tokens(states, head, other, self.outputs[to], drawn, q)
        return found

    def _check_length(self, experience: Experience) -> None:
        longest = int(experience["position"].max()) if len(experience) else 0
        if longest > self.context_length:
            raise PanoplyError(
                f"A sequence of {longest} tokens is longer than the model's context of {self.context_length}."
            )

    def _nothing(self, needs: frozenset[str]) -> dict[str, Tensor]:
        width = self.model.config.width
        shapes = {"logp": (0,)} | {n: (0, width) if n.startswith("hidden") else (0,) for n in needs}
        return {name: torch.zeros(shape, device=self.device) for name, shape in shapes.items()}


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Sixteen hex digits that change with any bit of any weight."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights, key=lambda named: named[0]):
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise PanoplyError(f"Weights can be float32, bfloat16 or float16, not {dtype}.")
    if dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise PanoplyError("This GPU has no bfloat16: use run.dtype=float16 or float32.")


def _pick(states: Tensor, index: Tensor) -> Tensor:
    return states.reshape(-1, states.shape[-1]).index_select(0, index)


def _taps(needs: frozenset[str]) -> list[int]:
    taps = []
    for need in sorted(n for n in needs - {"logp", "entropy"} if not n.startswith(divergence.NEED)):
        kind, _, depth = need.partition(":")
        if kind != "hidden" or not depth.isdigit():
            raise PanoplyError(f"A text policy cannot supply '{need}'; it has logp, entropy and hidden:K.")
        taps.append(int(depth))
    return taps
