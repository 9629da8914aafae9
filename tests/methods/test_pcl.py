"""PCL: which prompts are asked, what their value is told and never told, and whose gradient it is."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, assert_same, gradient, ragged, rows_of, shuffled
from papers import ZERO, groups_of, returns_of

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.methods.reasoning_data.pcl import foretold, nearest, pcl, prompts_and_means
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.value import ValueModel
from panoply.worlds.world import Task

TOKENIZER = Tokenizer.of_characters("0123456789+=.")


class Asked:
    """A collector of tasks of one token each, whose values and ids are given."""

    def __init__(self, values: Sequence[float], ids: Sequence[int] | None = None):
        self.seed, self.state, self.notes = 0, {"groups": 0}, {}
        self.ids = ids or range(len(values))
        self.models = {"prompt_value": lambda tasks: torch.tensor(values)}

    def tasks(self, n: int) -> list[Task]:
        return [Task(i, (0,), level=i) for i in self.ids][:n]

    def episodes(self, tasks: list[Task], group: int, **sampling: Any) -> list[int]:
        self.state["groups"] += len(tasks)
        return [task.id for task in tasks]


def asked(collect: Asked, **settings: Any) -> list[int]:
    return list(nearest(prompts=2, among=3, **settings)(collect))  # type: ignore[arg-type,call-overload]


def test_the_nearest_are_asked_and_no_others() -> None:
    """Of |V − ½| = .5, .1, .4, .05, .5, .2; and the two that are nearest to 1."""
    collect = Asked([1.0, 0.4, 0.1, 0.55, 0.0, 0.7])
    assert asked(collect) == [3, 1]
    assert collect.notes == {
        "groups_asked": 2,
        "asked_value": pytest.approx(0.475),
        "drawn_value": pytest.approx(2.75 / 6),
        "asked_level": 2,
    }
    assert asked(collect, target=1.0) == [0, 5]


def test_equals_are_asked_by_chance() -> None:
    collect = Asked([0.0] * 6)
    found = [asked(collect) for _ in range(300)]
    shares = [sum(i in pair for pair in found) / 300 for i in range(6)]
    assert shares == pytest.approx([1 / 3] * 6, abs=0.1)


def test_what_was_drawn_twice_is_asked_twice_only_in_need() -> None:
    assert asked(Asked([0.5, 0.5, 0.5, 0.6, 0.9, 1.0], ids=[7, 7, 7, 8, 9, 4])) == [7, 8]
    assert asked(Asked([0.5, 0.5, 0.5, 0.5, 0.5, 0.5], ids=[7] * 6)) == [7, 7]


def test_some_are_asked_whatever_is_expected() -> None:
    collect = Asked([1.0, 0.4, 0.1, 0.55, 0.0, 0.7])
    found = [asked(collect, uniform=0.5) for _ in range(200)]
    assert {pair[0] for pair in found} == {3}
    assert {pair[1] for pair in found} == {0, 1, 2, 4, 5}


# ------------------------------------------------------------------ the value


def step() -> Experience:
    """`1=` with answers of 1 and 2 tokens, and `2+2=`; returns 1, 0 and 1; a teacher answers the first prompt, too."""
    prompts = [TOKENIZER.encode(text) for text in ("1=", "1=", "2+2=", "1=")]
    said = [[1], [2, 3], [4], [5]]
    rows = [(e, i) for e, tokens in enumerate(said) for i in range(len(tokens))]
    decisions = {
        "task": torch.tensor([(8, 8, 4, 8)[e] for e, _ in rows]),
        "group": torch.tensor([(0, 0, 1, 0)[e] for e, _ in rows]),
        "episode": torch.tensor([e for e, _ in rows]),
        "context": torch.tensor([e for e, _ in rows]),
        "position": torch.tensor([len(prompts[e]) + i for e, i in rows]),
        "action": torch.tensor([said[e][i] for e, i in rows]),
        "source": torch.tensor([int(e == 3) for e, _ in rows]),
        "reward": torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]),
    }
    tokens = Ragged.from_lists([p + a for p, a in zip(prompts, said, strict=True)])
    shared = torch.tensor([len(p) for p in prompts])
    return Experience(
        Table(decisions), Table({"tokens": tokens, "prompt": torch.tensor([0, 0, 1, 0]), "shared": shared})
    )


def test_the_value_learns_of_prompts_alone_and_of_own_answers() -> None:
    rows = prompts_and_means(step())
    assert rows["target"].tolist() == [0.5, 1.0]
    assert rows["task"].tolist() == [8, 4]
    assert rows.context.ragged("tokens").tolist() == [TOKENIZER.encode("1="), TOKENIZER.encode("2+2=")]


def test_what_is_foretold_is_what_is_learned() -> None:
    """`ask` and the loss read the same state, whatever is asked beside it."""
    model = ValueModel.of(TextPolicy.fresh(DecoderConfig(15, width=16, layers=2, heads=2), TOKENIZER, 3))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    tasks: Any = [SimpleNamespace(prompt=tuple(TOKENIZER.encode(text))) for text in ("2+2=", "1=", "1=")]
    learned = model.score(prompts_and_means(step()))["value"].tolist()
    assert foretold(model, tasks).tolist() == pytest.approx([learned[1], learned[0], learned[0]], abs=1e-6)
    assert learned[0] != learned[1]


def test_gradient_is_the_papers_in_any_order_and_split() -> None:
    """Mean over episodes of mean over tokens of ρ·(R − mean), and nothing else."""
    method, made = pcl(), ragged(drift=0.4)
    returns, slow, loss = returns_of(made), Slow(), ZERO
    for members in groups_of(made):
        mean = sum(returns[e] for e in members) / len(members)
        for e in members:
            rows = rows_of(made, episode=e)
            for row in rows:
                rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
                loss = loss - rho * (returns[e] - mean) / (len(rows) * len(returns))
    expected = slow.gradient(loss)
    for rows_, split in ((made, 10**9), (shuffled(made), 4)):
        assert_same(
            gradient(method, rows_.with_columns(advantage=method.credit(rows_)), micro_tokens=split), expected
        )


# ------------------------------------------------------------------ runs and refusals

SMALL = {
    "run.device": "cpu",
    "run.held_out": 4,
    "run.checkpoint_every": 2,
    "world.operations": 2,
    "sample.prompts": 4,
    "sample.group": 2,
    "sample.among": 3,
    "sample.uniform": 0.25,
    "reward.name": "ended",
    "models.prompt_value.update.lr": 0.01,
}


def test_value_and_its_optimiser_go_on_bit_for_bit(tmp_path: Path) -> None:
    done = tiny.bare(tmp_path / "run", "pcl", model="fresh", steps=4, settings=SMALL)
    rows = tiny.metrics(done.run)
    assert [row["total_episodes"] for row in rows] == [8, 16, 24, 32], "only what is asked is answered"
    assert rows[0]["drawn_value"] == 0
    assert rows[1]["drawn_value"] != 0
    assert rows[0]["groups_asked"] == 4
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    shutil.rmtree(tmp_path / "cut/checkpoints/step-0000004")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    assert tiny.metrics(again.run) == rows


def test_a_plan_counts_the_value() -> None:
    found = cost(pp.plan("pcl", "chain"))
    assert found.extra_forwards == ["one forward pass of prompt_value"]
    assert found.memory_bytes["prompt_value"] == found.parameters * 4


def test_what_cannot_be_is_refused() -> None:
    for settings, why in (
        ({"sample.among": 0}, "among"),
        ({"sample.among": 1, "sample.uniform": 0, "sample.target": 0.3}, "all that is drawn is asked"),
        ({"sample.uniform": 1.0}, "uniform"),
    ):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("pcl", "chain", settings=settings)
    with pytest.raises(PanoplyError, match="needs the model 'prompt_value'"):
        pp.plan("pcl", "chain", models=[])
    with pytest.raises(PanoplyError, match="text"):
        pp.plan("pcl", "cartpole")
