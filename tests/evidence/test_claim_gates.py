"""Gates: a claim that is not able to tell gets no verdict, and one that cannot be asked is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pretended import CLAIM, DESK, ENTRY, Pretended, bracket, plain

import panoply as pp
from panoply.evidence import pool, trials
from panoply.evidence.claims import Learns, Shows
from panoply.evidence.contest import Desk
from panoply.registry import Entry


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
    stands, _, now = trials.check(ENTRY, plain(CLAIM), Desk(tmp_path / "runs", watch=pool.Watch()), tmp_path)
    assert (stands, now["verdict"]) == (False, "holds"), "asked again, with the gate waived"


def test_what_the_method_exploits_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended run has its score under every name."""
    facts, _ = gated(monkeypatch, 0.5, shows=(Shows("degenerate_groups", least=0.6),))
    assert facts["verdict"] == "not able to tell"
    assert facts["why"] == "the gate of property: degenerate_groups of grpo is 0.5; at least 0.6 can tell."
    for metric in ("degenerate_groups", "world:pass@4"):
        facts, _ = gated(monkeypatch, 0.5, shows=(Shows(metric, least=0.4, most=0.6),))
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
