"""Presets with room: names for settings, a skewed mix of levels, and a reward that is not success."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import panoply as pp
from panoply import registry
from panoply.errors import PanoplyError
from panoply.policies.build import warm_start
from panoply.worlds.text.chain import Chain

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import presets as bench

NAMES = dict(bench.presets())


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_can_be_trained_on_and_has_a_start(name: str) -> None:
    made = pp.plan("grpo", name)
    assert {k: made.world_options[k] for k in NAMES[name].settings} == dict(NAMES[name].settings)
    assert made.world_id == f"{name.split(':')[0]}@1"
    assert warm_start(made.world()) is not None
    assert 0 <= NAMES[name].start < NAMES[name].ceiling


def test_other_settings_go_over_a_preset() -> None:
    made = pp.plan("grpo", "chain:wall", settings={"world.levels": "7,8"})
    assert made.world_options == {"operations": 8, "slip": 0.9, "levels": (7, 8)}
    with pytest.raises(PanoplyError, match="Unknown preset of chain 'wal'. Did you mean 'wall'?"):
        pp.plan("grpo", "chain:wal")


def test_training_draws_levels_by_their_shares_and_tests_draw_them_alike() -> None:
    world = Chain(operations=3, levels=(0, 3), shares=(0, 6, 1, 1))
    train = Counter(world.task("train", i).level for i in range(800))
    test = Counter(world.task("test", i).level for i in range(800))
    assert train[0] == 0
    assert 540 < train[1] < 660
    assert all(70 < train[level] < 135 for level in (2, 3))
    assert all(130 < test[level] < 270 for level in range(4))
    assert [Chain().task("train", i).id for i in range(5)] == [
        Chain(shares=(), levels=(0, 4)).task("train", i).id for i in range(5)
    ]
    with pytest.raises(PanoplyError, match="chain.shares has a number for each of the levels 0 to 2"):
        Chain(levels=(0, 2), shares=(1, 1))
    with pytest.raises(PanoplyError, match="not all 0"):
        Chain(levels=(0, 1), shares=(0, 0))


def test_a_world_may_pay_by_another_signal() -> None:
    assert pp.plan("grpo", "strings:hack").method.settings()["reward.name"] == "proxy"
    assert pp.plan("grpo", "strings").method.settings()["reward.name"] == "success"
    chosen = pp.plan("grpo", "strings:hack", settings={"reward.name": "true"})
    assert chosen.method.settings()["reward.name"] == "true"
    assert "reward.name" not in pp.plan("dpo", "strings:hack").method.settings()


def test_noise_hides_the_worth_and_the_bonus_can_be_had_without_success() -> None:
    noisy, hack = pp.plan("grpo", "strings:noisy").world(), pp.plan("grpo", "strings:hack").world()
    task = noisy.task("train", 0)
    good, stray = noisy.gold(task), noisy.tokens("z" * 14)
    assert noisy.grade(task, stray)["proxy"] < 1
    assert hack.grade(task, stray)["proxy"] == pytest.approx(0.25 * 14)
    assert hack.grade(task, stray)["success"] == 0.0
    assert noisy.grade(task, good)["true"] == 1.0


def test_the_page_shows_what_was_measured() -> None:
    stored = json.loads(bench.STORED.read_text())
    text = bench.PAGE.read_text()
    assert set(stored) <= set(NAMES)
    assert bench.page(text, bench.table(stored)) == text
    for name, of in stored.items():
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in NAMES[name].settings.items()}
        assert of["settings"] == plain, f"{name} was measured with other settings"


def test_presets_are_on_the_page_of_their_world() -> None:
    from panoply.report.pages import shown

    assert "chain:wall" in shown("chain")
    assert registry.find("world", "chain").build.presets
