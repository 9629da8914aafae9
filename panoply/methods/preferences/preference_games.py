"""A table of what the updates of published methods come to in one game of preference."""

from __future__ import annotations

from typing import Literal

import numpy as np

from panoply.errors import PanoplyError
from panoply.evaluation import preference_games as games
from panoply.registry import algorithm


def _game(kind: str, wins: tuple[tuple[float, ...], ...], seed: int) -> games.Array:
    if wins:
        if len({len(row) for row in wins}) > 1:
            raise PanoplyError(
                "A game of preference is a square matrix, and rows of wins have unequal lengths."
            )
        return games.checked(wins)
    return {"circle": games.random_circle, "random": games.random_game}[kind](seed)


@algorithm("preference-games@1", tags=("preferences",))
def preference_games(
    game: Literal["circle", "random"] = "circle",
    wins: tuple[tuple[float, ...], ...] = (),
    reference: tuple[float, ...] = (),
    tau: float = 0.05,
    queries: int = 100,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Published updates side by side in one exact game: who comes to the Nash policy, with how many preference queries.

    An update may ask so often how every answer does against a policy; those that ask twice a step take half as many
    steps. KL is from the Nash policy of the game regularised by tau; `exploited` is by how much more than half of the
    time the best answer wins, against the last policy and against the mean of all. Step sizes are those that the
    methods' exact claims take.

    game       three answers in a circle and a fourth, or preferences at random
    wins       a game of one's own: [[0.5, 0.9], [0.1, 0.5]] is how often each answer is preferred to each
    reference  the policy that is regularised to, where it is not drawn; 1 in all
    """
    matrix = _game(game, wins, seed)
    answers = len(matrix)
    anchor = np.array(reference) if reference else games.random_reference(seed, answers)
    if len(anchor) != answers or not (anchor > 0).all() or abs(anchor.sum() - 1) > 1e-6:
        raise PanoplyError(
            f"A reference has a probability above 0 for each of the {answers} answers, 1 in all."
        )
    if not 4 <= queries <= 10**5:
        raise PanoplyError(f"queries are from 4 to 100000, not {queries}.")
    nash = games.regularised_nash(matrix, anchor, tau)
    updates: dict[str, tuple[games.Update, int]] = {
        "sppo": (lambda p: games.multiplicative_weights(matrix, p, eta=0.5), 1),
        "iterative dpo": (lambda p: games.iterative_dpo(matrix, p, beta=2.0), 1),
        "online-ipo": (lambda p: games.online_ipo(matrix, anchor, p, tau=tau, rate=tau), 1),
        "ipo-md": (lambda p: games.online_ipo(matrix, anchor, p, tau=tau, rate=tau, share=0.125), 1),
        "nash-md": (lambda p: games.nash_md(matrix, anchor, p, tau=tau, eta=1.0), 1),
        "inpo": (lambda p: games.inpo(matrix, anchor, p, tau=tau, eta=2.0), 1),
        "no extrapolation": (lambda p: games.proximal(matrix, anchor, p, tau=tau, plays=1), 1),
        "nash-mp": (lambda p: games.proximal(matrix, anchor, p, tau=tau), 2),
        "nash-prox": (lambda p: games.proximal(matrix, anchor, p, tau=tau, plays=4), 4),
    }
    table = {
        "reference": _row(matrix, nash, 0.0, anchor),
        "ipo on given pairs": _row(matrix, nash, 1.0, games.offline_ipo(matrix, anchor, anchor, tau=tau)),
    }
    for name, (update, asked) in updates.items():
        found = games.course(update, anchor, queries // asked)
        row = _row(matrix, nash, float(queries // asked * asked), found.last)
        table[name] = {**row, "exploited, mean": games.exploitability(matrix, found.average)}
    return {**table, "nash": _row(matrix, nash, 0.0, nash)}


def _row(matrix: games.Array, nash: games.Array, queries: float, policy: games.Array) -> dict[str, float]:
    return {
        "queries": queries,
        "KL to Nash": games.kl(nash, policy),
        "exploited": games.exploitability(matrix, policy),
    }
