"""OpenAI's chat completions, as far as a policy can answer them: what is asked, what is answered, what is refused."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from panoply.tools.calls import calls_in

MOST_ANSWERS = 64
IGNORED = [
    "frequency_penalty",
    "presence_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "response_format",
]
"""What would change the answer and is not done: refused where it is set to something."""


class Refused(Exception):
    """A request that cannot be answered: the status and a sentence."""

    def __init__(self, why: str, status: int = 400):
        super().__init__(why)
        self.status = status

    def to_json(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": "invalid_request_error", "code": self.status}}


@dataclass(frozen=True)
class Asked:
    """A request for an answer to a conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    model: str = ""
    episode: str = ""
    """Which episode it is a turn of; one of its own where nobody says."""

    @classmethod
    def of(cls, body: Any, episode: str = "") -> Asked:
        """A request's body, checked."""
        if not isinstance(body, dict):
            raise Refused("The request is a JSON object.")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise Refused("'messages' is a list of messages.")
        for name in IGNORED:
            if body.get(name) not in (None, 0, 0.0, {}, [], {"type": "text"}) and not (
                name == "repetition_penalty" and body[name] == 1
            ):
                raise Refused(f"'{name}' is not supported here.")
        if body.get("top_logprobs"):
            raise Refused("'top_logprobs' is not supported here: logprobs are of the tokens that were drawn.")
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise Refused("'tool_choice' is auto or none here.")
        stop = body.get("stop") or ()
        longest = body.get("max_completion_tokens") or body.get("max_tokens")
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        return cls(
            messages=[_plain(m) for m in messages],
            tools=_typed("tools", tools, list, []),
            temperature=float(_typed("temperature", body.get("temperature"), (int, float), 1.0)),
            top_p=float(_typed("top_p", body.get("top_p"), (int, float), 1.0)),
            max_tokens=_typed("max_tokens", longest, int, None),
            n=_between("n", _typed("n", body.get("n"), int, 1), 1, MOST_ANSWERS),
            seed=_typed("seed", body.get("seed"), int, None),
            stop=(stop,) if isinstance(stop, str) else tuple(str(one) for one in stop),
            stream=bool(body.get("stream")),
            logprobs=bool(body.get("logprobs")),
            model=str(body.get("model") or ""),
            episode=episode or str((body.get("metadata") or {}).get("episode", "")),
        )


@dataclass(frozen=True)
class Said:
    """An answer: its tokens with the log-probabilities they were drawn with, and as text."""

    tokens: Sequence[int]
    logps: Sequence[float]
    text: str
    ended: bool
    """Whether the model ended it; otherwise it was cut at its longest."""
    prompt: Sequence[int] = ()
    words: Sequence[str] = ()
    """The tokens, spelt out."""

    def message(self, tools: bool) -> dict[str, Any]:
        """As a message of the assistant's, with the calls it holds where it was told of tools."""
        beside, calls = calls_in(self.text) if tools else (self.text, [])
        made = [call.message(i) for i, call in enumerate(calls) if not call.wrong]
        if not made:
            return {"role": "assistant", "content": self.text}
        for call in made:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return {"role": "assistant", "content": beside or None, "tool_calls": made}


def completion(asked: Asked, said: Sequence[Said], model: str, episode: str) -> dict[str, Any]:
    """The whole answer. `token_ids` and `prompt_token_ids` are what was really drawn, and after what."""
    choices = []
    for i, one in enumerate(said):
        message = one.message(bool(asked.tools))
        choice: dict[str, Any] = {
            "index": i,
            "message": message,
            "finish_reason": _why(one, message),
            "token_ids": list(one.tokens),
        }
        if asked.logprobs:
            choice["logprobs"] = {
                "content": [
                    {"token": word, "logprob": logp, "bytes": list(word.encode()), "top_logprobs": []}
                    for word, logp in zip(one.words, one.logps, strict=True)
                ]
            }
        choices.append(choice)
    drawn, read = sum(len(one.tokens) for one in said), len(said[0].prompt) if said else 0
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "episode": episode,
        "prompt_token_ids": list(said[0].prompt) if said else [],
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn},
    }


def chunks(whole: Mapping[str, Any], streamed: bool) -> Iterator[dict[str, Any]]:
    """The end of a stream: what has not been `streamed` yet, and why each answer ended."""
    for choice in whole["choices"]:
        message = choice["message"]
        delta: dict[str, Any] = {"role": "assistant"}
        if not streamed and message.get("content"):
            delta["content"] = message["content"]
        if message.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        yield chunk(whole["id"], whole["model"], choice["index"], delta)
        yield chunk(whole["id"], whole["model"], choice["index"], {}, choice["finish_reason"])


def chunk(
    id: str, model: str, index: int, delta: Mapping[str, Any], why: str | None = None
) -> dict[str, Any]:
    made = {"index": index, "delta": dict(delta), "finish_reason": why}
    return {
        "id": id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
        "choices": [made],
    }


def _why(said: Said, message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop" if said.ended else "length"


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it: text as text, and arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            piece.get("text") for piece in content if isinstance(piece, dict) and piece.get("type") == "text"
        ]
        if len(texts) < len(content):
            raise Refused("A message holds something that is no text.")
        content = "".join(str(text) for text in texts)
    found = {**message, "role": str(message.get("role", "user")), "content": content or ""}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return {name: value for name, value in found.items() if value is not None}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", {}))
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            raise Refused("The arguments of a call are no JSON.") from None
    return {**call, "function": function}


def _typed(name: str, value: Any, kind: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, kind):
        raise Refused(f"'{name}' cannot be {value!r:.60}.")
    return value


def _between(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise Refused(f"'{name}' is from {least} to {most}, not {value}.")
    return value
