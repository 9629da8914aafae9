"""ArCHer: its critic against exact values of a small tree, and what the policy learns from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import pytest
import tiny
import torch
from torch import nn

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import REPLAY, Experience
from panoply.methods.agents.archer import q_minus_v
from panoply.policies.text import TextPolicy
from panoply.policies.utterances import Said, UtteranceCritic, q_error, v_error
from panoply.rollout.text import Collector
from panoply.rollout.utterances import FIRST, said_before, said_in, utterances
from panoply.slots.model.utterances import Course, Judge
from panoply.turns import Turn, Turns, turns_of
from panoply.worlds.text.guess import Guess
from panoply.worlds.text.keydoor import Keydoor

START = Path(__file__).parents[2] / "panoply/assets/guess-items-start"
COURSE = Course(0.5, 1.0, 0.05, 1.0, 2, 3, 5, 100, None)
FEW = {
    "models.utterance_critic.updates": 1,
    "models.utterance_critic.batch": 4,
    "models.utterance_critic.states": 6,
    "models.utterance_critic.warmup": 0,
    "sample.prompts": 4,
    "run.held_out": 2,
    "run.evaluate_every": 0,
}


@pytest.fixture(scope="module")
def collect() -> Collector:
    return Collector(Guess(), TextPolicy.load(START), 0)


def played(collect: Collector) -> Experience:
    rows = collect.episodes(collect.tasks(4), 2)
    return rows.with_columns(reward=rows["signal:score"])


# ------------------------------------------------------------------ turns as transitions


@pytest.mark.parametrize("world", [Guess(), Keydoor()], ids=["appended", "markov"])
def test_turns_follow_one_another(world: Any) -> None:
    start = START if world.name == "guess" else START.parent / "keydoor-start"
    collect = Collector(world, TextPolicy.load(start), 0)
    name = "score" if world.name == "guess" else "progress"
    rows = collect.episodes(collect.tasks(4), 2)
    rows = rows.with_columns(reward=rows[f"signal:{name}"])
    found, at = turns_of(rows), 0
    assert len(found) == len(rows.by("turn"))
    for episode in rows.by("episode").keys.tolist():
        mine = rows.take(rows["episode"] == episode)
        asked = next(
            t for t in (world.task("train", collect.place(i)) for i in range(4)) if t.id == mine["task"][0]
        )
        play, prompt = world.play(asked), asked.prompt
        while True:
            turn = found[at]
            reply = play.act(turn.said)
            assert (tuple(turn.state), turn.task) == (prompt, asked.id)
            assert turn.reward == pytest.approx(reply.signals[name])
            at += 1
            if reply.done:  # by the world or by its cap: nothing is looked up after either
                assert turn.then == ()
                break
            prompt = reply.observation if world.markov else (*prompt, *turn.said, *reply.observation)
            assert tuple(turn.then) == prompt
    assert at == len(found)


def test_the_oldest_turns_leave_and_what_is_kept_is_saved() -> None:
    kept = Turns(3)
    kept.add([Turn([i], [i, i], float(i), [9] if i % 2 else (), i) for i in range(5)])
    assert [t.task for t in kept.held] == [2, 3, 4]
    again = Turns(3)
    again.load_state(kept.state())
    assert [(list(t.state), list(t.said), t.reward, list(t.then), t.task) for t in again.held] == [
        ([2], [2, 2], 2.0, [], 2), ([3], [3, 3], 3.0, [9], 3), ([4], [4, 4], 4.0, [], 4)
    ]  # fmt: skip
    drawn = kept.draw(64, torch.Generator().manual_seed(0))
    assert {t.task for t in drawn} == {2, 3, 4}


# ------------------------------------------------------------------ the critic


def test_errors_by_hand() -> None:
    q = torch.tensor([[1.0, 2.0], [0.0, 3.0]], requires_grad=True)
    then = torch.tensor([[10.0, 20.0], [50.0, 60.0]], requires_grad=True)
    found = q_error(q, torch.tensor([-1.0, 2.0]), then, torch.tensor([1.0, 0.0]), 0.5)
    # targets 4 and 9 after −1 + ½·V̄, twin by twin, and 2 after the last turn
    assert found.item() == pytest.approx((9 + 4) / 2 + (49 + 1) / 2)
    found.backward()
    assert then.grad is None
    assert q.grad is not None
    assert q.grad.flatten().tolist() == [-3, -7, -2, 1]
    v, hoped = torch.tensor([[1.0, 1.0]], requires_grad=True), torch.tensor([[3.0, 0.0]])
    assert v_error(v, hoped).item() == pytest.approx(4 + 1)
    assert v_error(v, hoped, 0.9).item() == pytest.approx(1.8 * 4 + 0.2 * 1)


class Known(nn.Module):
    """Values in a table, of the tree below."""

    STATES = ((0,), (1,))

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = (nn.Parameter(torch.randn(n, 2)) for n in (4, 2))
        self.trunk = TextPolicy.load(START)

    def learning(self) -> Any:
        return self.named_parameters()

    def frozen(self) -> Known:
        found = Known()
        found.load_state_dict(self.state_dict())
        return found.requires_grad_(False)

    def forward(self, states: Any, said: Any) -> Said:
        at = torch.tensor([self.STATES.index(tuple(s)) for s in states])
        what = torch.tensor([a[0] if len(a) else 0 for a in said])
        return Said(self.q[2 * at + what], self.v[at])


def test_the_critic_against_exact_values_of_a_tree(collect: Collector) -> None:
    """In state 0 the first answer costs 1 and leads to state 1, the second earns 2; there 4 and 0. π(first) = ¼, γ = ½.

    V(1) = 1, Q(0, first) = −1 + ½ = −½, V(0) = ¼·(−½) + ¾·2 = 1.375. What lies in the replay is drawn otherwise: with
    its answers in place of the policy's, V(1) would be 2.
    """
    torch.manual_seed(0)
    tree = [
        Turn((0,), (0,), -1.0, (1,), 0),
        Turn((0,), (1,), 2.0, (), 0),
        Turn((1,), (0,), 4.0, (), 0),
        Turn((1,), (1,), 0.0, (), 0),
    ]
    judge = Judge(Known(), collect, COURSE, {})  # type: ignore[arg-type]
    turns = [turn for turn in tree for _ in range(4)]
    fresh = [said for _ in tree for said in ((0,), (1,), (1,), (1,))]
    for _ in range(220):
        judge._update(turns, fresh)
    assert torch.allclose(judge.net.q, torch.tensor([-0.5, 2.0, 4.0, 0.0])[:, None].expand(4, 2), atol=0.01)  # type: ignore[arg-type]
    assert torch.allclose(judge.net.v, torch.tensor([1.375, 1.0])[:, None].expand(2, 2), atol=0.01)  # type: ignore[arg-type]
    assert torch.equal(judge.target.q, judge.net.q)  # type: ignore[arg-type]  # τ = 1


def test_values_are_read_after_the_context_and_after_the_utterance(collect: Collector) -> None:
    net = UtteranceCritic(TextPolicy.load(START), 0)
    context, words = [collect.world.tokens(text) for text in ("bcekop>", "bcekop>Q1y")], ["Q1", "Gp"]  # type: ignore[attr-defined]
    a, b = (collect.world.tokens(word) for word in words)  # type: ignore[attr-defined]
    with torch.no_grad():
        said = net([context[0], context[0], context[1]], [a, b, b])
        alone = net([context[1]], [()])
    assert torch.allclose(said.v[0], said.v[1], atol=1e-6)  # V does not see what is said
    assert not torch.allclose(said.q[0], said.q[1], atol=1e-4)
    assert not torch.allclose(said.q[1], said.q[2], atol=1e-4)
    assert torch.allclose(said.v[2], alone.v[0], atol=1e-6)
    assert not torch.allclose(said.q[:, 0], said.q[:, 1], atol=1e-4)  # twins began apart


# ------------------------------------------------------------------ what the policy learns from


def test_new_utterances_in_old_states(collect: Collector) -> None:
    states = [collect.world.tokens(text) for text in ("bcekop>Q1y", "bcekop>", "bcekop>Q1y")]  # type: ignore[attr-defined]
    before = dict(collect.state)
    rows = utterances(collect, states, [5, 6, 5], "a test")
    assert (rows.by("episode").keys - FIRST).tolist() == [0, 1, 2]
    assert rows.by("episode").first(rows["task"]).tolist() == [5, 6, 5]
    assert collect.state["decisions"] == before["decisions"] + len(rows)
    assert all(collect.state[of] == before[of] for of in ("episodes", "tasks", "groups"))
    texts = rows.context.ragged("tokens").tolist()
    for i, said in enumerate(said_in(rows)):
        row = int(rows["context"][rows["episode"] == FIRST + i][0])
        assert texts[row] == [*states[i], *said]
    scored = collect.policy.score(rows)["logp"]
    assert torch.allclose(scored, rows["logp"], atol=1e-5)
    again = utterances(collect, states, [5, 6, 5], "a test")
    assert said_in(again) == said_in(rows)


def test_what_is_said_in_old_states_is_drawn_as_episodes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all settings of the sample part: they are the policy whose values are learned, and which learns."""
    drawn: list[Experience] = []

    def noted(*given: Any, **how: Any) -> Experience:
        drawn.append(utterances(*given, **how))
        return drawn[-1]

    monkeypatch.setattr("panoply.slots.model.utterances.utterances", noted)
    how = {"temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    asked = {f"sample.{name}": value for name, value in how.items()} | {"sample.top_k": 3}
    tiny.bare(tmp_path / "run", "archer", world="guess", steps=1, settings={**FEW, **asked})
    assert len(drawn) == 2  # the critic's and the actor's
    for rows in drawn:
        assert all(rows[name].unique().tolist() == pytest.approx([value]) for name, value in how.items())
        assert int(rows.decisions.ragged("allowed").lengths.max()) == 3


def test_utterances_are_as_short_as_is_asked(collect: Collector) -> None:
    state = collect.world.tokens("bcekop>")  # type: ignore[attr-defined]
    assert len(utterances(collect, [state], [5], "a test", max_tokens=1)) == 1


def test_what_is_offered_has_the_smaller_of_twins_on_all_its_tokens(collect: Collector) -> None:
    judge = Judge(UtteranceCritic(TextPolicy.load(START), 0), collect, COURSE, {})
    judge.turns.add(turns_of(played(collect)))
    moved = judge.learn(0)
    assert moved["turns"] == len(judge.turns)
    rows = judge.offers(0)
    assert len(rows.by("episode")) == COURSE.states
    states = [list(t.state) for t in judge.turns.held]
    texts = rows.context.ragged("tokens").tolist()
    for i, said in enumerate(said_in(rows)):
        here = rows["episode"] == FIRST + i
        state = texts[int(rows["context"][here][0])][: int(rows["position"][here][0])]
        mine = rows.take(here)
        assert state in states
        with torch.no_grad():
            worth = judge.net([state], [said])
        assert torch.allclose(mine["q"], worth.q.min().expand(len(mine)), atol=1e-5)
        assert torch.allclose(mine["v"], worth.v.min().expand(len(mine)), atol=1e-5)
    assert torch.equal(q_minus_v()(rows), rows["q"] - rows["v"])


def test_a_critic_goes_on_from_what_it_saved(collect: Collector) -> None:
    first, second = (Judge(UtteranceCritic(TextPolicy.load(START), 0), collect, COURSE, {}) for _ in range(2))
    first.turns.add(turns_of(played(collect)))
    first.learn(0)
    second.load_state({name: t.detach().clone() for name, t in first.state().items()})
    assert first.learn(1) == second.learn(1)
    assert all(
        torch.equal(a, b) for a, b in zip(first.net.parameters(), second.net.parameters(), strict=True)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(first.target.parameters(), second.target.parameters(), strict=True)
    )


def test_a_token_baseline_takes_off_what_was_decided_before() -> None:
    rows = kit.hand(episode=[0, 0], q=[3.0, 3.0], v=[1.0, 1.0], value=[0.5, 2.5])
    found = q_minus_v(baseline=True)(rows)
    assert found["advantage"].tolist() == [1.5, -0.5]
    assert found["target"].tolist() == [2.0, 2.0]


def test_worlds_that_restrict_what_is_drawn_are_refused() -> None:
    world = Keydoor(legal=True)
    collect = Collector(world, TextPolicy.load(START.parent / "keydoor-start"), 0)
    with pytest.raises(PanoplyError, match="what may be drawn"):
        utterances(collect, [world.task("train", 0).prompt], [0], "a test")


# ------------------------------------------------------------------ without new utterances


def test_old_turns_as_rows(collect: Collector) -> None:
    """The same rows as the engine made of them, with log-probabilities of now, which are those it drew with."""
    turns = turns_of(played(collect))[:6]
    read = [turn.state for turn in turns]
    new = utterances(collect, read, [turn.task for turn in turns], "test")
    old = said_before(collect, read, said_in(new), [turn.task for turn in turns])
    for name in ("episode", "task", "group", "turn", "state", "position", "action", "end"):
        assert old[name].tolist() == new[name].tolist(), name
    torch.testing.assert_close(old["logp"], new["logp"], atol=1e-4, rtol=1e-4)
    assert set(old["source"].tolist()) == {REPLAY}


def test_the_actor_of_the_replay_says_what_was_said(collect: Collector) -> None:
    judge = Judge(UtteranceCritic(TextPolicy.load(START), 0), collect, replace(COURSE, says="replay"), {})
    judge.turns.add(turns_of(played(collect)))
    rows = judge.offers(0)
    known = {(tuple(turn.state), tuple(turn.said)) for turn in judge.turns.held}
    texts = rows.context.ragged("tokens")
    for i, said in enumerate(said_in(rows)):
        whole = texts[i].tolist()
        assert (tuple(whole[: len(whole) - len(said)]), tuple(said)) in known


def test_weights_of_old_turns() -> None:
    """exp(2·(½ − 1)) = e⁻¹, exp(2·(1 − 1)) = 1, and never more than 100: nothing is unlearned."""
    rows = kit.hand(episode=[0, 1, 2], q=[0.5, 1.0, 9.0], v=[1.0, 1.0, 1.0])
    found = q_minus_v(beta=2.0)(rows)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == pytest.approx([0.36787944, 1.0, 100.0])


def test_what_does_not_go_together_is_refused() -> None:
    replayed, weighed = {"models.utterance_critic.says": "replay"}, {"credit.beta": 1.0}
    with pytest.raises(PanoplyError, match=r"weighed by exp\(β·A\), and credit.beta is none"):
        pp.plan("archer", settings=replayed)
    with pytest.raises(PanoplyError, match="credit.beta weighs what was said before"):
        pp.plan("archer", settings=weighed)
    assert pp.plan("archer", settings={**replayed, **weighed, "models.utterance_critic.expectile": 0.7})


def test_a_run_without_new_utterances(tmp_path: Path) -> None:
    """Two steps of IQL's critic and AWR's actor: the policy moves, and every weight is positive."""
    few = {
        **FEW,
        "models.utterance_critic.expectile": 0.7,
        "models.utterance_critic.says": "replay",
        "credit.beta": 1.0,
    }
    run = tiny.bare(tmp_path / "run", "archer", world="guess", steps=1, settings=few).run
    assert tiny.metrics(run)[0]["gradient_norm"] > 0
