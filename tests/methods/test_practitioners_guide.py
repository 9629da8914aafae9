"""The practitioner's guide: its dense reward by hand, GAE by the authors' scan, and its sweeps without their runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from kit import hand, shuffled

import panoply as pp
from panoply import functions
from panoply.methods.agents import practitioners_guide as guide
from panoply.slots.credit.gae import gae


def test_dense_rewards_by_hand() -> None:
    """Of two episodes of four quarters each the first goes on, back, on again and past its best; the second stops."""
    rows = hand(
        episode=[0, 0, 0, 0, 1, 1, 1],
        turn=[0, 1, 2, 3, 0, 1, 2],
        **{
            "signal:progress": [0.25, -0.25, 0.25, 0.25, 0.25, 0.25, -0.25],
            "signal:success": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        },
    )
    found = guide.milestones()(rows)
    assert found[:4].tolist() == pytest.approx([0.5, 0.0, 0.0, 0.5]), "two rises, and success is 1 in all"
    assert found[4:].tolist() == pytest.approx([0.25, 0.25, 0.0]), (
        "half of what there was to do, nothing taken back"
    )
    mixed = shuffled(rows)
    order = {(int(e), int(t)): float(r) for e, t, r in zip(rows["episode"], rows["turn"], found, strict=True)}
    again = guide.milestones()(mixed)
    assert [
        order[int(e), int(t)] for e, t in zip(mixed["episode"], mixed["turn"], strict=True)
    ] == again.tolist()


def test_success_without_a_score() -> None:
    """An episode that never rose has no rise to share: it earns nothing rather than a division by zero."""
    rows = hand(episode=[0, 0], turn=[0, 1], **{"signal:progress": [-0.5, 0.5], "signal:success": [0.0, 1.0]})
    assert guide.milestones()(rows).tolist() == [0.0, 0.0]


def scanned(reward: list[float], value: list[float], drawn: list[bool], lam: float) -> list[float]:
    """The card's reverse scan: what the environment says (`drawn` false) carries V and A on unchanged."""
    after, advantage, found = 0.0, 0.0, [0.0] * len(reward)
    for t in reversed(range(len(reward))):
        if drawn[t]:
            advantage = reward[t] + after - value[t] + lam * advantage
            after = value[t]
        found[t] = advantage
    return found


def test_gae_passes_over_what_the_environment_says() -> None:
    """Values of observation tokens are nonsense here, and must not be seen."""
    drawn = [True, True, False, False, True, False, True]
    reward, value = [0.0, 0.5, 9.0, 9.0, 0.0, 9.0, 0.5], [0.1, 0.4, 7.0, -7.0, 0.3, 7.0, 0.8]
    wanted = [a for a, own in zip(scanned(reward, value, drawn, 0.95), drawn, strict=True) if own]
    own = [i for i, d in enumerate(drawn) if d]
    rows = hand(
        episode=[0] * 4,
        turn=[0, 0, 1, 2],
        step=list(range(4)),
        reward=[reward[i] for i in own],
        value=[value[i] for i in own],
    )
    assert gae(normalise=False)(rows)["advantage"].tolist() == pytest.approx(wanted)
    white = gae(normalise=True)(rows)["advantage"]
    assert float(white.mean()) == pytest.approx(0, abs=1e-6)
    assert float(white.std()) == pytest.approx(1, rel=1e-5)


class Asked(guide.Bench):
    """Trains nothing: remembers what it was asked for, and finds what `reached` says."""

    asked: ClassVar[list[tuple[str, str, dict[str, Any], dict[str, Any]]]] = []
    reached: ClassVar[dict[tuple[str, str], float]] = {}

    def train(self, name: str, world: str, settings: Any, **options: Any) -> Any:
        self.asked.append((name, world, dict(settings), options))
        paid = settings.get("reward", "sparse")
        after = {"sampled": self.reached.get((name, paid), 0.5)}
        return SimpleNamespace(run=self.folder / "3-learn", before={"sampled": 0.01}, after=after)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> type[Asked]:
    monkeypatch.setattr(guide, "Bench", Asked)
    monkeypatch.setattr(Asked, "asked", [])
    rated = lambda run, **asked: SimpleNamespace(sampled=0.25 if "settings" in asked else 0.75)  # noqa: E731
    monkeypatch.setattr("panoply.api.evaluate", rated)
    return Asked


def test_the_claim_is_a_difference_of_gains(bench: type[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    """PPO gains .3 and GRPO .1."""
    paid = {
        ("ppo", "sparse"): 0.4,
        ("ppo", "milestones"): 0.7,
        ("grpo", "sparse"): 0.2,
        ("grpo", "milestones"): 0.3,
    }
    monkeypatch.setattr(bench, "reached", paid)
    found = guide.interaction(1001)
    assert next(iter(found.values())) == pytest.approx(0.2)
    assert [(name, settings.get("reward"), options["steps"]) for name, _, settings, options in bench.asked] == [
        ("ppo", None, 30), ("ppo", "milestones", 30), ("grpo", None, 30), ("grpo", "milestones", 30)
    ]  # fmt: skip


def test_a_split_costs_the_same_everywhere(bench: type[Asked]) -> None:
    table = functions.call("practitioners-guide", {"sweep": "split", "steps": "10"})
    assert list(table) == [
        "split: 0 shown, 640 of one's own",
        "split: 16 shown, 512 of one's own",
        "split: 32 shown, 320 of one's own",
        "split: 48 shown, 128 of one's own",
        "split: 64 shown, 0 of one's own",
    ]
    assert table["split: 32 shown, 320 of one's own"] == {"success": 0.75, "harder": 0.25}
    assert [name for name, *_ in bench.asked] == ["ppo"] + 4 * ["meow-tea-taro"]


def test_all_sweeps_can_be_asked_for(bench: type[Asked]) -> None:
    """Every run that they ask for is one that can be planned."""
    table = guide.practitioners_guide(steps=8)
    assert {row.split(":")[0] for row in table} == set(guide.SWEEPS)
    assert len(table) == 4 + 9 + 5 + 5
    for name, world, settings, options in bench.asked:
        choices = {k: v for k, v in options.items() if k != "model"}
        model = {"model": "fresh"} if world == "keydoor" else {}
        if name == "meow-tea-taro":
            assert pp.plan_recipe(name, world, settings=settings, **choices).steps
        else:
            given = {**guide.ALGORITHMS.get(name, {}), **settings}
            assert pp.plan(name, world, settings=given, **choices, **model).options.steps


def test_no_steps_are_refused() -> None:
    with pytest.raises(pp.PanoplyError, match="steps is at least 1, not 0"):
        functions.call("practitioners-guide", {"steps": "0"})


def test_the_recipe_learns_from_milestones() -> None:
    made = pp.plan_recipe("meow-tea-taro")
    learn = dict(made.runs())["learn"]
    assert learn.method.reward.info.name == "milestones"
    assert torch.is_tensor(
        learn.method.reward(
            hand(episode=[0], turn=[0], **{"signal:progress": [1.0], "signal:success": [1.0]})
        )
    )
