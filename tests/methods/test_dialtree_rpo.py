"""DialTree-RPO: trees that are pruned, groups of their ends, and tags that failures do not punish."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import Slow, assert_same, batch, gradient, hand, on_policy, ragged, rows_of

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience, Segments
from panoply.methods.applied_agents.dialtree_rpo import _live, dialogue_trees, form_kept, leaf_mean
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.rollout.tree import Branch
from panoply.slots.reduce.averages import sequence_mean
from panoply.slots.surrogate.ratios import clip
from panoply.worlds.text.guess import Guess

START = Path(__file__).parents[2] / "panoply/assets/guess-gatekeeper-start"
WORLD = Guess(kind="gatekeeper")


def collector() -> Collector:
    return Collector(WORLD, TextPolicy.load(START), 0)


@pytest.fixture(scope="module")
def grown() -> Experience:
    """With nothing pruned, so that turns on the way have earned something."""
    return dialogue_trees(prompts=4, branches=3, width=2, most=5, pruned=())(collector())  # type: ignore[no-any-return]


# ------------------------------------------------------------------ trees


def test_an_end_is_a_whole_dialogue_as_the_world_would_have_it(grown: Experience) -> None:
    """Played again from its tokens, it earns turn by turn what stands on its rows."""
    texts = grown.context.ragged("tokens").tolist()
    tasks = {t.id: t for t in collector().tasks(4)}
    for episode in grown.by("episode").keys.tolist():
        here = grown["episode"] == episode
        task = tasks[int(grown["task"][here][0])]
        play, text = WORLD.play(task), list(task.prompt)
        turns = int(grown["turn"][here].max()) + 1
        for turn in range(turns):
            mine = here & (grown["turn"] == turn)
            said = grown["action"][mine].tolist()
            assert grown["position"][mine].tolist() == list(range(len(text), len(text) + 5))
            reply = play.act(said)
            assert reply.done == (turn == turns - 1)
            for name in ("success", "malformed", "astray"):
                assert grown[f"signal:{name}"][mine].tolist() == [0, 0, 0, 0, reply.signals[name]]
            text += said + ([] if reply.done else list(reply.observation))
        row = int(grown["context"][here][0])
        assert texts[row][: len(text)] == text


def test_ends_of_a_goal_are_one_group_of_at_most_so_many(grown: Experience) -> None:
    episodes = grown.by("episode")
    groups = Segments(episodes.first(grown["group"]))
    assert len(groups) == len(set(grown["task"].tolist())) <= 4
    assert int(groups.count.max()) <= 5
    assert grown["tag"].tolist() == [a in WORLD.tokens("TQ.") for a in grown["action"].tolist()]
    assert torch.allclose(collector().policy.score(grown)["logp"], grown["logp"], atol=1e-5)


def test_pruned_dialogues_neither_go_on_nor_end_in_the_group(grown: Experience) -> None:
    broken = grown["signal:malformed"] + grown["signal:astray"]
    assert float(broken.sum()) > float((broken * grown.by("episode").is_last()).sum())  # also on the way
    rows = dialogue_trees(prompts=4, branches=3, width=2, most=5)(collector())
    assert float(rows["signal:malformed"].sum() + rows["signal:astray"].sum()) == 0
    collect, dropped = collector(), set[int]()
    tree = collect.tree(collect.tasks(2))
    dice = torch.Generator().manual_seed(0)
    assert _live(tree, dropped, 2, ("malformed",), dice) == [0, 1]
    tree.extend([Branch(0, 6), Branch(1, 6)])
    bad = tree.children(0)[:5]
    for i in range(2, 14):
        tree.nodes[i].earned = {"malformed": float(i in bad), "success": 0.0}
    kept = _live(tree, dropped, 2, ("malformed",), dice)
    assert [tree.nodes[i].task for i in kept] == [
        0,
        1,
        1,
    ]  # one was left of the first goal, two are drawn of six
    assert set(bad) <= dropped
    assert len(dropped) == 12 - 3
    solved = tree.children(1)[0]
    tree.nodes[solved].earned = {"malformed": 1.0, "success": 1.0}
    tree.nodes[solved].end = 1
    dropped.discard(solved)
    _live(tree, dropped, 2, ("malformed",), dice)
    assert solved not in dropped  # what has succeeded is an end, whatever its form


def test_what_is_sampled_for_a_tree_is_counted_whether_it_is_kept_or_not() -> None:
    collect = collector()
    rows = dialogue_trees(prompts=2, branches=4, width=2, most=2)(collect)
    assert collect.state["decisions"] > len(rows)
    assert len(rows.by("episode")) <= 4


# ------------------------------------------------------------------ tags


def test_tags_are_spared_where_the_advantage_is_negative_and_only_there() -> None:
    rows = hand(
        episode=[0, 0, 0, 1, 1],
        logp=[-1.0, -1.0, -1.0, -1.0, -1.0],
        advantage=[-2.0, -2.0, 0.0, 3.0, 3.0],
        tag=[True, False, True, True, False],
    )
    value, stats = form_kept()(batch(rows, logp=[-0.9] * 5))
    ratio = torch.tensor(0.1).exp().item()
    assert value.tolist() == pytest.approx([0.0, -2 * ratio, 0.0, 3 * ratio, 3 * ratio])
    assert stats["spared"].tolist() == [True, False, False, False, False]
    plain, _ = clip()(batch(rows, logp=[-0.9] * 5))
    assert form_kept(protect=False)(batch(rows, logp=[-0.9] * 5))[0].tolist() == plain.tolist()


def test_gradient_against_a_slow_reference() -> None:
    """(1/G) Σ_i (1/|τ_i|) Σ_t M_t·min(ρA, clip(ρ)·A): what is masked still counts in |τ_i|."""
    rows = ragged()
    rows = rows.with_columns(tag=rows["action"] % 2 == 0)
    method = on_policy(surrogate=form_kept(), reduce=sequence_mean())
    slow = Slow()
    total = 0.0
    episodes = rows.by("episode").keys.tolist()
    for episode in episodes:
        mine = rows_of(rows, episode=episode)
        for row in mine:
            a = row["advantage"]
            if a < 0 and row["tag"]:
                continue
            ratio = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            total = total - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) / len(mine) / len(episodes)
    assert_same(gradient(method, rows), slow.gradient(total))  # type: ignore[arg-type]


def test_a_shared_turn_counts_as_often_as_dialogues_begin_with_it() -> None:
    rows = hand(episode=[0, 0, 1, 1], node=[7, 8, 7, 9], position=[3, 4, 3, 4])
    mask = torch.ones(4, dtype=torch.bool)
    assert sequence_mean()(rows, mask).tolist() == [0.25] * 4
    assert leaf_mean()(rows, mask).tolist() == [0.125, 0.25, 0.125, 0.25]
    mask[2] = False  # what does not learn shares nothing
    assert leaf_mean()(rows, mask).tolist() == [0.25, 0.25, 0.0, 0.5]


def test_well_formed_turns_are_measured() -> None:
    found = WORLD.measure("well_formed", TextPolicy.load(START), 0)
    assert 0.8 < found < 1.0  # the teacher mixes up its tags in one turn of ten


@pytest.mark.parametrize(
    ("world", "pruned", "why"),
    [
        ("chain", (), "single turn"),
        ("keydoor", (), "prompt of its own"),
        ("guess", ("malformed",), "Unknown signal of guess"),
    ],
)
def test_worlds_without_dialogues_are_refused(world: str, pruned: tuple[str, ...], why: str) -> None:
    with pytest.raises(PanoplyError, match=why):
        pp.plan("dialtree-rpo", world, settings={"sample.pruned": pruned})


def test_tags_have_to_be_named() -> None:
    with pytest.raises(PanoplyError, match="mark the form"):
        pp.plan("dialtree-rpo", settings={"sample.tags": ()})


def test_its_home_is_a_preset() -> None:
    assert pp.plan("dialtree-rpo").world_options == {"kind": "gatekeeper"}
