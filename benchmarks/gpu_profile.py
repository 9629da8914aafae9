"""Where a step's time and memory go on a GPU: `python -m benchmarks.gpu_profile [CELL] [--cold]`.

For the sampling and the learning phase: the kernels that took longest, how busy the device was, and the most memory
that was held. `--cold` starts with an empty compiler cache and says what was compiled, and for how long; `--apart`
compiles one kernel after another.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_memory import Way, foreseen
from panoply.footprint import SIZES, Work

if TYPE_CHECKING:
    from benchmarks.gpu import Shape

SHAPES = ("ANCHOR", "LORA", "LORA_7B", "GEMMA2", "MOE", "FOREIGN", "TOP_P", "LONG")
SHOWN = 14


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_profile")
    parser.add_argument("shape", nargs="?", default="ANCHOR", choices=SHAPES)
    parser.add_argument("--cold", action="store_true", help="an empty compiler cache")
    parser.add_argument("--apart", action="store_true", help="kernels are compiled one after another")
    parser.add_argument("--micro", type=int, default=0, help="tokens of a micro-batch")
    parser.add_argument("--brief", action="store_true", help="no kernels and lines")
    parser.add_argument("--bits", type=int, choices=(32, 8), default=32, help="of Adam's averages")
    parser.add_argument("--no-masters", action="store_true", help="weights without float32 copies")
    bases = ("whole", "int8", "nf4")
    parser.add_argument("--base", choices=bases, default="whole", help="of the shapes with adapters")
    parser.add_argument("--offload", action="store_true", help="activations in host memory")
    given = parser.parse_args()
    if given.base != "whole" and "LORA" not in given.shape:
        parser.error(f"--base has no effect: {given.shape} has no adapters.")
    if not torch.cuda.is_available():
        print("There is no CUDA device here.")
        return
    if given.cold:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
        _listen()
    if given.apart:
        from panoply.kernels import together

        together.rehearsal = nullcontext
    profile(given)


def _listen() -> None:
    """Say of every kernel how long it took to compile."""
    from triton import knobs

    began = time.perf_counter()

    def heard(*, src: Any, times: Any, **_: Any) -> None:
        spent = times.total / 1e6 if hasattr(times, "total") else 0.0
        print(f"    {time.perf_counter() - began:6.2f} s: {src.name} compiled in {spent:.2f} s")

    knobs.compilation.listener = heard


def planned(shape: Shape, given: argparse.Namespace, tokens: int, memory: int) -> int:
    """Bytes that a plan expects at most, with passes of so many tokens."""
    way = Way(shape.lora, given.base, given.bits, not given.no_masters, given.offload)
    rows = shape.prompts * shape.group
    work = Work(shape.prompt, shape.completion, rows, shape.trained, shape.sampled, tokens, width=2)
    return foreseen(shape.model, way, memory, work)


def profile(given: argparse.Namespace) -> None:
    from benchmarks import gpu
    from benchmarks.gpu_models import DTYPES, random_policy
    from panoply.loops.learner import Learner
    from panoply.lora import Lora
    from panoply.policies.lora import add_lora
    from panoply.rollout.text import Collector

    name, masters = given.shape, not given.no_masters
    shape = getattr(gpu, name)
    shape = replace(shape, settings=(*shape.settings, ("update.bits", given.bits)))
    clock = time.perf_counter()
    policy, grpo = random_policy(shape.model, DTYPES["bfloat16"]), gpu.method(shape)
    if shape.lora:
        policy = add_lora(policy, shape.lora, settings=Lora(base=given.base))
    collect = Collector(gpu.Fixed(shape), policy, seed=0)
    offload = "activations" if given.offload else "none"
    learner = Learner(
        policy, grpo, total_steps=100, micro_tokens=given.micro, offload=offload, masters=masters
    )
    print(f"{name}: model and learner {time.perf_counter() - clock:.1f} s, holding {_held():.2f} GB")

    def sample() -> Any:
        rows = grpo.sample(collect)
        rows = rows.with_columns(reward=grpo.reward(rows))
        return rows.with_columns(advantage=grpo.credit(rows))

    for step in range(3):
        rows, sampled = _watched("sampling", sample)
        _, learned = _watched("learning", lambda rows=rows, step=step: learner.step(rows, step))
        print(f"step {step}: {sampled}; {learned}")
    if shape.model in SIZES:
        memory = torch.cuda.get_device_properties(0).total_memory
        most = planned(shape, given, learner.room.tokens, memory)
        print(f"expected: at most {most / 1e9:.2f} GB")
    made = next(iter(gpu._made.values()), None)
    if made is not None:
        print(f"graphs' setup {made.setup_seconds:.1f} s, rows {made.rows}, capacity {made.capacity}")
    if given.brief:
        return
    rows = _kernels("sampling", sample)
    _kernels("learning", lambda: learner.step(rows, 3))
    _snapshot(lambda: learner.step(rows, 4))


def _held() -> float:
    return torch.cuda.memory_allocated() / 1e9


def _watched(what: str, run: Any) -> tuple[Any, str]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = _held(), time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated() / 1e9
    return result, f"{what} {seconds:.2f} s, {before:.2f} GB before, at most {peak:.2f}, {_held():.2f} after"


def _kernels(what: str, run: Any) -> Any:
    """The kernels of a phase by their time on the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time_total
            calls[event.name] += 1
    busy = sum(spent.values()) / 1e6
    print(f"\n{what}: {whole:.3f} s (profiled), kernels {busy:.3f} s, {sum(calls.values()):,} calls")
    for name, micros in spent.most_common(SHOWN):
        print(f"  {micros / 1e3:8.1f} ms {micros / 1e4 / busy:5.1f}% {calls[name]:7,} × {name[:76]}")
    return result


def _snapshot(run: Any) -> None:
    """What was held when learning held most: blocks by the Python line that asked for them."""
    torch.cuda.memory._record_memory_history(max_entries=200_000, context="alloc", stacks="python")
    run()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, tuple[int, str]] = {}
    total = most = 0
    peak: Counter[str] = Counter()
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], _line(event.get("frames", [])))
            total += event["size"]
            if total > most:
                most, peak = total, Counter()
                for size, line in live.values():
                    peak[line] += size
        elif event["action"] == "free_completed" and event["addr"] in live:
            total -= live.pop(event["addr"])[0]
    print(f"\nlearning asks for {most / 1e9:.2f} GB more at its peak, by the line that asked:")
    for line, size in peak.most_common(SHOWN):
        print(f"  {size / 1e9:6.2f} GB {line}")


def _line(frames: list[dict[str, Any]]) -> str:
    ours = [f for f in frames if "panoply/" in f["filename"]]
    found = (ours or frames or [{"filename": "?", "line": 0, "name": "?"}])[0]
    return f"{found['filename'].split('panoply/')[-1]}:{found['line']} {found['name']}"


if __name__ == "__main__":
    main()
