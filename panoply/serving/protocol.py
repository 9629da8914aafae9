"""OpenAI's chat completions, as far as a policy can answer them: what is asked, what is answered, what is refused."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from panoply.ranges import SEED, check_range
from panoply.tools.calls import calls_in

MOST_ANSWERS = 64
RANGES = {
    "temperature": "at least 0",
    "top_p": "above 0 to 1",
    "max_tokens": "at least 1",
    "max_completion_tokens": "at least 1",
    "n": f"from 1 to {MOST_ANSWERS}",
    "seed": SEED,
}
"""Which numbers may be asked for: those that can be sampled with."""
WITHOUT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "top_logprobs": (0,),
}
"""What would change the answer and is not done, with the values that change nothing: others are refused."""


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
        for name, nothing in WITHOUT.items():
            if not _is_nothing(body.get(name), nothing):
                hint = ": logprobs are of the tokens that were drawn" if name == "top_logprobs" else ""
                raise Refused(f"'{name}' is not supported here{hint}; leave it out.")
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise Refused("'tool_choice' is auto or none here.")
        tools = [] if body.get("tool_choice") == "none" else _typed("tools", body.get("tools"), list, [])
        if not all(isinstance(tool, dict) for tool in tools):
            raise Refused("'tools' is a list of functions that are described.")
        longest = _number(body, "max_completion_tokens", None, whole=True)
        metadata = _typed("metadata", body.get("metadata"), dict, {})
        return cls(
            messages=[_plain(m) for m in messages],
            tools=tools,
            temperature=_number(body, "temperature", 1.0),
            top_p=_number(body, "top_p", 1.0),
            max_tokens=longest or _number(body, "max_tokens", None, whole=True),
            n=_number(body, "n", 1, whole=True),
            seed=_number(body, "seed", None, whole=True),
            stop=_stops(body.get("stop")),
            stream=_flag(body, "stream"),
            logprobs=_flag(body, "logprobs"),
            model=str(body.get("model") or ""),
            episode=episode or str(metadata.get("episode", "")),
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
    content = _typed("content", content, str, "")
    found = {**message, "role": str(message.get("role", "user")), "content": content}
    if calls := _typed("tool_calls", message.get("tool_calls"), list, []):
        found["tool_calls"] = [_call(call) for call in calls]
    return {name: value for name, value in found.items() if value is not None}


def _call(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function", {}), dict):
        raise Refused("'tool_calls' is a list of calls, each with a function.")
    function = dict(call.get("function", {}))
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            raise Refused("The arguments of a call are no JSON.") from None
    return {**call, "function": function}


def _is_nothing(value: Any, nothing: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing; true is not 1 here, nor is [] a number that is 0."""
    return value is None or any(value == one and _kind(value) is _kind(one) for one in nothing)


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def _number(body: Mapping[str, Any], name: str, default: Any, whole: bool = False) -> Any:
    """A number that can be sampled with, as it is or by default."""
    value = _typed(name, body.get(name), int if whole else (int, float), default)
    if value is not None:
        check_range(f"'{name}'", value, RANGES[name])
    return value if whole or value is None else float(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"'{name}' is true or false, not {value!r:.60}.")
    return bool(value)


def _stops(value: Any) -> tuple[str, ...]:
    """Texts that end an answer, none of them empty: an empty one is in every answer."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise Refused(f"'stop' is a text that is not empty, or a list of such, not {value!r:.60}.")
    return tuple(found)


def _typed(name: str, value: Any, kind: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, kind):
        raise Refused(f"'{name}' cannot be {value!r:.60}.")
    return value
