"""Control policies: densities by hand and by torch's own distributions, masks, noise, folders."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributions

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience, Table
from panoply.policies.build import open_folder
from panoply.policies.control import ControlPolicy, PolicySpec, ValueNet, open_policy
from panoply.policies.deterministic import Deterministic
from panoply.policies.heads import Categorical, Gaussian
from panoply.policies.mlp import Features
from panoply.progress import Progress
from panoply.run import Run
from panoply.worlds.control.gymnasium import Gymnasium
from panoply.worlds.control.world import Box, Discrete, MultiDiscrete

BOX = Box((3,))
ARM = Box((2,), (-2.0, 0.0), (2.0, 1.0))


def experience(observation: torch.Tensor, action: torch.Tensor, **context: Any) -> Experience:
    rows = torch.arange(len(action))
    return Experience(
        Table({"context": rows, "action": action, "episode": rows}),
        Table({"observation": observation, **context}),
    )


@pytest.mark.parametrize("temperature", [None, 4.0])
def test_a_bounded_action_by_torchs_normal(temperature: float | None) -> None:
    """Around the middle and half the range times tanh, in the world's units; a temperature is of the variance."""
    head = Deterministic(Box((2,), (-2.0, 0.0), (2.0, 6.0)), "free", -0.5)
    out, action = torch.tensor([[0.3, -1.0], [2.0, 0.1]]), torch.tensor([[0.5, 0.2], [-1.0, 0.9]])
    middle, half = torch.tensor([0.0, 3.0]), torch.tensor([2.0, 3.0])
    spread = half * math.exp(-0.5) * (temperature or 1.0) ** 0.5
    expected = distributions.Normal(middle + half * out.tanh(), spread)
    given = None if temperature is None else torch.full((2,), temperature)
    found = head.score(out, action, None, given, entropy=True)
    torch.testing.assert_close(found["logp"], expected.log_prob(action).sum(-1))
    torch.testing.assert_close(found["entropy"], expected.entropy().sum(-1))


def test_a_masked_categorical_by_hand() -> None:
    """Logits log 1, log 2, log 5 without the last one: ⅓ and ⅔."""
    out, mask = torch.tensor([[1.0, 2.0, 5.0]]).log(), torch.tensor([[True, True, False]])
    found = Categorical((3,)).score(out, torch.tensor([1]), mask, None, entropy=True)
    assert float(found["logp"]) == pytest.approx(np.log(2 / 3))
    assert float(found["entropy"]) == pytest.approx(-(np.log(1 / 3) / 3 + 2 * np.log(2 / 3) / 3))
    noise = Categorical((3,)).noise(np.random.default_rng(0), 20_000)
    drawn = Categorical((3,)).act(np.tile(out.numpy(), (20_000, 1)), noise, mask.numpy(), 1.0).action
    assert np.bincount(drawn, minlength=3) / 20_000 == pytest.approx([1 / 3, 2 / 3, 0], abs=0.01)


def test_factored_choices_add_up() -> None:
    head, out = Categorical((2, 3)), torch.randn(4, 5)
    action = torch.tensor([[0, 2], [1, 1], [0, 0], [1, 2]])
    found = head.score(out, action, None, None, entropy=True)
    parts = [distributions.Categorical(logits=o) for o in (out[:, :2], out[:, 2:])]
    torch.testing.assert_close(found["logp"], sum(p.log_prob(action[:, i]) for i, p in enumerate(parts)))
    torch.testing.assert_close(found["entropy"], sum(p.entropy() for p in parts))


@pytest.mark.parametrize("std", ["free", "state"])
def test_gaussians_against_torch(std: Any) -> None:
    head = Gaussian(ARM, False, std, -0.5)
    out, action = torch.randn(5, head.width), torch.randn(5, 2)
    mean, log_std = head.moments(out)
    normal = distributions.Normal(mean, log_std.exp().expand_as(mean))
    found = head.score(out, action, None, None, entropy=True)
    torch.testing.assert_close(found["logp"], normal.log_prob(action).sum(-1))
    torch.testing.assert_close(found["entropy"], normal.entropy().sum(-1))
    hot = head.score(out, action, None, torch.full((5,), 4.0), entropy=False)["logp"]
    wide = distributions.Normal(mean, 2 * log_std.exp().expand_as(mean))
    torch.testing.assert_close(hot, wide.log_prob(action).sum(-1))


def test_a_squashed_gaussian_has_the_density_of_the_action() -> None:
    head = Gaussian(ARM, True, "state", 0.0)
    out = 0.5 * torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    drawn = head.act(out.numpy(), head.noise(np.random.default_rng(1), 6), None, 1.0)
    assert ((drawn.acted > ARM.low) & (drawn.acted < ARM.high)).all()
    mean, log_std = head.moments(out)
    low, high = torch.tensor(ARM.low), torch.tensor(ARM.high)
    squash = distributions.ComposeTransform(
        [distributions.TanhTransform(), distributions.AffineTransform((high + low) / 2, (high - low) / 2)]
    )
    exact = distributions.TransformedDistribution(distributions.Normal(mean, log_std.exp()), squash)
    action = torch.from_numpy(drawn.action)
    logp = head.score(out, action, None, None, entropy=False)["logp"]
    torch.testing.assert_close(logp, exact.log_prob(action).sum(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("std", ["state", "free"])
def test_squashed_draws_have_the_density_and_the_slopes(std: Any) -> None:
    """By torch's own transformed distribution, and by differences."""
    head = Gaussian(Box((2,), (-1.0, -1.0), (1.0, 1.0)), True, std, -0.5).double()
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(5, head.width, generator=generator, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    action, logp = head.draw(out, noise)
    mean, log_std = head.moments(out)
    flat = distributions.Normal(mean, log_std.exp().expand_as(mean))
    there = distributions.TransformedDistribution(flat, [distributions.TanhTransform(cache_size=0)])
    torch.testing.assert_close(logp, there.log_prob(action).sum(-1))
    assert torch.autograd.gradcheck(lambda out, *_: head.draw(out, noise), (out, *head.parameters()))


def test_actions_beyond_the_bounds_are_recorded_as_drawn_and_cut_for_the_world() -> None:
    head = Gaussian(ARM, False, "free", 0.0)
    drawn = head.act(np.array([[9.0, -9.0]], np.float32), np.zeros((1, 2), np.float32), None, 1.0)
    assert drawn.action.tolist() == [[9.0, -9.0]]
    assert drawn.acted.tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("normalise", [False, True])
def test_acting_in_numpy_is_scoring_in_torch(activation: Any, normalise: bool) -> None:
    policy = ControlPolicy.fresh(BOX, Discrete(4), PolicySpec((8, 5), activation, normalise=normalise))
    seen = 3 * torch.randn(50, 3) + 1
    if normalise:
        policy.model.features.learn(seen)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(policy.model.numpy()(seen.numpy(), np.zeros(len(seen)))),
            policy.model(seen),
            atol=1e-6,
            rtol=1e-5,
        )


def test_normalisation_in_pieces_is_that_of_the_whole() -> None:
    seen, pieces, whole = 3 * torch.randn(70, 3) + 5, Features(BOX, True), Features(BOX, True)
    whole.learn(seen)
    for part in seen.split([10, 50, 10]):
        pieces.learn(part)
    torch.testing.assert_close(pieces.mean, seen.double().mean(0))
    torch.testing.assert_close(pieces.square / 70, seen.double().var(0, correction=0))
    torch.testing.assert_close(pieces(seen), whole(seen))
    assert float(whole(seen).mean()) == pytest.approx(0, abs=1e-5)


def test_without_hidden_layers_whole_numbers_make_a_table() -> None:
    policy = ControlPolicy.fresh(Discrete(5), Discrete(3), PolicySpec(hidden=()))
    found = policy.score(experience(torch.tensor([0, 4]), torch.tensor([1, 2])))
    assert found["logp"].tolist() == pytest.approx([-np.log(3)] * 2)
    found["logp"][0].backward()
    slope = policy.model.layers.layers[0].weight.grad  # type: ignore[union-attr]
    assert slope[:, 0].tolist() == pytest.approx([-1 / 3, 2 / 3, -1 / 3])  # type: ignore[index]
    assert not slope[:, 1:].any()  # type: ignore[index]


def test_a_folder_holds_all_of_it(tmp_path: Path) -> None:
    policy = ControlPolicy.fresh(BOX, MultiDiscrete((2, 3)), PolicySpec((7,), normalise=True), seed=3)
    policy.model.features.learn(torch.randn(9, 3))
    policy.save(tmp_path)
    again = open_folder(tmp_path)
    assert isinstance(again, ControlPolicy)
    assert again.spec == policy.spec
    assert again.fingerprint() == policy.fingerprint()
    critic, other = ValueNet.of(policy, 0), ValueNet.of(policy, 1)
    critic.save(tmp_path / "critic")
    other.load_weights(tmp_path / "critic")
    assert other.fingerprint() == critic.fingerprint()
    with pytest.raises(PanoplyError, match="another observation than CartPole-v1 has"):
        open_policy(str(tmp_path), Gymnasium(), 0)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("spec", 3, "spec is an object, not 3"),
        ("spec", {"hidden": "x"}, r"policy\.hidden"),
        ("spec", {"hidden": [10**12]}, r"policy\.hidden must be from 1"),
        ("observation", {"space": "torus"}, "no space of ours"),
        ("observation", {"space": "box"}, "does not say how large it is"),
        ("observation", {"space": "box", "shape": [10**9, 10**9]}, "no space is as large as"),
        ("action", {"space": "discrete", "n": [2]}, "n takes"),
        ("action", {"space": "discrete", "n": -2}, "no space is as large as"),
        ("model", None, "model is text, not null"),
    ],
)
def test_a_saved_policy_of_wrong_types_and_sizes(
    tmp_path: Path, field: str, value: object, sentence: str
) -> None:
    ControlPolicy.fresh(Box((3,)), Discrete(2)).save(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**facts, field: value}))
    with pytest.raises(PanoplyError, match=sentence):
        ControlPolicy.load(tmp_path)


def test_saved_weights_that_are_not_the_policys_or_not_finite(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    ControlPolicy.fresh(Box((3,)), Discrete(2)).save(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = sorted(weights)[0]
    for spoilt, sentence in (
        ({**weights, name: weights[name] * float("inf")}, f"not finite: {name}"),
        ({n: w for n, w in weights.items() if n != name}, f"lack {name}"),
        ({**weights, "stranger": torch.zeros(1)}, "hold stranger"),
        ({**weights, name: torch.zeros(7)}, rf"{name} is \(7,\), not"),
    ):
        save_file(spoilt, file)
        with pytest.raises(PanoplyError, match=sentence):
            ControlPolicy.load(tmp_path)


def test_bad_settings() -> None:
    with pytest.raises(PanoplyError, match="policy.hidden must be from 1"):
        PolicySpec(hidden=(0,))
    with pytest.raises(PanoplyError, match="without bounds cannot be squashed"):
        ControlPolicy.fresh(BOX, BOX, PolicySpec(squash=True))


CHUNK = Box((3, 2), (-2.0, 0.0) * 3, (2.0, 1.0) * 3)
"""Three actions of an arm at once."""


@pytest.mark.parametrize(
    "spec",
    [
        PolicySpec(),
        PolicySpec(squash=True, std="state"),
        PolicySpec(head="bounded"),
        PolicySpec(head="bounded", std="fixed"),
    ],
    ids=["gaussian", "squashed", "bounded", "fixed"],
)
def test_chunks_of_actions(spec: PolicySpec) -> None:
    """(k, d) numbers are one action: drawn and bounded as such, their density that of the k·d numbers written flat."""
    policy, flat = (
        ControlPolicy.fresh(BOX, space, spec, seed=1) for space in (CHUNK, Box((6,), CHUNK.low, CHUNK.high))
    )
    seen = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    noise = policy.head.noise(np.random.default_rng(1), 5)
    drawn, plain = (
        p.head.act(p.model.numpy()(seen, np.zeros(5, int)), noise, None, 1.0) for p in (policy, flat)
    )
    assert drawn.action.shape == drawn.acted.shape == (5, 3, 2)
    np.testing.assert_array_equal(drawn.acted.reshape(5, 6), plain.acted)
    assert (np.abs(drawn.acted[..., 0]) <= 2).all()
    assert ((drawn.acted[..., 1] >= 0) & (drawn.acted[..., 1] <= 1)).all()
    scores = [
        p.score(experience(torch.from_numpy(seen), torch.from_numpy(d.action)), frozenset({"entropy"}))
        for p, d in ((policy, drawn), (flat, plain))
    ]
    for name in ("logp", "entropy"):
        torch.testing.assert_close(scores[0][name], scores[1][name])
    unit = policy.head.unit(torch.from_numpy(drawn.acted))
    assert unit.shape == (5, 6)
    torch.testing.assert_close(policy.head.real(unit), torch.from_numpy(drawn.acted))


@pytest.mark.parametrize(("method", "world"), [("sac", "pendulum"), ("td3", "pendulum"), ("ppo", "cartpole")])
def test_methods_choose_chunks(method: str, world: str, tmp_path: Path) -> None:
    """Critics, replay and resumption take chunks of numbers; of choices, several at once."""
    settings: dict[str, Any] = {
        "world.chunk": 3,
        "sample.length": 24,
        "policy.hidden": (8,),
        "run.held_out": 2,
    }
    settings |= {"update.minibatches": 2} if method == "ppo" else {"sample.random": 4, "replay.warmup": 4}
    settings |= {"run.steps": 2, "run.checkpoint_every": 1}
    done = pp.train(method, world, run=tmp_path / "run", threads=1, settings=settings, progress=Progress())
    assert all(np.isfinite(row["loss"]) for row in Run.open(done.run).metrics())
    stopped = done.run / "checkpoints" / "step-0000002"
    shutil.rmtree(stopped)
    (done.run / "result.json").unlink()
    assert pp.train(resume=done.run, progress=Progress()).fingerprint == done.fingerprint
