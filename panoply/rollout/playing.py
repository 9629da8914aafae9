"""Episodes to be looked at: what a policy says in each turn, and what the world answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from panoply.errors import PanoplyError
from panoply.kinds import is_text
from panoply.policies.text import TextPolicy
from panoply.rollout.engine import Request
from panoply.rollout.engines import engine_of
from panoply.rollout.masks import of_plays
from panoply.rollout.sampling import Sampling
from panoply.seeds import stable_hash
from panoply.worlds.world import Task, TextWorld, earned

SEARCHED = 512
"""Problems of each split among which a prompt is looked for."""


@dataclass(frozen=True)
class Exchange:
    """A turn: what the policy said, and what the world let it see then (nothing after the last)."""

    said: str
    seen: str


@dataclass(frozen=True)
class Episode:
    """One problem played to its end."""

    prompt: str
    turns: tuple[Exchange, ...]
    signals: Mapping[str, float]
    """What was earned in all turns together."""
    ended: bool
    """Whether the world ended it; otherwise the model's context was full."""

    def __str__(self) -> str:
        """All that was said, with what the world showed in between set off by ⟨ ⟩."""
        return "".join(t.said + (f"⟨{t.seen}⟩" if t.seen else "") for t in self.turns)


def several_turns(world: object) -> bool:
    """Whether a world's episodes have turns of their own, tools among them."""
    return is_text(world) and type(world).play is not TextWorld.play


def problem(world: TextWorld, prompt: str | None) -> Task:
    """The problem that begins with a prompt, or the first held-out one where none is given."""
    first = world.task("test", 0)
    if prompt is None:
        return first
    wanted = tuple(world.tokenizer.encode_prompt(prompt))
    for split in ("test", "train"):
        for index in range(SEARCHED):
            if (task := world.task(split, index)).prompt == wanted:
                return task
    example = world.tokenizer.decode(list(first.prompt))
    raise PanoplyError(
        f"{world.name} plays problems of its own, and none of the first begins with {prompt!r}: "
        f"leave the prompt out, or take one such as {example!r}."
    )


def play(
    world: TextWorld, policy: TextPolicy, task: Task, n: int, temperature: float, seed: int, max_tokens: int
) -> list[Episode]:
    """`n` episodes of a problem, turn by turn."""
    engine = engine_of(policy)
    decode = world.tokenizer.decode
    complete = None if type(world).complete is TextWorld.complete else world.complete
    longest = min(max_tokens, world.max_tokens)
    plays = [world.play(task) for _ in range(n)]
    contexts = [play.prompt for play in plays]
    turns: list[list[Exchange]] = [[] for _ in plays]
    totals: list[dict[str, float]] = [{} for _ in plays]
    ended = [False] * n
    live = list(range(n))
    while live := [r for r in live if not ended[r] and len(contexts[r]) + longest <= policy.context_length]:
        sampling = Sampling(
            temperature=temperature,
            max_tokens=longest,
            stop_tokens=world.stop_tokens,
            stop_strings=world.stop,
        )
        seeds = [stable_hash("play", seed, r, len(turns[r])) for r in live]
        requests = [Request(contexts[r], [s]) for r, s in zip(live, seeds, strict=True)]
        mask = of_plays([plays[r] for r in live]) if plays[0].restricts else None
        answers = engine.generate(requests, sampling, mask=mask, complete=complete).completions()
        for r, said in zip(live, answers, strict=True):
            reply = plays[r].act(said)
            seen = tuple(reply.observation)
            turns[r].append(Exchange(decode(list(said)), "" if reply.done else decode(list(seen))))
            for name, value in reply.signals.items():
                totals[r][name] = totals[r].get(name, 0.0) + earned(value)
            ended[r] = reply.done
            contexts[r] = seen if world.markov else (*contexts[r], *said, *seen)
    prompt = decode(list(task.prompt))
    return [Episode(prompt, tuple(turns[r]), totals[r], ended[r]) for r in range(n)]
