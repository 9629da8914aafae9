"""The examples of your own model, data, rewards and world, on a tiny model folder written by transformers.

Commands are taken from the examples' pages and run as they stand, but for fewer and smaller steps.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import own_model
import pytest
import tiny
import torch

import panoply as pp
from panoply import cli, extensions, registry
from panoply.errors import PanoplyError
from panoply.rewards.functions import RewardFunction
from panoply.rewards.worker import call, load
from panoply.rollout.text import Collector
from panoply.run import Run
from panoply.worlds.text.jsonl import Jsonl

EXAMPLES = tiny.ROOT / "examples"
SMALL = {
    "grpo": ("sample.prompts=2", "sample.group=4"),
    "sft": ("data.batch=4",),
    "dpo": ("data.batch=4",),
}


def commands(page: Path) -> list[list[str]]:
    """The `panoply` commands in a page's code blocks, and of a module in its first docstring."""
    text = page.read_text()
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL) if page.suffix == ".md" else [text.split('"""')[1]]
    joined = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in joined if line.startswith("panoply ")]


def small(words: list[str]) -> list[str]:
    """The same command with two steps and little to do in them."""
    if words[0] == "eval":
        return [*words, "--problems", "2", "--attempts", "8"]
    if words[0] != "train":
        return words
    sets = [w for s in (*SMALL[words[1]], "run.held_out=2") for w in ("--set", s)]
    return [*words, *sets, "--steps", "2", "--threads", "1", "--quiet"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `my-model` and `examples/`, in which commands are run one after another."""
    folder = tmp_path_factory.mktemp("own")
    own_model.write(folder / "my-model")
    shutil.copytree(EXAMPLES, folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def run(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert not ended.value.code, words


PAGES = (
    "own_prompts/README.md",
    "own_preferences/README.md",
    "own_chat/README.md",
    "lora/README.md",
    "own_world_with_tools.py",
)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_an_example_run(page: str, place: Path, registries: None) -> None:
    if page.startswith("lora"):
        pytest.importorskip("peft")
    found = commands(EXAMPLES / page)
    trained = [words for words in found if words[0] == "train"]
    assert trained
    for words in found:
        run(small(words))
    for words in trained:
        metrics = tiny.metrics(place / words[words.index("--run") + 1])
        assert len(metrics) == 2
        assert all(np.isfinite(m["loss"]) for m in metrics)


# ------------------------------------------------------------------ rewards


def test_the_rewards_of_own_prompts() -> None:
    file = str(EXAMPLES / "own_prompts/reward.py")
    fields = {
        "prompts": ["", "", ""],
        "completions": ["6", "6 and more", "x" * 40],
        "answer": ["6", "6", "7"],
    }
    assert call(load(file, "correct"), fields) == [1.0, 1.0, 0.0]
    assert call(load(file, "brief"), fields) == [1 - 1 / 32, 1 - 10 / 32, 0.0]


def test_two_rewards_are_weighted_and_logged_apart(place: Path) -> None:
    source = "examples/own_prompts/reward.py"
    plan = pp.plan(
        "grpo",
        data="examples/own_prompts/data.jsonl",
        model="my-model",
        reward=[f"{source}:correct", f"{source}:brief=0.2"],
    )
    world = plan.world()
    task = world.task("train", 0)
    graded = world.grade(task, world.tokenizer.encode(task.data["row"].line["answer"]))
    short = 1 - len(task.data["row"].line["answer"]) / 32
    assert graded == {"correct": 1.0, "brief": short, "reward": 1 + 0.2 * short, "success": 1.0}


@pytest.mark.parametrize(
    ("method", "shown"), [("grpo", "reward"), ("rloo", "reward − 0.03·log π/π_reference")]
)
def test_the_whole_reward_is_learnt_from_and_not_only_success(method: str, shown: str, place: Path) -> None:
    choices = {"data": "examples/own_prompts/data.jsonl", "reward": "examples/own_prompts/reward.py:brief"}
    plan = pp.plan(method, model="my-model", **choices)  # type: ignore[arg-type]
    assert plan.method.slots()["reward"].equation() == shown  # type: ignore[union-attr]
    path = "reward.reward.name" if method == "rloo" else "reward.name"
    plan = pp.plan(method, model="my-model", settings={path: "success"}, **choices)  # type: ignore[arg-type]
    assert "success" in plan.method.slots()["reward"].equation()  # type: ignore[union-attr]


def test_chat_answers_come_as_messages_and_plain_ones_as_text(tmp_path: Path, place: Path) -> None:
    seen = (
        "def seen(prompts, completions, completion_ids, extra):\n"
        "    assert isinstance(prompts[0], list) == isinstance(completions[0], list)\n"
        "    said = [c if isinstance(c, str) else c[0]['content'] for c in completions]\n"
        "    return [len(c) + 10 * len(i) + 100 * (e or 0) for c, i, e in zip(said, completion_ids, extra)]\n"
    )
    (tmp_path / "seen.py").write_text(seen)
    chat = [{"role": "user", "content": "hi"}]
    for prompt in ("hi", chat):
        rows = [{"prompt": prompt}, {"prompt": prompt, "extra": 3}]
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        world = Jsonl(
            data=str(tmp_path / "data.jsonl"),
            model=str(place / "my-model"),
            rewards=(f"{tmp_path / 'seen.py'}:seen",),
        )
        tasks = {t.data["row"].number: t for found in world._tasks.values() for t in found}
        end = world.tokenizer.eos_id
        assert end is not None
        graded = world.grade_all([tasks[1], tasks[2]], [[*world.tokenizer.encode("ab"), end], []])
        assert [g and g["seen"] for g in graded] == [32.0, 300.0]


def test_a_line_keeps_its_number_where_others_are_empty(tmp_path: Path, place: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n\n\n{"question": "b"}\n')
    with pytest.raises(PanoplyError, match=r"Line 4 of .* has no field 'prompt'"):
        Jsonl(data=str(tmp_path / "data.jsonl"), model=str(place / "my-model")).task("train", 0)


def test_the_math_reward_compares_answers_as_mathematics() -> None:
    pytest.importorskip("math_verify")
    reward = RewardFunction(f"{EXAMPLES / 'math_rewards.py'}:equivalent")
    message = [{"role": "assistant", "content": "It is 0.5"}]
    answers = ["It is 1/2", message, r"so \boxed{\frac{2}{4}}", "$x(x+1)$", "It is 3", ""]
    right = ["1/2", "1/2", "0.5", "x^2+x", "2", "2"]
    assert reward({"completions": answers, "answer": right}) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_without_math_verify_the_reward_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(PanoplyError, match=r"needs math-verify: pip install \"panoply-rl\[math\]\""):
        RewardFunction(f"{EXAMPLES / 'math_rewards.py'}:equivalent")


# ------------------------------------------------------------------ the world with a tool


@pytest.fixture
def sums(registries: None) -> registry.Entry:
    extensions.load_plugin(EXAMPLES / "own_world_with_tools.py")
    return registry.find("world", "sums")


def test_the_world_is_sound_and_short(sums: registry.Entry) -> None:
    sums.build().self_test()
    lines = (EXAMPLES / "own_world_with_tools.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 75


def test_an_episode_calls_the_tool_and_sees_its_result(sums: registry.Entry) -> None:
    world = sums.build()
    task = world.task("train", 0)
    question = task.data["question"]
    play = world.play(task)
    reply = play.act(world.tokens(f"?{question}"))
    total = str(sum(map(int, question.split("+"))))
    assert (world.tokenizer.decode(list(reply.observation)), reply.done) == (total + ">", False)
    assert play.act(world.tokens(f"!{total}")).signals == {"success": 1.0, "calls": 0.0}
    lost = [world.play(task).act(world.tokens(said)) for said in ("?1+", "7", "")]
    assert [world.tokenizer.decode(list(r.observation)) for r in lost] == ["error>"] * 3


def test_the_policy_learns_from_what_it_said_and_not_from_the_tool(sums: registry.Entry) -> None:
    """Observations are in the context of later turns, but are no decisions."""
    from panoply.policies.decoder import DecoderConfig
    from panoply.policies.text import TextPolicy

    world = sums.build()
    policy = TextPolicy.fresh(DecoderConfig(**world.default_model()), world.tokenizer, seed=1)
    found = Collector(world, policy, seed=0).episodes([world.task("train", i) for i in range(8)], 2)
    assert int(found["turn"].max()) == 2
    lengths = found.context.ragged("tokens").lengths
    assert len(found) < int((lengths - found.context.tensor("shared")).sum())
    with torch.no_grad():
        torch.testing.assert_close(policy.score(found)["logp"], found["logp"], atol=1e-4, rtol=1e-4)


def test_it_trains_on_a_model_of_your_own(sums: registry.Entry, place: Path) -> None:
    plugin = str(EXAMPLES / "own_world_with_tools.py")
    run(small(["train", "grpo", "--world", "sums", "--plugin", plugin, "--model", "my-model",
               "--set", f"world.model={place / 'my-model'}", "--run", "runs/own-sums"]))  # fmt: skip
    assert Run.open("runs/own-sums").status() == "finished"
