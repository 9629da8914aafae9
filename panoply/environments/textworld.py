"""TextWorld's games: made by its own compiler, a few seconds each, and kept by their seeds.

What plays them is an interpreter that was written for people: some keys, and some words, have it write and read files
by names of the player's choice. A model's commands reach it without them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panoply.environments.environment import NoSuch, known

OPTIONS = {"rooms": 1, "objects": 2, "quest": 2, "breadth": 1}
"""Rooms, objects, commands of the quest, and chains of them that it takes."""
ATTEMPTS = 20
"""Houses among which one with such a quest is looked for."""
NOTHING = "You say nothing."
READ = 9
"""Letters that the interpreter reads of a word."""
WRITING = {"script", "transcrip", "noscript", "unscript", "record", "recording", "unrecord", "save"}
OUTSIDE = WRITING | {"replay", "playback", "restore"}
"""Words of the interpreter, not of the game: they ask for a file."""
LONGEST = 200
"""Letters of a command that are read."""


def make(id: str, options: Mapping[str, Any]) -> Game:
    if id:
        raise NoSuch(f"A game of TextWorld has options and no name: textworld:rooms=2, not textworld:{id}.")
    for name, value in options.items():
        known("option of textworld", name, OPTIONS)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100:
            raise NoSuch(f"textworld's {name} is a whole number from 1 to 100, not {value}.")
    return Game({**OPTIONS, **options})


class Game:
    """A game is won with a score of 1: what is earned is the share of its points."""

    def __init__(self, options: Mapping[str, int]):
        self.options = options
        self.env: Any = None
        self.state: Any = None
        self.score = 0.0

    def reset(self, seed: int) -> str:
        import textworld

        wanted = textworld.EnvInfos(policy_commands=True, max_score=True, score=True, won=True, lost=True)
        if self.env is not None:
            self.env.close()
        self.env = textworld.start(self.file(seed), wanted)
        self.state, self.score = self.env.reset(), 0.0
        return _tidied(self.state.feedback)

    def step(self, said: str) -> tuple[str, float, bool]:
        command = _command(said)
        if not command:
            return NOTHING, 0.0, False
        self.state, _, done = self.env.step(command)
        score = self.state.score / max(1, self.state.max_score)
        earned, self.score = score - self.score, score
        return _tidied(self.state.feedback), earned, bool(done)

    def expert(self) -> str | None:
        commands = self.state.policy_commands
        return commands[0] if commands else None

    def file(self, seed: int) -> str:
        """The game of a seed, made where nobody has made it before: `$PANOPLY_CACHE`, or `~/.cache/panoply`."""
        import textworld

        root = Path(os.environ.get("PANOPLY_CACHE") or Path.home() / ".cache" / "panoply") / "textworld"
        made_of = repr((textworld.__version__, sorted(self.options.items()), seed))
        path = root / f"{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.z8"
        if not path.is_file():
            root.mkdir(parents=True, exist_ok=True)
            self._write(path, seed)
        return str(path)

    def _write(self, path: Path, seed: int) -> None:
        """Beside its place first, so that a game that is there is whole."""
        import tempfile

        from textworld.generator import compile_game

        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            asked, game = self._game(seed)
            asked.path = str(Path(folder) / path.name)
            compile_game(game, asked)
            for suffix in (".ni", ".json", ".z8"):
                if (made := Path(asked.path).with_suffix(suffix)).is_file():
                    os.replace(made, path.with_suffix(suffix))

    def _game(self, seed: int) -> tuple[Any, Any]:
        """Options and a game; where a house has no such quest, the next seed's house is taken."""
        from textworld import GameOptions
        from textworld.generator import QuestGenerationError, make_game

        for attempt in range(ATTEMPTS):
            asked = GameOptions()
            asked.nb_rooms, asked.nb_objects = self.options["rooms"], self.options["objects"]
            asked.quest_length, asked.quest_breadth = self.options["quest"], self.options["breadth"]
            asked.seeds, asked.force_recompile = (seed + attempt) % 2**31, True
            try:
                return asked, make_game(asked)
            except QuestGenerationError:
                continue
        wanted = ",".join(f"{name}={value}" for name, value in self.options.items())
        raise NoSuch(
            f"TextWorld found no quest in {ATTEMPTS} houses with {wanted}: ask for less, or for more objects."
        )


def _command(said: str) -> str:
    """The last line of what was said, as words of the game: a backslash or a control character would press a key of the
    interpreter's, or keep it waiting for ever."""
    lines = (re.sub("[^A-Za-z0-9.,;:!?'\"-]+", " ", line).strip() for line in said.splitlines())
    command = [line for line in lines if line][-1:]
    words = re.split("([^A-Za-z]+)", command[0][:LONGEST]) if command else []
    return " ".join("".join(word for word in words if word.lower()[:READ] not in OUTSIDE).split())


def _tidied(feedback: str) -> str:
    """Without the picture of the title, empty lines, and the line of the state at the end."""
    lines = (line.strip() for line in feedback.splitlines())
    return "\n".join(line for line in lines if re.search("[a-z]", line) and not line.startswith(">"))
