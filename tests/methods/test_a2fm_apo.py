"""A²FM's APO: forced answers, whose letter nobody drew; rewards by hand; what is forced does not teach the choice."""

from __future__ import annotations

from pathlib import Path

import kit
import pytest
import tiny
import torch

import panoply as pp
from panoply.methods.agents.a2fm_apo import FREE, adaptive, less_cost, routed
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.routes import Routes


def test_groups_have_every_mode_and_free_answers() -> None:
    world = Routes()
    collect = Collector(world, open_policy("start", world, 0, "cpu"), seed=0)
    found = routed(prompts=3, forced=2, free=4)(collect)
    episodes = found.by("episode")
    assert episodes.first(found["group"]).bincount().tolist() == [10, 10, 10]
    for number, way in enumerate(world.ways):
        rows = found.take(found["forced"] == number)
        assert len(rows.by("episode")) == 6
        letter = world.tokens(way)[0]
        assert not bool((rows["action"] == letter).any())  # it stands in the prompt, and was not drawn
        prompts = [
            row[: int(n)]
            for row, n in zip(rows.context.ragged("tokens").tolist(), rows.context["shared"], strict=True)
        ]
        assert all(prompt[-1] == letter for prompt in prompts)
    free = found.take(found["forced"] == FREE)
    firsts = free.by("episode").first(free["action"]).tolist()
    assert len(firsts) == 12
    assert {world.text([token]) for token in firsts} <= set("IRA")
    with torch.no_grad():
        here = collect.policy.score(found)["logp"]
    torch.testing.assert_close(found["logp"], here, atol=1e-5, rtol=0)


def test_rewards_by_hand() -> None:
    """Two groups: of the first's forced instant answers half are right, p^2 = ¼; of the second's none."""
    forced = [0, 0, 1, 2, FREE, FREE, FREE, FREE, 0, FREE]
    instant = [1, 1, 0, 0, 1, 0, 0, 0, 1, 0]
    success = [1, 0, 1, 1, 1, 1, 0, 1, 0, 1]
    broken = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    rows = kit.hand(
        episode=list(range(10)),
        group=[0] * 8 + [1] * 2,
        forced=forced,
        **{
            "signal:success": torch.tensor(success),
            "signal:malformed": torch.tensor(broken),
            "signal:instant": torch.tensor(instant),
            "signal:cost": torch.tensor([1.0, 1, 5, 20, 1, 5, 20, 20, 1, 20]),
        },
    )
    assert adaptive()(rows).tolist() == [1, 0, 1, 1, 1, 0.75, 0, 0, 0, 1]
    assert adaptive(alpha=1.0)(rows)[5] == 0.5
    priced = less_cost(weight=0.01)(rows)
    assert priced[5].item() == pytest.approx(0.95)
    assert priced[6].item() == pytest.approx(-0.2)


def test_a_run_and_its_recipe(tmp_path: Path) -> None:
    settings = {"sample.prompts": 2, "run.held_out": 4}
    done = tiny.bare(tmp_path / "run", "a2fm-apo", world="routes", settings=settings, steps=2)
    assert len(tiny.metrics(done.run)) == 2
    stages = pp.plan_recipe("a2fm")
    assert [stage.options["model"] for stage in stages.recipe.stages] == ["fresh", "@imitate"]
    assert stages["route"].method.sample.forced == 3
