"""Reward models of any layout: which folders are judges of answers, and those that transformers runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError, plain
from panoply.experience import Experience
from panoply.policies.config_reading import native
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.folder import read_config
from panoply.policies.foreign_folder import opened_by_transformers
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.value import ValueModel, outputs_in, padding_in

AT_ONCE = 32
"""Answers that transformers reads in one pass."""


class Classifier:
    """A sequence classifier of a layout that only transformers knows. It judges, and does not learn."""

    def __init__(self, inner: Any, tokenizer: Tokenizer, outputs: tuple[str, ...], pad: int | None):
        self.inner, self.tokenizer, self.outputs, self.pad = inner.eval(), tokenizer, outputs, pad

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device | str) -> Classifier:
        inner = opened_by_transformers(folder, "AutoModelForSequenceClassification", dtype, device)
        raw, number = read_config(folder), int(inner.config.num_labels)
        return cls(inner, Tokenizer.load(folder), outputs_in(raw, number, folder), padding_in(raw, folder))

    def judge(self, experience: Experience) -> Tensor:
        """One number an episode, in the order of `experience.by("episode")`; of several outputs their sum."""
        return torch.stack([*self.judgements(experience).values()]).sum(0)

    @torch.no_grad()
    def judgements(self, experience: Experience) -> dict[str, Tensor]:
        """What each output says of every episode: of its text up to the last decision."""
        episodes = experience.by("episode")
        last = episodes.last(torch.arange(len(experience), device=episodes.index.device))
        tokens = experience.context.ragged("tokens")
        ends = zip(experience["context"][last].tolist(), experience["position"][last].tolist(), strict=True)
        texts = [tokens[context][: position + 1].tolist() for context, position in ends]
        size = AT_ONCE if self.pad is not None else 1  # what pads an answer must be told apart from it
        found = [self._read(texts[first : first + size]) for first in range(0, len(texts), size)]
        return dict(zip(self.outputs, torch.cat(found).unbind(-1), strict=True))

    def _read(self, texts: list[list[int]]) -> Tensor:
        longest, device = max(map(len, texts)), self.inner.device
        fill = 0 if self.pad is None else self.pad
        ids = torch.tensor([text + [fill] * (longest - len(text)) for text in texts], device=device)
        length = torch.tensor([len(text) for text in texts], device=device)
        mask = torch.arange(longest, device=device) < length[:, None]
        said: Tensor = self.inner(input_ids=ids, attention_mask=mask.long()).logits
        return said.float()


def open_judge(
    folder: Path, dtype: torch.dtype, device: torch.device | str, words: Tokenizer, context: int = 0
) -> ValueModel | Classifier:
    """The reward model in a folder, to judge answers whose ids are those of a policy's tokenizer.

    context   the longest sequence that the policy was asked to write; the model reads so much if it can
    """
    raw = read_config(folder)
    if wrong := words.differs(Tokenizer.load(folder)):
        raise PanoplyError(
            f"The reward model in {plain(folder)} has another tokenizer than the policy: {wrong}."
        )
    if not native(raw, str(folder / "config.json")):
        return Classifier.load(folder, dtype, device)
    usual = DecoderConfig.from_hf(raw, str(folder / "config.json"))
    longest = max(usual.max_positions, min(context, usual.most_positions))
    return ValueModel.load(folder, dtype, device, longest)
