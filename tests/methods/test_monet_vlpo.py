"""Monet and VLPO: vectors are forced where they stand, scored by the stored draw, regressed on a teacher's states."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged
from panoply.methods.reasoning_data.monet_vlpo import answered, imagined, within_reach
from panoply.policies.text import TextPolicy
from panoply.policies.thoughts import Latent
from panoply.rollout.text import Collector
from panoply.worlds.text.grids import Grids

WORLD = Grids()
START = Path(__file__).parents[2] / "panoply/assets/grids-start"
WORDS = {"first": "<", "blank": "_", "last": ">"}


def looking(**settings: Any) -> TextPolicy:
    policy = TextPolicy.load(START)
    policy.think(Latent(64, **{**WORDS, "count": 4, "sigma": 2.0, **settings}))
    return policy


def asked(policy: TextPolicy, **settings: Any) -> Experience:
    collect = Collector(WORLD, policy, 0)
    return collect.episodes(collect.tasks(3), 4, **settings)


def rows_of(found: Experience) -> torch.Tensor:
    return found["action"] == WORLD.tokenizer.id("_")


# ------------------------------------------------------------------ vectors


def test_vectors_stand_after_the_first_token_and_are_ended() -> None:
    found = asked(looking(), temperature=1.5)
    tokens, shared = found.context.ragged("tokens").tolist(), found.context.tensor("shared").tolist()
    said = [WORLD.text(row[n:]) for row, n in zip(tokens, shared, strict=True)]
    assert any(text.startswith("<____>") for text in said)
    for text in said:
        for at, character in enumerate(text):
            before = text[:at].rfind("<")
            since = at - before - 1 if before >= 0 else 99
            assert (character == "_") == (since < 4), text
            assert (character == ">") == (since == 4), text


def test_a_latents_density_is_scored_with_the_stored_draw() -> None:
    """With noise ε·η the sampled log-density is −‖ε·η‖²/(2σ²), and the scorer's is of the same z: the ratio is 1."""
    policy = looking(noise=0.3)
    found = asked(policy)
    now = policy.score(found, frozenset({"entropy"}))
    vectors = rows_of(found)
    assert float((now["logp"] - found["logp"]).detach().abs().max()) < 1e-3
    assert bool((found["entropy"][vectors] == 0).all())
    drawn = -8 * found["logp"][vectors]  # ‖z − h‖², of 64 numbers of variance 0.09
    assert float(drawn.mean()) == pytest.approx(64 * 0.09, rel=0.15)
    states = policy.states(found)[vectors]
    z = found.context.ragged("vectors").values
    expected = -(z - states).square().sum(-1) / 8
    assert torch.allclose(now["logp"][vectors], expected, atol=1e-3)


def test_without_noise_the_first_gradient_is_nothing_and_the_next_holds_h() -> None:
    policy = looking(sigma=3.0)
    found = asked(policy)
    vectors = rows_of(found)
    logp = policy.score(found)["logp"][vectors]
    assert float(logp.detach().abs().max()) < 1e-6, "z is h"
    logp.sum().backward()
    assert max(float(p.grad.abs().max()) for p in policy.parameters() if p.grad is not None) < 1e-4
    before = policy.states(found)[vectors].detach()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.02)
        after, moved = policy.states(found)[vectors], policy.score(found)["logp"][vectors]
    assert torch.allclose(moved, -(before - after).square().sum(-1) / 18, atol=1e-4)
    assert bool((moved < 0).all()), "the ratio is at most 1"


def test_for_grpo_vectors_are_no_choice() -> None:
    policy = looking(learns=False)
    found = asked(policy)
    vectors = rows_of(found)
    assert bool((found["logp"][vectors] == 0).all())
    assert bool((policy.score(found)["logp"][vectors].detach().abs() < 1e-6).all())
    assert float((policy.score(found)["logp"] - found["logp"]).detach().abs().max()) < 1e-4


def test_what_vectors_carry_is_told_by_reading_zeros_in_their_place() -> None:
    policy = looking()
    found = asked(policy)
    tokens, full = ~rows_of(found), policy.score(found)["logp"].detach()
    vectors = found.context.ragged("vectors")
    zeros = Ragged(torch.zeros_like(vectors.values), vectors.offsets)
    without = dataclasses.replace(found, context=found.context.plus({"vectors": zeros}))
    assert policy.thoughts is not None
    policy.thoughts.empty = True
    emptied = policy.score(found)["logp"].detach()
    policy.thoughts.empty = False
    assert torch.allclose(emptied[tokens], policy.score(without)["logp"].detach()[tokens], atol=1e-6)
    assert float((emptied - full)[tokens].abs().max()) > 1e-2
    assert WORLD.measure("thoughtless", policy) != WORLD.measure("success", policy)
    assert not policy.thoughts.empty


# ------------------------------------------------------------------ imitation, reward, selection


def test_vectors_are_the_states_in_which_a_teacher_would_write() -> None:
    collect = Collector(WORLD, TextPolicy.load(START), 0)
    found = imagined(batch=3, count=4, sigma=2.0)(collect)
    plain = Collector(WORLD, TextPolicy.load(START), 0)
    told = plain.demonstrations(plain.tasks(3))
    vectors = rows_of(found)
    assert vectors.view(3, 8).tolist() == [[False] + [True] * 4 + [False] * 3] * 3
    states = TextPolicy.load(START).states(told)[vectors].detach()
    assert torch.allclose(found.context.ragged("vectors").values, states, atol=1e-5)
    at, shared = found.context.ragged("vectors_at"), len(WORLD.task("train", 0).prompt)
    assert at.tolist() == [[shared + k for k in (1, 2, 3, 4)]] * 3
    logp = collect.policy.score(found)["logp"].detach()
    first = logp.view(3, 8)[:, 1]
    assert float(first.abs().max()) < 1e-4, "before any vector is read, the policy is the teacher"
    assert float(logp.view(3, 8)[:, 2].max()) < -1e-3
    with pytest.raises(PanoplyError, match="4 tokens between '<' and '>', and count is 3"):
        imagined(batch=1, count=3)(Collector(WORLD, TextPolicy.load(START), 0))


def made(success: list[float], sizes: list[int], groups: list[int]) -> Experience:
    from kit import hand

    columns: dict[str, list[Any]] = {"episode": [], "group": [], "signal:success": [], "signal:ended": []}
    for e, (right, n, g) in enumerate(zip(success, sizes, groups, strict=True)):
        for t in range(n):
            columns["episode"].append(e)
            columns["group"].append(g)
            columns["signal:success"].append(right if t == n - 1 else 0.0)
            columns["signal:ended"].append(float(t == n - 1))
    return hand(**columns)


def test_rewards_by_hand() -> None:
    """Right answers have 2 and 4 tokens, 3 on average: one of 4 pays for one; in a group without any, nobody pays."""
    found = made([1, 1, 0, 0], [2, 4, 5, 9], [0, 0, 0, 1])
    earned = found.by("episode").sum(answered(length=0.01)(found))
    assert earned.tolist() == pytest.approx([1.0, 0.99, 0.1 - 0.02, 0.1])


def test_prompts_within_reach() -> None:
    """Never right, once in two, always: with most 0.6 the second alone is kept."""
    found = made([0, 0, 1, 0, 1, 1], [1, 2, 1, 2, 1, 2], [0, 0, 1, 1, 2, 2])
    assert found["group"][within_reach()(found)].tolist() == [1, 1, 1]
    assert set(found["group"][within_reach(most=1.0)(found)].tolist()) == {1, 2}


# ------------------------------------------------------------------ runs

SMALL: dict[str, Any] = {
    "run.device": "cpu", "run.held_out": 4, "run.checkpoint_every": 1, "sample.prompts": 4, "sample.group": 4
}  # fmt: skip


def test_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    done = tiny.bare(tmp_path / "run", "vlpo", world="grids", steps=3, settings=SMALL)
    rows = tiny.metrics(done.run)
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"cut/checkpoints/step-000000{step}")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    assert tiny.metrics(again.run) == rows
    assert isinstance(TextPolicy.load(tmp_path / "run/checkpoints/step-0000003/model").thoughts, Latent)


def test_what_cannot_be_is_refused() -> None:
    for name, value in (("sigma", 0.0), ("count", 0), ("noise", -1.0), ("blank", "<")):
        with pytest.raises(PanoplyError, match=name):
            pp.plan("vlpo", "grids", settings={f"models.latents.{name}": value})
    with pytest.raises(PanoplyError, match="vectors are no choice here"):
        pp.plan("vlpo", "grids", settings={"models.latents.learns": False, "models.latents.sigma": 3.0})
    with pytest.raises(PanoplyError, match="needs a world with 'looks'"):
        pp.plan("vlpo", "chain")
    with pytest.raises(PanoplyError, match="'@' is no token of this model"):
        looking(first="@")
