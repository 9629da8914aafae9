"""Masks: what a world allows is all that is drawn, recorded and scored, by whichever way its episodes are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.policies.build import open_policy
from panoply.policies.thoughts import Drawn, Thoughts
from panoply.rollout.engine import Request, Rollouts, Sampling, TextEngine
from panoply.rollout.generation import Generation, _narrowed
from panoply.rollout.masks import of_plays
from panoply.rollout.playing import play
from panoply.rollout.sampling import draw
from panoply.rollout.text import Collector
from panoply.rollout.tree import Branch
from panoply.worlds.text.chain import Chain
from panoply.worlds.text.keydoor import Keydoor
from panoply.worlds.world import Signals, Task
from tests.rollout.test_bursts import Stepping
from tests.rollout.test_engine import make_model, make_requests, odd_only, same

MARKS = torch.zeros(23, dtype=torch.uint8).index_fill(0, torch.tensor([4, 9]), 1)
"""A mask as numbers, which are no ids."""


@dataclass(frozen=True)
class Digits(Chain):
    """After two tokens, only what ends an answer."""

    @property
    def start(self) -> str:
        return "chain-start"

    def allowed(self, task: Task, said: Sequence[int]) -> Sequence[int] | None:
        return None if len(said) < 2 else self.stop_tokens

    def grade_all(self, tasks: Sequence[Task], answers: Sequence[Sequence[int]]) -> Sequence[Signals | None]:
        assert max(map(len, answers)) <= 3
        return super().grade_all(tasks, answers)


def collector(world: Chain | Keydoor) -> Collector:
    return Collector(world, open_policy("start", world, 0, "cpu"), seed=1)


def _answers(rows: Experience) -> list[list[int]]:
    episode, action = rows["episode"].tolist(), rows["action"].tolist()
    return [[a for e, a in zip(episode, action, strict=True) if e == one] for one in sorted(set(episode))]


def test_only_legal_actions_are_drawn_in_every_turn() -> None:
    legal, free = Keydoor(legal=True), Keydoor()
    found = {}
    for world in (legal, free):
        collect = collector(world)
        rows = collect.episodes(collect.tasks(6), 3, temperature=4.0)
        found[world] = rows
        assert ("allowed" in rows) == world.legal
    assert float(found[legal]["signal:invalid"].sum()) == 0
    assert float(found[free]["signal:invalid"].sum()) > 10
    rows = found[legal]
    lengths = rows.decisions.ragged("allowed").lengths
    assert set(lengths.tolist()) <= {2, 3, 4, 5}
    scores = collector(legal).policy.score(rows, frozenset({"entropy"}))
    torch.testing.assert_close(scores["logp"].detach(), rows["logp"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores["entropy"].detach(), rows["entropy"], atol=1e-4, rtol=1e-4)


def test_a_run_under_masks_scores_what_it_drew(tmp_path: Path) -> None:
    few = {"world.legal": True, "sample.prompts": 2, "sample.group": 4, "run.held_out": 4}
    run = tiny.bare(tmp_path / "run", "grpo", world="keydoor", settings=few, steps=2).run
    rows = tiny.metrics(run)
    assert max(row["step0_gap"] for row in rows) < 1e-5
    assert rows[0]["loss"] != 0


def test_every_way_of_sampling_asks_the_world() -> None:
    world = Digits()
    collect = collector(world)
    tasks = collect.tasks(2)
    assert max(map(len, _answers(collect.episodes(tasks, 4)))) <= 3
    tree = collect.tree(tasks, 1.0)
    tree.extend([Branch(root, 3, tokens=1) for root in range(len(tasks))])
    tree.extend([Branch(node, 2) for node in tree.open() if len(tree._stands[node].said) == 1])
    assert max(len(stand.said) for stand in tree._stands) <= 3
    begun = [list(world.gold(task)[:1]) for task in tasks]
    assert 0 <= float(collect.prefix_values(tasks, begun, 3).max()) <= 1
    made = play(world, collect.policy, tasks[0], 4, 1.0, 0, 50)
    assert all(len(world.tokenizer.encode(e.turns[0].said)) <= 3 for e in made)


def test_what_had_been_said_before_a_row_began_counts() -> None:
    world = Digits()
    plays = [world.play(world.task("train", 0))]
    model = open_policy("start", world, 0, "cpu").model
    for before, longest in (([], 3), ([5], 2), ([5, 6], 1)):
        request = Request((*plays[0].prompt, *before), [3])
        sampling = Sampling(max_tokens=9, stop_tokens=world.stop_tokens)
        found = TextEngine(model).generate([request], sampling, mask=of_plays(plays, [before]))
        assert len(found.completions()[0]) <= longest


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (lambda tokens: [], "leaves row 0 no token to draw after 0 of its turn"),
        (lambda tokens: [5] if len(tokens) < 3 else torch.zeros(23, dtype=torch.bool), "after 1 of its turn"),
        (lambda tokens: [5, 23], "row 0 allows token 23, and the vocabulary has 23"),
        (lambda tokens: [-1], "allows token -1"),
        (
            lambda tokens: torch.ones(22, dtype=torch.bool),
            r"row 0 marks \(22,\) tokens, and the vocabulary has 23",
        ),
        (lambda tokens: "5", "row 0 is neither ids of tokens, which are whole numbers, nor a bool tensor"),
        (lambda tokens: 5, "row 0 is neither"),
        (lambda tokens: [4.7], "row 0 is neither"),
        (lambda tokens: torch.tensor([[4, 5]]), "row 0 is neither"),
        (lambda tokens: [True] * 23, "row 0 is neither"),
        (lambda tokens: MARKS.tolist(), "row 0 is neither"),
        (lambda tokens: MARKS, "row 0 is neither"),
        (lambda tokens: MARKS.float(), "a mark for each of 23"),
    ],
)
def test_a_mask_that_leaves_nothing_is_refused(mask: object, words: str) -> None:
    with pytest.raises(PanoplyError, match=words):
        TextEngine(make_model()).generate([Request([1, 2], [0], mask=mask)], Sampling())  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_mask_of_stops_alone_before_any_may_be_drawn_is_refused(temperature: float) -> None:
    sampling = Sampling(max_tokens=4, min_tokens=2, stop_tokens=(3,), temperature=temperature)
    early = Request([1, 2], [0], mask=lambda tokens: [5] if len(tokens) < 3 else [3])
    words = "mask and min_tokens leave row 0 no token to draw after 1 of its turn"
    with pytest.raises(PanoplyError, match=words):
        TextEngine(make_model()).generate([early], sampling)
    later = Request([1, 2], [0], mask=lambda tokens: [5] if len(tokens) < 4 else [3])
    assert TextEngine(make_model()).generate([later], sampling).completions() == [[5, 5, 3]]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(1, 5, dtype=torch.bool), r"mask of \(1, 23\) was asked for, and \(1, 5\) given"),
        (torch.ones(1, 23), "bool tensor, not one of torch.float32"),
        (torch.ones(1, 23, dtype=torch.uint8), "bool tensor, not one of torch.uint8"),
        ([[4, 5]], "bool tensor, not a list"),
    ],
)
def test_a_mask_of_all_rows_has_a_mark_for_each_token(mask: object, words: str) -> None:
    with pytest.raises(PanoplyError, match=words):
        TextEngine(make_model()).generate([Request([1, 2], [0])], Sampling(), mask=lambda view: mask)  # type: ignore[arg-type, return-value]


def test_ids_may_be_in_any_order_and_come_twice() -> None:
    def drawn(ids: object) -> list[list[int]]:
        asked = [Request([1, 2], [0, 1], mask=lambda tokens: ids)]  # type: ignore[arg-type, return-value]
        return TextEngine(make_model()).generate(asked, Sampling(max_tokens=4)).completions()

    rows = drawn([4, 9])
    assert {token for row in rows for token in row} == {4, 9}
    for alike in ([9, 4, 4], {9, 4}, torch.tensor([9, 4]), np.array([9, 4], np.int32)):
        assert drawn(alike) == rows


class Blanks(Thoughts):
    """Nothing but token 5 is said from the third token of a turn on."""

    kind = "blanks"

    def allowed(self, tokens: Tensor, length: Tensor, start: Tensor, vocabulary: int) -> Tensor:
        late = length - start >= 2
        return ~late[:, None] | (torch.arange(vocabulary) == 5)

    def think(self, drawn: Drawn) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(drawn.action, dtype=torch.bool), drawn.state


def test_a_mask_that_leaves_nothing_of_what_thoughts_allow_is_refused() -> None:
    model = make_model()
    model.thoughts = Blanks(model.config.width)
    engine, sampling = TextEngine(model, slots=2), Sampling(max_tokens=4)
    said = engine.generate(
        [Request([1, 2], [0, 1, 2], mask=lambda tokens: [5, 6, 7])], sampling
    ).completions()
    assert [row[2:] for row in said] == [[5, 5]] * 3
    with pytest.raises(
        PanoplyError, match="mask and thoughts leave row 0 no token to draw after 2 of its turn"
    ):
        engine.generate([Request([1, 2], [0], mask=lambda tokens: [6, 7])], sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12, stop_tokens=(3,)),
        Sampling(max_tokens=12, top_p=0.7),
        Sampling(max_tokens=12, top_k=4, min_tokens=3, stop_tokens=(3, 4, 5)),
    ],
    ids=["plain", "top_p", "top_k"],
)
def test_bursts_draw_and_record_what_steps_do(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Rollouts:
        return TextEngine(make_model(), patience=4).generate(
            make_requests(), sampling, mask=odd_only, entropy=True
        )

    whole, allocate = run(), Generation._allocate

    def with_bursts(self: Generation, *sizes: int) -> None:
        allocate(self, 64, 64, sizes[2])
        self.host = None
        self.graphs = Stepping(self, self.cache, self.history)  # type: ignore[assignment]

    monkeypatch.setattr(Generation, "_allocate", with_bursts)
    found = run()
    assert same(whole, found)
    lists = [r.decisions.ragged("allowed").tolist() for r in (whole, found)]
    assert lists[0] == lists[1]
    for column in {"logp", "entropy", "cut", "kept"} & set(whole.decisions):
        torch.testing.assert_close(whole.decisions[column], found.decisions[column])


def test_what_a_cut_listed_is_all_that_is_left_of_a_mask() -> None:
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[:, 0] = False
    ids = torch.tensor([[1, 4, 0], [2, 2, 2], [5, 0, 0]])
    found = _narrowed(mask, ids, torch.tensor([2, 0, 1]))
    assert [row.nonzero().flatten().tolist() for row in found] == [[1, 4], [1, 2, 3, 4, 5], [5]]


def test_entropy_is_of_what_the_mask_leaves() -> None:
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0]])
    mask: Tensor = torch.tensor([[True, True, False, False]])
    found = draw(logits, torch.tensor([0.3], dtype=torch.float64), Sampling(), mask=mask, entropy=True)
    assert found.entropy is not None
    assert float(found.entropy) == pytest.approx(float(torch.tensor(2.0).log()))
