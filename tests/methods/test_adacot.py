"""AdaCoT: which token is left out of the loss, what is fined, and how its stages follow one another."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled
from papers import ZERO

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.methods.reasoning_data.adacot import (
    adacot,
    adacot_masked,
    adacot_penalised,
    but_the_decision,
    decisions_to_think,
)
from panoply.worlds.text.modes import Modes
from panoply.worlds.world import Task


def said(*answers: list[int]) -> Experience:
    """Answers by their tokens, each an episode of its own."""
    rows = [(e, token) for e, tokens in enumerate(answers) for token in tokens]
    return hand(episode=[e for e, _ in rows], action=[token for _, token in rows])


def test_the_first_token_decides_or_the_one_behind_what_opens_a_thought() -> None:
    """7 8 opens the block: neither of the two decides, and in an answer that never opens it nothing does."""
    made = said([7, 8, 9, 1], [3, 7, 8, 5], [7, 9, 8], [1, 7, 8])
    first = decisions_to_think(made, ())
    assert first.nonzero().flatten().tolist() == [0, 4, 8, 11]
    behind = decisions_to_think(made, (7, 8))
    assert behind.nonzero().flatten().tolist() == [2, 7], "9 and 5"
    assert but_the_decision(after=(7, 8))(made)["train"].tolist() == [i not in (2, 7) for i in range(14)]


def test_what_did_not_learn_before_does_not_now() -> None:
    made = said([1, 2], [3, 4]).with_columns(train=torch.tensor([True, False, True, True]))
    assert but_the_decision()(made)["train"].tolist() == [False, False, False, True]


def test_the_gradient_is_without_it_in_any_order_and_split() -> None:
    """The sum over k ≠ k_dec of PPO's loss, divided by as many tokens: shuffled rows have their own first ones."""
    method, made = adacot_masked(), ragged(drift=0.4)
    masked = but_the_decision()(made)
    slow, loss, count = Slow(), ZERO, 0
    for e in dict.fromkeys(made["episode"].tolist()):
        for row in rows_of(made, episode=e)[1:]:
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            loss = loss - torch.minimum(rho * row["advantage"], rho.clamp(0.8, 1.2) * row["advantage"])
            count += 1
    expected = slow.gradient(loss / count)
    assert_same(gradient(method, masked), expected)
    assert_same(gradient(method, shuffled(masked), micro_tokens=4), expected)


def test_rewards_by_hand() -> None:
    """Right and as labelled 1; needed and missed 1 − 0.3; not needed and used 1 − 0.3; out of shape −1."""
    world, reward = Modes(), adacot_penalised().reward
    cases = (("3+4", "N7$"), ("3+4", "T+47$"), ("3+4*2", "N4$"), ("3+4*2", "N5$"), ("3+4*2", "44$"))
    grades = []
    for problem, answer in cases:
        task = Task(1, tuple(world.tokens(problem + "=")), len(problem) // 2, {"problem": problem})
        grades.append(world.grade(task, world.tokens(answer)))
    names = grades[0].keys()
    made = Experience(
        Table({f"signal:{name}": torch.tensor([g[name] for g in grades]) for name in names}),
        Table({"tokens": Ragged.from_lists([])}),
    )
    assert reward(made).tolist() == pytest.approx([1.0, 0.7, 0.7, -0.3, -1.0])


SMALL = {
    "run.device": "cpu",
    "run.held_out": 4,
    "run.evaluate_every": 0,
    "long.sample.prompts": 8,
    "general.sample.prompts": 8,
    "long.run.steps": 1,
    "general.run.steps": 2,
}


def test_the_second_stage_goes_on_from_the_first_with_all_lengths(tmp_path: Path) -> None:
    tiny.bare(tmp_path / "run", "adacot", world="modes", settings=SMALL)
    first, second = tiny.metrics(tmp_path / "run/01-long"), tiny.metrics(tmp_path / "run/02-general")
    assert [len(first), len(second)] == [1, 2]
    before = tmp_path / "run/01-long/checkpoints/step-0000001/model/model.safetensors"
    begun = tiny.result(tmp_path / "run/02-general")
    assert before.is_file()
    assert set(begun["before"]["parts"]) <= {f"{n} step{'s' * (n > 1)}" for n in range(1, 7)}


def test_stages() -> None:
    long, general = adacot().stages
    assert (long.method, long.settings["world.operations"]) == ("adacot-masked", (4, 6))
    assert (general.method, general.options["model"]) == ("adacot-penalised", "@long")
    assert [part.info.name for part in adacot_masked().select] == ["but_the_decision"]
    assert adacot_penalised().select == ()
    with pytest.raises(PanoplyError, match="Unknown signal of chain@1 for reward .malformed"):
        pp.plan("adacot-penalised", "chain")
