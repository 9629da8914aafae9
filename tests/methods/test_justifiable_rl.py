"""Debates, a judge of partial evidence, and the reward they make."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError
from panoply.methods.preferences import justifiable_rl as jrl
from panoply.methods.preferences.justifiable_rl import (
    Court,
    Dueling,
    Ward,
    justifiable_rl,
    justifiable_rl_evidence,
    n_step,
    policies,
    q_learned,
    relabelled,
)
from panoply.rewards.debate import (
    Debater,
    Disputes,
    Judge,
    Played,
    Trainer,
    advantages,
    debated,
    judge_of,
    max_min,
    played,
    random_evidence,
    self_play,
)
from panoply.seeds import drawing


class First(Debater):
    """Shows the features of a list, the first of them that is not shown yet."""

    def __init__(self, *order: int):
        super().__init__(4, 2, 2)
        self.order = order

    def forward(self, state: Tensor, shown: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        wants = torch.tensor([-10.0 * self.order.index(f) for f in range(4)])
        return wants.expand_as(shown).masked_fill(shown > 0, -torch.inf).log_softmax(-1), shown.sum(-1)


class Sum(Judge):
    """Prefers action 1 by the sum of what is shown."""

    def __init__(self) -> None:
        super().__init__(4, 2, 2)

    def forward(self, state: Tensor, shown: Tensor, action: Tensor) -> Tensor:
        return (state * shown).sum(-1) * action


STATE = torch.tensor([[1.0, -3.0, 0.5, 0.25]]).repeat(64, 1)
ZERO, ONE = torch.zeros(64, dtype=torch.long), torch.ones(64, dtype=torch.long)


def test_sides_take_turns_and_who_begins_is_drawn() -> None:
    with drawing("turns") as dice:
        shown = debated(STATE, (ONE, ZERO), (First(0, 2, 3, 1), First(1, 3, 2, 0)), 3, dice)
    assert {tuple(row) for row in shown.tolist()} == {(1, 1, 1, 0), (1, 1, 0, 1)}  # who begins shows two
    assert 16 < int(shown[:, 2].sum()) < 48
    with drawing("turns") as dice:
        assert debated(STATE, (ONE, ZERO), (First(0, 2, 3, 1), None), 2, dice)[0].tolist() == [1, 0, 1, 0]


def test_the_game_is_zero_sum() -> None:
    judge = Sum()
    shown = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    state = STATE[:3]
    assert judge.verdict(state, shown, ONE[:3], ZERO[:3]).tolist() == [1, -1, 0]
    assert judge.verdict(state, shown, ZERO[:3], ONE[:3]).tolist() == [-1, 1, 0]


def test_an_action_ties_with_itself_however_scores_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Sum()
    monkeypatch.setattr(judge, "forward", lambda *_: torch.rand(64))
    assert judge.verdict(STATE, torch.ones(64, 4), ONE, ONE).eq(0).all()
    assert judge.verdict(STATE, torch.ones(64, 4), ONE, ZERO).ne(0).all()


def test_a_win_is_paid_and_a_loss_or_a_tie_is_not() -> None:
    found = relabelled(torch.tensor([2.0, 2.0, -4.0]), torch.tensor([1.0, -1.0, 0.0]), 0.25, 5.0)
    assert found.tolist() == [0.75 * 2 + 0.25 * 5, 0.75 * 2, 0.75 * -4]


def test_the_judge_sees_which_features_are_missing() -> None:
    with drawing("judge"):
        judge = Judge(4, 2).eval()
    shown = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]])
    state = torch.tensor([[1.0, 2, 0, 9], [1, 2, 0, 9], [1, 2, 0, 5]])
    scores = judge(state, shown, ZERO[:3]).detach()
    assert abs(float(scores[0] - scores[1])) > 1e-3, "a feature that is 0 is shown in the second"
    assert float(scores[1] - scores[2]) == pytest.approx(0, abs=1e-6), "what is not shown is not seen"


def test_random_evidence() -> None:
    with drawing("evidence") as dice:
        shown = random_evidence(600, 6, 2, dice)
    assert shown.sum(1).eq(2).all()
    assert (shown.mean(0) - 1 / 3).abs().max() < 0.06


def test_a_judge_learns_what_is_preferred() -> None:
    """Beyond chance on evidence that was drawn anew, which it is not if the two actions are normalised apart."""
    with drawing("learns") as dice:
        state = torch.randn(2000, 4)
        good = (state[:, 0] > 0).long()
        disputes = Disputes(state, good, 1 - good)
        judge = judge_of(disputes, 2, 2, dice, steps=60, lr=1e-2)
        shown = random_evidence(2000, 4, 2, dice)
        right = judge.verdict(state, shown, good, 1 - good) > 0
    assert right[shown[:, 0] > 0].float().mean() > 0.9
    assert right[shown[:, 0] == 0].float().mean() < 0.65


def test_what_is_shown_cannot_be_shown_again() -> None:
    with drawing("masks"):
        debater = Debater(4, 2)
    shown = torch.tensor([[1.0, 0, 1, 0]])
    logp, _ = debater(STATE[:1], shown, ONE[:1])
    assert logp.exp()[0, [0, 2]].tolist() == [0, 0]
    assert float(logp.detach().exp().sum()) == pytest.approx(1)


def test_what_a_side_saw_is_recorded_before_it_acts_and_won_is_its_own() -> None:
    disputes = Disputes(STATE, ONE, ZERO)
    with drawing("played") as dice:
        mine, theirs = First(0, 2, 3, 1), First(1, 3, 2, 0)
        of = played(mine, theirs, Sum(), disputes, torch.zeros(64, dtype=torch.bool), 4, dice)
        swapped = played(mine, theirs, Sum(), disputes, torch.ones(64, dtype=torch.bool), 2, dice)
        alone = played(mine, None, Sum(), disputes, torch.zeros(64, dtype=torch.bool), 2, dice)
    assert of.pick.shape == (2, 64)
    assert of.pick[0].eq(0).all()
    seen = {tuple(row) for row in of.shown[0].tolist()}
    assert seen == {(0, 0, 0, 0), (0, 1, 0, 0)}  # begun, or replied
    assert {tuple(row) for row in of.shown[1].tolist()} == {(1, 1, 0, 0), (1, 1, 0, 1)}
    assert of.action.equal(ONE)
    assert of.won.eq(-1).all()  # all is shown: 1 − 3 + 0.5 + 0.25 < 0
    assert swapped.action.equal(ZERO)
    assert swapped.won.eq(1).all()  # 1 − 3 < 0, and it argues against
    assert alone.pick.tolist() == [[0] * 64, [2] * 64]
    assert alone.won.eq(1).all()


def test_advantages() -> None:
    """γ = 0.9, λ = 0.7: δ₁ = 1 − 0.5, δ₀ = 0.9·0.5 − 0.2."""
    found = advantages(torch.tensor([1.0]), torch.tensor([[0.2], [0.5]]))
    assert found[:, 0].tolist() == pytest.approx([0.25 + 0.63 * 0.5, 0.5])


@pytest.mark.parametrize(("side", "own"), [("preferred", ONE), ("other", ZERO)])
def test_ppo_learns_to_show_what_wins(side: str, own: Tensor) -> None:
    with drawing("ppo") as dice:
        trainer = Trainer(Sum(), Disputes(STATE, ONE, ZERO), 2, dice, lr=1e-2)
        trainer.learn(None, 10, side, debates=64)
        shown = debated(STATE, (own, 1 - own), (trainer.learner, None), 2, dice)
    assert Sum().verdict(STATE, shown, own, 1 - own).eq(1).all()


def test_ppo_clips_and_starts_at_ratio_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gradient is that of −advantage·log π, the values' error and the entropy, written out."""
    with drawing("gradient") as dice:
        trainer = Trainer(Sum(), Disputes(STATE, ONE, ZERO), 2, dice)
    with drawing("play") as dice:
        of = played(trainer.learner, None, Sum(), trainer.disputes.some(8, dice), ZERO[:8] > 0, 2, dice)
    of = Played(of.state, of.action, of.shown, of.pick, torch.tensor([1.0, -1, 1, 1, -1, 0, 1, -1]))
    state, action, shown, pick = (
        of.state.repeat(2, 1),
        of.action.repeat(2),
        of.shown.flatten(0, 1),
        of.pick.flatten(),
    )
    logp, value = trainer.learner(state, shown, action)
    ahead = advantages(of.won, value.view(2, -1)).flatten().detach()
    goal = ahead + value.detach()
    ahead = (ahead - ahead.mean()) / ahead.std()
    spread = -(logp[shown == 0].exp() * logp[shown == 0]).sum() / 16
    score = (ahead * logp[range(16), pick]).mean()
    wanted = torch.autograd.grad(
        0.5 * ((value - goal) ** 2).mean() - score - 0.01 * spread, list(trainer.learner.parameters())
    )
    found: list[Tensor] = []
    monkeypatch.setattr(
        trainer.optimiser, "step", lambda: found.extend(p.grad.clone() for p in trainer.learner.parameters())
    )
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *_: None)
    trainer.update(of, repeats=1)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6)


def test_self_play_and_max_min_take_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with drawing("turns") as dice:
        one, two = (Trainer(Sum(), Disputes(STATE, ONE, ZERO), 2, dice) for _ in range(2))
    said: list[tuple[str, bool, int, str]] = []
    for name, trainer, other in (("one", one, two), ("two", two, one)):
        monkeypatch.setattr(
            trainer,
            "learn",
            lambda opponent, rounds, side="preferred", name=name, other=other: said.append(
                (name, opponent is other.learner, rounds, side)
            ),
        )
    max_min(one, two, 2, 8, 3)
    assert said == [("two", True, 8, "other"), ("one", True, 3, "preferred")] * 2
    said.clear()
    self_play(one, 2, 5)
    assert said == [("one", False, 5, "either")] * 2


# ------------------------------------------------------------------ the policy


def test_sums_over_six_steps_end_with_the_episode() -> None:
    total, after, going = n_step(torch.tensor([[1.0, 2, 4, 8]]), 2, 0.5)
    assert total.tolist() == [[2, 4, 8, 8]]
    assert after.tolist() == [[2, 3, 4, 4]]
    assert going.tolist() == [[0.25, 0.25, 0, 0]]  # nothing comes after the last step
    total, after, going = n_step(torch.tensor([[1.0, 2]]), 6, 0.5)
    assert total.tolist() == [[2, 2]]
    assert after.tolist() == [[2, 2]]
    assert going.tolist() == [[0, 0]]


def test_dueling_values_and_learning_what_is_logged() -> None:
    with drawing("dueling") as dice:
        net = Dueling()
        state = torch.randn(5, 12)
        centred = net(state) - net.value(net.body(state))
        assert centred.sum(-1).abs().max() < 1e-5
        ward = Ward(1001)
        data = ward.logged(200, dice)
        pay = torch.zeros_like(data.reward)
        pay[:, -1] = 10.0 * (data.action[:, -1] == 2)  # only the last step is paid, and it ends the episode
        ended = q_learned(data, pay, dice, steps=40, lr=1e-2)(data.state[:, -2]).detach()
    taken = data.action[:, -1]
    assert ended[taken == 2, 2].mean() > ended[taken != 2, 0].mean() + 2


def test_the_ward() -> None:
    ward = Ward(3)
    state = torch.zeros(2, 12)
    state[0, :3] = ward.reasons[:, 1]
    assert ward.expert(state)[0] == (ward.reasons[:, 1] @ ward.reasons).argmax()
    assert ward.earned(state, torch.tensor([1, 1])).eq(0).all(), "reasons pay nothing"
    with drawing("patients") as dice:
        one = ward.play(ward.expert, 6, dice)
    with drawing("patients") as dice:
        two = ward.play(lambda s: torch.zeros(len(s), dtype=torch.long), 6, dice)
    assert one.state[:, 0].equal(two.state[:, 0])
    moved = one.state[:, 1] - two.state[:, 1]
    torch.testing.assert_close(moved, ward.effects[one.action[:, 0]] - ward.effects[0])
    with drawing("disputes") as dice:
        of = ward.disputes(torch.randn(200, 12), dice)
    assert (of.preferred != of.other).all()
    assert len(of.other.unique()) == 4


def test_the_whole_course_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jrl, "ROUNDS", 1)
    monkeypatch.setattr(jrl, "CONFUSED", (1, 1))
    court = Court.of(1001, 4, episodes=50, steps=5)
    debater = court.debater(1001, "self-play", 1)
    again = Court.of(1001, 4, episodes=50, steps=5).debater(1001, "self-play", 1)
    for mine, theirs in zip(debater.parameters(), again.parameters(), strict=True):
        assert mine.equal(theirs)
    table = policies(1001, court, debater, {"debate": (court, debater)}, steps=5)
    assert list(table) == ["baseline", "λ = 0", "debate"]
    assert set(table["debate"]) == {"return", "wins", "differs", "as the expert"}
    for training in ("isolated", "max-min"):
        held = court.held(1001, court.debater(1001, training, 1), 1, count=80)  # type: ignore[arg-type]
        assert list(held) == ["alone", "against a confuser"]


def test_what_is_refused() -> None:
    for settings, said in (
        ({"evidence": 5}, "evidence is an even number"),
        ({"evidence": 12}, "evidence is an even number"),
        ({"generations": 0}, "generations is at least 1"),
        ({"weight": 1.5}, "weight is from 0 to 1"),
        ({"weight": 0.0}, "no debate in the reward"),
        ({"worth": 0.0}, "worth above 0"),
    ):
        with pytest.raises(PanoplyError, match=said):
            justifiable_rl(**settings)  # type: ignore[arg-type]
    with pytest.raises(PanoplyError, match="rounds is at least 1"):
        justifiable_rl_evidence(rounds=0)
