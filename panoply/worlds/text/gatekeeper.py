"""The kind `gatekeeper` of the world `guess`: who is asked the right things in the right order lets one pass."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from panoply.seeds import stable_hash
from panoply.worlds.text.characters import Draws
from panoply.worlds.text.riddles import ASK, Heard, Riddle, Said

TOPICS, MOODS, THINK, SPEAK, STOP = "abcdefgh", "012345", "T", "Q", "."
GOES_ON, REFUSES, PUZZLED, OPENS = "+", "-", "?", "!"
ORDERS = list(permutations(range(3)))
"""In which order each mood wants the three topics of a prompt."""
NOISE, GARBLED = 0.1, 0.1
"""How often the gatekeeper does not listen to the right question, and how often the teacher writes a tag wrongly."""


class Gatekeeper(Riddle):
    """`fbd3>` names three topics and a mood, which says in which order they must be raised: 3 is second, third, first.

    A turn is five tokens, `TxQy.`: a thought x, which is nobody's business, and a question y. The gatekeeper says `+`
    to the right question, `-` to another one, `?` to a turn whose tags are not where they belong, and to the third
    right question `!`, which is success. Four turns are enough for one question in vain; and one time in ten the right
    question is not listened to. Whether that happens is settled by the task and all that was said.

    ```
    fbd3>TbQb.+TdQd.-TdQd.+TfQf.!
    ```
    """

    alphabet = TOPICS + MOODS + THINK + SPEAK + STOP + GOES_ON + REFUSES + PUZZLED + OPENS + ASK
    cap, slip, longest = 4, 0.6, 5
    format = THINK + SPEAK + STOP

    def secret(self, draws: Draws) -> str | None:
        left, shown = list(TOPICS), ""
        for _ in range(3):
            shown += left.pop(draws.below(len(left)))
        return shown + MOODS[draws.below(len(MOODS))]

    def prompt(self, secret: str) -> str:
        return secret + ASK

    def complete(self, turn: str) -> bool:
        return len(turn) == self.longest

    def hear(self, secret: str, said: Said, turn: str) -> Heard:
        """`malformed` and `astray` count turns without their tags, and questions about none of the three topics."""
        well = len(turn) == 5 and turn[0] + turn[2] + turn[4] == self.format
        well = well and turn[1] in TOPICS and turn[3] in TOPICS
        wanted = self.order(secret)
        step = self.progress(said)
        right = well and turn[3] == wanted[step] and self._listens(secret, said)
        opens = right and step == 2
        signals = {
            "success": float(opens),
            "malformed": float(not well),
            "astray": float(well and turn[3] not in wanted),
        }
        return Heard((OPENS if opens else GOES_ON) if right else REFUSES if well else PUZZLED, signals, opens)

    def order(self, secret: str) -> str:
        return "".join(secret[i] for i in ORDERS[int(secret[3])])

    def progress(self, said: Said) -> int:
        return sum(reply == GOES_ON for _, reply in said)

    def expert(self, secret: str, said: Said) -> str:
        return self._turn(self.order(secret)[self.progress(said)])

    def careless(self, secret: str, said: Said, rng: np.random.Generator, slip: float) -> str:
        """Raises topics as they stand in the prompt, whatever the mood; and now and then confuses two tags."""
        slips, garbles = (rng.random(2) < (slip, GARBLED)).tolist()
        step = self.progress(said)
        turn = self._turn(secret[step]) if slips else self.expert(secret, said)
        return turn.translate(str.maketrans("TQ", "QT")) if garbles else turn

    def wrong(self, secret: str) -> list[list[str]]:
        """The right questions backwards, and without their tags."""
        turns = [self._turn(topic) for topic in self.order(secret)]
        return [turns[::-1], [turn.replace(THINK, SPEAK) for turn in turns]]

    def _turn(self, topic: str) -> str:
        return f"{THINK}{topic}{SPEAK}{topic}{STOP}"

    def _listens(self, secret: str, said: Said) -> bool:
        """Always where a question in vain would leave too few turns."""
        spare = self.cap - len(said) > 3 - self.progress(said)
        return not spare or stable_hash("noise", secret, said) % 1000 >= NOISE * 1000
