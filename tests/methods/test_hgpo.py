"""HGPO: nested groups by hand, against a slow dictionary and the released code's equations, and the exact corridor."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from kit import hand

import panoply as pp
from panoply import registry
from panoply.effects import inert
from panoply.evidence.claims import Ahead
from panoply.experience import Experience
from panoply.methods.agents.hgpo import PLACES, corridor, histories, less_error, nested, worth
from panoply.slots.credit.anchors import episode_and_anchor


def walks(*episodes: str, rewards: list[list[float]], groups: list[int] | None = None) -> Experience:
    """Episodes written as states, a letter a turn, with what each turn earned."""
    flat = [(e, t, s) for e, path in enumerate(episodes) for t, s in enumerate(path)]
    of = groups or [0] * len(episodes)
    return hand(
        episode=[e for e, _, _ in flat],
        group=[of[e] for e, _, _ in flat],
        turn=[t for _, t, _ in flat],
        state=[ord(s) for _, _, s in flat],
        reward=[float(rewards[e][t]) for e, t, _ in flat],
    )


PLAIN: dict[str, Any] = {"scale": "none", "gamma": 1.0}


def test_numbers_by_hand() -> None:
    """Returns of the last turns in b: 4, 2, 0. By state the mean is 2; after a it is 3, and after c one is alone."""
    rows = walks("ab", "ab", "cb", rewards=[[0, 4], [0, 2], [0, 0]])
    found = histories(history=1, alpha=1.0, **PLAIN)(rows).view(3, 2)
    assert found[:, 1].tolist() == pytest.approx([(1 * 2 + 2 * 1) / 3, (1 * 0 + 2 * -1) / 3, -2.0])
    assert found[:, 0].tolist() == pytest.approx([1.0, -1.0, 0.0]), (
        "a first turn has one group, nobody else is in c"
    )
    even = histories(history=1, alpha=0.0, **PLAIN)(rows).view(3, 2)
    assert even[:, 1].tolist() == pytest.approx([1.5, -0.5, -2.0])


def test_early_turns_are_not_padded() -> None:
    """Both episodes begin in a; the first comes back to it. Only the second visit has a history."""
    rows = walks("aba", "ab", rewards=[[0, 0, 6], [0, 0]])
    (_, _), (peers, there) = nested(rows, 1)
    assert there.tolist() == [False, True, True, False, True]
    assert peers.rows(peers.count).tolist() == [1, 2, 1, 1, 2], "b after a twice, a after b once"


def test_groups_are_nested_and_of_one_task() -> None:
    rows = walks("aab", "aab", "aab", rewards=[[1, 0, 0], [0, 0, 0], [0, 5, 0]], groups=[0, 0, 1])
    sizes = [peers.rows(peers.count) for peers, _ in nested(rows, 2)]
    assert all(bool((a >= b).all()) for a, b in itertools.pairwise(sizes))
    alone = histories(history=2, **PLAIN)(rows)[8]
    assert float(alone) == 0.0, "the last turn of the only episode of its task"


def random_walks(seed: int, n: int = 12, integers: bool = False) -> Experience:
    rng = np.random.default_rng(seed)
    paths = ["".join(rng.choice(list("abc"), size=rng.integers(1, 7))) for _ in range(n)]
    draw = rng.integers(0, 2, size=(n, 7)) if integers else rng.normal(size=(n, 7))
    return walks(*paths, rewards=draw.astype(float).tolist(), groups=[i // 6 for i in range(n)])


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("seed", [0, 1])
def test_parity_with_the_released_code(seed: int, scale: str, base: bool) -> None:
    """A dictionary of tuples, weights (k + 2)^α, exact zeros left out, the population's deviation; written anew from
    what recipe/hgpo/core_hgpo.py computes."""
    rows = random_walks(seed, integers=True)
    alpha, gamma, eps = 1.5, 0.95, 1e-6
    paths: dict[int, list[int]] = defaultdict(list)
    for i, e in enumerate(rows["episode"].tolist()):
        paths[e].append(i)
    reward, state, group = (rows[name].tolist() for name in ("reward", "state", "group"))
    returns = [0.0] * len(rows)
    for turns in paths.values():
        running = 0.0
        for i in reversed(turns):
            running = reward[i] + gamma * running
            returns[i] = running
    clusters: dict[Any, list[int]] = defaultdict(list)
    for turns in paths.values():
        for at, i in enumerate(turns):
            for length in range(1, min(3, at + 1) + 1):
                key = (group[i], length, tuple(state[j] for j in turns[at - length + 1 : at + 1]))
                clusters[key].append(i)
    items: dict[int, list[tuple[int, float]]] = defaultdict(list)
    if base:
        whole = [sum(reward[j] for j in paths[e]) for e in rows["episode"].tolist()]
        for g in set(group):
            here = [i for i in range(len(rows)) if group[i] == g]
            scores = torch.tensor([whole[i] for i in here], dtype=torch.float64)
            off = scores - scores.mean()
            for i, a in zip(
                here, (off / (scores.std() + eps) if scale == "std" else off).tolist(), strict=True
            ):
                items[i].append((0, a))
    for (_, length, _), members in clusters.items():
        if len(members) > 1:
            r = np.array([returns[i] for i in members])
            a = r - r.mean()
            for i, x in zip(members, a / (r.std() + eps) if scale == "std" else a, strict=True):
                items[i].append((length, float(x)))
    want = []
    for i in range(len(rows)):
        kept = [((length + 1) ** alpha, a) for length, a in items[i] if abs(a) > 1e-12]
        mass = sum(w for w, _ in kept)
        want.append(sum(w * a for w, a in kept) / mass if kept else 0.0)
    found = histories(
        history=2, alpha=alpha, gamma=gamma, scale=scale, weights="released", ties="dropped", base=base
    )(rows.with_columns(reward=rows["reward"].double()))
    assert found.tolist() == pytest.approx(want, abs=1e-6)


def test_without_history_it_is_gigpos_credit_for_steps() -> None:
    rows = random_walks(3)
    both, whole = (episode_and_anchor(omega=omega, scale="none")(rows) for omega in (1.0, 0.0))
    assert histories(history=0, scale="none")(rows).tolist() == pytest.approx(
        (both - whole).tolist(), abs=1e-6
    )


def test_order_of_rows_does_not_matter_and_a_turn_is_one_vote() -> None:
    rows = random_walks(4)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    assert histories()(rows.take(order)).tolist() == pytest.approx(
        histories()(rows)[order].tolist(), abs=1e-6
    )


def test_ties_count_unless_they_are_dropped() -> None:
    """After a all returns are 1, a tie; by state the mean is 2/3. Dropped, the tie leaves all weight to the rest."""
    rows = walks("ab", "ab", "cb", rewards=[[0, 1], [0, 1], [0, 0]])
    kept, dropped = (histories(history=1, ties=ties, **PLAIN)(rows)[1] for ties in ("kept", "dropped"))
    assert float(kept) == pytest.approx(1 / 3 / 3)
    assert float(dropped) == pytest.approx(1 / 3)


# ------------------------------------------------------------------ the corridor


def test_exact_values_are_those_of_all_courses() -> None:
    """Q by counting every course of actions: all are equally likely."""
    gamma, q = 0.9, worth(0.9)
    for t, before, here, action in itertools.product(range(PLACES), range(2), range(2), range(2)):
        worths = []
        for rest in itertools.product(range(2), repeat=PLACES - t - 1):
            seen, total = [before, here], 0.0
            for j, a in enumerate((action, *rest)):
                total += gamma**j * float(t + j > 0 and a == seen[-2])
                seen.append(a)
            worths.append(total)
        assert float(q[t, before, here, action]) == pytest.approx(np.mean(worths), abs=1e-12)


def test_the_corridor_pays_what_was_seen_one_place_before() -> None:
    rows, q = corridor(1001)
    assert len(rows) == len(q)
    first = rows["turn"] == 0
    assert rows["reward"][first].mean() == pytest.approx(0.0, abs=0.05)
    paid = rows["reward"].view(-1, PLACES)[:, 2]
    agrees = rows["action"].view(-1, PLACES)[:, 2] == rows["action"].view(-1, PLACES)[:, 0]
    assert paid[agrees].mean() - paid[~agrees].mean() == pytest.approx(1.0, abs=0.1)


def test_the_claim_measures_both_sides() -> None:
    found = less_error(1001)
    claim = registry.find("protocol", "hgpo-corridor").claim
    assert isinstance(claim, Ahead)
    assert claim.measure is less_error
    assert found["ahead"] == found["state alone"] - found["nested"]
    assert found["no credit by the whole history alone"] > 0.1


# ------------------------------------------------------------------ the method


def test_settings_without_effect() -> None:
    named = {path for path, _ in inert(pp.plan("hgpo", settings={"credit.history": 0}))}
    assert {"credit.alpha", "credit.weights", "credit.ties"} <= named


@pytest.mark.parametrize(
    ("settings", "without"),
    [
        ({}, {"alpha", "weights", "ties"}),
        ({"credit.base": True}, {"alpha"}),
        ({"credit.base": True, "credit.weights": "released"}, set()),
    ],
)
def test_in_one_turn_there_is_one_group_whose_weight_is_nothing(
    settings: dict[str, Any], without: set[str]
) -> None:
    found = {path.removeprefix("credit.") for path, _ in inert(pp.plan("hgpo", "chain", settings=settings))}
    assert found & {"alpha", "weights", "ties"} == without
    assert not found & {"base", "scale"}
