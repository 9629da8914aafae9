"""SSP: the gate and what it stops, what each role earns, questions that are asked again, and one model in two roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import batch, hand, slopes
from tiny import metrics, resume

import panoply as pp
from panoply.compose import method_from_json
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.agents.ssp import by_rules, drawn, search_self_play, ssp, supported, worth
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.progress import Progress
from panoply.rollout.text import Collector
from panoply.worlds.text.graph import RELATIONS, Graph, before, document, walk
from panoply.worlds.world import Proposal, Task

WORLD, BASE = Graph(), "train/7"
POLICY = TextPolicy.fresh(DecoderConfig(**WORLD.default_model()), WORLD.tokenizer, seed=1)
Says = Callable[[Task, int], str]


class Scripted(Collector):
    """Lets a script act: what is said to a task, the first time, the second, …"""

    says: Says

    def episodes(self, tasks: Sequence[Task], group: Any = 1, **more: Any) -> Experience:  # type: ignore[override]
        asked, keys = self._groups(tasks, group, None)
        times: dict[int, int] = {}
        answers = []
        for task, key in zip(asked, keys, strict=True):
            answers.append(self.world.tokens(self.says(task, times.setdefault(key, 0))))  # type: ignore[attr-defined]
            times[key] += 1
        self.asked_for = [(task, more) for task in asked]
        return self.answers(asked, answers, into=torch.tensor(keys))


def collector(says: Says, seed: int = 0) -> Scripted:
    made = Scripted(WORLD, POLICY, seed=seed)
    made.says = says
    return made


def offer(question: str, *searches: str, answer: str = "") -> Proposal:
    """What comes of some searches from an answer, and then a question."""
    given = WORLD._asked(BASE, answer, answer, "P")
    return WORLD.proposed(given, WORLD.tokens("".join(searches) + f"Q{question.ljust(4, '_')}"))


def back(answer: str, path: str) -> tuple[list[str], str]:
    """Searches backwards from an answer along relations, and the entity that they end at."""
    found = []
    for relation in path:
        found.append(f"B{answer}{relation}")
        answer = before(BASE, answer, relation)
    return found, answer


# ------------------------------------------------------------------ the gate


def test_the_rules_by_hand() -> None:
    searches, start = back("a", "wx")
    sound = offer(f"{start}xw", *searches, answer="a")
    assert by_rules(sound, 2)
    assert not by_rules(sound, 3), "too few searches"
    assert not by_rules(offer(f"{start}xw", searches[0], searches[0], answer="a"), 2), "the same twice"
    assert not by_rules(offer("axw", *searches, answer="a"), 2), "it tells the answer"
    assert not by_rules(offer("__w", *searches, answer="a"), 2), "no question"
    assert by_rules(offer(f"{start}xw", searches[0], answer="a"), 1)
    assert not by_rules(offer(f"{start}xw", answer="a"), 0), "without a document nothing can be read"
    wrong = offer(f"{start}yw", *searches, answer="a")
    assert walk(BASE, f"{start}yw")[-1] != "a"
    assert by_rules(wrong, 2), "rules do not know what is true"


@pytest.mark.parametrize("gate", ["world", "policy"])
def test_what_documents_do_not_support_is_rejected(gate: Any) -> None:
    searches, start = back("a", "wx")
    good, bad = (offer(f"{start}{path}", *searches, answer="a") for path in ("xw", "yw"))
    others = [offer("bwx", *back(e, "yz")[0], answer=e) for e in "cdef"]
    reads = collector(lambda task, n: WORLD.text(WORLD.gold(task)))
    offered, passed = [good, bad, *others], [True, True, False, False, False, False]
    found = supported(reads, offered, passed, gate, 4, np.random.default_rng(0))
    assert found == [True, False, False, False, False, False], "what the rules refuse stays refused"
    if gate == "policy":
        (first, more), _ = reads.asked_for
        assert more == {"temperature": 0.0}
        assert WORLD.text(first.prompt)[0] == "R"
        assert len(first.data["documents"]) == 2 + 4 * 2, "its own, and those of four others"
        assert set(good.documents) < set(first.data["documents"])
        assert first.data["documents"][:2] != list(good.documents), "shuffled"
        supported(reads, offered, passed, gate, 99, np.random.default_rng(0))
        assert len(reads.asked_for[0][0].data["documents"]) == 2 * len(offered), (
            "as many as there are, its own once"
        )


def test_without_noise_nonsense_passes_among_few_documents() -> None:
    """One document, whose object is the answer, is found whatever one asks: noise makes that rare."""
    (search,), start = back("a", "w")
    others = [offer("bwx", *back(e, "yz")[0], answer=e) for e in "cdef"]
    passed = {0: 0, 4: 0}
    for first in "bcdefghijkl":
        for relation in RELATIONS:
            nonsense = offer(f"{first}{relation}", search, answer="a")
            if walk(BASE, first + relation)[-1] == "a":
                continue
            for noise in passed:
                rng = np.random.default_rng(noise)
                nobody, only = collector(lambda *_: ""), [True, False, False, False, False]
                passed[noise] += supported(nobody, [nonsense, *others], only, "world", noise, rng)[0]
    assert passed[0] == 40, "each of 44 but the four that are true"
    assert passed[4] < 16
    assert document(BASE, start, "w")[2] == "a"


# ------------------------------------------------------------------ what is earned


def test_what_a_question_is_worth() -> None:
    p = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert worth(p, "failure", 0.0, 1.0).tolist() == [1.0, 0.75, 0.5, 0.0]
    assert worth(p, "middle", 0.0, 1.0).tolist() == [0.0, 0.75, 1.0, 0.0]
    assert worth(p, "middle", 0.5, 0.75).tolist() == [0.0, 1.5, 1.0, 0.0]
    assert worth(p, "rules", 0.0, 1.0).tolist() == [1.0] * 4


def scripts(ways: dict[int, str], right: int) -> tuple[Says, Says]:
    """A proposer: by turns a sound question, a wrong one, or nonsense; and solvers, the first few of them right."""
    order: list[int] = []

    def propose(task: Task, n: int) -> str:
        order.append(task.id)
        answer, base = task.data["answer"], task.data["base"]
        b = before(base, answer, "w")
        c = before(base, b, "x")
        way = ways[(len(order) - 1) % len(ways)]
        wrong = next(r for r in RELATIONS if walk(base, f"{c}{r}w")[-1] != answer)
        end = {"sound": f"{c}xw_", "wrong": f"{c}{wrong}w_", "nonsense": "____"}[way]
        return f"B{answer}wB{b}xQ{end}"

    def solve(task: Task, n: int) -> str:
        if task.data["role"] == "R":
            return f"A{walk(task.data['base'], task.data['question'])[-1]}"
        truth = walk(task.data["base"], task.data["question"])[-1]
        other = "a" if truth != "a" else "b"
        return f"A{truth if n < right else other}"

    return propose, solve


def play(state: Any, ways: dict[int, str], right: int = 1, made: Any = None, **settings: Any) -> Any:
    propose, solve = scripts(ways, right)
    made = made or {"solver": collector(solve), "proposer": collector(propose, seed=1)}
    made["proposer"].says = propose
    made["solver"].says = solve
    state, rows = search_self_play(**{"prompts": 3, "group": 4, "noise": 0, **settings})(state, made)
    return state, rows, made


WAYS = {0: "sound", 1: "wrong", 2: "nonsense"}


def test_a_step_by_hand() -> None:
    """One of three passes, and one of four solvers is right: 3/4 on its last token; the others earn nothing."""
    state, rows, made = play({"step": 0, "pool": []}, WAYS)
    solved, written = rows["solver"], rows["proposer"]
    assert len(solved.by("episode")) == 4
    assert len(set(solved["group"].tolist())) == 1
    paid = written["signal:paid"]
    assert written.by("episode").sum(paid).tolist() == [0.75, 0.0, 0.0]
    assert (paid > 0).sum() == 1
    assert bool((written.by("episode").is_last() >= (paid > 0)).all())
    assert made["solver"].notes == {"accepted": 1 / 3, "replayed": 0.0, "sound": 1.0, "hops": 2.0}
    assert [(kept["rate"], kept["step"]) for kept in state["pool"]] == [(0.25, 0)]
    assert made["proposer"].asked_for[0][1] == {"temperature": 0.8}
    assert made["solver"].state["episodes"] == 2 + 4, "two were read: that counts, and is no row that learns"
    prompts = {WORLD.text(row.tolist())[0] for row in written.context["tokens"]}
    assert prompts == {"P"}


def test_without_a_gate_the_wrong_question_pays_best() -> None:
    _, rows, made = play({"step": 0, "pool": []}, WAYS, right=4, gate="rules", penalty=-1.0)
    written = rows["proposer"]
    assert written.by("episode").sum(written["signal:paid"]).tolist() == [0.0, 1.0, -1.0]
    assert made["solver"].notes["sound"] == 0.5


def test_places_of_rejected_questions_are_filled_with_earlier_ones() -> None:
    state, _, made = play({"step": 0, "pool": []}, WAYS)
    first = state["pool"][0]
    state, rows, made = play(state, {0: "nonsense"}, right=3, made=made)
    assert len(rows["solver"].by("episode")) == 3 * 4
    assert set(rows["solver"]["task"].tolist()) == {first["id"]}
    assert made["solver"].notes == {"accepted": 0.0, "replayed": 1.0, "staleness": 1.0}
    assert state["pool"] == [{**first, "rate": 0.75}], (
        "what is known of it is renewed, and it stands there once"
    )
    assert rows["proposer"]["signal:paid"].abs().sum() == 0, (
        "who was rejected earns nothing for another's question"
    )
    _, rows, _ = play(state, {0: "nonsense"}, made=made, refill=False)
    assert len(rows["solver"]) == 0, "nothing to learn from"


def test_the_pool_is_cleared_and_its_newest_may_stay() -> None:
    for keep, left in ((0.0, []), (0.5, [1]), (1.0, [0, 1])):
        state, _, made = play({"step": 0, "pool": []}, WAYS, clear=2, keep=keep)
        assert [kept["step"] for kept in state["pool"]] == [0]
        state, _, _ = play(state, WAYS, made=made, clear=2, keep=keep)
        assert [kept["step"] for kept in state["pool"]] == left


def test_hard_questions_are_asked_again_first() -> None:
    pool = [{"id": i, "rate": rate} for i, rate in enumerate((0.2, 0.9, 0.5))]
    rng = np.random.default_rng(0)
    assert {kept["id"] for kept in drawn(pool, 50, 0.5, rng)} == {0, 2}
    assert {kept["id"] for kept in drawn(pool, 50, 1.0, rng)} == {0, 1, 2}
    assert {kept["id"] for kept in drawn(pool, 50, 0.1, rng)} == {0, 1, 2}, "all, where none is hard enough"
    assert drawn([], 3, 1.0, rng) == []


# ------------------------------------------------------------------ what is learned


def test_each_role_has_credit_of_its_own() -> None:
    """Solvers in standard deviations of their group; proposers what they earned, and nothing is taken off."""
    roles = dict(ssp().seats)
    made = hand(episode=[0, 1, 2, 3], group=[0, 0, 0, 0], reward=[1.0, 0.0, 0.0, 0.0], logp=[-1.0] * 4)
    deviation = 0.5 + 1e-4  # of 1, 0, 0, 0, and GRPO's ε
    assert roles["solver"].credit(made).tolist() == pytest.approx(
        [(r - 0.25) / deviation for r in (1, 0, 0, 0)]
    )
    assert roles["proposer"].credit(made).tolist() == [1.0, 0.0, 0.0, 0.0]
    seen = batch(made.with_columns(advantage=torch.tensor([0.75, 0.0, 0.5, 1.0]).double()), logp=[-1.0] * 4)
    value, _ = roles["proposer"].surrogate(seen)
    assert slopes(value, seen.now["logp"]) == pytest.approx([0.75, 0.0, 0.5, 1.0]), "REINFORCE on 1 − p"


def test_it_learns_in_two_roles_of_one_model_and_resumes(tmp_path: Path) -> None:
    choices: dict[str, Any] = {
        "steps": 3,
        "threads": 1,
        "progress": Progress(),
        "settings": {"game.prompts": 4, "game.group": 2, "game.clear": 3, "run.held_out": 4},
    }
    whole = pp.train("ssp", run=tmp_path / "whole", **choices)
    noted = metrics(tmp_path / "whole")
    assert all("proposer_reward" in m and 0 < m["accepted"] <= 1 for m in noted)
    assert noted[1]["replayed"] > 0
    with pp.steps("ssp", run=tmp_path / "cut", **choices) as steps:
        next(steps)
    assert resume(tmp_path / "cut").fingerprint == whole.fingerprint
    assert metrics(tmp_path / "cut") == noted


def test_it_is_a_value_and_refuses_what_cannot_be() -> None:
    made = pp.plan("ssp")
    assert method_from_json(made.method.to_json()) == made.method
    with pytest.raises(PanoplyError, match="needs a world with 'proposals'"):
        pp.plan("ssp", "chain")
    for settings, match in (
        ({"game.temperature": 0.0}, "would be the same"),
        ({"game.tries": 2, "game.propose": 0.0}, "would be the same"),
        ({"game.left": 0.5}, "belongs to game.pays=middle"),
        ({"game.gate": "rules", "game.noise": 2}, "nobody reads"),
        ({"game.refill": False, "game.clear": 5}, "nothing is asked again"),
        ({"game.penalty": 1.0}, "penalty"),
    ):
        with pytest.raises(PanoplyError, match=match):
            pp.plan("ssp", settings=settings)
