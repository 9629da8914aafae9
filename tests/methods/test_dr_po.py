"""DR-PO: where episodes begin, that given tokens have values but no policy loss, and what they earn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import Tabular, assert_same, hand, learner
from tiny import bare, metrics

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import OPEN, REPLAY, TERMINATED, TRUNCATED, Experience
from panoply.methods.base.ppo import ppo
from panoply.methods.preferences.dr_po import data_set_answer, dr_po, reset, roll_in, summary_reward
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.model.values import finished_episodes
from panoply.worlds.text.lock import Lock


@pytest.fixture(scope="module")
def policy() -> Any:
    return open_policy("start", Lock(), 0, "cpu")


def collected(policy: Any, **settings: Any) -> tuple[Collector, Experience]:
    collect = Collector(Lock(), policy, seed=3)
    return collect, reset(prompts=24, answers="labeller", temperature=1.0, **settings)(collect)


def test_resets_are_uniform_over_all_proper_prefixes() -> None:
    answer = [7, 8, 9, 6]
    rng = np.random.default_rng(0)
    drawn = Counter(len(roll_in(answer, 0.5, rng)) for _ in range(6000))
    assert set(drawn) == {0, 1, 2, 3}, "one token at least is left to say"
    assert drawn[0] / 6000 == pytest.approx(0.5, abs=0.03)
    assert all(drawn[k] / 6000 == pytest.approx(1 / 6, abs=0.03) for k in (1, 2, 3))
    assert all(roll_in([5], 1.0, rng) == [] for _ in range(20)), "an answer of one token is never reset"
    assert all(roll_in(answer, 0.0, rng) == [] for _ in range(20))


def test_given_tokens_are_the_data_sets_and_are_scored_but_do_not_learn(policy: Any) -> None:
    collect, found = collected(policy, share=1.0)
    world, rows = collect.world, found.by("episode").grid()
    tasks = {task.id: task for task in collect.numbered(range(24))}
    for row in (row[row >= 0] for row in rows):
        task = tasks[int(found["task"][row[0]])]
        said, given = found["action"][row].tolist(), (~found["train"][row]).tolist()
        k = sum(given)
        assert 1 <= k <= 8
        assert given == [True] * k + [False] * (len(row) - k), "a prefix, and something after it"
        assert said[:k] == data_set_answer(collect, task, "labeller")[:k]
        graded = world.grade(task, said)
        assert float(found["signal:success"][row].sum()) == graded["success"], "the whole text is graded"
        assert found["position"][row].tolist() == list(range(9, 9 + len(row)))
    given = ~found["train"]
    assert set(found["source"][given].tolist()) == {REPLAY}
    again = policy.score(found, frozenset({"logp", "entropy"}))
    torch.testing.assert_close(found["logp"], again["logp"].detach(), atol=1e-4, rtol=1e-4)
    assert collect.state["decisions"] == int(found["train"].sum()), "nobody decided what was given"
    assert collect.notes["reset"] == 1.0
    assert collect.notes["rolled_in"] == pytest.approx(int(given.sum()) / 24)


def test_without_resets_episodes_are_ppos(policy: Any) -> None:
    _, found = collected(policy, share=0.0)
    plain = ppo().sample.but(prompts=24)(Collector(Lock(), policy, seed=3))
    for name in ("action", "logp", "episode", "task", "end", "signal:success"):
        torch.testing.assert_close(found[name], plain[name])
    assert bool(found["train"].all())


# ------------------------------------------------------------------ loss, values, rewards

ROWS = {
    "state": [0, 1, 2, 3, 4],
    "action": [0, 1, 2, 3, 0],
    "episode": [0, 0, 0, 1, 1],
    "train": torch.tensor([False, False, True, True, True]),
    "advantage": [5.0, -7.0, 1.5, -0.5, 2.0],
    "logp": [-9.0, -9.0, -1.0, -1.2, -0.9],
}


@pytest.mark.parametrize("micro", [1, 2, 100])
def test_the_policy_gradient_is_of_own_tokens_alone_and_divided_by_their_number(micro: int) -> None:
    """L = Σ m·max(−Aρ, −A clip(ρ))/Σ m: given rows have large advantages and ratios, and no effect."""
    tabular = Tabular()
    found = learner(tabular, dr_po(), micro_tokens=micro).gradient(hand(**ROWS))["logits"]
    probabilities = tabular.logits.detach().softmax(-1)
    slow = torch.zeros_like(tabular.logits)
    for i in (2, 3, 4):
        state, action, advantage = ROWS["state"][i], ROWS["action"][i], ROWS["advantage"][i]  # type: ignore[index]
        ratio = float(probabilities[state, action]) / np.exp(ROWS["logp"][i])  # type: ignore[index]
        if (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8):
            continue
        score = -probabilities[state].clone()
        score[action] += 1
        slow[state] -= advantage * ratio * score / 3
    assert_same(found, slow)
    assert not bool(found[:2].any())


def test_the_critic_learns_given_tokens_too() -> None:
    rows = hand(**ROWS, end=[OPEN, OPEN, TERMINATED, OPEN, TERMINATED])
    kept = finished_episodes(rows)
    assert len(kept) == 5
    assert bool(kept["train"].all())
    assert dr_po().models[0].settings()["finished"] is True


def test_rewards_penalise_own_tokens_and_cut_off_answers() -> None:
    columns = {
        "signal:success": [0.0, 0.0, 1.0, 0.0, 1.0],
        "end": [OPEN, OPEN, TERMINATED, OPEN, TRUNCATED],
        "logp@reference": [-9.5, -9.0, -1.5, -1.0, -1.0],
    }
    rows = hand(**ROWS, **columns)
    plain = summary_reward(beta=0.1, whiten=False)(rows)
    # own gaps are .5, −.2, .1; the second answer was cut off
    assert plain.tolist() == pytest.approx([0.0, 0.0, 1 - 0.05, 0.02, -1 - 0.01], abs=1e-6)
    code = summary_reward(beta=0.1, whiten=False, roll_in=True)(rows)
    assert code.tolist() == pytest.approx([-0.05, 0.0, 0.95, 0.02, -1.01], abs=1e-6)
    whitened = summary_reward(beta=0.1)(rows)
    assert float(whitened.mean()) == pytest.approx(float(plain.mean()), abs=1e-6), "the mean is kept"
    assert float(whitened.var(unbiased=False)) == pytest.approx(1.0, rel=1e-4)
    assert summary_reward(beta=0.0, whiten=False, unended=0.5)(rows).tolist() == [0, 0, 1, 0, 0.5]


# ------------------------------------------------------------------ as a user meets it


def test_a_run_counts_resets_and_evaluates_without_them(tmp_path: Path) -> None:
    bare(tmp_path / "run", "dr-po", world="lock", settings=SMALL)
    rows = metrics(tmp_path / "run")
    assert all(0.3 < row["reset"] < 0.9 and row["rolled_in"] > 1 for row in rows if "reset" in row)
    assert rows[-1]["total_decisions"] < 2 * 16 * 9


SMALL = {"sample.prompts": 16, "sample.answers": "labeller", "run.steps": 2, "run.held_out": 16}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sample.answers": "nobody"}, "the teachers of lock are reference, careless, labeller"),
        ({"sample.share": 1.5}, "from 0 to 1"),
        ({"sample.share": 0.0, "sample.answers": "labeller"}, "nothing is reset"),
        ({"reward.roll_in": True}, "beta is 0"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        pp.plan("dr-po", "lock", settings=settings)
