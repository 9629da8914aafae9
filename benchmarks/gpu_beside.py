"""Tables of docs/performance.md that set a cell beside TRL's at the same work: the first shapes, LoRA, layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

Cells = dict[str, Any]
FULL = {"anchor": "", "prompt-1024": "", "1.5B": ""}
LORA = {
    "lora": "rank 16",
    "lora-7b": "rank 16",
    "qlora": "rank 16, `lora.base=nf4`",
    "qlora-7b": "rank 16, `lora.base=nf4`",
}
LAYOUTS = {
    "gemma2": "Gemma 2",
    "moe": "Qwen3-MoE: 64 experts, 8 at a time",
    "foreign": "Cohere, through transformers",
    "top-p": "Qwen2, `sample.top_p=0.95`",
}
"""A cell to what its row says beside shape and model. TRL's cells have its name, `-trl` and perhaps more."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def shape(c: Cells) -> str:
    return f"{c['prompts']} × {c['group']} × ({c['prompt']:,} + {c['completion']:,})"


def remark(c: Cells) -> str:
    """What a file says of how its cell was measured, as the end of what a row says."""
    return f"; {c['note'][0].lower()}{c['note'][1:].rstrip('.')}" if "note" in c else ""


def opponents(cells: Cells, name: str) -> list[Cells]:
    """TRL's cells of the same work, the fastest first."""
    found = (c for other, c in cells.items() if other.startswith(f"{name}-trl"))
    return sorted(found, key=lambda c: float(c.get("step", inf)))


def pairs(cells: Cells, named: Mapping[str, str], alone: bool = True) -> str:
    """A row a cell that there is, and below it TRL's; `alone` keeps those that have no opponent."""
    rows = []
    for name, said in named.items():
        others = opponents(cells, name)
        if name not in cells or not (others or alone):
            continue
        mine = cells[name]
        model = mine["model"].rpartition("-")[2]
        what = f"{shape(mine)}, {model}" + (f", {said}" if said else "")
        rows.append([what, "**Panoply**", *_phases(mine), ""])
        for c in others:
            apart = "" if _sitting(c) == _sitting(mine) else f"; in another sitting, {c['date']}"
            setting = f"TRL {c['trl']}, {c['setting']}, {c['micro_batch']} rows at a time{remark(c)}{apart}"
            slower = f"{c['step'] / mine['step']:.1f}×" if "step" in c else c["failed"]
            rows.append(["", setting, *_phases(c), slower])
    head = ["the same work", "", "sampling and scoring, s", "training, s", "step, s", "peak, GB", "slower by"]
    return table(head, rows) if rows else ""


def _sitting(c: Cells) -> object:
    """When, and since which start of which machine."""
    return c.get("date"), c.get("sitting")


def _phases(c: Cells) -> list[str]:
    return [
        f"{c[name]:{form}}" if name in c else "–"
        for name, form in (("sample", ".2f"), ("learn", ".2f"), ("step", ".2f"), ("peak_gb", ".0f"))
    ]


def lora(cells: Cells) -> str:
    found = pairs(cells, LORA)
    if not found:
        return ""
    text = f"""### LoRA

Adapters on all linear layers, α twice the rank; TRL's are PEFT's.

{found}"""
    if (c := cells.get("lora-command")) is not None:
        text += (
            f"\nThrough `panoply train … --lora 16`, with a folder, a file and a reward, the first row's step takes "
            f"{c['step']:.2f} s; PEFT opens the adapter\nthat the run leaves, and its logits differ from Panoply's by "
            f"{c['peft_off']:.0e} where adapters have moved them by {c['learned']:.2f}.\n"
        )
    return text


def layouts(cells: Cells) -> str:
    found = pairs(cells, LAYOUTS)
    if not found:
        return ""
    text = f"""### Layouts

The first shape with other models of the same size, and with answers cut by top-p.

{found}"""
    if "top-p" in cells and "anchor" in cells:
        ratio = cells["top-p"]["step"] / cells["anchor"]["step"]
        apart = (
            "" if _sitting(cells["top-p"]) == _sitting(cells["anchor"]) else ", measured in another sitting"
        )
        text += f"\nCutting by top-p takes {ratio:.2f} times as long as the plain step{apart}.\n"
    return text


def not_faster(cells: Cells) -> str:
    """Where TRL takes less time or less memory, and where that is not known, by the same files."""
    time, training, memory, unmatched, served = [], [], [], [], []
    for name, said in {**FULL, **LORA, **LAYOUTS}.items():
        if name not in cells:
            continue
        mine, others = cells[name], opponents(cells, name)
        work = f"{shape(mine)} at {mine['model']}" + (f" ({said})" if said else "")
        if not any("step" in c for c in others):
            failed = ", ".join(f"{c['failed']} with {c['micro_batch']} rows at a time" for c in others)
            unmatched.append(work + (f": TRL ran {failed}, and fewer were not tried" if failed else ""))
            continue
        if any("vLLM" in c["setting"] for c in others):
            served.append(work)
        if (least := min(c.get("learn", inf) for c in others)) < mine["learn"]:
            training.append(f"{work}, {least:.2f} s against {mine['learn']:.2f}")
        if others[0].get("step", inf) <= mine["step"]:
            time.append(f"{work}, {others[0]['step']:.2f} s against {mine['step']:.2f}")
        small = min((c for c in others if "peak_gb" in c), key=lambda c: float(c["peak_gb"]), default=mine)
        if small["peak_gb"] < mine["peak_gb"]:
            memory.append(
                f"{work}: {small['peak_gb']:.0f} GB ({small['setting']}) against {mine['peak_gb']:.0f}"
            )
    if not any("trl" in c for c in cells.values()):
        return ""
    lines = ["### Where Panoply is not ahead\n"]
    lines.append(f"TRL is faster at {'; at '.join(time)}.\n" if time else "TRL is faster in no cell above.\n")
    if training:
        lines.append(f"Its training alone, without sampling, is faster at {'; at '.join(training)}.\n")
    where = f"beside {'; '.join(served)} alone" if served else "nowhere"
    lines.append(f"TRL with vLLM to generate for it was measured {where}.\n")
    if memory:
        lines.append(f"TRL can be run in less memory: {'; '.join(memory)}.\n")
    if unmatched:
        lines.append(f"Nothing was measured beside {'; '.join(unmatched)}.\n")
    foreign = "" if "foreign" in cells else "; nothing of that was measured"
    lines.append(
        "float32 on a GPU is for comparing, not for speed. Models that run through transformers are sampled from in "
        "captured graphs of their own forward pass, and attend by kernels of this library where they allow "
        f"it{foreign}.\n"
    )
    return "\n".join(lines)
