"""Claims: pairing, symmetric tuning, escalation, and what is stored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pretended import CLAIM, DESK, ENTRY, PRETENDED, Pretended, bracket, plain

import panoply as pp
from panoply.errors import PanoplyError
from panoply.evidence import pool, scores, trials
from panoply.evidence.claims import (
    Ahead,
    Diagnoses,
    Identity,
    Measured,
    Ranks,
    Speed,
)
from panoply.evidence.contest import Desk


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

    claim = dataclasses.replace(plain(CLAIM), reaches=known, settings={"run.held_out": 107})
    facts = trials.put_to_test(ENTRY, claim, dataclasses.replace(DESK, most=5))
    assert facts["verdict"] == verdict
    assert facts["reaches"]["mark"] == mark
    assert asked[0] == ("keydoor", 107)
    assert words in trials.sentence(facts)


def test_less_can_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretended(monkeypatch, lambda name, rate, seed: (name == "gigpo") * -0.1 - rate)
    facts = trials.put_to_test(ENTRY, dataclasses.replace(_ranks(CLAIM), lower=True), DESK)
    assert (facts["verdict"], facts["difference"]) == ("holds", pytest.approx(0.1))


def _ranks(claim: Ranks) -> Ranks:
    return Ranks(claim.says, claim.order, claim.world, claim.budget, claim.metric, waives=claim.waives)


# ------------------------------------------------------------------ tuning


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


def test_what_one_side_alone_measures_is_told_of_that_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all runs are made nothing is lost to a metric that the baseline has not; what nobody has is an error."""
    Pretended(monkeypatch, lambda name, rate, seed: float(name == "gigpo"))
    read = scores.read

    def own(folder: Path, metric: str, *rest: Any) -> scores.Scored:
        if metric == "nobody's" or (metric == "own" and not folder.name.startswith("gigpo")):
            raise PanoplyError(f"Unknown metric {metric}.")
        return read(folder, metric, *rest)

    monkeypatch.setattr(scores, "read", own)
    facts = trials.put_to_test(ENTRY, dataclasses.replace(_ranks(CLAIM), also=("own", "success")), DESK)
    assert facts["also"]["own"] == {"gigpo": 1.0}
    assert facts["also"]["success"]["difference"] == 1.0
    with pytest.raises(PanoplyError, match="nobody's"):
        trials.put_to_test(ENTRY, dataclasses.replace(_ranks(CLAIM), also=("nobody's",)), DESK)


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


def test_an_identity_must_be_one_on_every_seed(tmp_path: Path) -> None:
    claim = Identity("They are equal.", lambda seed: {"gap": 1e-6 * seed, "speed": 2.0})
    facts = measured(claim)
    assert (facts["verdict"], facts["difference"], facts["seeds"]) == ("holds", pytest.approx(4e-6), 5)
    assert facts["runs"][2] == {"seed": 2, "gap": 2e-6, "speed": 2.0}
    trials.store_result(facts, tmp_path)
    assert trials.replicate(ENTRY, claim, DESK, tmp_path)["verdict"] == "fails"
    kept = json.loads((tmp_path / "gigpo.json").read_text())["replications"]
    assert [(r["first seed"], r["verdict"]) for r in kept] == [(100_000, "fails")]
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
