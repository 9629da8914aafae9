"""Hugging Face model folders: `config.json` and safetensors, whole or in shards. Never a pickle."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

import torch
from safetensors.torch import save_file
from torch import Tensor

from panoply.errors import PanoplyError, plain
from panoply.files import is_file, is_folder, read_json
from panoply.policies.adapter_base import Under, check_base
from panoply.policies.adapter_config import CONFIG as ADAPTER
from panoply.policies.adapter_config import is_adapter, model_under, more_than_factors, settings_of
from panoply.policies.adapter_folder import add_beside, add_merged, read_adapter
from panoply.policies.config_reading import native, only_in_transformers
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.expert_files import from_disk, to_disk
from panoply.policies.low_rank import plain_weights
from panoply.policies.steering import SETTINGS as VALUES
from panoply.policies.steering import Steered, write_values
from panoply.policies.text_part import language_config, language_name, reads_more
from panoply.policies.thoughts import SETTINGS as THOUGHTS
from panoply.policies.thoughts import write_thoughts
from panoply.policies.weights import INDEX, WHOLE, Naming, check_fit, read_shapes, read_weights, weight_files

if TYPE_CHECKING:
    from panoply.policies.foreign import Foreign

SHARD_BYTES = 5_000_000_000
GENERATION = "generation_config.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    context: int = 0,
) -> Decoder | Foreign:
    """The model in a folder: this library's decoder where it knows the layout, else through transformers.

    An adapter is merged into the model that it is of. `context` is the longest sequence that is asked for; 0: what the
    model was made for.
    """
    folder = Path(folder)
    if is_adapter(folder):
        return _merged(folder, dtype, device, context)
    raw, named = read_parts(folder)
    files = weight_files(folder)
    if not native(raw, str(folder / "config.json")):
        if named is language_name:
            raise PanoplyError(
                f"The language model in {plain(folder)} does not run natively ({only_in_transformers(raw)}): such a "
                "one is not taken out of a model that reads more than text."
            )
        from panoply.policies.foreign_folder import load_foreign

        return load_foreign(folder, dtype, device, context)
    if named is language_name:  # the whole and its text_config may say different things of it
        raw["tie_word_embeddings"] = HEAD not in read_shapes(files, named)
    config = DecoderConfig.from_hf(raw, str(folder / "config.json"), context)
    weights = read_weights(files, dtype, device, named)
    if config.tied:
        _drop_copy(weights, folder)
    return decoder_of(config, weights, folder)


def decoder_of(config: DecoderConfig, weights: dict[str, Tensor], folder: Path) -> Decoder:
    """A decoder of what a folder says and holds; where embeddings are tied, no weights of a head are looked for."""
    with torch.device("meta"):
        model = Decoder(config)
    model.load_state_dict(_fitting(model, weights, folder), assign=True, strict=False)
    model.tie()
    return model.eval()


def _merged(folder: Path, dtype: torch.dtype, device: torch.device | str, context: int) -> Decoder | Foreign:
    """An adapter over the base that it was trained over.

    One in few bits stays so, with the adapter beside it: as it was trained, in as little memory, and nothing of it can
    learn. In float32 on a CPU, where such products are slow and nothing is lost by rounding, it is merged like others.
    """
    under, (_, settings) = model_under(folder), settings_of(folder)
    check_base(folder, Under.of(under))
    there, exact = torch.device(device), torch.device(device).type == "cpu" and dtype == torch.float32
    few = None if settings.base == "whole" or exact else settings.base
    model = load_model(under, dtype, device if few is None else "cpu", context)
    plainly = not settings.dora and (few is not None or not more_than_factors(folder))
    if isinstance(model, Decoder) and plainly:
        if few is None:
            add_merged(model, read_adapter(folder))
        else:
            add_beside(model, read_adapter(folder), few, there)
        return model
    if settings.base != "whole":
        raise PanoplyError(
            f"The adapter in {plain(folder)} cannot be over a base in {settings.base}, which is for layouts that run "
            "natively, without DoRA."
        )
    from panoply.policies.lora import merged_by_peft

    return merged_by_peft(model, folder)


class Writes(Protocol):
    """What knows by itself how to write its config and weights: a model of transformers, a reward model."""

    def write(self, folder: Path, shard_bytes: int) -> None: ...


def save_model(
    model: Decoder | Steered | Writes,
    folder: str | Path,
    shard_bytes: int = SHARD_BYTES,
    files_beside: Mapping[str, bytes] | None = None,
    roles: Mapping[str, int] | None = None,
) -> None:
    """Write a folder that transformers opens, all of it or nothing.

    `files_beside` lie beside the weights; `roles` are ids such as `eos_token_id`, written where the model's
    own files name none, so that `generate` knows where a text ends. An older model there is replaced; other files stay.
    Adapters of PEFT are merged into a copy, so that the folder stands alone.
    """
    folder = Path(folder)
    if hasattr(model, "peft_config"):
        adapted: Any = copy.deepcopy(model)
        model = adapted.merge_and_unload()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise PanoplyError(f"{folder} holds other files and no model; give a new or empty folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        staging.chmod(0o755)
        _keep_others(folder, staging)
        if isinstance(model, Decoder):
            _write_decoder(model, staging, shard_bytes)
            write_thoughts(model.thoughts, staging)
        elif isinstance(model, Steered):
            _write_decoder(model.base, staging, shard_bytes)
            write_values(model.values, staging)
        else:
            model.write(staging, shard_bytes)
        for name, content in (files_beside or {}).items():
            (staging / name).write_bytes(content)
        _name_roles(staging, roles or {})
        _swap(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class Config(TypedDict):
    """What every `config.json` says, whatever the architecture."""

    model_type: str
    architectures: NotRequired[list[str] | None]


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder, or of the model that a folder's adapter is of.

    Of a model that reads pictures, too, that of its language model.
    """
    return read_parts(folder)[0]


def read_parts(folder: Path) -> tuple[dict[str, Any], Naming]:
    """The same, and what its weights are called that are on disk."""
    raw, folder = whole_config(folder), model_under(folder)
    if reads_more(raw):
        return language_config(raw, folder), language_name
    return raw, str


def whole_config(folder: Path) -> dict[str, Any]:
    """The same as it stands there, whatever the model reads."""
    folder = model_under(folder)
    if not is_folder(folder):
        raise PanoplyError(f"There is no folder {plain(folder)}.")
    if not is_file(folder / "config.json"):
        raise PanoplyError(f"{plain(folder)} is not a model folder: it has no config.json.")
    if is_file(folder / ADAPTER):
        raise PanoplyError(
            f"{plain(folder)} holds an adapter beside a model: merge it, or take its files away."
        )
    return dict(read_json(folder / "config.json", Config, finite=False))


def generation_config(folder: str | Path) -> dict[str, bytes]:
    """The folder's `generation_config.json`, verbatim, to be saved beside the model again."""
    path = model_under(Path(folder)) / GENERATION
    return {GENERATION: path.read_bytes()} if path.is_file() else {}


def _fitting(model: Decoder, weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Weights by their names in memory; those of another model are refused, copies of what is computed dropped."""
    sparse, mixing = model.config.layout.sparse, model.config.mixing
    if sparse and sparse.each and any(name.endswith("mlp.experts.gate_up_proj") for name in weights):
        weights = to_disk(weights, sparse)  # named as transformers names them in memory
    expected = {name: tuple(w.shape) for name, w in to_disk(model.state_dict(), sparse).items()}
    if model.config.tied:
        expected.pop(HEAD)
        weights.pop(HEAD, None)
    for name in [n for n in weights if n.endswith("rotary_emb.inv_freq")]:
        del weights[name]
    check_fit(expected, weights, plain(folder))
    return from_disk(weights, sparse, mixing.experts if mixing else 0)


def _drop_copy(weights: dict[str, Tensor], folder: Path) -> None:
    """Of a tied head and embedding keep the embedding, whichever of the two was saved."""
    head, embedding = weights.pop(HEAD, None), weights.get(EMBEDDING)
    if head is not None and embedding is None:
        weights[EMBEDDING] = head
    elif head is not None and embedding is not None and not torch.equal(head, embedding):
        raise PanoplyError(
            f"The weights in {plain(folder)} hold a head that differs from the embedding, and config.json says that "
            f"they are one (tie_word_embeddings): set it to false there, or take {HEAD} out of the weights."
        )


def _write_decoder(model: Decoder, folder: Path, shard_bytes: int) -> None:
    write_config(model, folder)
    write_weights(weights_of(model, model.config.tied), folder, shard_bytes)


def write_config(model: Decoder | Foreign, folder: Path) -> None:
    """`config.json` alone: what others need to know of a model before they have its weights."""
    raw = model.config.to_hf() if isinstance(model, Decoder) else dict(model.bare.config.to_dict())
    raw["dtype"] = raw["torch_dtype"] = DTYPE_NAMES.get(model.dtype, "float32")
    (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")


def weights_of(model: Decoder, headless: bool) -> dict[str, Tensor]:
    """A decoder's weights under their names on disk, adapters merged, with its head or without."""
    return {n: w.cpu().contiguous() for n, w in _on_disk(model, headless).items()}


def _on_disk(model: Decoder, headless: bool) -> dict[str, Tensor]:
    own = {n: w for n, w in plain_weights(model).items() if not n.startswith("thoughts.")}
    named = to_disk(own, model.config.layout.sparse)
    return {n: w.detach() for n, w in named.items() if n != HEAD or not headless}


def whole_weights(model: Decoder | Foreign) -> dict[str, Tensor]:
    """What a folder of the model would hold, where it lies: for others who know the layout, and not ours.

    How transformers names weights on disk only transformers knows, so its models are written, and read again.
    """
    if isinstance(model, Decoder):
        return _on_disk(model, model.config.tied)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        model.write(Path(folder), SHARD_BYTES)
        return read_weights(weight_files(Path(folder)), model.dtype, "cpu")


def write_weights(weights: Mapping[str, Tensor], folder: Path, shard_bytes: int) -> None:
    """Weights as one file of safetensors, or as shards and their index."""
    shards = _shards(weights, shard_bytes)
    if len(shards) == 1:
        save_file(dict(weights), folder / WHOLE, metadata={"format": "pt"})
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: weights[n] for n in names}, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _name_roles(folder: Path, roles: Mapping[str, int]) -> None:
    """What the model's own files say stands. `generate` ends at the ids of the generation config."""
    if not roles:
        return
    config, generation = folder / "config.json", folder / GENERATION
    known = json.loads(config.read_text())
    known |= {role: ident for role, ident in roles.items() if known.get(role) is None}
    config.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    given = json.loads(generation.read_text()) if generation.is_file() else {}
    missing = {role: known[role] for role in roles if given.get(role) is None}
    if missing:
        generation.write_text(json.dumps({**given, **missing}, indent=2, sort_keys=True) + "\n")


def _shards(weights: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, weight in weights.items():
        if shards[-1] and size + weight.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += weight.nbytes
    return shards


def _keep_others(folder: Path, staging: Path) -> None:
    """Carry over what is not a model's weights, so that replacing a model loses nothing else."""
    if not folder.is_dir():
        return
    for item in folder.iterdir():
        if item.suffix == ".safetensors" or item.name in (INDEX, THOUGHTS, VALUES):
            continue
        if item.is_dir():
            shutil.copytree(item, staging / item.name, symlinks=True)
        else:
            shutil.copy2(item, staging / item.name, follow_symlinks=False)


def _swap(staging: Path, folder: Path) -> None:
    """Between the two renames the old model lies beside the new one: at no moment is there neither."""
    if not folder.exists():
        staging.rename(folder)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.rename(retired / folder.name)
    try:
        staging.rename(folder)
    except OSError:
        (retired / folder.name).rename(folder)
        raise
    finally:
        shutil.rmtree(retired, ignore_errors=True)
