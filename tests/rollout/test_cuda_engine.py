"""The engine on CUDA: graphs draw what the CPU draws, in any batch, after updates, over turns, and say what fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.policies import low_rank
from panoply.policies.decoder import Decoder
from panoply.policies.quantised import Kind
from panoply.policies.tokenizer import Tokenizer
from panoply.rollout import graphs
from panoply.rollout.engine import Rollouts, Sampling, TextEngine, Turn, View
from panoply.rollout.plain_graphs import PlainGraphDecoder
from tests.layouts import LAYOUTS
from tests.rollout.test_cuts import CUTS, experience, policy_of
from tests.rollout.test_engine import SETTINGS, make_model, make_requests, odd_only, same

pytestmark = pytest.mark.gpu


def pair(**changes: object) -> tuple[Decoder, Decoder]:
    """The same model twice, with heads of a size that has a kernel."""
    settings = {"width": 64, "heads": 2, "kv_heads": 1, "max_positions": 256, **changes}
    here, there = make_model(**settings), make_model(**settings)
    return here, there.to("cuda")


def agree(here: Rollouts, there: Rollouts, atol: float = 1e-4) -> None:
    assert same(here, there)
    torch.testing.assert_close(here.decisions["logp"], there.decisions["logp"], atol=atol, rtol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_draws_what_the_cpu_draws(name: str, masked: bool) -> None:
    here, there = pair()
    mask = odd_only if masked else None
    found = [
        TextEngine(m, slots=7).generate(make_requests(), SETTINGS[name], mask=mask, entropy=True)
        for m in (here, there)
    ]
    agree(*found)
    one, two = (rollouts.decisions for rollouts in found)
    torch.testing.assert_close(one["entropy"], two["entropy"], atol=1e-3, rtol=1e-3)
    assert there in graphs._made


@pytest.mark.parametrize("name", ["free", *CUTS])
def test_masks_draw_in_graphs_and_record_what_the_cpu_does(name: str) -> None:
    """Of three pieces of the vocabulary a mask leaves nothing of one, little of another and much of the last."""
    here, there = pair(vocab_size=9001)

    def some(view: View) -> Tensor:
        ids = torch.arange(9001, device=view.row.device)
        left = (ids % 700 == 5) | (ids > 8300)
        return left & (ids >= 4096) | (left & (view.length % 2 == 0)[:, None] & (ids < 100))

    sampling = CUTS.get(name, Sampling(max_tokens=9))
    found = [
        TextEngine(m).generate(make_requests(6, 3), sampling, mask=some, entropy=True) for m in (here, there)
    ]
    agree(*found)
    one, two = (rollouts.decisions for rollouts in found)
    for column in {"cut", "kept", "entropy"} & set(one):
        torch.testing.assert_close(one[column], two[column], atol=1e-3, rtol=1e-3)
    assert one.ragged("allowed").tolist() == two.ragged("allowed").tolist()
    assert any(kind[-1] for kind in graphs._made[there]._graphs)


@pytest.mark.parametrize("name", CUTS)
def test_cuts_and_penalties_draw_in_graphs_and_record_what_the_cpu_does(name: str) -> None:
    here, there = pair(vocab_size=9001)
    found = [TextEngine(m).generate(make_requests(6, 3), CUTS[name], entropy=True) for m in (here, there)]
    agree(*found)
    one, two = (rollouts.decisions for rollouts in found)
    for column in ("cut", "kept", "entropy"):
        torch.testing.assert_close(one[column], two[column], atol=1e-3, rtol=1e-3)
    assert one.ragged("allowed").tolist() == two.ragged("allowed").tolist()
    assert any(True in kind for kind in graphs._made[there]._graphs)
    scores = policy_of(there).score(experience(found[1]))["logp"]
    torch.testing.assert_close(scores.detach().cpu(), two["logp"], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("patience", [1, 5, 16])
def test_stop_strings_and_complete_turns_end_where_they_do_on_the_cpu(patience: int) -> None:
    here, there = pair()
    tokenizer = Tokenizer.of_characters("abcdefghijklmnopqrstuvwxyz")
    sampling = Sampling(max_tokens=40, stop_strings=("ab", "q", "cc"), min_tokens=3)

    def complete(said: list[int]) -> bool:
        return sum(said) % 11 == 0

    for ending in (None, complete):
        found = [
            TextEngine(m, tokenizer, patience=p).generate(make_requests(6, 4), sampling, complete=ending)
            for m, p in ((here, 1), (there, patience))
        ]
        agree(*found)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("plain", [False, True])
def test_every_layout_decodes_in_graphs(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels alone, and with modules between kernels of attention, as where PEFT has replaced some."""
    here, there = pair(**LAYOUTS[name])
    if plain:
        monkeypatch.setattr(graphs, "has_kernels", lambda model: False)
    found = [
        TextEngine(m).generate(make_requests(6, 4), Sampling(max_tokens=40), entropy=True)
        for m in (here, there)
    ]
    agree(*found)
    torch.testing.assert_close(
        found[0].decisions["entropy"], found[1].decisions["entropy"], atol=1e-4, rtol=1e-4
    )
    assert isinstance(graphs._made[there], PlainGraphDecoder) == plain


@pytest.mark.parametrize("patience", [1, 3, 16])
@pytest.mark.parametrize("slots", [1, 5, 64])
def test_slots_and_patience_do_not_change_what_is_sampled(slots: int, patience: int) -> None:
    here, there = pair()
    sampling, requests = Sampling(max_tokens=20, stop_tokens=(3, 11, 12)), make_requests(9, 4)
    narrow = TextEngine(there, slots=slots, patience=patience, prefill_tokens=9)
    agree(TextEngine(here).generate(requests, sampling), narrow.generate(requests, sampling))


@pytest.mark.parametrize("plain", [False, True])
def test_turns_append_and_rows_grow(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(turn: Turn) -> list[int] | None:
        return [5] * (7 + turn.turn) if turn.turn < 4 else None

    here, there = pair()
    if plain:
        monkeypatch.setattr(graphs, "has_kernels", lambda model: False)
    sampling, requests = Sampling(max_tokens=9, stop_tokens=(3,)), make_requests(5, 3)
    ending = lambda turns: [reply(turn) for turn in turns]  # noqa: E731
    agree(*(TextEngine(m, slots=6).generate(requests, sampling, ending) for m in (here, there)))


def test_graphs_follow_the_weights_and_are_kept() -> None:
    here, there = pair()
    sampling, requests = Sampling(max_tokens=10), make_requests(4, 4)
    agree(*(TextEngine(m).generate(requests, sampling) for m in (here, there)))
    made = graphs._made[there]
    with torch.no_grad():
        for a, b in zip(here.parameters(), there.parameters(), strict=True):
            a.mul_(1.1)
            b.mul_(1.1)
    agree(*(TextEngine(m).generate(requests, sampling) for m in (here, there)))
    assert graphs._made[there] is made
    there.load_state_dict({n: w.clone() for n, w in here.state_dict().items()}, assign=True)
    there.to("cuda")
    agree(*(TextEngine(m).generate(requests, sampling) for m in (here, there)))


def move_factors(models: tuple[Decoder, Decoder]) -> None:
    """To the same factors in both."""
    torch.manual_seed(0)
    with torch.no_grad():
        for (_, a), (_, b) in zip(*map(low_rank.adapters, models), strict=True):
            for mine, theirs in ((a.lora_A, b.lora_A), (a.lora_B, b.lora_B)):
                mine.copy_(torch.randn_like(mine) * 0.3)
                theirs.copy_(mine)
    for model in models:
        low_rank.merge(model)


@pytest.mark.parametrize("base", [None, "nf4", "int8"])
@pytest.mark.parametrize("width", [64, 256])
def test_graphs_follow_low_rank_factors_and_are_kept(base: Kind | None, width: int) -> None:
    """Merged into whole weights, or beside few bits: as they lie, or made whole where rows cut a pair of blocks."""
    models = pair(width=width, heads=width // 32, kv_heads=width // 64, inner=2 * width)
    sampling, requests = Sampling(max_tokens=10), make_requests(4, 4)
    for model in models:
        linear = low_rank.linear_layers(model)
        layers = [name for name in linear if "layers" in name]
        low_rank.adapt(model, dict.fromkeys(layers, 4), dict.fromkeys(layers, 2.0), base)
    before = [TextEngine(m).generate(requests, sampling) for m in models]
    agree(*before)
    made = graphs._made[models[1]]
    move_factors(models)
    after = [TextEngine(m).generate(requests, sampling) for m in models]
    agree(*after)
    assert not same(before[1], after[1])
    assert graphs._made[models[1]] is made


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_half_precision_stays_near(dtype: torch.dtype, limit: float) -> None:
    _, there = pair()
    rollouts = TextEngine(there.to(dtype)).generate(make_requests(), Sampling(max_tokens=30), entropy=True)
    decisions, gaps = rollouts.decisions, []
    wide = there.float()
    for index in range(0, decisions.rows, 7):
        tokens = rollouts.context.ragged("tokens")[int(decisions["context"][index])].cuda()
        at = int(decisions["position"][index])
        with torch.no_grad():
            logp = wide(tokens[None, :at])[0, -1].log_softmax(-1)
        gaps.append((logp[tokens[at]].cpu() - decisions["logp"][index]).abs())
    assert torch.stack(gaps).mean() < limit


def test_what_has_no_kernel_is_captured_as_it_is() -> None:
    here, there = pair(head_dim=258)
    found = [TextEngine(m).generate(make_requests(), Sampling(max_tokens=5)) for m in (here, there)]
    agree(*found)
    assert isinstance(graphs._made[there], PlainGraphDecoder)


def test_what_cannot_be_captured_is_decoded_eagerly_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair(head_dim=258)
    hidden = Decoder.hidden

    def asking(self: Decoder, tokens: Tensor, *rest: Any, **more: Any) -> Tensor:
        assert int(tokens.max()) >= 0  # the host has to wait for it
        return hidden(self, tokens, *rest, **more)

    monkeypatch.setattr(Decoder, "hidden", asking)
    graphs._said.clear()
    with pytest.warns(UserWarning, match="Decoding without CUDA graphs, more slowly"):
        found = TextEngine(there).generate(make_requests(), Sampling(max_tokens=5))
    agree(TextEngine(here).generate(make_requests(), Sampling(max_tokens=5)), found)


@pytest.mark.parametrize("size", [8, 80])
def test_heads_of_any_even_size_are_padded(size: int) -> None:
    here, there = pair(head_dim=size)
    found = [TextEngine(m).generate(make_requests(), Sampling(max_tokens=5)) for m in (here, there)]
    agree(*found)
    assert there in graphs._made


def test_too_little_memory_for_one_sequence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _, there = pair()
    monkeypatch.setattr(graphs, "MEMORY_SHARE", 1e-12)
    with pytest.raises(PanoplyError, match="Too little memory to sample one sequence"):
        TextEngine(there).generate(make_requests(), Sampling(max_tokens=5))


@pytest.mark.parametrize("rows", [1, 5, 16, 100, 128])
@pytest.mark.parametrize("depth", [100, 896, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_parts_of_a_product_sum_to_it(rows: int, depth: int, dtype: torch.dtype) -> None:
    from panoply.kernels.decode import Stream, add_norm, in_parts, part_product

    torch.manual_seed(0)
    x = torch.randn(rows, depth, device="cuda", dtype=dtype)
    weight = torch.randn(900, depth, device="cuda", dtype=dtype) / 30
    if not in_parts(x, weight):
        pytest.skip("this GPU has too little shared memory")
    parts, product = part_product(x, weight), x.double() @ weight.double().t()
    assert (parts.sum(0) - product).norm() < 1e-6 * product.norm()

    stream, gain = (
        torch.randn(rows, 900, device="cuda", dtype=dtype),
        torch.rand(900, device="cuda", dtype=dtype),
    )
    one, other = stream.clone(), stream.clone()
    normed, total = add_norm(one, parts, gain, Stream(1e-6)), sum(parts[1:], start=parts[0])
    assert torch.equal(normed, add_norm(other, total.to(dtype), gain, Stream(1e-6)))
    assert torch.equal(one, other)
