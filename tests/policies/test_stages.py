"""Policies that change with time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.worlds.control.world import Box, Discrete


def staged(hidden: tuple[int, ...] = (5,)) -> ControlPolicy:
    """Three networks: what it was for turn 0, what it was for turn 1, and what it is."""
    spec = PolicySpec(hidden=hidden, head="values", atoms=1, stages=4)
    policy = ControlPolicy.fresh(Box((3,)), Discrete(2), spec)
    for turn in (0, 1, None):
        with torch.no_grad():
            for _, weight in policy.named_parameters():
                weight.normal_(generator=torch.Generator().manual_seed(7 if turn is None else turn))
        if turn is not None:
            assert policy.model.stages is not None
            policy.model.stages.freeze(turn)
    return policy


@pytest.mark.parametrize("hidden", [(), (5,)])
def test_every_turn_has_its_own_network(hidden: tuple[int, ...]) -> None:
    policy, seen = staged(hidden), torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    turn = torch.tensor([0, 1, 2, 3, 1, 0])
    found = policy.model(seen, turn)
    stages = policy.model.stages
    assert stages is not None
    for row in range(6):
        alone = policy.model.layers.through(seen[row : row + 1], stages.at(int(turn[row])))
        torch.testing.assert_close(found[row], alone[0])
    torch.testing.assert_close(found[2], policy.model(seen)[2])
    assert not torch.allclose(found[0], policy.model(seen)[0])
    assert not torch.allclose(found[1], policy.model(seen, turn.roll(1))[1])
    acts = policy.model.numpy()
    np.testing.assert_allclose(acts(seen.numpy(), turn.numpy()), found.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        acts(seen.numpy(), np.ones(6, int)),
        policy.model(seen, torch.ones(6, dtype=torch.long)).detach().numpy(),
        atol=1e-6,
    )


def test_stages_are_saved_and_do_not_learn(tmp_path: Path) -> None:
    policy = staged()
    policy.save(tmp_path / "model")
    again = ControlPolicy.load(tmp_path / "model")
    assert again.fingerprint() == policy.fingerprint()
    seen, turn = torch.ones(3, 3), torch.tensor([0, 1, 2])
    assert torch.equal(again.model(seen, turn), policy.model(seen, turn))
    assert all("stages" not in name for name, _ in policy.named_parameters())
    copied = policy.copy()
    with torch.no_grad():
        for _, weight in policy.named_parameters():
            weight.zero_()
    assert torch.equal(policy.model(seen, turn)[:2], again.model(seen, turn)[:2])
    assert torch.equal(copied.model(seen, turn), again.model(seen, turn)), "a copy does not follow"
