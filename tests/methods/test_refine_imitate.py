"""Refine and Imitate: places of transcripts, what detectors pay, and credit against a buffer."""

from __future__ import annotations

import pytest
import torch
from kit import hand

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import OWN, REPLAY, Experience
from panoply.methods.applied_agents.refine_imitate import buffered, candidates, detected, transcript
from panoply.policies.build import warm_start
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.worlds.text.guess import Guess
from panoply.worlds.world import Task

WORLD = Guess(kind="slots")


def collector() -> Collector:
    return Collector(WORLD, TextPolicy.load(warm_start(WORLD) or ""), 0)


@pytest.fixture(scope="module")
def drawn() -> Experience:
    return candidates(prompts=2, candidates=3)(collector())  # type: ignore[no-any-return]


def test_a_transcript_has_a_place_for_every_reply() -> None:
    secret = "dbacabdc3037"
    task = Task(7, tuple(WORLD.tokens(WORLD.riddle.prompt(secret))), data={"secret": secret})
    read = [WORLD.text(tokens) for _, tokens, _, _ in transcript(WORLD, task)]
    assert read == [
        "dbacabdc?3>", "dbacabdc?3>F3c.?0>", "dbacabdc?3>F3c.?0>F0d.?3>", "dbacabdc?3>F3c.?0>F0d.?3>K3.?7>"
    ]  # fmt: skip
    assert [WORLD.text(said) for *_, said in transcript(WORLD, task)] == ["F3c.", "F0d.", "K3.", "F7c."]


def test_replies_are_judged_where_they_stand_and_nothing_follows_them(drawn: Experience) -> None:
    """Candidates and the transcript's own reply follow what was said in the transcript; no user is simulated."""
    asked = {t.id: t for t in collector().tasks(2)}
    places = [p for task in asked.values() for p in transcript(WORLD, task)]
    texts = drawn.context.ragged("tokens").tolist()
    first = int(drawn["group"].min())
    assert len(drawn.by("episode")) == 8 * (3 + 1)
    for episode in drawn.by("episode").keys.tolist():
        here = drawn["episode"] == episode
        task, read, play, said = places[int(drawn["group"][here][0]) - first]
        tokens, row = drawn["action"][here].tolist(), int(drawn["context"][here][0])
        assert int(drawn["task"][here][0]) == task
        assert texts[row] == [*read, *tokens]
        signals = play.fork().act(tokens).signals
        assert float(drawn["signal:passed"][here].sum()) == signals["passed"]
        assert float(drawn["signal:repeated"][here][-1]) == signals["repeated"]
        if int(drawn["source"][here][0]) == REPLAY:
            assert tokens == said
    own = drawn["source"] == OWN
    assert int(own.sum()) + int((drawn["source"] == REPLAY).sum()) == len(drawn)


def test_demonstrations_have_the_policys_own_likelihood(drawn: Experience) -> None:
    """So that the ratio of what it did not draw is 1 at first, and only then moves."""
    scored = collector().policy.score(drawn)["logp"]
    assert torch.allclose(scored, drawn["logp"], atol=1e-5)
    alone = candidates(prompts=2, candidates=3, demonstrations=False)(collector())
    assert len(alone.by("episode")) == 24
    assert torch.equal(alone["action"], drawn["action"][drawn["source"] == OWN])


def test_what_is_paid() -> None:
    """One place with three own candidates that pass, one of them with an appeal, one that fails, and the person's."""
    rows = hand(
        episode=[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5],
        group=[0] * 17,
        source=[OWN] * 12 + [REPLAY] * 3 + [OWN] * 2,
        **{
            "signal:passed": [0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1],
            "signal:appeal": [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        },
    )
    paid = rows.by("episode").sum(detected()(rows))
    assert paid.tolist() == [2, 4, 2, -2, 10, -3]  # the last has two tokens, whatever it says
    assert detected()(rows).count_nonzero() == 6
    scarce = rows.by("episode").sum(detected(enough=5)(rows))
    assert scarce.tolist() == [0.5, 0.5, 0.5, -2, 10, -3]  # four own ones pass: the person's does not count
    assert rows.by("episode").sum(detected(enough=4)(rows)).tolist() == [2, 4, 2, -2, 10, -3]
    assert rows.by("episode").sum(detected(longest=3)(rows)).tolist() == [-3, -3, -3, -3, 10, -3]


def test_credit_against_the_last_replies() -> None:
    rows = hand(episode=[0, 1], group=[0, 0], reward=[1.0, 3.0])
    state, first = buffered()({"earned": torch.zeros(0)}, rows)
    assert first.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4)  # its own mean 2, deviation √2
    state, second = buffered()(state, hand(episode=[0, 1], group=[0, 0], reward=[2.0, 10.0]))
    assert second.tolist() == [
        0.0,
        2.0,
    ]  # 8/√2 is cut at 2; what is credited is not yet among what it is compared with
    assert state["earned"].tolist() == [1, 3, 2, 10]
    kept, _ = buffered(size=3)(state, rows)
    assert kept["earned"].tolist() == [10, 1, 3]


def test_worlds_without_detectors_are_refused() -> None:
    with pytest.raises(PanoplyError, match="passed"):
        pp.plan("refine-imitate", "guess")
    assert pp.plan("refine-imitate").world_options == {"kind": "slots"}
