"""Online IPO and IPO-MD: the slope of self-play, labels with and without noise, and whose logits are mixed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from kit import Slow, Tabular, assert_same, gradient, hand, learner
from papers import over_pairs, paired, total

from panoply.errors import PanoplyError
from panoply.evaluation import preference_games as games
from panoply.evidence.arms import Arm, Budget
from panoply.experience import Table
from panoply.methods.preferences.ipo_md import MD_CLAIM, at_rest, ipo_md, online_ipo
from panoply.planning import make_plan
from panoply.policies.build import open_policy
from panoply.rollout.mixture import mixed
from panoply.rollout.text import Collector
from panoply.slots.sample.compared import compared
from panoply.worlds.text.strings import Strings

PAIRS = [(a, b) for a in range(3) for b in range(3) if a != b]


def test_gradient_is_the_papers() -> None:
    """The loss is IPO's whoever wrote the answers; sums over tokens, and however the batch is split."""
    made, slow = paired(), Slow()
    ref = "logp@reference"
    loss = over_pairs(lambda w, x: (total(made, slow, w, ref) - total(made, slow, x, ref) - 1 / 0.2) ** 2)
    expected = slow.gradient(loss)
    for micro in (3, 10**9):
        for method in (online_ipo(), ipo_md()):
            assert_same(gradient(method, made, micro_tokens=micro), expected)


def answers(chances: list[float] | None = None, pairs: list[tuple[int, int]] = PAIRS) -> Any:
    """One state of three answers, a decision each, their reference, and pairs of them."""
    made = hand(
        pairs, state=[0, 0, 0], action=[0, 1, 2], **{"logp@reference": np.log([0.5, 0.3, 0.2]).tolist()}
    )
    if chances is None:
        return made
    return made.with_pairs(Table({**made.pairs, "p": torch.tensor(chances)}))


def test_the_slope_is_that_of_self_play() -> None:
    """On all pairs of a uniform policy: (4/τ)·∇ of E[P(y ≻ y′)] − τ·KL(π‖π_ref) with y′ held fixed, and upside down."""
    wins, tau = games.cyclic(3, 0.9), 0.1
    policy = Tabular(states=1, actions=3)
    with torch.no_grad():
        policy.logits.zero_()
    rows = answers([wins[a, b] for a, b in PAIRS])
    found = learner(policy, online_ipo()).gradient(rows)["logits"][0]
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    won = logp.exp() @ torch.tensor(wins) @ logp.exp().detach()
    kl = (logp.exp() * (logp - torch.tensor([0.5, 0.3, 0.2]).log())).sum()
    (won - tau * kl).backward()
    assert logits.grad is not None
    assert_same(found * 6 / 9, -(4 / tau) * logits.grad)  # of nine pairs three are of an answer with itself


def test_a_known_preference_is_the_mean_of_its_labels() -> None:
    """Three of four annotators say the same: p = ¾ has the gradient that the four labels have on average."""
    soft = gradient(online_ipo(), answers([0.75], [(0, 1)]))
    hard = gradient(online_ipo(), answers(None, [(0, 1), (0, 1), (0, 1), (1, 0)]))
    assert_same(soft, hard)
    assert_same(
        gradient(online_ipo(), answers([1.0], [(0, 1)])), gradient(online_ipo(), answers(None, [(0, 1)]))
    )


def test_answers_are_drawn_token_by_token_with_mixed_logits() -> None:
    """What `sample.by=mix:0.4:reference` lets act: at every token the softmax of 0.6·ℓ + 0.4·ℓ_ref."""
    world = Strings()
    start = open_policy("start", world, 0, "cpu")
    learned = start.copy()
    with torch.no_grad():
        for _, weight in learned.named_parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    collect = Collector(world, mixed(learned, start, 0.4), seed=1)
    rows = collect.episodes(collect.tasks(3), 2)
    found = torch.zeros(len(rows))
    for row in range(rows.context.rows):
        tokens, mine = rows.context.ragged("tokens")[row], rows["context"] == row
        with torch.no_grad():
            hidden = (
                (p, p.model.hidden(tokens[None], torch.arange(len(tokens))[None])) for p in (learned, start)
            )
            own, reference = (policy.model.logits(states)[0] for policy, states in hidden)
        logp = (0.6 * own + 0.4 * reference).log_softmax(-1)
        found[mine] = logp[rows["position"][mine] - 1, rows["action"][mine]]
    assert torch.allclose(found, rows["logp"], atol=1e-5)
    assert ipo_md().needs() >= {"acts@mix:0.125:reference"}


class Absurd(Strings):
    def preference(self, task: Any, a: Any, b: Any, annotator: int | None = None) -> float:
        return 1.5


def test_a_preference_that_is_no_probability_ends_the_run() -> None:
    world = Absurd()
    collect = Collector(world, open_policy("start", Strings(), 0, "cpu"), seed=1)
    with pytest.raises(PanoplyError, match="from 0 to 1, and absurd gave 1.5"):
        compared(prompts=1, group=2, soft=True)(collect)


def test_questions_are_counted() -> None:
    world = Strings()
    collect = Collector(world, open_policy("start", world, 0, "cpu"), seed=1)
    compared(prompts=3, group=4, asked="all")(collect)
    assert collect.notes["questions"] == 18


def test_who_answers_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Strings()
    collect, asked = Collector(world, open_policy("start", world, 0, "cpu"), seed=1), []

    def acted_by(name: str) -> Any:
        asked.append(name)
        return nullcontext()

    monkeypatch.setattr(collect, "acted_by", acted_by)
    ipo_md().sample.but(prompts=1)(collect)
    assert asked == ["mix:0.125:reference"]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(PanoplyError, match="share between 0 and 1"):
        make_plan("ipo-md", "strings", settings={"sample.by": "mix:1.5:reference"})
    with pytest.raises(PanoplyError, match="another one to be compared with"):
        make_plan("online-ipo", "strings", settings={"sample.group": 1, "credit.baseline": "none"})


def test_what_the_claim_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panoply.methods.preferences.ipo_md.STEPS", 1500)
    found = at_rest(1001)
    assert found["KL of online IPO"] < 1e-2 < found["KL ahead"]
    assert found["KL ahead"] == found["KL of IPO"] - found["KL of online IPO"]
    assert found["KL of IPO-MD"] > found["KL of online IPO"]


def test_both_sides_of_the_claim_get_the_same_answers() -> None:
    """The baseline is Online DPO on pairs that annotators chose: all but loss and mixture is the same."""
    mine, theirs = (
        Arm.parse(word).plan("strings", 1001, Budget.parse(MD_CLAIM.budget), settings=dict(MD_CLAIM.settings))
        for word in ("ipo-md", MD_CLAIM.order[1])
    )
    one, two = mine.method.settings(), theirs.method.settings()
    differ = {path for path in one.keys() | two.keys() if one.get(path) != two.get(path)}
    assert {path for path in differ if not path.startswith("surrogate.loss")} == {"sample.by"}
    assert (one["surrogate.loss"], two["surrogate.loss"]) == ("squared", "logistic")
