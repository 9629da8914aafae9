"""Reg-GRPO: the regression by hand and from its equation, a floor at the start, and prompts brought to a difficulty."""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Slow, Tabular, assert_same, batch, gradient, hand, ragged, rows_of, shuffled, slopes
from papers import ZERO, groups_of, total
from papers import standardised as by_deviations
from tiny import SETTINGS, bare, metrics, resume
from torch import Tensor

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.objectives.reg_grpo import _noisy, adjusted, reg_grpo, standardised
from panoply.slots.surrogate.ratios import log_likelihood
from panoply.slots.update.optimisers import sgd
from panoply.worlds.text.chain import Chain


def two(s: tuple[float, float], advantage: tuple[float, float] = (1.0, -1.0)) -> Batch:
    """A group of two episodes of two tokens, whose log-ratios sum up to `s`."""
    made = hand(
        episode=[0, 0, 1, 1],
        group=[0] * 4,
        logp=[-1.0] * 4,
        advantage=[advantage[0]] * 2 + [advantage[1]] * 2,
    )
    return batch(made, logp=[-1 + s[0] / 4, -1 + 3 * s[0] / 4, -1 + s[1], -1.0])


def test_numbers_by_hand() -> None:
    """s = .5 and −.5: mean 0, variance ½. With a floor of 1 Â = ±.5/√1.5, and each misses by 1 − .408."""
    value, stats = standardised()(two((0.5, -0.5)))
    assert value.tolist() == pytest.approx([-((1 - 0.5 / math.sqrt(1.5)) ** 2)])
    assert stats["log_ratio_std"].tolist() == pytest.approx([math.sqrt(0.5)])
    value, _ = standardised(scale=0.5, floor=0.1)(two((0.5, -0.5)))
    assert value.tolist() == pytest.approx([-((1 - 0.25 / math.sqrt(0.51)) ** 2)])


def test_a_sum_over_tokens_and_not_their_mean() -> None:
    """The same sum on other tokens is the same value; what all episodes share is none."""
    one, other = two((0.5, -0.5)), two((0.5, -0.5))
    moved = torch.tensor([-1.0, -0.5, -1.5, -1.0], dtype=torch.float64)
    other = Batch(other.experience, {"logp": moved})
    assert standardised()(one)[0].tolist() == pytest.approx(standardised()(other)[0].tolist())
    assert standardised()(two((2.5, 1.5)))[0].tolist() == pytest.approx(standardised()(one)[0].tolist())


@pytest.mark.parametrize("floor", [0.25, 2.0])
def test_at_the_start_it_is_reinforce_over_the_floor(floor: float) -> None:
    """All s are 0, and so is their deviation: finite, and 2·scale/floor times A·∇s of each of the G episodes."""
    made = two((0.0, 0.0))
    found = slopes(standardised(floor=floor, scale=3.0)(made)[0], made.now["logp"])
    plain = slopes(log_likelihood()(made)[0], made.now["logp"])
    assert found == pytest.approx([2 * 3.0 / floor / 2 * slope for slope in plain])


def test_far_beyond_the_floor_only_the_shape_counts() -> None:
    """s = 50·A is as good as s = 500·A, and the gradient is gone; a wrong order far out still has one."""
    near, far = two((50.0, -50.0)), two((500.0, -500.0))
    assert float(standardised()(near)[0].detach()) == pytest.approx(
        float(standardised()(far)[0].detach()), abs=0.01
    )
    assert max(map(abs, slopes(standardised()(far)[0], far.now["logp"]))) < 1e-5
    wrong = two((-3.0, 3.0))
    assert slopes(standardised()(wrong)[0], wrong.now["logp"])[0] > 0.01, "no clip: it is still pulled back"


def test_groups_without_a_difference_are_left_out() -> None:
    made = two((0.5, -0.5), (0.0, 0.0))
    value, _ = standardised()(made)
    assert value.tolist() == [0.0]
    assert slopes(value, made.now["logp"]) == [0.0] * 4


def slow(made: Experience, scale: float, floor: float) -> Tensor:
    """mean over groups of mean over answers of (A − scale·Â)², every mean written out, + 0.04·k3."""
    table, loss, groups = Slow(), ZERO, groups_of(made)
    wanted = {r["episode"]: r["advantage"] for r in rows_of(made)}
    for members in groups:
        sums = [total(made, table, e, "logp") for e in members]
        mean = sum(sums, ZERO) / len(sums)
        square = sum(((s - mean) ** 2 for s in sums), ZERO) / max(1, len(sums) - 1)
        deviation = (square + floor**2).sqrt()
        missed = [
            (wanted[e] - scale * (s - mean) / deviation) ** 2 for e, s in zip(members, sums, strict=True)
        ]
        loss = loss + sum(missed, ZERO) / (len(members) * len(groups))
    rows, lengths = rows_of(made), {e: len(rows_of(made, episode=e)) for e in wanted}
    for row in rows:
        off = table.logp(row["state"], row["action"]) - row["logp@reference"]
        k3 = (-off).exp() - 1 + off
        loss = loss + 0.04 * k3 / (lengths[row["episode"]] * len(lengths))
    return table.gradient(loss)


@pytest.mark.parametrize("micro", [1, 10**9])
def test_the_gradient_is_the_equation_s(micro: int) -> None:
    """With the KL term as a penalty; in any order, in micro-batches of whole groups."""
    made = ragged(drift=0.6)
    method = reg_grpo().but(surrogate=standardised(scale=0.7, floor=0.5), update=sgd(lr=1.0, clip=0.0))
    for rows in (made, shuffled(made)):
        assert_same(gradient(method, rows, micro_tokens=micro), slow(made, 0.7, 0.5))


def test_a_perfect_fit_has_no_gradient_left() -> None:
    """Steps on one batch bring the log-ratios of a group near its advantages, and the loss near 0."""
    made = ragged(lengths=((2, 1, 3), (2, 2, 2)), drift=0.0)
    wanted = by_deviations(made)
    made = made.with_columns(
        advantage=torch.tensor([wanted[e] for e in made["episode"].tolist()], dtype=torch.float64)
    )
    policy = Tabular()
    before = float(standardised(floor=0.1)(Batch(made, policy.score(made)))[0].detach().mean())
    optimiser = torch.optim.Adam([policy.logits], lr=0.05)
    for _ in range(100):
        optimiser.zero_grad()
        (-standardised(floor=0.1)(Batch(made, policy.score(made)))[0].mean()).backward()
        optimiser.step()
    after = float(standardised(floor=0.1)(Batch(made, policy.score(made)))[0].detach().mean())
    assert before == pytest.approx(-statistics.fmean(v**2 for v in wanted.values()))
    assert after > 0.1 * before


# ------------------------------------------------------------------ difficulty


class Asked:
    """A collector whose groups earn what they are told, and which keeps what it was asked."""

    def __init__(self, rewards: list[float]):
        self.world, self.seed, self.version, self.notes = Chain(), 3, 5, {}
        self.rewards, self.asked, self.taken = rewards, [], 0

    def tasks(self, n: int) -> list[Any]:
        return [self.world.task("train", i) for i in range(n)]

    def episodes(self, tasks: list[Any], group: int, *, into: Tensor | None = None, **_: Any) -> Experience:
        self.asked.append((tasks, into))
        keys = list(range(len(tasks))) if into is None else into.tolist()
        right = [self.rewards[k] if into is None else 0.5 for k in keys]
        rows = [
            (task, key, e < group * r)
            for task, key, r in zip(tasks, keys, right, strict=True)
            for e in range(group)
        ]
        first, self.taken = self.taken, self.taken + len(rows)
        return hand(
            episode=list(range(first, first + len(rows))),
            group=[key for _, key, _ in rows],
            task=[task.id for task, _, _ in rows],
            source=[0] * len(rows),
            **{"signal:success": [float(won) for _, _, won in rows]},
        )


def collected(
    rewards: list[float], usual: list[float], **settings: Any
) -> tuple[Asked, dict[str, Any], Experience]:
    collect = Asked(rewards)
    state, found = adjusted(prompts=len(rewards), group=4, **settings)({"rewards": usual}, collect)
    return collect, state, found


def test_hard_groups_get_hints_and_easy_ones_noise() -> None:
    """Usual is .5: a group at 0 is asked again with half of the answer, one at 1 with noise, one at .5 stays."""
    collect, state, found = collected([0.0, 0.5, 1.0], [0.25, 0.75], noise=0.5)
    (first, _), (again, into) = collect.asked
    assert into is not None
    assert into.tolist() == [0, 2]
    assert again[0] == collect.world.hint(first[0], 0.5)
    assert len(again[0].given) > 0
    changed = sum(a != b for a, b in zip(again[1].prompt, first[2].prompt, strict=True))
    assert 0 < changed <= round(0.25 * len(first[2].prompt))
    assert (again[1].id, again[1].data) == (first[2].id, first[2].data), "it is graded as it was"
    assert state["rewards"] == [0.25, 0.75, 0.5], "what is usual is of groups before they were adjusted"
    assert sorted(set(found["group"].tolist())) == [0, 1, 2]
    assert len(found.by("episode")) == 12
    assert collect.notes == pytest.approx({"hinted": 1 / 3, "noised": 1 / 3})


def test_a_band_and_a_window() -> None:
    collect, state, _ = collected([0.0, 1.0], [0.5], band=0.6, window=1)
    assert len(collect.asked) == 1
    assert state["rewards"] == [0.5]
    assert collected([0.0, 1.0], [0.5], hints=0.0)[0].asked[1][1].tolist() == [1]
    assert collected([0.0, 1.0], [0.5], noise=0.0)[0].asked[1][1].tolist() == [0]


def test_nothing_is_usual_in_the_first_step_and_nothing_hard_where_nothing_is_solved() -> None:
    assert len(collected([0.0, 1.0], [])[0].asked) == 1
    assert len(collected([0.0, 0.0], [0.0, 0.0])[0].asked) == 1


def test_the_hint_grows_with_the_distance() -> None:
    lengths = [len(collected([0.0], [usual])[0].asked[1][0][0].given) for usual in (0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]


def test_noise_is_the_same_for_the_same_seed_and_step() -> None:
    task = Chain().task("train", 0)
    one, same, other = (_noisy(task, 0.5, 12, 0, step).prompt for step in (1, 1, 2))
    assert one == same != other
    assert _noisy(task, 0.0, 12, 0, 1) == task


QUICK = {**SETTINGS, "update.lr": 1e-2, "sample.band": 0.0, "sample.name": "ended", "sample.noise": 1.0}


def test_what_is_usual_is_saved_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    choices = {"model": "fresh", "steps": 4, "settings": {**QUICK, "run.checkpoint_every": 2}}
    whole = bare(tmp_path / "run", "deepvideo-r1", **choices)
    logged = metrics(whole.run)
    assert any(row["hinted"] + row["noised"] > 0 for row in logged[1:])
    shutil.rmtree(whole.run / "checkpoints/step-0000004")
    (whole.run / "result.json").unlink()
    assert resume(whole.run).fingerprint == whole.fingerprint
    assert metrics(whole.run) == logged


@pytest.mark.parametrize(
    ("name", "world", "settings", "said"),
    [
        ("reg-grpo", "chain", {"surrogate.floor": 0.0}, "above 0"),
        ("reg-grpo", "chain", {"surrogate.scale": -1.0}, "above 0"),
        (
            "deepvideo-r1",
            "chain",
            {"sample.hints": 0.0, "sample.noise": 0.0},
            "nothing is made easier or harder",
        ),
        ("deepvideo-r1", "chain", {"sample.window": 0}, "at least 1"),
        ("deepvideo-r1", "chain", {"sample.temperature": 0.0}, "would be the same"),
        ("deepvideo-r1", "manyanswers", {}, "hint"),
    ],
)
def test_refusals(name: str, world: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan(name, world, settings=settings)
