"""The kind `slots` of the world `guess`: a profile that must be spoken of without contradiction and repetition."""

from __future__ import annotations

import numpy as np

from panoply.worlds.text.characters import Draws
from panoply.worlds.text.riddles import ASK, Heard, Riddle, Said

PLACES, VALUES, WANTS, SAYS, KNOWN, URGES, STOP = "01234567", "abcd", "?", "F", "K", "!", "."
ASKED = 4
"""Questions of a conversation, of which one may have been asked before."""


class Slots(Riddle):
    """`dbacabdc?3>` is a profile of eight facts, and the user's first question: fact 3, which is c.

    A reply is `F3c.`, which states a fact, or `K3.`, which says that it has been told already; either may end in `!.`,
    an appeal beside. Four questions are asked, and one of them may come twice. A reply must state the profile's value
    and must not state what an earlier reply has stated. A secret is the profile and the four questions.

    ```
    dbacabdc?3>F3c.?0>F0d!.?3>K3.?7>F7c.
    ```
    """

    alphabet = PLACES + VALUES + WANTS + SAYS + KNOWN + URGES + STOP + ASK
    cap, slip, hard, longest = ASKED, 0.3, 0.8, 5

    def secret(self, draws: Draws) -> str | None:
        profile = "".join(VALUES[draws.below(len(VALUES))] for _ in PLACES)
        left, asked = list(PLACES), ""
        for i in range(ASKED):
            again = bool(i) and asked[-1:] not in asked[:-1] and draws.below(4) == 0
            asked += asked[draws.below(i)] if again else left.pop(draws.below(len(left)))
        return profile + asked if len(set(asked)) >= ASKED - 1 else None

    def prompt(self, secret: str) -> str:
        return secret[:8] + self._question(secret, 0)

    def complete(self, turn: str) -> bool:
        return turn.endswith(STOP) or len(turn) == self.longest

    def hear(self, secret: str, said: Said, turn: str) -> Heard:
        """`contradicted` and `repeated` are what the detectors find in a reply; one without a fault is `passed`."""
        number = len(said)
        wanted, told = secret[8 + number], {t[1] for t, _ in said if self.valid(t) and t[0] == SAYS}
        valid = self.valid(turn)
        states = valid and turn[0] == SAYS
        untold = valid and turn[0] == KNOWN and turn[1] not in told
        contradicted = untold or (states and turn[2] != secret[int(turn[1])])
        repeated = states and turn[1] in told
        passed = valid and turn[1] == wanted and not contradicted and not repeated
        earlier = [self.hear(secret, said[:i], t).signals["passed"] for i, (t, _) in enumerate(said)]
        last = number == ASKED - 1
        signals = {
            "success": float(last and passed and all(earlier)),
            "passed": float(passed),
            "contradicted": float(contradicted),
            "repeated": float(repeated),
            "appeal": float(passed and turn[-2] == URGES),
            "invalid": float(not valid),
        }
        return Heard("" if last else self._question(secret, number + 1), signals, done=last)

    def valid(self, turn: str) -> bool:
        body = turn[:-1].removesuffix(URGES)
        states = len(body) == 3 and body[0] == SAYS and body[2] in VALUES
        form = states or (len(body) == 2 and body[0] == KNOWN)
        return turn.endswith(STOP) and form and body[1] in PLACES

    def expert(self, secret: str, said: Said) -> str:
        wanted = secret[8 + len(said)]
        told = {turn[1] for turn, _ in said if self.valid(turn) and turn[0] == SAYS}
        return f"{KNOWN}{wanted}{STOP}" if wanted in told else f"{SAYS}{wanted}{secret[int(wanted)]}{STOP}"

    def careless(self, secret: str, said: Said, rng: np.random.Generator, slip: float) -> str:
        """States what was stated, or the value of the next fact; and appeals now and then."""
        wanted, right = secret[8 + len(said)], self.expert(secret, said)
        if rng.random() < slip:
            again = right[0] == KNOWN
            right = f"{SAYS}{wanted}{secret[int(wanted) if again else (int(wanted) + 1) % 8]}{STOP}"
        return right[:-1] + URGES + STOP if rng.random() < 0.25 else right

    def wrong(self, secret: str) -> list[list[str]]:
        """A value that is not the profile's, and a fact that was told before."""
        first = secret[8]
        other = next(value for value in VALUES if value != secret[int(first)])
        rest = [f"{SAYS}{place}{secret[int(place)]}{STOP}" for place in secret[9:]]
        return [[f"{SAYS}{first}{other}{STOP}", *rest], [f"{SAYS}{first}{secret[int(first)]}{STOP}"] * ASKED]

    def _question(self, secret: str, number: int) -> str:
        return f"{WANTS}{secret[8 + number]}{ASK}"
