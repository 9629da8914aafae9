"""Policies that change with time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.worlds.control.world import Box, Discrete

SEEN = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def staged(hidden: tuple[int, ...] = (5,)) -> tuple[ControlPolicy, list[torch.Tensor]]:
    """Three networks: what it was for turn 0, what it was for turn 1, and what it is; and what each said."""
    spec = PolicySpec(hidden=hidden, head="values", atoms=1, stages=4)
    policy = ControlPolicy.fresh(Box((3,)), Discrete(2), spec)
    stages, said = policy.model.stages, []
    assert stages is not None
    for turn in range(3):
        with torch.no_grad():
            for _, weight in policy.named_parameters():
                weight.normal_(generator=torch.Generator().manual_seed(turn))
            said.append(policy.model(SEEN))
        if turn < 2:
            stages.freeze(turn)
    return policy, said


@pytest.mark.parametrize("hidden", [(), (5,)])
def test_every_turn_has_its_own_network(hidden: tuple[int, ...]) -> None:
    policy, said = staged(hidden)
    turn = torch.tensor([0, 1, 2, 3, 1, 0])
    wanted = torch.stack([said[min(t, 2)][row] for row, t in enumerate(turn.tolist())])
    torch.testing.assert_close(policy.model(SEEN, turn), wanted)
    acts = policy.model.numpy()
    np.testing.assert_allclose(acts(SEEN.numpy(), turn.numpy()), wanted.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(acts(SEEN.numpy(), np.ones(6, int)), said[1].numpy(), rtol=1e-5, atol=1e-6)


def test_stages_are_saved_and_do_not_learn(tmp_path: Path) -> None:
    policy, _ = staged()
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
