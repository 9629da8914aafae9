"""Presets with room: names for settings, a skewed mix of levels, and a reward that is not success."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import panoply as pp
from panoply import registry
from panoply.errors import PanoplyError
from panoply.policies.build import warm_start
from panoply.worlds.text.chain import Chain
from panoply.worlds.world import Task

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


def test_kinds_are_skills_apart() -> None:
    world = pp.plan("grpo", "chain:kinds").world()
    tasks = [world.task("train", i) for i in range(120)]
    kinds = Counter(world.part_of(task) for task in tasks)
    assert all(25 < kinds[kind] < 55 for kind in ("sums", "products", "differences"))
    assert "domain" in world.keys
    assert not Chain().keys
    right: dict[str, list[float]] = {kind: [] for kind in kinds}
    for i, task in enumerate(tasks):
        assert world.grade(task, world.gold(task))["success"] == 1.0
        said = world.demonstrate(task, np.random.default_rng(i))
        right[world.part_of(task)].append(world.grade(task, said)["success"])
    assert min(right["sums"]) == 1.0, "the teacher is always right on one kind"
    assert 0.0 < sum(right["products"]) / len(right["products"]) < 0.5, "sometimes on another"
    minus = [task.data["problem"] for task in tasks if world.part_of(task) == "differences"]
    alike = [
        all(problem[at + 1] in "05" for at in range(len(problem)) if problem[at] == "-") for problem in minus
    ]
    assert right["differences"] == alike, "and on the third only where minus 0 or 5 is plus 0 or 5"
    alone = Chain(operations=2, signs="-", levels=(1, 1))
    task = Task(1, tuple(alone.tokenizer.encode("3-4+2=")), 1, {"problem": "3-4+2="})
    assert alone.tokenizer.decode(alone.gold(task)) == "-49+21$"  # 3 − 4 = −1 = 9 modulo 10
    with pytest.raises(PanoplyError, match="chain.signs is"):
        Chain(signs="/")
    with pytest.raises(PanoplyError, match="chain.slips has a number for each of the signs"):
        Chain(signs="*-", slips=(0.5,))


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
        plain = json.loads(json.dumps(dict(NAMES[name].settings)))
        assert of["settings"] == plain, f"{name} was measured with other settings"


def test_presets_are_on_the_page_of_their_world() -> None:
    from panoply.report.pages import shown

    assert "chain:wall" in shown("chain")
    assert registry.find("world", "chain").build.presets
