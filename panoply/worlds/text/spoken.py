"""Environments of other libraries that speak text: `--world reasoning-gym:chain_sum`."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np

from panoply.environments import environment
from panoply.environments.crew import Broken, Crew, Episode, crew_of
from panoply.environments.environment import Library, library_of, parse
from panoply.errors import PanoplyError, unknown
from panoply.policies.talk import Talk
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.words import tokenizer_of
from panoply.registry import Entry, world
from panoply.seeds import stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.world import SPLITS, Play, Reply, Task, TextWorld

HELD_OUT = 8
"""One problem of so many is held out, where problems are told apart by their text."""
ATTEMPTS = 512
"""Problems that are drawn for one of the wanted split."""
COSTLY_SEEDS, COSTLY_HELD_OUT = 64, 16


@world("spoken@1")
@dataclass(frozen=True)
class Spoken(Episodic):
    """An environment of another library that speaks text, by its name; each is also a world of that name.

    What it shows goes through the model's chat template, and what the model says in a turn, after thinking aloud, is
    what it is told. It runs in processes of its own: an episode in which it raises, hangs, dies or gives a number that
    is not finite is cut there, which is counted and said once (docs/environments.md).
    """

    env: str = ""
    """LIBRARY:NAME,OPTION=VALUE,… such as reasoning-gym:chain_sum,max_terms=3 or textworld:rooms=2,quest=4."""
    model: str = ""
    """The folder whose tokenizer is used: the run's own."""
    cap: int | None = None
    """Turns after which an episode is cut; what suits the library where none is given."""
    seeds: int | None = None
    """How many different episodes there are to train on, 0 for no end; 64 where one takes seconds to make."""
    threshold: float = 1.0
    """Success is a score of that much in all."""
    longest: int = 256
    """Tokens of a turn at most. `sample.max_tokens` says the same where it is set."""
    longest_shown: int = 1024
    """Tokens of what is shown at once; the rest is cut off."""
    preamble: str | None = None
    """What stands before the first text; what the library needs to be said where none is given."""
    workers: int = 1
    """Processes that hold the environments; several step side by side."""
    seconds: float = 60.0
    """Time limit of one step, the making of an episode included."""
    memory: float = 8.0
    """GiB of memory each process may take; 0 sets no limit."""

    bounds: ClassVar[Mapping[str, str]] = {
        "cap": "from 1 to 100000",
        "seeds": "at least 0",
        "threshold": "any number",
        "longest": "from 1 to 10000000",
        "longest_shown": "from 1 to 10000000",
        "workers": "from 1 to 1000",
        "seconds": "above 0",
        "memory": "at least 0",
    }

    preset: ClassVar[str] = "published"
    limit: ClassVar[str] = "longest"
    own_tokens: ClassVar[bool] = True
    settings: ClassVar[Mapping[str, Any]] = {"reward.name": "score"}
    complete = TextWorld.complete
    """A turn ends with a stop token, and nothing else does."""

    # -------------------------------------------------------------- what there is

    @property
    def name(self) -> str:
        return self.env

    @property
    def asks(self) -> Mapping[str, Any]:
        return {"run.held_out": COSTLY_HELD_OUT} if self.env and self.library.costly else {}

    @property
    def library(self) -> Library:
        if not self.env:
            raise PanoplyError(
                f"The world spoken is an environment of another library: name it, as in --world "
                f"reasoning-gym:chain_sum. Known are {', '.join(environment.LIBRARIES)}."
            )
        return library_of(self.env)

    @property
    def crew(self) -> Crew:
        self.library  # noqa: B018 -- which may not be installed
        return crew_of(self.env, self.workers, self.seconds, self.memory)

    @property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"verify", "fork", *(("teacher", "reference") if self.library.expert else ())})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not self.model:
            raise PanoplyError(
                f"{self.env} is spoken with in a model's own tokens: name its folder with --model."
            )
        return tokenizer_of(self.model)

    @cached_property
    def talk(self) -> Talk:
        return Talk(self.tokenizer)

    def check(self, needs: frozenset[str]) -> None:
        """The tokenizer is there, the library too, and it knows the environment."""
        self.task("train", 0)

    @property
    def max_tokens(self) -> int:
        return self.longest

    @property
    def turn_cap(self) -> int:
        return self.cap or self.library.turns

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self.talk.stop_tokens

    def signals(self) -> frozenset[str]:
        return frozenset({"success", "score"})

    # -------------------------------------------------------------- episodes

    def task(self, split: str, index: int) -> Task:
        """Episode number `index`: the first of its seeds whose text belongs to the split, or its one seed."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        if not self.library.by_text:
            most = COSTLY_SEEDS if self.seeds is None and self.library.costly else self.seeds
            if split == "train" and most:
                index %= most
            seed = stable_hash("episode", split, index)
            return self._task(seed, stable_hash(self.env, seed))
        if split == "train" and self.seeds:
            index %= self.seeds
        for attempt in range(ATTEMPTS):
            seed = stable_hash("episode", split, index, attempt)
            id = stable_hash(self.env, self.crew.shown(seed))
            if (id % HELD_OUT == 0) == (split == "test"):
                return self._task(seed, id)
        raise PanoplyError(f"{self.env} has too few different problems to hold some of them out.")

    def _task(self, seed: int, id: int) -> Task:
        hint = self.library.hint if self.preamble is None else self.preamble
        shown = "\n\n".join(text for text in (hint, self.crew.shown(seed)) if text)
        opening = self.talk.opening([{"role": "user", "content": self.cut(shown)}])
        return Task(id, opening, 0, {"seed": seed})

    def cut(self, shown: str) -> str:
        """As much of a text as may be shown at once."""
        tokens = self.tokenizer.encode(shown)
        return (
            shown
            if len(tokens) <= self.longest_shown
            else self.tokenizer.decode(tokens[: self.longest_shown])
        )

    def play(self, task: Task) -> Play:
        return Conversation(self, task)

    def act_all(self, plays: Sequence[Play], answers: Sequence[Sequence[int]]) -> list[Reply]:
        """The processes step their environments side by side."""
        talks = cast(Sequence[Conversation], plays)
        said = [self.talk.meant(self.talk.said(answer)) for answer in answers]
        found = self.crew.step([talk.episode for talk in talks], said)
        return [talk.replied(a, one) for talk, a, one in zip(talks, answers, found, strict=True)]

    def expert(self, play: Play) -> list[int]:
        assert isinstance(play, Conversation)
        text = self.crew.expert(play.episode)
        return [] if text is None else [*self.tokenizer.encode(text), *self.stop_tokens[-1:]]

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        """There is no other teacher than the expert."""
        return self.expert(play)

    def _split(self, answer: Sequence[int]) -> Iterator[list[int]]:
        said: list[int] = []
        for token in answer:
            said.append(token)
            if token in self.stop_tokens:
                yield said
                said = []
        if said:
            yield said

    def default_model(self) -> dict[str, Any]:
        raise PanoplyError(
            f"{self.env} is spoken with in a model's own tokens: name its folder with --model."
        )

    # -------------------------------------------------------------- what goes wrong

    def failures(self) -> dict[str, int]:
        return dict(self.crew.failures)

    def listen(self, say: Callable[[str], None]) -> None:
        self.crew.say = say

    def close(self) -> None:
        self.crew.close()


class Conversation(Play):
    """An episode under way."""

    def __init__(self, world: Spoken, task: Task):
        super().__init__(task.prompt, task.id)
        self.world, self.episode = world, Episode(task.data["seed"])
        self.turn, self.score = 0, 0.0
        weakref.finalize(self, world.crew.leave, self.episode)

    def act(self, answer: Sequence[int]) -> Reply:
        return self.world.act_all([self], [answer])[0]

    def replied(self, answer: Sequence[int], found: dict[str, Any] | Broken) -> Reply:
        """What the environment's word on a turn means to the policy."""
        world = self.world
        self.turn += 1
        if isinstance(found, Broken):
            world.crew.lose(found)
            return Reply({"success": 0.0, "score": 0.0}, truncated=True)
        self.score += found["reward"]
        self.state = stable_hash(self.episode.seed, found["shown"])
        truncated = not found["done"] and self.turn >= world.turn_cap
        done = found["done"] or truncated
        success = float(done and self.score >= world.threshold - 1e-9)
        signals = {"success": success, "score": found["reward"]}
        if done:
            return Reply(signals, truncated=truncated)
        return Reply(signals, self.observed(answer, found["shown"]), done=False)

    def observed(self, answer: Sequence[int], shown: Any) -> tuple[int, ...]:
        """The tokens of what is shown after an answer."""
        messages = [{"role": "user", "content": self.world.cut(shown)}]
        return self.world.talk.reply(answer, messages)

    def fork(self) -> Play:
        """The copy is played again from its seed when it is first asked."""
        made = super().fork()
        assert isinstance(made, Conversation)
        made.episode = self.episode.copied()
        weakref.finalize(made, self.world.crew.leave, made.episode)
        return made


# ------------------------------------------------------------------ agents


@dataclass(frozen=True)
class Agent(Spoken):
    """An agent of yours, FILE.py:FUNCTION: each of its questions is a prompt, and the policy's answers are its answers.

    Turns have prompts of their own, since an agent may ask what it likes: rewrite what was said before, or ask on
    behalf of several. Where a conversation only grew, the tokens that were sampled stay as they were.
    """

    markov: ClassVar[bool] = True

    def opening(self, shown: Any, before: Asking | None = None, said: Sequence[int] = ()) -> Asking:
        """The tokens of a question; after an earlier one that it goes on from, and the answer to it."""
        messages, tools = shown["messages"], json.dumps(shown["tools"])
        talk = self.talks(tools)
        if before is not None and before.tools == tools:
            text = talk.said(said)
            old, rest = messages[: len(before.messages)], messages[len(before.messages) :]
            answered = rest and rest[0].get("role") == "assistant" and not rest[0].get("tool_calls")
            if old == before.messages and len(rest) > 1 and answered and rest[0].get("content") == text:
                return Asking((*before.tokens, *said, *talk.reply(said, rest[1:])), messages, tools)
        return Asking(talk.opening(messages), messages, tools)

    def talks(self, tools: str) -> Talk:
        held: dict[str, Talk] = self.__dict__.setdefault("_talks", {})
        if tools not in held:
            held[tools] = Talk(self.tokenizer, json.loads(tools))
        return held[tools]

    def _task(self, seed: int, id: int) -> Task:
        return Task(id, self.opening(self.crew.shown(seed)).tokens, 0, {"seed": seed})

    def play(self, task: Task) -> Play:
        return AgentEpisode(self, task)


@dataclass(frozen=True)
class Asking:
    """A question of an agent's: its tokens, and the conversation and tools that they are of."""

    tokens: tuple[int, ...]
    messages: list[dict[str, Any]]
    tools: str


class AgentEpisode(Conversation):
    """An episode of an agent's."""

    def __init__(self, world: Agent, task: Task):
        super().__init__(world, task)
        self.asking = world.opening(world.crew.shown(task.data["seed"]))

    def observed(self, answer: Sequence[int], shown: Any) -> tuple[int, ...]:
        self.asking = cast(Agent, self.world).opening(shown, self.asking, answer)
        return self.asking.tokens


# ------------------------------------------------------------------ names


def entry_for(name: str) -> Entry | None:
    """The world that an environment's name stands for, if it begins with a library's."""
    found = parse(name)
    if found is None:
        return None
    library, id, _ = found
    if library in ("own", "agent", "sqlite") and id:
        name = name.replace(id, os.path.abspath(id), 1)
    return Entry(f"{name}@1", "world", _of_name(name))


@functools.cache
def _of_name(name: str) -> type[Spoken]:
    """The world with its name filled in: a class, since a world's fields are its options."""
    library, _, _ = parse(name) or ("", "", {})
    base = Spoken if environment.LIBRARIES[library].spoken else Agent
    made = dataclasses.make_dataclass(
        base.__name__, [("env", str, dataclasses.field(default=name))], bases=(base,), frozen=True
    )
    made.__doc__, made.__module__ = f"The environment {name}.", __name__
    return made
