"""Models that are steered by values of tokens: what they sample, score, keep and refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.policies.decoder import DecoderConfig
from panoply.policies.steering import SETTINGS, WEIGHTS, Mlp, Steered, TokenValues
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.worlds.text.maze import Maze

WORLD = Maze(cap=3, words=True)
BETA = 3.0


def plain(seed: int = 0, tied: bool = True) -> TextPolicy:
    sizes = {"vocab_size": WORLD.tokenizer.vocab_size, "width": 16, "layers": 2, "heads": 2, "inner": 24}
    return TextPolicy.fresh(DecoderConfig(**sizes, tied=tied), WORLD.tokenizer, seed)


def steered(heads: int = 2, v: bool = True, shaken: float = 0.2, tied: bool = True) -> TextPolicy:
    """One whose values differ from 0 and whose trunk is no longer the model's."""
    policy, dice = plain(tied=tied), torch.Generator().manual_seed(1)
    assert not isinstance(policy.model, Steered)
    values = TokenValues.beside(policy.model, heads=heads, v=v, beta=BETA, seed=3)  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in (w for w in values.parameters() if w.requires_grad):
            weight += shaken * torch.randn(weight.shape, generator=dice)
    policy.steer(values)
    return policy


def acted(policy: TextPolicy, **how: Any) -> Experience:
    collect = Collector(WORLD, policy, 0)
    return collect.episodes(collect.tasks(4), 2, **how)


def by_hand(policy: TextPolicy, tokens: list[int]) -> Tensor:
    """What follows some tokens, with two forward passes over all of them and nothing kept."""
    model: Any = policy.model
    at, row = torch.arange(len(tokens))[None], torch.tensor([tokens])
    own = model.base.logits(model.base.hidden(row, at))[0, -1]
    state = model.values.trunk.hidden(row, at)[0, -1]
    every = [head(state) for head in model.values.q]
    return own + BETA * torch.stack(every).amin(0)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_k": 5}], ids=["plain", "cut"])
@pytest.mark.parametrize("heads", [1, 2])
def test_what_is_sampled_from_is_what_is_scored_and_what_the_formula_says(
    heads: int, how: dict[str, Any]
) -> None:
    policy = steered(heads)
    rows = acted(policy, **how)
    with torch.no_grad():
        found = policy.score(rows, frozenset({"entropy"}))
        contexts, expected = rows.context.ragged("tokens").tolist(), []
        for at, position, action in zip(
            *(rows[n].tolist() for n in ("context", "position", "action")), strict=True
        ):
            logits = by_hand(policy, contexts[at][:position])
            if how:
                logits = logits / 0.7
                logits[logits < logits.topk(5).values[-1]] = -torch.inf
            expected.append(logits.log_softmax(-1)[action])
    torch.testing.assert_close(rows["logp"], torch.stack(expected), rtol=0, atol=2e-5)
    torch.testing.assert_close(found["logp"], rows["logp"], rtol=0, atol=2e-5)
    if not how:
        torch.testing.assert_close(found["entropy"], rows["entropy"], rtol=0, atol=2e-5)
    assert (policy.model.base.config.width, policy.model.config.width) == (16, 32)  # type: ignore[union-attr]


def test_values_of_zero_change_nothing() -> None:
    policy = plain()
    before = acted(policy)
    policy.steer(TokenValues.beside(policy.model, heads=2, v=True, beta=BETA))  # type: ignore[arg-type]
    after = acted(policy)
    assert before["action"].tolist() == after["action"].tolist()
    torch.testing.assert_close(before["logp"], after["logp"], rtol=0, atol=2e-6)
    assert {p.requires_grad for n, p in policy.named_parameters() if n.startswith("base.")} == {False}
    assert {p.requires_grad for n, p in policy.named_parameters() if n.startswith("values.")} == {True}


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_one_acts_as_it_did_and_is_the_model_that_was_steered_to_others(
    tmp_path: Path, tied: bool
) -> None:
    policy = steered(tied=tied)
    policy.save(tmp_path / "model")
    again = TextPolicy.load(tmp_path / "model")
    rows, same = acted(policy), acted(again)
    assert rows["action"].tolist() == same["action"].tolist()
    assert rows["logp"].tolist() == same["logp"].tolist()
    assert again.values is not None
    assert again.values.settings == {"heads": 2, "v": True, "beta": BETA}
    assert again.fingerprint() == policy.fingerprint()
    assert plain(tied=tied).fingerprint() == _without(tmp_path).fingerprint()


def _without(folder: Path) -> TextPolicy:
    (folder / "model" / SETTINGS).unlink()
    (folder / "model" / WEIGHTS).unlink()
    return TextPolicy.load(folder / "model")


def test_a_model_that_is_not_steered_leaves_no_values_where_it_is_saved(tmp_path: Path) -> None:
    steered().save(tmp_path / "model")
    plain().save(tmp_path / "model")
    assert TextPolicy.load(tmp_path / "model").values is None


def test_weights_are_taken_over_in_place_and_copies_stay_as_they_are(tmp_path: Path) -> None:
    policy, kept = steered(), steered().copy()
    assert kept.model.base is not policy.model.base  # type: ignore[union-attr]
    assert policy.copy().model.base is policy.model.base  # type: ignore[union-attr]
    with torch.no_grad():
        policy.values.q[0].second.bias += 1  # type: ignore[union-attr, operator]
    assert policy.fingerprint() != kept.fingerprint()
    kept.save(tmp_path / "model")
    address = policy.values.q[0].second.bias.data_ptr()  # type: ignore[union-attr, operator]
    policy.load_weights(tmp_path / "model")
    assert policy.fingerprint() == kept.fingerprint()
    assert policy.values.q[0].second.bias.data_ptr() == address  # type: ignore[union-attr, operator]


def test_values_alone_are_what_a_whole_pass_says_of_them() -> None:
    policy = steered()
    rows = acted(policy)
    needs = frozenset({"q:0", "q:1", "v", "q_logp:1"})
    with torch.no_grad():
        alone, whole = policy.score(rows, needs), policy.score(rows, needs | {"entropy"})
    assert set(alone) == needs
    assert set(whole) == needs | {"entropy", "logp"}
    for name in needs:
        torch.testing.assert_close(alone[name], whole[name], rtol=0, atol=1e-6)
    assert not torch.equal(alone["q:0"], alone["q:1"])


def test_the_gradient_of_what_is_said_reaches_the_values_alone() -> None:
    policy = steered()
    rows = acted(policy)
    policy.score(rows)["logp"].sum().backward()  # type: ignore[no-untyped-call]
    found = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    assert {n.split(".")[0] for n in found} == {"values"}
    head: Any = policy.values.q[0].second.bias  # type: ignore[union-attr, operator]
    step = torch.zeros_like(head)
    step[5] = 1e-3
    with torch.no_grad():
        sides = []
        for sign in (1, -1):
            head += sign * step
            sides.append(policy.score(rows)["logp"].double().sum())
            head -= sign * step
    assert head.grad[5].item() == pytest.approx(float(sides[0] - sides[1]) / 2e-3, rel=0.02, abs=0.02)


def test_a_head_is_two_layers_that_begin_at_zero() -> None:
    head = Mlp(64, 3, torch.Generator().manual_seed(0))
    assert head(torch.randn(5, 64)).abs().max().item() == 0
    assert float(head.first.weight.detach().std()) == pytest.approx(1 / 8, rel=0.1)
    with torch.no_grad():
        head.first.weight.copy_(torch.eye(64))
        head.second.weight.fill_(1.0)
    assert head(torch.tensor([[2.0, -3.0, *[0.0] * 62]])).tolist() == [[2.0, 2.0, 2.0]]  # −3 does not pass


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    policy = steered(heads=1, v=False)
    rows = acted(policy)
    with pytest.raises(PanoplyError, match="steered by values of tokens already"):
        policy.steer(policy.values)  # type: ignore[arg-type]
    with pytest.raises(PanoplyError, match=r"have no Q of number 1"):
        policy.score(rows, frozenset({"q:1"}))
    with pytest.raises(PanoplyError, match="have no V"):
        policy.score(rows, frozenset({"v"}))
    with pytest.raises(PanoplyError, match=r"has no values of tokens"):
        plain().score(rows, frozenset({"q:0"}))
    with pytest.raises(PanoplyError, match="no blocks to look into"):
        policy.score(rows, frozenset({"hidden:1"}))
    with pytest.raises(PanoplyError, match="logits are not read off its states"):
        policy.score(rows, frozenset({"mean_logp"}))
    with pytest.raises(PanoplyError, match="begins as no other"):
        policy.apart()
    policy.save(tmp_path / "model")
    for written in ('{"heads": 7, "v": true, "beta": 1.0}', '{"heads": 1, "v": false, "beta": 1e999}'):
        (tmp_path / "model" / SETTINGS).write_text(written)
        with pytest.raises(PanoplyError, match=r"values\.json"):
            TextPolicy.load(tmp_path / "model")
    (tmp_path / "model" / SETTINGS).write_text('{"heads": 2, "v": false, "beta": 1.0}')
    with pytest.raises(PanoplyError, match=r"values\.safetensors"):
        TextPolicy.load(tmp_path / "model")
