"""A policy behind the endpoint: it answers conversations, keeps the tokens it drew, and writes down every episode."""

from __future__ import annotations

import json
import queue
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from panoply.policies.rotary import wider
from panoply.policies.talk import Talk
from panoply.policies.text import TextPolicy
from panoply.rollout.engine import STOP, Request, Sampling
from panoply.rollout.engines import engine_of
from panoply.seeds import stable_hash
from panoply.serving.protocol import Asked, Refused, Said, chunk, chunks, completion

KEPT = 10_000
"""Conversations whose tokens are remembered."""
LONGEST = 512
"""Tokens of an answer, where a request does not say."""

Watch = Callable[[str], None]
"""Told what has been said so far."""


class Speaker:
    """Answers one request at a time.

    A request whose conversation goes on from an answer given here is put after the tokens of that answer as they were
    drawn, and not after what its text would be tokenised to: what is recorded is what happened.
    """

    def __init__(self, policy: TextPolicy, model: str, record: Path | None = None, seed: int = 0):
        self.policy, self.model, self.record, self.seed = policy, model, record, seed
        self._engine = engine_of(policy)
        self._talks: dict[str, Talk] = {}
        self._tokens: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        """Conversations that ended with an answer of ours, as text, to their tokens."""
        self._turns: dict[str, int] = {}
        self._answers = 0
        self._mouth = ThreadPoolExecutor(1, "speaker")
        """One thread for all answers, which lives as long as the server: what a thread starts ends with it, such as the
        process that renders chat templates."""

    # -------------------------------------------------------------- what the endpoint asks

    def answer(self, asked: Asked) -> dict[str, Any]:
        return self._mouth.submit(self._completed, asked).result()

    def stream(self, asked: Asked) -> Iterator[dict[str, Any]]:
        """Token by token, where there is one answer and no tools, whose calls are only known at their end."""
        if asked.n > 1 or asked.tools:
            yield from chunks(self.answer(asked), streamed=False)
            return
        heard: queue.Queue[str | dict[str, Any] | Exception] = queue.Queue()

        def speak() -> None:
            try:
                heard.put(self._completed(asked, heard.put))
            except Exception as error:
                heard.put(error)

        self._mouth.submit(speak)
        id, told = f"chatcmpl-{secrets.token_hex(8)}", ""
        while isinstance(text := heard.get(), str):
            if text.startswith(told) and not text.endswith("\ufffd"):
                yield chunk(id, self.model, 0, {"role": "assistant", "content": text[len(told) :]})
                told = text
        if isinstance(text, Exception):
            raise text
        rest = (text["choices"][0]["message"]["content"] or "")[len(told) :]
        if rest:
            yield chunk(id, self.model, 0, {"content": rest})
        yield from chunks({**text, "id": id}, streamed=True)

    def reward(self, episode: str, reward: float) -> dict[str, Any]:
        if episode not in self._turns:
            raise Refused(f"Nothing was said in an episode '{episode[:100]}'.", 404)
        self._mouth.submit(self._write, {"episode": episode, "reward": reward}).result()
        return {"episode": episode, "reward": reward, "turns": self._turns[episode]}

    # -------------------------------------------------------------- speaking

    def _completed(self, asked: Asked, watch: Watch | None = None) -> dict[str, Any]:
        episode = asked.episode or f"episode-{secrets.token_hex(8)}"
        talk = self._talk(asked.tools)
        prompt = self._prompt(asked, talk)
        said = self._said(asked, talk, prompt, watch)
        made = completion(asked, said, self.model, episode)
        for one, choice in zip(said, made["choices"], strict=True):
            self._remember(asked, choice["message"], (*prompt, *one.tokens))
            self._note(asked, episode, one)
        return made

    def _talk(self, tools: Sequence[dict[str, Any]]) -> Talk:
        key = json.dumps(tools)
        if key not in self._talks:
            talk = Talk(self.policy.tokenizer, tools)
            if tools and (talk.plain or not talk.offers_tools):
                raise Refused("The model's chat template has no place for tools.")
            self._talks[key] = talk
        return self._talks[key]

    def _prompt(self, asked: Asked, talk: Talk) -> tuple[int, ...]:
        """The tokens of a conversation: those that were drawn, as far as an answer of ours is its beginning."""
        for at in range(len(asked.messages) - 1, 0, -1):
            known = self._tokens.get(_key(asked.messages[:at], asked.tools))
            if known is not None:
                return (*known, *talk.reply(known, asked.messages[at:], asked.messages[at - 1]))
        return talk.opening(asked.messages)

    def _said(self, asked: Asked, talk: Talk, prompt: tuple[int, ...], watch: Watch | None) -> list[Said]:
        room = self.policy.context_length - len(prompt)
        if room < 1:
            raise Refused(
                f"The conversation has {len(prompt)} tokens, and the model's context {len(prompt) + room}."
                f"{wider(self.policy.model.config)}"
            )
        sampling = Sampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            max_tokens=max(1, min(asked.max_tokens or LONGEST, room)),
            stop_tokens=talk.stop_tokens,
            stop_strings=asked.stop,
        )
        first, self._answers = self._answers, self._answers + asked.n
        named = (self.seed, first) if asked.seed is None else ("asked", asked.seed)
        seeds = [stable_hash("served", *named, i) for i in range(asked.n)]

        def listening(tokens: list[int]) -> bool:
            assert watch is not None
            watch(talk.said(tokens))
            return False

        complete = None if watch is None else listening
        found = self._engine.generate([Request(prompt, seeds)], sampling, complete=complete)
        row, logp = found.decisions.tensor("context"), found.decisions.tensor("logp").double()
        spell = self.policy.tokenizer.token
        return [
            Said(
                tokens,
                logp[row == i].tolist(),
                _without(talk.said(tokens), asked.stop),
                found.reasons.tolist()[i] == [STOP],
                prompt,
                [spell(token) for token in tokens],
            )
            for i, tokens in enumerate(found.completions())
        ]

    def _remember(self, asked: Asked, message: dict[str, Any], tokens: tuple[int, ...]) -> None:
        self._tokens[_key([*asked.messages, message], asked.tools)] = tokens
        if len(self._tokens) > KEPT:
            self._tokens.popitem(last=False)

    # -------------------------------------------------------------- what is written down

    def _note(self, asked: Asked, episode: str, said: Said) -> None:
        turn = self._turns.get(episode, 0)
        self._turns[episode] = turn + 1
        self._write(
            {
                "episode": episode,
                "turn": turn,
                "model": self.model,
                "messages": asked.messages,
                "text": said.text,
                "prompt_token_ids": list(said.prompt),
                "token_ids": list(said.tokens),
                "logprobs": list(said.logps),
                "temperature": asked.temperature,
                "top_p": asked.top_p,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self.record is not None:
            with open(self.record, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _key(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
    """A conversation as what tells it from others: who said what, and which calls were made."""
    said = [(m.get("role"), m.get("content") or "", _calls(m)) for m in messages]
    return json.dumps([said, tools])


def _calls(message: dict[str, Any]) -> list[Any]:
    found = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        found.append(
            [call["function"].get("name"), json.loads(arguments) if isinstance(arguments, str) else arguments]
        )
    return found


def _without(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of some stop strings, which OpenAI leaves out of answers."""
    ends = [text.index(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
