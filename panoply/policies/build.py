"""Opening the policy a run asks for: a world's warm start, new weights, a model folder or another run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from panoply import devices
from panoply.errors import PanoplyError, plain
from panoply.files import is_file
from panoply.footprint import experts_of
from panoply.kernels.together import begin
from panoply.lora import Lora, Planned, factors, names
from panoply.policies.adapter_base import Under, check_base, read_base
from panoply.policies.adapter_config import WEIGHTS, going_on, is_adapter, model_under
from panoply.policies.adapter_folder import own_layers
from panoply.policies.architectures import ARCHITECTURES
from panoply.policies.config_reading import native, only_in_transformers
from panoply.policies.control import ControlPolicy, is_control
from panoply.policies.decoder import Decoder
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.folder import read_config, read_parts, whole_config
from panoply.policies.low_rank import adapters
from panoply.policies.text import TextPolicy
from panoply.policies.text_part import reads_more
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.value import HEAD, ValueModel, outputs_in, outputs_of
from panoply.policies.weights import read_shapes, weight_files
from panoply.policies.words import words_of
from panoply.seeds import stable_hash
from panoply.worlds.world import TextWorld

DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device that a name stands for, which must be here; a GPU's compiler begins to get ready for it."""
    devices.check(name)
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if name == "auto" else name)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # kernels and graphs are launched on the current one
        begin()
    return device


def open_folder(
    folder: Path, dtype: str = "float32", device: str = "auto", context: int = 0
) -> TextPolicy | ValueModel | ControlPolicy:
    """The policy, or the reward model, that a folder holds."""
    from panoply.which import context_of

    if is_control(folder):
        return ControlPolicy.load(folder)
    longest = context or context_of(folder)
    if is_judge(folder):
        return ValueModel.load(folder, DTYPE[dtype], pick_device(device), longest)
    return TextPolicy.load(folder, DTYPE[dtype], pick_device(device), longest)


def is_judge(folder: Path) -> bool:
    """Whether a folder holds a sequence classifier: a reward model."""
    kinds = read_config(folder).get("architectures") or [""]
    return str(kinds[0]).endswith("ForSequenceClassification")


def judges(source: str, world: TextWorld) -> bool:
    """Whether what is named as a model is a reward model."""
    folder = model_source(source, world)
    return folder is not None and is_judge(folder)


def warm_start(world: TextWorld) -> Path | None:
    """The folder of the model shipped for a world, if there is one."""
    folder = Path(str(resources.files("panoply") / "assets" / world.start))
    return folder if (folder / "config.json").is_file() else None


def model_source(source: str, world: TextWorld) -> Path | None:
    """The folder that `start`, a run, a checkpoint or a folder stands for; None for `fresh`."""
    from panoply.which import model_folder

    if source == "fresh":
        return None
    if source != "start":
        return model_folder(source)
    shipped = warm_start(world)
    if shipped is None:
        raise PanoplyError(
            f"The world {world.name} ships no warm start: name a folder with --model, or use --model fresh."
        )
    return shipped


def slower(source: str, world: TextWorld) -> str:
    """What to say of a model that this library does not run itself, before it is opened; nothing of others."""
    if runs_natively(source, world):
        return ""
    raw = _config(source, world)
    what, others = f"'{plain(raw['model_type'])}'", "layouts that run natively"
    if raw["model_type"] in ARCHITECTURES:
        what, others = f"{what} with {only_in_transformers(raw)}", "without"
    return (
        f"{what} runs through transformers: on a GPU it is sampled from in captured graphs, and attends by kernels of "
        "this library, where it allows, but nothing else is fused, so that it is about three times slower than "
        f"{others}."
    )


def taken_out(source: str, world: TextWorld) -> str:
    """What to say of a model that reads more than text; nothing of others."""
    try:
        folder = model_source(source, world)
        whole = {} if folder is None else whole_config(folder)
    except PanoplyError:  # said by whoever opens it
        return ""
    if not reads_more(whole):
        return ""
    return f"Of the {plain(whole['model_type'])} the language model alone is trained and saved: it reads no pictures."


def config_of(source: str, world: TextWorld, context: int = 0) -> DecoderConfig | None:
    """What a model that runs natively says of itself, before it is opened; None of others, and where there is none yet.

    What cannot be opened is refused here.
    """
    from panoply.which import context_of

    try:
        folder = model_source(source, world)
    except PanoplyError:  # said by whoever opens it
        return None
    if folder is None:
        if context:
            raise PanoplyError("policy.context has no effect on new weights: they have their world's.")
        return None
    under = model_under(folder)
    if not is_file(under / "config.json"):
        return None
    raw = read_config(under)
    if not native(raw, str(under / "config.json")):
        return None
    found = DecoderConfig.from_hf(raw, str(under / "config.json"), context or context_of(folder))
    found.frequencies()
    return found


SHARPER = (
    "attn_factor of its positions counts, as in vLLM; transformers passes it over where no attention_factor stands "
    "beside it, as it does in what is saved here."
)


def reads(source: str, world: TextWorld, context: int) -> str:
    """How long a sequence may be, where that can be chosen or is not what `max_position_embeddings` says."""
    config = config_of(source, world, context)
    if config is None:
        return ""
    sharper = SHARPER if "attn_factor" in config.rope_scaling else ""
    if not (context or config.max_positions != config.longest):
        return sharper
    length, most = config.max_positions, config.most_positions
    if config.rope_type == "yarn":
        return f"{length:,} tokens: YaRN stretches what the model was made for to {most:,}. {sharper}".strip()
    if config.rope_type != "longrope":
        return f"{length:,} of {most:,} tokens, as policy.context says."
    original = int(config.rope_scaling["original_max_position_embeddings"])
    if length > original:
        return (
            f"{length:,} tokens: more than the {original:,} that the model was made for, so that all sequences turn by "
            "longrope's long factors, short ones too."
        )
    return (
        f"{length:,} tokens: all sequences turn by longrope's short factors. Up to {most:,} can be asked for with "
        f"policy.context; beyond {original:,} all turn by its long ones."
    )


def layout_of(source: str, world: TextWorld) -> str:
    """The `model_type` of a model in a folder, before it is opened; empty of new ones, and of what cannot be read."""
    return plain(_config(source, world).get("model_type", ""))


def runs_natively(source: str, world: TextWorld) -> bool:
    """Whether this library runs a model itself, as it does new ones; of what cannot be read, nothing else is said."""
    try:
        raw = _config(source, world)
        return not raw or native(raw)
    except PanoplyError:  # said by whoever opens it
        return True


def _config(source: str, world: TextWorld) -> dict[str, Any]:
    """A model's config, before it is opened; empty of new ones, and of what cannot be read."""
    try:
        folder = model_source(source, world)
        return {} if folder is None else read_config(folder)
    except PanoplyError:  # said by whoever opens it
        return {}


def open_policy(
    source: str,
    world: TextWorld,
    seed: int,
    device: str = "auto",
    dtype: str = "float32",
    context: int = 0,
) -> TextPolicy:
    """What `source` names, for sequences of up to `context` tokens; 0: those it was trained or made for."""
    from panoply.which import context_of

    folder = model_source(source, world)
    where, kind = pick_device(device), DTYPE[dtype]
    if folder is None:
        config = DecoderConfig(**world.default_model())
        policy = TextPolicy.fresh(config, world.tokenizer, stable_hash("weights", seed) % 2**31)
        policy.model.to(device=where, dtype=kind)
    else:
        _check_writes(folder, source)
        policy = TextPolicy.load(folder, kind, where, context or context_of(folder))
    _check_words(policy.tokenizer, world, source)
    return policy


def check_folder(source: str, world: TextWorld) -> None:
    """Refuse, by its small files alone, a folder that cannot be opened for a world."""
    folder = model_source(source, world)
    if folder is None or source == "start":
        return
    _check_writes(folder, source)
    if is_file((words := words_of(folder)) / "tokenizer.json"):
        _check_words(Tokenizer.load(words), world, source)


def check_judge(source: str, folder: Path, data: Mapping[str, Any], needs: frozenset[str]) -> None:
    """Refuse a reward model that cannot go on learning from such `data`, or says another number of things."""
    if "start" in (data.get("answers"), data.get("whose")):
        raise PanoplyError(
            f"{source} is a reward model, which judges answers and writes none: the answers must be the teacher's."
        )
    rows = folder_shapes(folder).get(HEAD, (1,))[0]
    said, wanted = outputs_in(read_config(folder), rows, folder), outputs_of(needs)
    if said != wanted:
        raise PanoplyError(
            f"{source} is a reward model of {', '.join(said)}, and this method trains {', '.join(wanted)}."
        )


def is_masked(source: str, world: TextWorld) -> bool:
    """Whether a model, before it is opened, is a masked-diffusion one."""
    folder = model_source(source, world)
    if folder is None:
        return not DecoderConfig(**world.default_model()).causal
    return read_config(model_under(folder)).get("is_causal") is False


def _check_writes(folder: Path, source: str) -> None:
    if is_judge(folder):
        raise PanoplyError(
            f"{source} is a reward model, which judges answers and writes none: earn what it says with --reward-model "
            f"{source}, or go on training it with panoply train reward-model --model {source}."
        )


def _check_words(words: Tokenizer, world: TextWorld, source: str) -> None:
    """A world made of tokens needs a model that means the same by them."""
    text = world.tokenizer.decode(list(world.task("train", 0).prompt))
    if words.encode(text) != world.tokenizer.encode(text):
        raise PanoplyError(f"The model {source} does not speak the tokens of the world {world.name}.")


def model_shapes(source: str, world: TextWorld) -> dict[str, tuple[int, ...]]:
    """The shape of every weight by name, without loading any."""
    folder = model_source(source, world)
    if folder is not None:
        return folder_shapes(folder)
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**world.default_model()))
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def experts_at_once(source: str, world: TextWorld) -> int:
    """How many experts a token goes through, by the model's config; 0 where there are none."""
    folder = model_source(source, world)
    if folder is None:
        return 0
    config = read_config(model_under(folder))
    return int(config.get("num_experts_per_tok") or config.get("experts_per_token") or 0)


def adapted(
    source: str, world: TextWorld, rank: int, settings: Lora, chosen: Collection[str] | None = None
) -> Planned:
    """Which weights would get adapters; refuses what cannot be.

    chosen   names of the settings that were asked for; left out, those that are not as usual
    """
    folder, shapes = model_source(source, world), model_shapes(source, world)
    ours = runs_natively(source, world)
    going = folder is not None and is_adapter(folder)
    if folder is not None and going:
        check_base(folder, Under.of(model_under(folder)))
        settings = going_on(folder, rank, settings, chosen, ours)
    if settings.base != "whole" and not ours:
        raise PanoplyError(
            f"lora.base={settings.base} is for layouts that run natively, and '{layout_of(source, world)}' runs "
            f"through transformers: leave it out, or take one of {', '.join(ARCHITECTURES)}."
        )
    linear = {
        name.removesuffix(".weight"): shape for name, shape in shapes.items() if ".experts." not in name
    }
    experts = experts_of(shapes) if ours else {}
    if folder is not None and going:
        there = own_layers(folder)
        own_shapes = [shape for n, shape in (linear | experts).items() if any(names(n, own) for own in there)]
        called = tuple(sorted({name.rpartition(".")[2] for name in there}))
        saved = sum(map(math.prod, read_shapes([folder / WEIGHTS]).values()))
        return Planned(own_shapes, replace(settings, target_modules=called), saved, fresh=False)
    found = [linear[name] for name in settings.layers(linear, rank, experts)]
    found += [experts[name] for name in settings.tensors(experts, rank)]
    return Planned(found, settings, factors(found, rank, settings.dora), fresh=True)


def trained_in(source: str, world: TextWorld) -> str:
    """The precision of the base that a folder's adapter was trained over; nothing where nobody has written it down."""
    folder = model_source(source, world)
    known = read_base(folder) if folder is not None and is_adapter(folder) else None
    return "" if known is None else known["dtype"]


def learning(policy: Any) -> Any:
    """A policy all of whose weights can learn: what lies in few bits under an adapter is made whole, and merged."""
    return policy.apart() if any(True for _ in adapters(getattr(policy, "model", None))) else policy


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    _, named = read_parts(folder)
    return read_shapes(weight_files(model_under(folder)), named)
