"""Ranked lists: where they come from, and losses on them by hand, against slow references and whatever the split."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from kit import assert_same, dataset, gradient, hand, ragged, shuffled
from lists_kit import flat, listed, slow_gradient
from test_preferences import collector
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience, Segments, Table
from panoply.parts import Part
from panoply.planning import make_plan
from panoply.slots.data.lists import lists, ranked
from panoply.slots.loss.lists import lambda_rank, list_mle, list_pairs, list_pointwise, list_softmax
from panoply.slots.loss.pairs import logistic
from panoply.slots.sample.answers import answers_of

ZERO = torch.zeros((), dtype=torch.float64)


def three(part: Part, scores: list[float]) -> tuple[float, dict[str, Tensor]]:
    """A list of three answers worth 1, ½ and 0, with these log-probabilities."""
    value, stats = part(flat([[1.0, 0.5, 0.0]], torch.tensor(scores, dtype=torch.double, requires_grad=True)))
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
    made = listed(made, [[107, 104]], [[1.0, 0.0]])
    expected = gradient(dataset(logistic(beta=0.3)), made)
    assert_same(gradient(dataset(list_mle(beta=0.3)), made), expected)
    assert_same(gradient(dataset(list_pairs(beta=0.3)), made), expected)
    assert_same(gradient(dataset(list_softmax(beta=0.3, tau=1e-3)), made), expected)
    assert_same(gradient(dataset(lambda_rank(beta=0.3, normalise=True)), made), expected)
    constant = 1 / math.log(2) - 1 / math.log(3)
    assert_same(gradient(dataset(lambda_rank(beta=0.3)), made), constant * expected)


def slow_mle(s: list[Tensor], worth: list[float]) -> Tensor:
    return -sum((s[k] - torch.stack(s[k:]).exp().sum().log() for k in range(len(s))), ZERO)


def slow_lambda(s: list[Tensor], worth: list[float], normalise: bool = False) -> Tensor:
    rank = [1 + sum(bool(x > y) for x in s) for y in s]
    loss, total = ZERO, 0.0
    for i in range(len(s)):
        for j in range(len(s)):
            if worth[i] > worth[j]:
                swap = abs(1 / math.log(1 + rank[i]) - 1 / math.log(1 + rank[j]))
                delta = (2 ** worth[i] - 2 ** worth[j]) * swap
                loss, total = loss + delta * (1 + (s[j] - s[i]).exp()).log(), total + delta
    return loss / total if normalise else loss


def slow_pairs(s: list[Tensor], worth: list[float], hinge: bool = False, extremes: bool = False) -> Tensor:
    loss = ZERO
    for i in range(len(s)):
        for j in range(len(s)):
            if worth[i] > worth[j] and (not extremes or (i, j) == (0, len(s) - 1)):
                gap = s[i] - s[j]
                loss = loss + (torch.clamp(1 - gap, min=0) if hinge else (1 + (-gap).exp()).log())
    return loss


def slow_softmax(s: list[Tensor], worth: list[float], shares: bool = False) -> Tensor:
    total, weights = torch.stack(s).exp().sum(), worth if shares else [math.exp(w) for w in worth]
    return -sum((w / sum(weights) * (x - total.log()) for w, x in zip(weights, s, strict=True)), ZERO)


def slow_pointwise(s: list[Tensor], worth: list[float], squared: bool = False) -> Tensor:
    both = list(zip(worth, s, strict=True))
    if squared:
        return sum(((w - x) ** 2 for w, x in both), ZERO)
    return -sum((w * x.sigmoid().log() + (1 - w) * (-x).sigmoid().log() for w, x in both), ZERO)


@pytest.mark.parametrize(
    ("part", "slow"),
    [
        (list_mle(beta=0.3), slow_mle),
        (lambda_rank(beta=0.3), slow_lambda),
        (lambda_rank(beta=0.3, normalise=True), partial(slow_lambda, normalise=True)),
        (list_pairs(beta=0.3), slow_pairs),
        (list_pairs(beta=0.3, kind="hinge"), partial(slow_pairs, hinge=True)),
        (list_pairs(beta=0.3, pairs="best_worst"), partial(slow_pairs, extremes=True)),
        (list_softmax(beta=0.3), slow_softmax),
        (list_softmax(beta=0.3, target="shares"), partial(slow_softmax, shares=True)),
        (list_pointwise(beta=0.3), slow_pointwise),
        (list_pointwise(beta=0.3, kind="squared"), partial(slow_pointwise, squared=True)),
    ],
)
def test_gradients_whatever_the_split_and_order(part: Part, slow: Callable[..., Tensor]) -> None:
    made, expected = slow_gradient(lambda answers: slow(answers.scores(0.3), answers.worth))
    for micro in (10**9, 1):
        for rows in (made, shuffled(made)):
            assert_same(gradient(dataset(part), rows, micro_tokens=micro), expected)


def test_lists_that_say_nothing() -> None:
    """Answers of one worth are not compared, a list worth nothing has no shares, and neither divides 0 by 0."""
    for part in (
        list_pairs(),
        list_pairs(pairs="best_worst"),
        lambda_rank(normalise=True),
        list_softmax(target="shares"),
    ):
        logp = torch.tensor([-1.0, -2.0], dtype=torch.double, requires_grad=True)
        value, _ = part.but(to=None)(flat([[0.0, 0.0]], logp))
        assert value.tolist() == [0.0]
        assert torch.autograd.grad(value.sum(), logp)[0].tolist() == [0.0, 0.0]


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
    made = hand(episode=[3, 4, 7, 6, 9], **columns)
    made = ranked(made, made.by("episode").sum(made["signal:success"]))
    assert made.lists is not None
    assert made.lists.ragged("episodes").tolist() == [[6, 7, 9], [4, 3]]
    assert best_first(made, "success") == [[2.0, 0.5, 0.5], [1.0, 0.0]]


def test_answers_of_the_teacher_and_of_the_policy() -> None:
    for whose, prompts in (("teacher", 0), ("teacher", 6), ("policy", 6), ("policy", 0)):
        part, collect = lists(batch=4, answers=3, prompts=prompts, whose=whose, name="true"), collector()
        state: dict[str, Any] = {}
        for _ in range(3):  # twice through six prompts, so that one may come twice in a batch
            state, made = part(state, collect)
            worths = best_first(made, "true")
            assert [len(row) for row in worths] == [3] * 4
            assert all(row == sorted(row, reverse=True) for row in worths)
            assert Segments(made["group"]).constant(made["task"]).all()
        assert ("logp" in made) == (whose == "policy")
        if whose == "policy":
            torch.testing.assert_close(
                made["logp"], collect.policy.score(made)["logp"].detach(), atol=1e-5, rtol=0
            )


def test_who_answers_once_and_who_again() -> None:
    settings: dict[str, Any] = {"batch": 4, "answers": 3, "prompts": 4, "whose": "policy", "name": "true"}
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


def test_after_a_refresh_the_proposals_are_of_the_policy_as_it_is_then() -> None:
    part = lists(batch=4, answers=3, prompts=4, whose="policy", name="true", refresh=1)
    collect, state = collector(), dict[str, Any]()
    for _ in range(2):
        state, made = part(state, collect)
        with torch.no_grad():
            here = collect.policy.score(made)["logp"]
            torch.testing.assert_close(made["logp"], here, atol=1e-5, rtol=0)
            for _, weights in collect.policy.named_parameters():
                weights.mul_(1.2)


def test_labels_of_annotators() -> None:
    """ψ is the mean over the list of the chance to be preferred, ½ to itself; asked, each pair is asked once."""
    collect = collector(sharpness=2.0)
    for labels, prompts in (("chances", 0), ("chances", 4), ("answers", 4)):
        state: dict[str, Any] = {}
        state, made = lists(batch=4, answers=3, prompts=prompts, labels=labels)(state, collect)
        assert made.lists is not None
        assert collect.notes == {"questions": 4 * 3}  # four prompts, three pairs of three answers
        worths, members = made.lists.ragged("worth").tolist(), made.lists.ragged("episodes").tolist()
        for worth, row in zip(worths, members, strict=True):
            assert worth == sorted(worth, reverse=True)
            assert sum(worth) == pytest.approx(1.5)
            if labels == "answers":
                assert all(round(3 * w - 0.5, 5) in (0, 1, 2) for w in worth)
                continue
            said = dict(zip(made.by("episode").keys.tolist(), answers_of(made), strict=True))
            task = next(
                t
                for t in collect.numbered(range(8))
                if t.id == int(made["task"][made["episode"] == row[0]][0])
            )
            for w, a in zip(worth, row, strict=True):
                chances = [collect.world.preference(task, said[a], said[b]) for b in row]
                assert w == pytest.approx(sum(chances) / 3, abs=1e-5)


def test_labels_are_asked_once_and_kept() -> None:
    part, collect, state = (
        lists(batch=4, answers=3, prompts=4, labels="answers"),
        collector(),
        dict[str, Any](),
    )
    found = []
    for _ in range(2):
        state, made = part(state, collect)
        assert made.lists is not None
        task = made.by("episode").first(made["task"]).tolist()
        worths = made.lists.ragged("worth").tolist()
        found.append(sorted(zip(task[::3], worths, strict=True)))
    assert found[0] == found[1]


def test_some_of_the_answers_at_a_time() -> None:
    """Other ones on each visit, with their own worth and the `logp` they were drawn with."""
    settings: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "name": "true", "whose": "policy"}
    part, collect = lists(batch=4, answers=8, prompts=4, used=3, **settings), collector()
    state, one = part({}, collect)
    state, two = part(state, collect)
    assert [len(row) for row in best_first(one, "true")] == [3] * 4
    assert sorted(one.context.ragged("tokens").tolist()) != sorted(two.context.ragged("tokens").tolist())
    collect = collector()
    made = collect.episodes(collect.tasks(4), 8, temperature=0.7, top_k=5)
    known = {
        (*answer, round(float(logp), 5))
        for answer, logp in zip(answers_of(made), made.by("episode").sum(made["logp"]), strict=True)
    }
    told = zip(answers_of(one), one.by("episode").sum(one["logp"]), strict=True)
    assert {(*answer, round(float(logp), 5)) for answer, logp in told} <= known


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
    with pytest.raises(
        PanoplyError, match=r"list_mle\) needs lists, which data.b-coder/scored_programs or data.lists gives"
    ):
        make_plan("dpo", "strings", slots={"losses": [list_mle()]})
