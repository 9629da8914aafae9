"""What a step is expected to take of a GPU, against what measured ones took."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from kit import Tabular, learner, on_policy

import panoply as pp
from benchmarks.gpu_memory import H200, STEP, Way, foreseen
from panoply import footprint
from panoply.costs import cost
from panoply.footprint import (
    GB,
    NOWHERE,
    SIZES,
    SPARE,
    Dimensions,
    Work,
    _peak,
    expected,
    held,
    pass_tokens,
    verdict,
)
from panoply.loops import memory
from panoply.policies import scoring
from panoply.report.text import planned
from panoply.rollout import graphs

CELLS = sorted(
    path.stem
    for path in (tiny.ROOT / "results" / "bench-gpu").glob("*.json")
    if json.loads(path.read_text()).get("dtype") in ("bfloat16", "float16")
    if json.loads(path.read_text()).get("model") in SIZES
)
ANCHOR = Work(128, 512, 128, 16 * 128 + 128 * 512, 128 * 512, 16384, 2)


def _sizes(name: str) -> Dimensions:
    found = Dimensions.of(SIZES[name])
    assert found is not None
    return found


def _copied(name: str, copies: int = 1) -> dict[str, int]:
    """Bytes of other selves."""
    return {"copies": 2 * copies * sum(torch.Size(shape).numel() for shape in SIZES[name].values())}


@pytest.mark.parametrize("cell", CELLS)
def test_what_was_measured_was_expected(cell: str) -> None:
    """Within 15 %, for every cell of the benchmark."""
    facts = json.loads((tiny.ROOT / "results" / "bench-gpu" / f"{cell}.json").read_text())
    rows = facts["prompts"] * facts["group"]
    sampled = rows * facts["completion"]
    trained = sampled + facts["prompts"] * facts["prompt"]
    at_once = facts.get("micro_tokens", 16384)
    work = Work(facts["prompt"], facts["completion"], rows, trained, sampled, at_once, 2)
    work = replace(work, frozen=facts.get("lora", 0) > 0)
    holding = held(SIZES[facts["model"]], 2, facts.get("lora", 0), base=facts.get("base", "whole"))
    found = expected(_sizes(facts["model"]), holding, work, H200)
    assert found.total / GB == pytest.approx(facts["peak_gb"], rel=0.15)


ROWS = [
    (facts["size"], row)
    for path in sorted((tiny.ROOT / "results" / "bench-gpu").glob("memory-*.json"))
    for facts in [json.loads(path.read_text())]
    for row in facts["rows"]
    if "peak_gb" in row
]


@pytest.mark.parametrize(("size", "row"), ROWS, ids=[f"{size}: {row['way']}" for size, row in ROWS])
def test_every_way_takes_what_was_expected(size: str, row: dict[str, Any]) -> None:
    """Within 15 %: adapters, 8-bit averages, no masters, activations elsewhere, and what they learn in three steps."""
    way = Way(**{name: row[name] for name in ("lora", "base", "bits", "masters", "offload")})
    assert foreseen(size, way, H200, STEP) / GB == pytest.approx(row["peak_gb"], rel=0.15)
    assert row["gain"] > 0


def test_experts_that_a_token_does_not_go_through_keep_nothing_of_it() -> None:
    """Against a measured step of the benchmark's mixture: 64 experts, 8 at a time, as wide together as 0.5B."""
    facts = json.loads((tiny.ROOT / "results/bench-gpu/moe.json").read_text())
    expert = {"gate_proj": (608, 896), "up_proj": (608, 896), "down_proj": (896, 608)}
    shapes = {name: shape for name, shape in SIZES["0.5B"].items() if ".mlp." not in name}
    for layer in range(24):
        place = f"model.layers.{layer}.mlp.experts"
        shapes |= {f"{place}.{e}.{name}.weight": shape for e in range(64) for name, shape in expert.items()}
    sizes = Dimensions.of(shapes, 8)
    assert sizes is not None
    assert sizes.kept == _sizes("0.5B").kept
    found = expected(sizes, held(shapes, 2), ANCHOR, H200)
    assert found.total / GB == pytest.approx(facts["peak_gb"], rel=0.15)
    assert expected(Dimensions.of(shapes, 16), held(shapes, 2), ANCHOR, H200).total > found.total + 6 * GB  # type: ignore[arg-type]


def test_modules_of_others_keep_more_of_a_token() -> None:
    """Against a measured step of a model of as many weights that transformers runs."""
    facts = json.loads((tiny.ROOT / "results/bench-gpu/foreign.json").read_text())
    sizes = Dimensions.of(SIZES["0.5B"], fused=False)
    assert sizes is not None
    work, holding = replace(ANCHOR, micro_tokens=facts["micro_tokens"]), held(SIZES["0.5B"], 2)
    found = expected(sizes, holding, work, H200)
    assert found.total / GB == pytest.approx(facts["peak_gb"], rel=0.15)
    assert found.total > expected(_sizes("0.5B"), holding, work, H200).total + 4 * GB


def test_matrices_that_are_joined_are_counted_as_those_that_are_not() -> None:
    joined = {
        name: shape
        for name, shape in SIZES["0.5B"].items()
        if not name.endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
        )
    }
    for layer in range(24):
        joined[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = (896 + 2 * 128, 896)
        joined[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = (2 * 4864, 896)
    assert Dimensions.of(joined) == _sizes("0.5B")


@pytest.mark.parametrize(
    ("size", "lora", "micro", "measured"),
    [("7B", 16, 16384, 87.4), ("0.5B", 0, 8192, 20.5)],
)
def test_adapters_and_micro_batches_are_counted(size: str, lora: int, micro: int, measured: float) -> None:
    """Peaks of single steps on an H200."""
    found = expected(_sizes(size), held(SIZES[size], 2, lora), replace(ANCHOR, micro_tokens=micro), H200)
    assert found.total / GB == pytest.approx(measured, rel=0.15)


def test_the_published_sizes_have_as_many_weights() -> None:
    published = {"0.5B": 0.494e9, "1.5B": 1.544e9, "3B": 3.086e9, "7B": 7.616e9, "14B": 14.77e9}
    for name, weights in published.items():
        found = sum(torch.Size(shape).numel() for shape in SIZES[name].values())
        assert found == pytest.approx(weights, rel=1e-3)


def test_where_memory_is_short_micro_batches_get_smaller_and_then_blocks_are_computed_again() -> None:
    sizes, holding = _sizes("0.5B"), held(SIZES["0.5B"], 2)
    whole = expected(sizes, holding, ANCHOR, H200)
    assert not whole.recomputed
    kept = expected(sizes, holding, ANCHOR, int(whole.total + SPARE) - 1)
    assert (kept.tokens, kept.softmaxes) == (whole.tokens, 0)  # what is kept on large cards alone goes first
    small = expected(sizes, holding, ANCHOR, int(kept.total + SPARE) - 1)
    assert small.tokens < whole.tokens
    assert small.total < whole.total
    assert not small.recomputed
    least = expected(sizes, holding, ANCHOR, 12 * GB)
    assert least.recomputed
    assert least.tokens == 640
    assert not expected(sizes, holding, replace(ANCHOR, recompute="never"), 12 * GB).recomputed
    assert [verdict(sizes, holding, ANCHOR, gb * GB) for gb in (141, 20, 9)] == ["25", "16*", "–"]
    long = replace(ANCHOR, answer=20_000, trained=128 * 20_000, decisions=128 * 20_000)
    assert verdict(sizes, holding, long, 30 * GB).endswith("**")


LENGTHS = {"short": (14, 20), "middle": (128, 512), "long": (256, 2048)}


@pytest.mark.parametrize(("size", "copies"), [("0.5B", 0), ("1.5B", 1), ("3B", 0), ("3B", 1)])
@pytest.mark.parametrize("length", LENGTHS)
def test_what_fits_in_the_smallest_micro_batch_is_said_to_fit(size: str, copies: int, length: str) -> None:
    """Of the longest sequence alone, which may keep softmaxes that larger ones compute again; and nothing else is."""
    prompt, answer = LENGTHS[length]
    work = Work(prompt, answer, 256, 16 * prompt + 128 * answer, 128 * answer, 9216, 2)
    sizes, holding = _sizes(size), held(SIZES[size], 2, beside=_copied(size, copies))

    def fits(tokens: int, card: int) -> bool:
        passes = replace(work, micro_tokens=tokens)
        tried = [_peak(sizes, holding, passes, card, again) for again in (False, True)]
        return any(one.moving <= card - SPARE - one.held - one.sampler for one in tried)

    for card in range(8 * GB, 100 * GB, GB):
        said = verdict(sizes, holding, work, card) != NOWHERE
        assert said or not fits(prompt + answer, card), card / GB
        assert not said or any(fits(n, card) for n in (*range(prompt + answer, 9216, 173), 9216))


def test_smaller_passes_fit_where_large_ones_do_not_though_they_keep_softmaxes() -> None:
    """1.5 billion weights with a KL term on 48 GB."""
    work = Work(12, 512, 128, 65_728, 65_536, 9216, 2)
    sizes, holding = _sizes("1.5B"), held(SIZES["1.5B"], 2, beside=_copied("1.5B"))
    found = expected(sizes, holding, work, 48 * GB)
    assert verdict(sizes, holding, work, 48 * GB) == "45*"
    assert found.softmaxes > 0
    assert not found.recomputed
    assert found.moving <= 0.9 * (48 * GB - SPARE - found.held - found.sampler)


def test_a_plan_counts_with_the_numbers_of_those_it_counts() -> None:
    assert footprint.SHARE == memory.SHARE
    assert (footprint.KEPT_SHARE, footprint.KEPT_VOCABULARY) == (scoring.KEPT_SHARE, scoring.KEPT_VOCABULARY)
    assert scoring.CHUNK_ELEMENTS["cuda"] == footprint.LOGITS
    assert footprint.SAMPLED_SHARE == graphs.MEMORY_SHARE


def test_the_sampler_takes_its_share_of_what_is_free_before_the_first_step() -> None:
    many = replace(ANCHOR, rows=512, answer=4096)
    for lora in (0, 16):
        holding = held(SIZES["1.5B"], 2, lora)
        before = holding.always - holding.later
        found = expected(_sizes("1.5B"), holding, many, 48 * GB)
        assert found.sampler == pytest.approx(0.4 * (48 * GB - SPARE - before), rel=1e-6)
    weights = sum(torch.Size(shape).numel() for shape in SIZES["1.5B"].values())
    assert held(SIZES["1.5B"], 2).later == 8 * weights


def test_what_saves_memory_is_counted() -> None:
    sizes, plain = _sizes("0.5B"), held(SIZES["0.5B"], 2)
    assert held(SIZES["0.5B"], 0.5)[0] < held(SIZES["0.5B"], 2, masters=False)[0] < plain[0]
    assert held(SIZES["0.5B"], 2, beside=_copied("0.5B")).always - plain.always == plain.summed / 2
    assert plain.passing == 2 * 151936 * 896  # of embeddings alone
    away = expected(sizes, plain, replace(ANCHOR, offload=True), H200)
    assert away.softmaxes == expected(sizes, plain, ANCHOR, H200).softmaxes  # made whole before they leave
    assert away.activations < expected(sizes, plain, ANCHOR, H200).activations / 20
    heavy = expected(_sizes("14B"), held(SIZES["14B"], 2), replace(ANCHOR, trained=700, decisions=600), None)
    assert heavy.activations == 4 * sum(
        torch.Size(s).numel() for s in SIZES["14B"].values()
    )  # gradients of the only pass, when its activations have gone
    more = replace(ANCHOR, trained=700, decisions=600, micro_tokens=640, prompt=100, answer=100)
    twice = expected(_sizes("14B"), held(SIZES["14B"], 2), more, None)
    assert twice.held - heavy.held == heavy.activations
    assert twice.activations < heavy.activations / 2


def test_softmaxes_are_kept_where_the_learner_keeps_them() -> None:
    sizes, holding = _sizes("0.5B"), held(SIZES["0.5B"], 2)
    assert expected(sizes, holding, ANCHOR, H200).softmaxes > 0
    assert expected(sizes, holding, replace(ANCHOR, entropy=True), H200).softmaxes == 0
    assert expected(sizes, holding, replace(ANCHOR, frozen=True), H200).softmaxes == 0
    assert expected(sizes, holding, ANCHOR, 48 * GB).softmaxes == 0  # a twentieth is less than they take


def test_a_plan_says_what_a_gpu_will_hold_and_what_fits() -> None:
    plan = pp.plan("grpo", model="fresh", dtype="bfloat16", device="cpu")
    needed = cost(plan)
    assert needed.peak is not None
    assert needed.peak.held == sum(needed.memory_bytes.values()) - needed.memory_bytes["gradients"]
    page = planned(plan)
    assert "on a GPU" in page
    assert "141 GB" in page
    assert "--lora 16" in page
    plain = planned(pp.plan("grpo", model="fresh", device="cpu"))
    assert "141 GB" not in plain
    assert cost(pp.plan("grpo", model="fresh", device="cpu")).peak is None
    assert "141 GB" not in planned(pp.plan("ppo", "cartpole"))
    adapted = cost(pp.plan("grpo", model="fresh", dtype="bfloat16", lora=4, device="cpu"))
    assert adapted.peak is not None
    assert adapted.peak.held == sum(adapted.memory_bytes.values())


def test_more_answers_at_once_are_more_keys_and_values() -> None:
    sizes, holding = _sizes("0.5B"), held(SIZES["0.5B"], 2)
    few, many = (expected(sizes, holding, replace(ANCHOR, rows=rows), H200).sampler for rows in (128, 256))
    assert many == 2 * few
    assert expected(sizes, holding, replace(ANCHOR, rows=10**6), H200).sampler == 4 * few  # 512 at once
    plan = pp.plan("grpo", model="fresh", dtype="bfloat16", device="cpu", settings={"run.held_out": 500})
    assert (
        cost(plan).peak.sampler
        > cost(pp.plan("grpo", model="fresh", dtype="bfloat16", device="cpu")).peak.sampler
    )  # type: ignore[union-attr]


def test_passes_have_as_many_tokens_as_keep_a_device_busy_unless_told() -> None:
    assert [pass_tokens(0), pass_tokens(0, adapters=True), pass_tokens(0, gpu=False)] == [9216, 12288, 16384]
    assert pass_tokens(77, adapters=True) == pass_tokens(77, gpu=False) == 77
    assert learner(Tabular(), on_policy(), micro_tokens=0).room.tokens == 16384
