"""A frozen base in few bits: what adapters are added to, and merged with."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from test_low_rank import DATA, LAYOUTS, fresh, gradients, move

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.lora import BYTES, Lora
from panoply.policies import low_rank
from panoply.policies.lora import add_lora, begun_with, open_adapted
from panoply.policies.quantised import Quantised, QuantisedLinear, join, levels
from panoply.rollout.graphs import has_kernels

Kind = Literal["nf4", "int8"]
KINDS: list[Kind] = ["nf4", "int8"]


def test_levels_are_where_normal_numbers_are_equally_often() -> None:
    """As published: −1, 0 and 1 among them, and the neighbours of the ends where the paper has them."""
    there = levels()
    assert len(there) == 16
    assert there.tolist() == sorted(there.tolist())
    assert there[[0, 7, 15]].tolist() == [-1, 0, 1]
    torch.testing.assert_close(there[[1, 14]], torch.tensor([-0.6961928, 0.7229568]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_at_its_nearest_level(kind: Kind) -> None:
    whole = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))  # the last block is cut
    found = Quantised(whole, kind)
    blocks = torch.nn.functional.pad(whole.flatten(), (0, -700 % 64)).view(-1, 64)
    there = levels() if kind == "nf4" else torch.arange(-127, 128) / 127
    choices = blocks.abs().amax(1, keepdim=True)[..., None] * there
    nearest = (choices - blocks[..., None]).abs().min(-1).values.flatten()[:700].view(7, 100)
    torch.testing.assert_close((found.whole() - whole).abs(), nearest, rtol=1e-4, atol=1e-6)
    assert found.nbytes == pytest.approx(BYTES[kind] * 768)
    assert torch.equal(Quantised(torch.zeros(64), kind).whole(), torch.zeros(64))
    assert found.whole().dtype == whole.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_joined_once_and_stay_what_they_were(kind: Kind) -> None:
    parts = [
        Quantised(torch.randn(n, 256, generator=torch.Generator().manual_seed(n)), kind) for n in (4, 1, 3)
    ]
    before = torch.cat([part.whole() for part in parts])
    whole, again = join(parts), join(parts)
    assert whole is not None
    assert again is not None
    assert torch.equal(whole.whole(), before)
    assert torch.equal(torch.cat([part.whole() for part in parts]), before)
    assert whole.codes.data_ptr() == again.codes.data_ptr() == parts[0].codes.data_ptr()
    assert whole.scales.data_ptr() == again.scales.data_ptr()
    assert parts[2].scales.untyped_storage().data_ptr() == whole.scales.untyped_storage().data_ptr()
    fewer = join(parts[:2])
    assert fewer is not None
    assert torch.equal(fewer.whole(), before[:5])
    assert join([Quantised(torch.randn(2, 192), kind)]) is None  # a row would begin within a pair of blocks


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_again_nothing_changes(kind: Kind) -> None:
    once = Quantised(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), kind).whole()
    torch.testing.assert_close(Quantised(once, kind).whole(), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_begins_as_its_quantised_base_says_and_returns_to_it(kind: Kind) -> None:
    plain = fresh()
    policy = add_lora(fresh(), 4, settings=Lora(base=kind))
    before = begun_with(policy)
    assert before is not None
    first = policy.score(DATA)["logp"].detach()
    torch.testing.assert_close(before.score(DATA)["logp"], first, rtol=1e-9, atol=1e-9)
    apart = float((plain.score(DATA)["logp"] - first).detach().abs().max())
    assert 1e-4 < apart < (2.0 if kind == "nf4" else 0.2)
    move(policy)
    assert not torch.allclose(policy.score(DATA)["logp"], first)
    torch.testing.assert_close(before.score(DATA)["logp"], first, rtol=1e-9, atol=1e-9)
    for _, layer in low_rank.adapters(policy.model):
        assert isinstance(layer.origin.layer, QuantisedLinear)
        layer.lora_B.data.zero_()
    low_rank.merge(policy.model)
    torch.testing.assert_close(policy.score(DATA)["logp"], first, rtol=1e-9, atol=1e-9)


def test_its_factors_learn_as_those_on_whole_weights_of_the_same_numbers() -> None:
    few = add_lora(fresh(), 4, settings=Lora(base="nf4"))
    same = fresh()
    weights = low_rank.plain_weights(few.model)
    same.model.load_state_dict(weights)
    whole = add_lora(same, 4)
    slopes = []
    for policy in (few, whole):
        move(policy)
        learning = [p for p in policy.parameters() if p.requires_grad]
        slopes.append(torch.autograd.grad(policy.score(DATA)["logp"].square().sum(), learning))
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)


def test_what_is_kept_of_it_is_counted_and_shared_by_copies() -> None:
    policy = add_lora(fresh(), 4, settings=Lora(base="nf4"))
    copied = policy.copy()
    for (_, a), (_, b) in zip(low_rank.adapters(policy.model), low_rank.adapters(copied.model), strict=True):
        assert a.origin.layer is b.origin.layer
    few, whole = (
        cost(pp.plan("grpo", model="fresh", lora=4, dtype="bfloat16", settings=settings)).memory_bytes
        for settings in ({"lora.base": "nf4"}, {})
    )
    layers = whole["adapted layers as they were"]
    assert few["adapted layers in few bits"] == int(layers / 2 * BYTES["nf4"])
    assert few["weights"] == whole["weights"] - layers


def test_it_goes_to_a_device_a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are to be in few bits need not fit there whole; `meta` stands for a GPU."""
    made, there = low_rank.QuantisedLinear, torch.device("meta")

    def alone(layer: torch.nn.Linear, kind: Kind) -> QuantisedLinear:
        whole = [one for one in policy.model.modules() if isinstance(one, torch.nn.Linear)]
        assert [one for one in whole if one.weight.is_meta] == [layer]
        return made(layer, kind)

    monkeypatch.setattr(low_rank, "QuantisedLinear", alone)
    policy = fresh()
    base = low_rank.adapt(policy.model, *_all_layers(policy), "nf4", there)
    for model in (policy.model, base):
        assert all(p.is_meta for p in model.parameters())
    for _, layer in low_rank.adapters(policy.model):
        assert layer.origin.layer.held.codes.is_meta


@pytest.mark.parametrize("kind", ["whole", "nf4"])
def test_what_is_to_be_in_few_bits_is_opened_on_the_host(kind: Literal["whole", "nf4"]) -> None:
    asked = []

    def opened(_: str, host: bool) -> Any:
        asked.append(host)
        return fresh()

    open_adapted(opened, "fresh", None, 4, 0, Lora(base=kind), torch.device("cpu"))
    assert asked == [kind == "nf4"]


def _all_layers(policy: Any) -> tuple[dict[str, int], dict[str, float]]:
    names = [name for name, _ in policy.model.named_modules() if name.endswith("_proj")]
    return dict.fromkeys(names, 2), dict.fromkeys(names, 1.0)


def test_no_weight_is_held_whole_and_all_are_when_asked_for() -> None:
    policy = add_lora(fresh(), 4, settings=Lora(base="nf4"))
    move(policy)
    held = {name for name, _ in policy.named_parameters() if "_proj" in name}
    assert held
    assert all(name.endswith(("lora_A", "lora_B", "bias")) for name in held)
    plain = fresh()
    plain.model.load_state_dict(low_rank.plain_weights(policy.model))
    torch.testing.assert_close(plain.score(DATA)["logp"], policy.score(DATA)["logp"], rtol=1e-9, atol=1e-9)
    copied = policy.copy()
    before = copied.score(DATA)["logp"].detach()
    move(policy, 2)
    assert torch.equal(copied.score(DATA)["logp"], before)


@pytest.mark.parametrize("fusing", [True, False])
@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj"), ("up_proj",)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_few_bits_are_those_of_the_weights_they_stand_for(
    layout: str, targets: tuple[str, ...], fusing: bool
) -> None:
    """Layers of a joined product may be of either kind; slopes reach inputs as well as factors."""
    few, whole = fresh(**LAYOUTS[layout]), fresh(**LAYOUTS[layout])
    few = add_lora(few, 4, settings=Lora(base="int8", target_modules=targets))
    whole.model.load_state_dict(low_rank.plain_weights(few.model))
    whole = add_lora(whole, 4, settings=Lora(target_modules=targets))
    found = []
    for policy in (few, whole):
        policy.model.fusing = fusing
        move(policy)
        found.append(gradients(policy))
    assert found[0].keys() == found[1].keys()
    for name, slope in found[0].items():
        torch.testing.assert_close(slope, found[1][name], rtol=1e-7, atol=1e-10, msg=name)


def test_what_a_quantised_base_is_not_for() -> None:
    with pytest.raises(PanoplyError, match=r"lora\.base=nf4 is not for DoRA"):
        Lora(base="nf4", dora=True)
    with pytest.raises(PanoplyError, match=r"lora\.base has no effect without adapters"):
        pp.plan("grpo", model="fresh", settings={"lora.base": "nf4"})
    with pytest.raises(PanoplyError, match=r"lora\.base"):
        pp.plan("grpo", model="fresh", lora=4, settings={"lora.base": "int3"})
    before = begun_with(add_lora(fresh(), 4, settings=Lora(base="int8")))
    assert before is not None
    assert has_kernels(before.model)
