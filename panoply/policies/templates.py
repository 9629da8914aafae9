"""What renders a model's chat template, in a confined process: a template is a program, and may never end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def serve(template: str, words: dict[str, str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Conversations in, texts out; a conversation that the template refuses is told by its number."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    compiled = environment.from_string(template)

    def rendered(asked: dict[str, Any]) -> dict[str, Any]:
        texts = []
        for number, messages in enumerate(asked["conversations"]):
            try:
                more = {**words, "tools": asked["tools"]} if asked.get("tools") else words
                texts.append(compiled.render(messages=messages, add_generation_prompt=asked["reply"], **more))
            except Exception as error:
                return {"refused": number, "error": f"{error}" or type(error).__name__}
        return {"texts": texts}

    return rendered


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
