"""Several worlds in one: their problems in turn, one alphabet for all."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from panoply import registry
from panoply.errors import PanoplyError, unknown
from panoply.policies.tokenizer import Tokenizer
from panoply.registry import world
from panoply.values import parse
from panoply.worlds.text.characters import END
from panoply.worlds.world import SPLITS, Signals, Task, TextWorld


@world("mixed@1")
@dataclass(frozen=True)
class Mixed(TextWorld):
    """The problems of several worlds, one of each in turn: `3+4*2=`, then `37=`, then the next chain.

    A problem looks, is taught and is graded as in its own world; nothing tells the policy which world that is, but
    the problem itself. Held-out success is reported for each part as well. The parts must be worlds of one turn whose
    tokens are single characters, and whose answers end with `$`.
    """

    keys: ClassVar[frozenset[str]] = frozenset({"domain"})
    parts: tuple[str, ...] = ("chain", "manyanswers")
    """Worlds by name. One named twice comes twice as often; options follow a colon: `chain:operations=4:slip=0.5`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for text, part in zip(self.parts, self.worlds, strict=True):
            if part.stop:
                raise PanoplyError(
                    f"mixed.parts: the stop of {text} would have no effect, since turns end in all parts alike: say it "
                    "of mixed (world.stop, or sample.stop)."
                )
            tokens = [part.tokenizer.token(i) for i in range(part.tokenizer.vocab_size)]
            turns = type(part).play is not TextWorld.play or type(part).complete is not TextWorld.complete
            if turns or any(len(token) > 1 for token in tokens) or END not in tokens:
                raise PanoplyError(
                    f"mixed cannot hold {part.name}: its answers are not one text that ends with {END}."
                )

    def walls(self) -> str:
        return ", ".join(dict.fromkeys(said for part in self.worlds if (said := part.walls())))

    @cached_property
    def worlds(self) -> list[TextWorld]:
        if not self.parts:
            raise PanoplyError("mixed.parts names no world.")
        return [_open(name) for name in self.parts]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        found = dict.fromkeys(c for codec in self._codecs for c in codec.characters if c != END)
        return Tokenizer.of_characters("".join(found), specials=(END,))

    @property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        """What all parts give."""
        return frozenset.intersection(*(part.access for part in self.worlds)) - {
            "prefer",
            "preference",
            "judge",
            "knowledge",
            "plan",
        }

    @property
    def max_tokens(self) -> int:
        return max(part.max_tokens for part in self.worlds)

    def task(self, split: str, index: int) -> Task:
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        at, part = divmod(index, len(self.worlds))
        return self._ours(part, self.worlds[part].task(split, at))

    def held_out(self, n: int) -> list[Task]:
        """As many of each part, in turn."""
        each = -(-n // len(self.worlds))
        found = [part.held_out(each) for part in self.worlds]
        return [self._ours(i % len(found), found[i % len(found)][i // len(found)]) for i in range(n)]

    def part_of(self, task: Task) -> str:
        """The part a problem is of, under its name in `parts`."""
        return self.parts[int(task.data["part"])]

    def grade(self, task: Task, answer: Sequence[int]) -> Signals:
        """The signals that all parts give, `success` among them."""
        part, given, codec = self._theirs(task)
        signals = part.grade(given, codec.inner(answer))
        return {name: value for name, value in signals.items() if name in self._common}

    def allowed(self, task: Task, said: Sequence[int]) -> Sequence[int] | None:
        part, given, codec = self._theirs(task)
        follow = part.allowed(given, codec.inner(said))
        return None if follow is None else codec.outer(follow)

    @property
    def restricts(self) -> bool:
        return any(part.restricts for part in self.worlds)

    def gold(self, task: Task) -> list[int]:
        part, given, codec = self._theirs(task)
        return codec.outer(part.gold(given))

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        part, given, codec = self._theirs(task)
        return codec.outer(part.demonstrate(given, rng))

    def mistakes(self, task: Task) -> list[list[int]]:
        part, given, codec = self._theirs(task)
        return [codec.outer(answer) for answer in part.mistakes(given)]

    def hint(self, task: Task, fraction: float) -> Task:
        part, given, _ = self._theirs(task)
        return self._ours(task.data["part"], part.hint(given, fraction))

    def default_model(self) -> dict[str, Any]:
        """The widest of the parts' decoders."""
        widest = max((part.default_model() for part in self.worlds), key=lambda model: int(model["width"]))
        return widest | {"vocab_size": self.tokenizer.vocab_size}

    def _ours(self, part: int, task: Task) -> Task:
        codec = self._codecs[part]
        data = {"part": part, "task": task, "given": tuple(codec.outer(task.given))}
        return Task(task.id, tuple(codec.outer(task.prompt)), task.level, data)

    def _theirs(self, task: Task) -> tuple[TextWorld, Task, _Codec]:
        part = task.data["part"]
        return self.worlds[part], task.data["task"], self._codecs[part]

    @cached_property
    def _common(self) -> frozenset[str]:
        given = (part.signals() or frozenset({"success"}) for part in self.worlds)
        return frozenset.intersection(*given)

    @cached_property
    def _codecs(self) -> list[_Codec]:
        return [_Codec(self, part.tokenizer) for part in self.worlds]


class _Codec:
    """A part's tokens as the mixture's, character by character, and back."""

    def __init__(self, mixed: Mixed, own: Tokenizer):
        self.mixed = mixed
        self.characters = [own.token(i) for i in range(own.vocab_size)]

    @cached_property
    def _outer(self) -> list[int]:
        return [self.mixed.tokenizer.id(character) for character in self.characters]

    @cached_property
    def _inner(self) -> dict[int, int]:
        return {outer: inner for inner, outer in enumerate(self._outer)}

    def outer(self, tokens: Sequence[int]) -> list[int]:
        return [self._outer[token] for token in tokens]

    def inner(self, tokens: Sequence[int]) -> list[int]:
        """A character that the part has not becomes an id past its vocabulary, which no verifier takes for another."""
        return [self._inner.get(token, len(self.characters)) for token in tokens]


def _open(text: str) -> TextWorld:
    """`chain:operations=4` → that world."""
    name, *options = text.split(":")
    entry = registry.find("world", name)
    hints = typing.get_type_hints(entry.build)
    known = {f.name for f in dataclasses.fields(entry.build)}  # type: ignore[arg-type]
    settings = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in known or not equals:
            raise unknown(f"setting of world {entry.name}", key, known)
        settings[key] = parse(f"world.{key}", value, hints[key])
    built: TextWorld = entry.build(**settings)
    return built
