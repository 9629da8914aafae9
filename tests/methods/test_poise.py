"""POISE: whose promise an answer is measured by, what a probe sees, when it is fitted, and what it forgets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled
from papers import ZERO, groups_of, returns_of
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import OWN, Experience, Ragged, Segments, Table
from panoply.methods.objectives.poise import Probe, crossed, crossed_targets, poise, probe
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.slots.credit.expected import over_expected
from panoply.slots.model.inside import pooled_states, token_entropies
from panoply.slots.model.regressions import Fitted, axes, fitted

NAN = float("nan")
TOKENIZER = Tokenizer.of_characters("0123456789+=.")
POLICY = TextPolicy.fresh(DecoderConfig(15, width=16, layers=2, heads=2), TOKENIZER, 3)


def answers(returns: list[float], expected: list[float], group: list[int]) -> Experience:
    return hand(reward=returns, expected=expected, group=group)


# ------------------------------------------------------------------ credit


def test_two_answers_swap_their_promises() -> None:
    """The release's own example: rows of two prompts that are not side by side."""
    made = answers([1.0, 0.0, 0.25, 0.75], [0.1, 0.2, 0.9, 0.8], [0, 1, 0, 1])
    assert crossed()(made).tolist() == pytest.approx([1 - 0.9, 0 - 0.8, 0.25 - 0.1, 0.75 - 0.2])
    returns, siblings = made["reward"].float(), Segments(made["group"])
    assert crossed_targets(returns, siblings, "others").tolist() == pytest.approx([0.25, 0.75, 1.0, 0.0])
    assert crossed_targets(returns, siblings, "group").tolist() == pytest.approx([0.625, 0.375, 0.625, 0.375])


def test_of_three_the_mean_of_the_others() -> None:
    made = answers([0.0, 0.5, 1.0], [0.2, 0.4, 0.9], [0, 0, 0])
    assert crossed()(made).tolist() == pytest.approx([-0.65, 0.5 - 0.55, 1 - 0.3])
    targets = crossed_targets(made["reward"].float(), Segments(made["group"]), "others")
    assert targets.tolist() == pytest.approx([0.75, 0.5, 0.25])


def test_what_has_no_promise_is_measured_by_what_others_earned() -> None:
    made = answers([1.0, 0.0, 1.0, 0.5], [NAN, NAN, 0.1, 0.7], [0, 0, 1, 2])
    assert crossed()(made).tolist() == [1.0, -1.0, 0.0, 0.0], "and one on its own by nothing"


def test_only_a_siblings_promise_leaves_the_gradient_unbiased() -> None:
    """All pairs of three arms, each as likely as it is: E[∇log π·A] is ∇E[r], but not where g is the answer's own."""
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64)
    worth, promise = [1.0, 0.0, 0.4], [0.9, 0.2, 0.7]
    p = logits.softmax(0)
    pairs = [(a, b) for a in range(3) for b in range(3)]
    arm = torch.tensor([x for pair in pairs for x in pair])
    made = answers(
        [worth[x] for x in arm], [promise[x] for x in arm], [i for i, _ in enumerate(pairs) for _ in "ab"]
    )
    score = torch.eye(3, dtype=torch.float64)[arm] - p
    likely = torch.tensor([float(p[a] * p[b]) for a, b in pairs for _ in "ab"])[:, None]
    true = p * (torch.tensor(worth) - (p * torch.tensor(worth)).sum())

    def mean(credit: Any) -> Tensor:
        return (likely * score * credit(made).double()[:, None]).sum(0) / 2

    assert torch.allclose(mean(crossed()), true, atol=1e-7)
    assert float((mean(over_expected(scale="none")) - true).abs().max()) > 0.05


def test_gradient_is_the_papers_in_any_order_and_split() -> None:
    method, made = poise(), ragged(drift=0.5)
    made = made.with_columns(expected=made.by("episode").rows(torch.linspace(0.1, 1.0, 10)))
    returns, slow, loss = returns_of(made), Slow(), ZERO
    value = {e: float(rows_of(made, episode=e)[0]["expected"]) for e in returns}
    for members in groups_of(made):
        for e in members:
            others = [value[o] for o in members if o != e]
            a = returns[e] - sum(others) / len(others) if others else 0.0
            for row in rows_of(made, episode=e):
                rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
                loss = loss - torch.minimum(rho * a, rho.clamp(0.8, 1.28) * a) / len(made)
    expected = slow.gradient(loss)

    def found(rows: Experience, **options: Any) -> Tensor:
        return gradient(method, rows.with_columns(advantage=method.credit(rows)), **options)

    assert_same(found(made), expected)
    assert_same(found(shuffled(made), micro_tokens=4), expected)


# ------------------------------------------------------------------ regressions


def data(rows: int = 60, width: int = 5) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=dice) * torch.tensor([3.0, 1.0, 0.5, 0.1, 2.0][:width]) + 4
    return x, (x[:, 0] - 0.5 * x[:, 1] + torch.randn(rows, generator=dice) > 2).float()


def by_standard_features(x: Tensor, fit: Fitted) -> Tensor:
    return ((x - x.mean(0)) / x.std(0, correction=0)).double()


def test_a_ridge_is_where_its_slope_is_zero() -> None:
    """Σ(z·w + b − y)² + 7‖w‖², with standardised features, as scikit-learn's pipeline has it."""
    x, y = data()
    fit = fitted([x], y, (0,), 7.0, "ridge")
    z, w, b = by_standard_features(x, fit), fit.tensors["weight"].double(), fit.tensors["bias"].double()
    off = z @ w + b - y
    assert (z.T @ off + 7 * w).abs().max() < 1e-4
    assert off.sum().abs() < 1e-4
    assert torch.allclose(fit([x]), (z @ w + b).float(), atol=1e-5)


def test_a_logistic_one_is_where_its_slope_is_zero() -> None:
    x, y = data()
    fit = fitted([x], y, (0,), 3.0, "logistic")
    z, w, b = by_standard_features(x, fit), fit.tensors["weight"].double(), fit.tensors["bias"].double()
    off = (z @ w + b).sigmoid() - y.clamp(1e-6, 1 - 1e-6)
    assert (z.T @ off + 3 * w).abs().max() < 1e-4
    assert off.sum().abs() < 1e-4
    assert torch.allclose(fit([x]), (z @ w + b).sigmoid().float(), atol=1e-5)


def test_an_mlp_sees_what_no_line_does_and_is_the_same_again() -> None:
    dice = torch.Generator().manual_seed(2)
    x = torch.randn(200, 2, generator=dice)
    y = (x[:, 0] * x[:, 1] > 0).float()
    line, bent = (fitted([x], y, (0,), 0.01, kind) for kind in ("ridge", "mlp"))  # type: ignore[arg-type]
    errors = [float((fit([x]) - y).square().mean()) for fit in (line, bent)]
    assert errors[1] < 0.5 * errors[0]
    assert torch.equal(fitted([x], y, (0,), 0.01, "mlp")([x]), bent([x]))


@pytest.mark.parametrize("rows", [4, 40])
def test_principal_components(rows: int) -> None:
    """The first two hold what the two largest singular values do, whether there are more rows than numbers or fewer."""
    x, _ = data(rows)
    mean, directions = axes(x, 2)
    assert torch.allclose(directions.T @ directions, torch.eye(2), atol=1e-5)
    held = ((x - mean) @ directions).square().sum()
    largest = torch.linalg.svdvals(x - x.mean(0))[:2].square().sum()
    assert float(held) == pytest.approx(float(largest), rel=1e-4)
    assert axes(x, 99)[1].shape[1] == min(rows, 5)


def test_a_feature_that_never_differs_is_not_blown_up() -> None:
    x, y = data()
    x[:, 2] = 0.3
    fit = fitted([x], y, (0,), 1.0, "ridge")
    other = x.clone()
    other[:, 2] = 0.4
    assert torch.allclose(fit([other]), fit([x]))


# ------------------------------------------------------------------ what a probe sees


def told(prompts: list[str], said: list[str]) -> Experience:
    """Answers to prompts, with rising entropies."""
    tokens = [[*TOKENIZER.encode(p), *TOKENIZER.encode(a)] for p, a in zip(prompts, said, strict=True)]
    shared = torch.tensor([len(p) for p in prompts])
    lengths = torch.tensor([len(a) for a in said])
    row = torch.arange(len(said)).repeat_interleave(lengths)
    inside = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
    numbers = {p: i for i, p in enumerate(dict.fromkeys(prompts))}
    decisions: dict[str, Any] = {
        "episode": row + 50,
        "group": torch.tensor([numbers[p] for p in prompts])[row],
        "context": row,
        "position": shared[row] + inside,
        "action": torch.tensor([t for words in said for t in TOKENIZER.encode(words)]),
        "entropy": 1.0 + inside,
        "source": torch.zeros_like(row),
    }
    context: dict[str, Any] = {
        "tokens": Ragged.from_lists(tokens),
        "prompt": torch.tensor([numbers[p] for p in prompts]),
        "shared": shared,
    }
    return Experience(Table(decisions), Table(context))


PROMPTS, SAID = ["12+7=", "12+7=", "3=", "4+55="], ["19.", "2222.", "3.", "5959"]


def test_states_are_of_the_last_tokens_of_prompt_and_answer() -> None:
    """Each sequence by itself, with every state asked for one by one: of token i at position i + 1."""
    made = told(PROMPTS, SAID)
    prompt, answer = pooled_states(POLICY, made, 1, 3)
    for i, (asked, words) in enumerate(zip(PROMPTS, SAID, strict=True)):
        tokens = [*TOKENIZER.encode(asked), *TOKENIZER.encode(words)]
        position = torch.arange(1, len(tokens) + 1)
        alone = Experience(
            Table({"context": position * 0, "position": position, "action": position * 0}),
            Table({"tokens": Ragged.from_lists([tokens])}),
        )
        states = POLICY.score(alone, frozenset({"hidden:1"}))["hidden:1"]
        n = len(asked)
        assert torch.allclose(prompt[i], states[:n][-3:].mean(0), atol=1e-5)
        assert torch.allclose(answer[i], states[n:][-3:].mean(0), atol=1e-5)


def test_entropies_of_the_whole_and_of_what_is_after_the_reasoning() -> None:
    """`12=45.` has entropies 1 to 6: the sign ends the reasoning 1, 2 and belongs to neither part."""
    made = told(["1+1=", "2=", "5="], ["12=45.", "777", "="])
    found = token_entropies(made, TOKENIZER.encode("="), "mean")
    assert found.tolist() == [[3.5, 1.5, 5.0], [2.0, 2.0, 0.0], [1.0, 0.0, 0.0]]
    every = token_entropies(made, TOKENIZER.encode("="), "all")[0].tolist()
    assert every == [3.5, 6.0, 6.0, 1.0, 1.5, 2.0, 2.0, 1.0, 5.0, 6.0, 6.0, 4.0], "mean, last, largest, least"
    assert token_entropies(made, [], "mean").tolist() == [[3.5], [2.0], [1.0]]
    split = token_entropies(told(["1+1="], ["4=5=6"]), TOKENIZER.encode("5="), "mean")
    assert split.tolist() == [[3.0, 1.5, 5.0]], "several tokens in a row"
    across = token_entropies(told(["1=", "2="], ["45", "=7"]), TOKENIZER.encode("5="), "mean")
    assert across.tolist() == [[1.5, 1.5, 0.0], [1.5, 1.5, 0.0]], "an answer ends where it ends"


def probing(**settings: Any) -> Probe:
    plain = {**probe().settings(), "block": 1, "last": 2, "after": None, "bootstrap": 0, "alpha": 1.0}
    return Probe(POLICY, {**plain, **settings})


def batch(seed: int, first: int = 0, domain: int | None = None) -> Experience:
    """Four prompts, two answers each; an answer is right as often as its prompt is short."""
    dice = torch.Generator().manual_seed(seed)
    digits = torch.randint(0, 10, (4,), generator=dice).tolist()
    prompts = [f"{d}=" if i % 2 else f"{d}+{d}+{d}=" for i, d in enumerate(digits) for _ in range(2)]
    said = ["".join(map(str, torch.randint(0, 10, (3,), generator=dice).tolist())) for _ in prompts]
    made = told(prompts, said)
    right = torch.tensor([float(len(p) == 2) for p in prompts])
    group = torch.arange(4).repeat_interleave(2)
    episodes = made.by("episode")
    return made.with_columns(
        reward=torch.where(episodes.is_last(), episodes.rows(right), 0.0),
        group=episodes.rows(group) + first,
        episode=made["episode"] + 10 * first,
        **({} if domain is None else {"domain": torch.full((len(made),), domain)}),
    )


def expected_of(model: Probe, made: Experience) -> Tensor:
    column = model.columns(made)["expected"]
    assert isinstance(column, Tensor)
    return made.by("episode").first(column)


def test_the_probe_predicts_what_siblings_earn_and_is_fitted_after_advantages() -> None:
    model = probing()
    first, later = batch(0), batch(9, first=100)
    assert expected_of(model, first).isnan().all(), "it has no data yet"
    model.learn(first, 0)
    for step in range(1, 6):
        made = batch(step, first=4 * step)
        before = expected_of(model, made)
        again = expected_of(model, made)
        assert torch.equal(before, again), "looking changes nothing, and components are those of the buffer"
        found = model.learn(made, step)
        assert not torch.equal(before, expected_of(model, made))
        model._seen = None
    assert found["rows"] == 48
    assert found["error"] < 0.25
    assert found["skill"] > 0.7
    value, right = expected_of(model, later), later.by("episode").sum(later["reward"])
    assert bool(((value > 0.5) == (right > 0.5)).all())
    assert float(value.min()) >= 0
    assert float(value.max()) <= 1


def test_it_only_collects_in_the_first_steps() -> None:
    model = probing(bootstrap=3)
    for step in range(3):
        made = batch(step, first=4 * step)
        assert expected_of(model, made).isnan().all()
        model.learn(made, step)
    assert expected_of(model, batch(7, first=40)).isfinite().all()


def test_whole_groups_leave_and_kinds_of_problems_keep_to_themselves() -> None:
    model = probing(buffer=12)
    for step in range(3):
        made = batch(step, first=4 * step, domain=7 if step else 5)
        expected_of(model, made)
        model.learn(made, step)
    kept = list(zip(model.rows["domain"].tolist(), model.rows["group"].tolist(), strict=True))
    assert kept == [(5, g) for g in (0, 1, 2, 3) for _ in "ab"] + [(7, g) for g in range(6, 12) for _ in "ab"]
    assert set(model.fits) == {5, 7}
    assert expected_of(model, batch(3, first=60, domain=9)).isnan().all(), "another kind has no probe yet"


def test_answers_of_others_are_not_kept_and_skill_is_of_squares() -> None:
    """Their states are of a policy that did not give them. Skill is 1 − mean square error / variance."""
    model, first, second = probing(), batch(0), batch(7, first=40)
    lent = second["group"] == second["group"].max()
    second = second.with_columns(source=torch.where(lent, OWN + 1, OWN))
    expected_of(model, first)
    model.learn(first, 0)
    value = expected_of(model, second).double()
    own = value[second.by("episode").first(second["source"]) == OWN]
    told_of = model.learn(second, 1)
    assert int(second["group"].max()) not in model.rows["group"].tolist()
    target = model.rows["target"][-len(own) :].double()
    off, spread = (own - target).square().mean(), target.var(correction=0)
    assert told_of["skill"] == pytest.approx(float(1 - off / spread), abs=1e-5)


def test_it_is_fitted_to_what_the_others_earned() -> None:
    made = batch(0)
    one = made.with_columns(reward=(made["episode"] % 2 == 0).double() * made.by("episode").is_last())
    model = probing()
    expected_of(model, one)
    model.learn(one, 0)
    assert model.rows["target"].tolist() == [0.0, 1.0] * 4, "episode 50 has earned, 51 not"


def test_answers_without_siblings_teach_it_nothing() -> None:
    made = batch(0)
    alone = made.take(made["episode"] != 51)
    model = probing()
    expected_of(model, alone)
    assert model.learn(alone, 0)["rows"] == 6


# ------------------------------------------------------------------ runs

SMALL = {
    "run.device": "cpu",
    "run.held_out": 4,
    "run.checkpoint_every": 2,
    "world.operations": 2,
    "sample.prompts": 4,
    "models.probe.bootstrap": 3,
    "reward.name": "ended",
}


def test_all_that_is_remembered_goes_on_bit_for_bit(tmp_path: Path) -> None:
    done = tiny.bare(tmp_path / "run", "poise", model="fresh", steps=4, settings=SMALL)
    rows = tiny.metrics(done.run)
    assert [row["probe_rows"] for row in rows] == [8, 16, 24, 32]
    assert ["probe_error" in row for row in rows] == [False, False, False, True]
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    shutil.rmtree(tmp_path / "cut/checkpoints/step-0000004")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    assert tiny.metrics(again.run) == rows


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"sample.group": 1}, "measured by the others of its group"),
        ({"sample.by": "behind:4"}, "another self acts"),
        ({"models.probe.low": 1.0}, "not below high"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("poise", "chain", settings=settings)
    with pytest.raises(PanoplyError, match="text"):
        pp.plan("poise", "cartpole")
    with pytest.raises(PanoplyError, match="models.probe.block is 3, and the model has 2 blocks"):
        probing(block=3)
    with pytest.raises(PanoplyError, match="models.probe.after is '</think>'"):
        probing(after="</think>")
