"""The user's own: data (a file or rows) and reward functions (in files, or handed over) become a world."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from panoply import registry, session
from panoply.compose import assign
from panoply.errors import PanoplyError, nearest, unknown
from panoply.files import read_bytes
from panoply.given import is_rows, keep, rows_file
from panoply.parts import Part
from panoply.regimes import Method
from panoply.rewards import here
from panoply.serving.record import is_record
from panoply.which import model_folder


def is_data_file(data: Any) -> bool:
    """Whether `--data` names a file and not a part."""
    return isinstance(data, str) and data.endswith((".jsonl", ".json"))


def in_words(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The same choices with rows and functions as files, and paths as text: what can be written down."""
    found = dict(choices)
    for name in ("model", "reference", "reward_model", "data"):
        if isinstance(found.get(name), os.PathLike):
            found[name] = os.fspath(found[name])
    if is_rows(found.get("data")):
        found["data"] = rows_file(found["data"])
    reward = found.get("reward")
    if reward is not None and not isinstance(reward, Part):
        words = [_word(one, weight) for one, weight in _weighted(reward)]
        found["reward"] = words[0] if len(words) == 1 and not _is_function(words[0]) else words
    if found.get("tools"):
        given = found["tools"] if isinstance(found["tools"], list | tuple) else [found["tools"]]
        found["tools"] = [one if isinstance(one, str) else _tool_word(one) for one in given]
    if found.get("plugins"):
        found["plugins"] = [os.fspath(plugin) for plugin in found["plugins"]]
    return found


def _weighted(reward: Any) -> list[tuple[Any, float | None]]:
    """One reward, several in a list, or several with their weights, `{function: 0.5}`."""
    if isinstance(reward, Mapping):
        for one, weight in reward.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise PanoplyError(f"The weight of a reward is a number, not {weight!r}.")
            if isinstance(one, str) and "=" in one:
                raise PanoplyError(f"'{one}' has its weight twice: leave one of them out.")
        return [(one, float(weight)) for one, weight in reward.items()]
    return [(one, None) for one in (reward if isinstance(reward, list | tuple) else [reward])]


def _word(reward: Any, weight: float | None) -> str:
    if isinstance(reward, str):
        word = reward
    elif callable(reward) and not isinstance(reward, Part):
        word = function_word(reward)
    else:
        raise PanoplyError(
            f"A reward is a function, FILE.py:NAME or the name of a part, not {type(reward).__name__}."
        )
    return word if weight is None else f"{word}={weight!r}"


def _tool_word(tool: Any) -> str:
    """`FILE.py:NAME` of a tool that is handed over in Python."""
    if not callable(tool):
        raise PanoplyError(f"A tool is a function, or FILE.py:NAME, not {type(tool).__name__}.")
    word = function_word(tool)
    if here.is_here(word):
        raise PanoplyError(
            f"The tool {function_name(tool)} lives in this process alone: write it into a file, FILE.py:NAME, so "
            "that it can run in one of its own."
        )
    return word


def function_word(function: Callable[..., Any]) -> str:
    """`FILE.py:NAME` of a function that can be written to a file, or a word for one that only this process has."""
    name = function_name(function)
    try:
        return f"{keep(session.function_file(function, name), f'{name}.py')}:{name}"
    except session.Unwritable:
        return here.word_of(function, name)


def function_name(function: Any) -> str:
    """What a function is called in metrics: its own name, or what stands for one that has none."""
    if isinstance(function, functools.partial):
        return function_name(function.func)
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if name.isidentifier() else "function"


def _is_function(word: str) -> bool:
    return ".py" in word or here.is_here(word)


def own_data(world: str | None, choices: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """A data file and reward functions as the world `jsonl`, or the choices as they are."""
    found = dict(choices)
    named = found.get("reward") or []
    named = list(named) if isinstance(named, list | tuple) else [named]
    functions = [word for word in named if isinstance(word, str) and _is_function(word)]
    for word in functions:
        if not here.is_here(word):
            _check_function(word)
    data = found.get("data")
    tools = [name for word in found.pop("tools", None) or () for name in _tools(word)]
    if tools and not is_data_file(data):
        raise PanoplyError("Tools are called to answer questions of yours: name them with --data FILE.jsonl.")
    if tools and not functions:
        raise PanoplyError(
            "Answers with tools are graded by functions of yours: name one with --reward FILE.py:NAME."
        )
    if isinstance(data, str) and not is_data_file(data) and ("." in data or os.path.sep in data):
        raise PanoplyError(f"--data takes FILE.jsonl, with one JSON object a line; '{data}' is not one.")
    if not (isinstance(data, str) and is_data_file(data)):
        if functions:
            raise PanoplyError(
                "A reward function judges answers to your own prompts: name them with --data FILE.jsonl."
            )
        if len(named) > 1:
            raise PanoplyError("Only reward functions, FILE.py:NAME, can be several.")
        found = {**found, "reward": named[0]} if named else found
        return world, spoken_with(world, found, found.get("model"))
    if is_record(data):
        if tools or functions or world not in ("recorded", "recorded@1", None):
            raise PanoplyError(
                f"{data} is a record of episodes, with their world and their rewards: leave others out."
            )
        return "recorded", {
            **{k: v for k, v in found.items() if k != "data"},
            "reward": named[0] if named else None,
            "settings": {**_own_file(data, found.get("model")), **(found.get("settings") or {})},
        }
    if world not in ("jsonl", "jsonl@1", "own-tools", None):
        raise PanoplyError(f"--data {data} is a world of its own: leave --world {world} out.")
    of_file = _own_file(data, found.get("model"))
    split = [word.rpartition("=") if "=" in word else (word, "", "1") for word in functions]
    try:
        weights = tuple(float(weight) for _, _, weight in split)
    except ValueError as error:
        raise PanoplyError("A reward's weight is a number: --reward FILE.py:NAME=0.5.") from error
    made = {
        **of_file,
        "world.rewards": tuple(s if here.is_here(s) else os.path.abspath(s) for s, _, _ in split),
        "world.weights": weights,
        **({"world.tools": tuple(tools)} if tools else {}),
    }
    others = [word for word in named if word not in functions]
    known = {*registry.parts("reward"), *registry.names("method")} if others else set()
    for word in others:
        if isinstance(word, str) and word.split("@")[0] not in known:
            raise PanoplyError(f"Unknown reward '{word}'. A function of yours is named FILE.py:NAME.")
    kept = {k: v for k, v in found.items() if k not in ("data", "reward")}
    return "own-tools" if tools else "jsonl", {
        **kept,
        "reward": others[0] if others else None,
        "settings": {**made, **(found.get("settings") or {})},
    }


def _own_file(data: str, model: Any) -> dict[str, Any]:
    """The settings of a world that is a file, read with a model's tokenizer."""
    if not model or str(model) in ("start", "fresh"):
        raise PanoplyError("Your own data needs a model of your own: name its folder with --model.")
    return {"world.data": os.path.abspath(data), "world.model": str(model_folder(model).resolve())}


def spoken_with(world: str | None, choices: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The choices with the model whose tokens a world is spoken with, where it has none of its own."""
    settings = dict(choices.get("settings") or {})
    if not model or world is None or "world.model" in settings or ":" not in world:
        return dict(choices)
    entry = registry.implied(world)
    if not getattr(entry and entry.build, "own_tokens", False):
        return dict(choices)
    return {**choices, "settings": {**settings, "world.model": str(model_folder(model).resolve())}}


def _tools(word: str) -> Iterator[str]:
    """`FILE.py:add,sub` as one name for each function, the file as an absolute path."""
    file = ""
    for name in word.split(","):
        at, colon, function = name.rpartition(":")
        file = at if colon else file
        if not file:
            raise PanoplyError(f"A tool is named FILE.py:NAME, not '{word}'.")
        _check_function(f"{file}:{function}")
        yield f"{os.path.abspath(file)}:{function}"


def judged_by(folder: str, method: Method, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `--reward-model DIR` is short for: the model beside the policy, and its word as what is earned.

    A method may look at that word elsewhere by itself, such as in a sum (`reward.blend`) or in its credit.
    """
    if "models" not in method.slot_of or "reward" not in method.slot_of:
        raise PanoplyError(
            "--reward-model has no effect: a method that learns from given data earns no reward."
        )
    of = "models.reward_model"
    made = assign(method, f"{of}.folder", folder)
    for path, value in settings.items():
        made = assign(made, path, value) if path.startswith(f"{of}.") else made
    said = made.settings()
    outputs, name = said[f"{of}.outputs"], said[f"{of}.name"]
    signals = {f"signal:{name}_{output}" for output in outputs} or {f"signal:{name}"}
    found = {f"{of}.folder": folder}
    if signals & method.needs():
        return found
    earned = list(_signals("reward", getattr(method, "reward", None)))
    if len(earned) != 1 or len(signals) != 1:
        names = ",".join(sorted(signal[7:] for signal in signals))
        raise PanoplyError(
            f"What a reward model says is {names}, and what is earned of it is to be said: --reward blend --set "
            f"reward.names={names}."
        )
    return {**found, f"{earned[0]}.name": signals.pop()[7:]}


def _signals(path: str, held: Any) -> Iterator[str]:
    """Where a reward looks at a signal of the world as it is, inside of whatever other parts make of it."""
    if isinstance(held, Part):
        if held.info.id == "reward.signal":
            yield path
        for name in held.annotations():
            yield from _signals(f"{path}.{name}", getattr(held, name))


def _check_function(word: str) -> None:
    """Refuse what is not FILE.py:NAME[=WEIGHT] of a function that is there. The file is looked at, and not run."""
    file, separator, rest = word.partition(".py")
    file, name = file + separator, rest.removeprefix(":").split("=")[0]
    if not os.path.isfile(file):
        beside = [p.name for p in Path(file).parent.glob("*.py")] if Path(file).parent.is_dir() else []
        near = nearest(Path(file).name, beside)
        hint = f" Did you mean '{near[0]}'?" if near else " A reward function is named FILE.py:NAME."
        raise PanoplyError(f"There is no file '{file}'.{hint}")
    functions, bound = _names(file)
    if not name or not rest.startswith(":"):
        such = f", such as {file}:{functions[0]}" if functions else ""
        has = f" {file} has {', '.join(functions[:8])}." if len(functions) > 1 else ""
        raise PanoplyError(f"A reward function is named FILE.py:NAME{such}.{has}")
    if bound is not None and name not in bound:
        raise unknown(f"function of {file}", name, functions)


def _names(file: str) -> tuple[list[str], set[str] | None]:
    """The functions of a file, and all names it binds, if that can be told without running it."""
    try:
        tree = ast.parse(read_bytes(file))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return [], None  # what is wrong with it is said when it is loaded
    made = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [n.name for n in tree.body if isinstance(n, made) and not n.name.startswith("_")]
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, (*made, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name):
            bound.add(node.id)
    return functions, None if "*" in bound else bound


def functions_by_name(reward: Any) -> dict[str, Callable[..., Any]]:
    """Functions that are handed over again, to a run that needs them."""
    given = [one for one, _ in _weighted(reward)] if reward is not None else []
    if not all(callable(one) for one in given):
        raise PanoplyError(
            "A run has its rewards: hand over only the functions that lived in another process."
        )
    return {function_name(one): one for one in given}
