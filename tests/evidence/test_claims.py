"""Claims: the rule of the verdict, pairing, escalation, symmetric tuning, and what is stored."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import panoply as pp
from panoply import cli, registry
from panoply.evidence import pool, scores, trials, verdicts
from panoply.evidence.claims import (
    SEEDS,
    Ahead,
    Diagnoses,
    Found,
    Identity,
    Learns,
    Measured,
    Ranks,
    Shows,
    Speed,
    together,
)
from panoply.evidence.contest import Desk
from panoply.evidence.gates import closed, gate_of_problems
from panoply.evidence.tuning import points
from panoply.registry import Entry

ENTRY = Entry("gigpo@1", "method", lambda: None, paper=81)
DESK = Desk(watch=pool.Watch())


# ------------------------------------------------------------------ the rule


@pytest.mark.parametrize(
    ("interval", "margin", "verdict"),
    [
        ((0.01, 0.2), 0.0, "holds"),
        ((-0.2, -0.01), 0.0, "fails"),
        ((-0.01, 0.2), 0.0, "undecided"),
        ((0.0, 0.2), 0.0, "undecided"),
        ((-0.01, 0.2), 0.02, "holds"),
        ((-0.2, -0.03), 0.02, "fails"),
        ((-0.2, -0.01), 0.02, "undecided"),
    ],
)
def test_the_interval_decides(interval: tuple[float, float], margin: float, verdict: str) -> None:
    assert Found(sum(interval) / 2, interval).verdict(margin) == verdict


def test_several_conditions() -> None:
    assert together(["holds", "holds"]) == "holds"
    assert together(["holds", "undecided"]) == "undecided"
    assert together(["undecided", "fails", "holds"]) == "fails"


def test_a_mean_of_differences_with_students_interval() -> None:
    """Mean 3, standard error √(2.5/5); t of four degrees of freedom that |T| passes in 1.98 % of cases: 3.7585."""
    found = Found.of([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 3.7585350541 * math.sqrt(2.5 / 5)
    assert found.difference == pytest.approx(3.0)
    assert found.interval == pytest.approx((3 - half, 3 + half), rel=1e-8)
    assert found.p == pytest.approx(2 * 0.0066, abs=2e-4)
    assert Found.of([0.5] * 5).interval == (0.5, 0.5), "no doubt is left"
    assert Found.of([0.5]).verdict() == "undecided", "one seed says nothing"


def came_to(effect: float, claims: int = 4000) -> Counter[str]:
    """What claims come to whose differences are normal with a deviation of 1 around the effect."""
    draws = np.random.default_rng(0).normal(effect, 1.0, (claims, SEEDS[-1]))
    looks = ((Found.of(row[:n]).verdict() for n in SEEDS) for row in draws)
    return Counter(next((v for v in look if v != "undecided"), "undecided") for look in looks)


def test_where_there_is_no_effect_few_claims_get_a_verdict() -> None:
    """Looking three times with intervals of 95 % would give one to about 9 %."""
    found = came_to(0.0)
    wrong = (found["holds"] + found["fails"]) / found.total()
    assert 0.035 < wrong < 0.06
    assert abs(found["holds"] - found["fails"]) < 0.02 * found.total()


def test_an_effect_of_one_deviation_is_found() -> None:
    found = came_to(1.0, 1000)
    assert found["holds"] > 0.94 * found.total()
    assert found["fails"] == 0


def test_what_fills_little_of_the_room_does_not_matter() -> None:
    found = Found(0.01, (0.005, 0.015))
    assert found.verdict(room=0.1) == "holds"
    assert found.verdict(room=0.3) == "too small to matter"
    assert Found(-0.01, (-0.015, -0.005)).verdict(room=0.3) == "too small to matter"
    assert Found(-0.01, (-0.015, -0.005)).verdict(margin=0.02, room=0.3) == "holds", "no worse is all it says"
    assert together(["holds", "too small to matter"]) == "too small to matter"
    assert together(["undecided", "too small to matter"]) == "undecided"


# ------------------------------------------------------------------ runs that are only pretended


class Pretended:
    """Stands in for the pool: every run has the score its plan says, and is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, score: Callable[[str, Any, int], float]):
        self.ran: list[tuple[str, float, int]] = []
        self.scores: dict[Path, float] = {}

        def run_all(orders: Any, *_: Any) -> None:
            for order in orders:
                seed, rate = order.plan.options.seed, order.plan.method.settings()["update.lr"]
                order.folder = Path(f"{order.name}-{rate}")
                if order.folder not in self.scores:  # else it is in the cache
                    self.ran.append((order.name.rsplit(" ", 1)[0], rate, seed))
                self.scores[order.folder] = score(order.name.rsplit(" ", 1)[0], rate, seed)

        def read(folder: Path, metric: str, unit: str, budget: float) -> scores.Scored:
            value = self.scores[folder] if metric != "kept" else 0.0
            return scores.Scored(value, [(0.0, 0.0), (budget, value)], 1.0, False)

        monkeypatch.setattr(pool, "run_all", run_all)
        monkeypatch.setattr(scores, "read", read)


PRETENDED = {"room": "it is pretended"}
CLAIM = Learns(
    "It is better.", over="grpo", world="keydoor", budget="episodes=256", metric="success", waives=PRETENDED
)


def test_it_holds_at_five_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = Pretended(monkeypatch, lambda name, rate, seed: (name == "gigpo") * 0.1 + seed % 7)
    facts = trials.put_to_test(ENTRY, CLAIM, DESK)
    assert (facts["verdict"], facts["seeds"]) == ("holds", 5)
    assert facts["difference"] == pytest.approx(0.1), "seeds differ by far more than methods: they are paired"
    assert facts["interval"] == pytest.approx([0.1, 0.1])
    assert facts["runs"][3] == {"seed": 3, "gigpo": pytest.approx(3.1), "grpo": 3}
    assert facts["tuning"]["runs"] == 2 * (3 * 2 + 2 * 3), "all points on two seeds, the best two on five"
    assert len(pretended.ran) == 24 + 10, "the gates take the baseline's tuning runs"
    assert facts["curves"]["gigpo"][0] == [[0.0, 0.0], [256.0, 0.1]]


@pytest.mark.parametrize(
    ("mark", "verdict", "words"),
    [(2.0, "holds", "seeds"), (2.5, "fails", "from the mark 2.5"), (2.1, "undecided", "from the mark 2.1")],
)
def test_a_mark_must_be_reached_too(
    monkeypatch: pytest.MonkeyPatch, mark: float, verdict: str, words: str
) -> None:
    """2.1 to 2.15 on all seeds; 2.1 itself is touched and not passed."""
    Pretended(monkeypatch, lambda name, rate, seed: (name == "gigpo") + 1.1 + 0.05 * (seed % 2))
    asked: list[tuple[str, int]] = []

    def known(world: Any, starts: int) -> float:
        asked.append((world.name, starts))
        return mark

    claim = dataclasses.replace(_plain(CLAIM), reaches=known, settings={"run.held_out": 107})
    facts = trials.put_to_test(ENTRY, claim, dataclasses.replace(DESK, most=5))
    assert facts["verdict"] == verdict
    assert facts["reaches"]["mark"] == mark
    assert asked[0] == ("keydoor", 107)
    assert words in trials.sentence(facts)


def _plain(claim: Learns) -> Ranks:
    return Ranks(**{f.name: getattr(claim, f.name) for f in dataclasses.fields(claim)})


def test_less_can_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretended(monkeypatch, lambda name, rate, seed: (name == "gigpo") * -0.1 - rate)
    facts = trials.put_to_test(ENTRY, dataclasses.replace(_ranks(CLAIM), lower=True), DESK)
    assert (facts["verdict"], facts["difference"]) == ("holds", pytest.approx(0.1))


def _ranks(claim: Ranks) -> Ranks:
    return Ranks(claim.says, claim.order, claim.world, claim.budget, claim.metric, waives=claim.waives)


# ------------------------------------------------------------------ tuning


def bracket(best: float) -> Callable[[str, Any, int], float]:
    """A score that falls by a tenth with every factor of ten between a rate and the best one."""
    return lambda name, rate, seed: 0.6 - 0.1 * abs(math.log10(rate / best))


def test_the_best_rate_is_bracketed_on_problems_and_seeds_that_decide_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GRPO's best, 3e-4, is inside of the grid; the other's lies two steps beyond it."""
    best = {"gigpo": 1e-5, "grpo": 3e-4}
    splits: dict[str, set[bool]] = {"test": set(), "validation": set()}
    pretended = Pretended(monkeypatch, lambda name, rate, seed: bracket(best[name])(name, rate, seed))
    run_all = pool.run_all

    def watched(orders: Any, *rest: Any) -> None:
        for order in orders:
            splits[order.plan.options.split].add(order.plan.options.seed > 1000)
        run_all(orders, *rest)

    monkeypatch.setattr(pool, "run_all", watched)
    tuning = trials.put_to_test(ENTRY, CLAIM, DESK)["tuning"]
    assert splits == {"test": {False}, "validation": {True}}
    tried = {name: {row["update.lr"] for row in tuning["tried"] if row["method"] == name} for name in best}
    assert tried == {"grpo": {1e-4, 3e-4, 1e-3}, "gigpo": {1e-5, 3e-5, 1e-4, 3e-4, 1e-3}}
    assert tuning["chosen"] == {"gigpo": {"update.lr": 1e-5}, "grpo": {"update.lr": 3e-4}}
    assert tuning["inside"] == {"gigpo": False, "grpo": True}, "twice at most"
    assert tuning["grid"] == {"update.lr": [1e-4, 3e-4, 1e-3]}, "both began with the same"
    seeds = {row["update.lr"]: row["seeds"] for row in tuning["tried"] if row["method"] == "grpo"}
    assert sorted(seeds.values()) == [2, 5, 5]
    assert seeds[3e-4] == 5
    rates = {rate for name, rate, seed in pretended.ran if name == "grpo" and seed < 1000}
    assert rates == {3e-4}


def test_five_seeds_choose_and_not_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e-3 is ahead on the first two seeds, and behind on all five."""

    def score(name: str, rate: float, seed: int) -> float:
        return {1e-4: 0.0, 3e-4: 0.5, 1e-3: 0.6 if seed < 1003 else 0.3}[rate]

    Pretended(monkeypatch, score)
    assert trials.put_to_test(ENTRY, CLAIM, DESK)["tuning"]["chosen"]["grpo"] == {"update.lr": 3e-4}


# ------------------------------------------------------------------ gates


def gated(monkeypatch: pytest.MonkeyPatch, baseline: float, **claim: Any) -> tuple[dict[str, Any], set[str]]:
    """What a claim comes to whose baseline ends so high, and who has run."""
    ran = Pretended(monkeypatch, lambda name, rate, seed: baseline + 0.05 * (name == "gigpo")).ran
    asked = {"over": "grpo", "world": "keydoor", "budget": "episodes=256", "metric": "success", **claim}
    return trials.put_to_test(ENTRY, Learns("It is better.", **asked), DESK), {name for name, _, _ in ran}


@pytest.mark.parametrize(("baseline", "able"), [(0.1, False), (0.2, True), (0.8, True), (0.9, False)])
def test_a_baseline_without_room_gets_no_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, baseline: float, able: bool
) -> None:
    facts, ran = gated(monkeypatch, baseline)
    assert (facts["verdict"] == "holds") == able
    if able:
        assert all(gate["passed"] for gate in facts["gates"])
        return
    assert ran == {"grpo"}, "the method is not even tuned"
    assert trials.sentence(facts) == (
        f"gigpo is not able to tell: the gate of room: grpo goes from 0 to {baseline:g} where 1 is the best known, "
        f"{baseline:.0%} of the room; 15% to 85% can tell"
    )
    trials.store_result(facts, tmp_path)
    trials.store_result(facts, tmp_path)
    assert trials.stored("gigpo", tmp_path)["history"][0]["verdict"] == "not able to tell"  # type: ignore[index]
    with pytest.raises(pp.PanoplyError, match="nothing to replicate: gigpo is not able to tell"):
        trials.replicate(ENTRY, CLAIM, DESK, tmp_path)
    stands, _, now = trials.check(ENTRY, _plain(CLAIM), Desk(tmp_path / "runs", watch=pool.Watch()), tmp_path)
    assert (stands, now["verdict"]) == (False, "holds"), "asked again, with the gate waived"


def test_what_the_method_exploits_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended run has its score under every name."""
    facts, _ = gated(monkeypatch, 0.5, shows=(Shows("degenerate_groups", least=0.6),))
    assert facts["verdict"] == "not able to tell"
    assert facts["why"] == "the gate of property: degenerate_groups of grpo is 0.5; at least 0.6 can tell."
    facts, _ = gated(monkeypatch, 0.5, shows=(Shows("degenerate_groups", least=0.4, most=0.6),))
    assert facts["verdict"] == "holds"


def test_few_problems_need_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, ran = gated(monkeypatch, 0.5, settings={"run.held_out": 99})
    assert facts["why"] == "the gate of problems: 99 different held-out problems."
    assert not ran
    facts, _ = gated(monkeypatch, 0.5, world="strings", waives={"problems": "there are six prompts"})
    assert facts["verdict"] == "holds"
    assert facts["gates"][0] == {
        "gate": "problems", "passed": False, "measured": "6 different held-out problems",
        "waived": "there are six prompts",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"world": "cartpole", "over": "reinforce", "method": "ppo"}, "does not say how much room there is"),
        ({"metric": "entropy"}, r"is about entropy, which has no start: say with shows="),
        ({"tune": {}}, "not tuned says why"),
        ({"fixed": "because"}, "has a grid of one point"),
        ({"waives": {"rooms": "x"}}, "Did you mean 'room'"),
        ({"race": "chain"}, "says over, world, budget, settings and tune by itself"),
    ],
)  # fmt: skip
def test_a_claim_that_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, claim: dict[str, Any], said: str
) -> None:
    with pytest.raises(pp.PanoplyError, match=said):
        gated(monkeypatch, 0.5, **({"settings": {"run.held_out": 100}} | claim))


def test_a_race_is_run_once_for_all_claims_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two claims on one race name the same plans of its baseline, tuning included."""
    pretended = Pretended(monkeypatch, bracket(3e-4))
    of = {}
    for name in ("gspo", "rloo"):
        pretended.ran.clear()
        trials.put_to_test(Entry(f"{name}@1", "method", lambda: None), Learns("It is.", race="chain"), DESK)
        of[name] = {who for who, _, _ in pretended.ran}
    assert of == {"gspo": {"gspo", "grpo"}, "rloo": {"rloo"}}


def test_undecided_goes_to_ten_and_twenty_seeds_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = [1, -1, 1, -1, 0.5] * 4
    pretended = Pretended(monkeypatch, lambda name, rate, seed: noise[seed % 20] * (name == "gigpo"))
    facts = trials.put_to_test(ENTRY, CLAIM, DESK)
    assert (facts["verdict"], facts["seeds"]) == ("undecided", 20)
    assert max(seed for _, _, seed in pretended.ran if seed < 1000) == 19
    capped = trials.put_to_test(ENTRY, CLAIM, Desk(watch=pool.Watch(), most=10))
    assert (capped["verdict"], capped["seeds"]) == ("undecided", 10)
    assert capped["note"] == "Not taken beyond 10 seeds: --most 10."
    assert "note" not in facts


def test_more_seeds_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretended(monkeypatch, lambda name, rate, seed: (-1.0 if seed == 0 else 1.0) * (name == "gigpo"))
    facts = trials.put_to_test(ENTRY, CLAIM, DESK)
    assert (facts["verdict"], facts["seeds"]) == ("holds", 10)


def test_what_must_be_kept_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretended(monkeypatch, lambda name, rate, seed: float(name == "gigpo"))
    keeping = dataclasses.replace(_ranks(CLAIM), keeps={"kept": 0.02}, also=("kept",))
    facts = trials.put_to_test(ENTRY, keeping, DESK)
    assert (facts["verdict"], facts["keeps"]["kept"]["margin"]) == ("holds", 0.02)
    read = scores.read
    monkeypatch.setattr(
        scores, "read",
        lambda folder, metric, *rest: dataclasses.replace(
            found := read(folder, metric, *rest),
            value=found.value - 0.5 * (metric == "kept" and folder.name.startswith("gigpo")),
        ),
    )  # fmt: skip
    facts = trials.put_to_test(ENTRY, keeping, DESK)
    assert facts["verdict"] == "fails", "it is better, and loses too much of what it must keep"
    assert trials.sentence(facts).endswith("; kept -0.5 (-0.5 to -0.5), which may lose 0.02")


def test_a_ranking_is_as_strong_as_its_weakest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = {"gigpo": 3.0, "grpo": 1.0, "rloo": 0.9}
    Pretended(monkeypatch, lambda name, rate, seed: worth[name])
    three = Ranks(
        "In this order.", ("", "grpo", "rloo"), "keydoor", "episodes=256", "success", waives=PRETENDED
    )
    facts = trials.put_to_test(ENTRY, three, DESK)
    assert (facts["verdict"], facts["difference"]) == ("holds", pytest.approx(0.1))
    worth["rloo"] = 1.1
    assert trials.put_to_test(ENTRY, three, DESK)["verdict"] == "fails"


def test_no_worse_than_within_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 less than the next counts where 0.2 may be lost, and the gap that is nearest to failing is told."""
    worth = {"gigpo": 2.0, "grpo": 2.1, "rloo": 0.9}
    Pretended(monkeypatch, lambda name, rate, seed: worth[name])
    three = Ranks(
        "In this order.", ("", "grpo", "rloo"), "keydoor", "episodes=256", "success", waives=PRETENDED
    )
    assert trials.put_to_test(ENTRY, three, DESK)["verdict"] == "fails"
    facts = trials.put_to_test(ENTRY, dataclasses.replace(three, margins=(0.2, 0.0)), DESK)
    assert (facts["verdict"], facts["difference"], facts["margin"]) == ("holds", pytest.approx(-0.1), 0.2)
    assert [(gap["ahead"], gap["behind"]) for gap in facts["gaps"]] == [("gigpo", "grpo"), ("grpo", "rloo")]
    assert ", where -0.2 is enough, over 5 seeds" in trials.sentence(facts)


def test_the_gap_that_decides_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against grpo it certainly loses a little, against rloo perhaps a lot: the first is why the claim fails."""
    Pretended(
        monkeypatch,
        lambda name, rate, seed: {"gigpo": 1.0, "grpo": 1.2, "rloo": (1.0, 2.0, 0.0, 3.0, -1.0)[seed % 5]}[
            name
        ],
    )
    three = Ranks(
        "Best of all.",
        ("", "grpo", "rloo"),
        "keydoor",
        "episodes=256",
        "success",
        leads=True,
        waives=PRETENDED,
    )
    facts = trials.put_to_test(ENTRY, three, dataclasses.replace(DESK, most=5))
    assert facts["parts"] == {"gigpo ahead of grpo": "fails", "gigpo ahead of rloo": "undecided"}
    assert (facts["verdict"], facts["difference"]) == ("fails", pytest.approx(-0.2))


def test_the_first_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is compared with each of the others, whose own order does not matter."""
    worth = {"gigpo": 3.0, "grpo": 1.0, "rloo": 2.0}
    Pretended(monkeypatch, lambda name, rate, seed: worth[name])
    three = Ranks(
        "Best of all.",
        ("", "grpo", "rloo"),
        "keydoor",
        "episodes=256",
        "success",
        leads=True,
        waives=PRETENDED,
    )
    facts = trials.put_to_test(ENTRY, three, DESK)
    assert (facts["verdict"], facts["difference"]) == ("holds", pytest.approx(1.0))
    worth["rloo"] = 3.5
    assert trials.put_to_test(ENTRY, three, DESK)["verdict"] == "fails"


def test_a_grid_of_one_point_is_taken_without_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = Pretended(monkeypatch, lambda name, rate, seed: float(name == "gigpo"))
    untuned = dataclasses.replace(_ranks(CLAIM), tune={"update.lr": (7e-4,)}, fixed="it is pretended")
    facts = trials.put_to_test(ENTRY, untuned, DESK)
    assert {rate for _, rate, _ in pretended.ran} == {7e-4}
    assert len(pretended.ran) == 10 + 2, "two of the baseline for the gates"
    assert facts["tuning"]["chosen"]["grpo"] == {"update.lr": 7e-4}


def test_a_check_takes_the_stored_tuning_and_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Pretended(monkeypatch, lambda name, rate, seed: float(name == "gigpo"))
    facts = trials.put_to_test(ENTRY, CLAIM, DESK)
    trials.store_result(facts, tmp_path)
    pretended = Pretended(monkeypatch, lambda name, rate, seed: float(name == "gigpo"))
    desk = Desk(tmp_path / "runs" / ".cache", watch=pool.Watch())
    stands, before, now = trials.check(ENTRY, CLAIM, desk, tmp_path)
    assert (stands, before, now["verdict"]) == (True, facts, "holds")
    assert len(pretended.ran) == 10, "nothing is tuned again"
    Pretended(monkeypatch, lambda name, rate, seed: -float(name == "gigpo"))
    stands, _, now = trials.check(ENTRY, CLAIM, desk, tmp_path)
    assert (stands, now["verdict"]) == (False, "fails")


def test_a_replication_takes_new_seeds_and_is_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Pretended(monkeypatch, lambda name, rate, seed: float(name == "gigpo"))
    trials.store_result(trials.put_to_test(ENTRY, CLAIM, DESK), tmp_path)
    pretended = Pretended(monkeypatch, lambda name, rate, seed: -float(name == "gigpo"))
    for first in (100_000, 200_000):
        pretended.ran.clear()
        assert trials.replicate(ENTRY, CLAIM, DESK, tmp_path)["verdict"] == "fails"
        assert {seed for _, _, seed in pretended.ran} == set(range(first, first + 5)), (
            "nothing is tuned again"
        )
    kept = json.loads((tmp_path / "gigpo.json").read_text())
    assert (kept["verdict"], kept["seeds"]) == ("holds", 5), "what was found first stays"
    assert [(r["first seed"], r["verdict"]) for r in kept["replications"]] == [
        (100_000, "fails"),
        (200_000, "fails"),
    ]


def test_a_run_that_diverged_counts_as_the_worst_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretended(monkeypatch, lambda name, rate, seed: 0.9 if name == "gigpo" else 0.1 * (seed % 7))
    read = scores.read
    monkeypatch.setattr(
        scores, "read",
        lambda folder, *rest: dataclasses.replace(read(folder, *rest), diverged=folder.name.startswith("gigpo s3")),
    )  # fmt: skip
    untuned = dataclasses.replace(_ranks(CLAIM), tune={"update.lr": (1e-3,)}, fixed="it is pretended")
    found = trials.put_to_test(ENTRY, untuned, dataclasses.replace(DESK, most=5))
    assert found["difference"] == pytest.approx((4 * 0.9 + 0.0 - (0.0 + 0.1 + 0.2 + 0.3 + 0.4)) / 5)
    assert found["diverged"] == {"gigpo": 1, "grpo": 0}


def test_the_parts_of_a_claim_have_verdicts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = {"gigpo": 0.5, "grpo": 0.49, "rloo": 0.2}
    Pretended(monkeypatch, lambda name, rate, seed: worth[name])
    three = Ranks(
        "In this order.", ("", "grpo", "rloo"), "keydoor", "episodes=256", "success", waives=PRETENDED
    )
    facts = trials.put_to_test(ENTRY, three, DESK)
    assert facts["parts"] == {"gigpo ahead of grpo": "too small to matter", "grpo ahead of rloo": "holds"}
    assert facts["verdict"] == "too small to matter"
    assert facts["room"] == {"size": pytest.approx(0.51), "filled": pytest.approx(0.0196, abs=1e-4)}
    bounded = dataclasses.replace(three, best=0.6)
    assert trials.put_to_test(ENTRY, bounded, DESK)["verdict"] == "holds"


def test_nothing_stored_to_check(tmp_path: Path) -> None:
    with pytest.raises(pp.PanoplyError, match="Nothing is stored for gigpo yet"):
        trials.check(ENTRY, CLAIM, DESK, tmp_path)


# ------------------------------------------------------------------ what a function measures


def measured(claim: Measured) -> dict[str, Any]:
    return trials.put_to_test(ENTRY, claim, DESK)


def test_an_identity_must_be_one_on_every_seed() -> None:
    facts = measured(Identity("They are equal.", lambda seed: {"gap": 1e-6 * seed, "speed": 2.0}))
    assert (facts["verdict"], facts["difference"], facts["seeds"]) == ("holds", pytest.approx(4e-6), 5)
    assert facts["runs"][2] == {"seed": 2, "gap": 2e-6, "speed": 2.0}
    assert trials.sentence(facts) == "gigpo holds: gap at most 4e-06 over 5 seeds"
    assert (
        measured(Identity("They are equal.", lambda seed: {"gap": 1e-4 * (seed == 4)}))["verdict"] == "fails"
    )


def test_a_speed_is_a_ratio() -> None:
    assert measured(Speed("It is faster.", lambda seed: {"ratio": 1.5}))["difference"] == pytest.approx(0.5)
    assert measured(Speed("It is faster.", lambda seed: {"ratio": 1.5}, least=2.0))["verdict"] == "fails"
    unsteady = measured(Speed("It is faster.", lambda seed: {"ratio": 0.5 + (seed % 2)}))
    assert (unsteady["verdict"], unsteady["seeds"]) == ("undecided", 20)


def test_a_diagnosis_flags_the_fault_and_not_the_sound_case() -> None:
    assert measured(Diagnoses("It is flagged.", lambda seed: {"flagged": 1.0}))["verdict"] == "holds"
    assert measured(Diagnoses("It is flagged.", lambda seed: {"flagged": 0.0}))["verdict"] == "undecided"
    assert (
        measured(Ahead("Its error is less.", lambda seed: {"less error": 0.1 + seed}))["verdict"] == "holds"
    )
    assert measured(Ahead("Its error is less.", lambda seed: {"less error": -0.1}))["verdict"] == "fails"


# ------------------------------------------------------------------ claims that are there


def claims() -> Mapping[str, Any]:
    return {e.name: (e, c) for e, c in trials.claimed(everything=True)}


def test_every_cited_work_carries_a_claim() -> None:
    """One of the forms it has here does; a world may carry one too."""
    cited = {e.paper for e in registry.entries() if e.paper is not None and e.kind != "world"}
    assert cited <= {entry.paper for entry, _ in claims().values()}
    assert all(entry.paper is not None or entry.kind == "world" for entry, _ in claims().values())


@pytest.mark.parametrize("name", sorted(claims()))
def test_a_claim_can_be_run(name: str) -> None:
    """Both sides plan, at the same budget in the same world (but for what an arm says of it), with a grid for both."""
    _, claim = claims()[name]
    assert re.fullmatch(r"[A-Z].{30,}\.", claim.says)
    if not isinstance(claim, Ranks):
        return
    entry, _ = claims()[name]
    contest = trials.contest(entry, claim, DESK)
    said = {path.removeprefix("world.") for arm in contest.arms for path in arm.settings}
    for point in points(claim.tune):
        ((_, sides),) = contest.orders([arm.but(point) for arm in contest.arms], [0])
        plans = [order.plan for order in sides.values()]
        worlds = [{k: v for k, v in p.world_options.items() if k not in said} for p in plans]
        assert (
            len({(p.world_id, str(w), p.options.held_out) for p, w in zip(plans, worlds, strict=True)}) == 1
        )
        assert len({(p.options.episodes, p.options.decisions) for p in plans}) == 1
        assert all(p.method.settings()[path] == value for p in plans for path, value in point.items())
    assert len({arm.label for arm in contest.arms}) == len(contest.arms) >= 2
    assert closed([gate_of_problems(contest)]) is None


# ------------------------------------------------------------------ the command


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["claim", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gigp"], "Did you mean 'gigpo'"),
        (["grpo"], "'grpo' carries no claim"),
        (["--family", "agent"], "Did you mean 'agents'"),
        (["gigpo", "--all"], "one of the three"),
        (["gigpo", "--most", "1"], "--most must be at least 2"),
        (["gigpo", "--check"], "Nothing is stored for gigpo yet"),
        (["gigpo", "--replicate"], "Nothing is stored for gigpo yet"),
        (["gigpo", "--replicate", "--check"], "name one of the two"),
    ],
)
def test_bad_input(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert said in err


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Pretended(monkeypatch, lambda name, rate, seed: 0.5 + 0.5 * (name == "gigpo"))
    code, out, err = run(["gigpo", "--quiet"], capsys)
    assert (code, err) == (0, "")
    assert out.startswith(
        "gigpo holds: area +0.5 (98 % interval +0.5 to +0.5), 100% of the room there was, over 5 seeds"
    )
    facts = json.loads((tmp_path / "results" / "claims" / "gigpo.json").read_text())
    assert {"id", "paper", "verdict", "difference", "interval", "seeds", "runs", "curves", "command", "versions",
            "date", "tuning"} <= facts.keys()  # fmt: skip
    assert (facts["id"], facts["paper"], facts["command"]) == ("gigpo@1", 81, "panoply claim gigpo")
    code, out, _ = run([], capsys)
    assert re.search(r"gigpo\s+learns\s+holds", out)
    shipped = verdicts.shipped()["igpo"]["verdict"]
    assert re.search(rf"\nigpo\s+learns\s+{shipped}", out)
    monkeypatch.setattr(verdicts, "shipped", dict)
    assert re.search(r"\nigpo\s+learns\s+not measured", run([], capsys)[1])
    code, out, _ = run(["gigpo", "--check", "--quiet"], capsys)
    assert (code, out.split("\n")[0]) == (0, "gigpo: the stored verdict still stands.")


def test_everything_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two claims one was measured with this code already; the table has both."""
    monkeypatch.chdir(tmp_path)
    pretended = Pretended(monkeypatch, lambda name, rate, seed: 0.5 + 0.2 * (name in ("gigpo", "igpo")))
    two = trials.claimed(["gigpo", "igpo"])
    monkeypatch.setattr(trials, "claimed", lambda *_: two)
    run(["--all", "--quiet"], capsys)
    pretended.ran.clear()
    store = tmp_path / "results" / "claims"
    facts = json.loads((store / "igpo.json").read_text())
    (store / "igpo.json").write_text(json.dumps({**facts, "stamp": "of other code", "verdict": "fails"}))
    code, out, _ = run(["--all", "--quiet"], capsys)
    assert code == 0
    assert {name for name, _, _ in pretended.ran} <= {"igpo", "grpo"}
    assert "igpo holds" in out
    assert "gigpo holds" not in out
    of = re.escape(facts["commit"] or facts["date"])
    assert re.search(rf"\ngigpo\s+–\s+holds \({of}\)", out)
    assert re.search(rf"\nigpo\s+fails \({of}\)\s+holds \({of}\)", out)


def test_a_stored_result_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "gigpo.json").write_text("{")
    with pytest.raises(pp.PanoplyError, match="is not valid JSON.*Measure the claim again"):
        trials.stored("gigpo", tmp_path)
