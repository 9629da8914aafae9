"""A knowledge graph that is searched by a tool: questions of several hops are answered, and asked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.text.characters import CharacterWorld, Draws
from panoply.worlds.world import Lesson, Play, Proposal, Reply, Task

ENTITIES, RELATIONS = "abcdefghijkl", "wxyz"
SOLVER, PROPOSER, READER = "S", "P", "R"
FORWARD, BACK, ANSWER, ASK = "C", "B", "A", "Q"
LENGTHS = {FORWARD: 3, BACK: 3, ANSWER: 2, ASK: 5}
"""Tokens of a turn by its first."""
NONE, TURN = "_", ">"
MOST = 3
"""The most relations of a question, and the documents that a prompt shows."""
SHARED = 256
"""So many tasks after one another are about the same graph."""


@world("graph@1")
@dataclass(frozen=True)
class Graph(Episodic, CharacterWorld):
    """`Saxw_bwcaxb___>` — a solver is asked for the w of the x of a, and has found that a's x is b and b's w is c.

    ```
    S axw_ ___ ___ ___ >  Cax        which x has a?      the document axb
    S axw_ axb ___ ___ >  Cbw        which w has b?      the document bwc
    S axw_ bwc axb ___ >  Ac         the answer; it ends the episode, and is right

    P c___ ___ ___ ___ >  Bcw        a proposer, who was given the answer c: whose w is c?  bwc
    P c___ bwc ___ ___ >  Bbx        and whose x is b?   axb
    P c___ axb bwc ___ >  Qaxw_      the question; it ends the episode, and its answer is c
    ```

    There are 12 entities and 4 relations, each of which leads from every entity to another one and to every one from
    another, so that a search always finds a document, the newest of which stands first in a prompt. The graph is seen
    through searches alone, and changes every 256 tasks. A question has up to three relations. Nothing keeps a proposer
    from asking what has another answer, or what is no question (`Qab__`): its `success` is that the question has the
    given answer.

    A reader (`R`) is a solver who searches some documents and not the graph. Searching always finds one: that which
    was asked for, or, where there is none, any of them by lot, so that among few documents nonsense may lead to the
    answer, too. What is held out has other graphs, and more hops (`unseen`) than what is given to train on (`hops`).

    `calls` counts searches; `invalid` is a turn that neither finds nor says anything. The careless solver answers too
    soon, with the entity in hand (`slip`); the careless proposer asks with as many hops as it pleases, and with
    probability `misquote` puts something else for one part of its question. A reader slips never.
    """

    hops: tuple[int, int] = (1, 1)
    """Fewest and most relations of questions to train on."""
    unseen: tuple[int, int] = (2, 3)
    """Those of held-out questions."""
    cap: int = 6
    """Turns in an episode."""
    slip: float = 0.6
    """How often the careless solver answers too soon: with what it has found; half as often before it has searched."""
    misquote: float = 0.5

    bounds: ClassVar[Mapping[str, str]] = {
        "hops": f"from 1 to {MOST}",
        "unseen": f"from 1 to {MOST}",
        "cap": f"from {MOST + 1} to 1000",
        "slip": "from 0 to 1",
        "misquote": "from 0 to 1",
    }
    alphabet: ClassVar[str] = (
        ENTITIES + RELATIONS + SOLVER + PROPOSER + READER + "".join(LENGTHS) + NONE + TURN
    )
    access: ClassVar[frozenset[str]] = frozenset(
        {"verify", "reference", "teacher", "pairs", "tools", "fork", "proposals"}
    )
    markov: ClassVar[bool] = True
    imitation: ClassVar[Mapping[str, int]] = {"data.batch": 32, "run.steps": 800}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hops", "unseen"):
            fewest, most = getattr(self, name)
            if fewest > most:
                raise PanoplyError(f"graph.{name} is a range, fewest first, not {fewest} to {most}.")

    @property
    def max_tokens(self) -> int:
        return max(LENGTHS.values())

    @property
    def turn_cap(self) -> int:
        return self.cap

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def complete(self, answer: Sequence[int]) -> bool:
        return len(answer) >= LENGTHS.get(self.text(answer[:1]), 1)

    # -------------------------------------------------------------- tasks

    def task(self, split: str, index: int) -> Task:
        hops, base = self.hops if split == "train" else self.unseen, f"{split}/{index // SHARED}"
        return self._first(split, index, lambda draws: self._drawn(draws.below, base, hops))

    def _drawn(self, below: Callable[[int], int], base: str, hops: tuple[int, int]) -> Task | None:
        """A question whose way comes to no entity twice."""
        path = "".join(
            RELATIONS[below(len(RELATIONS))] for _ in range(hops[0] + below(hops[1] - hops[0] + 1))
        )
        question = ENTITIES[below(len(ENTITIES))] + path
        way = walk(base, question)
        return self._asked(base, question, way[-1]) if len(set(way)) == len(way) else None

    def _asked(self, base: str, question: str, answer: str, role: str = SOLVER, **more: Any) -> Task:
        data = {
            "base": base,
            "question": question.ljust(1 + MOST, NONE),
            "answer": answer,
            "role": role,
            **more,
        }
        id = stable_hash("graph", base, question, answer, role)
        return Task(id, self.prompt(data, []), len(question) - 1, data)

    def prompt(self, data: Mapping[str, Any], found: Sequence[str]) -> tuple[int, ...]:
        """What is seen: the role, the question or the answer, and the last documents, the newest first."""
        shown = "".join(reversed(found[-MOST:])).ljust(3 * MOST, NONE)
        return tuple(self.tokens(f"{data['role']}{data['question']}{shown}{TURN}"))

    def play(self, task: Task) -> Search:
        return Search(self, task)

    # -------------------------------------------------------------- proposals

    def proposal(self, task: Task) -> Task:
        """The answer alone, to ask a question about."""
        return self._asked(task.data["base"], task.data["answer"], task.data["answer"], PROPOSER)

    def proposed(self, task: Task, said: Sequence[int]) -> Proposal:
        play = Search(self, task)
        for turn in self._split(said):
            play.act(turn)
        answer, asked = task.data["answer"], play.asked
        question = self._asked(task.data["base"], asked, answer) if asked else None
        return Proposal(question, tuple(play.found), tuple(play.searches), tells=answer in asked)

    def reading(self, question: Task, documents: Sequence[str]) -> Task:
        data = question.data
        asked = data["question"].rstrip(NONE)
        return self._asked(data["base"], asked, data["answer"], READER, documents=list(documents))

    # -------------------------------------------------------------- experts and teachers

    def expert(self, play: Play) -> list[int]:
        assert isinstance(play, Search)
        if play.role == PROPOSER:
            n = len(play.found)
            return self.tokens(
                self._back(play, stable_hash(play.task.id, n)) if n < MOST else quoted(play.found, n)
            )
        done = play.done_of(self.path(play))
        return self.tokens(ANSWER + play.hand if done == len(self.path(play)) else self._next(play, done))

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        assert isinstance(play, Search)
        n = len(play.found)
        if play.role == PROPOSER and (n < 2 or (n < MOST and rng.random() < 0.5)):
            return self.tokens(self._back(play, int(rng.integers(len(RELATIONS)))))
        if play.role == PROPOSER:
            asked = quoted(play.found, 1 + int(rng.integers(n)))
            return self.tokens(misquoted(asked, rng) if rng.random() < self.misquote else asked)
        if play.role == SOLVER and rng.random() < self.slip / (1 if n else 2):
            return self.tokens(ANSWER + play.hand)
        return self.expert(play)

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        """Of all three roles, and with questions of any length: a model has to know what each of them does."""
        base = task.data["base"]
        questions = (self._drawn(lambda n: int(rng.integers(n)), base, (1, MOST)) for _ in range(1000))
        asked = next(question for question in questions if question is not None)
        some = [document(base, rng.choice(list(ENTITIES)), rng.choice(list(RELATIONS))) for _ in range(9)]
        found = way_of(base, asked.data["question"])
        read = self.reading(asked, [*some, *found[rng.integers(3) // 2 :]])
        roles = (asked, read, self.proposal(task))
        return [lesson for each in roles for lesson in super(Graph, self).lessons(each, rng)]

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also: another answer, and answering after one search too few."""
        gold, (one, two) = self.gold(task), self.tokens("ab")
        early = [*gold[: 3 * task.level - 3], self.tokens(ANSWER)[0], gold[-1 - LENGTHS[ANSWER] - 1]]
        return [*super().mistakes(task), [*gold[:-1], two if gold[-1] == one else one], early]

    def path(self, play: Search) -> str:
        return str(play.task.data["question"][1:].rstrip(NONE))

    def _next(self, play: Search, done: int) -> str:
        """The search that leads on after so many hops."""
        entity = play.found[-1][-1] if done else play.task.data["question"][0]
        return FORWARD + entity + self.path(play)[done]

    def _back(self, play: Search, first: int) -> str:
        """A search for what leads to where a proposer stands, from an entity that it has not come to yet."""
        stands = play.found[-1][0] if play.found else play.task.data["answer"]
        met = {play.task.data["answer"], *(found[0] for found in play.found)}
        order = [RELATIONS[(first + i) % len(RELATIONS)] for i in range(len(RELATIONS))]
        new = (r for r in order if before(play.task.data["base"], stands, r) not in met)
        return BACK + stands + next(new, order[0])


class Search(Play):
    """An episode of any role. Its state is the task and what the policy sees of it."""

    def __init__(self, world: Graph, task: Task):
        self.world, self.task, self.turn = world, task, 0
        self.role: str = task.data["role"]
        self.found: list[str] = []
        """Documents, in the order in which they were found."""
        self.searches: list[str] = []
        self.asked = ""
        """The question of a proposer, where it is one."""
        super().__init__(task.prompt, stable_hash(task.id, *task.prompt))

    @property
    def hand(self) -> str:
        """The entity found last, or at first the one that is asked about."""
        return self.found[-1][-1] if self.found else str(self.task.data["question"][0])

    def done_of(self, path: str) -> int:
        """How many hops of the way the last documents are; a reader goes on from any document."""
        if self.role == READER:
            return min(len(self.found), len(path))
        question = self.task.data["question"][0] + path
        way = way_of(self.task.data["base"], question)
        return next((n for n in range(len(path), 0, -1) if self.found[-n:] == way[:n]), 0)

    def act(self, answer: Sequence[int]) -> Reply:
        said = self.world.text(answer)
        verb, rest = said[:1], said[1:]
        self.turn += 1
        found = self._search(verb, rest)
        answered = verb == ANSWER and len(rest) == 1 and rest in ENTITIES and self.role != PROPOSER
        asked = verb == ASK and len(rest) == 1 + MOST and self.role == PROPOSER
        if asked and is_question(rest):
            self.asked = rest.rstrip(NONE)
        right = self.task.data["answer"]
        true = bool(self.asked) and walk(self.task.data["base"], self.asked)[-1] == right
        late = not answered and not asked and self.turn >= self.world.cap
        signals = {
            "success": float((answered and rest == right) or true),
            "calls": float(verb in (FORWARD, BACK)),
            "invalid": float(not (found or answered or self.asked)),
        }
        prompt = self.world.prompt(self.task.data, self.found)
        self.state = stable_hash(self.task.id, *prompt)
        return Reply(signals, prompt, done=answered or asked or late, truncated=late)

    def fork(self) -> Search:
        other = copy.copy(self)
        other.found, other.searches = list(self.found), list(self.searches)
        return other

    def _search(self, verb: str, asked: str) -> str:
        """The document that a search finds, which is remembered; nothing where it is no search."""
        if (
            verb not in (FORWARD, BACK)
            or len(asked) != 2
            or asked[0] not in ENTITIES
            or asked[1] not in RELATIONS
        ):
            return ""
        base, entity, relation = self.task.data["base"], asked[0], asked[1]
        if self.role == READER:
            found = self._among(self.task.data["documents"], verb, entity, relation)
        else:
            subject = entity if verb == FORWARD else before(base, entity, relation)
            found = document(base, subject, relation)
        if found:
            self.found.append(found)
            self.searches.append(verb + asked)
        return found

    def _among(self, documents: Sequence[str], verb: str, entity: str, relation: str) -> str:
        """That which was asked for, or any of them by lot."""
        place = 0 if verb == FORWARD else 2
        fits = [text for text in documents if text[place] == entity and text[1] == relation] or list(
            documents
        )
        lot = Draws(f"{self.task.id}/{self.turn}/{verb}{entity}{relation}/{'/'.join(documents)}")
        return fits[lot.below(len(fits))] if fits else ""


# ------------------------------------------------------------------ the graph


@lru_cache(maxsize=1 << 12)
def circle(base: str, relation: str) -> str:
    """All entities in the order in which a relation leads from each to the next, and from the last to the first."""
    return "".join(sorted(ENTITIES, key=lambda entity: stable_hash("graph", base, relation, entity)))


def after(base: str, entity: str, relation: str) -> str:
    order = circle(base, relation)
    return order[(order.index(entity) + 1) % len(order)]


def before(base: str, entity: str, relation: str) -> str:
    order = circle(base, relation)
    return order[order.index(entity) - 1]


def document(base: str, entity: str, relation: str) -> str:
    return entity + relation + after(base, entity, relation)


def walk(base: str, question: str) -> str:
    """The entities that a question leads through, from that which it names to its answer."""
    way = question[0]
    for relation in question[1:].rstrip(NONE):
        way += after(base, way[-1], relation)
    return way


def way_of(base: str, question: str) -> list[str]:
    """The documents that answer a question, one after another."""
    way = walk(base, question)
    return [way[i] + relation + way[i + 1] for i, relation in enumerate(question[1:].rstrip(NONE))]


# ------------------------------------------------------------------ questions


def is_question(text: str) -> bool:
    """An entity, then relations, then nothing."""
    path = text[1:].rstrip(NONE)
    return text[0] in ENTITIES and bool(path) and set(path) <= set(RELATIONS)


def quoted(found: Sequence[str], hops: int) -> str:
    """The question that the last of so many documents leads to, when each was found from the one before it."""
    chain = list(reversed(found[:hops]))
    return ASK + (chain[0][0] + "".join(each[1] for each in chain)).ljust(1 + MOST, NONE)


def misquoted(asked: str, rng: np.random.Generator) -> str:
    """The same with something else for its entity, or for one of its relations."""
    place = 1 + int(rng.integers(len(asked.rstrip(NONE)) - 1))
    others = [sign for sign in (ENTITIES if place == 1 else RELATIONS) if sign != asked[place]]
    return asked[:place] + str(rng.choice(others)) + asked[place + 1 :]
