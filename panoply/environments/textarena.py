"""TextArena's games. In games of two the policy has the first seat, and the other is taken by one who plays any move
that is offered; some games of words want NLTK's word lists, which are a download."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from panoply.environments.environment import NoSuch, known

MOVE = r"\[[^\[\]\n]{1,24}\]"
"""How games write the moves they offer."""


def make(id: str, options: Mapping[str, Any]) -> Seat:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    known("game of textarena", id, ENV_REGISTRY)
    try:
        return Seat(textarena.make(id, **options), id)
    except LookupError as error:
        raise NoSuch(
            f"textarena:{id} needs word lists of NLTK, which are a download: python -m nltk.downloader words "
            "averaged_perceptron_tagger_eng."
        ) from error


class Seat:
    """The seat of player 0; others move in between."""

    def __init__(self, env: Any, id: str):
        self.env, self.id = env, id
        self.dice = random.Random(0)
        self.shown = ""
        """All that was shown when the seat last moved: games show it again, with what is new after it."""

    def reset(self, seed: int) -> str:
        self.dice, self.shown = random.Random(seed), ""
        for players in (1, 2):
            try:
                self.env.reset(num_players=players, seed=seed % 2**31)
                break
            except AssertionError:
                if players == 2:
                    raise NoSuch(f"textarena:{self.id} is for more than two players.") from None
        return self._until_mine(False)[0]

    def step(self, said: str) -> tuple[str, float, bool]:
        done, _ = self.env.step(said)
        shown, done = self._until_mine(bool(done))
        if not done:
            return shown, 0.0, False
        rewards, _ = self.env.close()
        return shown, float((rewards or {}).get(0, 0.0)), True

    def expert(self) -> str | None:
        return None

    def _until_mine(self, done: bool) -> tuple[str, bool]:
        """What the first seat sees when it is to move, or nothing once the game is over."""
        while not done:
            player, shown = self.env.get_observation()
            if player == 0:
                before, self.shown = self.shown, str(shown)
                return self.shown.removeprefix(before).strip(), False
            moves = re.findall(MOVE, str(shown).rpartition("vailable")[2])
            if not moves:
                raise ValueError(
                    "its second seat is not offered any moves in brackets, so that nobody can take it"
                )
            done, _ = self.env.step(self.dice.choice(moves))
        return "", True
