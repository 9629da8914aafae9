"""Critics and reward models: what they read, that they start at zero, saving, and that they learn an order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from panoply.errors import PanoplyError
from panoply.policies.text import TextPolicy
from panoply.policies.value import ValueModel
from panoply.rollout.text import Collector


@pytest.fixture
def model(tiny_collector: Collector) -> ValueModel:
    found = ValueModel.of(tiny_collector.policy.copy())
    torch.nn.init.normal_(found.head.weight, generator=torch.Generator().manual_seed(0))
    return found


def test_values_are_of_the_state_before_and_judgements_of_the_end(
    tiny_collector: Collector, model: ValueModel
) -> None:
    rows = tiny_collector.episodes(tiny_collector.tasks(3), 2)
    values, judged = model.score(rows)["value"], model.score(rows, frozenset({"judged"}))["judged"]
    tokens = rows.context.ragged("tokens")
    for episode in range(6):
        mine = rows["episode"] == episode
        context = int(rows["context"][mine][0])
        whole = tokens[context][None]
        states = model.trunk.model.hidden(whole, torch.arange(whole.shape[1])[None])[0]
        before = rows["position"][mine] - 1
        torch.testing.assert_close(values[mine], model.head(states[before])[:, 0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(judged[episode], model.head(states[-1])[0], atol=1e-5, rtol=1e-5)


def test_it_starts_at_zero_and_saves_and_loads(
    tiny_collector: Collector, model: ValueModel, tmp_path: Path
) -> None:
    rows = tiny_collector.episodes(tiny_collector.tasks(2))
    fresh = ValueModel.of(tiny_collector.policy.copy())
    assert float(fresh.score(rows)["value"].detach().abs().max()) == 0
    model.save(tmp_path / "value")
    again = ValueModel.load(tmp_path / "value")
    torch.testing.assert_close(again.score(rows)["value"], model.score(rows)["value"])
    fresh.load_weights(tmp_path / "value")
    assert fresh.fingerprint() == model.fingerprint() == again.fingerprint()


def test_a_policy_is_not_a_value_model(tiny_collector: Collector, tmp_path: Path) -> None:
    tiny_collector.policy.save(tmp_path / "policy")
    with pytest.raises(PanoplyError, match="is not a reward model or critic"):
        ValueModel.load(tmp_path / "policy")
    assert TextPolicy.load(tmp_path / "policy").context_length
