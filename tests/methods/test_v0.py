"""V0: what a value in context is told and never told, how it learns, and how many answers each prompt gets."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, assert_same, gradient, ragged, rows_of, shuffled
from papers import ZERO, groups_of, returns_of, standardised
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.methods.objectives.v0 import (
    Generalist,
    allocated,
    allocation,
    differs,
    generalist,
    pair_loss,
    v0,
)
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.slots.model.in_context import QueryAdapter, kernel_logits
from panoply.slots.model.prompts import asked_about
from panoply.worlds.world import Task

TOKENIZER = Tokenizer.of_characters("0123456789+=.")
POLICY = TextPolicy.fresh(DecoderConfig(15, width=16, layers=2, heads=2), TOKENIZER, 3)
ONE = torch.ones(())


# ------------------------------------------------------------------ the head


def test_the_regression_is_where_its_slope_is_zero() -> None:
    """K(p − y) + λKa = 0 at the optimum, that is λ·a = y − p; read off at the known points, whose K is regular."""
    dice = torch.Generator().manual_seed(0)
    known, right = torch.randn(12, 3, generator=dice), torch.tensor([1.0, 0.0, 0.0, 1.0] * 3)
    held, length = torch.tensor(0.3), torch.tensor(0.7)
    f = kernel_logits(known, right, known, length, held)
    z = ((known - known.mean(0)) / known.std(0, correction=0)).double()
    kernel = torch.exp(-torch.cdist(z, z).square() / 3 / (2 * 0.7**2))
    prior = math.log(6.5 / 6.5)
    weight = torch.linalg.solve(kernel, f - prior)
    assert torch.allclose(0.3 * weight, right - f.sigmoid(), atol=1e-6)


def test_what_is_like_the_known_is_expected_like_it() -> None:
    known = torch.tensor([[0.0], [0.1], [4.0], [4.1]])
    value = kernel_logits(
        known, torch.tensor([1, 1, 0, 0]), torch.tensor([[0.05], [4.05], [2.05]]), ONE / 2, ONE / 5
    )
    assert value[0] > 1
    assert value[1] < -1
    assert value[2].abs() < 1e-6, "half way"


def test_where_nothing_is_known_or_all_is_the_same_only_the_share_counts() -> None:
    asked = torch.zeros(2, 3)
    assert kernel_logits(asked[:0], torch.zeros(0), asked, ONE, ONE).sigmoid().tolist() == [0.5, 0.5]
    always = kernel_logits(torch.zeros(3, 3), torch.ones(3), asked, ONE, ONE).sigmoid()
    assert always.tolist() == pytest.approx([3.5 / 4] * 2)


def test_the_residual_of_the_queries_is_zero_at_first_and_padding_is_not_seen() -> None:
    made = QueryAdapter(0, 4, 5, 6, 3, 8, 0.5)
    dice = torch.Generator().manual_seed(0)
    states, there = (
        torch.randn(2, 3, 4, generator=dice),
        torch.tensor([[True, True, False], [True, True, True]]),
    )
    plain = made(states, there)
    assert plain.shape == (2, 30)
    states[0, 2] = 99.0
    assert torch.allclose(made(states, there), plain)
    assert torch.allclose(made(states, there, dice), plain), "what is dropped is multiplied with zeros"
    with torch.no_grad():
        made.up.weight.normal_(generator=dice)
    moved = made(states, there)
    assert not torch.allclose(moved, plain)
    assert not torch.allclose(made(states, there, dice), moved)


def test_the_loss_orders_pairs_and_keeps_to_probabilities() -> None:
    """By hand: pairs (2, −1) and (0, 1); cross-entropies of scores 1, 0.75 and 0, 0.25."""
    logits, scores = (
        torch.tensor([2.0, 0.0, -1.0, 1.0], dtype=torch.float64),
        torch.tensor([1.0, 0.75, 0.0, 0.25]),
    )

    def soft(x: float) -> float:
        return math.log1p(math.exp(x))

    ordered = (soft(-3.0) + soft(1.0)) / 2
    exact = (soft(-2.0) + soft(0.0) + soft(-1.0) + soft(1.0) - 0.25) / 4
    assert float(pair_loss(logits, scores, 0.25)) == pytest.approx(0.25 * ordered + 0.75 * exact)


# ------------------------------------------------------------------ the log


def valuing(**settings: Any) -> Generalist:
    plain = {**generalist().settings(), "queries": 4, "bottleneck": 8, "lr": 0.01}
    return Generalist(POLICY, 0, {**plain, **settings})


def step_of(
    prompts: Sequence[str], scores: Sequence[float], first: int = 0, ids: Sequence[int] = ()
) -> Experience:
    """Two answers of one token to each prompt, that earn its score on average."""
    tokens = [[*TOKENIZER.encode(p), 0] for p in prompts for _ in "ab"]
    row = torch.arange(len(tokens))
    group = row // 2 + first
    length = torch.tensor([len(t) - 1 for t in tokens])
    told: dict[str, Any] = {
        "episode": row + 2 * first,
        "group": group,
        "task": torch.tensor(list(ids))[row // 2] if ids else group + 1000,
        "context": row,
        "position": length,
        "action": torch.zeros_like(row),
        "reward": torch.tensor([r for s in scores for r in (min(1.0, 2 * s), max(0.0, 2 * s - 1))]),
        "source": torch.zeros_like(row),
    }
    return Experience(
        Table(told), Table({"tokens": Ragged.from_lists(tokens), "prompt": group, "shared": length})
    )


SHORT, LONG = ["1=", "2=", "3=", "4="], ["1+1+1=", "2+3+1=", "5+5+5=", "7+0+1="]


def test_outcomes_are_written_down_after_they_were_foretold() -> None:
    model = valuing(fit=0)
    found = model.learn(step_of([*SHORT[:2], *LONG[:2]], [1.0, 0.5, 0.0, 0.25]), 0)
    assert found["brier"] == pytest.approx((0.25 + 0.0 + 0.25 + 0.0625) / 4), "½ of everything"
    assert found["rows"] == 0
    assert model.scores.tolist() == [1.0, 0.5, 0.0, 0.25]
    assert [TOKENIZER.decode(p) for p in model.prompts.tolist()] == ["1=", "2=", "1+1+1=", "2+3+1="]
    easy, hard = model.ask(
        [Task(1, tuple(TOKENIZER.encode("4="))), Task(2, tuple(TOKENIZER.encode("7+0+1=")))]
    )
    assert 0 < min(easy, hard) < max(easy, hard) < 1


def test_the_policy_moves_and_only_the_log_follows() -> None:
    """What was hard becomes easy: the latest log says so with the same weights, the first one does not."""
    recent, first = valuing(fit=0, support=8), valuing(fit=0, support=8, context="first")
    for model in (recent, first):
        model.learn(step_of([*SHORT, *LONG], [1.0] * 4 + [0.0] * 4), 0)
        model.learn(step_of([*SHORT, *LONG], [0.0] * 4 + [1.0] * 4, first=50), 1)
        model.learn(step_of(SHORT, [0.0] * 4, first=90), 2)
    asked = [Task(1, tuple(TOKENIZER.encode("9+9+2=")))]
    assert recent.ask(asked) > 0.5 > first.ask(asked)
    for model in (recent, first):
        for i in range(3, 9):
            model.learn(step_of([*SHORT, *LONG], [1.0] * 8, first=100 * i), i)
        assert len(model.scores) == 32, "four times the support"


def test_a_prompt_is_never_in_the_list_it_is_judged_by() -> None:
    """Task 5 failed again and again; asked about it, the model looks at others alone, and of those one went well."""
    model = valuing(fit=0)
    model.learn(step_of(["3="] * 4 + SHORT[:1], [0.0] * 4 + [1.0], ids=[5, 5, 5, 5, 6]), 0)
    three = tuple(TOKENIZER.encode("3="))
    assert float(model.ask([Task(5, three)])) == pytest.approx(1.5 / 2)
    assert float(model.ask([Task(7, three)])) < 0.5


def test_the_adapter_learns_to_tell_prompts_apart() -> None:
    """Prompts go well by their last digit, which vectors that were drawn by chance show badly."""
    model, digits = valuing(lr=0.02, dropout=0.0, pairs=8), [(a, b) for a in range(4) for b in range(10)]
    prompts, scores = [f"{a}+{b}=" for a, b in digits], [float(b < 5) for _, b in digits]
    model.learn(step_of(prompts[:20], scores[:20]), 0)
    asked = Ragged.from_lists([TOKENIZER.encode(p) for p in prompts[20:]])
    tasks, right = torch.arange(20), torch.tensor(scores[20:])

    def error() -> float:
        return float((model.expects(asked, tasks) - right).square().mean())

    before = error()
    losses = [model._fit(asked, tasks, right, 1, i) for i in range(50)]
    assert None not in losses
    assert error() < 0.65 * before


def test_a_step_without_both_sides_teaches_the_adapter_nothing() -> None:
    model = valuing(fit=2)
    assert "loss" not in model.learn(step_of(SHORT, [1.0, 0.0, 1.0, 0.0]), 0), "the log was empty"
    assert "loss" not in model.learn(step_of(SHORT, [1.0] * 4, first=50), 1)
    assert "loss" in model.learn(step_of(SHORT, [1.0, 0.0, 1.0, 0.0], first=90), 2)
    short = valuing(fit=1, support=2)
    short.learn(step_of(SHORT, [1.0, 0.0, 1.0, 1.0]), 0)
    assert "loss" not in short.learn(step_of(SHORT, [1.0, 0.0, 1.0, 0.0], first=50), 1), (
        "the last two went well"
    )


def test_groups_are_prompts() -> None:
    prompts, tasks, of = asked_about(step_of(["1=", "2+2="], [1.0, 0.0], ids=[8, 4]))
    assert prompts.tolist() == [TOKENIZER.encode("1="), TOKENIZER.encode("2+2=")]
    assert tasks.tolist() == [8, 4]
    assert of.count.tolist() == [2, 2]


# ------------------------------------------------------------------ how many answers


def test_no_other_sizes_have_more_groups_that_differ() -> None:
    p = torch.tensor([0.95, 0.5, 0.02, 0.2], dtype=torch.float64)
    sizes = allocation(p, 20, 2, 9)
    assert sum(sizes) == 20

    def worth(chosen: Sequence[int]) -> float:
        return sum(float(differs(q, n)) for q, n in zip(p, chosen, strict=True))

    every = (c for c in itertools.product(range(2, 10), repeat=4) if sum(c) == 20)
    assert worth(sizes) == pytest.approx(max(map(worth, every)))
    assert float(differs(torch.tensor(0.5), 2)) == 0.5


def test_sizes_are_within_bounds_and_alike_where_nothing_is_known() -> None:
    assert allocation(torch.full((4,), 0.5), 32, 2, 32) == [8, 8, 8, 8]
    assert allocation(torch.tensor([0.5, 0.0, 1.0]), 12, 2, 6) == [6, 4, 2], (
        "what cannot differ gets what is left"
    )
    assert allocation(torch.tensor([0.3, 0.3]), 4, 2, 2) == [2, 2]
    by_doubt = allocation(torch.tensor([0.03, 0.5]).double(), 12, 2, 10, "doubt")
    assert by_doubt[1] > allocation(torch.tensor([0.03, 0.5]).double(), 12, 2, 10)[1]


class Asked:
    def __init__(self, values: Sequence[float]):
        self.models = {"generalist": lambda tasks: torch.tensor(values)}

    def tasks(self, n: int) -> list[Task]:
        return [Task(i, (0,)) for i in range(n)]

    def episodes(self, tasks: list[Task], group: Sequence[int], **sampling: Any) -> list[int]:
        return list(group)


def test_the_value_decides_how_often_a_prompt_is_asked() -> None:
    """One more is worth 1/4, 1/8, 1/16 … to the first and 0.09, 0.074, 0.066, 0.059 … to the second."""
    found = allocated(prompts=3, group=4, most=9)(Asked([0.5, 0.1, 1.0]))  # type: ignore[arg-type]
    assert list(found) == [5, 5, 2]


def test_prompts_count_alike_however_often_they_are_asked() -> None:
    method, made = v0().but(regularise=()), ragged(drift=0.4)
    credited = made.with_columns(advantage=method.credit(made))
    advantage, slow, loss = standardised(made), Slow(), ZERO
    groups = groups_of(made)
    for members in groups:
        rows = [(e, row) for e in members for row in rows_of(made, episode=e)]
        for e, row in rows:
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            gain = torch.minimum(rho * advantage[e], rho.clamp(0.8, 1.2) * advantage[e])
            loss = loss - gain / (len(rows) * len(groups))
    assert len(set(map(len, groups))) > 1
    assert returns_of(made)
    expected = slow.gradient(loss)
    assert_same(gradient(method, credited), expected)
    mixed = shuffled(made)
    found: Tensor = gradient(method, mixed.with_columns(advantage=method.credit(mixed)), micro_tokens=4)
    assert_same(found, expected)


# ------------------------------------------------------------------ runs

SMALL = {
    "run.device": "cpu",
    "run.held_out": 4,
    "run.checkpoint_every": 2,
    "world.levels": (0, 3),
    "sample.prompts": 8,
    "sample.group": 4,
    "models.generalist.lr": 0.01,
}


@pytest.mark.parametrize("credit", ["group", "over_expected"])
def test_all_that_is_remembered_goes_on_bit_for_bit(credit: str, tmp_path: Path) -> None:
    done = tiny.bare(tmp_path / "run", "v0", credit=credit, steps=4, settings=SMALL)
    rows = tiny.metrics(done.run)
    assert [row["episodes"] for row in rows] == [32] * 4
    assert [row["generalist_rows"] for row in rows] == [0, 8, 16, 24]
    assert any("generalist_loss" in row for row in rows[:2])
    assert any("generalist_loss" in row for row in rows[2:])
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    shutil.rmtree(tmp_path / "cut/checkpoints/step-0000004")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    assert tiny.metrics(again.run) == rows


def test_the_adapters_optimiser_goes_on_as_well() -> None:
    """What a run shows of a step is of weights before it: here the weights after one more step are compared."""
    first, second = valuing(fit=2), valuing(fit=2)
    for step in range(2):
        first.learn(step_of(SHORT, [1.0, 0.0, 1.0, 0.0], first=50 * step), step)
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    for model in (first, second):
        assert "loss" in model.learn(step_of(SHORT, [0.0, 1.0, 1.0, 0.0], first=100), 2)
    after = second.adapter.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in first.adapter.state_dict().items())


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"sample.group": 33}, "groups of 2 to 32 episodes have another mean size"),
        ({"sample.least": 1}, "least"),
        ({"models.generalist.heads": 4}, "do not divide"),
        ({"models.generalist.fit": 0, "models.generalist.lr": 0.1}, "fit is 0"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("v0", "chain", settings=settings)
    with pytest.raises(PanoplyError, match="text"):
        pp.plan("v0", "cartpole")
    with pytest.raises(PanoplyError, match="needs the model 'generalist'"):
        pp.plan("v0", "chain", models=[])
