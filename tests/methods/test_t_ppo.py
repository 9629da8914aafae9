"""T-PPO: credit over open ends by hand, answers that go on, and what is remembered of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of
from papers import ZERO
from tiny import bare, metrics, resume

import panoply as pp
from panoply.effects import inert
from panoply.errors import PanoplyError, Resumable
from panoply.experience import OPEN, OWN, REPLAY, TERMINATED, TRUNCATED, Experience
from panoply.loops.metrics import describe
from panoply.methods.objectives.t_ppo import egae, t_ppo
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.rollout.windows import next_window, nothing_open
from panoply.run import Run
from panoply.slots.credit.gae import gae
from panoply.slots.model.values import finished_episodes
from panoply.slots.update.optimisers import sgd
from panoply.worlds.text.copies import Copies
from panoply.worlds.world import Signals, Task

SMALL = {
    "sample.slots": 8,
    "sample.window": 6,
    "world.copies": (2, 5),
    "models.critic.warmup": 0,
    "run.held_out": 4,
    "run.evaluate_every": 0,
    "run.episodes_every": 1,
    "run.checkpoint_every": 1,
    "run.keep": 9,
}


def credited(part: Any, *, end: int, reward: float = 0.0, **more: Any) -> dict[str, list[float]]:
    """One answer with values .2, .5, .4 before its tokens."""
    columns = {"value": [0.2, 0.5, 0.4], "reward": [0.0, 0.0, reward], "end": [0, 0, end], **more}
    return {name: column.tolist() for name, column in part(hand(episode=[7, 7, 7], **columns)).items()}


# ------------------------------------------------------------------ credit


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1.0, 0.5, [0.25, -0.1, 0.0]),  # δ = .3, −.1, 0
        (1.0, 1.0, [0.2, -0.1, 0.0]),
        (0.9, 0.0, [0.25, -0.14, -0.04]),  # the last is (γ − 1)·V
    ],
)
def test_an_open_end_is_worth_what_it_was_before_its_last_token(
    gamma: float, lam: float, expected: list[float]
) -> None:
    found = credited(egae(gamma=gamma, lam=lam, normalise=False), end=OPEN)
    assert found["advantage"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("end", [TERMINATED, TRUNCATED])
def test_on_finished_answers_it_is_gae(end: int) -> None:
    """Also of one that ended at the longest length: nothing follows it."""
    made = ragged()
    value = torch.randn(len(made), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    last = made.by("episode").is_last()
    made = made.with_columns(value=value, end=torch.where(last, end, OPEN))
    for normalise in (True, False):
        own = egae(gamma=0.97, lam=0.9, critic_lam=0.9, normalise=normalise)(made)
        known = gae(gamma=0.97, lam=0.9, normalise=normalise)(made)
        assert torch.equal(own["advantage"], known["advantage"])
        assert torch.equal(own["target"], known["target"])


def test_the_critic_is_told_what_was_earned() -> None:
    assert credited(egae(gamma=0.5), end=TERMINATED, reward=1.0)["target"] == pytest.approx([0.25, 0.5, 1.0])
    mixed = credited(egae(critic_lam=0.0), end=TERMINATED, reward=1.0)["target"]
    assert mixed == pytest.approx([0.5, 0.4, 1.0]), "one step ahead"


def test_a_critic_that_knows_nothing_gives_open_windows_nothing() -> None:
    nothing = credited(egae(normalise=False), end=OPEN, value=[0.0, 0.0, 0.0])
    assert nothing["advantage"] == [0.0, 0.0, 0.0]
    over = credited(egae(normalise=False), end=TERMINATED, reward=1.0, value=[0.0, 0.0, 0.0])
    assert min(over["advantage"]) > 0


def test_advantages_are_normalised_over_what_learns() -> None:
    columns = {"value": [9.0, 0.5, 0.0], "train": [False, True, True]}
    found = credited(egae(lam=0.0), end=TERMINATED, reward=1.0, **columns)["advantage"]
    # δ = −8.5, −.5, 1: mean .25, deviation 1.06066
    assert found == pytest.approx([-8.75 / 1.0606602, -0.75 / 1.0606602, 0.75 / 1.0606602])


def test_with_an_exact_critic_the_error_shrinks_as_windows_grow() -> None:
    """V is a martingale. GAE sees all surprises to the end, an open window those inside of it."""
    rng = torch.Generator().manual_seed(0)
    length, answers = 32, 64
    surprise = 0.1 * torch.randn(answers, length, generator=rng, dtype=torch.float64)
    value = 0.5 + surprise.cumsum(1) - surprise
    reward = torch.zeros(answers, length, dtype=torch.float64)
    reward[:, -1] = value[:, -1] + surprise[:, -1]
    off = []
    for window in (4, 8, 16, 32):
        episode = torch.arange(answers)[:, None].expand(answers, window)
        end = torch.zeros(answers, window, dtype=torch.long)
        end[:, -1] = TERMINATED if window == length else OPEN
        columns = {"episode": episode, "value": value[:, :window], "reward": reward[:, :window], "end": end}
        made = hand(**{name: column.reshape(-1) for name, column in columns.items()})
        found = egae(lam=0.9, normalise=False)(made)["advantage"].view(answers, window)
        exact = torch.stack(
            [(0.9 ** torch.arange(length - t) * surprise[:, t:]).sum(1) for t in range(window)]
        )
        off.append(float((found - exact.T).abs().mean()))
    assert off == sorted(off, reverse=True)
    assert off[-1] == pytest.approx(0, abs=1e-6)


def test_the_gradient_is_of_new_tokens_alone() -> None:
    """The mean over them of min(ρA, clip(ρ)·A), each against who drew it, straight from the equation."""
    made = ragged(drift=1.0)
    train = made["position"] % 2 == 0 if "position" in made else torch.arange(len(made)) % 3 > 0
    made = made.with_columns(train=train)
    table, loss = Slow(), ZERO
    for row, new in zip(rows_of(made), train.tolist(), strict=True):
        ratio = (table.logp(row["state"], row["action"]) - row["logp"]).exp()
        value = torch.minimum(ratio * row["advantage"], ratio.clamp(0.8, 1.2) * row["advantage"])
        loss = loss - value * new / int(train.sum())
    assert_same(gradient(t_ppo().but(update=sgd(lr=1.0, clip=0.0)), made), table.gradient(loss))


# ------------------------------------------------------------------ answers that go on


def collector(world: Copies, seed: int = 3) -> Collector:
    return Collector(world, open_policy("start", world, 0, "cpu"), seed)


def steps(collect: Collector, count: int, slots: int = 4, window: int = 5, **more: Any) -> list[Experience]:
    open, found = nothing_open(), []
    for version in range(count):
        collect.version = version
        open, experience = next_window(collect, open, slots, window, **more)
        found.append(experience)
    return found


def test_on_unchanged_weights_windows_change_nothing() -> None:
    """The same answers, log-probabilities and signals as in one go, whatever the window."""
    world = Copies(copies=(2, 4))
    whole = collector(world)
    expected = whole.episodes(whole.tasks(4))
    for window in (3, 7, 100):
        found = steps(collector(world), 17 // window + 1, window=window)
        ends = {}
        for made in found:
            for episode in finished_episodes(made).by("episode").keys.tolist():
                ends.setdefault(episode, made.take(made["episode"] == episode))
        for episode in range(4):
            rows, known = ends[episode], expected.take(expected["episode"] == episode)
            for name in ("action", "end", "task", "group", "position", "state", "signal:success"):
                assert torch.equal(rows[name], known[name]), name
            torch.testing.assert_close(rows["logp"], known["logp"], atol=1e-5, rtol=1e-5)
            assert rows.context.ragged("tokens").tolist() == known.context.ragged("tokens").tolist()
            assert torch.equal(rows.context.tensor("shared"), known.context.tensor("shared"))


def test_a_continued_answer_keeps_what_was_recorded_when_each_token_was_drawn() -> None:
    collect = collector(Copies(copies=(4, 5)))
    open, first = next_window(collect, nothing_open(), 4, 5)
    with torch.no_grad():
        for _, weight in collect.policy.named_parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    collect.version = 1
    _, second = next_window(collect, open, 4, 5)
    goes_on = torch.isin(second["episode"], open["episode"])
    old = goes_on & ~second["train"]
    assert int(old.sum()) == 5 * len(open["episode"]) > 0
    kept = first.take(torch.isin(first["episode"], open["episode"]))
    for name in ("logp", "entropy", "action", "version"):
        assert torch.equal(second[name][old], kept[name]), name
    now = collect.policy.score(second)["logp"].detach()
    gap = (now - second["logp"]).abs()
    assert float(gap[second["train"]].max()) < 1e-4, "new tokens are of the policy of now"
    assert float(gap[old].max()) > 0.01, "and the earlier ones stay the stale actor's"
    assert second["version"][second["train"]].unique().tolist() == [1]
    assert second["source"].tolist() == torch.where(second["train"], OWN, REPLAY).tolist()


def test_every_token_learns_once_and_slots_stay_full() -> None:
    collect = collector(Copies(copies=(2, 6)))
    found = steps(collect, 12)
    learned = [
        (e, p)
        for made in found
        for e, p, new in zip(*(made[n].tolist() for n in ("episode", "position", "train")), strict=True)
        if new
    ]
    assert len(learned) == len(set(learned)) == collect.state["decisions"]
    assert all(len(made.by("episode")) == 4 for made in found)
    last = found[-1]
    whole = {(e, p) for e, p in zip(last["episode"].tolist(), last["position"].tolist(), strict=True)}
    assert whole <= set(learned)
    assert collect.state["tasks"] == collect.state["episodes"] == collect.state["groups"] > 8
    tasks = {
        (e, t) for made in found for e, t in zip(made["episode"].tolist(), made["task"].tolist(), strict=True)
    }
    assert [t for _, t in sorted(tasks)] == [t.id for t in collect.numbered(range(len(tasks)))]
    over = {e for made in found for e in finished_episodes(made).by("episode").keys.tolist()}
    assert over == set(range(collect.state["episodes"])) - set(
        last["episode"][last.by("episode").rows(last.by("episode").last(last["end"]) == OPEN)].tolist()
    )


def test_an_answer_that_is_as_long_as_may_be_is_over() -> None:
    """Fresh weights seldom stop: 9 tokens in windows of 4, 4 and 1."""
    world = Copies(copies=(2, 2))
    collect = Collector(world, open_policy("fresh", world, 0, "cpu"), 0)
    found = steps(collect, 3, window=4)
    assert found[2]["end"].tolist() == [*[OPEN] * 8, TRUNCATED] * 4
    assert int(found[2]["train"].sum()) == 4
    assert collect.state["decode_steps"] == world.max_tokens == 9


def test_decoding_steps_are_the_longest_answers() -> None:
    world = Copies(copies=(2, 6))
    collect = collector(world)
    whole = collect.episodes(collect.tasks(6))
    assert collect.state["decode_steps"] == int(whole.by("episode").count.max())
    assert collect.state["decode_steps"] < len(whole)


class Unsure(Copies):
    """Cannot grade answers to an even number of copies."""

    def grade_all(self, tasks: Any, answers: Any) -> list[Signals | None]:
        graded = zip(tasks, super().grade_all(tasks, answers), strict=True)
        return [None if t.data["copies"] % 2 == 0 else signals for t, signals in graded]

    def failures(self) -> dict[str, int]:
        return {"no idea": 1}

    @property
    def start(self) -> str:
        return "copies-start"


def test_answers_that_cannot_be_graded_are_left_out_and_make_room() -> None:
    collect = collector(Unsure(copies=(2, 3)))
    found = steps(collect, 4, slots=8)
    for made in found:
        levels = {t.id: t.level for t in collect.numbered(range(collect.state["tasks"]))}
        over = finished_episodes(made)
        assert {levels[t] % 2 for t in over["task"].tolist()} <= {1}
    assert collect.state["episodes"] > 8
    clueless = collector(Unsure(copies=(2, 2)))
    with pytest.raises(Resumable, match="Not one of .* no idea"):
        steps(clueless, 9)


class Picky(Copies):
    """Lets only letters be drawn."""

    def allowed(self, task: Task, said: Sequence[int]) -> list[int]:
        return self.tokens("ab$")

    @property
    def start(self) -> str:
        return "copies-start"


def test_a_world_that_chooses_tokens_is_refused() -> None:
    with pytest.raises(PanoplyError, match="picky says itself .* which tokens may be drawn"):
        steps(collector(Picky()), 1)


def test_metrics_are_of_what_is_over() -> None:
    made = hand(
        episode=[0, 0, 0, 1, 1], group=[0, 0, 0, 1, 1], source=[REPLAY, OWN, OWN, OWN, OWN],
        end=[0, 0, 1, 0, 0], train=[False, True, True, True, True], entropy=[9.0, 1.0, 2.0, 3.0, 4.0],
        reward=[0.0, 0.0, 1.0, 0.0, 0.0], **{"signal:success": [0.0, 0.0, 1.0, 0.0, 0.0]},
    )  # fmt: skip
    found = describe(made)
    assert found["success"] == found["reward"] == 1.0
    assert (found["episode_length"], found["open"], found["episodes"], found["decisions"]) == (3, 0.5, 2, 4)
    assert found["entropy"] == 2.5
    still = describe(made.with_columns(end=torch.zeros(5, dtype=torch.long)))
    assert still["open"] == 1
    assert "success" not in still, "nobody knows yet"


def test_the_critic_learns_from_all_of_what_is_over() -> None:
    made = hand(episode=[0, 0, 1, 1, 2], end=[0, 1, 0, 0, 2], train=[False, True, False, True, True])
    found = finished_episodes(made)
    assert found["episode"].tolist() == [0, 0, 2]
    assert found["train"].all()


# ------------------------------------------------------------------ runs


def test_unfinished_answers_survive_a_stop_bit_for_bit(tmp_path: Path) -> None:
    trained = bare(tmp_path / "whole", "t-ppo", world="copies", steps=4, settings=SMALL)
    rows = metrics(trained.run)
    assert any(row["open"] > 0 for row in rows)
    assert all(row["total_decode_steps"] <= 6 * row["step"] for row in rows)
    assert rows[-1]["total_decode_steps"] == 24
    assert all(("critic_loss" in row) == (row["open"] < 1) for row in rows), (
        "without ended answers none is skipped"
    )
    stopped = tmp_path / "stopped"
    shutil.copytree(trained.run, stopped)
    for step in (2, 3, 4):
        shutil.rmtree(stopped / f"checkpoints/step-{step:07d}")
    (stopped / "result.json").unlink()
    assert resume(stopped).fingerprint == trained.fingerprint
    assert metrics(stopped) == rows
    assert Run.open(stopped).episodes() == Run.open(trained.run).episodes()


def test_a_budget_of_decoding_steps(tmp_path: Path) -> None:
    settings = {**SMALL, "run.decode_steps": 12, "run.episodes_every": 0, "run.checkpoint_every": 50}
    trained = bare(tmp_path / "run", "t-ppo", world="copies", steps=9, settings=settings)
    assert len(metrics(trained.run)) == 2
    with pytest.raises(PanoplyError, match="nothing is decoded in cartpole"):
        pp.plan("ppo", "cartpole", settings={"run.decode_steps": 5})


@pytest.mark.parametrize(
    ("world", "settings", "why"),
    [
        ("copies", {"credit": "group"}, "compares whole answers"),
        ("copies", {"credit": "gae"}, "compares whole answers"),
        ("copies", {"sample.window": 66}, "no answer has more than 65 tokens"),
        ("copies", {"sample.window": 0}, "must be at least 1"),
        ("copies", {"sample.slots": 0}, "must be at least 1"),
        ("keydoor", {}, "needs a world with 'one turn'"),
        ("cartpole", {}, "needs a world with 'one turn'"),
        ("copies", {"models.critic.update": "none", "models.critic.warmup": 0}, "sees what the policy does"),
    ],
)
def test_what_cannot_be_is_refused(world: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(PanoplyError, match=why):
        pp.plan("t-ppo", world, settings=settings)


def test_a_critic_of_finished_answers_needs_some_that_are_not() -> None:
    with pytest.raises(PanoplyError, match="samples every answer to its end"):
        pp.plan("ppo", "chain", settings={"models.critic.finished": True})
    assert "models.critic.finished" not in dict(inert(pp.plan("ppo", "cartpole")))
