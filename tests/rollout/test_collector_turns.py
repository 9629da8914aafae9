"""Episodes of several turns: what the collector records is what was played, however turns are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from panoply.evaluation.held_out import evaluate
from panoply.experience import DEMONSTRATION, OPEN, TERMINATED, TRUNCATED, Experience, transcript
from panoply.policies.build import open_policy
from panoply.policies.text import TextPolicy
from panoply.rollout.engine import LENGTH, STOP, Request, Sampling, TextEngine, Turn
from panoply.rollout.text import Collector
from panoply.worlds.text.keydoor import Keydoor
from panoply.worlds.text.tools import Tools
from panoply.worlds.world import Lesson, Reply, TextWorld


@dataclass(frozen=True)
class Appended(Tools):
    """The same world with every observation appended to what came before."""

    markov: ClassVar[bool] = False

    @property
    def start(self) -> str:
        return "tools-start"


WORLDS: dict[str, TextWorld] = {
    "keydoor": Keydoor(),
    "tools": Tools(),
    "appended": Appended(),
    "scarce": Tools(budget=6),
}


@pytest.fixture(scope="module")
def policies() -> dict[str, TextPolicy]:
    return {name: open_policy("start", world, 0, "cpu") for name, world in WORLDS.items()}


@pytest.fixture(params=WORLDS)
def collector(request: pytest.FixtureRequest, policies: dict[str, TextPolicy]) -> Collector:
    return Collector(WORLDS[request.param], policies[request.param], seed=3)


def said(experience: Experience, episode: int) -> list[list[int]]:
    """What an episode said in each turn."""
    mask = experience["episode"] == episode
    turns, actions = experience["turn"][mask].tolist(), experience["action"][mask].tolist()
    return [[a for a, t in zip(actions, turns, strict=True) if t == n] for n in range(turns[-1] + 1)]


def test_playing_it_again_gives_what_was_recorded(collector: Collector) -> None:
    world, tasks = collector.world, collector.tasks(6)
    found = collector.episodes(tasks, 4)
    assert found["episode"].unique().tolist() == list(range(24))
    tokens = found.context.ragged("tokens")
    for episode in range(24):
        task = tasks[episode // 4]
        play, mask = world.play(task), found["episode"] == episode
        rows, context = mask.nonzero().flatten(), list(task.prompt)
        assert found["task"][rows].unique().tolist() == [task.id]
        assert found["group"][rows].unique().tolist() == [episode // 4]
        reply = Reply({})
        for turn, answer in enumerate(said(found, episode)):
            mine = rows[found["turn"][rows] == turn]
            assert found["state"][mine].unique().tolist() == [play.state]
            c = int(found["context"][mine][0])
            assert tokens[c].tolist()[: len(context)] == context
            assert found["position"][mine].tolist() == list(range(len(context), len(context) + len(answer)))
            reply = play.act(answer)
            for name, value in reply.signals.items():
                column = found[f"signal:{name}"][mine].tolist()
                assert column == pytest.approx([0.0] * (len(answer) - 1) + [value])
            observed = list(reply.observation)
            context = observed if world.markov else context + answer + observed
        assert reply.done
        ends = found["end"][rows].tolist()
        assert ends[:-1] == [OPEN] * (len(ends) - 1)
        assert ends[-1] == (TRUNCATED if reply.truncated else TERMINATED)


def test_what_is_recorded_is_what_the_policy_says(collector: Collector) -> None:
    found = collector.episodes(collector.tasks(4), 4)
    shared = collector.policy.score(found)["logp"]
    alone = TextPolicy(collector.policy.model, collector.policy.tokenizer, shared=False).score(found)["logp"]
    torch.testing.assert_close(shared, found["logp"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone, found["logp"], atol=1e-5, rtol=1e-5)


def test_an_episode_does_not_depend_on_the_others(policies: dict[str, TextPolicy]) -> None:
    for name, world in WORLDS.items():
        together, apart = (Collector(world, policies[name], seed=3) for _ in range(2))
        tasks = together.tasks(5)
        whole = together.episodes(tasks, 3)
        parts = [apart.episodes([task], 3) for task in tasks]
        for episode in range(15):
            assert said(whole, episode) == said(parts[episode // 3], episode)


def test_clones_and_turns_draw_numbers_of_their_own(policies: dict[str, TextPolicy]) -> None:
    collector = Collector(WORLDS["keydoor"], policies["keydoor"], seed=3)
    found = collector.episodes(collector.tasks(1), 16)
    assert len({tuple(map(tuple, said(found, e))) for e in range(16)}) > 8


def test_equal_observations_are_one_prompt(policies: dict[str, TextPolicy]) -> None:
    collector = Collector(WORLDS["keydoor"], policies["keydoor"], seed=3)
    found = collector.episodes(collector.tasks(4), 8)
    tokens, prompt = found.context.ragged("tokens").tolist(), found.context["prompt"].tolist()
    assert found.context["shared"].unique().tolist() == [8]
    assert len(set(zip(map(lambda t: tuple(t[:8]), tokens), prompt, strict=True))) == len(set(prompt))  # noqa: C417
    assert len({tuple(t[:8]) for t in tokens}) == len(set(prompt)) < len(tokens) / 2


def test_equal_observations_are_prefilled_once_a_round(
    policies: dict[str, TextPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, fed = policies["keydoor"], []
    hidden = policy.model.hidden

    def counted(tokens: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if tokens.shape[1] > 1:
            fed.append(tokens.shape[0])
        return hidden(tokens, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(policy.model, "hidden", counted)
    collector = Collector(WORLDS["keydoor"], policy, seed=3)
    found = collector.episodes(collector.tasks(2), 16)
    turns = int(found["turn"].max()) + 1
    assert len(fed) == turns
    assert fed[0] == 2, "clones begin in the same place"
    assert sum(fed) < len(found) / 2


def test_greedy_clones_are_equal(collector: Collector) -> None:
    found = collector.episodes(collector.tasks(2), 3, temperature=0.0)
    for episode in range(6):
        assert said(found, episode) == said(found, episode // 3 * 3)


def test_a_schedule_of_temperatures_that_is_one_in_some_rounds(policies: dict[str, TextPolicy]) -> None:
    """A turn that is over after its first token has temperature 1 throughout; others have not."""
    collector = Collector(WORLDS["tools"], policies["tools"], seed=3)
    found = collector.episodes(collector.tasks(4), 4, temperature=lambda at: torch.where(at == 0, 1.0, 0.5))
    within = found["position"] - 12
    assert torch.equal(found["temperature"], torch.where(within == 0, 1.0, 0.5))
    assert (collector.policy.score(found)["logp"] - found["logp"]).abs().max() < 1e-5


def test_state_of_the_collector_goes_on(collector: Collector) -> None:
    first = collector.episodes(collector.tasks(2), 2)
    second = collector.episodes(collector.tasks(2), 2)
    assert second["episode"].unique().tolist() == [4, 5, 6, 7]
    assert second["group"].unique().tolist() == [2, 3]
    resumed = Collector(collector.world, collector.policy, seed=3)
    resumed.state |= {"tasks": 2, "groups": 2, "episodes": 4}
    again = resumed.episodes(resumed.tasks(2), 2)
    assert torch.equal(again["action"], second["action"])
    assert not torch.equal(first["task"].unique(), second["task"].unique())


# ------------------------------------------------------------------ given episodes


def recorded(experience: Experience, episode: int) -> list[Lesson]:
    """Prompts and answers of a given episode, a context a turn."""
    tokens, found = experience.context.ragged("tokens"), []
    mask = experience["episode"] == episode
    for turn in experience["turn"][mask].unique().tolist():
        rows = (mask & (experience["turn"] == turn)).nonzero().flatten()
        c, at = int(experience["context"][rows[0]]), experience["position"][rows].tolist()
        text = tokens[c].tolist()
        assert at == list(range(at[0], len(text)))
        assert experience["action"][rows].tolist() == text[at[0] :]
        found.append((tuple(text[: at[0]]), text[at[0] :]))
    return found


def test_demonstrations_are_the_lessons(collector: Collector) -> None:
    collector.seed = 5
    tasks = collector.tasks(8)
    given = collector.demonstrations(tasks)
    assert "logp" not in given
    assert given["source"].unique().tolist() == [DEMONSTRATION]
    again = Collector(collector.world, collector.policy, seed=5)
    assert torch.equal(again.demonstrations(again.tasks(8))["action"], given["action"])
    for episode, task in enumerate(tasks):
        lessons = recorded(given, episode)
        careful = collector.world.turns(task, collector.world.gold(task))
        assert [prompt for prompt, _ in lessons] == [prompt for prompt, _ in careful]
    scored = collector.policy.score(given)["logp"]
    assert scored.isfinite().all()


def test_pairs_are_whole_episodes(policies: dict[str, TextPolicy]) -> None:
    for name in ("keydoor", "tools"):
        world = WORLDS[name]
        collector = Collector(world, policies[name], seed=3)
        tasks = {t.id: t for t in collector.tasks(8)}
        given = collector.teacher_pairs(list(tasks.values()))
        assert given.pairs is not None
        for side, success in (("chosen", 1.0), ("rejected", 0.0)):
            for episode in given.pairs.tensor(side).tolist():
                lessons = recorded(given, episode)
                task = tasks[int(given["task"][given["episode"] == episode][0])]
                assert lessons == world.turns(task, [t for _, answer in lessons for t in answer])
                assert world.grade(task, [t for _, answer in lessons for t in answer])["success"] == success


# ------------------------------------------------------------------ beliefs


@pytest.mark.parametrize("name", ["tools", "appended"])
def test_beliefs_are_the_likelihood_of_the_right_answer_at_the_start_of_each_turn(
    name: str, policies: dict[str, TextPolicy]
) -> None:
    world, policy = WORLDS[name], policies[name]
    collector = Collector(world, policy, seed=3, needs=frozenset({"answer_likelihood"}))
    tasks = collector.tasks(4)
    found = collector.episodes(tasks, 4)
    assert "answer_likelihood" not in Collector(world, policy, seed=3).episodes(tasks[:1])
    tokens = found.context.ragged("tokens")
    for row in range(0, len(found), 3):
        task = tasks[int(found["episode"][row]) // 4]
        bridge, answer = world.conclusion(task)
        same = (found["episode"] == found["episode"][row]) & (found["turn"] == found["turn"][row])
        begin = int(found["position"][same].min())
        text = [*tokens[int(found["context"][row])].tolist()[:begin], *bridge, *answer]
        with torch.no_grad():
            logp = policy.model(torch.tensor([text]))[0].log_softmax(-1)
        n = len(answer)
        each = [float(logp[len(text) - n + i - 1, token]) for i, token in enumerate(answer)]
        assert float(found["answer_likelihood"][row]) == pytest.approx(
            torch.tensor(each).mean().exp().item(), abs=1e-5
        )


# ------------------------------------------------------------------ ends of turns, evaluation, transcripts


@pytest.mark.parametrize("patience", [1, 3])
def test_a_turn_ends_when_it_is_complete(patience: int, policies: dict[str, TextPolicy]) -> None:
    policy = policies["tools"]
    engine = TextEngine(policy.model, patience=patience)
    request = Request(Tools().task("train", 0).prompt, list(range(40)))
    shown: list[Turn] = []

    def complete(answer: list[int]) -> bool:
        return sum(answer) % 3 == 0

    def look(turns: Sequence[Turn]) -> list[None]:
        shown.extend(turns)
        return [None] * len(turns)

    rollouts = engine.generate([request], Sampling(max_tokens=4), look, complete=complete)
    reasons = rollouts.reasons.tolist()
    assert {r for (r,) in reasons} == {STOP, LENGTH}
    for row, answer in enumerate(rollouts.completions()):
        assert not any(complete(answer[:n]) for n in range(1, len(answer)))
        assert reasons[row] == [STOP if complete(answer) else LENGTH]
        assert complete(answer) or len(answer) == 4
    free = engine.generate([request], Sampling(max_tokens=4))
    for short, whole in zip(rollouts.completions(), free.completions(), strict=True):
        assert whole[: len(short)] == short


def test_evaluation_shows_whole_episodes(policies: dict[str, TextPolicy]) -> None:
    found = evaluate(WORLDS["keydoor"], policies["keydoor"], 64, attempts=2, ks=(1, 2))
    assert 0.1 < found.sampled < 0.6
    assert found.pass_at[2] > found.pass_at[1] == pytest.approx(found.sampled)
    assert found.samples[0].count(">") > 4


def test_transcripts_hold_every_turn(collector: Collector) -> None:
    found = collector.episodes(collector.tasks(2), 4)
    for episode in range(8):
        tokens, position = transcript(found, episode)
        assert [tokens[at] for at in position] == [t for answer in said(found, episode) for t in answer]
