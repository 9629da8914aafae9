"""A language model that gives a number instead of a token: critics and reward models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from panoply.errors import PanoplyError, plain
from panoply.experience import Experience
from panoply.policies.architectures import ARCHITECTURES
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.folder import read_config
from panoply.policies.text import TextPolicy, fingerprint
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.weights import check_fit, read_weights, weight_files

HEAD = "score.weight"


def outputs_of(needs: frozenset[str]) -> tuple[str, ...]:
    """What a judge that learns says of an answer: what its losses need (`judged:NAME`), or one number alone."""
    return tuple(sorted(need[7:] for need in needs if need.startswith("judged:"))) or ("value",)


class ValueModel:
    """A decoder with a linear output, or several, saved in the layout of transformers' sequence classifiers.

    `score` gives V(s) of the state each decision was taken in; `judge` one number an episode, read after its last
    decision, and `judgements` one for each output.
    """

    def __init__(self, trunk: TextPolicy, head: nn.Linear, outputs: tuple[str, ...] = ("value",)):
        if not isinstance(trunk.model, Decoder):
            known = ", ".join(ARCHITECTURES)
            raise PanoplyError(f"Critics and reward models need a layout that runs natively: {known}.")
        self.trunk, self.head, self.outputs = trunk, head, outputs

    @classmethod
    def of(cls, policy: TextPolicy, outputs: tuple[str, ...] = ("value",)) -> ValueModel:
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
        """What each output says of every episode."""
        episodes = experience.by("episode")
        after = experience.take(episodes.last(torch.arange(len(experience), device=episodes.index.device)))
        after = after.with_columns(position=after["position"] + 1)
        return self.score(after)

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.trunk.model.config
        assert isinstance(config, DecoderConfig)
        raw = config.to_hf()
        labels = ("score",) if len(self.outputs) == 1 else self.outputs
        architecture = raw["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        raw |= {"architectures": [architecture], "num_labels": len(self.outputs), "tie_word_embeddings": True}
        raw |= {
            "id2label": {str(i): name for i, name in enumerate(labels)},
            "label2id": {name: i for i, name in enumerate(labels)},
            "pad_token_id": self.trunk.tokenizer.pad_id,
        }
        weights = {name: p.detach().contiguous() for name, p in self.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(raw, indent=1))
        self.trunk.tokenizer.save(folder)

    @classmethod
    def load(
        cls, folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> ValueModel:
        folder = Path(folder)
        raw = read_config(folder)
        weights = read_weights(weight_files(folder), dtype, device)
        if HEAD not in weights or weights[HEAD].dim() != 2:
            raise PanoplyError(
                f"{plain(folder)} is not a reward model or critic: it has no {HEAD} of two dimensions."
            )
        rows, width = weights[HEAD].shape
        head = nn.Linear(width, rows, bias=False, device=device, dtype=dtype)
        with torch.no_grad():
            head.weight.copy_(weights.pop(HEAD))
        config = DecoderConfig.from_hf({**raw, "tie_word_embeddings": True}, str(folder / "config.json"))
        if width != config.width:
            raise PanoplyError(
                f"The weights in {plain(folder)} do not fit: {HEAD} is {width} wide, not {config.width}."
            )
        with torch.device("meta"):
            model = Decoder(config)
        expected = {n: tuple(w.shape) for n, w in model.state_dict().items() if not n.startswith("lm_head")}
        check_fit(expected, weights, plain(folder))
        model.load_state_dict(weights, assign=True, strict=False)
        model.tie()
        labels = raw.get("label2id")
        if rows > 1 and not (isinstance(labels, dict) and len(labels) == rows):
            raise PanoplyError(
                f"{plain(folder)} has {rows} outputs, and its config.json does not name them in label2id."
            )
        outputs = ("value",) if rows == 1 or labels is None else tuple(labels)
        return cls(TextPolicy(model.eval(), Tokenizer.load(folder)), head, outputs)

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
