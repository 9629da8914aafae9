"""Ranked lists: where they come from, and losses on them by hand, against slow references and whatever the split."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, assert_same, batch, dataset, gradient, hand, ragged, rows_of, shuffled
from test_preferences import collector
from torch import Tensor
from toys import LISTS

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Segments, Table
from panoply.parts import Part
from panoply.planning import make_plan
from panoply.slots.data.lists import lists, ranked
from panoply.slots.loss.lists import lambda_rank, list_mle, list_softmax
from panoply.slots.loss.pairs import logistic

WORTH = [[2.0, 1.0, 1.0], [0.5, 0.0], [3.0, 2.0, 1.0, 0.0]]


def with_worths(made: Experience) -> Experience:
    members = {"episodes": Ragged.from_lists(LISTS), "worth": Ragged.from_lists(WORTH, torch.float64)}
    return made.with_lists(Table(members))


def three(part: Part, scores: list[float]) -> tuple[float, dict[str, Tensor]]:
    """A list of three answers worth 1, ½ and 0, with these log-probabilities."""
    members = {
        "episodes": Ragged.from_lists([[0, 1, 2]]),
        "worth": Ragged.from_lists([[1.0, 0.5, 0.0]], torch.double),
    }
    value, stats = part(batch(hand(action=[0, 0, 0]).with_lists(Table(members)), logp=scores))
    return float(value.detach()), stats


def test_golden() -> None:
    log, soft = math.log, lambda x: math.log1p(math.exp(-x))
    s = [log(2), log(3), log(1)]
    assert three(list_mle(beta=1.0, to=None), s)[0] == pytest.approx(log(6 / 2) + log(4 / 3))
    g, d = [1.0, 2**0.5 - 1, 0.0], [1 / log(3), 1 / log(2), 1 / log(4)]  # the second is ranked first
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = sum((g[i] - g[j]) * abs(d[i] - d[j]) * soft(s[i] - s[j]) for i, j in pairs)
    found, stats = three(lambda_rank(beta=1.0, to=None), s)
    assert found == pytest.approx(expected)
    assert stats["rank_accuracy"].tolist() == pytest.approx([2 / 3])
    e = [math.exp(2), math.exp(1), 1.0]
    expected = -sum(w / sum(e) * log(p / 6) for w, p in zip(e, (2, 3, 1), strict=True))
    assert three(list_softmax(beta=1.0, tau=0.5, to=None), s)[0] == pytest.approx(expected)


def test_a_list_of_two_is_a_pair() -> None:
    """Up to LiPO-λ's constant weight, and exactly for the likelihood of the order."""
    made = ragged().with_pairs(Table({"chosen": torch.tensor([107]), "rejected": torch.tensor([104])}))
    members = {
        "episodes": Ragged.from_lists([[107, 104]]),
        "worth": Ragged.from_lists([[1.0, 0.0]], torch.double),
    }
    made = made.with_lists(Table(members))
    expected = gradient(dataset(logistic(beta=0.3)), made)
    assert_same(gradient(dataset(list_mle(beta=0.3)), made), expected)
    constant = 1 / math.log(2) - 1 / math.log(3)
    assert_same(gradient(dataset(lambda_rank(beta=0.3)), made), constant * expected)


def slow_mle(s: list[Tensor], worth: list[float]) -> Tensor:
    return -sum((s[k] - torch.stack(s[k:]).exp().sum().log() for k in range(len(s))), torch.zeros(()))


def slow_lambda(s: list[Tensor], worth: list[float]) -> Tensor:
    rank = [1 + sum(bool(x > y) for x in s) for y in s]
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(len(s)):
        for j in range(len(s)):
            if worth[i] > worth[j]:
                swap = abs(1 / math.log(1 + rank[i]) - 1 / math.log(1 + rank[j]))
                loss = loss + (2 ** worth[i] - 2 ** worth[j]) * swap * (1 + (s[j] - s[i]).exp()).log()
    return loss


def slow_softmax(s: list[Tensor], worth: list[float]) -> Tensor:
    total, weights = torch.stack(s).exp().sum(), [math.exp(w) for w in worth]
    return -sum(
        (w / sum(weights) * (x - total.log()) for w, x in zip(weights, s, strict=True)), torch.zeros(())
    )


@pytest.mark.parametrize(
    ("part", "slow"), [(list_mle, slow_mle), (lambda_rank, slow_lambda), (list_softmax, slow_softmax)]
)
def test_gradients_whatever_the_split_and_order(
    part: Callable[..., Part], slow: Callable[..., Tensor]
) -> None:
    made, table, loss = with_worths(ragged()), Slow(), torch.zeros((), dtype=torch.float64)
    for members, worth in zip(LISTS, WORTH, strict=True):
        scores = []
        for episode in members:
            rows = rows_of(made, episode=episode)
            gaps = [table.logp(r["state"], r["action"]) - r["logp@reference"] for r in rows]
            scores.append(0.3 * torch.stack(gaps).sum())
        loss = loss + slow(scores, worth) / len(LISTS)
    expected = table.gradient(loss)
    for micro in (10**9, 9, 1):
        for rows in (made, shuffled(made)):
            assert_same(gradient(dataset(part(beta=0.3)), rows, micro_tokens=micro), expected)


# ------------------------------------------------------------------ data


def best_first(made: Experience, name: str) -> list[list[float]]:
    episodes = made.by("episode")
    earned = dict(zip(episodes.keys.tolist(), episodes.sum(made[f"signal:{name}"]).tolist(), strict=True))
    assert made.lists is not None
    members = made.lists.ragged("episodes").tolist()
    assert made.lists.ragged("worth").tolist() == [[earned[e] for e in row] for row in members]
    return [[earned[e] for e in row] for row in members]


def test_groups_become_lists_the_best_first() -> None:
    columns: dict[str, Any] = {"group": [8, 8, 5, 5, 5], "signal:success": [0.0, 1.0, 0.5, 2.0, 0.5]}
    made = ranked(hand(episode=[3, 4, 7, 6, 9], **columns))
    assert made.lists is not None
    assert made.lists.ragged("episodes").tolist() == [[6, 7, 9], [4, 3]]
    assert best_first(made, "success") == [[2.0, 0.5, 0.5], [1.0, 0.0]]


def test_answers_of_the_teacher_and_of_the_policy() -> None:
    for whose, prompts in (("teacher", 0), ("teacher", 6), ("start", 6)):
        part, collect = lists(batch=4, answers=3, prompts=prompts, whose=whose, name="true"), collector()
        state: dict[str, Any] = {}
        for _ in range(3):  # twice through six prompts, so that one may come twice in a batch
            state, made = part(state, collect)
            worths = best_first(made, "true")
            assert [len(row) for row in worths] == [3] * 4
            assert all(row == sorted(row, reverse=True) for row in worths)
            assert Segments(made["group"]).constant(made["task"]).all()
        assert ("logp" in made) == (whose == "start")
        if whose == "start":
            torch.testing.assert_close(
                made["logp"], collect.policy.score(made)["logp"].detach(), atol=1e-5, rtol=0
            )


def test_who_answers_once_and_who_again() -> None:
    settings: dict[str, Any] = {"batch": 4, "answers": 3, "prompts": 4, "whose": "start", "name": "true"}
    for refresh in (0, 2):
        collect, part, state = collector(), lists(refresh=refresh, **settings), dict[str, Any]()
        told = []
        for _ in range(3):
            state, made = part(state, collect)
            told.append(sorted(made.context.ragged("tokens").tolist()))
            with torch.no_grad():
                for _, parameter in collect.policy.named_parameters():
                    parameter.mul_(1.5)
        json.dumps({k: v for k, v in state.items() if not isinstance(v, Tensor)})
        assert told[0] == told[1]
        assert (told[1] == told[2]) == (refresh == 0)


def test_a_run_on_lists(tmp_path: Any) -> None:
    slots = {"data": lists(batch=8, answers=4, prompts=8, name="true"), "losses": [lambda_rank(beta=0.5)]}
    tiny.bare(
        tmp_path / "run",
        "dpo",
        world="strings",
        model="fresh",
        steps=3,
        settings={"run.held_out": 4},
        **slots,
    )
    rows = tiny.metrics(tmp_path / "run")
    assert rows[-1]["lambda_rank"] < rows[0]["lambda_rank"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match=r"list_mle\) needs lists, which data.lists gives"):
        make_plan("dpo", "strings", slots={"losses": [list_mle()]})
    with pytest.raises(PanoplyError, match="say how many with data.prompts"):
        make_plan("dpo", "strings", slots={"data": lists(whose="start"), "losses": [list_mle()]})
