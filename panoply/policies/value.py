"""A language model that gives a number instead of a token: critics and reward models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError, plain
from panoply.experience import Experience
from panoply.files import brief
from panoply.policies.architectures import ARCHITECTURES
from panoply.policies.config_reading import native
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.folder import (
    DTYPE_NAMES,
    decoder_of,
    read_config,
    save_model,
    weights_of,
    write_weights,
)
from panoply.policies.text import TextPolicy, fingerprint
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.weights import read_weights, weight_files

HEAD, ALONE = "score.weight", ("value",)
NATIVE = f"Critics and reward models that learn need a layout that runs natively: {', '.join(ARCHITECTURES)}."


def outputs_of(needs: frozenset[str]) -> tuple[str, ...]:
    """What a judge that learns says of an answer: what its losses need (`judged:NAME`), or one number alone."""
    return tuple(sorted(need[7:] for need in needs if need.startswith("judged:"))) or ALONE


def outputs_in(raw: Mapping[str, Any], number: int, folder: Path) -> tuple[str, ...]:
    """The names of a classifier's outputs, as `id2label` has them; transformers writes none where it made them up."""
    if number == 1:
        return ALONE
    labels = raw.get("id2label")
    if labels is None:
        return tuple(f"LABEL_{i}" for i in range(number))
    named = [labels.get(str(i)) for i in range(number)] if isinstance(labels, dict) else []
    if len(set(map(str, named))) < number or not all(isinstance(name, str) and name for name in named):
        raise PanoplyError(
            f"{plain(folder)} has {number} outputs, and its config.json does not name each of them in id2label."
        )
    return tuple(map(str, named))


def padding_in(raw: Mapping[str, Any], folder: Path) -> int | None:
    """What a classifier passes over at the end of a text: padding, and where a text is padded with its end, the end."""
    pad = raw.get("pad_token_id")
    if pad is not None and (isinstance(pad, bool) or not isinstance(pad, int)):
        raise PanoplyError(
            f"pad_token_id in {plain(folder / 'config.json')} is a whole number, not {brief(pad)}."
        )
    return pad


def padding_of(tokenizer: Tokenizer) -> int | None:
    """What a new one would pass over, none where texts are padded with what ends them: the end is to be read.

    transformers then takes answers one at a time and refuses batches, in which it could not tell the two apart.
    """
    return None if tokenizer.pad_id == tokenizer.eos_id else tokenizer.pad_id


def last_token(ends: Experience, pad: int | None) -> Tensor:
    """Of rows that are the last of an answer: the position of its last token that is no padding."""
    position = ends["position"]
    if pad is None:
        return position
    tokens = ends.context.ragged("tokens")
    first = tokens.offsets[ends["context"].to(tokens.offsets.device)].to(position.device)
    values = tokens.values.to(position.device)
    while bool((padded := (values[first + position] == pad) & (position > 0)).any()):
        position = position - padded.long()
    return position


class ValueModel:
    """A decoder with a linear output, or several, saved in the layout of transformers' sequence classifiers.

    `score` gives V(s) of the state each decision was taken in; `judge` one number an episode, read after its last
    decision, and `judgements` one for each output.
    """

    def __init__(self, trunk: TextPolicy, head: nn.Linear, outputs: tuple[str, ...] = ALONE):
        if not isinstance(trunk.model, Decoder):
            raise PanoplyError(NATIVE)
        self.trunk, self.head, self.outputs = trunk, head, outputs
        self.pad = padding_of(trunk.tokenizer)
        """The token that a batch is padded with, which ends no answer."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.trunk.tokenizer

    @classmethod
    def of(cls, policy: TextPolicy, outputs: tuple[str, ...] = ALONE) -> ValueModel:
        """The policy's own weights and a head of zeros, so that everything starts at 0. Takes the policy over."""
        width = policy.model.config.width
        weight = policy.model.head_weight
        head = nn.Linear(width, len(outputs), bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(head.weight)
        return cls(policy, head, outputs)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.trunk.named_parameters():
            if not name.startswith("lm_head"):
                yield name, parameter
        yield HEAD, cast(nn.Parameter, self.head.weight)

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """`value` of each decision's state, or where `judged` is needed that of each episode's end.

        Of several outputs that is `judged:OUTPUT`, one by one.
        """
        if "judged" in needs:
            found = self.judgements(experience)
            return {f"judged:{name}": said for name, said in found.items()} | {"judged": self._total(found)}
        said = self.head(self.trunk.states(experience)).float()
        return dict(zip(self.outputs, said.unbind(-1), strict=True))

    def judge(self, experience: Experience) -> Tensor:
        """One number an episode, in the order of `experience.by("episode")`; of several outputs their sum."""
        return self._total(self.judgements(experience))

    @staticmethod
    def _total(found: dict[str, Tensor]) -> Tensor:
        first, *others = found.values()
        return torch.stack([first, *others]).sum(0) if others else first

    def judgements(self, experience: Experience) -> dict[str, Tensor]:
        """What each output says of every episode, read where transformers' classifiers read it.

        That is after its last decision, but for tokens of padding there: who decodes may have drawn such a token.
        """
        episodes = experience.by("episode")
        after = experience.take(episodes.last(torch.arange(len(experience), device=episodes.index.device)))
        return self.score(after.with_columns(position=last_token(after, self.pad) + 1))

    def save(self, folder: str | Path) -> None:
        """A folder that transformers opens as a sequence classifier, replaced as a whole."""
        save_model(self, folder, files_beside=self.trunk.tokenizer.files)

    def write(self, folder: Path, shard_bytes: int) -> None:
        model = cast(Decoder, self.trunk.model)
        labels = ("score",) if self.outputs == ALONE else self.outputs
        raw = model.config.to_hf() | {
            "architectures": [model.config.layout.classifier],
            "dtype": DTYPE_NAMES.get(model.dtype, "float32"),
            "num_labels": len(labels),
            "tie_word_embeddings": True,
            "id2label": {str(i): name for i, name in enumerate(labels)},
            "label2id": {name: i for i, name in enumerate(labels)},
            "pad_token_id": self.pad,
        }
        (folder / "config.json").write_text(json.dumps(raw, indent=1))
        weights = weights_of(model, headless=True)
        write_weights({**weights, HEAD: self.head.weight.detach().cpu().contiguous()}, folder, shard_bytes)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        context: int = 0,
    ) -> ValueModel:
        """Of a folder written here, or by transformers of a layout that runs natively."""
        folder = Path(folder)
        raw = read_config(folder)
        if not native(raw, str(folder / "config.json")):
            raise PanoplyError(f"{plain(folder)} is a {plain(raw['model_type'])}: {NATIVE}")
        tied = {**raw, "tie_word_embeddings": True}
        config = DecoderConfig.from_hf(tied, str(folder / "config.json"), context)
        weights = read_weights(weight_files(folder), dtype, device)
        if HEAD not in weights or weights[HEAD].dim() != 2:
            raise PanoplyError(
                f"{plain(folder)} is not a reward model or critic: it has no {HEAD} of two dimensions."
            )
        rows, width = weights[HEAD].shape
        if width != config.width:
            raise PanoplyError(
                f"The weights in {plain(folder)} do not fit: {HEAD} is {width} wide, not {config.width}."
            )
        head = nn.Linear(width, rows, bias=False, device=device, dtype=dtype)
        with torch.no_grad():
            head.weight.copy_(weights.pop(HEAD))
        model = decoder_of(config, weights, folder)
        found = cls(TextPolicy(model, Tokenizer.load(folder)), head, outputs_in(raw, rows, folder))
        found.pad = padding_in(raw, folder)
        return found

    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any bit of any weight."""
        return fingerprint(self.named_parameters())

    @torch.no_grad()
    def load_weights(self, folder: str | Path) -> None:
        saved = dict(
            ValueModel.load(folder, self.head.weight.dtype, self.head.weight.device).named_parameters()
        )
        for name, parameter in self.named_parameters():
            parameter.copy_(saved[name])
