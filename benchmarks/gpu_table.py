"""docs/performance.md, written from results/bench-gpu, bench-text and bench-control alone: `python -m benchmarks.gpu table`."""
# ruff: noqa: E501 (sentences of the page)

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.control_table import section
from benchmarks.gpu import Shape
from benchmarks.gpu_beside import (
    FULL,
    LAYOUTS,
    LORA,
    Cells,
    layouts,
    lora,
    not_faster,
    opponents,
    pairs,
    shape,
    table,
)
from benchmarks.gpu_curve import draw
from benchmarks.gpu_memory import H200, STEP, Way, foreseen
from benchmarks.gpu_spread import spread
from panoply.files import read_json
from panoply.footprint import GB, SIZES

RESULTS, TEXT, PAGE = Path("results/bench-gpu"), Path("results/bench-text"), Path("docs/performance.md")
CONTROL = Path("results/bench-control")
CURVE, CPU = "gpu-learning.svg", "## A CPU"
ORDER = (
    "anchor", "anchor-float16", "anchor-float32", "short", "far", "group-8", "prompt-1024",
    "prompt-1024-completion-1024", "1.5B",
)  # fmt: skip


def write() -> None:
    gpu, text = (_read(folder) for folder in (RESULTS, TEXT))
    if "learn" in gpu:
        (PAGE.parent / CURVE).write_text(draw(gpu["learn"], gpu.get("learn-trl")))
    sections = [
        _head(),
        _gpu(gpu) if gpu else "",
        _learning(gpu),
        _cpu(text) if text else "",
        section(CONTROL),
    ]
    PAGE.write_text("\n".join(part for part in sections if part))


def _read(folder: Path) -> Cells:
    return {path.stem: read_json(path, dict) for path in sorted(folder.glob("*.json"))}


def _head() -> str:
    return """# Performance

How long one step of GRPO takes, where the time goes, and what the same step costs in TRL. A step is everything between two
sets of weights: sampling, rewards, credit, and learning. Every number here comes from a file under `results/`, which the
commands below write, or a person where a row says so; the page itself is written from those files.

```
make bench-gpu        # one GPU: all cells that have no result yet, then this page
make bench-text       # a CPU: minutes, and nothing else should run
make bench-control    # the same, for control: cells that have no result yet, then this page
```
"""


# ------------------------------------------------------------------ one GPU


def _gpu(cells: Cells) -> str:
    machines, versions, dates = (_all(cells.values(), name) for name in ("machine", "torch", "date"))
    parts = [
        f"""## One GPU

One {machines or "GPU"}, torch {versions}, {dates}. The models have the layouts of Qwen2.5 0.5B and 1.5B (vocabulary
151,936) and random weights, and ends are switched off, so that every step has the same number of tokens. GRPO without a KL
term; sampler and learner share the weights, beside which float32 masters are kept. Medians of three steps or more after two
for warming up, of each phase and of the whole on its own.
""",
        _steps(cells),
        _reading(cells),
        _against(cells),
        lora(cells),
        layouts(cells),
        _memory(cells),
        spread(cells),
        not_faster(cells),
        _agreement(cells),
        """### Getting it

```
panoply train grpo --model DIR --data prompts.jsonl --reward rewards.py:good --dtype bfloat16
```

On a machine with a GPU that is all: the device is found, graphs are captured in the first step, micro-batches get a size that
fits. Fast are models of the layouts that run natively (`panoply plan` says so), in bfloat16 or float16, with heads of at most
256 dimensions: Llama, Mistral, Qwen2 and 3, Gemma 1 to 3, Phi-3, OLMo-2 and 3, SmolLM3, Granite, GLM, Qwen3-MoE, Mixtral, OLMoE and gpt-oss.
Adapters are merged into the weights, and sampled from like plain ones; top-k, top-p, min-p, penalties, masks and stop strings
draw in the graph, a mask with a look of the host at every token. DoRA and other architectures have their own
forward pass captured where it allows, with this library's attention where they ask for one by name, and are decoded token by token
where not, which is said once; float32 is for comparing, not for speed. A first step that is long, and `seconds_setup` in the metrics,
are kernels being compiled and captured.

Everything here was measured on an H200. Kernels are made for GPUs of compute capability 8.0 and later (A100, RTX 30, L4 and what came
after them), and fit into the 99 KB of shared memory that cards for desktops have; on older ones torch does what they would, more slowly.

### Repeating it

A cell is a command of its own, so that the table can be filled over several sittings; one that has a result is skipped.

```
python -m benchmarks.gpu list                 # the cells
python -m benchmarks.gpu anchor short         # some of them
python -m benchmarks.gpu --again anchor       # once more
python -m benchmarks.gpu --trl lora           # and TRL's at the same work, in the same sitting
python -m benchmarks.vllm_cell all            # vLLM as the engine, where it is installed
python -m benchmarks.fsdp_cell all            # learners of a group
python -m benchmarks.gpu table                # this page
```

The cells of TRL need `trl` and `datasets`. Without CUDA the benchmark says so and stops.
""",
    ]
    return "\n".join(part for part in parts if part)


def _all(cells: Iterable[Cells], name: str) -> str:
    """Whatever cells say of something, in order."""
    return ", ".join(sorted({c[name] for c in cells if name in c}))


def _steps(cells: Cells) -> str:
    rows = []
    for name in ORDER:
        if (c := cells.get(name)) is None:
            continue
        floor = Shape.of(c).floor()
        rows.append([
            shape(c) + (" [^1]" if "note" in c else ""), c["model"], c["dtype"], f"{c['sample']:.2f}", f"{c['learn']:.2f}",
            f"**{c['step']:.2f}**", f"{c['tokens_per_s']:,.0f}", f"{c['ms_per_token']:.2f}", f"{c['peak_gb']:.0f}",
            f"{floor['sample'] / c['sample']:.0%} / {floor['learn'] / c['learn']:.0%}",
        ])  # fmt: skip
    head = [
        "prompts × group × (prompt + completion)", "model", "weights", "sampling, s", "learning, s", "step, s",
        "tokens sampled / s of step", "ms a position", "peak, GB", "share of the floor",
    ]  # fmt: skip
    notes = [f"[^1]: {c['note']}\n" for name in ORDER if (c := cells.get(name)) and "note" in c]
    return table(head, rows) + "\n" + "".join(notes)


def _reading(cells: Cells) -> str:
    lines = [
        "How to read it: *ms a position* is sampling time divided by the completion's length, all rows advancing together. The *floor* is "
        "what the fewest bytes (sampling, at 4.3 TB/s) and operations (learning, at 790 TFLOP/s) of half precision would take, both rates "
        "measured on such a machine; the two shares are sampling's and learning's. A prompt is read once for its group, in sampling and in learning."
    ]
    made = {name: c for name in ORDER if (c := cells.get(name))}
    if few := [
        f"{len(c['steps'])} of {shape(c)} in {c['dtype']}" for c in made.values() if len(c["steps"]) < 5
    ]:
        lines.append(f"Fewer steps were made, those for warming up included: {'; '.join(few)}.")
    if (anchor := cells.get("anchor")) is not None:
        cold = cells.get("anchor-cold")
        without = "" if cold is None else f", and {cold['first_step_s']:.1f} s without"
        lines.append(
            f"Kernels and graphs are made once in a process: the first step took {anchor['first_step_s']:.1f} s with the compiler's cache of an "
            f"earlier process{without}. Single steps of the first row took {min(s['step'] for s in anchor['steps'][1:]):.2f} to "
            f"{max(s['step'] for s in anchor['steps'][1:]):.2f} s."
        )
    if (large := cells.get("anchor-large-passes")) is not None:
        lines.append(
            f"With passes of {large['micro_tokens']:,} tokens (`run.micro_tokens`) the first row's learning takes {large['learn']:.2f} s and its step "
            f"{large['step']:.2f} s, at {large['peak_gb']:.0f} GB: a processor that hands out work slowly then keeps the GPU busy, too. It hands out "
            f"about a thousand kernels a pass, and the GPU waits where it is late{_also(cells)}."
        )
    newest = cells.get("anchor", {}).get("date", "")
    measured = {name: c for name in (*ORDER, *LORA, *LAYOUTS) if (c := cells.get(name))}
    if older := {name: c for name, c in measured.items() if c["date"] < newest}:
        named = "; ".join(f"{shape(c)} {_told(name, c)} ({c['date']})" for name, c in older.items())
        lines.append(f"Measured before the kernels of {newest}, and not since: {named}.")
    if "short" in cells and "far" in cells and cells["short"]["date"] == cells["far"]["date"]:
        ratio = cells["far"]["ms_per_token"] / cells["short"]["ms_per_token"]
        lines.append(f"Long completions: a position costs {ratio:.2f} times as much at 2,048 as at 128.")
    if (
        "group-8" in cells
        and "prompt-1024" in cells
        and cells["group-8"]["date"] == cells["prompt-1024"]["date"]
    ):
        ratio = cells["prompt-1024"]["learn"] / cells["group-8"]["learn"]
        lines.append(f"Long prompts are shared: twice the group takes {ratio:.2f} times the learning time.")
    return "\n\n".join(lines) + "\n"


def _also(cells: Cells) -> str:
    """What else the first row was seen to take."""
    others = cells.get("anchor", {}).get("elsewhere")
    return f": the first row's step was also seen to take {_seconds(others)}" if others else ""


def _seconds(steps: Iterable[float]) -> str:
    return " and ".join(f"{step:.2f} s" for step in steps)


def _told(name: str, c: Cells) -> str:
    """What tells a cell from others of its shape."""
    return f"at {c['model']}, {remark}" if (remark := {**LORA, **LAYOUTS}.get(name)) else f"in {c['dtype']}"


def _against(cells: Cells) -> str:
    found = pairs(cells, FULL, alone=False)
    if not found:
        return ""
    text = """*default*: as TRL comes, float32 weights under bf16 autocast, gradient checkpointing, 8 rows at a time. *best*: bf16 weights,
no checkpointing, fused AdamW on the bf16 weights themselves (without the float32 masters that Panoply keeps), and as many rows at a
time as the row says. One warm-up step and three timed ones unless the row says otherwise. Attention is what transformers picks by itself;
neither FlashAttention nor Liger's kernels were asked for.
"""
    lengths = [
        length / Shape.of(cells[name]).completion
        for name in (*FULL, *LORA, *LAYOUTS) if name in cells
        for c in opponents(cells, name) for length in c.get("mean_length", ())[1:]
    ]  # fmt: skip
    if lengths:
        text += (
            "\nTRL's ends are left on, since random weights hardly ever draw one: in its timed steps answers had at least "
            f"{min(lengths):.1%} of the tokens.\n"
        )
    elsewhere = {
        name: _seconds(cells[name]["elsewhere"])
        for name in ("anchor-trl-best", "anchor-trl-default", "anchor")
        if "elsewhere" in cells.get(name, {})
    }
    if len(elsewhere) == 3:
        best, default, ours = elsewhere.values()
        text += (
            "\nTRL samples token by token from Python, so its time depends on the host too. At other times, on machines of the same kind, "
            f"the first shape took it {best} (best) and {default} (default), and Panoply {ours}.\n"
        )
    return "### Beside TRL\n\n" + found + "\n" + text


def _memory(cells: Cells) -> str:
    """What a plan expects beside what was taken; sizes in order."""
    found = [cells[name] for size in SIZES if (name := f"memory-{size}") in cells]
    if not found:
        return ""
    rows = []
    for cell in found:
        for row in (r for r in cell["rows"] if "peak_gb" in r):
            way = Way(**{name: row[name] for name in ("lora", "base", "bits", "masters", "offload")})
            planned = foreseen(cell["size"], way, H200, STEP) / GB
            apart = f"{planned / row['peak_gb'] - 1:+.1%}"
            told = (
                f"{planned:.1f}",
                f"{row['peak_gb']:.1f}",
                f"{row['held_gb']:.1f}",
                apart,
                f"{row['gain']:.2g}",
            )
            rows.append([cell["size"], row["way"], *told])
    return (
        "### Memory\n\n"
        "What `panoply plan` says a step takes of the GPU at most, and what it took, in GB; *held* is there between steps. One micro-batch of "
        "16,384 tokens (16 × 8 × (128 + 112)), bfloat16. *Gain* is what three steps at a rate of 1e-5 on the same answers learned of them: the mean of "
        "advantage times the rise in log-probability. First steps are smaller than half of what tells bfloat16 numbers apart, so that they show late "
        f"where new weights lie on such numbers: with float32 masters, and under merged adapters. Measured {_all(found, 'date')}.\n\n"
        + table(["model", "how", "planned", "taken", "held", "off by", "gain"], rows)
    )


def _agreement(cells: Cells) -> str:
    rows = []
    for name in ("anchor", "anchor-float16", "anchor-float32"):
        if (c := cells.get(name)) is not None:
            rows.append([c["dtype"], f"{c['gap']:.1e}", f"{c['off']:.0e}" if c["off"] else "0"])
    if not rows:
        return ""
    text = (
        "### Does the fast path say the same?\n\n"
        "Mean distance between the log-probability a token was sampled with and the one the learner gives it, on unchanged weights, and "
        "the share of ratios outside 1 ± 0.2. Every run measures both (`step0_gap`, `ratio_off`).\n\n"
        + table(["weights", "mean distance", "ratios outside 1 ± 0.2"], rows)
    )
    if (e := cells.get("equality")) is not None:
        text += (
            f"\nCaptured graphs draw {e['graphs_draw_eager_tokens']:.0%} of the tokens that plain decoding draws (float32); logits differ from "
            f"transformers' by {e['transformers_logits']:.1e} of the largest; packed bf16 and fp16 gradients differ from the padded float32 one "
            f"by {e['gradient_bfloat16']:.1%} and {e['gradient_float16']:.1%} in norm, the weights' own rounding included.\n"
        )
    return text


def _learning(cells: Cells) -> str:
    if (c := cells.get("learn")) is None:
        return ""
    curve = [p for p in c["curve"] if "held_out_sampled" in p]
    first = next((p for p in curve if p["held_out_sampled"] > 0.8), curve[-1])
    known = [cells[name] for name in ("learn", "learn-trl") if name in cells]
    parts = " and ".join(f"{rate:.2f} on {name}" for name, rate in c["after"]["parts"].items())
    text = f"""### A run that learns

{c["parameters"] / 1e6:.0f} million new parameters in {c["dtype"]} on the world `mixed`: chains of sums and products, and pairs of numbers, in turn. Imitation of
careless teachers takes {c["imitation_s"]:.0f} s and leaves success on 256 held-out problems at {c["before"]["sampled"]:.2f}; GRPO with 32 prompts × 16 is above 0.8 at step
{first["step"]} after {first["seconds"]:.0f} s more, evaluations included, and ends at {c["after"]["sampled"]:.2f} ({parts}) after {c["curve"][-1]["seconds"]:.0f} s.

![Success against seconds: Panoply and TRL]({CURVE})

Measured {_all(known, "date")}.

"""
    if (t := cells.get("learn-trl")) is not None:
        steps = len(t["curve"])
        mine = c["curve"][steps - 1]
        text += (
            f"TRL {t['trl']} began with the same weights and saw the same problems in the same order for its first {steps} steps (float32 weights under "
            f"bf16 autocast, its default; no checkpointing). It took {t['curve'][-1]['seconds']:.0f} s, {t['curve'][0]['seconds']:.0f} of them for the first step, where Panoply took {mine['seconds']:.0f}; success in training was "
            f"{_late(t['curve'][:steps]):.2f} against {_late(c['curve'][:steps]):.2f} over the last ten of these steps.\n\n"
        )
    rows = [
        [str(p["step"]), f"{p['seconds']:.0f}", f"{p['success']:.2f}", f"{p['held_out_sampled']:.2f}", f"{p['held_out_greedy']:.2f}"]
        for p in curve
    ]  # fmt: skip
    return text + table(["step", "seconds", "in training", "held out, sampled", "held out, greedy"], rows)


def _late(curve: Sequence[Cells]) -> float:
    return statistics.mean(p["success"] for p in curve[-10:])


# ------------------------------------------------------------------ a CPU


def _cpu(cells: Cells) -> str:
    some = next(iter(cells.values()))
    dates = ", ".join(sorted({c["date"] for c in cells.values()}))
    text = f"""{CPU}

{some["cores"]} cores, torch {some["torch"]}, {dates}. 0.86 million parameters, 16 prompts × 8 completions of up to 32 tokens, one clipped step
without KL; both sides load the same folder. Medians of ten steps after three.

"""
    rows, said = [], []
    for work, meaning in (("ends", "completions end by themselves"), ("full", "all have 32 tokens")):
        here = {name: c for name, c in cells.items() if name.endswith(f"-{work}")}
        for name, c in here.items():
            side, *kind, threads, _ = name.split("-")
            low, _, high = statistics.quantiles(c["steps"], n=4)
            who = "**Panoply**" if side == "panoply" else f"TRL, {' '.join(kind)}"
            tokens = f"{c['tokens']:.1f}" if "tokens" in c else "–"
            rows.append([meaning, who, threads, tokens, f"{c['median']:.3f}", f"{low:.3f}–{high:.3f}"])
        best, default, ours = (
            min((c["median"] for n, c in here.items() if n.startswith(side)), default=None)
            for side in ("trl-best", "trl-default", "panoply")
        )
        if best and default and ours:
            said.append(
                f"Where {meaning}, TRL takes {best / ours:.2f} times as long with its best settings, {default / ours:.2f} times as it comes."
            )
    head = ["work", "", "threads", "tokens a completion", "step, s", "quartiles"]
    return (
        text
        + table(head, rows)
        + "\nAt its better thread count each: "
        + " ".join(said).replace("Where", "where", 1)
        + "\n"
    )
