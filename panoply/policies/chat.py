"""Chat templates: messages to the text a model was trained on, and a check that templates only ever append."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from panoply.errors import PanoplyError, needs_extra
from panoply.policies.tokenizer import Tokenizer

Message = Mapping[str, Any]


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise needs_extra("jinja2", "transformers", "A chat template") from error
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise PanoplyError(f"The model's chat template cannot be read: {error}.") from error


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, reply: bool = True) -> str:
    """Messages as text; `reply` adds what comes before an answer of the assistant's."""
    template = tokenizer.chat_template
    if not template:
        raise PanoplyError("The data holds chat messages, and the model's tokenizer has no chat template.")
    words = {k: v for k, v in tokenizer.settings.items() if k.endswith("_token") and isinstance(v, str)}
    try:
        return str(_compiled(template).render(messages=list(messages), add_generation_prompt=reply, **words))
    except PanoplyError:
        raise
    except Exception as error:
        raise PanoplyError(f"The chat template refuses a conversation: {error}.") from error


def check_append_only(tokenizer: Tokenizer) -> None:
    """What was said must keep its tokens when more is said, or what is scored is not what was sampled."""
    asked = [{"role": "user", "content": "one"}]
    answered = [*asked, {"role": "assistant", "content": "two"}]
    longer = [*answered, {"role": "user", "content": "three"}]
    prompt = render(tokenizer, asked)
    for later in (render(tokenizer, answered, reply=False), render(tokenizer, longer)):
        if not later.startswith(prompt):
            raise PanoplyError(
                "The model's chat template is not append-only: it renders a question differently once it is answered."
            )
    if not render(tokenizer, longer).startswith(render(tokenizer, answered, reply=False).rstrip()):
        raise PanoplyError(
            "The model's chat template is not append-only: it renders an answer differently once more is said."
        )
