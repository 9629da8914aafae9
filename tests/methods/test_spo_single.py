"""Single-stream SPO: what is remembered of a prompt, when it is looked at, and which prompts are drawn."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled
from papers import ZERO, returns_of
from torch import Tensor

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.objectives.spo_single import Tracker, spo_single, tracker, uncertain
from panoply.slots.credit.expected import over_expected
from panoply.slots.credit.groups import episode_returns
from panoply.worlds.world import Task


class Policy:
    """Says of every token what is written here, by its id."""

    def __init__(self, logp: Sequence[float]):
        self.table = torch.tensor(logp, dtype=torch.float64)

    def score(self, rows: Experience, needs: frozenset[str]) -> dict[str, Tensor]:
        return {"logp": self.table[rows["action"]]}


def tracking(logp: Sequence[float] = (0.0,), **settings: Any) -> Tracker:
    seat: Any = SimpleNamespace(policy=Policy(logp), annotators=[])
    chosen = {"half": 0.06, "least": 0.875, "most": 0.96, "estimate": 0, **settings}
    return Tracker(seat, **chosen)


def answers(*given: tuple[int, float, list[int]]) -> Experience:
    """Of each answer its task, what it earned, and its tokens."""
    rows = [(e, t, r, tokens, i) for e, (t, r, tokens) in enumerate(given) for i in range(len(tokens))]
    return hand(
        episode=[e for e, *_ in rows],
        group=[e for e, *_ in rows],
        task=[t for _, t, *_ in rows],
        reward=[r if i == len(tokens) - 1 else 0.0 for _, _, r, tokens, i in rows],
        action=[tokens[i] for *_, tokens, i in rows],
        logp=[0.0] * len(rows),
    )


def counts(model: Tracker, *tasks: int) -> list[list[float]]:
    """α and β of tasks."""
    won, tried = model._counts(torch.tensor(tasks))
    return torch.stack([won, tried - won], 1).tolist()


# ------------------------------------------------------------------ pitfalls of the card


def test_expected_is_what_it_was_before_the_reward() -> None:
    model, batch = tracking(), answers((7, 1.0, [0]), (5, 0.0, [0]))
    part = tracker()(model.seat)
    assert part.columns is not None
    before = batch.with_columns(**part.columns(model, batch))
    assert before["expected"].tolist() == [0.5, 0.5]
    model.learn(batch, 0)
    after = batch.with_columns(**part.columns(model, batch))
    assert after["expected"].tolist() == pytest.approx([(0.48 + 1) / 1.96, 0.48 / 1.96])
    assert over_expected(scale="none")(before).tolist() == [0.5, -0.5]


def test_old_counts_are_forgotten_and_the_new_reward_is_not() -> None:
    """A first visit has D = 0 and so ρ = 0.96; then D is the mean of 0.003 and 0.005; then it is beyond all bounds."""
    model = tracking([0.0, 0.0])
    model.learn(answers((7, 1.0, [0, 1])), 0)
    assert counts(model, 7) == [pytest.approx([0.48 + 1, 0.48])]
    model.seat.policy.table += torch.tensor([0.003, -0.005])
    found = model.learn(answers((7, 0.0, [0, 1])), 1)
    rho = 2 ** (-0.004 / 0.06)
    assert rho == pytest.approx(0.9548, abs=1e-4)
    assert found["drift"] == pytest.approx(0.004), "of |Δ log π|, not of its square, and signs do not cancel"
    assert found["rho"] == pytest.approx(rho)
    assert counts(model, 7) == [pytest.approx([rho * 1.48, rho * 0.48 + 1])]
    model.seat.policy.table += 1.0
    assert model.learn(answers((7, 0.0, [0])), 2)["rho"] == 0.875


def test_eight_to_twentyfive_rewards_are_remembered() -> None:
    for moves, most in ((1.0, 8.0), (0.0, 25.0)):
        model = tracking()
        for step in range(400):
            found = model.learn(answers((7, 1.0, [0])), step)
            model.seat.policy.table += moves
        assert found["tries"] == pytest.approx(most, rel=1e-4)


def test_drift_is_of_the_last_answer_since_its_step_was_over() -> None:
    """The answer of task 7 is kept while others come; that of the last visit replaces it."""
    model = tracking([0.0, 0.0])
    model.learn(answers((7, 1.0, [0, 0, 1]), (8, 1.0, [1])), 0)
    model.seat.policy.table += torch.tensor([0.03, 0.0])
    assert model.learn(answers((8, 1.0, [0])), 1)["drift"] == 0, "token 1 has not moved"
    assert model.learn(answers((7, 1.0, [1])), 2)["drift"] == pytest.approx(0.02), "two of three tokens have"
    model.seat.policy.table += torch.tensor([0.5, 0.0])
    assert model.learn(answers((7, 1.0, [1])), 3)["drift"] == 0
    assert len(model.last or []) == 2


def test_answers_to_one_task_count_one_by_one() -> None:
    model = tracking()
    model.learn(answers((7, 1.0, [0]), (7, 0.25, [0]), (7, 0.0, [0])), 0)
    assert counts(model, 7) == [pytest.approx([0.48 + 1.25, 0.48 + 1.75])]


def test_a_constant_share_asks_the_policy_nothing() -> None:
    model = tracking(least=0.875, most=0.875)
    model.seat.policy = None
    model.learn(answers((7, 1.0, [0])), 0)
    assert model.last is None
    assert counts(model, 7) == [pytest.approx([0.875 * 0.5 + 1, 0.875 * 0.5])]


# ------------------------------------------------------------------ the release


def release(
    batches: list[tuple[Experience, list[float]]],
) -> tuple[dict[int, list[float]], list[list[float]]]:
    """The equations of the authors' recipe, in plain numbers: α and β of prompts, and the advantages of each step.

    Each batch comes with the table of log-probabilities that the policy has after its update.
    """
    beta_of: dict[int, list[float]] = defaultdict(lambda: [0.5, 0.5])
    said: dict[int, tuple[list[int], list[float]]] = {}
    advantages = []
    for batch, table in batches:
        rows = {e: rows_of(batch, episode=e) for e in sorted(set(batch["episode"].tolist()))}
        reward = torch.tensor([sum(r["reward"] for r in of) for of in rows.values()])
        prompts = [of[0]["task"] for of in rows.values()]
        p_hat = torch.tensor([beta_of[p][0] / sum(beta_of[p]) for p in prompts])
        a = reward - p_hat
        advantages.append(((a - a.mean()) / (a.std() + 1e-8)).tolist())
        for prompt, of, r in zip(prompts, rows.values(), reward.tolist(), strict=True):
            tokens = [row["action"] for row in of]
            then, old = said.get(prompt, (tokens, [table[t] for t in tokens]))
            drift = sum(abs(o - table[t]) for t, o in zip(then, old, strict=True)) / len(then)
            rho = min(max(2 ** (-drift / 0.06), 0.875), 0.96)
            beta_of[prompt] = [rho * beta_of[prompt][0] + r, rho * beta_of[prompt][1] + 1 - r]
            said[prompt] = (tokens, [table[t] for t in tokens])
    return beta_of, advantages


def test_ten_steps_are_the_releases() -> None:
    dice = torch.Generator().manual_seed(0)
    table, steps = torch.randn(6, generator=dice), []
    for _ in range(10):
        tasks = torch.randperm(7, generator=dice)[:4].tolist()
        lengths = torch.randint(1, 5, (4,), generator=dice).tolist()
        tokens = [torch.randint(0, 6, (n,), generator=dice).tolist() for n in lengths]
        earned = torch.randint(0, 2, (4,), generator=dice).float().tolist()
        table = table + 0.01 * torch.randn(6, generator=dice)
        steps.append((answers(*zip(tasks, earned, tokens, strict=True)), table.tolist()))
    beta_of, advantages = release(steps)
    model, found = tracking(steps[0][1]), []
    for step, (batch, moved) in enumerate(steps):
        told = batch.with_columns(expected=model.expected(batch["task"]))
        found.append(told.by("episode").first(over_expected()(told)).tolist())
        model.seat.policy = Policy(moved)
        model.learn(batch, step)
    assert torch.tensor(found) == pytest.approx(torch.tensor(advantages), rel=1e-5, abs=1e-5)
    assert counts(model, *range(7)) == [pytest.approx(beta_of[t], rel=1e-5) for t in range(7)]


# ------------------------------------------------------------------ credit and gradient


def test_advantages_are_in_deviations_of_the_batch() -> None:
    """R − v̂ is 0.5, −0.5, 0.25, −0.25: mean 0, deviation √(0.625/3). A long answer has one vote."""
    made = hand(
        episode=[0, 0, 0, 1, 2, 3],
        group=[0, 0, 0, 1, 2, 3],
        reward=[0.0, 0.0, 1.0, 0.0, 1.0, 0.0],
        expected=[0.5, 0.5, 0.5, 0.5, 0.75, 0.25],
    )
    deviation = (0.625 / 3) ** 0.5
    expected = [a / deviation for a in (0.5, 0.5, 0.5, -0.5, 0.25, -0.25)]
    assert over_expected()(made).tolist() == pytest.approx(expected, rel=1e-6)
    assert over_expected(scale="none")(made).tolist() == [0.5, 0.5, 0.5, -0.5, 0.25, -0.25]
    same = made.with_columns(expected=made.by("episode").rows(episode_returns(made)[0]) - 0.3)
    assert over_expected()(same).tolist() == [0.0] * 6


def test_gradient_is_the_papers_in_any_order_and_split() -> None:
    method, made = spo_single(), ragged(drift=0.6)
    made = made.with_columns(expected=made.by("group").rows(torch.tensor([0.1, 0.9, 0.4, 0.6])))
    returns = returns_of(made)
    plain = {e: returns[e] - float(rows_of(made, episode=e)[0]["expected"]) for e in returns}
    values = torch.tensor(list(plain.values()), dtype=torch.float64)
    slow, loss = Slow(), ZERO
    for e, difference in plain.items():
        a = (difference - values.mean()) / (values.std() + 1e-8)
        for row in rows_of(made, episode=e):
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            gain = torch.minimum(rho * a, rho.clamp(0.8, 1.28) * a)
            loss = loss - (torch.maximum(gain, 10 * a) if a < 0 else gain) / len(made)
    expected = slow.gradient(loss)

    def found(rows: Experience, **options: Any) -> Tensor:
        return gradient(method, rows.with_columns(advantage=method.credit(rows)), **options)

    assert_same(found(made), expected, rel=2e-6)
    assert_same(found(shuffled(made), micro_tokens=4), expected, rel=2e-6)


# ------------------------------------------------------------------ which prompts


class Asked:
    """A collector of tasks of one token each, whose values are given."""

    def __init__(self, values: Sequence[float], ids: Sequence[int] | None = None):
        self.seed, self.state = 0, {"groups": 0}
        self.every = [Task(i, (0,)) for i in (ids or range(len(values)))]
        self.models = {"tracker": lambda tasks: torch.tensor([values[t.id] for t in tasks]).double()}

    def pool(self, n: int) -> list[Task]:
        return self.every[:n]

    def episodes(self, tasks: list[Task], group: int, **sampling: Any) -> list[int]:
        self.state["groups"] += len(tasks)
        return [task.id for task in tasks]


def test_prompts_are_drawn_by_their_doubt_and_none_twice() -> None:
    """√(v(1 − v)) + 0.05 of 0.5, 0.9, 0.02 and 1 is 0.55, 0.35, 0.19, 0.05 of 1.14 in all."""
    collect = Asked([0.5, 0.9, 0.02, 1.0])
    drawn = [uncertain(prompts=1, pool=4)(collect)[0] for _ in range(3000)]
    shares = [drawn.count(i) / 3000 for i in range(4)]
    assert shares == pytest.approx([0.55 / 1.14, 0.35 / 1.14, 0.19 / 1.14, 0.05 / 1.14], abs=0.025)
    alike = [uncertain(prompts=1, pool=4, draw="uniform")(collect)[0] for _ in range(3000)]
    assert [alike.count(i) / 3000 for i in range(4)] == pytest.approx([0.25] * 4, abs=0.025)
    for _ in range(20):
        assert len(set(uncertain(prompts=3, pool=4)(collect))) == 3


def test_a_pool_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(PanoplyError, match="a pool of 8 tasks is smaller than a batch of 16 prompts"):
        pp.plan("spo-single", "chain", settings={"sample.pool": 8, "sample.prompts": 16})
    with pytest.raises(PanoplyError, match="has 2 different ones, fewer than the 3 prompts of a batch"):
        uncertain(prompts=3, pool=6)(Asked([0.5] * 2, ids=[0, 1, 0, 1, 1, 0]))


def test_other_refusals() -> None:
    with pytest.raises(PanoplyError, match="expected to earn 3, which is no probability"):
        uncertain(prompts=1, pool=2)(Asked([0.5, 3.0]))
    for settings, why in (
        ({"models.tracker.least": 0.97}, "above most"),
        ({"models.tracker.least": 0.96, "models.tracker.half": 0.1}, "drift changes nothing"),
        ({"sample.draw": "uniform", "sample.explore": 0.1}, "draw is uniform"),
        ({"credit.scale": "none", "credit.epsilon": 0.1}, "scale is none"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("spo-single", "chain", settings=settings)
    with pytest.raises(PanoplyError, match="does not ask it"):
        pp.plan("spo-single", "chain", sample="groups", settings={"models.tracker.estimate": 4})
    with pytest.raises(PanoplyError, match="needs the model 'tracker'"):
        pp.plan("spo-single", "chain", models=[])


def test_a_plan_counts_what_it_asks_the_policy_and_no_network() -> None:
    plain, constant = (
        cost(pp.plan("spo-single", "chain", settings={"models.tracker.least": least}))
        for least in (0.875, 0.96)
    )
    assert plain.extra_forwards == ["2 forward passes of the policy for tracker"]
    assert constant.extra_forwards == []
    assert plain.operations - constant.operations == 4 * plain.parameters * plain.trained_tokens
    assert "tracker" not in plain.memory_bytes


# ------------------------------------------------------------------ estimates, and going on


def test_an_estimate_is_shrunk_to_eight_tries() -> None:
    """Of four answers three are right: α = 8·3.5/5, β = 8·1.5/5. What is known is not tried again."""
    model = tracking(estimate=4)
    tried: list[int] = []

    def episodes(tasks: list[Task], group: int, **sampling: Any) -> Experience:
        tried.extend(t.id for t in tasks)
        assert sampling["temperature"] == 0.7
        return answers(*((t.id, float(i < 3), [0]) for t in tasks for i in range(group)))

    model.seat.collect = SimpleNamespace(episodes=episodes)  # type: ignore[assignment]
    model.seat.method = SimpleNamespace(sample=uncertain(temperature=0.7))  # type: ignore[assignment]
    model.seat.parts = {"reward": lambda rows: rows["reward"]}
    assert model.ask([Task(3, (0,)), Task(9, (0,))]).tolist() == pytest.approx([0.7, 0.7])
    assert counts(model, 3) == [pytest.approx([5.6, 2.4])]
    model.ask([Task(9, (0,)), Task(4, (0,))])
    assert tried == [3, 9, 4]
    assert model.estimates == 12
    assert counts(tracking(), 3) == [[0.5, 0.5]], "without estimates"


SMALL = {
    "run.device": "cpu",
    "run.held_out": 4,
    "run.checkpoint_every": 2,
    "world.operations": 2,
    "sample.prompts": 4,
    "sample.pool": 6,
    "models.tracker.estimate": 2,
    "reward.name": "ended",
}


def test_all_that_is_remembered_goes_on_bit_for_bit(tmp_path: Path) -> None:
    done = tiny.bare(tmp_path / "run", "spo-single", model="fresh", steps=4, settings=SMALL)
    rows = tiny.metrics(done.run)
    assert [row["total_episodes"] for row in rows] == [12 + 4 * n for n in (1, 2, 3, 4)], (
        "what estimates cost is counted"
    )
    assert [row["tracker_estimates"] for row in rows] == [12] * 4
    assert rows[0]["tracker_first"] == 1
    assert rows[3]["tracker_drift"] > 0
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    shutil.rmtree(tmp_path / "cut/checkpoints/step-0000004")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    assert tiny.metrics(again.run) == rows
