"""GiGPO: credit worked by hand, and the gradient from the paper's equations."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled, values_of

import panoply as pp
from panoply.compose import resolve
from panoply.experience import Experience, Ragged, Table
from panoply.methods.agents.gigpo import gigpo
from panoply.methods.base.grpo import grpo
from panoply.progress import Progress
from panoply.slots.credit.anchors import alike, episode_and_anchor
from panoply.slots.credit.groups import group
from panoply.slots.reward.shaping import minus_invalid

# Two clones. Episode 1: state 7, 8 (two decisions), 7 again, and success. Episode 2: state 7, then 9, and nothing.
EPISODE = [1, 1, 1, 1, 2, 2]
TURN = [0, 1, 1, 2, 0, 1]
STATE = [7, 8, 8, 7, 7, 9]
REWARD = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def clones(**columns: Any) -> Experience:
    plain = {"group": [5] * 6, "episode": EPISODE, "turn": TURN, "state": STATE, "reward": REWARD}
    return hand(**{**plain, **columns})


def credit(experience: Experience, **settings: Any) -> list[float]:
    found: list[float] = episode_and_anchor(**{"epsilon": 0.0, **settings})(experience).tolist()
    return found


def test_credit_without_scale() -> None:
    # A^E: 1 − ½ and 0 − ½. In state 7 with γ = ½: ¼, 1 and 0, mean 5/12; states 8 and 9 were seen once.
    whole, state = 0.5, [1 / 4 - 5 / 12, 1 - 5 / 12, 0 - 5 / 12]
    expected = [whole + state[0], whole, whole, whole + state[1], -whole + state[2], -whole]
    assert credit(clones(), gamma=0.5, scale="none") == pytest.approx(expected)


def test_credit_in_deviations_weighted_by_omega() -> None:
    # Group: deviation of 1 and 0 is 1/√2. State 7: of ¼, 1 and 0, √(39/144).
    whole, deviation = 0.5 * 2**0.5, (39 / 144) ** 0.5
    state = [x / deviation for x in (1 / 4 - 5 / 12, 1 - 5 / 12, 0 - 5 / 12)]
    expected = [whole + 2 * state[0], whole, whole, whole + 2 * state[1], -whole + 2 * state[2], -whole]
    assert credit(clones(), gamma=0.5, omega=2.0) == pytest.approx(expected)


def test_a_state_is_of_one_group_only() -> None:
    alone = clones(group=[5, 5, 5, 5, 6, 6])
    # Episode 1 meets itself in state 7 (¼ and 1, mean 5/8); episode 2 meets nobody.
    assert credit(alone, gamma=0.5, scale="none") == pytest.approx([-3 / 8, 0, 0, 3 / 8, 0, 0])


def test_a_lone_episode_may_keep_its_return() -> None:
    alone = clones(group=[5, 5, 5, 5, 6, 6])
    kept = credit(alone, gamma=0.5, scale="none", alone="return")
    assert kept == pytest.approx([5 / 8, 1, 1, 11 / 8, 0, 0])


def test_votes_of_turns_let_long_episodes_weigh_more() -> None:
    # Three turns of return 1, two of return 0: mean 3/5.
    found = credit(clones(), omega=0.0, scale="none", votes="turn")
    assert found == pytest.approx([0.4, 0.4, 0.4, 0.4, -0.6, -0.6])


def looking_alike(*seen: tuple[int, str]) -> Experience:
    """Turns of one decision, each after a prompt: (group, prompt); the last of four tokens is what is done."""
    made = hand(
        episode=list(range(len(seen))),
        group=[g for g, _ in seen],
        turn=[0] * len(seen),
        state=list(range(len(seen))),
        context=list(range(len(seen))),
        position=[len(prompt) for _, prompt in seen],
        reward=[float(i) for i in range(len(seen))],
    )
    tokens = Ragged.from_lists([[*map(ord, prompt), 0] for _, prompt in seen])
    return Experience(made.decisions, Table({"tokens": tokens}))


def test_turns_that_look_alike_may_be_in_one_state() -> None:
    """abcd and abce share three tokens of four, 6/8; what joins is compared with the first of a state, not the last."""
    made = looking_alike((1, "abcd"), (1, "abce"), (1, "xbce"), (1, "wwww"), (2, "abcd"))
    assert alike(made, 0.75).tolist() == [0, 0, 2, 3, 4]
    assert alike(made, 0.76).tolist() == [0, 1, 2, 3, 4]
    assert alike(made, 0.5).tolist() == [0, 0, 0, 3, 4]
    by_word, by_look = (credit(made, scale="none", similarity=s) for s in (1.0, 0.75))
    assert by_word[:2] == [-1.5, -0.5]  # nobody else was there: A^E alone, of returns 0 to 3
    assert by_look[:2] == [-1.5 - 0.5, -0.5 + 0.5]
    order = torch.tensor([3, 1, 4, 0, 2])
    assert credit(made.take(order), scale="none", similarity=0.75) == pytest.approx(
        [by_look[i] for i in order.tolist()]
    )


def test_what_is_written_after_the_prompt_is_not_looked_at() -> None:
    made = looking_alike((1, "ab"), (1, "ab"))
    tokens = Ragged.from_lists([[97, 98, 5, 6, 7], [97, 98, 1, 2, 3]])
    assert alike(Experience(made.decisions, Table({"tokens": tokens})), 1.0).tolist() == [0, 0]


def test_without_anchors_it_is_grpo() -> None:
    made = ragged(seed=3)
    expected = group(epsilon=1e-4)(made)
    assert torch.allclose(episode_and_anchor(omega=0.0, epsilon=1e-4)(made), expected.double(), atol=1e-6)


def test_without_discount_successful_turns_tie() -> None:
    both = clones(reward=[0.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    assert credit(both, gamma=1.0) == [0.0] * 6
    assert credit(both, gamma=0.9)[4] > credit(both, gamma=0.9)[0], "the shorter way is better"


def test_equal_returns_give_exactly_nothing() -> None:
    assert credit(clones(reward=[0.0] * 6)) == [0.0] * 6


def turned(seed: int) -> Experience:
    """Random experience in which a turn has one state, and every decision earns something."""
    made, dice = ragged(seed=seed, drift=0.4), random.Random(seed)
    turns = made.by("turn")
    return made.with_columns(
        state=turns.rows(turns.first(made["state"])),
        reward=torch.tensor([dice.random() for _ in range(len(made))]).double(),
    )


def test_row_order_does_not_matter() -> None:
    made = turned(seed=4)
    made = made.with_columns(key=torch.arange(len(made)))
    mixed = shuffled(made)
    part = episode_and_anchor()
    back = part(mixed)[mixed["key"].argsort()]
    assert torch.allclose(back, part(made), atol=1e-6)


def test_gradient_is_the_papers() -> None:
    """Card 81, one turn and one token at a time: the joint advantage in a clipped loss with a k3 penalty."""
    made, slow = turned(seed=0), Slow()
    gamma, omega = 0.95, 1.0
    earned: dict[tuple[int, int], float] = {}
    state: dict[tuple[int, int], int] = {}
    for r in rows_of(made):
        key = (r["episode"], r["turn"])
        earned[key] = earned.get(key, 0.0) + r["reward"]
        state[key] = r["state"]
    to_go = {
        (e, t): sum(gamma ** (k - t) * x for (f, k), x in earned.items() if f == e and k >= t)
        for e, t in earned
    }
    of_group = {r["episode"]: r["group"] for r in rows_of(made)}
    returns = {e: sum(x for (f, _), x in earned.items() if f == e) for e in of_group}

    def standing(x: float, peers: list[float]) -> float:
        if len(peers) < 2:
            return 0.0
        return (x - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6)

    loss = torch.zeros((), dtype=torch.float64)
    for e in values_of(made, "episode"):
        rows = rows_of(made, episode=e)
        peers = [returns[f] for f in returns if of_group[f] == of_group[e]]
        for row in rows:
            key = (e, row["turn"])
            same = [x for k, x in to_go.items() if state[k] == state[key] and of_group[k[0]] == of_group[e]]
            advantage = standing(returns[e], peers) + omega * standing(to_go[key], same)
            logp = slow.logp(row["state"], row["action"])
            rho = (logp - row["logp"]).exp()
            gain = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
            away = row["logp@reference"] - logp
            loss = loss - (gain - 0.01 * (away.exp() - away - 1)) / len(rows) / len(returns)
    method = gigpo()
    found = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, found), slow.gradient(loss), rel=1e-5)


def test_the_diff_is_the_credit() -> None:
    tiny = [resolve(name, preset="tiny").method for name in ("gigpo", "grpo")]
    assert {path.split(".")[0] for path, *_ in tiny[0].diff(tiny[1])} == {"credit"}
    assert resolve("grpo", preset="tiny", slots={"credit": "gigpo"}).method == tiny[0]
    assert {path.split(".")[0] for path, *_ in gigpo().diff(grpo())} == {
        "credit",
        "sample",
        "regularise",
        "reward",
    }


def test_a_turn_that_could_not_be_done_costs() -> None:
    """A success earns 10 where it was made, an invalid turn loses 0.1 where it was."""
    rows = hand(episode=[0, 0, 1], **{"signal:success": [0.0, 1.0, 0.0], "signal:invalid": [1.0, 0.0, 1.0]})
    assert gigpo().reward(rows).tolist() == pytest.approx([-0.1, 10.0, -0.1])
    free = minus_invalid(penalty=0.0)
    assert free(rows.without("signal:invalid")).tolist() == [0.0, 1.0, 0.0]
    assert "signal:invalid" in gigpo().needs()
    assert "signal:invalid" not in free.needs()


def test_borrowing_the_credit_is_the_same_run(tmp_path: Path) -> None:
    small = {
        "settings": {"sample.prompts": 4, "sample.group": 4, "run.held_out": 8},
        "steps": 2,
        "threads": 1,
        "device": "cpu",
        "progress": Progress(),
    }
    whole = pp.train("gigpo", "keydoor", run=tmp_path / "whole", **small)
    borrowed = pp.train("grpo", "keydoor", credit="gigpo", run=tmp_path / "borrowed", **small)
    plain = pp.train("grpo", "keydoor", run=tmp_path / "plain", **small)
    assert whole.fingerprint == borrowed.fingerprint != plain.fingerprint


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(pp.PanoplyError, match="omega is 0"):
        pp.plan("gigpo", "keydoor", settings={"credit.omega": 0.0, "credit.gamma": 0.9})


def test_prompts_with_the_whole_episode_in_them_never_look_alike() -> None:
    with pytest.raises(pp.PanoplyError, match="have the whole episode in them"):
        pp.plan("gigpo", "chain", settings={"credit.similarity": 0.9, "reward": "signal"})
