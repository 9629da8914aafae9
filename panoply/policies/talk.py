"""A conversation as tokens that only ever grow: what a model said stays as it was sampled, and what it is told comes
after it in the words of its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from panoply.errors import PanoplyError
from panoply.policies.chat import Message, check_append_only, render_all
from panoply.policies.tokenizer import Tokenizer

ASKED: Message = {"role": "user", "content": "one"}
ANSWERED: Message = {"role": "assistant", "content": "two"}


class Talk:
    """How a model is spoken with: its tokenizer, its chat template, and the tools it may call.

    A tokenizer without a template is spoken with in plain lines.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Message] = ()):
        self.tokenizer, self.tools = tokenizer, list(tools)
        self.plain = not tokenizer.chat_template
        if not self.plain:
            check_append_only(tokenizer)

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a conversation's beginning, up to where the model speaks."""
        if self.plain:
            return tuple(self.tokenizer.encode_prompt("".join(f"{m['content']}\n" for m in messages)))
        return tuple(self.tokenizer.encode(self._rendered([messages])[0]))

    def reply(
        self, said: Sequence[int], messages: Sequence[Message], spoken: Message = ANSWERED
    ) -> tuple[int, ...]:
        """The tokens between a turn of the model's and its next one.

        said       the turn, as it was sampled: where it did not end itself, its end is added
        messages   what it is told
        spoken     the turn as a message, where a template wants to see it before it shows the results of calls
        """
        if self.plain:
            ended = bool(said) and said[-1] in self.stop_tokens
            text = "".join(f"{m['content']}\n" for m in messages)
            return tuple(self.tokenizer.encode(text if ended else f"\n{text}"))
        before = self._rendered([[ASKED, spoken]], reply=False)[0]
        after = self._rendered([[ASKED, spoken, *messages]])[0]
        if not after.startswith(before):
            before = before.rstrip()
        if not after.startswith(before):
            raise PanoplyError(
                "The model's chat template is not append-only: it renders an answer differently once more is said."
            )
        closing = self._closing if not before.endswith(self._closing.strip()) else self._closing.rstrip()
        tokens = self.tokenizer.encode(closing + after[len(before) :])
        return tuple(tokens[1:] if said and tokens and said[-1] == tokens[0] else tokens)

    @cached_property
    def offers_tools(self) -> bool:
        """Whether the template tells the model of its tools."""
        (without,) = render_all(self.tokenizer, [[ASKED]])
        return self._rendered([[ASKED]])[0] != without

    def said(self, tokens: Sequence[int]) -> str:
        """What was said in a turn, without its end."""
        stops = self.stop_tokens
        return self.tokenizer.decode([token for token in tokens if token not in stops])

    @staticmethod
    def meant(said: str) -> str:
        """What was said after thinking aloud."""
        return said.rpartition("</think>")[2].strip()

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokenizer's end, and the token with which the template ends a turn."""
        end = self.tokenizer.eos_id
        closing = [] if self.plain else self.tokenizer.encode(self._closing)[:1]
        ends = [token for token in closing if token in self.tokenizer.special_tokens.values()]
        return tuple(dict.fromkeys([*([] if end is None else [end]), *ends]))

    @cached_property
    def _closing(self) -> str:
        """What the template puts after the words of an answer."""
        text = self._rendered([[ASKED, ANSWERED]], reply=False)[0]
        return text.rpartition(str(ANSWERED["content"]))[2]

    def _rendered(self, conversations: Sequence[Sequence[Message]], reply: bool = True) -> list[str]:
        return render_all(self.tokenizer, conversations, reply=reply, tools=self.tools)
