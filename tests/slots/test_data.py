"""Data parts and sampling on the smallest text world."""

from __future__ import annotations

import pytest
import torch

from panoply.experience import DEMONSTRATION, OWN, TERMINATED, TRUNCATED
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.slots.data.teacher import demonstrations, teacher_pairs
from panoply.slots.sample.groups import groups
from panoply.worlds.text.chain import Chain


@pytest.fixture
def collector() -> Collector:
    world = Chain(operations=2, slip=0.7)
    config = DecoderConfig(**{**world.default_model(), "width": 16, "layers": 1, "heads": 2, "inner": 16})
    return Collector(world, TextPolicy.fresh(config, world.tokenizer), seed=0)


def test_demonstrations(collector: Collector) -> None:
    made = demonstrations(batch=6)(collector)
    episodes = made.by("episode")
    assert len(episodes) == 6
    assert (made["source"] == DEMONSTRATION).all()
    assert "logp" not in made, "no policy of ours took these decisions"
    assert episodes.last(made["end"]).tolist() == [TERMINATED] * 6
    tokens = made.context.ragged("tokens")
    for row, position, action in zip(made["context"], made["position"], made["action"], strict=True):
        assert tokens[int(row)][int(position)] == action
    assert set(made["episode"].tolist()).isdisjoint(demonstrations(batch=6)(collector)["episode"].tolist())


def test_teacher_pairs(collector: Collector) -> None:
    made = teacher_pairs(batch=12)(collector)
    assert made.pairs is not None
    episodes = made.by("episode")
    success = dict(zip(episodes.keys.tolist(), episodes.sum(made["signal:success"]).tolist(), strict=True))
    task = dict(zip(episodes.keys.tolist(), episodes.first(made["task"]).tolist(), strict=True))
    assert 0 < made.pairs.rows <= 12
    for chosen, rejected in zip(
        made.pairs.tensor("chosen").tolist(), made.pairs.tensor("rejected").tolist(), strict=True
    ):
        assert (success[chosen], success[rejected]) == (1.0, 0.0)
        assert task[chosen] == task[rejected]


def test_groups(collector: Collector) -> None:
    made = groups(prompts=3, group=4, max_tokens=5)(collector)
    episodes = made.by("episode")
    assert (len(episodes), len(made.by("group")), len(made.by("task"))) == (12, 3, 3)
    assert made.by("group").keys.tolist() == [0, 1, 2]
    assert (made["source"] == OWN).all()
    assert int(episodes.count.max()) <= 5
    assert set(episodes.last(made["end"]).tolist()) <= {TERMINATED, TRUNCATED}
    with torch.no_grad():
        scored = collector.policy.score(made)["logp"]
    torch.testing.assert_close(made["logp"].to(scored.dtype), scored, atol=1e-5, rtol=0)
