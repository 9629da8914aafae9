"""docs/performance.md, what spreads a run: vLLM as the engine, and learners of a group, on one GPU."""
# ruff: noqa: E501 (sentences of the page)

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.gpu_beside import Cells, remark, shape, table

ENGINES = {
    "vllm-native": "the native engine",
    "vllm-same": "vLLM {vllm} in the learner's process, on a third of the GPU",
    "vllm-second": "vLLM {vllm} in a process of its own on the same GPU",
}
LAYOUTS = {
    "fsdp-plain": "one process",
    "fsdp-whole": "`--layout whole`: one rank of a group",
    "fsdp-sharded": "`--layout sharded`: one rank under FSDP2",
}


def spread(cells: Cells) -> str:
    return "\n".join(part for part in (_engines(cells), _layouts(cells)) if part)


def _dates(cells: Cells, names: Iterable[str]) -> str:
    return ", ".join(sorted({cells[name]["date"] for name in names}))


def _engines(cells: Cells) -> str:
    found = {name: said for name, said in ENGINES.items() if name in cells}
    if len(found) < len(ENGINES):
        return ""
    rows = []
    for name, said in found.items():
        c = cells[name]
        handed = c["publish"] + c.get("moved", 0.0)
        rows.append([
            said.format(vllm=c["vllm"]) + remark(c),
            f"{c['sample']:.2f}", f"{handed:.2f}", f"{c['learn']:.2f}", f"**{c['step']:.2f}**",
            f"{c['start_s']:.0f}", f"{c['gap']:.1e}",
        ])  # fmt: skip
    head = ["who samples", "sampling, s", "handing over, s", "learning, s", "step, s", "start, s", "gap"]
    first = cells["vllm-same"]
    times = first["step"] / cells["vllm-native"]["step"]
    return f"""### vLLM as the engine

{shape(first)} at 0.5B in bfloat16, with `--engine vllm` and without. *Handing over* is what new weights take on their way, and rows on
theirs; *gap* the mean distance between the log-probability a token was sampled with and the learner's. Measured {_dates(cells, found)}.

{table(head, rows)}

A step that vLLM samples takes {times:.1f} times as long here, most of it vLLM's decoding. It is for models that the native engine does not
know, not for speed.
"""


def _layouts(cells: Cells) -> str:
    found = {name: said for name, said in LAYOUTS.items() if name in cells}
    if len(found) < len(LAYOUTS):
        return ""
    rows = []
    for name, said in found.items():
        c = cells[name]
        off = "" if name == "fsdp-plain" else f"{c['gradient_off']:.0e}"
        rows.append([said, f"{c['learn']:.2f}", f"{c['peak_gb']:.0f}", off])
    first = cells["fsdp-plain"]
    return f"""### A learner of a group

The learning half of {shape(first)} at 0.5B in bfloat16, on one GPU and so a group of one over NCCL: what the layouts cost by themselves,
without a network. *Off* is the largest difference of the gradient from one process's, of its largest entry, in float32. Measured
{_dates(cells, found)}.

{table(["learner", "learning, s", "peak, GB", "off"], rows)}

FSDP's blocks are gathered for every pass and are not fused. Several GPUs were not to be had: what they add is in the
[simulation](cluster.md#on-paper).
"""
