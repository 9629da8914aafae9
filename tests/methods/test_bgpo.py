"""BGPO: a bound that holds and touches, masks that are the same for both policies, and a model that fills them in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny import bare, metrics, resume
from torch import Tensor

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience, Table
from panoply.methods.reasoning_data.bgpo import (
    bgpo,
    denoised,
    denoising,
    elbo_ratio,
    lower_bound,
    masked,
    masked_demonstrations,
    measure,
)
from panoply.policies.build import open_policy
from panoply.policies.masked import MaskedPolicy
from panoply.rollout.denoising import Denoiser
from panoply.rollout.requests import Request
from panoply.rollout.sampling import Sampling
from panoply.rollout.text import Collector
from panoply.worlds.text.digits import Digits

SMALL = {
    "sample.prompts": 2,
    "sample.group": 4,
    "sample.draws": 2,
    "run.held_out": 8,
    "run.evaluate_every": 0,
}


def collector(source: str = "fresh", world: Digits | None = None) -> Collector:
    world = world or Digits(length=4)
    return Collector(world, open_policy(source, world, 0, "cpu"), 5)


def rows(
    now: Tensor, old: Tensor, share: Tensor, segment: Tensor, episode: Tensor, advantage: Tensor
) -> Batch:
    table = {"episode": episode, "segment": segment, "action": torch.zeros_like(episode), "share": share}
    table |= {"logp@old": old, "advantage": advantage}
    return Batch(Experience(Table(table), Table({})), {"logp": now})


def test_the_bound_by_hand() -> None:
    """Two answers of two draws, of one or two masked tokens out of two: d = 2·0.1, −0.3 + 0.1 and 2·0.5, 2·(−1)."""
    now = torch.tensor([-0.9, -1.3, -0.9, -0.5, -2.0], requires_grad=True)
    old, share = torch.tensor([-1.0] * 5), torch.tensor([2.0, 1.0, 1.0, 2.0, 2.0])
    segment, episode = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([4, 4, 4, 9, 9])
    advantage = torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5])
    batch = rows(now, old, share, segment, episode, advantage)
    values, _ = lower_bound()(batch)
    e = torch.e
    assert values.tolist() == pytest.approx([1.2 * 1.5, 0.8 * 1.5, -0.5 * e, -0.5 * e**-2], rel=1e-5)
    slope = torch.autograd.grad(values.sum(), now)[0]
    assert slope.tolist() == pytest.approx([3.0, 1.5, 1.5, -e, -(e**-2)], rel=1e-5)
    whole, _ = elbo_ratio()(batch)
    assert whole.tolist() == pytest.approx([1.5, -0.5 * e**-0.5], rel=1e-5)
    held, _ = lower_bound(limit=0.5)(batch)
    assert held.tolist() == pytest.approx([1.8, 1.2, -0.5 * e**0.5, -0.5 * e**-2], rel=1e-5)


def test_the_bound_holds_and_touches_at_the_old_policy() -> None:
    found = measure(3)
    assert found["violation"] <= 1e-9
    assert found["above"] <= 1e-9
    assert found["apart at the old policy"] <= 1e-9


def test_masks_of_an_answer_are_written_down_once_for_all_who_are_asked() -> None:
    collect = collector()
    found = collect.episodes(collect.tasks(2), 3)
    hole = collect.policy.mask  # type: ignore[attr-defined]
    some = masked(found, hole, 5, "some", 1)
    assert len(some.by("segment")) == 6 * 5
    tokens, texts = some.context.ragged("tokens"), found.context.ragged("tokens")
    for episode in range(6):
        for draw in range(5):
            here = (some["episode"] == episode) & (some["segment"] == draw)
            row = int(some["context"][here].unique())
            text, plain = tokens[row], texts[episode]
            holes = (text == hole).nonzero().flatten()
            assert torch.equal(some["position"][here], holes), "what is masked is what is decided"
            assert bool((holes >= 5).all()), "and never the prompt"
            assert torch.equal(some["action"][here], plain[holes])
            assert torch.equal(torch.where(text == hole, plain, text), plain)
            assert some["share"][here].tolist() == pytest.approx([4 / len(holes)] * len(holes))
    assert "logp" not in some
    policy = collect.policy
    assert torch.equal(policy.copy().score(some)["logp"], policy.score(some)["logp"].detach())
    again = masked(found, hole, 5, "some", 1)
    assert torch.equal(again.context.ragged("tokens").values, tokens.values)
    other = masked(found, hole, 5, "some", 2)
    assert other.context.ragged("tokens").values.tolist() != tokens.values.tolist()


def test_numbers_of_masks_are_all_alike_and_weights_make_the_mean_right() -> None:
    """E of (L/k)·Σ over masked tokens is L times the mean, whatever the tokens; here all count 1."""
    collect = collector()
    found = collect.episodes(collect.tasks(1), 1)
    many = masked(found, collect.policy.mask, 4000, "some", 0)  # type: ignore[attr-defined]
    counts = many.by("segment").count.bincount(minlength=5)[1:] / 4000
    assert counts.tolist() == pytest.approx([0.25] * 4, abs=0.03)
    assert many.by("segment").sum(many["share"]).tolist() == pytest.approx([4.0] * 4000)
    each = torch.zeros(4).index_add(0, many["position"] - 5, many["share"]) / 4000
    assert each.tolist() == pytest.approx([1.0] * 4, abs=0.1)
    whole = masked(found, collect.policy.mask, 1, "all", 0)  # type: ignore[attr-defined]
    assert len(whole) == 4


def test_what_an_answer_earned_is_counted_once() -> None:
    collect = collector()
    found = collect.episodes(collect.tasks(3), 2)
    some = masked(found, collect.policy.mask, 4, "some", 0)  # type: ignore[attr-defined]
    for name in ("signal:places", "signal:success"):
        assert some.by("episode").sum(some[name]).tolist() == found.by("episode").sum(found[name]).tolist()
    assert int((some["end"] > 0).sum()) == 6
    assert bool(some.by("episode").is_last()[some["end"] > 0].all())


def test_a_masked_model_sees_everything_and_is_read_at_the_masks_own_place() -> None:
    """Against logits of one row, alone and without padding; another digit behind a mask changes what is said of it."""
    world = Digits(length=4)
    policy = open_policy("fresh", world, 0, "cpu")
    assert isinstance(policy, MaskedPolicy)
    texts = [world.tokens("3021=0_2_"), world.tokens("3021=0_23"), world.tokens("30=_3")]

    def said(row: list[int], place: int) -> Tensor:
        states, _ = policy.looks(torch.tensor([row]), torch.tensor([len(row)]))
        return policy.model.logits(states)[0, place].log_softmax(-1).detach()

    assert not torch.allclose(said(texts[0], 6), said(texts[1], 6), atol=1e-4)
    places = [(0, 6), (0, 8), (1, 6), (2, 3)]
    from panoply.experience import Ragged

    experience = Experience(
        Table(
            {
                "context": torch.tensor([row for row, _ in places]),
                "position": torch.tensor([place for _, place in places]),
                "action": torch.tensor(world.tokens("1310")),
            }
        ),
        Table({"tokens": Ragged.from_lists(texts)}),
    )
    expected = [
        said(texts[row], place)[token]
        for (row, place), token in zip(places, world.tokens("1310"), strict=True)
    ]
    assert policy.score(experience)["logp"].tolist() == pytest.approx([float(e) for e in expected], abs=1e-5)


@pytest.mark.parametrize(("at_once", "block", "order"), [(1, 0, "sure"), (2, 2, "random"), (4, 0, "sure")])
def test_an_answer_is_filled_in_whole_and_depends_on_its_seed_alone(
    at_once: int, block: int, order: str
) -> None:
    world = Digits(length=4)
    engine = Denoiser(open_policy("fresh", world, 0, "cpu"))  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=4)
    prompts = [tuple(world.tokens("3021=")), tuple(world.tokens("12="))]
    with engine.by(at_once, block, order):  # type: ignore[arg-type]
        both = engine.generate([Request(p, [7, 8]) for p in prompts], sampling, entropy=True)
        alone = engine.generate([Request(prompts[1], [8])], sampling)
    assert all(len(said) == 4 and world.tokens("_")[0] not in said for said in both.completions())
    assert both.completions()[3] == alone.completions()[0]
    assert both.decisions.tensor("logp")[-4:].tolist() == pytest.approx(
        alone.decisions.tensor("logp").tolist(), abs=1e-5
    )
    assert float(both.decisions.tensor("logp").max()) < 0
    assert both.decisions.tensor("position").tolist() == [5, 6, 7, 8] * 2 + [3, 4, 5, 6] * 2


def test_weights_in_float64_are_filled_in_by(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = open_policy("fresh", Digits(length=4), 0, "cpu")
    assert isinstance(policy, MaskedPolicy)
    asked = [Request([1, 2], [3, 4])]
    narrow = Denoiser(policy).generate(asked, Sampling(max_tokens=4), entropy=True)
    policy.model.double()
    wide = Denoiser(policy).generate(asked, Sampling(max_tokens=4), entropy=True)
    for name in ("logp", "entropy"):
        assert wide.decisions.tensor(name).dtype == torch.float64
        torch.testing.assert_close(
            wide.decisions.tensor(name).float(), narrow.decisions.tensor(name), atol=1e-5, rtol=1e-5
        )


def test_a_mask_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mask is the likeliest by far, the rest of the vocabulary is drawn as if there were none."""
    world = Digits(length=4)
    policy = open_policy("fresh", world, 0, "cpu")
    engine = Denoiser(policy)  # type: ignore[arg-type]
    biased = torch.zeros(13)
    biased[engine.policy.mask] = 10.0
    monkeypatch.setattr(policy.model, "logits", lambda hidden: biased.expand(*hidden.shape[:-1], 13).clone())
    asked = Request(tuple(world.tokens("3021=")), list(range(64)))
    for temperature, different in ((1.0, 12), (0.0, 1)):
        said = engine.generate([asked], Sampling(max_tokens=4, temperature=temperature)).completions()
        found = {token for answer in said for token in answer}
        assert len(found) == different
        assert engine.policy.mask not in found


def test_the_first_token_filled_in_is_drawn_given_nothing_but_masks() -> None:
    """Four at a time in one step are drawn given the prompt alone: their recorded log-probability is that of `all`."""
    collect = collector()
    with collect.engine.by(4, 0, "sure"):  # type: ignore[attr-defined]
        found = collect.episodes(collect.tasks(2), 2)
    whole = masked(found, collect.policy.mask, 1, "all", 0)  # type: ignore[attr-defined]
    scored = collect.policy.score(whole)["logp"]
    assert scored.tolist() == pytest.approx(found["logp"].tolist(), abs=1e-4)


def test_any_split_gives_the_same_gradient(tmp_path: Path) -> None:
    """Passes over single masks, freed one after another, add up to the pass over all of them."""
    ends = []
    for size in (16, 4096):
        settings = {**SMALL, "run.micro_tokens": size, "update.minibatches": 2, "reward.name": "places"}
        run = bare(tmp_path / str(size), "bgpo", world="digits", model="fresh", steps=2, settings=settings)
        ends.append(open_policy(str(run.run), Digits(), 0, "cpu"))
    first, second = (dict(policy.named_parameters()) for policy in ends)
    for name, weight in first.items():
        assert torch.allclose(weight, second[name], atol=2e-5), name


def test_resume_is_bit_for_bit(tmp_path: Path) -> None:
    settings = {
        **SMALL,
        "run.checkpoint_every": 1,
        "run.keep": 9,
        "update.minibatches": 2,
        "reward.name": "places",
    }
    trained = bare(tmp_path / "run", "bgpo", world="digits", model="fresh", steps=2, settings=settings)
    whole = metrics(trained.run)
    assert whole[-1]["elbo_gap"] > 0, "the second mini-batch is off policy"
    shutil.rmtree(trained.run / "checkpoints/step-0000002")
    (trained.run / "result.json").unlink()
    assert resume(trained.run).fingerprint == trained.fingerprint
    assert metrics(trained.run) == whole


def test_imitation_is_the_mean_over_masked_tokens() -> None:
    collect = collector()
    found = masked_demonstrations(batch=3)(collect)
    logp = torch.randn(len(found))
    values, _ = denoising()(Batch(found, {"logp": logp}))
    segments = found.by("segment")
    by_hand = [-float(logp[segments.index == at].mean()) for at in range(3)]
    assert values.tolist() == pytest.approx(by_hand)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match="masks"):
        pp.plan("bgpo", world="chain")
    with pytest.raises(PanoplyError, match="no probability of a next token"):
        bare(tmp_path / "run", "grpo", world="digits", model="fresh", steps=1)
    with pytest.raises(PanoplyError, match="every draw is the same"):
        pp.plan("bgpo", world="digits", settings={"sample.masks": "all", "sample.draws": 3})
    with pytest.raises(PanoplyError, match="several turns, grammars"):
        Denoiser(collector().policy).generate([], Sampling(), lambda turn: None)  # type: ignore[arg-type]
    asked = [Request([1, 2], [0], mask=lambda said: [3])]
    with pytest.raises(PanoplyError, match="several turns, grammars"):
        Denoiser(collector().policy).generate(asked, Sampling())  # type: ignore[arg-type]
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        with pytest.raises(PanoplyError, match="nothing cut off or penalised"):
            Denoiser(collector().policy).generate([], Sampling(**{name: 1.2}))  # type: ignore[arg-type]
    assert bgpo().sample.draws == denoised().draws == 16  # type: ignore[attr-defined]
