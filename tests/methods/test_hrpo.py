"""HRPO: thoughts are normalised mixtures, recorded and replayed; a closed gate is GRPO; gates go on where they were."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.reasoning_data.hrpo import hrpo
from panoply.policies.text import TextPolicy
from panoply.policies.thoughts import Drawn, Gated
from panoply.rollout import generation
from panoply.rollout.text import Collector
from panoply.worlds.text.hops import Hops

WORLD = Hops()
START = Path(__file__).parents[2] / "panoply/assets/hops-start"


def gate(width: int = 2, **settings: Any) -> Gated:
    made = Gated(width, **{"marker": "#", "least": 0.5, "most": 0.5, **settings})
    made.know(WORLD.tokenizer, WORLD.tokenizer.vocab_size)
    return made


def thinking(**settings: Any) -> TextPolicy:
    policy = TextPolicy.load(START)
    policy.think(Gated(policy.model.config.width, **{"marker": "#", "least": 0.6, "most": 0.9, **settings}))
    return policy


def drawn(texts: list[str], fed: list[bool], logits: Tensor | None = None) -> Drawn:
    """Rows after a prompt of two tokens, with their newest tokens; all of one length but for what stands behind."""
    rows = [[0, 0, *WORLD.tokens(text)] for text in texts]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    length = torch.tensor([len(row) for row in rows])
    scores = torch.zeros(len(rows), 2) if logits is None else logits
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    action = torch.tensor([row[-1] for row in rows])
    start = torch.full_like(length, 2)
    return Drawn(action, tokens, length, start, scores, table, torch.tensor(fed), table, lambda: table)


# ------------------------------------------------------------------ equations by hand


def test_a_soft_vector_is_divided_by_the_norm_of_its_probabilities() -> None:
    """p = (½, ½) gives (1/√2, 1/√2), as long as an embedding and not shorter; p = (¼, ¾) gives (1, 3)/√10."""
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [0.0, -math.inf]])
    _, soft = gate().think(drawn(["a", "b", "c"], [True] * 3, logits))
    expected = [[0.5**0.5] * 2, [10**-0.5, 3 * 10**-0.5], [1.0, 0.0]]
    assert soft.tolist() == [pytest.approx(row, rel=1e-5) for row in expected]


def test_the_mixture_by_hand() -> None:
    """Gates of zero weights are σ(0) = ½, so that a = σ(Λ)⁴ = √u: u = 0.64 keeps 0.8 and lets in ½ of 0.6."""
    made = gate(least=0.64, most=0.64)
    with torch.no_grad():
        made.gate_r.weight.zero_()
        made.gate_i.weight.zero_()
    found = made.mixed(torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 5.0]])).detach()
    assert found[0].tolist() == pytest.approx([0.8 + 0.6 * 1.5, -1.6 + 0.6 * 2.5], rel=1e-5)


def test_the_gate_begins_between_least_and_most() -> None:
    made = gate(400, least=0.95, most=0.999)
    share = torch.sigmoid(made.residual.detach().double()) ** 8
    assert 0.95 <= float(share.min()) < 0.955 < 0.994 < float(share.max()) <= 0.9991
    assert float(made.kept(torch.randn(50, 400)).min()) >= 0.95 ** (1 + 1e-3), "a is at least u"


def test_mixture_and_start_are_the_released_codes() -> None:
    """By the equations of modeling_qwen2.py, in which the root has 1e-8 under it."""
    made, dice = gate(6, least=0.9, most=0.999), torch.Generator().manual_seed(1)
    e, h = (torch.randn(5, 6, generator=dice) for _ in range(2))
    r = torch.sigmoid(e @ made.gate_r.weight.T + made.gate_r.bias)
    i = torch.sigmoid(e @ made.gate_i.weight.T + made.gate_i.bias)
    a = torch.exp(-8 * torch.nn.functional.softplus(-made.residual) * r)
    assert torch.allclose(made.mixed(e, h), a * e + torch.sqrt(1 - a**2 + 1e-8) * (i * h), atol=1e-6)


def test_thoughts_end_with_the_marker_and_begin_anew_in_a_turn() -> None:
    """Its first token is thought; the marker is not, and what comes after it is not fed."""
    thinks, _ = gate().think(drawn(["a", "ab", "ab#", "ab#c"], [False, True, True, False]))
    assert thinks.tolist() == [True, True, False, False]
    long, _ = gate(marker="b#").think(drawn(["ab#", "a#"], [True, True]))
    assert long.tolist() == [False, True], "a marker may be several tokens"


# ------------------------------------------------------------------ answers


def test_vectors_stand_before_the_marker_and_are_of_what_was_drawn_from() -> None:
    policy = thinking()
    collect = Collector(WORLD, policy, 0)
    found = collect.episodes(collect.tasks(3), 3, temperature=3.0)
    tokens, at = found.context.ragged("tokens"), found.context.ragged("vectors_at")
    shared, vectors = found.context.tensor("shared").tolist(), found.context.ragged("vectors")
    table = policy.model.model.embed_tokens.weight  # type: ignore[union-attr]
    for row in range(len(tokens)):
        said = WORLD.text(tokens[row][shared[row] :].tolist())
        before = said.index("#") if "#" in said else len(said)
        assert at[row].tolist() == list(range(shared[row], shared[row] + before))
    first = found.take(found["position"] == torch.tensor(shared)[found["context"]])
    p = (policy.states(first) @ policy.model.head_weight.T / 3).softmax(-1)
    assert not torch.allclose(p, (policy.states(first) @ policy.model.head_weight.T).softmax(-1), atol=1e-2)
    soft = p @ table / p.square().sum(-1, keepdim=True).sqrt()
    for row, expected in enumerate(soft):
        if len(at[row]):
            assert torch.allclose(vectors[row][0], expected, atol=1e-4)


def test_gradients_reach_gates_and_model_and_not_the_past() -> None:
    """Against differences in float64, with the recorded vectors held still."""
    policy = thinking()
    collect = Collector(WORLD, policy, 0)
    found = collect.episodes(collect.tasks(2), 2)
    policy.model.double()
    context = found.context
    told = context.ragged("vectors")
    context = context.plus({"vectors": type(told)(told.values.double(), told.offsets)})
    found = Experience(found.decisions, context)
    thoughts = policy.thoughts
    assert isinstance(thoughts, Gated)
    policy.score(found)["logp"].sum().backward()
    for weight in (thoughts.residual, thoughts.gate_i.bias, thoughts.gate_r.bias):
        index = int(weight.grad.abs().argmax())  # type: ignore[union-attr]
        sums = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                weight[index] += step
                sums.append(float(policy.score(found)["logp"].sum()))
                weight[index] -= step
        assert (sums[0] - sums[1]) / 2e-4 == pytest.approx(float(weight.grad[index]), rel=1e-4)  # type: ignore[index]


# ------------------------------------------------------------------ runs

SMALL = {
    **tiny.SETTINGS,
    "update.lr": 1e-3,
    "update.schedule.warmup": 0,
    "regularise.kl": 0.02,
    "sample.temperature": 0.8,
}


def test_a_closed_gate_is_grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-6, weights and metrics, with a reference that is pulled to.

    Both are decoded the same way: Adam makes much of the last bits of slopes that are nearly 0.
    """
    monkeypatch.setattr(generation, "host_decoder", lambda model, cache: None)
    shut = {"models.gated.least": 1.0, "models.gated.most": 1.0}
    plain = tiny.bare(tmp_path / "grpo", "grpo", model="fresh", steps=3, settings=SMALL)
    closed = tiny.bare(tmp_path / "hrpo", "hrpo", model="fresh", steps=3, settings={**SMALL, **shut})
    weights = dict(TextPolicy.load(tmp_path / "hrpo/checkpoints/step-0000003/model").named_parameters())
    other = dict(TextPolicy.load(tmp_path / "grpo/checkpoints/step-0000003/model").named_parameters())
    for name, weight in other.items():
        assert float((weight - weights[name]).detach().abs().max()) <= 1e-6, name
    one, two = tiny.metrics(plain.run), tiny.metrics(closed.run)
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in two], abs=1e-6)
    assert any(abs(row["loss"]) > 1e-4 for row in one), "something was learned"
    assert [row["gated_share"] for row in two] == [0.0] * 3


OPEN = {"models.gated.least": 0.5, "models.gated.most": 0.9, "run.checkpoint_every": 1}


def test_gates_learn_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    done = tiny.bare(tmp_path / "run", "hrpo", model="fresh", steps=3, settings={**SMALL, **OPEN})
    rows = tiny.metrics(done.run)
    shares = [row["gated_share"] for row in rows]
    assert len(set(shares)) == 3
    assert rows[0]["kl_reference"] > 1e-5, "the reference reads tokens alone"
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"cut/checkpoints/step-000000{step}")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    assert tiny.metrics(again.run) == rows


def test_a_reference_may_read_thoughts_and_a_model_keeps_its_gates(tmp_path: Path) -> None:
    settings = {**SMALL, **OPEN, "models.gated.reference": "thoughts"}
    done = tiny.bare(tmp_path / "run", "hrpo", model="fresh", steps=1, settings=settings)
    assert tiny.metrics(done.run)[0]["kl_reference"] == pytest.approx(0, abs=1e-6)
    gates = TextPolicy.load(tmp_path / "run/checkpoints/step-0000001/model").thoughts
    assert isinstance(gates, Gated)
    on = tiny.bare(tmp_path / "on", "hrpo", model=str(done.run), steps=1, settings={**SMALL, **OPEN})
    later = TextPolicy.load(Path(on.run) / "checkpoints/step-0000001/model").thoughts
    assert isinstance(later, Gated)
    assert (
        0
        < float((later.residual - gates.residual).detach().abs().max())
        < 0.05
        < float((gates.residual - Gated(64, marker="#", least=0.5, most=0.9).residual).detach().abs().max())
    )


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"models.gated.least": 0.999, "models.gated.most": 0.9}, "above most"),
        ({"models.gated.least": 0.0}, "above 0"),
        ({"models.gated.most": 1.5}, "to 1"),
        ({"models.gated.marker": ""}, "would end no thought"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("hrpo", "hops", settings=settings)
    with pytest.raises(PanoplyError, match="text"):
        pp.plan("hrpo", "cartpole")
    with pytest.raises(PanoplyError, match="no token of chain ends it"):
        pp.plan("hrpo", "chain", settings={"models.gated.marker": "@@"})


def test_rates_are_the_parts_own() -> None:
    assert hrpo().models[0].settings()["residual_lr"] == 200 * hrpo().update.settings()["lr"]
