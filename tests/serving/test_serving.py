"""An endpoint of OpenAI's kind: who may ask, what is answered and written down, and agents that are learned from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import own_model
import pytest
import tiny
import torch
from serving_kit import KEY, ask, request

from panoply import registry
from panoply.errors import PanoplyError
from panoply.experience import TRUNCATED
from panoply.policies.talk import Talk
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.serving.endpoint import Endpoint
from panoply.serving.protocol import Asked, Refused, Said
from panoply.serving.speaker import Speaker
from panoply.trust import code_in

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "seed": 3}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_model.write(tmp_path_factory.mktemp("own") / "model")


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Endpoint, Speaker]]:
    speaker = Speaker(TextPolicy.load(model), "tiny", tmp_path_factory.mktemp("record") / "episodes.jsonl")
    endpoint = Endpoint(speaker, KEY).start()
    yield endpoint, speaker
    endpoint.close()


# ------------------------------------------------------------------ who may ask


def test_only_this_machine_with_the_key_and_no_web_page_is_answered(served: tuple[Endpoint, Speaker]) -> None:
    endpoint, _ = served
    status, _, text = request(endpoint, "/v1/models")
    assert (status, json.loads(text)["data"][0]["id"]) == (200, "tiny")
    for headers, wanted in (
        ({"Host": "evil.example"}, 421),
        ({"Host": f"evil.example:{endpoint.port}"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Authorization": "Bearer another"}, 401),
        ({"Authorization": ""}, 401),
    ):
        assert request(endpoint, "/v1/models", **headers)[0] == wanted
        assert request(endpoint, "/v1/chat/completions", HELLO, **headers)[0] == wanted


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/chat/completions", b"{", 400, "no JSON"),
        ("/v1/chat/completions", [1], 400, "a JSON object"),
        ("/v1/chat/completions", {"messages": []}, 400, "'messages' is a list"),
        ("/v1/chat/completions", {**HELLO, "tools": [TOOL]}, 400, "no place for tools"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 2000}]},
            400,
            "context 1024",
        ),
        ("/v1/rewards", {"episode": "nobody", "reward": 1}, 404, "Nothing was said"),
        ("/v1/rewards", {"episode": "x", "reward": "much"}, 400, "A reward is"),
        ("/v1/completions", HELLO, 404, "/chat/completions"),
        ("/v2/models", HELLO, 404, "There is no"),
    ],
)
def test_what_cannot_be_answered_is_a_sentence(
    served: tuple[Endpoint, Speaker], path: str, body: object, status: int, said: str
) -> None:
    found = request(served[0], path, body)
    assert found[0] == status
    assert said in json.loads(found[2])["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", "warm", "'temperature' cannot be 'warm'"),
        ("temperature", True, "'temperature' cannot be True"),
        ("temperature", -1, "'temperature' must be at least 0, not -1"),
        ("temperature", float("nan"), "'temperature' must be at least 0, not nan"),
        ("temperature", float("inf"), "'temperature' must be a finite number"),
        ("temperature", 10**400, "'temperature' must be at most"),
        ("top_p", 0, "'top_p' must be above 0 to 1, not 0"),
        ("top_p", 1.5, "'top_p' must be above 0 to 1, not 1.5"),
        ("max_tokens", 0, "'max_tokens' must be at least 1, not 0"),
        ("max_tokens", -3, "'max_tokens' must be at least 1, not -3"),
        ("max_tokens", 2.5, "'max_tokens' cannot be 2.5"),
        ("max_completion_tokens", 0, "'max_completion_tokens' must be at least 1, not 0"),
        ("n", 0, "'n' must be from 1 to 64, not 0"),
        ("n", 65, "'n' must be from 1 to 64, not 65"),
        ("seed", 2**70, "'seed' must be at most"),
        ("seed", "x", "'seed' cannot be 'x'"),
        ("stop", "", "'stop' is a text that is not empty"),
        ("stop", ["a", ""], "'stop' is a text that is not empty"),
        ("stop", 5, "'stop' is a text that is not empty"),
        ("stop", [1], "'stop' is a text that is not empty"),
        ("stream", "yes", "'stream' is true or false"),
        ("logprobs", 5, "'logprobs' is true or false"),
        ("top_logprobs", 3, "'top_logprobs' is not supported"),
        ("logit_bias", {"5": 1}, "'logit_bias' is not supported"),
        ("repetition_penalty", 0, "'repetition_penalty' is not supported here; leave it out"),
        ("repetition_penalty", 1.2, "'repetition_penalty' is not supported"),
        ("repetition_penalty", True, "'repetition_penalty' is not supported"),
        ("presence_penalty", 0.5, "'presence_penalty' is not supported"),
        ("frequency_penalty", [], "'frequency_penalty' is not supported"),
        ("top_k", 5, "'top_k' is not supported"),
        ("min_p", 0.1, "'min_p' is not supported"),
        ("min_tokens", 3, "'min_tokens' is not supported"),
        ("response_format", {"type": "json_object"}, "'response_format' is not supported"),
        ("tools", [5], "'tools' is a list of functions"),
        ("tool_choice", "required", "'tool_choice' is auto or none"),
        ("metadata", [1], "'metadata' cannot be [1]"),
        ("messages", [{"content": 5}], "'content' cannot be 5"),
        ("messages", [{"content": "a", "tool_calls": 5}], "'tool_calls' cannot be 5"),
        ("messages", [{"content": "a", "tool_calls": [5]}], "'tool_calls' is a list of calls"),
    ],
)
def test_what_cannot_be_sampled_with_is_a_sentence(
    served: tuple[Endpoint, Speaker], field: str, value: object, said: str
) -> None:
    status, _, text = request(served[0], "/v1/chat/completions", {**HELLO, field: value})
    assert status == 400
    assert said in json.loads(text)["error"]["message"]


def test_what_asks_for_nothing_is_let_be(served: tuple[Endpoint, Speaker]) -> None:
    nothing = {
        "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0,
        "logit_bias": {}, "response_format": {"type": "text"}, "stop": [], "top_logprobs": None, "stream": False,
    }  # fmt: skip
    said = [ask(served[0], {**HELLO, **more})["choices"][0]["token_ids"] for more in ({}, nothing)]
    assert said[0] == said[1]
    assert (
        len(
            ask(served[0], {**HELLO, "max_tokens": None, "max_completion_tokens": 2})["choices"][0][
                "token_ids"
            ]
        )
        <= 2
    )


# ------------------------------------------------------------------ what is answered


def test_tokens_and_logprobs_are_those_that_were_drawn(served: tuple[Endpoint, Speaker]) -> None:
    endpoint, speaker = served
    whole = ask(endpoint, {**HELLO, "logprobs": True, "temperature": 0.7, "n": 2})
    prompt = whole["prompt_token_ids"]
    assert speaker.policy.tokenizer.decode(prompt) == "<|start|>user\nHello<|end|>\n<|start|>assistant\n"
    for choice in whole["choices"]:
        tokens = choice["token_ids"]
        assert len(tokens) == 6 or choice["finish_reason"] == "stop"
        with torch.no_grad():
            logits = speaker.policy.model(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1] / 0.7
        right = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        stated = [one["logprob"] for one in choice["logprobs"]["content"]]
        assert torch.allclose(torch.tensor(stated), right, atol=1e-4)
    assert whole["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"])
    assert (
        ask(endpoint, {**HELLO, "logprobs": True, "temperature": 0.7, "n": 2})["choices"] == whole["choices"]
    )


def test_a_conversation_goes_on_from_the_tokens_that_were_drawn(served: tuple[Endpoint, Speaker]) -> None:
    endpoint, speaker = served
    first = ask(endpoint, HELLO, "one")
    said, tokens = first["choices"][0]["message"], first["choices"][0]["token_ids"]
    more = [*HELLO["messages"], said, {"role": "user", "content": "Go on"}]  # type: ignore[misc]
    second = ask(endpoint, {**HELLO, "messages": more}, "one")
    between = Talk(speaker.policy.tokenizer).reply(tokens, more[-1:])
    assert second["prompt_token_ids"] == [*first["prompt_token_ids"], *tokens, *between]
    other = [*HELLO["messages"], {"role": "assistant", "content": "Edited"}, more[-1]]  # type: ignore[misc]
    edited = ask(endpoint, {**HELLO, "messages": other}, "one")
    assert "Edited" in speaker.policy.tokenizer.decode(edited["prompt_token_ids"])
    assert json.loads(request(endpoint, "/v1/episodes/one/rewards", {"reward": 0.5})[2])["turns"] == 3
    assert speaker.record is not None
    lines = [json.loads(line) for line in speaker.record.read_text().splitlines()]
    mine = [line for line in lines if line["episode"] == "one"]
    assert [line.get("turn") for line in mine] == [0, 1, 2, None]
    assert mine[0]["token_ids"] == tokens
    assert mine[1]["prompt_token_ids"] == second["prompt_token_ids"]
    assert len(mine[1]["logprobs"]) == len(mine[1]["token_ids"])
    assert mine[3]["reward"] == 0.5


def test_a_stream_says_the_same_in_pieces(served: tuple[Endpoint, Speaker]) -> None:
    whole = ask(served[0], HELLO)["choices"][0]
    status, headers, text = request(served[0], "/v1/chat/completions", {**HELLO, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(p["delta"].get("content", "") for p in pieces) == whole["message"]["content"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]
    assert len(pieces) > 3
    refused = request(served[0], "/v1/chat/completions", {**HELLO, "stream": True, "temperature": -1})
    assert refused[0] == 400


def test_calls_come_back_as_calls() -> None:
    said = Said([], [], 'Well. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', True)
    message = said.message(tools=True)
    assert message["content"] == "Well."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert said.message(tools=False) == {"role": "assistant", "content": said.text}
    back = Asked.of({"messages": [message], "tools": [TOOL]})
    assert back.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert Asked.of({"messages": [{"content": [{"type": "text", "text": "a"}]}]}).messages == [
        {"role": "user", "content": "a"}
    ]
    with pytest.raises(Refused, match="no text"):
        Asked.of({"messages": [{"content": [{"type": "image_url"}]}]})


# ------------------------------------------------------------------ agents that are learned from

AGENT = tiny.ROOT / "examples/agent.py"


def test_an_agent_of_thirty_lines_is_learned_from(model: Path, tmp_path: Path) -> None:
    few = {
        "sample.prompts": 2,
        "sample.group": 4,
        "run.held_out": 2,
        "world.longest": 4,
        "reward.name": "score",
    }
    name = f"agent:{AGENT}:play"
    run = tiny.bare(tmp_path / "run", "grpo", world=name, model=str(model), steps=2, settings=few).run
    assert str(AGENT) in code_in(json.loads((run / "run.json").read_text())["plan"])
    world = registry.find("world", name).build(model=str(model), longest=4)
    found = Collector(world, TextPolicy.load(model), 0).episodes([world.task("train", 0)], 3)
    for episode in range(3):
        rows = found.decisions["episode"] == episode
        first, second = (
            found.context.ragged("tokens")[i].tolist() for i in found.decisions["context"][rows].unique()
        )
        assert second[: len(first)] == first, "what was said in the first turn keeps its tokens in the second"
    assert found.decisions["turn"].unique().tolist() == [0, 1]
    task = world.task("train", 0)
    letters = [chr(97 + (task.data["seed"] + turn) % 8) for turn in range(2)]
    play, end = world.play(task), world.tokenizer.eos_id
    replies = [play.act([*world.tokenizer.encode(letter), end]) for letter in letters]
    assert [reply.done for reply in replies] == [False, True]
    assert replies[-1].signals == {"success": 1.0, "score": 1.0}
    world.close()


def test_an_agent_that_asks_more_than_the_model_can_read_is_cut(model: Path, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        AGENT.read_text() + "\n\ndef talk(base_url, api_key):\n    for size in (1, 5000):\n"
        "        ask(base_url, api_key, [{'role': 'user', 'content': 'x' * size}])\n    return 1.0\n"
    )
    world = registry.find("world", f"agent:{tmp_path}/long.py:talk").build(model=str(model), longest=3)
    found = Collector(world, TextPolicy.load(model), 0).episodes([world.task("train", 0)], 2)
    assert found.decisions["turn"].unique().tolist() == [0]
    assert (found.decisions["end"] == TRUNCATED).sum() == 2
    world.close()


def test_an_agent_that_raises_is_cut(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        AGENT.read_text() + "\n\ndef bad(base_url, api_key):\n"
        "    ask(base_url, api_key, [{'role': 'user', 'content': 'x'}])\n    raise ValueError('as asked')\n"
        "\n\ndef silent():\n    return 1.0\n"
    )
    world = registry.find("world", f"agent:{tmp_path}/bad.py:bad").build(model=str(model))
    said: list[str] = []
    world.listen(said.append)
    reply = world.play(world.task("train", 0)).act(world.tokenizer.encode("x"))
    assert (reply.truncated, reply.signals["score"]) == (True, 0.0)
    assert "it raised ValueError: as asked" in said[0]
    world.close()
    with pytest.raises(PanoplyError, match="it returned before it asked the policy anything"):
        registry.find("world", f"agent:{tmp_path}/bad.py:silent").build(model=str(model)).task("train", 0)
