"""What is recorded of sampled episodes: whole groups, the learner's numbers, and the gates that acted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from kit import Tabular, hand, learner, on_policy

from panoply import api
from panoply.experience import Experience, Ragged, Table
from panoply.loops.samples import VERDICT, Watch, choose, sampled_episodes, spelled
from panoply.methods.base.grpo import grpo
from panoply.parts import part
from panoply.progress import Progress
from panoply.run import Run
from panoply.slots.surrogate.ratios import clip
from panoply.slots.surrogate.sequences import sequence_clip
from panoply.slots.update.optimisers import sgd


def shifted(by: Sequence[float], **columns: Sequence[float]):
    """Decisions of state 0 and action 0, sampled `by` below what the policy says now."""
    made = hand(state=[0] * len(by), group=[0] * len(by), **columns)
    now = Tabular().score(made)["logp"].detach()
    return made.with_columns(logp=now - torch.tensor(by).double())


def watched(experience, method) -> list[dict]:
    judge = learner(Tabular(), method)
    judge.watch = Watch(choose(experience))
    judge.gradient(experience)
    judge.watch.credited(experience)
    return sampled_episodes(7, None, experience, judge.watch)


def test_ratio_and_gates_of_each_decision() -> None:
    # log ratios ln 1.5, 0, −ln 2, ln 1.5: only the first is held by the upper bound, only the third by the lower
    rows = shifted(
        [math.log(1.5), 0.0, -math.log(2), math.log(1.5)],
        episode=[1, 1, 2, 2],
        turn=[0, 1, 0, 1],
        advantage=[1.0, 1.0, -1.0, -1.0],
        reward=[0.0, 1.0, 0.0, 0.0],
    )
    first, second = watched(rows, on_policy(surrogate=clip(low=0.2, high=0.2)))
    assert (first["step"], first["episode"], first["group"]) == (7, 1, 0)
    assert first["ratio"] == [1.5, 1.0]
    assert second["ratio"] == [0.5, 1.5]
    assert first["gates"] == {"surrogate.clip:clip_high": [0]}
    assert second["gates"] == {"surrogate.clip:clip_low": [0]}
    assert first["advantage"] == [1.0, 1.0]
    assert "left_out" not in first


def test_the_floor_of_dual_clipping_is_named() -> None:
    rows = shifted([math.log(5.0), 0.0], episode=[0, 1], advantage=[-1.0, -1.0])
    records = watched(rows, on_policy(surrogate=clip(low=0.2, high=0.2, dual=3.0)))
    assert [r["gates"] for r in records] == [{"surrogate.clip:clip_dual": [0]}, {}]


def test_a_gate_on_an_episode_is_on_all_its_decisions() -> None:
    rows = shifted([1.0, 0.0, 0.0], episode=[3, 3, 4], turn=[0, 1, 0], advantage=[1.0, 1.0, 1.0])
    records = watched(rows, on_policy(surrogate=sequence_clip(low=0.2, high=0.2)))
    assert [r["gates"] for r in records] == [{"surrogate.sequence_clip:clip_high": [0, 1]}, {}]


def test_idle_decisions_have_no_ratio_and_dropped_episodes_no_credit() -> None:
    rows = shifted([0.0, 0.0, 0.0], episode=[0, 1, 2], advantage=[0.0, 1.0, 1.0])
    collected = rows.without("advantage")
    judge = learner(Tabular(), on_policy())
    judge.watch = Watch(choose(collected))
    kept = rows.take(rows["episode"] < 2)
    judge.gradient(kept)
    judge.watch.credited(kept)
    idle, learnt, dropped = sampled_episodes(1, None, collected, judge.watch)
    assert "ratio" not in idle
    assert idle["advantage"] == [0.0]
    assert (learnt["ratio"], learnt["advantage"]) == ([1.0], [1.0])
    assert dropped["left_out"] is True
    assert "advantage" not in dropped


def test_gates_of_every_update_are_kept_and_the_ratio_of_the_last() -> None:
    rows = shifted([math.log(1.5)], episode=[0], advantage=[1.0])
    judge = learner(Tabular(), on_policy(surrogate=clip(), update=sgd(lr=1e-9, clip=0.0)))
    judge.watch = Watch(choose(rows))
    judge.step(rows, 0)
    judge.step(rows.with_columns(logp=judge.policy.score(rows)["logp"].detach()), 0)
    (record,) = sampled_episodes(1, None, rows, judge.watch)
    assert record["ratio"] == [1.0]
    assert record["gates"] == {"surrogate.clip:clip_high": [0]}


def test_whole_groups_are_chosen_and_that_of_the_most_surprising_episode() -> None:
    episodes = list(range(40))
    reward, logp = [0.0] * 40, [-0.1] * 40
    reward[33], logp[33] = 1.0, -5.0
    rows = hand(episode=episodes, group=[e // 5 for e in episodes], reward=reward, logp=logp)
    assert choose(rows).tolist() == [0, 1, 2, 3, 4, 30, 31, 32, 33, 34]


def test_of_branched_episodes_whole_trees_are_chosen() -> None:
    """Groups are the branches of one node, and the first of them are all trunks: 0 and 1, 2 and 3 below two tasks."""
    parent = [-1, -1, -2, -2, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    group = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    rows = hand(episode=list(range(14)), group=group, parent=parent)
    assert choose(rows).tolist() == [2, 3, 8, 9, 10, 11]  # the tree of −2; that of −1 would be eight more
    odd = rows.with_columns(reward=torch.zeros(14), logp=torch.full((14,), -0.1))
    odd["reward"][13], odd["logp"][13] = 1.0, -5.0
    assert choose(odd).tolist() == list(range(14))
    records = sampled_episodes(1, None, rows, Watch(choose(rows)))
    assert [r["parent"] for r in records] == [-2, -2, 2, 2, 3, 3]


@pytest.mark.parametrize("end", [0, 1])
def test_verdicts_are_on_the_last_decision_of_turns_that_are_over(end: int) -> None:
    """Asked with what was seen before the turn, whatever it holds, and with the decisions of the turn alone."""
    context = Ragged.from_lists([[1, 2, 10, 11, 3, 12, 13]])
    columns = {"episode": [0] * 4, "turn": [0, 0, 1, 1], "position": [2, 3, 5, 6], "context": [0] * 4}
    columns |= {"group": [0] * 4, "node": [7, 7, 9, 9], "end": [0, 0, 0, end], "action": [0] * 4}
    decisions = Table({name: torch.tensor(values) for name, values in columns.items()})
    rows = Experience(decisions, Table({"tokens": context}))
    watch = Watch(choose(rows))
    said = lambda seen, answer: f"{seen} {answer}" + "!" * 999  # noqa: E731
    (record,) = sampled_episodes(1, None, rows, watch, said)
    assert record["node"] == [7, 7, 9, 9]
    found = [(row, text.rstrip("!")) for row, text in record["verdicts"]]
    both = [(1, "[1, 2] [10, 11]"), (3, "[1, 2, 10, 11, 3] [12, 13]")]
    assert found == (both if end else both[:1])
    assert {len(text) for _, text in record["verdicts"]} == {VERDICT}
    (silent,) = sampled_episodes(1, None, rows, watch, lambda seen, answer: "")
    assert "verdicts" not in silent


def test_numbers_that_are_not_finite_are_null() -> None:
    rows = hand(group=[0, 0], episode=[0, 0], reward=[float("nan"), 1.0], source=[0, 2])
    watch = Watch(choose(rows))
    (record,) = sampled_episodes(1, None, rows, watch)
    assert record["reward"] == [None, 1.0]
    assert record["source"] == [0, 2]
    (plain,) = sampled_episodes(1, None, rows.with_columns(source=torch.zeros(2).long()), watch)
    assert "source" not in plain


def test_bytes_that_make_one_character_are_spelled_together() -> None:
    text = "a€b"
    found = spelled(list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"))
    assert found == ["a", "€", "", "", "b"]


def test_a_run_records_pieces_that_spell_its_text(tmp_path: Path) -> None:
    settings = {"sample.prompts": 4, "sample.group": 4, "run.held_out": 4, "update.epochs": 2}
    api.train("grpo", "tools", run=tmp_path / "a", steps=1, settings=settings, progress=Progress())
    records = Run.open(tmp_path / "a").episodes()
    assert len({r["group"] for r in records}) >= 2
    for record in records:
        assert "".join(record["pieces"]) == record["text"]
        assert len(record["pieces"]) == len(record["tokens"])
        decisions = len(record["position"])
        assert {len(record[n]) for n in ("turn", "logp", "entropy", "reward", "advantage")} == {decisions}
        assert sum(v for _, v in record["signals"]["success"]) == pytest.approx(sum(record["reward"]))
    learnt = [r for r in records if any(r["advantage"])]
    assert learnt
    assert all(len(r["ratio"]) == len(r["position"]) for r in learnt)


def test_episodes_are_recorded_that_others_took_the_place_of(tmp_path: Path, registries: None) -> None:
    """A selection may drop groups and bring others back, as many rows as there were, or more."""

    @part("select", unit="decision")
    def others_instead(experience: Experience) -> Experience:
        kept = experience.take(experience["group"] != experience["group"].min())
        again = kept.with_columns(episode=kept["episode"] + 1000)
        return Experience.mix([kept, again])

    method = grpo().but(select=(others_instead(),))
    settings = {"sample.prompts": 2, "sample.group": 2, "run.held_out": 4}
    api.train(
        method, "chain", run=tmp_path / "a", steps=1, settings=settings, progress=Progress(), model="fresh"
    )
    assert len({r["group"] for r in Run.open(tmp_path / "a").episodes()}) == 2
