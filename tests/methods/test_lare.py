"""LaRe: the loss by hand, steps that are drawn, factors in a sandbox, and a function that is written and mended."""

from __future__ import annotations

import itertools
from pathlib import Path

import kit
import numpy as np
import pytest
import tiny
import torch

from panoply.errors import PanoplyError
from panoply.methods.applied_agents.lare import Decomposed, arms, decomposition, reach
from panoply.planning import make_plan
from panoply.rewards.factors import FactorFunction, Failed, write_factors

FIT = {"loss": "rrd_unbiased", "k": 2, "hidden": (4,), "lr": 1e-2, "batch": 8}
ROWS = [([0.0, 1.0], [2.0]), ([3.0, -1.0], [0.5])]
GOOD = "def factors(observation, action):\n    return [sum(observation), action[0] ** 2]"


def test_the_loss_by_hand() -> None:
    rewards = torch.tensor([[1.0, 3.0], [0.0, 4.0]], dtype=torch.double)
    paid, lengths = torch.tensor([1.5, 1.0], dtype=torch.double), torch.tensor([8, 4])
    assert decomposition(rewards, paid, lengths, unbiased=False).item() == pytest.approx((0.25 + 1) / 2)
    # variances 2 and 8, times 1 − K/T = 3/4 and 1/2, over K = 2
    assert decomposition(rewards, paid, lengths).item() == pytest.approx((0.25 - 0.75 + 1 - 2) / 2)
    one = decomposition(rewards[:1], paid[:1], torch.tensor([1]))  # fewer steps than K: with replacement
    assert one.item() == pytest.approx(0.25 - 1.0)


@pytest.mark.parametrize("length", [5, 2])
def test_what_drawing_adds_is_taken_off_on_average(length: int) -> None:
    """Over all ways to draw K = 3 of T steps the unbiased loss is the loss of all steps."""
    every = torch.tensor([0.3, -1.2, 2.0, 0.7, 5.0], dtype=torch.double)[:length]
    paid, k = torch.tensor([0.4], dtype=torch.double), 3
    ways = itertools.product if length < k else itertools.permutations
    draws = [[*way] for way in (ways(range(length), repeat=k) if length < k else ways(range(length), k))]
    mean = np.mean([decomposition(every[way][None], paid, torch.tensor([length])).item() for way in draws])
    assert mean == pytest.approx(((every.mean() - 0.4) ** 2).item())


def model(**settings: object) -> Decomposed:
    made = Decomposed(lambda _: torch.zeros(0), 1, 0, {**FIT, **settings})
    made.steps, made.lengths = torch.arange(9.0)[:, None], torch.tensor([5, 1, 3])
    made.returns = torch.tensor([10.0, 5.0, 21.0])
    return made


def test_steps_are_of_their_episode_and_different() -> None:
    made, dice = model(), torch.Generator().manual_seed(0)
    for _ in range(20):
        first, second, third = made.drawn(torch.tensor([0, 1, 2]), 3, dice).tolist()
        assert len(set(first)) == 3
        assert set(first) <= set(range(5))
        assert second == [5, 5, 5]
        assert sorted(third) == [6, 7, 8]


@pytest.mark.parametrize("loss", ["rd", "rrd", "rrd_unbiased"])
def test_every_loss_finds_what_steps_earn(loss: str) -> None:
    """A step earns its number, and only sums are known."""
    made = model(loss=loss, hidden=(32,))
    made.steps = made.steps / 9
    made.returns = torch.tensor([10.0, 5.0, 21.0]) / 9
    for i in range(200):
        made.fit(0, i)
    with torch.no_grad():
        said = made.net(made.steps)[:, 0]
    assert torch.corrcoef(torch.stack([said, made.steps[:, 0]]))[0, 1] > 0.95


def test_factors_of_a_point() -> None:
    seen, done = torch.tensor([[0.0, 0.0, 0.3, 0.4, 0.6, 0.8, 9.0, 9.0]]), torch.tensor([[1.0, 2.0]])
    torch.testing.assert_close(reach(seen, done), torch.tensor([[1.0, 0.5, 5.0]]))


def test_few_factors_tell_steps_apart_sooner() -> None:
    found = arms(1001, number=30, fits=60, distractors=8, loss="rrd_unbiased")
    assert found["factors"] > 0.7 > 0.3 > found["all that is seen and done"]
    assert abs(found["without the distance"]) < 0.3


def test_a_function_runs_in_a_sandbox() -> None:
    assert FactorFunction(GOOD)(ROWS) == [[1.0, 4.0], [2.0, 0.25]]
    for source, why in {
        "def factors(o, a): return 1 / 0": "ZeroDivisionError",
        "def factors(o, a): return []": "at least one",
        "def factors(o, a): return [float('nan')]": "not finite",
        "def factors(o, a): print('x'); return [1]": "4 lines",
        "def factors(o, a): return [open('/etc/passwd').read()]": "failed",
        "import subprocess\ndef factors(o, a): return [subprocess.call('ls')]": "failed",
    }.items():
        with pytest.raises(Failed, match=why):
            FactorFunction(source)(ROWS)


def test_a_language_model_writes_it_and_mends_it() -> None:
    asked: list[tuple[str, float]] = []
    said = iter(
        ["```python\nA\n```", "```python\nB\n```", "```python\ndef factors(o, a): return [c]\n```", GOOD]
    )

    def ask(prompt: str, temperature: float) -> str:
        asked.append((prompt, temperature))
        return next(said)

    assert write_factors(ask, "Reach it.", ROWS, candidates=2)(ROWS) == [[1.0, 4.0], [2.0, 0.25]]
    assert [t for _, t in asked] == [1.0, 1.0, 0.3, 0.3]
    assert "Reach it." in asked[0][0]
    assert "\nA\n" in asked[2][0]  # shown all candidates
    assert "\nB\n" in asked[2][0]
    assert "NameError" in asked[3][0]
    with pytest.raises(PanoplyError, match="after 1 corrections"):
        write_factors(lambda p, t: "def factors(o, a): return [c]", "", ROWS, candidates=1, retries=1)


def test_the_plan_keeps_the_reward_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    assert make_plan("lare", "pointmass").method.reward.reward.name == "decomposed"
    for setting, value, why in (
        ("models.decomposed.factors", "reech", "such as reach,"),
        ("models.decomposed.factors", "none.py", "no file none.py"),
        ("models.decomposed.factors", "reach_and_noise", "with 8 numbers"),
        ("models.decomposed.k", "1", "variance of one step"),
    ):
        with pytest.raises(PanoplyError, match=why):
            make_plan("lare", "pointmass", settings={setting: value})


def test_factors_of_a_file_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def factors(o, a):\n    return [abs(o[0] - o[4]), a[0]]\n")
    settings = {"sample.prompts": 4, "models.decomposed.factors": str(tmp_path / "mine.py")}
    settings |= {"models.decomposed.fits": 3, "world.horizon": 8, "run.held_out": 2}
    done = tiny.bare(tmp_path / "run", "lare", world="pointmass", settings=settings, steps=2)
    assert [len(row) > 0 and np.isfinite(row["decomposed_loss"]) for row in tiny.metrics(done.run)] == [
        True,
        True,
    ]


def test_it_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    first, other = model(), model()
    first.fit(0, 0)
    first.save(tmp_path)
    other.load_weights(tmp_path)
    for each in (first, other):
        each.fit(1, 0)
    assert all(torch.equal(x, other.state()[name]) for name, x in first.state().items())
    assert other.returns.tolist() == [10.0, 5.0, 21.0]


def test_old_episodes_are_forgotten_with_what_they_earned() -> None:
    made = Decomposed(lambda rows: rows["turn"].float()[:, None], 1, 0, {**FIT, "memory": 2, "fits": 1})
    paid = torch.tensor([0.0, 7.0, 8.0, 0.0, 0.0, 9.0])
    made.learn(kit.hand(episode=[0, 0, 1, 2, 2, 2], turn=[0, 1, 0, 0, 1, 2], **{"signal:reward": paid}), 0)
    assert made.lengths.tolist() == [1, 3]
    assert made.returns.tolist() == [8.0, 9.0]
    assert made.steps[:, 0].tolist() == [0, 0, 1, 2]
