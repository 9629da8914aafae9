"""`panoply export`: a model as a Hugging Face folder."""

from __future__ import annotations

import argparse

from panoply.commands.parser import Commands, add_which, command

EXAMPLES = """\
  panoply export runs/RUN my-model               a folder that transformers opens
  panoply export runs/RUN my-model --which last  of the last checkpoint, not the best
  panoply export runs/RUN my-lora --adapter      of a LoRA run the adapter alone, which PEFT opens"""


def add(commands: Commands) -> None:
    about = "write a run's model as a Hugging Face folder"
    parser = command(commands, "export", about, _export, EXAMPLES)
    parser.add_argument("source", metavar="RUN")
    parser.add_argument("folder", metavar="DIR")
    add_which(parser)
    parser.add_argument(
        "--adapter", action="store_true", help="of a LoRA run, the adapter and not the whole model"
    )


def _export(chosen: argparse.Namespace) -> int:
    from panoply import api
    from panoply.policies.adapter_config import base_is_missing, settings_of
    from panoply.policies.build import is_judge
    from panoply.policies.control import is_control
    from panoply.which import take

    folder = api.export(chosen.source, chosen.folder, which=chosen.which, adapter=chosen.adapter)
    if chosen.adapter:
        next_ = "Open it with peft.AutoPeftModelForCausalLM."
        of_step = "" if chosen.which is None else f" --which {chosen.which}"
        if base := base_is_missing(folder):
            next_ = f"Its base is not in {base} any more: name the folder where it is in {folder}/adapter_config.json."
        if (few := settings_of(folder)[1].base) != "whole":
            next_ += (
                f" It was trained over its base in {few}, and Panoply puts it over that again; PEFT puts it over the "
                "base as you load it, which is another model. For the same one elsewhere, export it merged: panoply "
                f"export {chosen.source} DIR{of_step}"
            )
    elif is_control(folder):
        next_ = f"Go on from it with --model {folder}."
    elif is_judge(folder):
        next_ = f"Open it with transformers, or train on it: panoply train grpo --reward-model {folder}"
    else:
        next_ = f"Open it with transformers, or: panoply sample {folder} PROMPT"
    print(f"Wrote {folder}: {take(chosen.source, chosen.which)}. {next_}")
    return 0
