"""Chat templates: messages to the text a model was trained on, and a check that templates only ever append."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from panoply.confined.limits import Limits
from panoply.confined.process import Confined, Failed, TookTooLong
from panoply.errors import PanoplyError, needs_extra, plain
from panoply.policies.tokenizer import Tokenizer

Message = Mapping[str, Any]
SECONDS = 10.0
"""Time a template has for `BATCH` conversations, some ten thousand times what one takes."""
START = 30.0
"""Time it has to be compiled, in which constants are computed already."""
BATCH = 256


class Refused(PanoplyError):
    """A conversation, told by its number, that the template does not take."""

    def __init__(self, number: int, why: str):
        super().__init__(f"The chat template refuses a conversation: {plain(why).rstrip('.')}.")
        self.number = number


def _renderer(template: str, words: tuple[tuple[str, str], ...]) -> Confined:
    if find_spec("jinja2") is None:
        raise needs_extra("jinja2", "transformers", "A chat template")
    return Confined("panoply.policies.templates:serve", (template, dict(words)), Limits(memory=2.0), START)


class _Kept(threading.local):
    """A process for each template, kept for the next call: it starts once, and rendering costs what it costs in ours.

    Each thread has its own: a process answers one question at a time, and ends with the thread that started it. What a
    thread keeps goes with it, so that a later one, which may have its number, does not ask a process that is dying.
    """

    def __init__(self) -> None:
        self.renderer = lru_cache(maxsize=4)(_renderer)


_KEPT = _Kept()


def render_all(
    tokenizer: Tokenizer,
    conversations: Sequence[Sequence[Message]],
    *,
    reply: bool = True,
    tools: Sequence[Message] = (),
) -> list[str]:
    """Conversations as texts; `reply` adds what comes before an answer of the assistant's, `tools` what it may call.

    The template runs in a process with limits of time and memory, and reaches nothing else.
    """
    template = tokenizer.chat_template
    if not template:
        raise PanoplyError("The data holds chat messages, and the model's tokenizer has no chat template.")
    words = {k: v for k, v in tokenizer.settings.items() if k.endswith("_token") and isinstance(v, str)}
    renderer = _KEPT.renderer(template, tuple(sorted(words.items())))
    texts: list[str] = []
    for first in range(0, len(conversations), BATCH):
        some = [list(messages) for messages in conversations[first : first + BATCH]]
        answer = _ask(renderer, {"conversations": some, "reply": reply, "tools": list(tools)})
        if "texts" not in answer:
            raise Refused(first + int(answer.get("refused", 0)), str(answer.get("error")))
        texts += answer["texts"]
    return texts


def _ask(renderer: Confined, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if not renderer.alive:
            renderer.start()
    except Failed as error:
        raise PanoplyError(f"The model's chat template cannot be read: {plain(error).rstrip('.')}.") from None
    try:
        return renderer.ask(question, SECONDS)
    except TookTooLong:
        raise PanoplyError(f"The model's chat template did not end within {SECONDS:g} s.") from None
    except Failed as error:
        raise PanoplyError(f"The model's chat template cannot be rendered: {error}.") from None


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, reply: bool = True) -> str:
    """One conversation as text."""
    return render_all(tokenizer, [messages], reply=reply)[0]


def check_append_only(tokenizer: Tokenizer) -> None:
    """What was said must keep its tokens when more is said, or what is scored is not what was sampled."""
    asked = [{"role": "user", "content": "one"}]
    answered = [*asked, {"role": "assistant", "content": "two"}]
    longer = [*answered, {"role": "user", "content": "three"}]
    prompt, later = render_all(tokenizer, [asked, longer])
    (whole,) = render_all(tokenizer, [answered], reply=False)
    if not (whole.startswith(prompt) and later.startswith(prompt)):
        raise PanoplyError(
            "The model's chat template is not append-only: it renders a question differently once it is answered."
        )
    if not later.startswith(whole.rstrip()):
        raise PanoplyError(
            "The model's chat template is not append-only: it renders an answer differently once more is said."
        )
