"""Reasoning Palette: prefixes are drawn once, recorded and scored with; a share of a group has one, in the end none."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.reasoning_data.reasoning_palette import (
    Palette,
    coloured,
    explored,
    fitted,
    mean_embeddings,
    prefixes,
    two_phase,
)
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.worlds.text.keydoor import Keydoor
from panoply.worlds.text.styles import Styles

WORLD = Styles(operations=2, levels=(0, 1))
START = Path(__file__).parents[2] / "panoply/assets/styles-start"
QUICK: dict[str, Any] = {"pairs": 40, "fit": 20, "size": 3, "inner": 8}


def collector(seed: int = 0) -> Collector:
    return Collector(WORLD, TextPolicy.load(START), seed)


def gap(policy: TextPolicy, found: Experience) -> float:
    with torch.no_grad():
        return float((policy.score(found)["logp"] - found["logp"]).abs().max())


# ------------------------------------------------------------------ the palette


def test_mean_embeddings_by_hand() -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 4.0], [2.0, 2.0]])
    found = mean_embeddings(table, [[0, 1], [2], [0, 0, 1, 1]])
    assert found.tolist() == [[0.5, 2.0], [2.0, 2.0], [0.5, 2.0]]


def test_its_loss_by_hand() -> None:
    """μ = (1, 0), log σ² = (0, log 4): KL = ½·(1 + 0) + ½·(4 − 1 − log 4); z = μ + σ·ε is decoded to itself."""
    made = Palette(2, 2, 2)
    made.encoder = torch.nn.Sequential(torch.nn.Linear(2, 4))
    made.decoder = torch.nn.Sequential(torch.nn.Identity())
    with torch.no_grad():
        made.encoder[0].weight.zero_()
        made.encoder[0].bias.copy_(torch.tensor([1.0, 0.0, 0.0, math.log(4)]))
    loss = made.loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 3.0]]), beta=0.1)
    divergence = 0.5 * 1 + 0.5 * (4 - 1 - math.log(4))
    assert float(loss.detach()) == pytest.approx((1 + 1) ** 2 + (2 * 3) ** 2 + 0.1 * divergence, rel=1e-5)


def test_a_palette_tells_apart_what_differs_and_is_as_short_as_what_it_is_of() -> None:
    dice = torch.Generator().manual_seed(0)
    h = 0.05 * torch.randn(200, 2, generator=dice) @ torch.randn(2, 6, generator=dice) + 0.1
    made = fitted(h, 2, 16, 1.0, 300, 0)
    mean, log_var = made.encoder(h).chunk(2, -1)
    left = (made.decoder(mean) - h).square().sum() / (h - h.mean(0)).square().sum()
    assert float(left) < 0.2
    assert float(mean.std(0).min()) > 0.3, "z is used"
    assert bool((log_var < 0.5).all())
    again = fitted(h, 2, 16, 1.0, 300, 0)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    palette = {"mean": torch.zeros(2), "spread": torch.eye(2)}
    palette |= {f"decoder.{n}": w for n, w in made.decoder.state_dict().items()}
    drawn = prefixes(palette, list(range(300)), 2, 7)
    assert drawn.shape == (300, 2, 6)
    assert float((drawn.flatten(0, 1).std(0) / h.std(0)).log().abs().max()) < math.log(2)
    assert not torch.allclose(drawn[:, 0], drawn[:, 1]), "every vector of a prefix has its own z"
    assert torch.allclose(prefixes(palette, [5], 2, 7)[0], drawn[5], atol=1e-6), "of seed and episode alone"


# ------------------------------------------------------------------ who has a prefix


def asked(collect: Collector, **settings: Any) -> tuple[dict[str, Tensor], Experience]:
    return explored(**{"prompts": 3, "group": 4, **QUICK, **settings})({}, collect)


@pytest.mark.parametrize(("share", "most", "least"), [(1.0, 4, 4), (0.5, 2, 2), (0.4, 2, 1), (0.0, 0, 0)])
def test_a_share_of_every_group_begins_with_its_own(share: float, most: int, least: int) -> None:
    collect = collector()
    _, found = asked(collect, share=share, prompts=6)
    if not share:
        assert "vectors" not in found.context
        assert collect.notes["prefixed"] == 0
        return
    at, vectors = found.context.ragged("vectors_at"), found.context.ragged("vectors").values
    episode = found.by("episode").first(found["context"])
    begun = (at.lengths[episode] > 0).view(6, 4).sum(1)
    assert int(begun.max()) == most
    assert int(begun.min()) == least
    assert collect.notes["prefixed"] == float(begun.sum()) / 24
    assert set(at.values.tolist()) == {0}, "before the prompt"
    assert len(vectors.unique(dim=0)) == len(vectors), "no two are alike"
    assert gap(collect.policy, found) < 1e-4
    swapped = found.context.plus({"vectors": type(at)(vectors.flip(0) + 0.3, at.offsets)})
    assert gap(collect.policy, Experience(found.decisions, swapped)) > 1e-3, (
        "another z is another distribution"
    )


def test_noise_and_kinds_of_problem() -> None:
    """Noise is as large as mean embeddings are; toward a kind, z has the mean and covariance of what is encoded."""
    noise, found = asked(collector(), colours="noise", length=2)
    assert set(noise) == {"mean", "spread"}
    assert found.context.ragged("vectors").values.std() < 0.2
    assert found.context.ragged("vectors_at")[0].tolist() == [0, 1]
    plain, _ = asked(collector())
    toward, _ = asked(collector(), toward="trapped")
    assert torch.equal(plain["mean"], torch.zeros(3))
    assert torch.equal(plain["spread"], torch.eye(3))
    assert not torch.equal(toward["mean"], plain["mean"])
    assert not torch.allclose(toward["spread"], torch.eye(3), atol=1e-2)
    assert torch.equal(toward["spread"], toward["spread"].tril()), "a root of the covariance"
    assert torch.equal(toward["decoder.0.weight"], plain["decoder.0.weight"])
    with pytest.raises(PanoplyError, match="no kind of problem 'blue'"):
        asked(collector(), toward="blue")


def test_imitation_comes_after_prefixes_and_answers_stay() -> None:
    collect, other = collector(), collector()
    palette, found = coloured(batch=5, length=2, **QUICK)({}, collect)
    plain = other.demonstrations(other.tasks(5))
    assert found["action"].tolist() == plain["action"].tolist()
    assert (found["position"] - plain["position"]).tolist() == [2] * len(found)
    assert found.context.tensor("prompt").tolist() == [0, 1, 2, 3, 4], "no two share a prompt"
    tokens = found.context.ragged("tokens")
    assert [row[2:] for row in tokens.tolist()] == plain.context.ragged("tokens").tolist()
    again, _ = coloured(batch=5, length=2, **QUICK)(palette, collect)
    assert again is palette, "it is fitted once"
    same, _ = asked(collector())
    assert all(torch.equal(palette[name], same[name]) for name in palette), "and the same in every stage"


def test_equal_prompts_after_different_prefixes_are_not_shared() -> None:
    collect = collector()
    task = collect.tasks(1)[0]
    found = collect.answers([task, task], [WORLD.gold(task)] * 2).prefixed(torch.randn(2, 1, 64))
    assert found.context.tensor("prompt").tolist() == [0, 1]
    with torch.no_grad():
        one, two = collect.policy.score(found)["logp"].view(2, -1)
    assert float((one - two).abs().max()) > 1e-3
    with pytest.raises(PanoplyError, match="cannot be put after others"):
        found.prefixed(torch.randn(2, 1, 64))


def test_two_phases() -> None:
    assert [two_phase()(step, 4) for step in range(5)] == [1, 1, 0, 0, 0]
    assert [two_phase(switch=0.25)(step, 4) for step in range(3)] == [1, 0, 0]


# ------------------------------------------------------------------ runs

SMALL: dict[str, Any] = {
    "run.device": "cpu", "world.operations": 2, "world.levels": (0, 1), "run.held_out": 4, "run.checkpoint_every": 1
}  # fmt: skip


def test_it_goes_on_bit_for_bit_and_ends_without_prefixes(tmp_path: Path) -> None:
    quick = {f"sample.{name}": value for name, value in QUICK.items()}
    settings = {**SMALL, **quick, "sample.prompts": 2, "sample.group": 4, "reward.name": "ended"}
    done = tiny.bare(tmp_path / "run", "reasoning-palette-alone", world="styles", steps=3, settings=settings)
    rows = tiny.metrics(done.run)
    assert [row["prefixed"] for row in rows] == [1.0, 1.0, 0.0]
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"cut/checkpoints/step-000000{step}")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    assert tiny.metrics(again.run) == rows


def test_without_a_share_it_is_grpo(tmp_path: Path) -> None:
    settings = {**SMALL, "sample.prompts": 2, "sample.group": 4, "reward.name": "ended"}
    plain = tiny.bare(tmp_path / "grpo", "grpo", world="styles", model="fresh", steps=2, settings=settings)
    none = {"sample.share": 0.0, "sample.pairs": 4, "sample.fit": 1}
    found = tiny.bare(
        tmp_path / "palette", "reasoning-palette-alone", world="styles", model="fresh", steps=2,
        settings={**settings, **none},
    )  # fmt: skip
    assert found.fingerprint == plain.fingerprint


def test_what_cannot_be_is_refused() -> None:
    for name, value in (("share", 1.5), ("length", 0), ("pairs", 1), ("beta", -1.0)):
        with pytest.raises(PanoplyError, match=name):
            pp.plan("reasoning-palette-alone", "styles", settings={f"sample.{name}": value})
    with pytest.raises(PanoplyError, match="nothing is fitted to make noise"):
        pp.plan("reasoning-palette-alone", "styles", settings={"sample.colours": "noise", "sample.size": 4})
    with pytest.raises(PanoplyError, match="needs a world with 'te"):
        pp.plan("reasoning-palette-alone", "cartpole")
    quest = Keydoor()
    collect = Collector(quest, TextPolicy.load(START.parent / "keydoor-start"), 0)
    with pytest.raises(PanoplyError, match="has a prompt of its own"):
        collect.episodes(collect.tasks(1), 1, prefixes=[torch.zeros(1, 64)])
