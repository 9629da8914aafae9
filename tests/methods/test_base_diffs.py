"""What holds for all the base methods that are diffs of GRPO and DPO."""

from __future__ import annotations

import pytest
import torch
from kit import Slow, Tabular, assert_same, gradient, ragged, shuffled
from papers import ZERO, paired

from panoply import registry
from panoply.compose import method_from_json, resolve
from panoply.experience import Experience
from panoply.regimes import Dataset, OnPolicy

ON_POLICY = ["rloo", "reinforce++", "dr-grpo", "dapo", "gspo", "cispo", "sapo", "vespo"]
GIVEN = ["ipo", "slic", "kto", "orpo", "simpo"]
GIVEN += [
    "robust-dpo",
    "exo",
    "nca",
    "bco",
    "apo-zero",
    "apo-down",
    "discopop",
    "sppo-hard",
    "aot",
    "aot-unpaired",
]
NAMES = [*ON_POLICY, "luspo", "online-dpo", *GIVEN]


def built(name: str) -> OnPolicy | Dataset:
    method = resolve(name).method
    assert isinstance(method, OnPolicy | Dataset)
    return method


def batch_for(name: str) -> Experience:
    made = paired()
    label = torch.tensor([1, -1, 0, -1, 1, 0, 1, 1, 0, -1])[made.by("episode").index]
    return made.with_columns(label=label)


@pytest.mark.parametrize("name", NAMES)
def test_split_and_order_do_not_matter(name: str) -> None:
    method, made = built(name), batch_for(name)
    whole = gradient(method, made)
    assert_same(gradient(method, made, micro_tokens=1), whole)
    assert_same(gradient(method, made, micro_tokens=9), whole)
    assert_same(gradient(method, shuffled(made), micro_tokens=5), whole)


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_the_policys_own_rows_it_is_reinforce(name: str) -> None:
    """At ratio 1 the gradient is A·∇log π, averaged as the method averages."""
    method = built(name)
    made = ragged()
    with torch.no_grad():
        made = made.with_columns(logp=Tabular().score(made)["logp"])
    weight = method.slots()["reduce"](made, torch.ones(len(made), dtype=torch.bool))  # type: ignore[operator]
    slow, loss = Slow(), ZERO
    columns = (made["state"], made["action"], made["advantage"], weight)
    for state, action, advantage, share in zip(*(c.tolist() for c in columns), strict=True):
        loss = loss - share * advantage * slow.logp(state, action)
    assert_same(gradient(method, made), slow.gradient(loss), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_diff_of_its_base(name: str) -> None:
    entry = registry.find("method", name)
    assert entry.base is not None
    base, method = resolve(entry.base).method, built(name)
    assert method.regime == base.regime
    changed = {path.split(".")[0] for path, _, _ in method.diff(base)}
    assert changed
    assert changed < set(method.slot_of), "at least one slot is the base's"
    assert method_from_json(method.to_json()) == method
    assert "arXiv" in entry.doc
    assert "tiny" in entry.presets
