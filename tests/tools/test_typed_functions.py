"""Typed functions as tools: schemas, calls in the words of chat templates, and a world in which they are called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_model
import pytest
import tiny
import tools_kit

import panoply as pp
from panoply.errors import PanoplyError
from panoply.tools.box import box_of
from panoply.tools.calls import Call, calls_in
from panoply.tools.schema import NoTool, schema_of, wrong_with
from panoply.trust import code_in
from panoply.worlds.text.own_tools import OwnTools

KIT = Path(tools_kit.__file__)
CHAT = (
    "{% if tools %}<|start|>system\n{% for t in tools %}{{ t.function.name }};{% endfor %}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% else %}"
    "{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_model.write(tmp_path_factory.mktemp("own") / "model", template=CHAT)


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnTools]:
    data = tmp_path_factory.mktemp("data") / "asked.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{i} + 2?", "answer": i + 2}) for i in range(20)))
    made = OwnTools(
        data=str(data), model=str(model), rewards=(f"{KIT}:graded",), seconds=1.0, costs=(0.5, 1.0, 1.0),
        tools=tuple(f"{KIT}:{name}" for name in ("add", "look", "wait")),
    )  # fmt: skip
    yield made
    made.close()


def said(world: OwnTools, text: str) -> list[int]:
    return [*world.tokenizer.encode(text), world.tokenizer.eos_id]  # type: ignore[list-item]


def test_a_schema_is_what_transformers_and_so_trl_make_of_the_function() -> None:
    theirs = pytest.importorskip("transformers.utils.chat_template_utils").get_json_schema(tools_kit.add)
    del theirs["function"]["return"]
    assert schema_of(tools_kit.add) == theirs
    assert theirs["function"]["parameters"]["properties"]["b"]["description"].endswith("may be negative.")
    kinds = schema_of(tools_kit.look)["function"]["parameters"]
    assert kinds["required"] == ["place"]
    assert kinds["properties"] == {
        "place": {"type": "string", "enum": ["left", "right"], "description": "Where."},
        "times": {"type": "array", "items": {"type": "integer"}, "nullable": True, "description": "When."},
        "far": {"type": "number"},
    }
    with pytest.raises(NoTool, match="the argument a of untyped has no type"):
        schema_of(tools_kit.untyped)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"place": "left", "times": [1, 2], "far": 2}, ""),
        ({"place": "left", "times": None}, ""),
        ({"place": "up"}, "the argument 'place' is one of 'left', 'right', not 'up'"),
        ({"place": "left", "times": [True]}, "the argument 'times' is of type array, not [True]"),
        ({"place": "left", "far": None}, "the argument 'far' is of type number, not None"),
        ({}, "the argument 'place' is missing"),
        ({"place": "left", "x": 1}, "there is no argument 'x'; there is place, times, far"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], wrong: str) -> None:
    assert wrong_with(arguments, schema_of(tools_kit.look)["function"]["parameters"]) == wrong


def test_calls_are_read_in_the_forms_of_templates() -> None:
    one, two = Call("add", {"a": 1}), Call("look", {})
    hermes = 'So:<tool_call>\n{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "look"}</tool_call>'
    assert calls_in(hermes) == ("So:", [one, two])
    mistral = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "look", "arguments": {}}]'
    assert calls_in(mistral) == ("", [one, two])
    assert calls_in('{"name": "add", "parameters": {"a": 1}}') == ("", [one])
    openai = '{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}'
    assert calls_in(openai) == ("", [one])
    assert calls_in(" The answer is {1}. ") == ("The answer is {1}.", [])
    for text, why in {
        "<tool_call>{'name'}</tool_call>": "this is no JSON",
        "<tool_call>[1]</tool_call>": "this has no name",
        '<tool_call>{"name": "add", "arguments": 3}': "its arguments are no JSON object",
        "[TOOL_CALLS] [{": "the list of calls is no JSON",
    }.items():
        (call,) = calls_in(text)[1]
        assert why in call.wrong


def test_calls_are_made_and_what_they_gave_is_shown(world: OwnTools) -> None:
    task = world._tasks["train"][0]
    number = int(task.data["row"].prompt.split()[0])
    assert world.tokenizer.decode(list(task.prompt)).startswith(
        "<|start|>system\nadd;look;wait;<|end|>\n<|start|>user"
    )
    play = world.play(task)
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {number}, "b": 2}}}}</tool_call>'
    reply = play.act(
        said(world, f'{call}<tool_call>{{"name": "look", "arguments": {{"place": "left"}}}}</tool_call>')
    )
    assert reply.signals == {"calls": 2.0, "errors": 0.0, "cost": 1.5}
    shown = world.tokenizer.decode(list(reply.observation))
    looked = '{"place": "left", "times": null, "far": 1.0}'
    assert (
        shown == f"\n<|start|>tool\n{number + 2}<|end|>\n<|start|>tool\n{looked}<|end|>\n<|start|>assistant\n"
    )
    last = play.act(said(world, f"It is {number + 2}."))
    assert last.done
    assert last.signals == {
        "calls": 0.0, "errors": 0.0, "cost": 0.0, "graded": 1.0, "reward": 1.0, "success": 1.0,
    }  # fmt: skip
    assert [m["role"] for m in play.messages] == ["assistant", "tool", "tool", "assistant"]  # type: ignore[attr-defined]


def test_what_goes_wrong_with_a_call_is_shown(world: OwnTools) -> None:
    for text, shown in {
        '{"name": "ad", "arguments": {}}': "Error: there is no tool 'ad'; did you mean 'add'?",
        '{"name": "add", "arguments": {"a": "1", "b": 2}}': "Error: the argument 'a' is of type integer, not '1'.",
        '{"name": "wait", "arguments": {"how": "raise"}}': "Error: ValueError: as asked",
        '{"name": "wait", "arguments": {"how": "die"}}': "Error: wait failed, because its process died.",
        '{"name": "wait", "arguments": {"how": "long"}}': "Error: wait took longer than 1 s.",
        '{"name": "add"': "Error: a call is a JSON object with name and arguments",
    }.items():
        reply = world.play(world.task("train", 0)).act(said(world, f"<tool_call>{text}</tool_call>"))
        assert not reply.done
        assert reply.signals["errors"] == 1
        assert shown in world.tokenizer.decode(list(reply.observation))


def test_an_episode_is_cut_at_the_cap_and_graded_as_it_is(world: OwnTools) -> None:
    play = world.play(world.task("train", 1))
    call = said(world, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    replies = [play.act(call) for _ in range(world.cap)]
    assert [r.done for r in replies] == [False] * 5 + [True]
    assert replies[-1].truncated
    assert "success" in replies[-1].signals


def test_a_run_trains_with_tools_and_names_what_it_runs(model: Path, world: OwnTools, tmp_path: Path) -> None:
    few = {"sample.prompts": 2, "sample.group": 2, "run.held_out": 2, "world.longest": 6, "world.cap": 2}
    choices: dict[str, Any] = {"model": str(model), "data": world.data, "reward": f"{KIT}:graded"}
    run = tiny.bare(tmp_path / "run", "grpo", tools=[f"{KIT}:add,look"], steps=1, settings=few, **choices).run
    stored = json.loads((run / "run.json").read_text())["plan"]
    assert stored["world"]["tools"] == [f"{KIT}:add", f"{KIT}:look"]
    assert str(KIT) in code_in(stored)
    with pytest.raises(PanoplyError, match="name them with --data"):
        pp.plan("grpo", tools=[f"{KIT}:add"], model=str(model))
    with pytest.raises(PanoplyError, match="graded by functions of yours"):
        pp.plan("grpo", tools=[f"{KIT}:add"], model=str(model), data=world.data)
    with pytest.raises(PanoplyError, match="Did you mean 'add'"):
        pp.plan("grpo", tools=[f"{KIT}:ad"], **choices)


def test_what_cannot_be_a_tool_or_has_no_template_is_one_sentence(world: OwnTools, tmp_path: Path) -> None:
    bare = own_model.write(tmp_path / "bare")
    with pytest.raises(PanoplyError, match="The model's chat template has no place for tools"):
        OwnTools(data=world.data, model=str(bare), tools=world.tools).task("train", 0)
    box_of.cache_clear()
    with pytest.raises(PanoplyError, match="The tools cannot be used: the argument a of untyped has no type"):
        OwnTools(data=world.data, model=world.model, tools=(f"{KIT}:untyped",)).task("train", 0)
