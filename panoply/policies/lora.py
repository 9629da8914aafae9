"""Low-rank adapters on a policy: only they learn, and they are what a checkpoint must remember.

The decoder of this library has its own (low_rank.py), merged into its weights. Models that transformers runs, and DoRA,
go through PEFT: separate products, without fused blocks, and several times slower.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from panoply.errors import PanoplyError, first_line, needs_extra, plain
from panoply.lora import TABLES, Lora
from panoply.policies import low_rank
from panoply.policies.adapter_base import Under, check_base, write_base
from panoply.policies.adapter_config import (
    CONFIG,
    WEIGHTS,
    check_factors,
    going_on,
    is_adapter,
    model_under,
    settings_of,
)
from panoply.policies.adapter_folder import load_factors, read_adapter, write_adapter
from panoply.policies.decoder import Decoder
from panoply.policies.expert_adapters import expert_tensors
from panoply.policies.foreign import Foreign
from panoply.policies.text import TextPolicy
from panoply.policies.thoughts import read_thoughts, write_thoughts
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.weights import check_fit, listed, read_weights
from panoply.policies.words import tokenizer_of
from panoply.seeds import seeded, stable_hash

OF_BOTH = "embed_tokens.token_adapter.trainable_tokens_delta"
"""Rows of tokens that learn (`trainable_token_indices`): PEFT changes both tables where they are one."""


@dataclass(frozen=True)
class Adapted:
    """What a policy's adapters are, and the policy as it was before them, where that is at hand for nothing."""

    rank: int
    settings: Lora
    base: TextPolicy | None
    under: Under | None = None
    """The weights that they are over, where these have a folder."""


def add_lora(
    policy: TextPolicy,
    rank: int,
    seed: int = 0,
    settings: Lora | None = None,
    folder: Path | None = None,
    device: torch.device | None = None,
) -> TextPolicy:
    """The policy with adapters of that rank: fresh ones, with which it starts unchanged, or those of a `folder`.

    It stays where it is, or goes to a `device`.
    """
    settings = settings or Lora()
    model = policy.model
    if policy.values is not None:
        raise PanoplyError(
            "A model that is steered by values of tokens gets no adapters: name the model that was steered, or leave "
            "--lora out."
        )
    if isinstance(model, Foreign) or settings.dora:
        return _through_peft(policy, rank, seed, settings, folder)
    linear, experts = low_rank.linear_layers(model), expert_tensors(model)
    saved = None if folder is None else read_adapter(folder)
    if saved is None:
        named = [*settings.layers(linear, rank, experts), *settings.tensors(experts, rank)]
        ranks = dict.fromkeys(named, rank)
        scales = dict.fromkeys(named, settings.scale(rank, rank))
    else:
        saved.check(linear | experts)
        ranks = saved.ranks(experts)
        scales = saved.scales(ranks)
    few = None if settings.base == "whole" else settings.base
    base = low_rank.adapt(model, ranks, scales, few, device)
    before = type(policy)(base, policy.tokenizer, shared=policy.shared)
    if saved is None:
        low_rank.start(model, torch.Generator().manual_seed(stable_hash("lora", seed) % 2**31))
    else:
        load_factors(model, saved)
    policy.adapted = Adapted(rank, settings, before if saved is None else None)
    return policy


def begun_with(policy: TextPolicy) -> TextPolicy | None:
    """The policy as it was when its adapters were added: its base, without a second copy of anything.

    With adapters that went on from saved ones, a copy of the weights that they move; through PEFT there is none then.
    """
    if policy.adapted is None or policy.adapted.base is not None:
        return None if policy.adapted is None else policy.adapted.base
    return None if _peft_model(policy) else policy.copy()


def open_adapted(
    opened: Callable[[str, bool], TextPolicy],
    source: str,
    folder: Path | None,
    rank: int,
    seed: int,
    settings: Lora,
    device: torch.device | None = None,
) -> TextPolicy:
    """The policy that `source` stands for with adapters: its own where its `folder` holds some, else fresh ones.

    opened   opens a model, on the host where that is asked for: of what is to be in few bits, a GPU need not hold all
             that it is before
    device   where it goes then
    """
    if folder is None or not is_adapter(folder):
        begun = opened(source, settings.base != "whole")
        policy = add_lora(begun, rank, seed, settings, device=device)
        return policy if folder is None else _over(policy, Under.of(folder))
    under = Under.of(model_under(folder))
    check_base(folder, under)
    begun = opened(str(under.folder), settings_of(folder)[1].base != "whole")
    begun.tokenizer = _words(folder, begun)
    own = going_on(folder, rank, settings, native=not isinstance(begun.model, Foreign))
    policy = _over(add_lora(begun, rank, seed, own, folder, device), under)
    if (thoughts := read_thoughts(folder, policy.model.config.width)) is not None:
        policy.think(thoughts)
    return policy


def _words(folder: Path, over: TextPolicy) -> Tokenizer:
    """An adapter's own tokenizer, with its chat template, if the model under it knows all tokens."""
    words, known = tokenizer_of(folder), over.model.config.vocab_size
    if strange := [ident for ident in words.ids if ident >= known]:
        raise PanoplyError(
            f"The tokenizer of the adapter in {plain(folder)} has a token {plain(words.token(max(strange)))} with the "
            f"id {max(strange)}, and the model under it a vocabulary of {known}."
        )
    return words


def _over(policy: TextPolicy, under: Under) -> TextPolicy:
    """The same, knowing which weights its adapters are over."""
    assert policy.adapted is not None
    policy.adapted = replace(policy.adapted, under=under)
    return policy


def save_adapter(policy: TextPolicy, folder: Path, base: Path | None = None) -> None:
    """A folder that PEFT opens on the base model, by `AutoPeftModelForCausalLM` where a folder holds that."""
    assert policy.adapted is not None
    if (model := _peft_model(policy)) is None:
        write_adapter(policy.model, folder, policy.adapted.rank, policy.adapted.settings, base)
    else:
        _save_through_peft(model, folder, base)
    write_base(folder, policy.adapted.settings.base, policy.model.dtype, policy.adapted.under)
    policy.tokenizer.save(folder)
    write_thoughts(policy.thoughts, folder)


def load_adapter(policy: TextPolicy, folder: Path) -> None:
    """Overwrite the adapters' weights with saved ones, and so those of thoughts."""
    if (thoughts := policy.thoughts) is not None:
        thoughts.load_from(folder)
    if policy.adapted is not None and policy.adapted.under is not None:
        check_base(folder, policy.adapted.under)
    if (model := _peft_model(policy)) is None:
        load_factors(policy.model, read_adapter(folder))
        return
    check_factors(folder)
    peft, saved = _peft(), read_weights([folder / WEIGHTS])
    there = {name: tuple(w.shape) for name, w in peft.get_peft_model_state_dict(model).items()}
    check_fit(there, saved, plain(folder), CONFIG)
    peft.set_peft_model_state_dict(model, saved)
    now = peft.get_peft_model_state_dict(model)
    if wrong := [
        name for name, w in saved.items() if not torch.equal(now[name].cpu(), w.to(now[name].dtype))
    ]:
        raise PanoplyError(f"PEFT has not taken {listed(wrong)} over from {plain(folder)}.")


# ------------------------------------------------------------------ through PEFT


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise needs_extra(
            "peft",
            "peft",
            "DoRA, --lora of a model that transformers runs, and an adapter that is more than factors",
        ) from error
    return peft


def _peft_model(policy: TextPolicy) -> Any:
    """PEFT's own model: the policy's, or inside of one that transformers runs; None where there is none."""
    model = policy.model.inner if isinstance(policy.model, Foreign) else policy.model
    return model if hasattr(model, "peft_config") else None


class Unadapted:
    """A model through PEFT without its adapters, which are switched off for each pass: no second copy of anything."""

    training = False

    def __init__(self, model: Any, peft_model: Any):
        self._model, self._peft = model, peft_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, *tokens: Any, **more: Any) -> torch.Tensor:
        found: torch.Tensor = self.hidden_states(*tokens, **more)[0]
        return found

    def hidden_states(self, *tokens: Any, **more: Any) -> Any:
        with self._peft.disable_adapter():
            return self._model.hidden_states(*tokens, **more)

    def train(self, mode: bool = True) -> Unadapted:
        return self


def _through_peft(
    policy: TextPolicy, rank: int, seed: int, settings: Lora, folder: Path | None
) -> TextPolicy:
    settings.check_foreign()
    peft, model = _peft(), policy.model
    named: Any = model.inner if isinstance(model, Foreign) else model
    drawn = stable_hash("lora", seed) % 2**31
    with seeded(drawn), warnings.catch_warnings(), _of_another_base(folder):
        warnings.simplefilter("ignore")  # PEFT corrects fan_in_fan_out by itself, and says so at length
        config = _fresh_config(peft, named, rank, settings) if folder is None else _own_config(peft, folder)
        if isinstance(model, Foreign):
            model.inner = peft.get_peft_model(named, config)
        else:
            model = peft.get_peft_model(model, config)
    kind = type(policy)
    found = kind(model.eval(), policy.tokenizer, shared=policy.shared, files_beside=policy.files_beside)
    without = Unadapted(model, _peft_model(found))
    before = kind(cast(Any, without), policy.tokenizer, shared=policy.shared)
    found.adapted = Adapted(rank, settings, before if folder is None else None)
    if folder is not None:
        load_adapter(found, folder)
    if isinstance(model, Foreign):
        model.check()
    return found


def _fresh_config(peft: Any, model: Any, rank: int, settings: Lora) -> Any:
    linear = {
        name: tuple(m.weight.shape)
        for name, m in model.named_modules()
        if type(m).__name__ in ("Linear", "Conv1D")
    }
    experts = expert_tensors(model)
    return peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if settings.alpha is None else settings.alpha,
        target_modules=settings.layers(linear, rank, experts),
        target_parameters=list(settings.target_parameters) or None,
        lora_dropout=0.0,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
    )


def _own_config(peft: Any, folder: Path) -> Any:
    """All that a folder says of its adapter, to go on with it: patterns, and how its factors began."""
    config = peft.LoraConfig.from_pretrained(str(folder))
    config.inference_mode, config.lora_dropout, config.task_type = False, 0.0, None
    return config


@contextmanager
def _of_another_base(folder: Path | None, what: str = "is of another base than its own") -> Iterator[None]:
    """What PEFT says of a folder that it cannot put over a model, in a sentence."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, re.error) as error:
        if folder is None:
            raise
        raise PanoplyError(f"The adapter in {plain(folder)} {what}: {first_line(error)}.") from error


def merged_by_peft(model: Decoder | Foreign, folder: Path) -> Decoder | Foreign:
    """A model with an adapter of a kind that PEFT alone knows, merged into it."""
    check_factors(folder)
    saved = read_weights([folder / WEIGHTS])  # safetensors, and finite
    inner: Any = model.inner if isinstance(model, Foreign) else model
    with _of_another_base(folder):
        opened = _peft().PeftModel.from_pretrained(inner, str(folder))
    known = _peft().get_peft_model_state_dict(opened, save_embedding_layers=False)
    # A table as it was, which PEFT writes beside its factors, is the base's own.
    own = {name: w for name, w in saved.items() if not name.endswith(".base_layer.weight")}
    check_fit({name: tuple(w.shape) for name, w in known.items()}, own, plain(folder), CONFIG)
    before = None if isinstance(model, Decoder) else _logits(opened)
    with _of_another_base(folder, "cannot be merged"):
        merged = opened.merge_and_unload()
    if before is None or isinstance(model, Decoder):
        tables = (name for name in saved if any(table in name for table in TABLES))
        alike = not merged.config.tied or all(name.endswith(OF_BOTH) for name in tables)
    else:
        model.inner = merged
        merged.tie_weights()
        tolerance = (1e-3 if model.dtype == torch.float32 else 5e-2) * (1 + before.abs().max())
        alike = bool(((_logits(merged) - before).abs() <= tolerance).all())
    if not alike:
        raise PanoplyError(
            f"The adapter in {plain(folder)} cannot be merged into its base: it changes one of two tables that are one "
            "there, or more than weights."
        )
    if isinstance(model, Decoder):
        model = _anew(cast(Decoder, merged))
    model.requires_grad_(True)
    return model


def _anew(model: Decoder) -> Decoder:
    """The same weights in a decoder of which PEFT has replaced no module: a block also knows its norms by itself."""
    with torch.device("meta"):
        found = Decoder(model.config)
    found.load_state_dict(model.state_dict(), assign=True)
    found.tie()
    return found.eval()


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    """What a model of transformers says of some tokens."""
    tokens = torch.arange(12, device=model.device)[None] * 7 % model.config.vocab_size
    found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits.float()
    return found


def _save_through_peft(model: Any, folder: Path, base: Path | None) -> None:
    """What PEFT would write of a decoder of this library is no use to others: they open the base with transformers,

    where the layers have the same names.
    """
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form that nobody has filled in
    config = json.loads((folder / CONFIG).read_text())
    config |= {"auto_mapping": None, "task_type": "CAUSAL_LM"}
    config["base_model_name_or_path"] = None if base is None else str(base.resolve())
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
