"""The world of the pictures in docs/ui.md: a search through a house, in words a person can read.

panoply train sft --world house --model fresh --steps 200 --plugin benchmarks/ui_world.py --run runs/house-start
panoply train grpo --world house --model runs/house-start --plugin benchmarks/ui_world.py
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

import panoply as pp
from panoply.policies.tokenizer import Tokenizer
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.world import Play, Reply, Task

THINGS = ("key", "ring", "map", "coin", "letter", "knife")
PLACES = ("box", "drawer", "shelf", "bag", "jar", "chest")
WORDS = ("Find", "the", "In", "open", "take", "is", "a", *THINGS, *PLACES)
LIMIT = 5


def tokenizer() -> Tokenizer:
    """A token is a word with the space before it, or a mark; a full stop ends what is said."""
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

    tokens = ["<pad>", ".", ":", ",", "\n", *WORDS, *(f" {word}" for word in WORDS)]
    core = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=""))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|[^\w]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<pad>", ".")])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "."}
    settings |= {"clean_up_tokenization_spaces": False}  # type: ignore[dict-item]
    files = {"tokenizer.json": core.to_str(), "tokenizer_config.json": json.dumps(settings)}
    return Tokenizer({name: text.encode() for name, text in files.items()})


class Search(Play):
    """`open the jar.` says what is in it; `take the ring.` ends the search, well if that was asked for and seen."""

    def __init__(self, world: House, task: Task):
        super().__init__(task.prompt, state=task.id)
        self.world, self.wanted, self.inside = world, task.data["wanted"], task.data["inside"]
        self.opened: list[str] = []

    def act(self, answer: Sequence[int]) -> Reply:
        said = self.world.tokenizer.decode(list(answer)).rstrip(".")
        done = said.startswith("take") or len(self.opened) == LIMIT - 1
        place = said.removeprefix("open the ")
        self.opened.append(place)
        looked = {
            "calls": float(place in self.inside),
            "invalid": float(not done and place not in self.inside),
        }
        if done:
            found = self.wanted in [self.inside.get(p) for p in self.opened[:-1]]
            return Reply({**looked, "success": float(said == f"take the {self.wanted}" and found)})
        seen = f" In the {place} is a {self.inside[place]}" if place in self.inside else " In the"
        self.state = stable_hash(self.state, place)
        return Reply({**looked, "success": 0.0}, tuple(self.world.tokenizer.encode(f"{seen}.\n")), done=False)

    def fork(self) -> Search:
        other = copy.copy(self)
        other.opened = list(self.opened)
        return other


@pp.world("house@1")
@dataclass(frozen=True)
class House(Episodic):
    """Find a thing in one of four places: open them one after another, and take it once it is seen."""

    slip: float = 0.6
    """How often the careless teacher opens a place at random, or takes what it has not seen."""

    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs", "fork"})
    max_tokens: ClassVar[int] = 5

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer()

    def complete(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] in self.stop_tokens

    def task(self, split: str, index: int) -> Task:
        rng = numpy_rng("house", split, index)
        while True:
            places, things = (list(rng.permutation(names)[:4]) for names in (PLACES, THINGS))
            wanted = str(rng.choice(things))
            prompt = f"Find the {wanted}: {', '.join(places)}.\n"
            id = stable_hash("house", prompt)
            if (id % 4 == 0) == (split == "test"):
                data = {
                    "wanted": wanted,
                    "inside": dict(zip(map(str, places), map(str, things), strict=True)),
                }
                return Task(id, tuple(self.tokenizer.encode(prompt)), data=data)

    def play(self, task: Task) -> Search:
        return Search(self, task)

    def say(self, text: str) -> list[int]:
        return self.tokenizer.encode(text + ".")

    def expert(self, play: Search) -> list[int]:  # type: ignore[override]
        if play.opened and play.inside.get(play.opened[-1]) == play.wanted:
            return self.say(f"take the {play.wanted}")
        return self.say(f"open the {next(p for p in play.inside if p not in play.opened)}")

    def careless(self, play: Search, rng: np.random.Generator) -> list[int]:  # type: ignore[override]
        if rng.random() >= self.slip:
            return self.expert(play)
        guess = (
            f"take the {play.wanted}" if rng.random() < 0.4 else f"open the {rng.choice(list(play.inside))}"
        )
        return self.say(guess)
