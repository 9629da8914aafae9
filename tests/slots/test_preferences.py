"""Preference pairs from a world's annotators."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from panoply import planning
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.slots.data import preferences as data
from panoply.slots.data.preferences import preferences
from panoply.worlds.text.add import Add
from panoply.worlds.text.copies import Copies
from panoply.worlds.text.strings import Strings


def collector(**options: Any) -> Collector:
    world = Strings(**options)
    config = DecoderConfig(**{**world.default_model(), "width": 16, "layers": 1, "heads": 2, "inner": 16})
    return Collector(world, TextPolicy.fresh(config, world.tokenizer), seed=0)


def worths(made: Experience, name: str = "true") -> list[tuple[float, float]]:
    """Of the chosen and of the rejected answer of each pair."""
    assert made.pairs is not None
    episodes = made.by("episode")
    worth = dict(zip(episodes.keys.tolist(), episodes.sum(made[f"signal:{name}"]).tolist(), strict=True))
    sides = (made.pairs.tensor("chosen").tolist(), made.pairs.tensor("rejected").tolist())
    return [(worth[a], worth[b]) for a, b in zip(*sides, strict=True)]


def shown(made: Experience) -> list[list[int]]:
    return made.context.ragged("tokens").tolist()


def test_a_sharp_annotator_always_prefers_the_better_answer_of_one_task() -> None:
    _, made = preferences(batch=32)({}, collector(sharpness=1e4))
    assert all(better >= worse for better, worse in worths(made))
    assert any(better > worse for better, worse in worths(made))
    episodes = made.by("episode")
    tasks = episodes.first(made["task"]).reshape(-1, 2)
    assert (tasks[:, 0] == tasks[:, 1]).all()
    assert made.pairs is not None
    assert "annotator" not in made.pairs
    assert "logp" not in made


def test_noise_turns_preferences_around() -> None:
    _, made = preferences(batch=32)({}, collector(sharpness=1e4, noise=1.0))
    assert all(better <= worse for better, worse in worths(made))


def test_new_pairs_come_for_ever_or_the_same_ones_in_another_order() -> None:
    endless, few = preferences(batch=8), preferences(batch=8, pairs=8)
    collect = collector()
    (_, first), (_, second) = endless({}, collect), endless({}, collect)
    assert shown(first) != shown(second)
    state, first = few({}, collect)
    state, second = few(state, collect)
    assert shown(first) != shown(second)
    assert sorted(zip(shown(first)[::2], shown(first)[1::2], strict=True)) == sorted(
        zip(shown(second)[::2], shown(second)[1::2], strict=True)
    )
    assert set(first["episode"].tolist()).isdisjoint(second["episode"].tolist())


def test_a_data_set_goes_on_from_its_state() -> None:
    part, collect = preferences(batch=4, pairs=10), collector()
    state, _ = part({}, collect)
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    plain = json.loads(json.dumps({k: v for k, v in state.items() if k not in tensors}))
    _, expected = part(state, collect)
    again = collector()
    again.state = {"tasks": 10, "groups": 4, "episodes": 8}
    _, found = part({**plain, **tensors}, again)
    assert shown(found) == shown(expected)
    assert found["episode"].tolist() == expected["episode"].tolist()


def test_the_starting_policy_answers_once() -> None:
    part, collect = preferences(batch=4, pairs=4, answers="start"), collector()
    state, first = part({}, collect)
    with torch.no_grad():
        for _, parameter in collect.policy.named_parameters():
            parameter.zero_()
    _, second = part(state, collect)
    assert sorted(shown(first)) == sorted(shown(second))
    assert len({tuple(row) for row in shown(first)}) > 4, "two different answers a task"


@pytest.mark.parametrize("pairs", [0, 24])
def test_no_answer_is_compared_with_itself(pairs: int) -> None:
    """Problems without a carry have one answer of the teacher's; in their place others are asked."""
    world = Add(sharpness=1e4)
    config = DecoderConfig(**{**world.default_model(), "width": 16, "layers": 1, "heads": 2, "inner": 16})
    collect = Collector(world, TextPolicy.fresh(config, world.tokenizer), seed=0)
    part = preferences(batch=24, pairs=pairs)
    state, made = part({}, collect)
    rows = shown(made)
    assert len(rows) == 48
    assert all(a != b for a, b in zip(rows[::2], rows[1::2], strict=True))
    assert all(better >= worse for better, worse in worths(made, "success"))
    tasks = made.by("episode").first(made["task"]).reshape(-1, 2)
    assert (tasks[:, 0] == tasks[:, 1]).all()
    assert len(tasks[:, 0].unique()) == 24
    drawn = [world.task("train", collect.place(i)) for i in range(collect.state["tasks"])]
    said = [world.text(row) for row in rows]
    assert all(text[6:8] == text[1] + text[4] for text in said), "47+85=75…: each answers its own problem"
    able = sum(task.level > 0 for task in drawn)
    assert 24 <= able < 24 / 0.6, "with a carry, most have two different answers among a few"
    assert len(drawn) > able
    if pairs:
        _, again = part(state, collect)
        assert sorted(shown(again)) == sorted(rows)


def test_own_answers_are_drawn_again_where_both_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []
    drawn = iter([[[1], [1], [2], [3], [4], [4]], [[1], [5]], [[6]]])

    class Told:
        def episodes(self, tasks: list[str], group: int) -> None:
            asked.append((tasks, group))

    monkeypatch.setattr(data, "answers_of", lambda _: next(drawn))
    assert data._own(Told(), ["x", "y", "z"]) == [([1], [6]), ([2], [3]), ([4], [5])]  # type: ignore[arg-type]
    assert asked == [(["x", "y", "z"], 2), (["x", "z"], 1), (["x"], 1)]


def test_a_teacher_who_never_says_anything_else_cannot_be_compared_with_himself() -> None:
    world = Add(slip=0.0)
    config = DecoderConfig(**{**world.default_model(), "width": 16, "layers": 1, "heads": 2, "inner": 16})
    collect = Collector(world, TextPolicy.fresh(config, world.tokenizer), seed=0)
    with pytest.raises(
        PanoplyError, match="The teacher of add has two different answers to too few of its tasks"
    ):
        preferences(batch=2)({}, collect)


def test_annotators_take_turns_and_their_groups_differ() -> None:
    groups = ((1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))
    _, made = preferences(batch=66, annotators=11)(
        {}, collector(groups=groups, populations=(10, 1), sharpness=1e4)
    )
    assert made.pairs is not None
    asked = made.pairs.tensor("annotator").tolist()
    assert asked[:13] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1]
    for name, is_minority in (("group0", False), ("group1", True)):
        of_group = [w for w, who in zip(worths(made, name), asked, strict=True) if (who == 10) == is_minority]
        assert all(better >= worse for better, worse in of_group)
        assert any(better > worse for better, worse in of_group)
    assert any(b < w for (b, w), who in zip(worths(made, "group1"), asked, strict=True) if who != 10)


@pytest.mark.parametrize(
    ("world", "settings", "sentence"),
    [
        ("copies", {}, "data (preferences) needs a world with 'prefer', and copies@1 has none."),
        (
            "strings",
            {"data.answers": "start"},
            "data.answers cannot be start: the starting policy answers before the first step only; "
            "say how many pairs with data.pairs.",
        ),
        ("strings", {"data.annotators": -1}, "data.annotators must be at least 0, not -1."),
    ],
)
def test_what_cannot_be_is_refused(world: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError) as refusal:
        planning.make_plan("dpo", world, slots={"data": "preferences"}, settings=settings)
    assert str(refusal.value) == sentence


def test_a_world_without_preferences_says_so() -> None:
    with pytest.raises(PanoplyError, match="copies has no preferences"):
        Copies().prefer(Copies().task("train", 0), [], [], torch.Generator())  # type: ignore[arg-type]
