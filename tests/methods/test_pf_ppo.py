"""PF-PPO: ranks within prompts, every rule by hand, credit after the filter, and R² of what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import hand

import panoply as pp
from panoply.errors import PanoplyError
from panoply.evaluation.judged import judge
from panoply.evaluation.r2 import r_squared
from panoply.experience import Experience, Segments
from panoply.methods.preferences.pf_ppo import ahead, kept, planted, ranked
from panoply.run import Run
from panoply.slots.credit.groups import group

REWARDS = [[0.9, 0.1, 0.5, 0.4, 0.3], [30.0, 32.0, 31.0, 35.0, 29.0]]


def two_prompts() -> Experience:
    """Five answers of two tokens to each of two prompts, one of which pays far more; episodes 10 to 19."""
    rewards = [r for row in REWARDS for r in row]
    return hand(
        episode=[10 + i for i in range(10) for _ in range(2)],
        group=[g for g in (3, 4) for _ in range(10)],
        reward=[x for r in rewards for x in (0.0, r)],
        **{"signal:other": [x for r in rewards for x in (0.0, -r)]},
    )


def left(**settings: Any) -> list[int]:
    return sorted(set(ranked(**settings)(two_prompts())["episode"].tolist()))


def test_every_rule_ranks_within_prompts() -> None:
    assert left(rule="best_worst", keep=2) == [10, 11, 18, 19]
    assert left(rule="best_worst", keep=4) == sorted([10, 12, 14, 11, 18, 16, 15, 19])
    assert left(rule="best_worst", keep=3) == sorted([10, 12, 11, 18, 16, 19]), "the odd one is from above"
    assert left(rule="best", keep=2) == [10, 12, 16, 18]
    some = left(rule="best_random", keep=2)
    assert len(some) == 4
    assert {10, 18} < set(some)
    assert len(left(rule="none", keep=3)) == 6
    assert left(rule="best", keep=2, name="other") == [11, 14, 15, 19], "by another signal"


def test_by_the_whole_batch_one_prompt_takes_all() -> None:
    """As released code does: the best of the batch are all of the prompt that pays more."""
    assert left(rule="best_worst", keep=2, among="batch") == sorted([18, 16, 11, 14])


def test_lots_are_drawn_by_rank_or_by_power() -> None:
    """Over many prompts: `none` takes each rank alike, `best_random` the rest alike, `pow` by the squares."""
    rewards = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(3000)
    peers = Segments(torch.arange(3000).repeat_interleave(4))

    def shares(rule: Any, keep: int) -> list[float]:
        return kept(rewards, peers, rule, keep, 2.0, 1).view(-1, 4).double().mean(0).tolist()

    assert shares("none", 1) == pytest.approx([0.25] * 4, abs=0.03)
    assert shares("best_random", 2) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0], abs=0.03)
    assert shares("pow", 1) == pytest.approx([0.0, 1 / 14, 4 / 14, 9 / 14], abs=0.03)


def test_ties_and_small_groups() -> None:
    peers = Segments(torch.tensor([0, 0, 0, 1]))
    chosen = kept(torch.tensor([1.0, 1.0, 1.0, 5.0]), peers, "best_worst", 2, 2.0, 0)
    assert chosen.tolist() == [True, False, True, True], (
        "the first and the last of equals, and all of too few"
    )


def test_credit_is_of_what_is_kept() -> None:
    """Filtered before anything is normalised: .9 and .1 are +1 and −1 in units of their own deviation."""
    made = ranked(rule="best_worst", keep=2)(two_prompts())
    advantage = group(epsilon=0.0)(made)
    found = dict(zip(made["episode"].tolist(), advantage.tolist(), strict=True))
    assert found[10] == pytest.approx(0.5**0.5)
    assert found[11] == pytest.approx(-(0.5**0.5))


def test_r_squared_by_hand() -> None:
    """Through (0, 0), (1, 1), (2, 0), (3, 3): slope 4/5, 1.4 + 0.4·… of 6 left."""
    r, q = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.0, 3.0])
    assert r_squared(r, q) == pytest.approx(0.8 * 4 / 6)
    assert r_squared(r, 5 - 2 * r) == pytest.approx(1.0)
    assert r_squared(r, torch.ones(4)) == 0.0
    wide, noisy = torch.arange(30.0), torch.arange(30.0) + torch.tensor([5.0, -5.0, 0.0]).repeat(10)
    assert r_squared(wide, noisy, bins=10) > r_squared(wide, noisy), "means of bins have less error"
    for reward, bins in ((r[:2], 0), (r, 2), (r, 5)):
        with pytest.raises(PanoplyError, match="R² needs"):
            r_squared(reward, q[: len(reward)], bins)


def test_extremes_tell_more_where_the_middle_errs() -> None:
    found = planted(1001)
    assert found["best_worst"] > found["none"] > found["best"]
    measured = ahead(1001)
    assert measured["ahead"] == pytest.approx(found["best_worst"] - found["none"])
    everywhere = planted(1001, middle=False)
    assert measured["errors everywhere"] == pytest.approx(everywhere["best_worst"] - everywhere["none"])
    large = planted(1001, error=1.0)
    assert large["best_worst"] - large["none"] < measured["ahead"] / 2, "extremes of reward are errors then"


def test_a_run_and_its_r_squared(tmp_path: Path) -> None:
    settings = {
        "sample.prompts": 2,
        "sample.group": 4,
        "select.ranked.keep": 2,
        "run.held_out": 4,
        "models.critic.warmup": 0,
    }
    done = tiny.bare(
        tmp_path / "run", "pf-ppo", world="strings:noisy", model="fresh", steps=2, settings=settings
    )
    assert tiny.metrics(done.run)[-1]["episodes"] in (4, 8)
    found = judge(Run.open(done.run), "reward-fit", {"problems": 4, "answers": 6, "keep": 4})
    assert {"none", "best_worst"} <= found.keys()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sample.group": 1, "select.ranked.keep": 1}, "keeps two answers"),
        ({"select.ranked.keep": 9}, "a prompt has 8 answers"),
        ({"select.ranked.keep": 8, "select.ranked.rule": "best"}, "all answers to a prompt are kept"),
        ({"select.ranked.keep": 1}, "keeps two answers or more"),
        ({"select.ranked.power": 3.0}, "ranks alone count"),
        ({"select.ranked.rule": "pow", "select.ranked.power": 0.0}, "above 0"),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("pf-ppo", "strings:noisy", settings=settings)
