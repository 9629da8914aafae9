"""The decision table: ragged columns, segments over keys, taking and stacking rows."""

from __future__ import annotations

import pytest
import torch
from kit import hand, ragged, rows_of

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Segments, Table, segment_mean

KEY = torch.tensor([7, 3, 7, 7, 3, 9])
X = torch.tensor([1.0, 2.0, 4.0, 10.0, 6.0, 5.0])
"""Segments in the order of their keys: 3 → (2, 6), 7 → (1, 4, 10), 9 → (5)."""


def test_ragged_rows() -> None:
    rows = Ragged.from_lists([[1, 2], [], [3]])
    assert rows.offsets.tolist() == [0, 2, 2, 3]
    assert rows.lengths.tolist() == [2, 0, 1]
    assert len(rows) == 3
    assert rows[0].tolist() == [1, 2]
    assert rows.take(torch.tensor([2, 0, 0, 1])).tolist() == [[3], [1, 2], [1, 2], []]
    assert Ragged.cat([rows, Ragged.from_lists([[4], [5, 6]]), rows]).tolist() == [
        [1, 2], [], [3], [4], [5, 6], [1, 2], [], [3],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sum", [8.0, 15.0, 5.0]),
        ("mean", [4.0, 5.0, 5.0]),
        ("max", [6.0, 10.0, 5.0]),
        ("min", [2.0, 1.0, 5.0]),
        ("median", [4.0, 4.0, 5.0]),
        ("var", [8.0, 21.0, 0.0]),
        ("std", [8.0**0.5, 21.0**0.5, 0.0]),
        ("first", [2.0, 1.0, 5.0]),
        ("last", [6.0, 10.0, 5.0]),
    ],
)
def test_segment_reductions(name: str, expected: list[float]) -> None:
    segments = Segments(KEY)
    assert segments.keys.tolist() == [3, 7, 9]
    assert segments.count.tolist() == [2, 3, 1]
    assert getattr(segments, name)(X).tolist() == pytest.approx(expected)


def test_segment_spreading() -> None:
    segments = Segments(KEY)
    assert segments.rows(torch.tensor([30, 70, 90])).tolist() == [70, 30, 70, 70, 30, 90]
    assert segments.is_last().tolist() == [False, False, False, True, True, True]
    assert segments.sum(torch.tensor([True, False, True, False, False, True])).tolist() == [0, 2, 1]
    assert segment_mean(X, by=KEY).tolist() == [5.0, 4.0, 5.0, 5.0, 4.0, 5.0]
    assert segments.var(X, correction=0).tolist() == [4.0, 14.0, 0.0]


def test_constant_is_exact() -> None:
    key = torch.tensor([0, 0, 0, 1, 1, 2])
    x = torch.tensor([0.9, 0.9, 0.9, 0.25, 0.25, 5.0])
    assert Segments(key).std(x)[0] > 0, "a rounding error, which is why equality is what counts"
    assert Segments(key).constant(x).tolist() == [True, True, True]
    nearly = x.clone()
    nearly[1] = torch.nextafter(x[1], torch.tensor(2.0))
    assert Segments(key).constant(nearly).tolist() == [False, True, True]


def test_segments_of_nothing() -> None:
    nothing = Segments(torch.zeros(0, dtype=torch.long))
    assert len(nothing) == 0
    assert nothing.sum(torch.zeros(0)).tolist() == []
    assert len(hand(episode=[0, 1], turn=[0, 0]).take(torch.tensor([False, False])).by("turn")) == 0


def test_a_turn_belongs_to_its_episode() -> None:
    made = hand(episode=[4, 4, 4, 2, 2], turn=[0, 1, 1, 0, 1])
    turns = made.by("turn")
    assert len(turns) == 4
    assert turns.sum(torch.ones(5)).sort().values.tolist() == [1, 1, 1, 2]
    assert turns.index[1] == turns.index[2]


def test_table_checks_lengths_and_names() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Table({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(PanoplyError, match=r"Unknown column 'rewrd'.* mean 'reward'"):
        Table({"reward": torch.zeros(2)})["rewrd"]


def test_tables_with_other_columns_do_not_stack() -> None:
    with pytest.raises(ValueError, match="logp"):
        Table.cat(
            [Table({"action": torch.zeros(1), "logp": torch.zeros(1)}), Table({"action": torch.zeros(1)})]
        )


def test_columns_are_added_to_a_copy() -> None:
    made = hand(reward=[1.0, 2.0])
    more = made.with_columns(reward=torch.tensor([5.0, 6.0]), advantage=torch.zeros(2))
    assert made["reward"].tolist() == [1.0, 2.0]
    assert "advantage" not in made
    assert more["reward"].tolist() == [5.0, 6.0]


def test_take_keeps_only_what_is_needed() -> None:
    made = hand(episode=[0, 0, 1, 2, 2, 3], action=[0, 1, 2, 3, 4, 5], pairs=[(0, 2), (1, 3), (2, 3), (2, 0)])
    some = made.take(torch.tensor([False, False, True, True, True, True]))
    assert some["action"].tolist() == [2, 3, 4, 5]
    assert some["context"].tolist() == [0, 1, 1, 2]
    assert some.context.ragged("tokens").lengths.tolist() == [1, 2, 1]
    assert some.pairs is not None
    assert some.pairs.tensor("chosen").tolist() == [1, 2]
    assert some.pairs.tensor("rejected").tolist() == [3, 3]
    assert made.take(torch.tensor([5, 2]))["context"].tolist() == [1, 0]


@pytest.mark.parametrize("at", [[1, 2, 3], [3, 2, 1], [0, 2, 3], [2], [], [1, 1, 1], [0, 1, 2, 3]])
def test_rows_that_follow_one_another_are_not_copied(at: list[int]) -> None:
    lists = Ragged.from_lists([[1, 2], [], [3], [4, 5, 6]])
    made = Table({"x": torch.arange(4) * 10, "lists": lists})
    some = made.take(torch.tensor(at, dtype=torch.long))
    assert some.rows == len(at)
    assert some.tensor("x").tolist() == [10 * i for i in at]
    assert some.ragged("lists").tolist() == [lists[i].tolist() for i in at]
    assert some.plus({"y": torch.ones(len(at))}).ragged("lists").offsets[0] == 0
    follows = bool(at) and at == list(range(at[0], at[0] + len(at)))
    assert (
        some.tensor("x").untyped_storage().data_ptr() == made.tensor("x").untyped_storage().data_ptr()
    ) == follows


def test_stacking_renumbers_the_context() -> None:
    a, b = hand(episode=[0, 1], pairs=[(0, 1)]), hand(episode=[5, 5, 6])
    both = Experience.cat([a, b])
    assert both["context"].tolist() == [0, 1, 2, 2, 3]
    assert both.context.ragged("tokens").lengths.tolist() == [1, 1, 2, 1]
    assert both.pairs is not None
    assert both.pairs.rows == 1
    made = ragged()
    rows = torch.arange(len(made))
    again = Experience.cat([made.take(rows[:7]), made.take(rows[7:])])
    kept = {"episode", "action", "logp"}
    assert [{k: r[k] for k in kept} for r in rows_of(again)] == [
        {k: r[k] for k in kept} for r in rows_of(made)
    ]


def test_streams_hold_the_decisions_that_learn() -> None:
    made = hand(source=[0, 1, 2, 3, 4, 0], train=[1, 1, 1, 1, 1, 0])
    assert made.stream("own").tolist() == [True, False, False, True, False, False]
    assert made.stream("imitation").tolist() == [False, True, True, False, False, False]
    assert made.stream("synthetic").tolist() == [False, False, False, False, True, False]
    assert hand(action=[0, 0]).stream("own").tolist() == [True, True]
    assert made.stream("joint").tolist() == [True, True, False, True, False, False]


def test_answers_after_another_prompt() -> None:
    """A hint of two tokens is taken away: positions move, and what was said after the hint is gone."""
    tokens = Ragged.from_lists([[5, 6, 7, 1, 2], [5, 6, 7, 3], [5, 4]])
    context = Table({"tokens": tokens, "prompt": torch.tensor([0, 0, 1]), "shared": torch.tensor([3, 3, 1])})
    columns = {
        "context": [0, 0, 1, 2],
        "position": [3, 4, 3, 1],
        "action": [1, 2, 3, 4],
        "episode": [0, 0, 1, 2],
    }
    said = {"logp": [0.1] * 4, "logp@old": [0.2] * 4, "entropy": [0.3] * 4, "reward": [1.0] * 4}
    made = Experience(Table({k: torch.tensor(v) for k, v in {**columns, **said}.items()}), context)
    bare = made.reprompted({0: [5], 1: [8, 9, 8, 9]})
    assert bare.context.ragged("tokens").tolist() == [[5, 1, 2], [8, 9, 8, 9, 3], [5, 4]]
    assert bare.context.tensor("prompt").tolist() == [1, 2, 1], "equal prompts are one"
    assert bare.context.tensor("shared").tolist() == [1, 4, 1]
    assert bare["position"].tolist() == [1, 2, 4, 1]
    at = zip(bare["context"].tolist(), bare["position"].tolist(), strict=True)
    assert [int(bare.context.ragged("tokens")[c][p]) for c, p in at] == bare["action"].tolist()
    assert set(bare.decisions) == {*columns, "reward"}


def test_lists_stay_while_they_are_whole() -> None:
    members = Ragged.from_lists([[3, 1], [2, 0, 1]])
    made = hand(episode=[0, 0, 1, 2, 3]).with_lists(Table({"episodes": members}))
    for some, left in ((made, [[3, 1], [2, 0, 1]]), (made.take(made["episode"] != 2), [[3, 1]])):
        assert some.with_columns(reward=torch.zeros(len(some))).lists is some.lists
        assert some.lists is not None
        assert some.lists.ragged("episodes").tolist() == left
    stacked = Experience.cat([made, hand(episode=[7])]).lists
    assert stacked is not None
    assert stacked.rows == 2


def test_keys_inside_something_larger() -> None:
    made = hand(episode=[0, 0, 1, 2], segment=[0, 1, 0, 0], step=[0, 1, 0, 0])
    assert len(made.by("segment")) == 4
    assert len(made.by("step")) == 4
    games = made.with_columns(game=torch.tensor([5, 5, 5, 6]))
    assert games.by("step").index.tolist() == [0, 1, 0, 2], "one clock for both seats of a game"


def test_rows_that_nobody_cut_are_mixed_in_as_uncut() -> None:
    one, numbers = ragged(), torch.ones(len(ragged()))
    one = one.with_columns(cut=-3 * numbers, kept=0.9 * numbers)
    both = Experience.mix([one, ragged()])
    assert set(both["cut"][len(one) :].tolist()) == {-torch.inf}
    assert set(both["kept"][len(one) :].tolist()) == {1.0}
    assert both.altered
    assert not both.unaltered().altered


@pytest.mark.parametrize("key", [[2, 2, 5, 7, 7, 7], [7, 2, 7, 5, 2, 7], [4]])
def test_first_and_last_rows_of_segments_in_order_and_out_of_it(key: list[int]) -> None:
    segments, rows = Segments(torch.tensor(key)), torch.arange(len(key))
    places = {k: [i for i, other in enumerate(key) if other == k] for k in sorted(key)}
    assert segments.first(rows).tolist() == [places[k][0] for k in places]
    assert segments.last(rows).tolist() == [places[k][-1] for k in places]
    assert segments.is_last().nonzero().flatten().tolist() == sorted(place[-1] for place in places.values())
