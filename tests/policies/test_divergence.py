"""Divergences of whole distributions: by hand, by torch's own, by numerical integrals, and over vocabularies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_scoring import ACTIONS, ALLOWED, CUT, VOCAB, inputs
from torch import Tensor, distributions
from torch.autograd import gradcheck

from panoply.errors import PanoplyError
from panoply.experience import Ragged
from panoply.policies import divergence
from panoply.policies.heads import Categorical, Gaussian
from panoply.policies.scoring import Head
from panoply.worlds.control.world import Box

ARM = Box((2,), (-2.0, 0.0), (2.0, 1.0))


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_kl_by_hand_and_which_way() -> None:
    """KL((½,½)‖(¼,¾)) = ½·log 2 + ½·log ⅔; the other way round it is ¼·log ½ + ¾·log 3/2."""
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert float(divergence.categorical(p, q)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert float(divergence.categorical(q, p)) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_tsallis_by_hand() -> None:
    """q = 2: ln_2 x = x − 1, so E[π − π′] = ½·(½ − ¼) + ½·(½ − ¾) = 0, and from the other side ¼."""
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert float(divergence.categorical(p, q, 2.0)) == pytest.approx(0.0, abs=1e-7)
    assert float(divergence.categorical(q, p, 2.0)) == pytest.approx(0.25 * -0.25 + 0.75 * 0.25)
    near = divergence.categorical(q, p, 1.0001)
    assert float(near) == pytest.approx(float(divergence.categorical(q, p)), rel=1e-3)


def test_what_cannot_be_drawn_counts_nothing() -> None:
    head = Categorical((3,))
    mask = torch.tensor([[True, True, False]])
    out = torch.tensor([[1.0, 2.0, 5.0]], requires_grad=True)
    distribution, other = (
        head.distribution(out.log(), mask, None),
        head.distribution(torch.zeros(1, 3), mask, None),
    )
    found = head.divergence(distribution, other, 1.0)
    assert found.item() == pytest.approx(math.log(2 / 3) / 3 + 2 * math.log(4 / 3) / 3)
    (slope,) = torch.autograd.grad(found, out)
    assert slope.isfinite().all()
    assert slope[0, 2] == 0


@pytest.mark.parametrize("q", [1.0, 1.5])
def test_side_by_side_is_the_joint(q: float) -> None:
    """Two choices of 2 and 3 are one of 6."""
    head, rows = Categorical((2, 3)), [normals(4, 5, seed=s) for s in range(2)]
    distributions = [head.distribution(out, None, None) for out in rows]
    joint = [
        (distribution[:, :2, None] + distribution[:, None, 2:]).flatten(1) for distribution in distributions
    ]
    torch.testing.assert_close(head.divergence(*distributions, q), divergence.categorical(*joint, q))


def test_temperature_belongs_to_the_law() -> None:
    temperature = torch.tensor([0.5, 2.0])
    for head in (Categorical((3,)), Gaussian(ARM, False, "state", 0.0)):
        out = normals(2, head.width)
        hot, plain = head.distribution(out, None, temperature), head.distribution(out, None, None)
        assert (head.divergence(hot, plain, 1.0) > 1e-3).all()


@pytest.mark.parametrize("squash", [False, True])
def test_normals_against_torch(squash: bool) -> None:
    """Squashing both alike changes nothing."""
    head = Gaussian(ARM, squash, "state", 0.0)
    mine, theirs = (normals(5, 4, seed=s) * 0.5 for s in range(2))
    found = head.divergence(head.distribution(mine, None, None), head.distribution(theirs, None, None), 1.0)
    plain = [distributions.Normal(o[:, :2], o[:, 2:].exp()) for o in (mine, theirs)]
    torch.testing.assert_close(found, distributions.kl_divergence(*plain).sum(-1))


@pytest.mark.parametrize("q", [1.0, 1.3, 2.0])
def test_normals_against_an_integral(q: float) -> None:
    x = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    mean, log_std, mean2, log_std2 = torch.tensor([0.3, -0.2, -0.4, 0.1], dtype=torch.float64)
    p, other = (distributions.Normal(m, s.exp()).log_prob(x) for m, s in ((mean, log_std), (mean2, log_std2)))
    slow = torch.trapezoid(p.exp() * (divergence.q_log(p, q) - divergence.q_log(other, q)), x)
    found = divergence.normal(mean[None], log_std[None], mean2[None], log_std2[None], q)
    assert float(found) == pytest.approx(float(slow), rel=1e-8)


def test_a_squashed_one_has_no_tsallis() -> None:
    head = Gaussian(ARM, True, "state", 0.0)
    distribution = head.distribution(torch.zeros(1, 4), None, None)
    with pytest.raises(PanoplyError, match="set its divergence to sampled, or q to 1"):
        head.divergence(distribution, distribution, 1.5)


# ------------------------------------------------------------------ over a vocabulary


def slow_tokens(
    hidden: Tensor, weight: Tensor, softcap: float, temperature: Tensor | None, allowed: Ragged | None
) -> Tensor:
    logits = hidden @ weight.t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits = logits if temperature is None else logits / temperature[:, None]
    if allowed is not None:
        mask = torch.tensor([[bool(ids) and v not in ids for v in range(VOCAB)] for ids in allowed.tolist()])
        logits = logits.masked_fill(mask, -torch.inf)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("q", [1.0, 1.5])
def test_tokens(chunk: int, restricted: bool, softcap: float, q: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(divergence, "chunk_of", lambda *_: chunk)
    hidden, weight, temperature = inputs()
    other, other_weight = hidden.detach() + 0.3, weight.detach() * 0.8
    how = (temperature, ALLOWED) if restricted else (None, None)
    mine, theirs = (slow_tokens(h, w, softcap, *how) for h, w in ((hidden, weight), (other, other_weight)))
    expected = divergence.categorical(mine, theirs, q)
    found = divergence.of_tokens(hidden, weight, other, other_weight, Head(*how, softcap), q)
    torch.testing.assert_close(found, expected)
    mix = torch.linspace(-1, 2, len(hidden), dtype=torch.float64)
    slopes = [torch.autograd.grad((value * mix).sum(), [hidden, weight]) for value in (found, expected)]
    torch.testing.assert_close(*slopes)


def test_tokens_by_finite_differences() -> None:
    hidden, weight, temperature = inputs()
    head, other, other_weight = Head(temperature, None, 2.0), hidden.detach() * 0.9, weight.detach() + 0.1
    assert gradcheck(
        lambda h, w: divergence.of_tokens(h, w, other, other_weight, head, 1.5), (hidden, weight)
    )


@pytest.mark.parametrize("q", [1.0, 1.5])
def test_what_a_threshold_leaves_is_one_set_for_both(q: float) -> None:
    """By the policy's own threshold: cut each by itself, what one has and the other lacks would be past bounds."""
    hidden, weight, temperature = inputs()
    other = weight.detach() + 0.3 * normals(*weight.shape, seed=5)
    head = Head(temperature, None, 0.0, CUT, ACTIONS)
    rows = slice(0, len(hidden))
    barred = head.barred(head.whole_logits(hidden, weight, rows)[0], rows)
    assert barred is not None
    assert barred.any()
    assert not torch.equal(barred, head.barred(head.whole_logits(hidden, other, rows)[0], rows))
    logp, then = (
        ((hidden @ w.t()) / temperature[:, None]).masked_fill(barred, -torch.inf).log_softmax(-1)
        for w in (weight, other)
    )
    expected = divergence.categorical(logp, then, q)
    found = divergence.of_tokens(hidden, weight, hidden.detach(), other, head, q)
    torch.testing.assert_close(found, expected)
    assert found.abs().max() < 10
    mix = torch.linspace(-1, 2, len(found), dtype=torch.float64)
    frozen = divergence.categorical(logp, then.detach(), q)
    theirs = torch.autograd.grad((frozen * mix).sum(), [weight], retain_graph=True)
    ours = torch.autograd.grad((found * mix).sum(), [weight])
    torch.testing.assert_close(ours, theirs)
