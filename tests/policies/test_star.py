"""One network for all stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.progress import Progress
from panoply.worlds.control.world import Box, Discrete

SPEC = PolicySpec(hidden=(6, 4), activation="elu", head="certain", shared=True)


def policy(nodes: int = 3, hub: int = 1) -> ControlPolicy:
    seen = Box((nodes * 2 + 5,), nodes=(nodes, 2))
    made = ControlPolicy.fresh(
        seen, Box((nodes + hub,), (0.0,) * (nodes + hub), (9.0,) * (nodes + hub)), SPEC
    )
    with torch.no_grad():
        for number, (_, weight) in enumerate(made.named_parameters()):
            weight.normal_(generator=torch.Generator().manual_seed(number))
    return made


def test_the_order_of_nodes_does_not_matter() -> None:
    seen = torch.randn(4, 11, generator=torch.Generator().manual_seed(0))
    made, turned = policy(), [2, 0, 1]
    rows = seen[:, :6].view(4, 3, 2)[:, turned].reshape(4, 6)
    found, other = made.model(seen), made.model(torch.cat([rows, seen[:, 6:]], 1))
    torch.testing.assert_close(other[:, :3], found[:, turned])
    torch.testing.assert_close(other[:, 3], found[:, 3])
    assert not torch.allclose(found[:, 0], found[:, 1])


def test_a_node_hears_of_the_others_and_of_the_hub() -> None:
    made, seen = policy(), torch.zeros(1, 11, requires_grad=True)
    (gradient,) = torch.autograd.grad(made.model(seen)[0, 0], seen)
    assert (gradient[0, 2:6] != 0).any()
    assert (gradient[0, 6:] != 0).any()


def test_as_many_weights_for_any_number_of_nodes() -> None:
    few, many = (
        {name: p.shape for name, p in policy(nodes).named_parameters() if "bias" in name or "layers" in name}
        for nodes in (2, 30)
    )
    assert few == many


@pytest.mark.parametrize("hub", [0, 1])
def test_arrays_and_folders(hub: int, tmp_path: Path) -> None:
    made, seen = policy(hub=hub), torch.randn(4, 11, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = made.model(seen).numpy()
    acted = made.model.numpy()(seen.numpy(), np.zeros(4, int))
    np.testing.assert_allclose(acted, found, rtol=1e-5, atol=1e-6)
    made.save(tmp_path)
    assert ControlPolicy.load(tmp_path).fingerprint() == made.fingerprint()


def test_it_is_trained_through_a_network_of_stores(tmp_path: Path) -> None:
    settings = {"world.stores": 10, "world.warehouse": True, "world.horizon": 12, "policy.shared": True}
    settings |= {"data.batch": 8, "run.steps": 3, "run.held_out": 4, "run.evaluate_every": 0}
    done = pp.train(
        "hdpo", "inventory", run=tmp_path / "run", threads=1, settings=settings, progress=Progress()
    )
    assert done.after["greedy"] > done.before["greedy"]


def test_refused() -> None:
    with pytest.raises(PanoplyError, match="policy.shared is for things of one kind"):
        ControlPolicy.fresh(Box((3,)), Discrete(2), PolicySpec(shared=True))
