"""SePPO's loss at its corners, its pool of checkpoints, and a diffusion small enough to check."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.methods.preferences import seppo as of_seppo
from panoply.methods.preferences.seppo import (
    ARMS,
    MODES,
    STEPS,
    Denoiser,
    Pool,
    Ring,
    Settings,
    compared,
    energy_distance,
    flips,
    looked_at,
    pair_loss,
    pretrained,
    schedule,
    seppo,
    tuned,
)
from panoply.seeds import drawing

THETA = (torch.tensor([0.3, 0.9, 0.5]), torch.tensor([0.4, 0.6, 0.2]))
FIXED = (torch.tensor([0.5, 0.6, 0.5]), torch.tensor([0.5, 0.5, 0.5]))


def test_the_sign_follows_who_models_the_winner_better() -> None:
    assert flips(THETA[0], FIXED[0]).tolist() == [1, -1, 0]
    assert flips(THETA[0], FIXED[0], "indicator").tolist() == [1, 0, 0]
    assert flips(THETA[0], FIXED[0], "always loser").tolist() == [1, 1, 1]


def test_the_loss_by_hand() -> None:
    """Δ(x^w) = −0.2, 0.3, 0; Δ(x^r) = −0.1, 0.1, −0.3; β = 2."""
    gaps = {
        "seppo": (-0.2 + 0.1, 0.3 + 0.1, 0.0),
        "indicator": (-0.2 + 0.1, 0.3, 0.0),
        "always loser": (-0.2 + 0.1, 0.3 - 0.1, 0.3),
    }
    for arm, of in gaps.items():
        wanted = sum(math.log1p(math.exp(2 * gap)) for gap in of) / 3
        assert float(pair_loss(THETA, FIXED, 2.0, arm)) == pytest.approx(wanted)  # type: ignore[arg-type]


def leaves(*values: Tensor) -> tuple[Tensor, ...]:
    return tuple(value.clone().requires_grad_() for value in values)


def test_at_the_reference_only_the_winner_acts() -> None:
    """All gaps are 0 there: the gradient is β/2 on the winner's error and nothing on the rival's."""
    winner, rival = leaves(*FIXED)
    pair_loss((winner, rival), FIXED, 6.0).backward()  # type: ignore[no-untyped-call]
    assert winner.grad is not None
    assert rival.grad is not None
    assert winner.grad.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert rival.grad.tolist() == [0, 0, 0]


def test_neither_the_sign_nor_the_reference_has_a_gradient() -> None:
    """The slope on the winner is that of a fixed s: β·σ(β·gap), also where s would change beside it."""
    winner, rival, fixed_winner, fixed_rival = leaves(*THETA, *FIXED)
    pair_loss((winner, rival), (fixed_winner, fixed_rival), 2.0).backward()  # type: ignore[no-untyped-call]
    gap = torch.tensor([-0.1, 0.4, 0.0])
    slope = 2 * (2 * gap).sigmoid() / 3
    assert winner.grad is not None
    assert rival.grad is not None
    assert winner.grad.tolist() == pytest.approx(slope.tolist())
    assert rival.grad.tolist() == pytest.approx((slope * torch.tensor([-1.0, 1.0, 0.0])).tolist())
    assert fixed_winner.grad is None
    assert fixed_rival.grad is None
    assert not flips(winner, fixed_winner).requires_grad


def test_the_pool_keeps_the_last_checkpoints_frozen() -> None:
    with drawing("pool") as dice:
        model, pool = Denoiser(4), Pool(3)
        for value in range(5):
            torch.nn.init.constant_(model.net[0].bias, value)  # type: ignore[arg-type]
            pool.push(model)
        kept = [float(of.net[0].bias[0]) for of in pool.kept]
        assert kept == [2, 3, 4]
        assert not any(p.requires_grad for of in pool.kept for p in of.parameters())
        assert float(pool.choose("first", dice).net[0].bias[0]) == 0
        assert float(pool.choose("latest", dice).net[0].bias[0]) == 4
        drawn = [float(pool.choose("random", dice).net[0].bias[0]) for _ in range(60)]
    assert all(drawn.count(value) > 8 for value in (2, 3, 4))


def test_noise_is_added_and_taken_away() -> None:
    alpha, sigma = schedule(torch.tensor([0, 5, STEPS]))
    assert (alpha**2 + sigma**2).tolist() == pytest.approx([1, 1, 1])
    assert [float(alpha[0]), float(sigma[0])] == [1, 0]
    assert float(alpha[2]) < 0.05

    class Known(Denoiser):
        """Knows that all points are (1, −1)."""

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            alpha, sigma = schedule(t)
            return (x - alpha[:, None] * torch.tensor([1.0, -1.0])) / sigma[:, None]

    with drawing("known") as dice:
        model = Known()
        point = torch.tensor([[1.0, -1.0]]).repeat(9, 1)
        noise, t = torch.randn(9, 2, generator=dice), torch.arange(1, 10)
        assert float(model.error(point, t, noise).max()) < 1e-9
        assert float(model.error(point + 0.5, t, noise).min()) > 1e-3
        assert (model.sample(20, dice) - point[:1]).abs().max() < 1e-4


def test_ancestral_steps_keep_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Gaussian whose best denoiser is known: samples have its mean and, in many steps, its deviation."""
    monkeypatch.setattr(of_seppo, "STEPS", 200)

    class Gaussian(Denoiser):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            alpha, sigma = (of[:, None] for of in schedule(t))
            return sigma * (x - alpha * 0.5) / (alpha**2 * 0.3**2 + sigma**2)

    with drawing("gaussian") as dice:
        drawn = Gaussian().sample(2000, dice)
    assert drawn.mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.03)
    assert drawn.std(0).tolist() == pytest.approx([0.3, 0.3], abs=0.02)


def test_the_ring_and_how_samples_are_judged() -> None:
    ring = Ring((0, 2))
    assert ring.centres[2].tolist() == pytest.approx([0, 1.4], abs=1e-6)
    points = torch.tensor([[1.4, 0.3], [1.4, 0.5], [0.0, 1.1], [-1.4, 0.0]])
    assert ring.share(points) == 0.5
    with drawing("ring") as dice:
        assert ring.share(ring.draw(200, dice, winners=True)) == 1
        assert ring.share(ring.draw(800, dice)) == pytest.approx(2 / MODES, abs=0.06)
        one, two = ring.draw(500, dice, winners=True), ring.draw(500, dice, winners=True)
        assert abs(energy_distance(one, two)) < 0.02
        assert energy_distance(one, ring.draw(500, dice)) > 0.5
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    y = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    crossed = (1 + 3 + math.sqrt(5) + math.sqrt(13)) / 4
    assert energy_distance(x, y) == pytest.approx(2 * crossed - 2 - 2)


def test_training_draws_a_reference_with_every_checkpoint_and_shares_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = Ring.of(1001)
    model = pretrained(ring, 1001, updates=3, batch=8)
    chosen: list[str] = []
    seen: list[tuple[Tensor, Tensor]] = []
    whole = (Pool.choose, Denoiser.error)
    monkeypatch.setattr(
        Pool, "choose", lambda self, which, dice: (chosen.append(which), whole[0](self, which, dice))[1]
    )
    monkeypatch.setattr(
        Denoiser, "error", lambda self, x, t, e: (seen.append((t, e)), whole[1](self, x, t, e))[1]
    )
    of = Settings(updates=6, every=3, batch=4, winners=10)
    monkeypatch.setattr(of_seppo, "looked_at", lambda *_: {"good": 0.0, "distance": 0.0})
    before = [p.clone() for p in model.parameters()]
    assert len(tuned(model, ring, 1001, "seppo", of)) == 2
    assert chosen == ["random", "random"]
    assert len(seen) == 4 * 6
    for at in range(0, 24, 4):
        own, own_rival, fixed, fixed_rival = seen[at : at + 4]
        assert own[1].equal(fixed[1])
        assert own_rival[1].equal(fixed_rival[1])
        assert not own[1].equal(own_rival[1])
        assert all(of[0].equal(own[0]) for of in (own_rival, fixed, fixed_rival))
    assert all(mine.equal(kept) for mine, kept in zip(model.parameters(), before, strict=True)), (
        "a copy is trained"
    )


@pytest.fixture
def at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_seppo, "looked_at", partial(looked_at, count=50))


@pytest.mark.usefixtures("at_a_glance")
def test_the_first_step_is_the_same_whatever_becomes_of_rivals() -> None:
    """θ is the reference, so SePPO and its indicator begin alike; imitation needs no rivals at all."""
    ring = Ring.of(1001)
    model = pretrained(ring, 1001, updates=20, batch=32)
    of = Settings(updates=1, every=1, batch=16)
    one, two, three = (tuned(model, ring, 1001, arm, of) for arm in ("seppo", "indicator", "always loser"))
    assert one == two
    assert one != three


@pytest.mark.usefixtures("at_a_glance")
def test_what_is_printed_and_refused() -> None:
    table = compared(1001, Settings(updates=4, every=2, batch=8, winners=20), start=3)
    assert list(table) == list(ARMS)
    assert all(set(row) == {"good", "distance", "rises"} and row["rises"] >= 0 for row in table.values())
    model = pretrained(Ring.of(1001), 1001, updates=3)
    assert looked_at(model, Ring.of(1001), 1, 50) == looked_at(model, Ring.of(1001), 1, 50)
    for settings, said in (
        ({"beta": 0.0}, "beta and lr are above 0"),
        ({"pool": 0}, "are at least 1"),
        ({"updates": 10}, "updates is at least every, 30"),
        ({"reference": "latest", "pool": 3}, "pool has no effect"),
    ):
        with pytest.raises(PanoplyError, match=said):
            seppo(**settings)  # type: ignore[arg-type]
