"""What top-k, top-p and min-p leave, what is recorded of it, and how it is scored under the same and other weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.policies.decoder import Decoder
from panoply.policies.scoring import score_actions
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.rollout import cuts
from panoply.rollout.cuts import FARTHEST, LISTED, farthest, ranks, separated, truncated
from panoply.rollout.engine import Rollouts, Sampling, TextEngine, View
from panoply.rollout.sampling import draw, stream, uniforms
from tests.rollout.test_engine import make_model, make_requests, same

LARGE = 300
CUTS = {
    "top_p": Sampling(max_tokens=9, top_p=0.95, temperature=3.0),
    "top_k": Sampling(max_tokens=9, top_k=100, temperature=3.0),
    "min_p": Sampling(max_tokens=9, min_p=0.2, temperature=3.0),
    "counted": Sampling(
        max_tokens=9, presence_penalty=1.0, frequency_penalty=0.5, top_p=0.9, temperature=3.0
    ),
    "all": Sampling(max_tokens=9, top_k=200, top_p=0.88, min_p=1e-3, temperature=3.0, repetition_penalty=1.2),
}


def policy_of(model: Decoder) -> TextPolicy:
    return TextPolicy(model, Tokenizer.of_characters("ab"))


def experience(sampled: Rollouts) -> Experience:
    return Experience(sampled.decisions, sampled.context)


def sampled(name: str, model: Decoder | None = None) -> tuple[Decoder, Rollouts]:
    model = model or make_model(vocab_size=LARGE)
    return model, TextEngine(model).generate(make_requests(6, 3), CUTS[name], entropy=True)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (None, 0.9, 0.0), (None, 1.0, 0.2), (9, 0.8, 0.1)]
)
def test_the_set_is_the_one_that_sorting_gives(top_k: int | None, top_p: float, min_p: float) -> None:
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    inside = truncated(logits, top_k, top_p, min_p)
    for row, marked in zip(logits.double(), inside, strict=True):
        order = row.argsort(descending=True)[:top_k]
        p = row[order].softmax(0)
        reached = p.cumsum(0) - p < top_p
        enough = row[order] >= row.max() + torch.tensor(min_p, dtype=torch.float64).log()
        assert marked.nonzero().flatten().tolist() == order[reached & enough].sort().values.tolist()


def test_ties_are_kept_together() -> None:
    logits = torch.tensor([[2.0, 1.3, 1.3, 1.3 + 1e-6, 0.0, -torch.inf]])
    assert truncated(logits, 2, 1.0).int().tolist() == [[1, 1, 1, 1, 0, 0]]
    assert truncated(logits, None, 0.5).int().tolist() == [[1, 1, 1, 1, 0, 0]]
    assert truncated(logits, None, 1.0, 0.45).int().tolist() == [[1, 1, 1, 1, 0, 0]]
    assert truncated(logits, 99, 1.0).int().tolist() == [[1, 1, 1, 1, 1, 0]]


def test_ranks_are_in_the_order_of_logits_and_reach_far() -> None:
    logits = torch.tensor([[0.0, -1e-3, -1e-2, -30.0, -254.0, -1e5, -torch.inf]])
    found = ranks(logits)[0].tolist()
    assert found == sorted(found)
    assert len(set(found)) == len(found)
    assert found[-2:] == [FARTHEST, FARTHEST + 1]
    assert farthest(0.0) == FARTHEST
    assert farthest(0.5) == int(ranks(torch.tensor([[0.0, -0.6931472]]))[0, 1])


def test_the_cut_separates_and_the_mass_is_what_it_leaves() -> None:
    logits = 2 * torch.randn(30, 200, generator=torch.Generator().manual_seed(2))
    inside = truncated(logits, None, 0.9)
    cut, kept = separated(logits, inside)
    logp = logits.log_softmax(-1)
    assert torch.equal(logp >= cut[:, None], inside)
    torch.testing.assert_close(kept, (logp.exp() * inside).sum(-1))
    assert (kept >= 0.9 - 1e-5).all()
    whole = separated(logits, torch.ones_like(inside))
    assert (whole[0] == -torch.inf).all()
    assert (whole[1] == 1).all()


@pytest.mark.parametrize("name", CUTS)
def test_what_is_recorded_is_bounded_and_scores_as_it_was_drawn(name: str) -> None:
    model, found = sampled(name)
    decisions = found.decisions
    lengths, cut = decisions.ragged("allowed").lengths, decisions["cut"]
    assert int(lengths.max()) <= LISTED
    assert torch.equal(lengths == 0, cut > -torch.inf)
    assert (cut > -torch.inf).float().mean() > 0.3
    assert (decisions["kept"] < 1).all()
    scores = policy_of(model).score(experience(found), frozenset({"entropy"}))
    torch.testing.assert_close(scores["logp"].detach(), decisions["logp"], atol=2e-5, rtol=1e-5)
    assert (scores["entropy"] < decisions["entropy"] + 1e-4).all()  # the recorded one is before the cut


def test_a_long_mask_is_listed_and_cut_as_well() -> None:
    def even(view: View) -> Tensor:
        return (torch.arange(LARGE) % 2 == 0).expand(len(view.row), -1)

    model = make_model(vocab_size=LARGE)
    found = TextEngine(model).generate(make_requests(), CUTS["top_p"], mask=even)
    both = found.decisions["cut"] > -torch.inf
    assert both.any()
    assert set(found.decisions.ragged("allowed").lengths[both].tolist()) == {LARGE // 2}
    scores = policy_of(model).score(experience(found))
    torch.testing.assert_close(scores["logp"].detach(), found.decisions["logp"], atol=2e-5, rtol=1e-5)


def test_no_batch_or_chunk_changes_what_is_drawn_or_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    # In float64, where rounding is too small to decide whether a sum has reached its goal.
    model, found = sampled("all", make_model(vocab_size=LARGE).double())
    narrow = TextEngine(model, slots=3, prefill_tokens=9).generate(
        make_requests(6, 3), CUTS["all"], entropy=True
    )
    assert same(found, narrow)
    torch.testing.assert_close(found.decisions["cut"], narrow.decisions["cut"], atol=1e-4, rtol=1e-4)
    assert found.decisions.ragged("allowed").tolist() == narrow.decisions.ragged("allowed").tolist()
    policy, rows = policy_of(model), experience(found)
    whole = policy.score(rows)["logp"]
    monkeypatch.setattr("panoply.policies.scoring.CHUNK_ELEMENTS", {"cpu": 1})
    torch.testing.assert_close(policy.score(rows)["logp"], whole, atol=1e-5, rtol=1e-5)
    some = rows.take(torch.arange(1, len(rows), 3))
    torch.testing.assert_close(policy.score(some)["logp"], whole[1::3], atol=1e-5, rtol=1e-5)


def test_the_score_of_a_cut_distribution_has_mean_zero() -> None:
    """Which the gradient of the uncut log-probability has not: a bias that no baseline removes."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(90, 6, generator=generator, dtype=torch.float64)
    logits = hidden @ weight.t()
    inside = truncated(logits, None, 0.8)
    cut, _ = separated(logits, inside)
    p = logits.masked_fill(~inside, -torch.inf).softmax(-1)[0]
    ids = inside[0].nonzero().flatten()

    def mean(of: Tensor | None) -> float:
        states = hidden.expand(len(ids), -1).clone().requires_grad_()
        logp = score_actions(states, weight, ids, cut=None if of is None else of.expand(len(ids)))["logp"]
        (slope,) = torch.autograd.grad((logp * p[ids]).sum(), [states])
        return float(slope.sum(0).norm())

    assert mean(cut) < 1e-12
    assert mean(None) > 0.1


def test_under_other_weights_the_error_is_what_crossed_the_threshold() -> None:
    """log r − log r of the recorded set is log p′(S) − log p′(S′), and both masses are near the recorded one."""
    generator = torch.Generator().manual_seed(4)
    then = 1.5 * torch.randn(400, 300, generator=generator, dtype=torch.float64)
    now = then + 0.05 * torch.randn(400, 300, generator=generator, dtype=torch.float64)
    drawn = draw(then.float(), uniforms(stream(torch.arange(400)), torch.arange(400)), Sampling(top_p=0.9))
    assert drawn.cut is not None
    assert drawn.kept is not None
    inside, action = truncated(then, None, 0.9), drawn.action
    unit = torch.eye(300, dtype=torch.float64)
    ours = score_actions(now, unit, action, cut=drawn.cut)["logp"]
    exact = now.masked_fill(~inside, -torch.inf).log_softmax(-1).gather(1, action[:, None])[:, 0]
    p, later = then.softmax(-1), now.softmax(-1)
    recomputed = now.log_softmax(-1) >= drawn.cut[:, None]
    recomputed.scatter_(1, action[:, None], True)
    masses = [(later * s).sum(-1) for s in (inside, recomputed)]
    torch.testing.assert_close(ours - exact, masses[0].log() - masses[1].log())
    variation = (p - later).abs().sum(-1) / 2
    assert ((masses[0] - drawn.kept).abs() <= variation + 1e-6).all()
    moved = exact - drawn.logp
    assert (ours - exact).square().mean() < (0.1**2) * moved.square().mean()
    assert ours.isfinite().all()


@pytest.mark.parametrize("change", ["noise", "sharper", "flatter", "another"])
@pytest.mark.parametrize("by", [Sampling(top_p=0.9), Sampling(top_k=120), Sampling(min_p=0.01)])
def test_a_ratio_is_off_by_no_more_than_what_crossed(by: Sampling, change: str) -> None:
    """Also where all probabilities move to one side of the threshold together, or have little to do with the old."""
    generator = torch.Generator().manual_seed(5)
    then, other = 1.2 * torch.randn(2, 200, LARGE, generator=generator, dtype=torch.float64)
    now = {"noise": then + 0.1 * other, "sharper": 1.5 * then, "flatter": then / 1.5, "another": other}[
        change
    ]
    drawn = draw(then.float(), uniforms(stream(torch.arange(200)), torch.arange(200)), by)
    assert drawn.cut is not None
    long = drawn.cut > -torch.inf  # the other sets are listed
    assert long.float().mean() > 0.5
    then, now, action, cut = (
        x[long] for x in (then, now, drawn.action[:, None], drawn.cut.double()[:, None])
    )
    inside = truncated(then, by.top_k, by.top_p, by.min_p)
    p, later = then.log_softmax(-1), now.log_softmax(-1)
    crossed = inside ^ (later >= cut).scatter(1, action, True)
    assert crossed.any()
    ours = score_actions(now, torch.eye(LARGE, dtype=torch.float64), action[:, 0], cut=cut[:, 0])["logp"]
    exact = now.masked_fill(~inside, -torch.inf).log_softmax(-1).gather(1, action)[:, 0]
    mass = [(later.exp() * s).sum(-1) for s in (crossed, inside, inside ^ crossed)]
    assert ((ours - exact).abs() <= mass[0] / torch.minimum(mass[1], mass[2]) + 1e-9).all()
    assert (crossed <= ((p >= cut) ^ (later >= cut))).all()


def test_an_action_is_in_its_own_set_whatever_the_weights_became() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[5.0], [0.0], [-5.0]])
    found = score_actions(hidden, weight, torch.tensor([2]), entropy=True, cut=torch.tensor([-0.1]))
    torch.testing.assert_close(found["logp"], torch.tensor([-10.0]), atol=1e-3, rtol=0)
    torch.testing.assert_close(found["entropy"], torch.tensor([11 * 4.54e-5]), atol=1e-5, rtol=0)


def test_penalties_are_recorded_as_precisely_as_they_acted() -> None:
    model = make_model(vocab_size=LARGE).double()
    sampling = Sampling(max_tokens=9, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=-0.7)
    found = TextEngine(model).generate(make_requests(), sampling)
    scores = policy_of(model).score(experience(found))
    torch.testing.assert_close(scores["logp"].detach(), found.decisions["logp"], atol=1e-12, rtol=1e-12)


def test_a_container_may_have_less_memory_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for said, least in (("4096\n", 4096), ("max\n", whole), (f"{2 * whole}\n", whole), (None, whole)):
        file = tmp_path / f"{said and said.strip()}"
        if said is not None:
            file.write_text(said)
        monkeypatch.setattr(cuts, "CONTAINERS", (str(file),))
        assert cuts.most_listed() == least // 4


@pytest.mark.parametrize("masked", [True, False])
def test_lists_that_would_fill_the_memory_are_refused(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(view: View) -> Tensor:
        return torch.arange(LARGE).expand(len(view.row), -1) > 9

    monkeypatch.setattr(cuts, "most_listed", lambda: 8 * LARGE)
    engine, few = TextEngine(make_model(vocab_size=LARGE)), Sampling() if masked else Sampling(top_k=50)
    ids = "290 each.* let masks allow less" if masked else "50 each.* leave out top_k, top_p and min_p"
    with pytest.raises(PanoplyError, match=f"ids that could be drawn take 0.0 GiB after .*{ids}"):
        engine.generate(make_requests(), few, mask=late if masked else None)
