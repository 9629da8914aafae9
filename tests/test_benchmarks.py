"""What the documentation says of speed is what the result files say."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from benchmarks import control, control_table, gpu, gpu_cells, gpu_table, gpu_trl
from panoply.errors import PanoplyError


def test_the_page_is_written_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a new measurement: python -m benchmarks.gpu table."""
    (tmp_path / "docs").mkdir()
    shutil.copytree(tiny.ROOT / "results" / "bench-gpu", tmp_path / "results" / "bench-gpu")
    monkeypatch.chdir(tmp_path)
    gpu_table.write()
    for name in ("performance.md", "gpu-learning.svg"):
        shown = (tiny.ROOT / "docs" / name).read_text().split(gpu_table.CPU)[0]
        assert shown.strip() == (tmp_path / "docs" / name).read_text().strip()


def test_a_cpus_cells_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "results" / "bench-text"
    folder.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    about = {"date": "2026-01-02", "torch": "2.13.0", "cores": 2, "tokens": 21.5}
    for side, seconds in (("panoply", 0.25), ("trl-best", 0.5), ("trl-default", 1.0)):
        facts = {**about, "steps": [seconds] * 4, "median": seconds}
        (folder / f"{side}-2-ends.json").write_text(json.dumps(facts))
    monkeypatch.chdir(tmp_path)
    gpu_table.write()
    page = (tmp_path / "docs" / "performance.md").read_text()
    row = "| completions end by themselves | TRL, best | 2 | 21.5 | 0.500 | 0.500–0.500 |"
    assert row in page
    assert "TRL takes 2.00 times as long with its best settings, 4.00 times as it comes." in page


def test_the_page_can_be_written_from_few_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ("results/bench-gpu/anchor.json", "results/bench-gpu/learn.json")
    for name in (*kept, "docs/performance.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tiny.ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    gpu_table.write()
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert "## One GPU" in page
    assert "TRL" not in page.split("### Repeating it")[0].split("## One GPU")[1]
    assert "of an earlier process. Single steps" in page
    assert "## A CPU" not in page


def test_the_page_can_be_written_from_cells_of_vllm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("native", "same", "second"):
        kept = f"results/bench-gpu/vllm-{name}.json"
        (tmp_path / kept).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tiny.ROOT / kept, tmp_path / kept)
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    facts = json.loads((gpu_table.RESULTS / "vllm-same.json").read_text())
    noted = {**facts, "torch": "2.12.0", "date": "2026-12-01", "note": "With a noisy neighbour."}
    (gpu_table.RESULTS / "vllm-same.json").write_text(json.dumps(noted))
    gpu_table.write()
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert f"torch {facts['torch']}, 2.12.0, {facts['date']}, 2026-12-01." in page
    assert "on a third of the GPU; with a noisy neighbour |" in page
    assert f"Measured {facts['date']}, 2026-12-01." in page


def test_lora_and_layouts_have_tables_and_what_is_slower_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny.ROOT / "results" / "bench-gpu", tmp_path / "results" / "bench-gpu")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    anchor = json.loads((gpu_table.RESULTS / "anchor.json").read_text())
    for left_out in ("moe", "top-p-trl"):
        (gpu_table.RESULTS / f"{left_out}.json").unlink(missing_ok=True)
    known = {"trl": "1.16.0", "setting": "best", "micro_batch": 64}
    anchor_date = {"date": anchor["date"]}
    cells = {
        "lora": {**anchor, "step": 2.0, "peak_gb": 12.0},
        "lora-trl": {**anchor, **known, "step": 25.0, "peak_gb": 9.0},
        "gemma2": {**anchor, "model": "gemma2-0.5B", "step": 23.0, "learn": 0.45},
        "gemma2-trl": {**anchor, **known, "step": 16.0, "learn": 0.1, "mean_length": [256.0, 448.0, 512.0]},
        "qlora-trl": {**anchor_date, **known, "failed": "out of memory"},
        "top-p": {**anchor, "step": 3 * anchor["step"], "sitting": "another", "date": "2000-01-01"},
        "short": {**anchor, "steps": anchor["steps"][:2], "completion": 128},
    }
    for name, facts in cells.items():
        (gpu_table.RESULTS / f"{name}.json").write_text(json.dumps(facts))
    gpu_table.write()
    page = (tmp_path / "docs" / "performance.md").read_text()
    lora, layouts, behind = (
        page.split(f"### {title}\n")[1].split("\n### ")[0]
        for title in ("LoRA", "Layouts", "Where Panoply is not ahead")
    )
    assert "0.5B, rank 16 | **Panoply** |" in lora
    assert "| 25.00 | 9 | 12.5× |" in lora
    assert "0.5B, Gemma 2 | **Panoply** |" in layouts
    assert "| 0.7× |" in layouts
    assert "takes 3.00 times as long as the plain step, measured in another sitting." in layouts
    assert "at 0.5B, Qwen2, `sample.top_p=0.95` (2000-01-01)" in page
    assert "included: 2 of 16 × 8 × (128 + 512) in float32; 2 of 16 × 8 × (128 + 128) in bfloat16." in page
    assert "answers had at least 87.5% of the tokens" in page
    assert "TRL is faster at 16 × 8 × (128 + 512) at gemma2-0.5B (Gemma 2), 16.00 s against 23.00." in behind
    assert "(Gemma 2), 0.10 s against 0.45" in behind
    assert "vLLM to generate for it was measured beside 16 × 8 × (128 + 512) at 0.5B alone." in behind
    assert "(rank 16): 9 GB (best) against 12" in behind
    (alone,) = (line for line in behind.splitlines() if line.startswith("Nothing was measured beside"))
    assert "16 × 8 × (128 + 512) at 0.5B (Qwen2, `sample.top_p=0.95`)" in alone
    assert "at 0.5B (rank 16)" not in alone
    assert (
        "`lora.base=nf4`): TRL ran out of memory with 64 rows at a time, and fewer were not tried;" in alone
    )


def test_every_model_of_the_benchmark_has_the_size_of_its_name() -> None:
    """With as many weights in use at a token, to a tenth, embeddings included."""
    from benchmarks.gpu_models import MODELS

    published = {"0.5B": 0.494e9, "1.5B": 1.544e9, "3B": 3.086e9, "7B": 7.616e9, "14B": 14.77e9}
    for name, raw in MODELS.items():
        width, size = raw["hidden_size"], raw["hidden_size"] // raw["num_attention_heads"]
        block = width * size * 2 * (raw["num_attention_heads"] + raw["num_key_value_heads"])
        inner = raw.get("moe_intermediate_size", 0) * raw.get("num_experts_per_tok", 0)
        block += 3 * width * (inner or raw["intermediate_size"])
        tables = raw["vocab_size"] * width * (1 if raw["tie_word_embeddings"] else 2)
        found = tables + block * raw["num_hidden_layers"]
        assert found == pytest.approx(published[name.split("-")[-1]], rel=0.01)


def test_the_floor_of_a_step_by_hand() -> None:
    """0.5B: 136.1 million weights of the head and 357.8 million of 24 blocks, 2 bytes each, read once a token."""
    shape = gpu.Shape(prompts=1, group=1, prompt=2, completion=1)
    head, block = 151936 * 896, 896 * 64 * (28 + 4) + 3 * 896 * 4864
    kept = 4 * 24 * 2 * 64 * 2.5
    assert shape.floor()["sample"] == pytest.approx((2 * (head + 24 * block) + kept) / 4.3e12)
    attention = (
        12 * 24 * 14 * 64 * (2 + 2.5)
    )  # of two tokens to those before them, and of one to both and itself
    assert shape.floor()["learn"] == pytest.approx((6 * (24 * block * 3 + head) + attention) / 790e12)


def test_a_group_reads_its_prompt_once_in_the_floor_too() -> None:
    """Of 4 rows with a prompt of 100, 100 positions and 4 halves are read for each token; learned, 100 tokens and 4."""
    one, four = gpu.Shape(1, 1, 100, 1), gpu.Shape(1, 4, 100, 1)
    more = 4 * 24 * 2 * 64 * 3 * 0.5
    assert (four.floor()["sample"] - one.floor()["sample"]) * 4.3e12 == pytest.approx(more)
    head, block = 151936 * 896, 896 * 64 * (28 + 4) + 3 * 896 * 4864
    each = 6 * (24 * block + head) + 12 * 24 * 14 * 64 * 100.5
    assert (four.floor()["learn"] - one.floor()["learn"]) * 790e12 == pytest.approx(3 * each)
    assert gpu.Shape.of({**asdict(four), "step": 1.0, "date": "2026-01-02"}) == four


def test_without_a_gpu_the_benchmark_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    if gpu.torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert gpu.main([]) == 0
    assert "skipped" in capsys.readouterr().out


def test_a_cell_that_has_a_result_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "run", ran.append)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    (tmp_path / "short.json").write_text("{}")
    gpu.main(["short", "far"])
    assert ran == ["far"]
    assert "short: there is a result already" in capsys.readouterr().out
    gpu.main(["--again", "short"])
    assert ran == ["far", "short"]


@pytest.mark.parametrize("there", [True, False])
def test_an_unknown_cell_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: there)
    with pytest.raises(SystemExit) as end:
        gpu.main(["anchor", "lora-trk"])
    assert end.value.code == 2
    assert "Unknown cell 'lora-trk'. Did you mean 'lora-trl'?" in capsys.readouterr().err


def test_a_result_that_was_cut_off_is_measured_again_and_keeps_nobody_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setitem(gpu.CELLS, "short", lambda: {"step": 2.0})
    (tmp_path / "short.json").write_text('{"step": 1.')
    gpu.main(["short"])
    found = json.loads((tmp_path / "short.json").read_text())
    assert found["step"] == 2.0
    assert "elsewhere" not in found
    monkeypatch.setattr(gpu_table, "RESULTS", tmp_path)
    (tmp_path / "far.json").write_text('{"step": 1.')
    with pytest.raises(SystemExit) as end:
        gpu.main(["table"])
    assert end.value.code == 2
    assert "far.json is not valid JSON" in capsys.readouterr().err


def test_a_cell_is_asked_for_once_though_it_is_named_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    ended = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, **_: ran.append(command[-1]) or ended)
    gpu.main(["--trl", "lora", "lora-trl", "lora"])
    assert ran == ["lora", "lora-trl"]


def test_cells_of_other_scripts_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(cell: str, *_: object) -> dict[str, Any]:
        if cell == "second":
            raise PanoplyError("There is no vLLM.")
        measured.append(cell)
        return {"step": 1.0}

    def ask(*words: str) -> None:
        asked = [*words, "--results", str(tmp_path)]
        gpu_cells.command("", "vllm", ("first", "second"), 3, measure, asked)

    monkeypatch.setattr(gpu_cells.torch.cuda, "is_available", lambda: False)
    ask("all")
    assert "There is no CUDA device here" in capsys.readouterr().out
    monkeypatch.setattr(gpu_cells.torch.cuda, "is_available", lambda: True)
    (tmp_path / "vllm-first.json").write_text('{"step": ')
    with pytest.raises(SystemExit) as end:
        ask("all")
    assert end.value.code == 2
    assert "second: There is no vLLM." in capsys.readouterr().err
    ask("first")
    assert measured == ["first"]
    assert json.loads((tmp_path / "vllm-first.json").read_text()) == {"step": 1.0}


def test_a_cell_keeps_the_times_of_the_measurements_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "a GPU")
    for step in (1.0, 2.0, 3.0, 4.0, 5.0):
        monkeypatch.setitem(gpu.CELLS, "short", lambda step=step: {"step": step})
        gpu.run("short")
    found = json.loads((tmp_path / "short.json").read_text())
    assert (found["step"], found["elsewhere"]) == (5.0, [2.0, 3.0, 4.0])


def test_cells_of_control_become_rows(tmp_path: Path) -> None:
    """Medians over repeats; the floor of 1 ms of environment and 1 ms of products is a fifth of 10 ms a step.

    The products are those of the 100 steps in 200 that learn.
    """
    pair = control.PAIRS["sac-pendulum"]
    about = {"steps": 200, "torch": "2.13.0", "cores": 2, "date": "2026-01-02"}
    floor = {"environment_seconds": 0.2, "flops_per_second": pair.flops / 2e-3}
    (tmp_path / "sac-pendulum.floor.speed-0.json").write_text(json.dumps({**about, **floor}))
    assert control_table.section(tmp_path) == ""
    for side, seconds in (("other", [4.0, 3.0, 9.0]), ("panoply", [2.0, 1.0, 4.0])):
        for seed, each in enumerate(seconds):
            facts = {**about, "seconds": each, "cpu_seconds": 2 * each, "return": -150.4 - seed}
            for kind in ("speed", "return"):
                (tmp_path / f"sac-pendulum.{side}.{kind}-{seed}.json").write_text(json.dumps(facts))
    page = control_table.section(tmp_path)
    assert f"| {pair.title} | SB3 | 50 | 100 | **2.00** | 2.00 | 1.4 | 20% |" in page
    assert "| SAC, Pendulum-v1 | 200 | SB3 | -150, -151, -152 | -150, -151, -152 |" in page
    assert "torch.compile" not in page


def test_compiling_is_counted_until_it_is_earned_back(tmp_path: Path) -> None:
    about = {"steps": 1000, "torch": "2.13.0", "cores": 2, "date": "2026-01-02", "cpu_seconds": 1.0}
    for side, seconds in (("other", 3.0), ("panoply", 1.0), ("compiled", 2.0)):
        facts = {**about, "seconds": seconds, "compile_seconds": 30.0}
        (tmp_path / f"ppo-cartpole.{side}.speed-0.json").write_text(json.dumps(facts))
    page = control_table.section(tmp_path)
    assert "SB3 takes 2.00 times Panoply's time" in page
    assert "after 30 s of compilation, which it has earned back after 30,000 steps" in page


def test_a_cell_of_control_that_has_a_result_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[command.index("--cell") + 1 :])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(control, "RESULTS", tmp_path)
    monkeypatch.setattr(control, "REPEATS", {"speed": 3, "return": 2})
    monkeypatch.setattr(control.subprocess, "run", run)
    control.place("iql-pendulum", "panoply", "speed", 1).write_text("{}")
    control.main(["--only", "iql-pendulum", "--kind", "speed"])
    assert [cell[1:] for cell in ran] == [
        ["floor", "speed", "0"], ["other", "speed", "0"], ["panoply", "speed", "0"], ["other", "speed", "1"],
        ["other", "speed", "2"], ["panoply", "speed", "2"],
    ]  # fmt: skip


def test_the_work_of_a_step_by_hand() -> None:
    """Two layers of 2 and 3 to 1 output: 2·(5·2 + 2·3 + 3·1) operations."""
    assert control.mlp(5, 2, 3, 1) == 38
    policy, value, first = control.mlp(4, 64, 64, 2), control.mlp(4, 64, 64, 1), 2 * 4 * 64
    learned = 2 * ((policy + value) * 3 - 2 * first)
    assert control.ppo_flops(4, 2, 2) == policy + value + learned


def test_a_profile_expects_what_a_plan_does_with_weights_in_few_bits_too() -> None:
    """16 × 8 × (128 + 112) in one pass: the plan's own numbers for the cell `memory-0.5B`."""
    from benchmarks import gpu_memory, gpu_profile

    given = argparse.Namespace(bits=8, no_masters=False, offload=False, base="nf4")
    shape, way = gpu.Shape(completion=112, lora=16), gpu_memory.Way(16, "nf4", 8)
    wanted = gpu_memory.foreseen("0.5B", way, gpu_memory.H200, gpu_memory.STEP)
    assert gpu_profile.planned(shape, given, 16384, gpu_memory.H200) == wanted


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("anchor", "0.5B at a peak of {:.0f} GB and {:.1f} s,"),
        ("1.5B", "1.5B at {:.0f} GB and {:.1f} s,"),
        ("lora", "with `--lora 16` 0.5B at {:.0f} GB and {:.2f} s"),
        ("lora-7b", "7B at {:.0f} GB and {:.1f} s ("),
    ],
)
def test_what_the_readme_says_of_an_h200_is_what_was_measured(name: str, said: str) -> None:
    cell = json.loads((tiny.ROOT / "results" / "bench-gpu" / f"{name}.json").read_text())
    readme = " ".join((tiny.ROOT / "README.md").read_text().split())
    assert said.format(cell["peak_gb"], cell["step"]) in readme.split("Measured on one H200")[1]


def test_what_does_not_fit_into_memory_in_trl_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of 640 tokens are 35 of 1,152, and 512 rows are a multiple of 32; of 16 at a time 20 are one of 10."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(gpu_trl.torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(gpu_trl, "version", lambda _: "1.16.0")
    monkeypatch.setattr(gpu_trl, "_timed", full)
    known = {"trl": "1.16.0", "setting": "best", "micro_batch": 32, "failed": "out of memory"}
    assert gpu_trl.measure(gpu.LONG, best=True, continuous=False) == known
    assert gpu_trl._rows_at_a_time(gpu.Shape(10, 2), 16) == 10
    assert gpu_trl.measure(gpu.LONG, best=False, continuous=False)["micro_batch"] == 8
