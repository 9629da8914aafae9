"""Running out of memory, and float32 masters of narrow weights."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import Tabular, learner, on_policy, ragged
from torch import Tensor, nn

import panoply as pp
from panoply.errors import DeviceError, PanoplyError, machine_errors
from panoply.experience import Experience, Ragged, Table
from panoply.loops.learner import Learner
from panoply.loops.memory import Room, fitting, models_of
from panoply.loops.micro_batches import fresh_tokens, tokens
from panoply.loops.models import Together
from panoply.loops.mover import SCALE, Masters, Mover
from panoply.loops.seat import Seat
from panoply.lora import Lora
from panoply.policies.build import open_policy
from panoply.policies.lora import add_lora
from panoply.policies.value import ValueModel
from panoply.rollout.text import Collector
from panoply.slots.update.optimisers import adam
from panoply.worlds.text.chain import Chain


class Cramped(Tabular):
    """Runs out of memory on more than `room` rows, half-way through a pass."""

    room = 10**9

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        if len(experience) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().score(experience, needs)


def test_out_of_memory_halves_the_micro_batches_and_keeps_the_gradient() -> None:
    made = ragged()
    expected = learner(Tabular(), on_policy()).gradient(made)
    policy: Any = Cramped()
    held = learner(policy, on_policy())
    policy.room = 6
    with pytest.warns(UserWarning, match="Out of memory: going on with micro-batches of"):
        found = held.gradient(made)
    assert held.room.tokens < 10**9
    for name, slope in expected.items():
        torch.testing.assert_close(found[name], slope, rtol=1e-12, atol=0)


def test_a_sequence_that_does_not_fit_is_said() -> None:
    policy: Any = Cramped()
    held = learner(policy, on_policy())
    policy.room = 0
    with (
        pytest.warns(UserWarning, match="going on"),
        pytest.raises(PanoplyError, match="cannot be split further"),
    ):
        held.gradient(ragged())


def test_what_cannot_be_split_is_recomputed_before_giving_up() -> None:
    policy: Any = Cramped()
    policy.model = SimpleNamespace(checkpointing=False)
    held = learner(policy, on_policy())
    policy.room = 0
    with pytest.warns(UserWarning, match="computed again"), pytest.raises(DeviceError):
        held.gradient(ragged())
    assert policy.model.checkpointing


def test_a_shared_prefix_is_counted_once() -> None:
    tokens = Ragged.from_lists([[0] * n for n in (5, 7, 4, 9)])
    shared = {"prompt": torch.tensor([3, 3, 8, 3]), "shared": torch.tensor([4, 4, 2, 4])}
    assert fresh_tokens(Table({"tokens": tokens, **shared})).tolist() == [5, 3, 4, 5]
    assert fresh_tokens(Table({"tokens": tokens})).tolist() == [5, 7, 4, 9]


def test_what_a_driver_says_becomes_a_sentence() -> None:
    with (
        pytest.raises(DeviceError, match=r"GPU failed: CUDA out of memory\. .*resumed"),
        machine_errors(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
    with pytest.raises(RuntimeError, match="a bug"), machine_errors():
        raise RuntimeError("a bug")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_keep_steps_too_small_for_the_weights(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    masters = Masters({"w": weight, "wide": nn.Parameter(torch.ones(1))})
    optimiser = torch.optim.SGD(masters.moving.values(), lr=1e-3)
    address = weight.data_ptr()
    for _ in range(16):
        masters.clear()
        for _ in range(2):
            weight.grad = torch.full_like(weight, masters.scale / 2)
            masters.collect()
        assert not masters.overflowed(0.0)
        masters.unscale()
        optimiser.step()
        masters.publish()
    torch.testing.assert_close(masters.moving["w"].detach(), torch.full((3,), 1 - 16e-3))
    assert weight.data_ptr() == address
    assert torch.equal(weight.detach(), masters.moving["w"].detach().to(dtype))
    again = Masters({"w": nn.Parameter(torch.zeros(3, dtype=dtype))})
    again.load("w", masters.state()["w:master"])
    assert torch.equal(again.moving["w"], masters.moving["w"])


def test_an_overflow_of_float16_halves_the_scale() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    masters = Masters({"w": weight})
    weight.grad = torch.full_like(weight, float("inf"))
    masters.collect()
    before = masters.scale
    assert masters.overflowed(1.0)
    assert masters.scale == before / 2
    assert not masters.overflowed(float("nan")), "a loss that is not finite is no matter of scale"


def test_the_scale_of_float16_is_saved_and_taken_up() -> None:
    movers = [
        Mover(Masters({"w": nn.Parameter(torch.ones(3, dtype=torch.float16))}), adam(lr=0.1), total_steps=2)
        for _ in range(2)
    ]
    movers[0].masters.scale /= 8
    movers[1].load_state(movers[0].state())
    assert movers[1].masters.scale == movers[0].masters.scale < SCALE
    wide = Mover(Masters({"w": nn.Parameter(torch.ones(3))}), adam(lr=0.1), total_steps=2)
    assert not wide.state()


class Fake:
    """A GPU on which a pass takes 100 bytes, and 10 more a token."""

    def __init__(self, policy: Any, left: int):
        self.policy, self.free, self.passes = policy, left, 0

    def used(self, run: Any) -> int:
        self.policy.seen.clear()
        run()
        self.passes += 1
        (rows,) = self.policy.seen
        return 100 + (2 if self.policy.model.checkpointing else 10) * rows

    def left(self) -> int:
        return self.free


class Counted(Tabular):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.model = SimpleNamespace(checkpointing=False)

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        self.seen.append(tokens(experience))
        return super().score(experience, needs)


@pytest.fixture
def small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panoply.loops.memory.TRIAL", 4)


def sized(left: int, **options: Any) -> tuple[Counted, Learner, dict[str, Tensor]]:
    """A learner after its first gradient, whose optimiser will take two more numbers a parameter."""
    policy = Counted()
    held = Learner(policy, on_policy(update=adam()), total_steps=10, micro_tokens=10**9, **options)
    coming = 2 * sum(p.nbytes for p in held.parameters.values())
    assert held.mover.will_keep() == coming
    held.room.meter = Fake(policy, left + coming)
    return policy, held, held.gradient(ragged())


def test_two_sizes_tell_what_fits() -> None:
    # 100 bytes and 10 a token: of 1,000 bytes 900 may be used, 800 of them by tokens.
    assert fitting((4, 8), (140, 180), 1000) == 80
    assert fitting((4, 8), (140, 140), 1000) == 760 + 4 * 1  # no growth is taken for a byte a token


@pytest.mark.usefixtures("small_trials")
def test_micro_batches_are_sized_before_the_first_pass_and_give_the_same_gradient() -> None:
    expected = learner(Tabular(), on_policy()).gradient(ragged())
    with pytest.warns(UserWarning, match="room for micro-batches of 8 tokens"):
        policy, held, found = sized(200)  # 0.9 · 200 − 100 is 8 times 10
    assert held.room.tokens == 8
    assert max(policy.seen[1:]) <= 8  # the first is the second trial
    assert not policy.model.checkpointing
    for name, slope in expected.items():
        torch.testing.assert_close(found[name], slope, rtol=1e-12, atol=0)
    assert held.room.meter is None


@pytest.mark.usefixtures("small_trials")
def test_where_all_fits_nothing_changes() -> None:
    _, held, _ = sized(10**6)
    assert held.room.tokens == 10**9


@pytest.mark.usefixtures("small_trials")
def test_blocks_are_recomputed_where_a_sequence_would_not_fit() -> None:
    with pytest.warns(UserWarning, match="room for micro-batches"):
        policy, _, _ = sized(130)
    assert policy.model.checkpointing
    with pytest.warns(UserWarning, match="room for micro-batches"):
        policy, _, _ = sized(130, recompute="never")
    assert not policy.model.checkpointing
    policy, _, _ = sized(10**6, recompute="always")
    assert policy.model.checkpointing


def kept_bytes(scorer: Any, rows: Experience, needs: frozenset[str]) -> int:
    """What a pass leaves for its backward pass, weights included."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scorer.score(rows, needs)
    return sum(kept.values())


@pytest.mark.parametrize("made", ["policy", "adapters", "through PEFT", "judge", "together"])
def test_every_model_of_a_pass_is_computed_again(made: str) -> None:
    """Also the one that a judge is made of, a critic's that learns with a policy, and one that PEFT has wrapped."""
    world = Chain(operations=2)

    def fresh() -> Any:
        return open_policy("fresh", world, 0, "cpu")

    policy, needs = fresh(), frozenset[str]()
    rows = Collector(world, policy, seed=0).episodes([world.task("train", i) for i in range(8)])
    scorer: Any = policy
    if made == "through PEFT":
        pytest.importorskip("peft")
    if made in ("adapters", "through PEFT"):
        scorer = add_lora(policy, 4, settings=Lora(dora=made == "through PEFT"))
    elif made != "policy":
        scorer = critic = ValueModel.of(fresh())
        if made == "together":
            scorer, needs = Together(policy, {"critic": critic}), frozenset({"value"})
    whole = kept_bytes(scorer, rows, needs)
    held = [len(models_of(scorer)), *(model.checkpointing for model in models_of(scorer))]
    assert held == [2, False, False] if made == "together" else [1, False]
    Room(10**9, models_of(scorer), "always", torch.device("cpu"))
    weights = sum(p.nbytes for p in dict(scorer.named_parameters()).values())
    assert kept_bytes(scorer, rows, needs) < weights + (whole - weights) / 2


def test_critics_save_memory_as_their_policy_does() -> None:
    plan = pp.plan("ppo", "chain", model="fresh", settings={"run.recompute": "always"})
    plan = dataclasses.replace(plan, options=dataclasses.replace(plan.options, offload="activations"))
    seat = Seat(plan, plan.world())
    critic = seat.models.learners["critic"]
    assert critic.offload == "activations"
    assert [model.checkpointing for model in critic.room.models] == [True]
    weights = {p.untyped_storage().data_ptr() for p in seat.models.held["critic"].model.trunk.parameters()}
    assert weights <= {p.untyped_storage().data_ptr() for p in critic._read()}
