"""Kernels without a GPU (`make test-kernels`): Triton's interpreter runs them in float32, beside plain torch.

Apart from the suite: it wants Triton and an older NumPy, and TRITON_INTERPRET=1 before anything is imported. What a
compiler makes of kernels, half precision and graphs are tested where there is a GPU (`test_cuda_*.py`).
"""

from __future__ import annotations

import pytest
import torch
from kernels.pretended import launch_plainly
from kernels.test_cuda_attention import FOCI, written_out
from torch import Tensor

from panoply.kernels import attention, copying, cut, decode, experts, quantised, sample, scoring, train
from panoply.kernels.low_rank import Stack, onto
from panoply.policies.attention import Focus
from panoply.policies.packing import pack
from panoply.policies.quantised import Kind, Quantised
from panoply.policies.scoring import naive_scores
from panoply.rollout.cuts import LISTED
from panoply.rollout.rollouts import LENGTH, STOP
from panoply.rollout.sampling import Sampling, draw, stream, uniforms

STREAM = decode.Stream(1e-6, 0.5)
TILES = [(16, 32), (32, 16), (64, 64)]


def close(found: Tensor, wanted: Tensor, off: float = 1e-5) -> None:
    assert float((found - wanted).abs().max()) <= off * max(1.0, float(wanted.abs().max()))


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + STREAM.eps) * (weight + STREAM.offset)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_plainly(monkeypatch)
    torch.manual_seed(0)


@pytest.mark.parametrize("focus", FOCI)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("heads", "shared", "size"), [(4, 2, 64), (2, 1, 24)])
def test_attention_of_learning(
    focus: str, tile: tuple[int, int], heads: int, shared: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILES", {64: (attention.Tile(*tile, 4, 1),) * 3})
    row, segment = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    packing = pack(torch.tensor([37, 50, 3, 0, 70, 1, 20]), segment, row)
    qkv = torch.randn(int(packing.queries[-1]), heads + 2 * shared, size)
    slope = torch.randn(len(qkv), heads, size)
    leaves = [x.double().clone().requires_grad_() for x in packing.listed(qkv, heads)]
    wanted = written_out(leaves[0], leaves[1], leaves[2], packing, FOCI[focus])
    slopes = torch.autograd.grad(wanted, leaves, slope.double())
    out, lse = attention.forward(qkv, heads, packing, FOCI[focus])
    d_q = torch.empty_like(qkv)[:, :heads]
    by_head = attention.backward(slope, qkv, heads, out, lse, packing, FOCI[focus], d_q)
    d_k, d_v = (x.view(len(x), shared, -1, size).sum(2) for x in by_head)
    for found, true in zip((out, d_q, d_k, d_v), (wanted.detach(), *slopes), strict=True):
        close(found, true)


@pytest.mark.parametrize("focus", [Focus(), Focus(window=21), Focus(cap=2.0, scale=0.3)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_attention_of_decoding_reads_a_prompt_where_it_is_held(
    focus: Focus, sinks: bool, turned: bool
) -> None:
    rows, capacity, shared, size, heads = 6, 96, 2, 16, 4
    held, holder = torch.tensor([30, 30, 30, 10, 0, 10]), torch.tensor([0, 0, 0, 3, 4, 3])
    position = torch.tensor([70, 30, 31, 64, 12, 80])
    keys, values = (torch.randn(rows, capacity, shared, size) for _ in range(2))
    qkv, still = torch.randn(rows, (heads + 2 * shared) * size), torch.zeros(capacity, size)
    still[:, : size // 2] = 1  # cosines; nothing is turned
    sink = torch.randn(heads) if sinks else None
    own_keys, own_values = keys.clone(), values.clone()
    for row in range(rows):
        for x in (own_keys, own_values):
            x[row, : held[row]] = x[holder[row], : held[row]]
        if holder[row] != row:  # nobody may look there
            keys[row, : held[row]] = values[row, : held[row]] = torch.nan
    found = decode.decode_attention(
        qkv,
        None if turned else still,
        keys,
        values,
        position,
        (holder, held),
        None,
        STREAM,
        focus,
        sinks=sink,
    ).view(rows, heads, size)
    new = qkv.view(rows, -1, size)
    for row, at in enumerate(position.tolist()):
        past = slice(max(0, at - focus.window + 1) if focus.window else 0, at)
        k, v = (
            torch.cat([x[row, past], new[row, None, a : a + shared]]).repeat_interleave(2, 1)
            for x, a in ((own_keys, heads), (own_values, heads + shared))
        )
        scores = torch.einsum("hs,khs->hk", new[row, :heads], k) * (focus.scale or size**-0.5)
        scores = (scores / focus.cap).tanh() * focus.cap if focus.cap else scores
        whole = scores if sink is None else torch.cat([scores, sink[:, None]], 1)
        weights = whole.softmax(1)[:, : scores.shape[1]]
        close(found[row], torch.einsum("hk,khs->hs", weights, v))
    assert torch.equal(keys[torch.arange(rows), position], new[:, heads : heads + shared])


def test_rows_of_keys_and_values_are_copied_in_all_layers() -> None:
    layers, capacity = 2, 96
    keys, values = torch.randn(layers, 50, 4, 16).chunk(2, dim=2)
    target = copying.Tokens(*(torch.zeros(layers, 6 * capacity, 2, 16) for _ in range(2)))
    first, count, at = (
        torch.tensor([0, 20, 0, 31]),
        torch.tensor([20, 11, 20, 19]),
        torch.tensor([3, 0, 5, 2]),
    )
    copying.copy(copying.Tokens(keys, values), first, count, target, at, capacity, 20)
    for source, there in zip((keys, values), target, strict=True):
        wanted = torch.zeros(layers, 6, capacity, 2, 16)
        for a, n, row in zip(first.tolist(), count.tolist(), at.tolist(), strict=True):
            wanted[:, row, :n] = source[:, a : a + n]
        assert torch.equal(there.view_as(wanted), wanted)


def test_norms() -> None:
    weight, table = torch.randn(24), torch.randn(9, 24)
    x, y = decode.embed_norm(torch.tensor([3, 1, 4]), table, 2.5, weight, STREAM)
    close(x, table[[3, 1, 4]] * 2.5)
    close(y, normed(x, weight))
    qkv, first, second = torch.randn(5, 7, 24), torch.randn(24), torch.randn(24)
    before = qkv.clone()
    decode.norm_heads(qkv, 3, first, second, STREAM)
    close(qkv, torch.cat([normed(before[:, :3], first), normed(before[:, 3:5], second), before[:, 5:]], 1))
    spans, a, b = torch.randn(5, 40), torch.randn(20), torch.randn(12)
    before = spans.clone()
    decode.norm_spans(spans, a, b, STREAM)
    close(spans, torch.cat([normed(before[:, :20], a), normed(before[:, 20:32], b), before[:, 32:]], 1))


def test_the_norm_of_a_sum_and_back() -> None:
    x, change, weight = (torch.randn(n, 77) for n in (700, 700, 1))
    leaves = [y.requires_grad_() for y in (x, change, weight[0])]
    true = [y.detach().clone().requires_grad_() for y in leaves]
    total, out = train.add_norm(leaves[0], leaves[1], leaves[2], STREAM.eps, STREAM.offset)
    wanted = true[0] + true[1]
    slopes = torch.randn_like(out), torch.randn_like(total)
    found = torch.autograd.grad([out, total], leaves, slopes)
    expected = torch.autograd.grad([normed(wanted, true[2]), wanted], true, slopes)
    close(out.detach(), normed(wanted, true[2]).detach())
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_sums_over_rows_and_heads() -> None:
    x = torch.randn(700, 77)
    close(train.column_sums(x), x.sum(0))
    once = train.folded(x)
    assert train.folded(x, once) is once
    close(once, 2 * x.sum(0))
    d_k, d_v, out = torch.randn(50, 6, 24), torch.randn(50, 6, 24), torch.zeros(20, 7, 24)
    places, ends = torch.randperm(50).int(), sorted(torch.randint(0, 50, (19,)).tolist())
    bounds = torch.tensor([0, *ends, 50]).int()
    train.gather(d_k, d_v, places, bounds, out[:, 3:])
    for token in range(20):
        here = places[bounds[token] : bounds[token + 1]].long()
        for found, slopes in ((out[token, 3:5], d_k), (out[token, 5:], d_v)):
            close(found, slopes[here].view(-1, 2, 3, 24).sum((0, 2)))


@pytest.mark.parametrize("gelu", [False, True])
def test_gates_and_back(gelu: bool) -> None:
    both, weight = torch.randn(9, 40, requires_grad=True), torch.randn(7, 20, requires_grad=True)
    gate, up = both.chunk(2, dim=1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    wanted, found = (act * up) @ weight.t(), train.gated_down(both, weight, None, gelu)
    close(found.detach(), wanted.detach())
    slope = torch.randn_like(wanted)
    true = torch.autograd.grad(wanted, [both, weight], slope)
    for one, other in zip(torch.autograd.grad(found, [both, weight], slope), true, strict=True):
        close(one, other)


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_log_probabilities_and_their_slopes(temperature: float | None) -> None:
    z, actions = torch.randn(5, 300) * 3, torch.tensor([0, 7, 299, 12, 150])
    divisor = None if temperature is None else torch.full((5,), temperature)
    leaf = z.clone().requires_grad_()
    wanted = naive_scores(leaf / (temperature or 1.0), actions)
    drawn = scoring.Drawn(actions, divisor, 0.0, None, None, None)
    sums = scoring.normalise(z.clone(), drawn, True)
    assert sums.entropy is not None
    close(sums.logp, wanted["logp"].detach())
    close(sums.entropy, wanted["entropy"].detach())
    g_logp, g_entropy, out = torch.randn(5), torch.randn(5), torch.empty_like(z)
    scoring.slope(z.clone(), drawn, sums, g_logp, g_entropy, out)
    (true,) = torch.autograd.grad((wanted["logp"] * g_logp + wanted["entropy"] * g_entropy).sum(), [leaf])
    close(out, true)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("shape", [(40, 256), (3, 100), (1, 5)])
def test_few_bits_are_made_whole(kind: Kind, shape: tuple[int, int]) -> None:
    held = Quantised(torch.randn(shape), kind)
    found = torch.full((shape[0] * shape[1] + 1,), 7.0)
    quantised.restore(held.held, found[:-1])
    close(found[:-1].view(shape), held.whole())
    assert found[-1] == 7


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("rows", [5, 130])
@pytest.mark.parametrize(("parts", "rank"), [(1, 5), (3, 5), (1, quantised.RANKS + 5)])
def test_products_with_few_bits_and_the_factors_beside_them(
    kind: Kind, rows: int, parts: int, rank: int
) -> None:
    """The depth is no multiple of what a part, or a sum of factors, goes over."""
    outputs, inputs = 70, quantised.SPAN + 256
    held = Quantised(torch.randn(outputs, inputs), kind)
    x, bias, a, b = (torch.randn(n) for n in ((rows, inputs), (outputs,), (rank, inputs), (outputs, rank)))
    for stack in (None, Stack(2 * a, a, b, (), ())):
        found = quantised.few_product(x, held.held, stack, bias, parts)
        whole = x @ held.whole().t() + (bias if parts == 1 else 0)
        assert found.shape == ((rows, outputs) if parts == 1 else (parts, rows, outputs))
        close(found if parts == 1 else found.sum(0), onto(whole, x, stack))


RULES = [(None, 1.0, 0.0), (3, 1.0, 0.0), (None, 0.9, 0.0), (None, 1.0, 0.05), (400, 0.8, 1e-3)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_draws_of_what_a_rule_leaves(rule: tuple[int | None, float, float], temperature: float) -> None:
    """Of a vocabulary of two pieces, as `rollout.sampling.draw` draws it; −∞ is never drawn."""
    rows, vocabulary, (top_k, top_p, min_p) = 6, sample.PIECE + 100, rule
    logits = (3 * torch.randn(rows, vocabulary)).masked_fill_(torch.rand(rows, vocabulary) < 0.1, -torch.inf)
    state, record = sample.State.empty(rows, 64, "cpu"), sample.Record.empty(3, rows, "cpu", cuts=True)
    state.stream.copy_(stream(torch.arange(rows)))
    for column, value in ((state.position, 5), (state.start, 4), (state.limit, 40)):
        column.fill_(value)
    heat = torch.full((rows,), temperature)
    uniform = uniforms(state.stream, state.position + 1)
    wanted = draw(logits, uniform, Sampling(top_k=top_k, top_p=top_p, min_p=min_p), heat, None, entropy=True)
    stops, given = torch.zeros(vocabulary, dtype=torch.bool), cut.Rule.empty("cpu").set(top_k, top_p, min_p)
    stops[wanted.action[0]] = True
    table = torch.full((65,), temperature)
    sample.draw_and_move(logits.clone(), table, stops, state, record, STOP, LENGTH, given)
    assert torch.equal(record.action[0], wanted.action)
    assert torch.equal(state.status, stops[wanted.action] * STOP)
    assert torch.equal(state.history[:, 6], wanted.action)
    assert wanted.entropy is not None
    for found, true in ((record.logp, wanted.logp), (record.entropy, wanted.entropy)):
        close(found[0], true, 1e-4)
    if wanted.cut is not None and wanted.kept is not None and wanted.allowed is not None:
        torch.testing.assert_close(record.cut[0], wanted.cut, atol=1e-4, rtol=1e-5)
        close(record.kept[0], wanted.kept)
        lists = [ids[:n].tolist() for ids, n in zip(record.ids[0], record.count[0].tolist(), strict=True)]
        short = [ids if len(ids) <= LISTED else [] for ids in wanted.allowed.tolist()]
        assert [sorted(ids) for ids in lists] == short


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_products_with_a_weight_for_each_expert(tokens: int, limit: float) -> None:
    """Values and slopes of pairs that are listed in order, and of few tokens that one kernel lists."""
    many, chosen, width, inner = 5, 2, 40, 24
    x, up = torch.randn(tokens, width), torch.randn(many, 2 * inner, width)
    down, up_bias = torch.randn(many, width, inner), torch.randn(many, 2 * inner)
    logits = torch.randn(tokens, many)
    top, which = logits.topk(chosen)
    scale, pairs = top.softmax(1).t().flatten(), chosen * tokens
    leaves = [leaf.requires_grad_() for leaf in (x, up, down, scale)]
    owner, expert = torch.arange(tokens).repeat(chosen), which.t().flatten()
    both = torch.einsum("pw,pow->po", x[owner], up[expert]) + up_bias[expert]
    gate, other = both.chunk(2, dim=1)
    if limit:
        gate, other = gate.clamp(max=limit), other.clamp(-limit, limit) + 1
    wide = scale[:, None] * gate * torch.sigmoid(1.7 * gate) * other
    out = torch.einsum("pi,pwi->pw", wide, down[expert])
    slope = torch.randn_like(out)
    on_x, on_up, on_down, on_scale = torch.autograd.grad(out, leaves, slope)

    with torch.no_grad():
        room = experts.Table.of(tokens, chosen, many, "cpu")
        shares, quick = experts.choose(logits, chosen, True, room)
        close(shares, scale)
        plan = experts.plan(which.t(), many)
        for listed in (plan, quick):
            mixed = experts.product(x, up, up_bias, listed, pairs)
            close(mixed, both)
            gated = experts.gated(mixed, scale, 1.7, limit)
            close(gated, wide)
            close(experts.product(gated, down, None, listed, pairs), out)
        steep = experts.product(slope, down.transpose(1, 2), None, plan, pairs)
        again, on_both, g_scale = experts.gated_back(mixed, scale, steep, 1.7, limit)
        close(again, wide)
        close(g_scale, on_scale)
        close(experts.slope(slope, wide, plan, down), on_down)
        close(experts.slope(on_both, x, plan, up), on_up)
        back = experts.product(on_both, up.transpose(1, 2), None, plan, pairs)
        close(back.view(chosen, tokens, width).sum(0), on_x)
