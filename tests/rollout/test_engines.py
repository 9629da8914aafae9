"""Engines: what they lack is refused, and one with weights of its own has those of the step."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from panoply import registry
from panoply.errors import PanoplyError
from panoply.policies.build import open_policy
from panoply.policies.moving import checksum, moving
from panoply.policies.text import TextPolicy
from panoply.rollout import engines
from panoply.rollout.engine import STEADY, TextEngine
from panoply.rollout.text import Collector
from panoply.worlds.text.chain import Chain


class Elsewhere(TextEngine):
    """An engine as others are: with a copy of the weights, and less to say."""

    lacks: ClassVar[frozenset[str]] = frozenset(engines.LACKING) - {"turns"}
    version = -1
    given: ClassVar[list[int]] = []
    lost = ""

    @classmethod
    def of(cls, policy: TextPolicy, **options: Any) -> Elsewhere:
        made = cls(policy.copy().model, policy.tokenizer, **options)
        made.own, made.model = made.model, policy.model
        return made

    def generate(self, *args: Any, **more: Any) -> Any:
        policys, self.model = self.model, self.own
        try:
            return super().generate(*args, **more)
        finally:
            self.model = policys

    def publish(self, weights: Any, version: int) -> str:
        self.version = version
        self.given.append(version)
        arrived = {name: weight for name, weight in weights.items() if name != self.lost}
        policys, self.model = self.model, self.own
        super().publish(arrived, version)
        self.model = policys
        return checksum({name: dict(self.own.state_dict())[name] for name in weights})


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> type[Elsewhere]:
    monkeypatch.setitem(engines.ENGINES, "elsewhere", f"{__name__}:Elsewhere")
    monkeypatch.setattr(engines, "kind", lambda name: Elsewhere if name == "elsewhere" else TextEngine)
    Elsewhere.given.clear()
    return Elsewhere


def _moved(policy: TextPolicy) -> None:
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.ones_like(weight))


def test_an_engine_with_weights_of_its_own_is_given_those_of_every_step(elsewhere: type[Elsewhere]) -> None:
    world = Chain()
    policy = open_policy("start", world, 0, "cpu")
    there, here = (Collector(world, policy, 0, engine=name) for name in ("elsewhere", "native"))
    for version in (0, 0, 1):
        there.version = here.version = version
        first, second = (c.episodes(c.tasks(2), 2) for c in (there, here))
        assert torch.equal(first["action"], second["action"])
        assert torch.equal(first["logp"], second["logp"])
        assert "entropy" not in first, "absent, not zeros"
        assert "entropy" in second
        if here.state["tasks"] == 4:
            _moved(policy)
    assert elsewhere.given == [0, 1], "once a step"


def test_weights_that_did_not_arrive_are_noticed(
    elsewhere: type[Elsewhere], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Chain()
    policy = open_policy("start", world, 0, "cpu")
    collect = Collector(world, policy, 0, engine="elsewhere")
    monkeypatch.setattr(Elsewhere, "lost", next(name for name, _ in policy.named_parameters()))
    _moved(policy)
    with pytest.raises(PanoplyError, match="other weights"):
        collect.episodes(collect.tasks(1))


def test_a_checksum_changes_with_any_bit_place_or_name() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)}
    found = {checksum(weights)}
    found.add(checksum({**weights, "b": torch.tensor([0.0, -0.0, 0.0], dtype=torch.bfloat16)}))
    found.add(checksum({**weights, "a": weights["a"].flip(0)}))
    found.add(checksum({**weights, "a": weights["a"].view(3, 2)}))
    found.add(checksum({"a": weights["a"], "c": weights["b"]}))
    assert len(found) == 5
    assert checksum(dict(reversed(weights.items()))) in found
    assert len(found) == 5


def test_what_travels_of_a_model_with_adapters_are_the_adapters() -> None:
    from panoply.lora import Lora
    from panoply.policies.lora import open_adapted

    world = Chain()
    adapted = open_adapted(
        lambda source, _: open_policy(source, world, 0, "cpu"), "start", None, 2, 0, Lora()
    )
    names = {name for name, _ in adapted.named_parameters()}
    sent = moving(adapted)
    assert sent
    assert all("lora_" in name for name in sent if name in names)


REFUSED = {
    "keydoor complete": ("grpo", "keydoor", "complete"),
    "hapo heat": ("hapo", "chain", "how sure"),
    "top_p": ("ppo-max-alone", "chain", "sample.top_p"),
    "vectors": ("hrpo", "chain", "vectors"),
    "selves": ("impala", "chain", "beside the learner"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_an_engine_lacks_is_refused_with_the_reason(
    elsewhere: type[Elsewhere], case: tuple[str, str, str]
) -> None:
    method, world, why = case
    made = registry.find("method", method).build(), registry.find("world", world).build()
    with pytest.raises(PanoplyError, match=rf"run.engine cannot be elsewhere: .*({why})"):
        engines.check("elsewhere", *made)
    engines.check("native", *made)


def test_an_engine_that_is_none() -> None:
    with pytest.raises(PanoplyError, match="native"):
        engines.kind("nativ")


@pytest.mark.parametrize("world", ["keydoor", "tools"])
def test_where_no_product_is_of_few_rows_an_episode_is_the_same_in_whatever_company(world: str) -> None:
    made = registry.find("world", world).build()
    policy = open_policy("start", made, 0, "cpu")

    def played(groups: range) -> dict[str, torch.Tensor]:
        collect = Collector(made, policy, 0)
        collect._engine = TextEngine(policy.model, policy.tokenizer, least=STEADY)
        collect.state["episodes"] = 4 * groups.start
        found = collect.episodes(collect.numbered(groups), 4)
        return {name: found[name] for name in ("action", "logp", "entropy")}

    whole = played(range(8))
    shares = [played(groups) for groups in (range(3), range(3, 4), range(4, 8))]
    for name, column in whole.items():
        assert torch.equal(column, torch.cat([share[name] for share in shares])), f"to the last bit of {name}"
