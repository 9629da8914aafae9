"""Less memory: averages of a byte, weights rounded by chance, activations in host memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Tabular, learner, on_policy, ragged
from safetensors.torch import load_file
from torch import Tensor, nn

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.loops import rounding
from panoply.loops.offload import Offload
from panoply.loops.rounding import Rounding, rounded
from panoply.slots.update.eight_bits import MEANS, SQUARES, EightBitAdam, Ladder
from panoply.slots.update.optimisers import Adam

RATES = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def _numbers(seed: int = 0) -> Tensor:
    """Two blocks of numbers over six decades, and a block of nothing."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.exp(4 * torch.randn(3, 256, generator=rng)).clamp(1e-3, 1e3)
    size[2] = 0
    return size * torch.randn(3, 256, generator=rng).sign()


@pytest.mark.parametrize("ladder", [MEANS, SQUARES])
def test_bytes_are_right_on_average(ladder: Ladder) -> None:
    numbers = _numbers() if ladder.signed else _numbers().abs()
    rng, times = torch.Generator().manual_seed(1), 400
    drawn = [ladder.decode(*ladder.encode(numbers, torch.rand(3, 256, generator=rng))) for _ in range(times)]
    apart = torch.stack(drawn) - numbers
    rung = 2 ** (1 / ladder.octave) - 1
    assert (apart.abs() <= 1.001 * rung * numbers.abs()).all()
    assert float(apart.abs().max()) > 0
    gaps = (apart / (rung * numbers))[:, :2]
    assert float(gaps.mean(0).abs().max()) < 5 * 0.5 / times**0.5
    assert (
        float(gaps.mean().abs()) < 5 * 0.5 / (times * 512) ** 0.5
    )  # nothing leans, though no number is there


@pytest.mark.parametrize("ladder", [MEANS, SQUARES])
def test_what_does_not_change_is_not_rounded_again(ladder: Ladder) -> None:
    rng = torch.Generator().manual_seed(2)
    held = ladder.decode(*ladder.encode(_numbers().abs(), torch.rand(3, 256, generator=rng)))
    held[0, 0] *= 64  # another scale for its block moves none of the others
    again = ladder.decode(*ladder.encode(held, torch.rand(3, 256, generator=rng)))
    torch.testing.assert_close(again[:, 1:], held[:, 1:], rtol=1e-5, atol=0)


def test_a_square_is_never_rounded_to_nothing() -> None:
    """Its root is divided by; a mean may vanish."""
    numbers = torch.full((1, 256), 1e-12)
    numbers[0, 0], numbers[0, 1] = 1.0, 0.0
    never = torch.full((1, 256), 0.999)
    squares, means = (ladder.decode(*ladder.encode(numbers, never)) for ladder in (SQUARES, MEANS))
    assert (squares[0, 2:] > 0).all()
    assert (means[0, 2:] == 0).all()
    assert float(squares[0, 1]) == 0


def _descended(
    kind: type[torch.optim.Optimizer], steps: int = 200, seed: int = 3
) -> tuple[Tensor, dict[str, Any]]:
    """Weights after steps towards a target that is seen through noise, and what the optimiser keeps."""
    weight, target = nn.Parameter(torch.zeros(40, 30)), torch.linspace(-2, 2, 1200).view(40, 30)
    rng = torch.Generator().manual_seed(seed)
    optimiser = kind([weight], **RATES)  # type: ignore[call-arg]
    for _ in range(steps):
        noisy = target + torch.randn(40, 30, generator=rng)
        weight.grad = weight.detach() - noisy
        optimiser.step()
    return weight.detach(), optimiser.state[weight]


def test_eight_bits_arrive_where_thirty_two_do() -> None:
    """They differ by less than half of what other noise in the gradients would make."""
    (wide, _), (narrow, kept) = _descended(Adam), _descended(EightBitAdam)
    elsewhere = _descended(Adam, seed=4)[0]
    assert 0 < float((wide - narrow).norm()) < float((wide - elsewhere).norm()) / 2
    held = sum(v.nbytes for v in kept.values() if isinstance(v, Tensor))
    assert held <= 2.2 * 1.07 * 40 * 30  # the last block is not full
    assert torch.equal(narrow, _descended(EightBitAdam)[0])


def test_chunks_of_weights_are_moved_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for chance, which a chunk draws after another: with averages on rungs there is none."""
    monkeypatch.setattr(
        Ladder, "encode", lambda self, numbers, uniform: (numbers, torch.ones(len(numbers), 1))
    )
    monkeypatch.setattr(Ladder, "decode", lambda self, rungs, scale: rungs.float())
    monkeypatch.setattr(Ladder, "dtype", torch.float32)
    whole = _descended(EightBitAdam, 5)[0]
    monkeypatch.setattr("panoply.slots.update.eight_bits.CHUNK", 512)
    assert torch.equal(_descended(EightBitAdam, 5)[0], whole)
    torch.testing.assert_close(whole, _descended(Adam, 5)[0])


def test_rounding_by_chance_is_right_on_average() -> None:
    rng = torch.Generator().manual_seed(4)
    wide = torch.randn(1000, generator=rng)
    drawn = torch.stack([rounded(wide, rng).float() for _ in range(300)])
    apart = drawn - wide
    assert (apart.abs() <= 2**-7 * wide.abs()).all()
    gaps = apart / torch.exp2(torch.floor(torch.log2(wide.abs())) - 7)
    assert float(gaps.mean(0).abs().max()) < 5 * 0.5 / 300**0.5
    assert float(gaps.mean().abs()) < 5 * 0.5 / 300_000**0.5
    there = wide.bfloat16()
    assert torch.equal(rounded(there.float(), rng), there)
    odd = torch.tensor([float("inf"), -float("inf"), 0.0, 0.0])
    odd.view(torch.int32)[3] = 0x7FFFFFFF  # what a GPU calls no number
    assert torch.equal(rounded(odd, rng).float().nan_to_num(7.0), odd.nan_to_num(7.0))


def test_steps_too_small_for_a_weight_move_it_on_average() -> None:
    weight, wide = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2))
    still = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    masters = Rounding({"w": weight, "wide": wide, "still": still}, seed=0)
    optimiser = torch.optim.SGD(masters.moving.values(), lr=1e-4)
    told: list[int] = []
    optimiser.register_step_post_hook(lambda *_: told.append(1))
    address = weight.data_ptr()
    for step in range(20):
        masters.clear()
        for _ in range(2):
            weight.grad = torch.full_like(weight, 0.5)
            masters.collect()
        wide.grad = torch.ones(2)
        masters.move(optimiser, step)
        masters.publish()
    moved = 1 - weight.detach().float().mean()
    assert float(moved) == pytest.approx(20e-4, rel=0.15)
    assert torch.allclose(wide, torch.full((2,), 1 - 20e-4))
    assert (still == 1).all()
    assert weight.data_ptr() == address
    assert len(told) == 20
    assert masters.state() == {}
    assert masters.masters["w"].untyped_storage().nbytes() == 4  # the copies are gone again


def test_moved_a_few_at_a_time_weights_go_where_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved() -> list[Tensor]:
        weights = {n: nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for n in "abc"}
        masters = Rounding(weights, seed=1)
        optimiser = Adam(masters.moving.values(), **{**RATES, "lr": 1e-3})
        for step in range(3):
            for weight in weights.values():
                weight.grad = torch.ones_like(weight)
            masters.collect()
            masters.move(optimiser, step)
        return [w.detach() for w in weights.values()]

    whole = moved()
    monkeypatch.setattr(rounding, "TOGETHER", 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, moved(), strict=True))
    assert not torch.equal(whole[0], whole[1])  # each has a chance of its own


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [({"update.bits": 8}, "float32"), ({"run.masters": False}, "bfloat16")],
    ids=["bits", "masters"],
)
def test_a_run_that_goes_on_draws_the_same(setting: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    given = {"settings": setting, "dtype": dtype, "steps": 3}
    whole = tiny.train(tmp_path / "whole", **given)

    def leave(step: pp.Step) -> None:
        if step.number == 2:
            raise LookupError

    with pytest.raises(LookupError):
        tiny.train(tmp_path / "run", on_step=leave, **given)
    assert tiny.resume(tmp_path / "run").fingerprint == whole.fingerprint
    assert tiny.train(tmp_path / "plain", dtype=dtype, steps=3).fingerprint != whole.fingerprint


def test_critics_have_no_copies_where_the_policy_has_none(tmp_path: Path) -> None:
    settings = {"sample.prompts": 4, "sample.group": 2, "run.held_out": 4, "run.masters": False}
    given = {"world": "chain", "model": "start", "dtype": "bfloat16", "settings": settings}
    assert not any("master" in name for name in cost(pp.plan("ppo", **given)).memory_bytes)  # type: ignore[arg-type]
    done = tiny.bare(tmp_path / "run", "ppo", steps=1, **given)
    (saved,) = (done.run / "checkpoints").glob("step-*1/state.safetensors")
    assert not any(name.endswith(":master") for name in load_file(saved))


def test_activations_that_were_away_give_the_same_gradient() -> None:
    policy = tiny_policy()
    rows, weights = _rows(policy), list(policy.parameters())

    def slopes(context: Any) -> list[Tensor]:
        with context:
            loss = policy.score(rows)["logp"].square().sum()
        return list(torch.autograd.grad(loss, weights))

    away, all_away = Offload(policy.model.parameters(), least=64), Offload((), least=64)
    here = slopes(nullcontext())
    for context in (away, all_away):
        assert all(torch.equal(a, b) for a, b in zip(here, slopes(context), strict=True))
    assert 10_000 < away.moved_bytes < all_away.moved_bytes  # weights stay where they are
    idle = Offload((), least=1 << 30)
    slopes(idle)
    assert idle.moved_bytes == 0


def test_what_was_away_lies_as_it_lay() -> None:
    """A product with a matrix that lies the other way may add up in another order, and end in other bits."""
    wide = torch.randn(3, 40, 30, generator=torch.Generator().manual_seed(5))
    away = Offload((), least=0)
    for kept in (wide, wide.mT, wide.permute(2, 0, 1), wide[0].t(), wide[:1].expand(3, 40, 30)):
        back = away.unpack_hook(away.pack_hook(kept))
        assert torch.equal(back, kept)
        assert back.stride() == kept.stride() or 0 in kept.stride()  # numbers that are one are many then


def test_weights_in_pieces_stay_where_they_are() -> None:
    """Of a weight that several processes share, a piece is here, and the whole has no memory of its own."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        shared = distributed.tensor.distribute_tensor(torch.ones(4, 4), mesh)
        away = Offload([shared], least=0)
        assert away.pack_hook(shared.to_local()) is not None
        assert away.moved_bytes == 0
    finally:
        distributed.destroy_process_group()


def test_the_learner_sends_activations_away(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    monkeypatch.setattr("panoply.loops.offload.LEAST", 0)
    monkeypatch.setattr(Offload, "__enter__", lambda self: entered.append(1))
    monkeypatch.setattr(Offload, "__exit__", lambda self, *_: None)
    held = learner(Tabular(0), on_policy(), micro_tokens=8)
    plain = held.gradient(ragged())
    held.offload = "activations"
    assert not entered
    assert torch.equal(held.gradient(ragged())["logits"], plain["logits"])
    assert len(entered) > 1  # once a micro-batch


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"masters": False}, r"run\.masters has no effect: float32 weights have no copies"),
        ({"masters": False, "dtype": "float16"}, r"run\.masters=false needs run\.dtype=bfloat16"),
        ({"masters": False, "dtype": "bfloat16", "lora": 4}, r"run\.masters has no effect: adapters are in"),
        ({"offload": "activations", "device": "cpu"}, r"run\.offload has no effect: the run is on a CPU"),
        ({"offload": "activations", "device": "cuda", "recompute": "always"}, r"keeps no activations"),
        ({"offload": "all"}, r"run\.offload"),
    ],
)
def test_what_would_save_nothing_is_refused(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(PanoplyError, match=words):
        pp.plan("grpo", model="fresh", **choices)


def test_control_has_nothing_to_send_away() -> None:
    with pytest.raises(PanoplyError, match=r"run\.offload has no effect: only a language model's"):
        pp.plan("ppo", "cartpole", settings={"run.offload": "activations"})
    with pytest.raises(PanoplyError, match=r"bits"):
        pp.plan("grpo", model="fresh", settings={"update.bits": 4})
    with pytest.raises(PanoplyError, match=r"places weights itself, so that run\.masters=false"):
        learner_of("natural")


@pytest.mark.parametrize(
    ("method", "world", "settings", "words"),
    [
        ("ppo", "cartpole", {"run.recompute": "always"}, r"run\.recompute has no effect: only a language"),
        ("ppo", "cartpole", {"run.dtype": "bfloat16"}, r"run\.dtype has no effect: networks of control are"),
        ("dqn", "cartpole", {"run.micro_tokens": 64}, r"run\.micro_tokens has no effect: batches are drawn"),
    ],
)
def test_what_saves_a_language_model_memory_does_nothing_in_control(
    method: str, world: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(PanoplyError, match=words):
        pp.plan(method, world, settings=settings)
    pp.plan(method, world, settings={"run.dtype": "float32"})


def learner_of(update: str) -> None:
    from panoply.loops.learner import Learner
    from panoply.registry import find_part

    method = on_policy(update=find_part("update", update)())
    Learner(Tabular(0), method, total_steps=1, micro_tokens=9, masters=False)


def test_a_plan_counts_what_is_saved() -> None:
    plain = cost(pp.plan("grpo", model="fresh", dtype="bfloat16"))
    small = cost(pp.plan("grpo", model="fresh", dtype="bfloat16", masters=False, settings={"update.bits": 8}))
    assert sum(plain.memory_bytes.values()) == 18 * plain.parameters
    each = sum(small.memory_bytes.values()) / plain.parameters
    assert each == pytest.approx(2 + 4 + 2 * (1 + 4 / 256), rel=1e-6)


def tiny_policy() -> Any:
    from panoply.policies.build import open_policy
    from panoply.worlds.text.chain import Chain

    return open_policy("fresh", Chain(operations=2), 0, "cpu")


def _rows(policy: Any) -> Any:
    from panoply.rollout.text import Collector
    from panoply.worlds.text.chain import Chain

    return pp.plan("grpo", settings={"sample.prompts": 2, "sample.group": 2}).method.slots()["sample"](
        Collector(Chain(operations=2), policy, seed=0)
    )
