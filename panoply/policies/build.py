"""Opening the policy a run asks for: a world's warm start, new weights, a model folder or another run."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import torch

from panoply.errors import PanoplyError, plain
from panoply.policies.adapter_folder import model_under
from panoply.policies.architectures import ARCHITECTURES
from panoply.policies.control import ControlPolicy, is_control
from panoply.policies.decoder import Decoder
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.folder import read_config
from panoply.policies.text import TextPolicy
from panoply.policies.value import ValueModel
from panoply.policies.weights import read_shapes, weight_files
from panoply.seeds import stable_hash
from panoply.worlds.world import TextWorld

DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = re.fullmatch(r"cpu|cuda(:\d{1,4})?", name)
    if found is None:
        spelt = re.fullmatch(r"(?:gpu|cuda|nvidia)[ :-]?(\d{1,4})?", name.lower())
        near = f" Did you mean 'cuda{f':{spelt[1]}' if spelt[1] else ''}'?" if spelt else ""
        raise PanoplyError(f"Unknown device '{name}'.{near or ' There is: auto, cpu, cuda, cuda:1, ….'}")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        cards = torch.cuda.device_count()
        seen = f"it sees {cards} of them, cuda:0 to cuda:{cards - 1}" if cards else "it sees none"
        raise PanoplyError(
            f"There is no device '{name}' that torch {torch.__version__} can use: {seen}."
        ) from error
    return device


def open_folder(
    folder: Path, dtype: str = "float32", device: str = "auto"
) -> TextPolicy | ValueModel | ControlPolicy:
    """The policy, or the reward model, that a folder holds."""
    if is_control(folder):
        return ControlPolicy.load(folder)
    if is_judge(folder):
        return ValueModel.load(folder, DTYPE[dtype], pick_device(device))
    return TextPolicy.load(folder, DTYPE[dtype], pick_device(device))


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
    kind = layout_of(source, world)
    if not kind or kind in ARCHITECTURES:
        return ""
    return (
        f"'{kind}' runs through transformers: on a GPU it is sampled from in captured graphs where it allows, but "
        f"nothing is fused, so that it is several times slower than the layouts of {', '.join(ARCHITECTURES)}."
    )


def layout_of(source: str, world: TextWorld) -> str:
    """The `model_type` of a model in a folder, before it is opened; empty of new ones, and of what cannot be read."""
    try:
        folder = model_source(source, world)
        return "" if folder is None else plain(read_config(folder)["model_type"])
    except PanoplyError:  # said by whoever opens it
        return ""


def open_policy(
    source: str, world: TextWorld, seed: int, device: str = "auto", dtype: str = "float32"
) -> TextPolicy:
    folder = model_source(source, world)
    where, kind = pick_device(device), DTYPE[dtype]
    if folder is None:
        config = DecoderConfig(**world.default_model())
        policy = TextPolicy.fresh(config, world.tokenizer, stable_hash("weights", seed) % 2**31)
        policy.model.to(device=where, dtype=kind)
    elif is_judge(folder):
        raise PanoplyError(
            f"{source} is a reward model, which judges answers and writes none: earn what it says with --reward-model "
            f"{source}, or go on training it with panoply train reward-model --model {source}."
        )
    else:
        policy = TextPolicy.load(folder, kind, where)
    _check_vocabulary(policy, world, source)
    return policy


def _check_vocabulary(policy: TextPolicy, world: TextWorld, source: str) -> None:
    """A world made of tokens needs a model that means the same by them."""
    text = world.tokenizer.decode(list(world.task("train", 0).prompt))
    if policy.tokenizer.encode(text) != world.tokenizer.encode(text):
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


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    read_config(folder)
    return read_shapes(weight_files(model_under(folder)))
