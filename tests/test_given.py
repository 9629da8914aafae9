"""Methods, parts, worlds, rows and functions handed over in Python, as the README has them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import own_model
import pytest
import tiny
from given_kit import ROWS, SMALL, brief, right

import panoply as pp
from panoply import given, own, session
from panoply.methods.base.dapo import dapo
from panoply.methods.base.grpo import grpo
from panoply.planning import Plan
from panoply.progress import Progress
from panoply.run import Run
from panoply.slots.credit.anchors import episode_and_anchor
from panoply.slots.credit.groups import group
from panoply.slots.regularise.terms import kl
from panoply.slots.reward.signals import signal
from panoply.slots.update.optimisers import adam
from panoply.worlds.text.chain import Chain


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_model.write(tmp_path_factory.mktemp("given") / "my-model")


def train_own(folder: Path, model: Path, **choices: Any) -> pp.Trained:
    plain: dict[str, Any] = {"data": ROWS, "model": model, "steps": 2, "threads": 1, "progress": Progress()}
    settings = SMALL | choices.pop("settings", {})
    return pp.train(choices.pop("method", "grpo"), run=folder, settings=settings, **{**plain, **choices})


class TestMethods:
    def test_a_registered_value_is_what_its_name_is(self) -> None:
        assert pp.plan(grpo(), "chain") == pp.plan("grpo", "chain") == pp.plan(grpo, "chain")
        assert pp.plan(dapo()).method_id == "dapo@1"

    def test_a_changed_value_keeps_its_parts_and_takes_the_preset_elsewhere(self) -> None:
        made = pp.plan(grpo().but(credit=group(baseline="leave_one_out", scale="none")), "chain")
        by_path = pp.plan(
            "grpo", "chain", settings={"credit.baseline": "leave_one_out", "credit.scale": "none"}
        )
        by_part = pp.plan("grpo", "chain", credit=group(baseline="leave_one_out", scale="none"))
        assert made.method == by_path.method == by_part.method
        assert made.method.settings()["update.lr"] == 3e-4, "the preset of a tiny world"
        assert (made.method_id, by_part.method_id) == ("grpo@1+changed", "grpo@1")
        assert made.chosen == by_part.chosen == by_path.chosen | {"credit"}

    def test_a_part_that_was_given_is_not_touched_by_presets_and_worlds(self, model: Path) -> None:
        given_lr = adam(lr=2e-6)
        assert pp.plan(grpo().but(update=given_lr), "chain").method.update == given_lr  # type: ignore[attr-defined]
        assert pp.plan("ppo", "cartpole", update=given_lr).method.slots()["update"] == given_lr
        with pytest.raises(
            pp.PanoplyError, match="Unknown signal"
        ):  # by name it would be the world's own signal
            pp.plan("grpo", "cartpole", reward=signal())
        named = grpo().but(reward=signal(name="right"))
        made = pp.plan(named, data=ROWS, reward=right, model=model)
        assert made.method.slots()["reward"] == signal(name="right"), (
            "own data asks for the whole reward otherwise"
        )

    def test_a_slot_that_was_emptied_stays_so(self) -> None:
        made = pp.plan(grpo().but(regularise=()), "chain")
        assert made.method.slots()["regularise"] == ()
        assert made.method_id == "grpo@1+changed"
        several = pp.plan("grpo", regularise=[kl(weight=0.5)])
        assert several.method.slots()["regularise"] == (kl(weight=0.5),)

    def test_a_plan_of_values_round_trips(self) -> None:
        made = pp.plan(grpo().but(credit=group(scale="none")), Chain(operations=3), seed=4)
        again = Plan.from_json(json.loads(json.dumps(made.to_json())))
        assert again == made
        assert made.world_options == {"operations": 3}

    def test_what_has_no_effect_is_refused_in_a_part_as_by_path(self) -> None:
        with pytest.raises(pp.PanoplyError, match="has no effect"):
            pp.plan("gigpo", credit=episode_and_anchor(scale="none", epsilon=0.5))

    def test_what_is_no_method_or_world(self) -> None:
        with pytest.raises(pp.PanoplyError, match="A method is a name such as 'grpo', or a value"):
            pp.plan(3)
        with pytest.raises(pp.PanoplyError, match="A method is a name"):
            pp.train(group())
        with pytest.raises(pp.PanoplyError, match="A world is a name such as 'chain'"):
            pp.plan("grpo", 3.5)
        with pytest.raises(pp.PanoplyError, match="The slot 'credit' takes a credit part, not update.adam"):
            pp.plan("grpo", credit=adam())
        with pytest.raises(pp.PanoplyError, match="The slot 'credit' cannot be empty"):
            pp.plan("grpo", credit=())

    def test_training_a_value_is_training_its_settings(self, tmp_path: Path) -> None:
        plain: dict[str, Any] = {"settings": tiny.SETTINGS, "model": "fresh", "steps": 2, "threads": 1}
        one = pp.train(
            grpo().but(credit=group(scale="none")), run=tmp_path / "1", progress=Progress(), **plain
        )
        plain["settings"] = tiny.SETTINGS | {"credit.scale": "none"}
        two = pp.train("grpo", run=tmp_path / "2", progress=Progress(), **plain)
        assert one.fingerprint == two.fingerprint
        assert Run.open(one.run).plan().method_id == "grpo@1+changed"
        assert pp.evaluate(one, problems=2, attempts=1).problems == 2
        assert pp.evaluate(one, Chain(operations=2), problems=2, attempts=1).problems == 2
        again = tiny.train(tmp_path / "3", model=one, steps=1)
        assert Run.open(again.run).plan().options.model.startswith(str(one.run.resolve()))


class TestRows:
    def test_rows_are_kept_with_the_run_and_hashed(self, tmp_path: Path, model: Path) -> None:
        done = train_own(tmp_path / "run", model, reward=right)
        kept = done.run / "given/data.jsonl"
        assert [json.loads(line) for line in kept.read_text().splitlines()] == ROWS
        assert Run.open(done.run).plan().world_options["data"] == str(kept.resolve())
        assert pp.evaluate(done, problems=1, attempts=1).problems == 1
        moved = done.run.rename(tmp_path / "moved")
        (_, word) = (Run.open(moved).plan().world_options[name] for name in ("data", "rewards"))
        assert word == (f"{moved.resolve()}/given/right.py:right",)
        assert pp.evaluate(moved, problems=1, attempts=1).problems == 1, "a run's folder may be moved"
        done.run.parent.joinpath("moved").rename(done.run)
        (done.run / "result.json").unlink()
        kept.write_text('{"prompt": "other"}\n')
        with pytest.raises(
            pp.PanoplyError, match=r"data\.jsonl, which the run was made with, is gone or has been"
        ):
            tiny.resume(done.run)

    def test_the_same_rows_are_the_same_file(self) -> None:
        assert given.rows_file(ROWS) == given.rows_file(tuple(ROWS)) != given.rows_file(ROWS[1:])

    def test_what_gives_rows(self) -> None:
        class Dataset:  # as of Hugging Face
            column_names = ("prompt", "answer")

            def __len__(self) -> int:
                return len(ROWS)

            def __iter__(self) -> Any:
                return iter(ROWS)

        class Frame:  # as of pandas
            columns = ("prompt", "answer")

            def to_dict(self, how: str) -> Any:
                return ROWS if how == "records" else None

        assert list(given.rows(Dataset())) == list(given.rows(Frame())) == ROWS
        with pytest.raises(pp.PanoplyError, match=r"choose one, such as data=dataset\['train'\]"):
            list(given.rows({"train": Dataset()}))
        odd = [{"prompt": "a", "n": np.int64(3), "x": np.ones(2), "m": [{"role": "user", "content": "b"}]}]
        assert list(given.rows(odd)) == [{**odd[0], "n": 3, "x": [1.0, 1.0]}]

    def test_real_datasets(self) -> None:
        datasets = pytest.importorskip("datasets")
        assert list(given.rows(datasets.Dataset.from_list(ROWS))) == ROWS
        with pytest.raises(pp.PanoplyError, match="choose one"):
            list(given.rows(datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))))

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            ([], "The data has no rows"),
            ([3], "Row 1 of the data is a int, not a dictionary"),
            ([{"prompt": "a"}, {"prompt": object()}], "Row 2 of the data has a object in its field 'prompt'"),
            ([{"prompt": "a", "x": float("nan")}], "Row 1 of the data has nan in its field 'x'"),
            ({"prompt": ["a"]}, "not a dictionary"),
            (iter(ROWS), "make a list of what is streamed"),
            ([{"question": "a", "completion": "b"}], "has no field 'prompt'"),
        ],
    )
    def test_bad_rows_in_one_sentence(self, data: Any, why: str, model: Path) -> None:
        with pytest.raises(pp.PanoplyError, match=why):
            pp.plan("sft", data=data, model=model).world().task("train", 0)

    def test_pairs_for_dpo(self, tmp_path: Path, model: Path) -> None:
        rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4
        settings = {"data.batch": 2, "run.held_out": 1}
        choices: dict[str, Any] = {"steps": 1, "threads": 1, "progress": Progress(), "settings": settings}
        assert pp.train("dpo", data=rows, model=model, run=tmp_path / "run", **choices).after["step"] == 1


class TestRewards:
    def test_a_function_that_can_be_written_runs_in_a_worker(self, tmp_path: Path, model: Path) -> None:
        done = train_own(tmp_path / "run", model, reward=right)
        (word,) = Run.open(done.run).plan().world_options["rewards"]
        assert word == f"{(done.run / 'given/right.py').resolve()}:right"
        world = Run.open(done.run).plan().world()
        task = next(t for t in (world.task("train", i) for i in range(9)))
        told = task.data["row"].line["answer"]
        graded = world.grade(task, world.tokenizer.encode(told))
        assert graded["right"] == pytest.approx(1 - len(told) / 8)
        world.close()

    def test_one_that_cannot_runs_here_and_counts_failures_alike(self, tmp_path: Path, model: Path) -> None:
        seen: list[int] = []
        notes = tiny.Notes()

        def mine(completions: list[str], **_: Any) -> list[float]:
            seen.append(len(completions))
            if any(len(text) % 2 for text in completions):
                raise ValueError("odd")
            return [1.0] * len(completions)

        done = train_own(tmp_path / "run", model, reward=mine, progress=notes)
        assert max(seen) > 1
        assert 1 in seen, "a batch that failed is tried one by one"
        assert any(
            "'mine' runs in this process: a resumed run needs it again, reward=mine" in s for s in notes.said
        )
        assert any("mine: ValueError: odd" in s for s in notes.said)
        assert tiny.metrics(done.run)[-1]["reward_failures"] > 0

    def test_a_resumed_run_needs_such_a_function_again(
        self, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from panoply.rewards import here

        reward: Any = lambda completions: [float(len(c)) for c in completions]  # noqa: E731
        done = train_own(tmp_path / "run", model, reward=reward)
        (done.run / "result.json").unlink()
        monkeypatch.setattr(here, "_FUNCTIONS", {})
        with pytest.raises(
            pp.PanoplyError, match="'function' lived in the process that made the run: hand it over"
        ):
            tiny.resume(done.run)
        with pytest.raises(pp.PanoplyError, match="hand it over again"):
            pp.evaluate(done, problems=1, attempts=1)
        assert pp.train(resume=done.run, reward=reward, progress=Progress()).fingerprint == done.fingerprint
        monkeypatch.setattr(here, "_FUNCTIONS", {})
        assert pp.evaluate(done, reward=reward, problems=1, attempts=1).problems == 1

    def test_several_with_weights(self, model: Path) -> None:
        made = pp.plan("grpo", data=ROWS, model=model, reward={right: 1, (lambda completions: [0.0]): 0.25})
        assert made.world_options["weights"] == (1.0, 0.25)
        assert made.world().signals() == {"right", "function", "reward", "success"}
        several = pp.plan("grpo", data=ROWS, model=model, reward=[right, brief])
        assert several.world_options["weights"] == (1.0, 1.0)

    def test_a_wrong_number_of_rewards_ends_the_run(self, tmp_path: Path, model: Path) -> None:
        with pytest.raises(pp.PanoplyError, match="it returned 1 rewards for"):
            train_own(tmp_path / "run", model, reward=lambda completions: [1.0])
        assert not (tmp_path / "run").exists()

    def test_a_hang_costs_one_answer(self, model: Path) -> None:
        import time

        from panoply.rewards.here import HereFunction, word_of

        def slow(completions: list[str]) -> list[float]:
            time.sleep(9 if "x" in completions else 0)
            return [1.0] * len(completions)

        made = HereFunction(word_of(slow, "slow"), seconds=0.2)
        made.say = lambda text: None
        assert made({"completions": ["a", "x", "b"]}) == [1.0, None, 1.0]
        assert made.failures == {"it took longer than 0.2 s": 1}

    def test_async_here_also_where_a_loop_is_running(self) -> None:
        import asyncio

        from panoply.rewards.here import HereFunction, word_of

        async def later(completions: list[str]) -> list[float]:
            await asyncio.sleep(0)
            return [2.0] * len(completions)

        made = HereFunction(word_of(later, "later"))

        async def notebook() -> list[float | None]:
            return made({"completions": ["a", "b"]})

        with ThreadPoolExecutor(
            1
        ) as thread:  # a browser of another test may leave a loop running in this one
            inside = thread.submit(asyncio.run, notebook()).result()
        assert inside == made({"completions": ["a", "b"]}) == [2.0, 2.0]

    @pytest.mark.parametrize(
        ("choices", "why"),
        [
            ({"reward": 3}, "A reward is a function, FILE.py:NAME or the name of a part, not int"),
            ({"reward": {right: "much"}}, "The weight of a reward is a number, not 'much'"),
            ({"reward": {"r.py:f=2": 3}}, "has its weight twice"),
            ({"reward": right, "data": None}, "judges answers to your own prompts"),
        ],
    )
    def test_bad_rewards_in_one_sentence(self, choices: dict[str, Any], why: str, model: Path) -> None:
        with pytest.raises(pp.PanoplyError, match=why):
            pp.plan("grpo", **{"data": ROWS, "model": model, **choices})


class TestSources:
    """What is written down of a session, and what is not."""

    def test_a_function_with_all_it_uses(self) -> None:
        text = session.function_file(right, "right")
        space: dict[str, Any] = {}
        exec(text, space)
        assert space["right"](["ab"], ["ab"]) == [1 - 2 / 8]

    def test_what_is_not_written(self) -> None:
        counts: list[int] = []

        def closure(completions: list[str]) -> list[float]:
            return [float(len(counts))]

        for made, why in (
            (closure, "uses 'counts' of the function around it"),
            (lambda completions: [], "is a lambda"),
            (counting, "uses 'SEEN', a list of this session"),
            (storing, "changes 'LAST' of this session"),
            (Judge(), "is a Judge, not a function"),
            (Judge().judge, "is a method, not a function"),
        ):
            with pytest.raises(session.Unwritable, match=why):
                session.function_file(made, "it")
        assert own.function_name(Judge()) == "Judge"


SEEN: list[int] = []
LAST = 0


def counting(completions: list[str]) -> list[float]:
    SEEN.append(1)
    return [0.0]


def storing(completions: list[str]) -> list[float]:
    global LAST
    LAST = 1
    return [0.0]


class Judge:
    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0]

    def judge(self, completions: list[str]) -> list[float]:
        return [0.0]


for of_a_script in (counting, storing):  # not to be found by import
    of_a_script.__module__ = "__main__"
