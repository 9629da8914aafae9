"""Your own data: files, rewards, preferences, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.build import open_policy
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.progress import Progress
from panoply.worlds.text.jsonl import Jsonl, read_lines

REWARDS = """
def share_of_a(completions, **_):
    return [c.count("a") / max(1, len(c)) for c in completions]

def matches(prompts, completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def picky(completions):
    if any("b" in c for c in completions):
        raise ValueError("no b, please")
    return [1.0 for _ in completions]

def never(completions):
    raise RuntimeError("out of order")
"""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MOODY = "{{ messages | length }}" + TEMPLATE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "model"
    tokenizer = Tokenizer.of_characters("abcdefghijklmnopqrstuvwxyz 0123456789+=?:;")
    config = DecoderConfig(tokenizer.vocab_size, width=16, layers=1, heads=2, max_positions=96)
    TextPolicy.fresh(config, tokenizer, seed=3).save(folder)
    return folder


def with_template(model: Path, target: Path, template: str) -> Path:
    policy = TextPolicy.load(model)
    policy.save(target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return target


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    write(tmp_path / "data.jsonl", [{"prompt": f"say {i}:", "answer": "aa"} for i in range(40)])
    return tmp_path


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(r) if not isinstance(r, str) else r for r in rows) + "\n")
    return path


def made(files: Path, model: Path, *rewards: str, **more: Any) -> Jsonl:
    sources = tuple(f"{files / 'rewards.py'}:{name}" for name in rewards)
    return Jsonl(data=str(files / "data.jsonl"), model=str(model), rewards=sources, longest=8, **more)


def test_lines_become_tasks_once_an_epoch_and_never_in_both_splits(files: Path, model: Path) -> None:
    world = made(files, model)
    train, test = world._tasks["train"], world._tasks["test"]
    assert len(train) + len(test) == 40
    assert {t.id for t in train}.isdisjoint(t.id for t in test)
    first = [world.task("train", i).id for i in range(len(train))]
    second = [world.task("train", len(train) + i).id for i in range(len(train))]
    assert sorted(first) == sorted(second) == sorted(t.id for t in train)
    assert first != second
    assert world.tokenizer.decode(list(train[0].prompt)) == train[0].data["row"].prompt


def test_rewards_are_weighted_and_get_the_fields_they_ask_for(files: Path, model: Path) -> None:
    world = made(files, model, "share_of_a", "matches", weights=(1.0, 0.5), threshold=1.2)
    task, encode = world.task("train", 0), world.tokenizer.encode
    end = world.tokenizer.eos_id
    assert end is not None
    graded = world.grade_all([task, task], [[*encode("aa"), end], encode("ab")])
    assert graded == [
        {"share_of_a": 1.0, "matches": 1.0, "reward": 1.5, "success": 1.0},
        {"share_of_a": 0.5, "matches": 0.0, "reward": 0.5, "success": 0.0},
    ]


def test_an_answer_that_cannot_be_graded_is_left_out_and_the_run_goes_on(files: Path, model: Path) -> None:
    said: list[str] = []

    class Listening(Progress):
        def say(self, text: str) -> None:
            said.append(text)

    choices: dict[str, Any] = {"sample.prompts": 4, "sample.group": 4, "world.longest": 6, "run.held_out": 2}
    result = pp.train("grpo", data=str(files / "data.jsonl"), reward=f"{files / 'rewards.py'}:picky", steps=2,
                      model=str(model), run=files / "run", settings=choices, progress=Listening())  # fmt: skip
    metrics = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["reward_failures"] > 0
    assert metrics[0]["episodes"] < 16
    assert any("no b, please" in text for text in said)


def test_when_nothing_can_be_graded_the_run_says_why_and_can_be_resumed(files: Path, model: Path) -> None:
    why = r"Not one of .* answers could be graded: .*out of order.* panoply train --resume .*run"
    with pytest.raises(PanoplyError, match=why):
        pp.train("grpo", data=str(files / "data.jsonl"), reward=f"{files / 'rewards.py'}:never", steps=1,
                 model=str(model), run=files / "run", progress=Progress())  # fmt: skip
    assert (files / "run" / "run.json").is_file()


def test_given_answers_and_preferences(files: Path, model: Path) -> None:
    rows = [{"prompt": f"p{i}:", "chosen": "aa", "rejected": "bb"} for i in range(30)]
    write(files / "pairs.jsonl", rows)
    world = Jsonl(data=str(files / "pairs.jsonl"), model=str(model))
    pair = world.pair(world.task("train", 0), np.random.default_rng(0))
    assert pair is not None
    assert [world.tokenizer.decode(answer) for answer in pair] == ["aa<end>", "bb<end>"]
    choices = {"data.batch": 4, "run.held_out": 2, "world.longest": 6}
    result = pp.train("dpo", data=str(files / "pairs.jsonl"), model=str(model), steps=2, settings=choices,
                      run=files / "run", progress=Progress(), threads=1)  # fmt: skip
    assert result.run.is_dir()


def test_chat_messages_go_through_the_template(files: Path, model: Path) -> None:
    chatty = with_template(model, files / "chatty", TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    write(files / "chat.jsonl", [{"prompt": messages, "completion": "ab"}] * 3)
    world = Jsonl(data=str(files / "chat.jsonl"), model=str(chatty))
    assert world.tokenizer.decode(list(world.task("train", 0).prompt)) == "u:hi;a:"
    with pytest.raises(PanoplyError, match="has no chat template"):
        Jsonl(data=str(files / "chat.jsonl"), model=str(model)).task("train", 0)
    moody = with_template(model, files / "moody", MOODY)
    with pytest.raises(PanoplyError, match="not append-only"):
        Jsonl(data=str(files / "chat.jsonl"), model=str(moody)).task("train", 0)


def test_prompts_that_are_too_long(files: Path, model: Path) -> None:
    long = "x" * 20
    write(
        files / "data.jsonl",
        [{"prompt": long + str(i)} for i in range(3)] + [{"prompt": f"q{i}"} for i in range(9)],
    )
    with pytest.raises(PanoplyError, match=r"3 of 12 prompts .* the first on line 1"):
        made(files, model, longest_prompt=10).task("train", 0)
    assert sum(map(len, made(files, model, longest_prompt=10, too_long="drop")._tasks.values())) == 9
    cut = made(files, model, longest_prompt=10, too_long="cut")._tasks
    assert max(len(t.prompt) for tasks in cut.values() for t in tasks) == 10


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (['{"prompt": "a"}', '{"prompt": '], "Line 2 of .* is not valid JSON"),
        (["[1, 2]"], "Line 1 of .* cannot be used: it is an object, not a list of 2"),
        (["", ""], "holds no data"),
    ],
)
def test_broken_files(tmp_path: Path, rows: list[str], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        list(read_lines(str(write(tmp_path / "broken.jsonl", rows))))


def test_missing_things(files: Path, model: Path) -> None:
    write(files / "odd.jsonl", [{"prompt": "a"}, {"question": "b"}])
    with pytest.raises(PanoplyError, match=r"Line 2 of .* has no field 'prompt'"):
        Jsonl(data=str(files / "odd.jsonl"), model=str(model)).task("train", 0)
    with pytest.raises(PanoplyError, match="There is no data file"):
        pp.plan("grpo", data="nowhere.jsonl", model=str(model))
    for none in ({}, {"model": "start"}, {"model": "fresh"}):
        with pytest.raises(PanoplyError, match="needs a model of your own"):
            pp.plan("grpo", data=str(files / "data.jsonl"), **none)
    with pytest.raises(PanoplyError, match="Name a reward function"):
        pp.plan("grpo", data=str(files / "data.jsonl"), model=str(model))
    with pytest.raises(PanoplyError, match="name them with --data"):
        pp.plan("grpo", reward=f"{files / 'rewards.py'}:share_of_a")


def test_functions_that_share_a_name_have_columns_of_their_own(model: Path, files: Path) -> None:
    (files / "other.py").write_text("def share_of_a(completions):\n    return [0.25] * len(completions)\n")
    rewards = tuple(str(files / name) + ":share_of_a" for name in ("rewards.py", "other.py"))
    world = Jsonl(data=str(files / "data.jsonl"), model=str(model), rewards=rewards)
    names = {"rewards.share_of_a", "other.share_of_a"}
    assert world.signals() == {"success", "reward", *names}
    graded = world.grade(world.task("train", 0), world.tokenizer.encode("ab"))
    assert graded == {"rewards.share_of_a": 0.5, "other.share_of_a": 0.25, "reward": 0.75, "success": 1.0}
    with pytest.raises(PanoplyError, match="the same name in files of the same name"):
        Jsonl(data=str(files / "data.jsonl"), model=str(model), rewards=rewards[:1] * 2)


@pytest.mark.parametrize(
    ("method", "line", "sentence"),
    [
        ("sft", {}, "prompts.jsonl has none: its lines need 'completion' to be imitated"),
        ("dpo", {}, "prompts.jsonl has none to compare: its lines need 'chosen' and 'rejected'"),
        (
            "dpo",
            {"completion": "1"},
            "prompts.jsonl has none to compare: its lines need 'chosen' and 'rejected'",
        ),
    ],
)
def test_methods_that_need_answers_say_which_fields(
    method: str, line: dict[str, str], sentence: str, model: Path, files: Path
) -> None:
    write(files / "prompts.jsonl", [{"prompt": "say 1:", **line}])
    with pytest.raises(PanoplyError, match=sentence):
        pp.plan(method, data=str(files / "prompts.jsonl"), model=str(model))


PAIR = {"prompt": "say 1:", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("method", "good", "late", "field"),
    [
        ("dpo", PAIR, {"prompt": "say 2:", "chosen": "a"}, "'rejected' with text"),
        ("dpo", PAIR, {**PAIR, "rejected": None}, "'rejected' with text"),
        ("dpo", PAIR, {**PAIR, "rejected": ["b"]}, "'rejected' with text"),
        ("dpo", PAIR, {**PAIR, "rejected": [{"role": "assistant"}]}, "'rejected' with text"),
        ("dpo", PAIR, {"prompt": "say 2:", "rejected": "a"}, "'chosen' with text"),
        ("dpo", PAIR, {**PAIR, "chosen": "\ud800"}, "'chosen' with text"),
        ("sft", PAIR, {"prompt": "say 2:"}, "'chosen' with text"),
        (
            "sft",
            {"prompt": "say 1:", "completion": "a"},
            {"prompt": "say 2:", "completion": 3},
            "'completion' with text",
        ),
        ("grpo", {"prompt": "say 1:"}, {"question": "say 2:"}, "'prompt' with text or messages"),
        ("grpo", {"prompt": "say 1:"}, {"prompt": ""}, "'prompt' with text or messages"),
        ("grpo", {"prompt": "say 1:"}, {"prompt": ["say 2:"]}, "'prompt' with text or messages"),
    ],
)
def test_every_line_is_checked_for_what_the_method_needs(
    method: str, good: dict[str, Any], late: dict[str, Any], field: str, model: Path, files: Path
) -> None:
    """Before any compute, wherever the line is: a run would come to it at some late step, and again when resumed."""
    rows = [good] * 30
    choices: dict[str, Any] = {"data": str(files / "late.jsonl"), "model": str(model)}
    if method == "grpo":
        choices["reward"] = f"{files / 'rewards.py'}:share_of_a"
    write(files / "late.jsonl", rows)
    pp.plan(method, **choices)
    for lines, number in (([*rows, late], 31), ([late, *rows], 1)):
        write(files / "late.jsonl", lines)
        with pytest.raises(PanoplyError) as refused:
            pp.plan(method, **choices)
        assert (
            str(refused.value)
            == f"Line {number} of {files / 'late.jsonl'} has no field {field}: mend the line, or leave it out."
        )


def test_answers_that_a_method_does_not_ask_for_may_lack(model: Path, files: Path) -> None:
    write(files / "some.jsonl", [PAIR, {"prompt": "say 2:"}, {"prompt": "say 3:", "chosen": 3}])
    reward = f"{files / 'rewards.py'}:share_of_a"
    pp.plan("grpo", data=str(files / "some.jsonl"), model=str(model), reward=reward)


def test_a_file_that_is_not_utf_8(model: Path, files: Path) -> None:
    (files / "latin.jsonl").write_bytes(b'{"prompt": "say 1:"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(PanoplyError, match=r"Line 2 of .*latin\.jsonl is not text in UTF-8"):
        pp.plan("sft", data=str(files / "latin.jsonl"), model=str(model))


def test_plain_prompts_begin_as_the_model_was_taught(model: Path, files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with-bos"
    TextPolicy.load(model).save(folder)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    core.save(str(folder / "tokenizer.json"))
    world = Jsonl(data=str(files / "data.jsonl"), model=str(folder))
    prompt = world.task("train", 0).prompt
    assert prompt[0] == 0
    assert world.tokenizer.decode(prompt[1:]).startswith("say")
    assert open_policy(str(folder), world, 0).tokenizer.encode_prompt("a")[0] == 0
