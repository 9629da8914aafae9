"""Methods, parts, worlds, rows and functions handed over in Python, as the README has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import own_model
import pytest
import tiny

import panoply as pp
from panoply import extensions, given, own, registry, session
from panoply.methods.base.dapo import dapo
from panoply.methods.base.grpo import grpo
from panoply.planning import Plan
from panoply.progress import Progress
from panoply.recipes import Recipe, Stage
from panoply.run import Run
from panoply.slots.credit.anchors import episode_and_anchor
from panoply.slots.credit.groups import group
from panoply.slots.regularise.terms import kl
from panoply.slots.reward.signals import signal
from panoply.slots.update.optimisers import adam
from panoply.worlds.text.chain import Chain

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(12)]
SMALL = {"sample.prompts": 2, "sample.group": 4, "sample.max_tokens": 4, "run.held_out": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_model.write(tmp_path_factory.mktemp("given") / "my-model")


def right(completions: list[str], answer: list[str]) -> list[float]:
    return [brief(text) + (text == known) for text, known in zip(completions, answer, strict=True)]


def brief(text: str) -> float:
    return -len(text) / LONGEST


LONGEST = 8.0


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
        told = task.data["line"]["answer"]
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


for of_a_script in (right, brief, counting, storing):  # not to be found by import
    of_a_script.__module__ = "__main__"


SCRIPT = """
    import sys

    import helpers
    import panoply as pp
    from panoply.methods.base.grpo import TINY, grpo

    SHARE = 0.5


    def centre(values):
        return helpers.shifted(values, SHARE)


    @pp.part("credit", equation="A = R − ½")
    def half(experience, *, scale: float = 1.0):
        episodes = experience.by("episode")
        return scale * episodes.rows(centre(episodes.sum(experience["reward"])))


    @pp.method("half-grpo@1", base="grpo", presets={"tiny": TINY})
    def half_grpo():
        return grpo().but(credit=half())


    settings = {"world.operations": 2, "run.held_out": 4, "sample.prompts": 2, "sample.group": 4}
    found = pp.compare(
        "grpo:update.lr=0.1", {"mine": grpo().but(credit=half(scale=2.0))}, half_grpo(), world="chain", seeds=1,
        budget="steps=1", settings=settings, model="fresh", workers=1, folder="found", cache="cache",
    )
    print([r.arm.label for r in found.results], found.failed)
    print(found.results[1].folders[0])
"""


def test_a_method_of_a_script_runs_in_the_workers_of_compare_and_can_be_evaluated(tmp_path: Path) -> None:
    """The script has no guard against being imported: it is not run again, only its definitions are."""
    script, (body, _) = textwrap.dedent(SCRIPT), textwrap.dedent(SCRIPT).split("found = ")
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "helpers.py").write_text("def shifted(values, by):\n    return values - by\n")
    done = python(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    labels, folder = done.stdout.splitlines()
    assert labels == "['grpo:update.lr=0.1', 'mine', 'half-grpo'] {}"
    kept = (tmp_path / folder / "given/definitions.py").read_text()
    assert "pp.compare" not in kept
    assert "SHARE = 0.5" in kept
    (tmp_path / folder / "result.json").unlink()
    (tmp_path / "script.py").write_text(
        f"{body}\ndone = pp.train(resume={folder!r})\nprint(pp.evaluate(done, problems=2, attempts=1).problems)"
    )
    assert python(tmp_path, "script.py").stdout == "2\n", (
        "what the script defines is what the run was made with"
    )


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_definitions_that_differ_from_those_of_a_run_are_not_mixed_up(
    tmp_path: Path, registries: None
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import panoply as pp\nBY = 2.0\n\n\n@pp.part('credit')\ndef by_two(experience):\n"
        "    return experience['reward'] * BY\n"
    )
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(file.read_text(), file, "exec"), space)
    made = pp.plan("grpo", credit=space["by_two"]())
    (kept,) = made.plugins
    assert "BY = 2.0" in Path(kept).read_text()
    extensions.load_plugin(kept)
    assert registry.find_part("credit", "by_two") is space["by_two"], "it is here already"
    other = tmp_path / "definitions.py"
    other.write_text(Path(kept).read_text().replace("BY = 2.0", "BY = 3.0"))
    with pytest.raises(pp.PanoplyError, match=r"credit\.by_two is defined otherwise in this session"):
        extensions.load_plugin(other)
    file.write_text(file.read_text().replace("* BY", "/ BY"))
    assert str(session.missing(made)).startswith("The file that credit.by_two is written in was changed")


def test_the_same_data_is_found_again_wherever_it_is_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from panoply.evidence import cache

    first = pp.plan("grpo", data=ROWS, model=model, reward=right)
    monkeypatch.setattr(
        given, "_temporary", lambda process: Path(given.tempfile.mkdtemp(prefix="panoply-given-"))
    )
    second = pp.plan("grpo", data=ROWS, model=model, reward=right)
    assert first.world_options["data"] != second.world_options["data"]
    assert cache.identity(first) == cache.identity(second)
    assert cache.identity(first) != cache.identity(pp.plan("grpo", data=ROWS[1:], model=model, reward=right))


def test_a_script_that_is_its_own_plug_in_does_not_start_itself_for_ever(
    tmp_path: Path, registries: None
) -> None:
    (tmp_path / "script.py").write_text('import panoply as pp\npp.train("grpo", plugins=["script.py"])\n')
    why = r"script\.py trains while it is loaded as a plug-in: put that below if __name__ == '__main__'"
    with pytest.raises(pp.PanoplyError, match=why):
        extensions.load_plugin(tmp_path / "script.py")


def test_what_only_this_process_has_is_refused_by_compare(
    model: Path, registries: None, tmp_path: Path
) -> None:
    offset = 0.5

    @pp.part("credit")
    def bound(experience: Any) -> Any:
        return experience["reward"] - offset

    method = grpo().but(credit=bound())
    with pytest.raises(
        pp.PanoplyError, match=r"Credit.bound uses 'offset' of the function around it: put it into a"
    ):
        pp.compare("grpo", method, world="chain", seeds=1, budget="steps=1", cache=tmp_path)
    with pytest.raises(pp.PanoplyError, match="'function' exists in this process alone"):
        pp.compare(
            "grpo", "rloo", data=ROWS, model=model, reward=lambda completions: [0.0], seeds=1, budget="steps=1",
            settings=SMALL, cache=tmp_path,
        )  # fmt: skip
    notes = tiny.Notes()
    plain: dict[str, Any] = {"settings": tiny.SETTINGS, "model": "fresh", "steps": 1, "threads": 1}
    pp.train(method, run=tmp_path / "run", progress=notes, **plain)
    assert "Until then the run belongs to this process." in notes.said[0]


def test_a_part_that_was_defined_anew_is_not_taken_for_the_new_one(registries: None) -> None:
    def define(by: float) -> Any:
        space = {"by": by, "pp": pp}
        exec("@pp.part('credit')\ndef anew(experience):\n    return experience['reward'] * by", space)
        return space["anew"]

    old = define(1.0)()
    define(2.0)
    with pytest.raises(pp.PanoplyError, match=r"credit\.anew was defined anew after this part had been made"):
        pp.plan("grpo", credit=old)


def test_rows_and_parts_of_a_recipe_are_kept_with_it(tmp_path: Path, model: Path, registries: None) -> None:
    @registry.recipe("toy-two@1")
    def two() -> Recipe:
        return Recipe((Stage("first", "sft"), Stage("second", "sft", options={"model": "@first"})))

    rows = [{"prompt": str(n), "completion": "b"} for n in range(12)]
    settings = {"run.steps": 1, "run.held_out": 1, "first.data.batch": 2, "second.data.batch": 2}
    settings |= {"second.update": adam(lr=1e-5)}
    choices: dict[str, Any] = {"data": rows, "model": model, "settings": settings, "threads": 1}
    done = pp.train("toy-two", run=tmp_path / "all", progress=Progress(), **choices)
    kept = tmp_path / "all/given/data.jsonl"
    assert [json.loads(line) for line in kept.read_text().splitlines()] == rows
    made = Run.open(done.run).plan()
    assert made.world_options["data"] == str(kept.resolve())
    assert made.method.slots()["update"] == adam(lr=1e-5)
    (done.run / "result.json").unlink()
    assert tiny.resume(tmp_path / "all").fingerprint == done.fingerprint


def test_paths_are_taken_as_paths(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made = pp.plan("grpo", data=file, model=model, reward=right)
    assert made.world_options["data"] == str(file)
    assert made.options.model == os.fspath(model)


def test_own_data_is_compared_from_python_and_from_the_command_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from panoply import cli
    from panoply.evidence import compare as comparing

    asked: list[Any] = []

    def run_all(orders: Any, *_: Any) -> None:
        asked.append([(o.plan.world_id, o.plan.world_options["weights"], o.plan.method_id) for o in orders])
        raise pp.PanoplyError("That is enough.")

    monkeypatch.setattr(comparing.pool, "run_all", run_all)
    with pytest.raises(pp.PanoplyError, match="That is enough"):
        pp.compare("grpo", "rloo", data=ROWS, reward={right: 2.0}, model=model, seeds=1, budget="steps=1")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "r.py").write_text("def f(completions):\n    return [0.0] * len(completions)\n")
    words = [
        "--data",
        str(tmp_path / "data.jsonl"),
        "--reward",
        f"{tmp_path / 'r.py'}:f=2",
        "--model",
        str(model),
    ]
    with pytest.raises(SystemExit):
        cli.main(["compare", "grpo", "rloo", *words, "--seeds", "1", "--budget", "steps=1"])
    assert asked[0] == asked[1] == [("jsonl@1", (2.0,), "grpo@1"), ("jsonl@1", (2.0,), "rloo@1")]


def test_slots_are_named_one_by_one() -> None:
    for call in (pp.plan, pp.train):
        with pytest.raises(pp.PanoplyError, match=r"by the name of their slot, such as credit=group\(\)"):
            call("grpo", slots={"credit": group()})  # type: ignore[operator]
