"""Calls in what a model said: the forms in which chat templates teach models to write them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""As Qwen and Hermes write them, one JSON object in each pair."""
LISTED = "[TOOL_CALLS]"
"""As Mistral writes them, all in one list."""


@dataclass(frozen=True)
class Call:
    """A call, or what is wrong with it."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    wrong: str = ""

    def message(self, number: int) -> dict[str, Any]:
        """As a message of the assistant's has it."""
        made = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call{number:05d}", "type": "function", "function": made}


def calls_in(said: str) -> tuple[str, list[Call]]:
    """What was said beside the calls, and the calls in their order; none where it is an answer."""
    if OPEN in said:
        before, *pieces = said.split(OPEN)
        ended = [piece.partition(CLOSE) for piece in pieces]
        beside = before + "".join(rest for _, _, rest in ended)
        return beside.strip(), [_call(text) for text, _, _ in ended]
    if LISTED in said:
        before, _, rest = said.partition(LISTED)
        try:
            listed, _ = json.JSONDecoder().raw_decode(rest.strip())
        except ValueError as error:
            return before.strip(), [Call("", wrong=f"the list of calls is no JSON ({error})")]
        many = listed if isinstance(listed, list) else [listed]
        return before.strip(), [_call(json.dumps(one)) for one in many]
    bare = said.strip().removeprefix("<|python_tag|>").strip()
    if re.match(r'\{\s*"(type|name|function)"', bare):
        return "", [_call(bare)]
    return said.strip(), []


def _call(text: str) -> Call:
    """One object with a name and arguments; Llama calls these parameters, and OpenAI writes them as text."""
    try:
        found = json.loads(text)
    except ValueError as error:
        return Call(
            "", wrong=f"a call is a JSON object with name and arguments, and this is no JSON ({error})"
        )
    found = (
        found.get("function", found)
        if isinstance(found, dict) and isinstance(found.get("function"), dict)
        else found
    )
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call("", wrong="a call is a JSON object with name and arguments, and this has no name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        return Call(found["name"], wrong="its arguments are no JSON object")
    return Call(found["name"], arguments)
