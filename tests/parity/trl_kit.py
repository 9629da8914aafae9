"""What parity with TRL is tested with: the same weights twice, frozen batches, and the distance of two gradients.

TRL's loss functions are called on stand-ins for its trainers, which carry just the settings those functions read; the
model is a tiny random Llama, in `transformers` for TRL and in `Decoder` for Panoply. Where TRL differs from the paper,
the test says so and compares under the setting that makes them equal.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="parity is tested where TRL is installed")
transformers = pytest.importorskip("transformers")

from accelerate import Accelerator  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from panoply.compose import assign, resolve  # noqa: E402
from panoply.experience import Experience, Ragged, Table  # noqa: E402
from panoply.loops.learner import Learner  # noqa: E402
from panoply.policies.folder import load_model  # noqa: E402
from panoply.policies.text import TextPolicy  # noqa: E402
from panoply.policies.tokenizer import Tokenizer  # noqa: E402
from panoply.regimes import Method  # noqa: E402

VOCABULARY = 24
CLOSE = 1e-5
"""Relative: of the loss, and of the largest entry of the gradient."""


# ------------------------------------------------------------------ the two models


@dataclass
class Models:
    theirs: Any
    reference: Any
    ours: TextPolicy


def llama(seed: int, folder: Path | None = None) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def made(folder: Path) -> Models:
    """The same weights twice, and other weights as the reference."""
    theirs, reference = llama(0, folder), llama(1).eval()
    with torch.no_grad():
        for mine, other in zip(reference.parameters(), theirs.parameters(), strict=True):
            mine.copy_(0.6 * mine + 0.4 * other)
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
    add_fused_lm_head(theirs, outputs=outputs)
    add_fused_lm_head(reference, outputs=outputs)
    ours = TextPolicy(load_model(folder), Tokenizer.of_characters("0123456789abcdefghij"))
    return Models(theirs, reference, ours)


# ------------------------------------------------------------------ frozen batches


@dataclass
class Frozen:
    """Sequences of a prompt and an answer; the same ones for both sides."""

    prompts: list[list[int]]
    answers: list[list[int]]
    group: list[int]

    def padded(self, which: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """`input_ids`, `attention_mask` and `completion_mask`, padded on the right."""
        rows = [[*p, *a] for p, a in zip(self.prompts[which], self.answers[which], strict=True)]
        longest = max(map(len, rows))
        ids = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
        mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
        inside = [
            [0] * len(p) + [1] * len(a) + [0] * (longest - len(p) - len(a))
            for p, a in zip(self.prompts[which], self.answers[which], strict=True)
        ]
        return ids, mask, torch.tensor(inside)

    def experience(self, source: int = 0, pairs: list[tuple[int, int]] | None = None) -> Experience:
        """The same as decisions; rows of one prompt share it."""
        flat = [(i, t) for i, answer in enumerate(self.answers) for t in range(len(answer))]
        row = torch.tensor([i for i, _ in flat])
        seen: dict[tuple[int, ...], int] = {}
        prompt = [seen.setdefault(tuple(p), len(seen)) for p in self.prompts]
        decisions = {
            "group": torch.tensor(self.group)[row],
            "episode": row,
            "turn": torch.zeros_like(row),
            "context": row,
            "position": torch.tensor([len(self.prompts[i]) + t for i, t in flat]),
            "action": torch.tensor([self.answers[i][t] for i, t in flat]),
            "source": torch.full_like(row, source),
        }
        context = {
            "tokens": Ragged.from_lists([[*p, *a] for p, a in zip(self.prompts, self.answers, strict=True)]),
            "prompt": torch.tensor(prompt),
            "shared": torch.tensor([len(p) for p in self.prompts]),
        }
        table = None
        if pairs is not None:
            chosen, rejected = zip(*pairs, strict=True)
            table = Table({"chosen": torch.tensor(chosen), "rejected": torch.tensor(rejected)})
        return Experience(Table(decisions), Table(context), table)


def frozen(groups: int, size: int, seed: int = 0, prompt: tuple[int, int] = (3, 6)) -> Frozen:
    dice = random.Random(seed)
    made = Frozen([], [], [])
    for g in range(groups):
        asked = [dice.randrange(VOCABULARY) for _ in range(dice.randint(*prompt))]
        for _ in range(size):
            made.prompts.append(asked)
            made.answers.append([dice.randrange(VOCABULARY) for _ in range(dice.randint(2, 9))])
            made.group.append(g)
    return made


# ------------------------------------------------------------------ comparing


Gradient = dict[str, Tensor]


def their_gradient(models: Models, loss: Tensor) -> tuple[float, Gradient]:
    models.theirs.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    found = {n: p.grad.clone() for n, p in models.theirs.named_parameters() if p.grad is not None}
    return float(loss.detach()), found


def our_gradient(models: Models, method: Method, made: Experience) -> tuple[float, Gradient]:
    """In two micro-batches, so that what is compared does not depend on a split."""
    tokens = int(made.context.ragged("tokens").lengths.sum())
    learner = Learner(models.ours, method, total_steps=1, micro_tokens=tokens * 2 // 3)
    loss = learner.passes(learner.weigh(made, 0)).means()["loss"]
    return loss, {n: p.grad.clone() for n, p in learner.parameters.items() if p.grad is not None}


def distance(ours: tuple[float, Gradient], theirs: tuple[float, Gradient]) -> tuple[float, float]:
    """Relative distances of losses, and of gradients by the largest entry."""
    assert ours[1].keys() == theirs[1].keys()
    largest = max(float(g.abs().max()) for g in theirs[1].values())
    assert largest > 1e-6, "nothing is compared"
    apart = max(float((ours[1][n] - g).abs().max()) for n, g in theirs[1].items())
    return abs(ours[0] - theirs[0]) / max(abs(theirs[0]), largest), apart / largest


def assert_equal(ours: tuple[float, Gradient], theirs: tuple[float, Gradient]) -> None:
    loss, gradient = distance(ours, theirs)
    assert loss < CLOSE
    assert gradient < CLOSE


def with_settings(name: str, **settings: Any) -> Method:
    """The published method with a few settings changed (`__` for a dot)."""
    method = resolve(name).method
    for path, value in settings.items():
        method = assign(method, path.replace("__", "."), value)
    return method


def trainer(cls: type, models: Models, **settings: Any) -> Any:
    """What a trainer's loss reads, and its own methods."""
    made = SimpleNamespace(
        model=models.theirs,
        ref_model=models.reference,
        accelerator=Accelerator(cpu=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        is_encoder_decoder=False,
        padding_value=0,
        pad_token_id=0,
        concatenated_inputs=cls.__dict__.get("concatenated_inputs"),
        get_batch_logps=cls.__dict__.get("get_batch_logps"),
    )
    made.__dict__.update(settings)
    for name in (
        "_get_per_token_logps_and_entropies", "_compute_kl_logps", "concatenated_forward", "odds_ratio_loss", "cpo_loss"
    ):  # fmt: skip
        if name in cls.__dict__:
            setattr(made, name, MethodType(cls.__dict__[name], made))
    return made


def with_reference(models: Models, made: Experience) -> Experience:
    """The column `logp@reference` from TRL's reference model."""
    row, position = made["context"], made["position"]
    tokens = made.context.ragged("tokens").tolist()
    with torch.no_grad():
        logp = [models.reference(torch.tensor([t])).logits[0].log_softmax(-1) for t in tokens]
    values = [
        float(logp[r][p - 1, a])
        for r, p, a in zip(row.tolist(), position.tolist(), made["action"].tolist(), strict=True)
    ]
    return made.with_columns(**{"logp@reference": torch.tensor(values)})
