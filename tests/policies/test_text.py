"""Scoring an experience: prefix-shared rows against plain ones, columns honoured, snapshots, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.policies.decoder import DecoderConfig
from panoply.policies.layout import bucketed, lay_out
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer

TOKENIZER = Tokenizer.of_characters("0123456789+=")
CONFIG = DecoderConfig(14, width=32, layers=2, heads=4, kv_heads=2, max_positions=256, model_type="qwen3")


def experience(
    groups: list[tuple[int, list[int]]], seed: int = 0, skip: int = 0, inside: bool = False
) -> Experience:
    """Prompts of given lengths, each with completions of given lengths; all completion tokens are decisions.

    `skip` leaves out the first decisions of each completion; `inside` adds decisions in the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    prompt, shared, context, position = [], [], [], []
    for number, (length, suffixes) in enumerate(groups):
        start = torch.randint(0, 14, (length,), generator=generator).tolist()
        for suffix in suffixes:
            at = [*([1, max(length - 1, 1)] if inside else []), *range(length + skip, length + suffix)]
            context += [len(rows)] * len(at)
            position += at
            rows.append(start + torch.randint(0, 14, (suffix,), generator=generator).tolist())
            prompt.append(number * 5 + 3)
            shared.append(length)
    tokens = Ragged.from_lists(rows)
    where, at_ = torch.tensor(context), torch.tensor(position)
    columns = {"context": where, "position": at_, "action": tokens.values[tokens.offsets[where] + at_]}
    table = Table({"tokens": tokens, "prompt": torch.tensor(prompt), "shared": torch.tensor(shared)})
    return Experience(Table(columns), table)


RAGGED = [(9, [5, 1, 12, 3]), (4, [7]), (30, [2, 2, 8]), (1, [6, 5]), (17, [4, 9, 4, 1, 3, 6])]


def policy(seed: int = 0) -> TextPolicy:
    return TextPolicy.fresh(CONFIG, TOKENIZER, seed)


def gradients(of: TextPolicy, data: Experience, weight: Tensor) -> dict[str, Tensor]:
    scores = of.score(data, frozenset({"entropy"}))
    loss = ((scores["logp"] - 0.3 * scores["entropy"]) * weight).sum()
    names, weights = zip(*of.model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


def by_hand(of: TextPolicy, data: Experience) -> Tensor:
    """One sequence at a time, whole logits."""
    logp = []
    for c, p, a in zip(
        data["context"].tolist(), data["position"].tolist(), data["action"].tolist(), strict=True
    ):
        logits = of.model(data.context.ragged("tokens")[c][None, :p])[0, -1]
        logp.append(logits.log_softmax(0)[a])
    return torch.stack(logp)


@pytest.mark.parametrize("options", [{}, {"skip": 2}, {"inside": True}])
def test_shared_plain_and_by_hand_agree(options: dict[str, int]) -> None:
    model, data = policy(), experience(RAGGED, **options)  # type: ignore[arg-type]
    needs = frozenset({"entropy", "hidden:1", "hidden:2"})
    with torch.no_grad():
        shared = model.score(data, needs)
        model.shared = False
        plain = model.score(data, needs)
        torch.testing.assert_close(shared["logp"], by_hand(model, data), atol=1e-5, rtol=1e-5)
    assert shared.keys() == plain.keys() == needs | {"logp"}
    for name, column in shared.items():
        torch.testing.assert_close(column, plain[name], atol=1e-5, rtol=1e-5)


def test_gradients_do_not_depend_on_sharing() -> None:
    model, data = policy(), experience(RAGGED)
    weight = torch.linspace(-1, 2, len(data))
    shared = gradients(model, data, weight)
    model.shared = False
    plain = gradients(model, data, weight)
    assert shared.keys() == plain.keys()
    for name, gradient in plain.items():
        error = (shared[name] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-5, f"{name}: {error}"


def test_the_order_of_rows_does_not_matter() -> None:
    model, data = policy(), experience(RAGGED)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        straight, shuffled = model.score(data)["logp"], model.score(data.take(order))["logp"]
    torch.testing.assert_close(shuffled, straight[order], atol=1e-5, rtol=1e-5)


def test_sharing_keeps_a_sliding_window() -> None:
    config = DecoderConfig(14, width=32, layers=2, heads=4, model_type="mistral", windows=(5, 5))
    model, data = TextPolicy.fresh(config, TOKENIZER), experience(RAGGED)
    with torch.no_grad():
        torch.testing.assert_close(model.score(data)["logp"], by_hand(model, data), atol=1e-5, rtol=1e-5)


def test_sharing_saves_tokens_and_masks_only_where_needed() -> None:
    data = experience([(40, [4] * 8)] * 3)
    (rows,) = lay_out(data)
    assert rows.tokens.shape == (3, 40 + 8 * 3)
    assert rows.segments is not None
    (plain,) = lay_out(data, shared=False)
    assert plain.tokens.shape == (24, 43)
    assert plain.segments is None
    assert all(r.segments is None for r in lay_out(experience([(5, [4]), (6, [3])])))


def test_a_short_prompt_with_long_completions_is_not_crammed_into_one_row() -> None:
    rows = lay_out(experience([(4, [60] * 8)]), dense=64)
    assert max(r.tokens.shape[1] for r in rows) < 200
    assert sum(len(r.decision) for r in rows) == 480


def test_like_lengths_go_together() -> None:
    lengths = torch.tensor([10, 11, 12, 100, 101, 500])
    assert sorted((s.start, s.stop) for s in bucketed(lengths, 64)) == [(0, 3), (3, 5), (5, 6)]
    assert bucketed(lengths, 10**6) == [slice(0, 6)]


def test_temperature_and_allowed_apply_row_by_row() -> None:
    model, data = policy(), experience(RAGGED)
    temperature = torch.linspace(0.5, 2, len(data))
    allowed = [[int(a), (int(a) + 1) % 14] if i % 2 else [] for i, a in enumerate(data["action"])]
    columns: dict[str, Tensor | Ragged] = {"temperature": temperature, "allowed": Ragged.from_lists(allowed)}
    with torch.no_grad():
        found = model.score(data.with_columns(**columns))["logp"]
        for i in (0, 1, 17, 30):
            c, p = int(data["context"][i]), int(data["position"][i])
            logits = model.model(data.context.ragged("tokens")[c][None, :p])[0, -1] / temperature[i]
            ids = allowed[i] or list(range(14))
            expected = logits[int(data["action"][i])] - logits[ids].logsumexp(0)
            torch.testing.assert_close(found[i], expected, atol=1e-5, rtol=1e-5)


def test_no_decisions_give_empty_columns() -> None:
    data = experience(RAGGED)
    none = Experience(data.decisions.take(torch.zeros(0, dtype=torch.long)), data.context)
    scores = policy().score(none, frozenset({"entropy", "hidden:1"}))
    assert scores["logp"].shape == scores["entropy"].shape == (0,)
    assert scores["hidden:1"].shape == (0, 32)


def test_fresh_weights_ignore_and_spare_the_global_generator() -> None:
    torch.manual_seed(5)
    first = policy().fingerprint()
    after = torch.rand(())
    torch.manual_seed(5)
    assert torch.rand(()) == after
    assert policy().fingerprint() == first != policy(1).fingerprint()


def test_a_copy_is_a_frozen_snapshot() -> None:
    model = policy()
    snapshot, before = model.copy(), model.fingerprint()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert snapshot.fingerprint() == before != model.fingerprint()
    assert not list(snapshot.parameters())


def test_saved_and_loaded_it_scores_the_same(tmp_path: Path) -> None:
    model, data = policy(), experience(RAGGED)
    model.files_beside["generation_config.json"] = b'{"temperature": 0.6}'
    model.save(tmp_path / "m")
    again = TextPolicy.load(tmp_path / "m")
    assert again.fingerprint() == model.fingerprint()
    assert torch.equal(again.score(data)["logp"], model.score(data)["logp"])
    saved = json.loads(again.files_beside["generation_config.json"])
    assert saved == {"temperature": 0.6, "eos_token_id": 1, "pad_token_id": 0}
    assert again.tokenizer.files == model.tokenizer.files
    again.save(tmp_path / "m")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_errors_are_sentences() -> None:
    model = policy()
    with pytest.raises(PanoplyError, match="longer than the model's context of 256"):
        model.score(experience([(250, [10])]))
    with pytest.raises(PanoplyError, match="lacks its block: write attention:BLOCK"):
        model.score(experience(RAGGED), frozenset({"attention"}))
    with pytest.raises(PanoplyError, match="no hidden state 9"):
        model.score(experience(RAGGED), frozenset({"hidden:9"}))
    with pytest.raises(PanoplyError, match="position 0"):
        model.score(experience([(0, [3])]))
    with pytest.raises(PanoplyError, match="14 tokens, the model only 12"):
        TextPolicy.fresh(DecoderConfig(12, width=8, layers=1, heads=1), TOKENIZER)


def test_a_context_may_end_inside_the_shared_prefix() -> None:
    model, data = policy(), experience([(12, [5, 6, 4])], inside=True)
    short = (data["context"] == 0) & (data["position"] > 1)
    part = data.take(~short)
    with torch.no_grad():
        torch.testing.assert_close(model.score(part)["logp"], by_hand(model, part), atol=1e-5, rtol=1e-5)


def test_an_adapter_scores_learns_alone_and_is_merged_when_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain, data = policy(), experience(RAGGED)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = TextPolicy(peft.get_peft_model(policy().model, lora), TOKENIZER)
    scores = adapted.score(data)["logp"]
    assert not torch.allclose(scores, plain.score(data)["logp"], atol=1e-3)
    assert len(list(adapted.parameters())) == 2 * 2 * CONFIG.layers
    adapted.save(tmp_path / "m")
    torch.testing.assert_close(
        TextPolicy.load(tmp_path / "m").score(data)["logp"], scores, atol=1e-5, rtol=1e-5
    )
