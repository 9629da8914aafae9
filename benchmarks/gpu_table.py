"""docs/performance.md's GPU part, written from results/bench-gpu alone."""
# ruff: noqa: E501 (sentences of the page)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS, PAGE = Path("results/bench-gpu"), Path("docs/performance.md")
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"


def write() -> None:
    """Replace what stands between the two marks, or begin the page."""
    cells = {p.stem: json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json"))}
    body = f"{BEGIN}\n{render(cells)}\n{END}"
    text = PAGE.read_text() if PAGE.exists() else f"# Performance\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text:
        text += f"\n{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN, 1)
    PAGE.write_text(head + body + rest.split(END, 1)[1])


def render(cells: dict[str, Any]) -> str:
    parts = ["## One GPU\n", _about(cells), _steps(cells), _against(cells), _demands(cells)]
    return "\n".join(part for part in [*parts, _agreement(cells), _learning(cells)] if part)


def _about(cells: dict[str, Any]) -> str:
    known = cells.get("anchor") or next(iter(cells.values()))
    dates = sorted({c["date"] for c in cells.values()})
    return (
        f"{known['machine']}, torch {known['torch']}, {', '.join(dates)}. Qwen2.5 layouts with random weights, ends switched "
        "off, so that every step has the same tokens; GRPO without a KL term; float32 master weights beside the bf16 or "
        "fp16 ones that sampler and learner share. Medians after two warm-up steps; seconds. The floor is what bytes "
        "(sampling, 4.3 TB/s) and operations (learning, 790 TFLOP/s) take at the ceilings measured on such a machine. "
        "`make bench-gpu` repeats it, cell by cell.\n"
    )


def _steps(cells: dict[str, Any]) -> str:
    rows = [
        "| shape (prompts × group × (prompt + completion)) | model | dtype | sampling | learning | step | tokens/s | peak GB | "
        "share of the floor | ms a token |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, c in cells.items():
        if "share_of_floor" not in c:
            continue
        share = c["share_of_floor"]
        shape = f"{c['prompts']} × {c['group']} × ({c['prompt']} + {c['completion']})"
        mark = " (beside TRL)" if name == "anchor-beside-trl" else ""
        rows.append(
            f"| {shape}{mark} | {c['model']} | {c['dtype']} | {c['sample']:.2f} | {c['learn']:.2f} | {c['step']:.2f} | "
            f"{c['tokens_per_s']:,.0f} | {c['peak_gb']:.1f} | {share['sample']:.0%} / {share['learn']:.0%} | "
            f"{c['ms_per_token']:.2f} |"
        )
    return "\n".join(rows) + "\n"


def _against(cells: dict[str, Any]) -> str:
    beside = cells.get("anchor-beside-trl") or cells.get("anchor")
    theirs = [c for name, c in cells.items() if name.startswith("anchor-trl")]
    if beside is None or not theirs:
        return ""
    rows = [
        "The same work in TRL, on the same machine (16 × 8 × (128 + 512), 0.5B):\n",
        "| | generation with scoring | training | step | peak GB | Panoply is faster by |",
        "|---|---|---|---|---|---|",
    ]
    for c in theirs:
        phases = f"{c['sample']:.2f} | {c['learn']:.2f}" if "sample" in c else "– | –"
        peak = f"{c['peak_gb']:.1f}" if "peak_gb" in c else "–"
        note = f" ({c['note'].rstrip('.').lower()})" if "note" in c else ""
        rows.append(
            f"| TRL {c['trl']}, {c['setting']}, micro-batch {c['micro_batch']}{note} | {phases} | {c['step']:.2f} | {peak} | "
            f"{c['step'] / beside['step']:.1f}× |"
        )
    rows.append(
        f"| Panoply | {beside['sample']:.2f} | {beside['learn']:.2f} | {beside['step']:.2f} | {beside['peak_gb']:.1f} | |"
    )
    rows.append(
        "\n*default*: float32 weights under bf16 autocast, gradient checkpointing, 8 rows at a time. *best*: bf16 weights, "
        "no checkpointing, fused AdamW on the bf16 weights themselves (no float32 masters, which Panoply has), as many rows as pay. TRL's step time varied by ±6 % between steps.\n"
    )
    return "\n".join(rows)


def _demands(cells: dict[str, Any]) -> str:
    rows = ["| demand, anchor shape | measured | |", "|---|---|---|"]

    def add(what: str, value: float, limit: float, unit: str, least: bool = False) -> None:
        met = value >= limit if least else value <= limit
        word = "at least" if least else "at most"
        rows.append(
            f"| {what} {word} {limit:g}{unit} | {value:.3g}{unit} | {'met' if met else '**not met**'} |"
        )

    if anchor := cells.get("anchor"):
        add("step", anchor["step"], 1.6, " s")
        add("generation", anchor["sample"], 0.95, " s")
        add("training", anchor["learn"], 0.65, " s")
        add("peak memory", anchor["peak_gb"], 30, " GB")
        add("mean distance of log-probabilities, sampler and scorer, bf16", anchor["gap"], 1.2e-2, "")
        add("ratios outside 1 ± 0.2 at step 0", anchor["off"], 1e-3, "")
    if half := cells.get("anchor-float16"):
        add("the same, fp16", half["gap"], 1.5e-3, "")
    if whole := cells.get("anchor-float32"):
        add("the same, fp32", whole["gap"], 1e-5, "")
    beside = cells.get("anchor-beside-trl") or cells.get("anchor")
    for name in ("anchor-trl-default", "anchor-trl-best"):
        if beside and name in cells:
            setting = cells[name]["setting"]
            add(
                f"TRL, {setting}, in the same run slower by",
                cells[name]["step"] / beside["step"],
                9,
                "×",
                least=True,
            )
    if "short" in cells and "far" in cells:
        ratio = cells["far"]["ms_per_token"] / cells["short"]["ms_per_token"]
        add("time a token, completion 2,048 against 128", ratio, 2, "×")
    if "group-8" in cells and "prompt-1024" in cells:
        ratio = cells["prompt-1024"]["learn"] / cells["group-8"]["learn"]
        add("training, group 16 against 8, prompt 1,024", ratio, 1.7, "×")
    if anchor:
        rows.append(
            f"\nKernels and graphs: {anchor['setup_s']:.1f} s once in a process, in a first step of "
            f"{anchor['first_step_s']:.1f} s on a fresh machine.\n"
        )
    return "\n".join(rows)


def _agreement(cells: dict[str, Any]) -> str:
    if (e := cells.get("equality")) is None:
        return ""
    return (
        f"Before any clock: graphs draw {e['graphs_draw_eager_tokens']:.0%} of the tokens that eager decoding draws (fp32); "
        f"logits differ from transformers' by {e['transformers_logits']:.1e} of the largest; packed bf16 and fp16 gradients "
        f"from the padded fp32 one by {e['gradient_bfloat16']:.1%} and {e['gradient_float16']:.1%} in norm, weights rounded "
        "too.\n"
    )


def _learning(cells: dict[str, Any]) -> str:
    if (c := cells.get("learn")) is None:
        return ""
    rows = [
        f"A real run: {c['parameters'] / 1e6:.0f}M parameters in {c['dtype']} on chain, levels mixed, "
        f"{c['imitation_s']:.0f} s of imitation to {c['imitated']['sampled']:.2f} held out, then GRPO. {c.get('note', '')}\n",
        "| GRPO step | seconds | success in training | held out |",
        "|---|---|---|---|",
    ]
    for point in c["curve"]:
        held = f"{point['held_out_sampled']:.3f}" if "held_out_sampled" in point else ""
        rows.append(f"| {point['step']} | {point['seconds']:.0f} | {point['success']:.3f} | {held} |")
    return "\n".join(rows) + "\n"
