"""Your own questions and your own tools: `--data FILE.jsonl --tools FILE.py:NAME,… --reward FILE.py:NAME`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

from panoply.confined.limits import Limits
from panoply.errors import PanoplyError
from panoply.policies.talk import ANSWERED, Talk
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.tools.box import Box, box_of
from panoply.tools.calls import calls_in
from panoply.worlds.text.forms import Row
from panoply.worlds.text.jsonl import Jsonl
from panoply.worlds.world import Play, Reply, Task


@world("own-tools@1")
@dataclass(frozen=True)
class OwnTools(Jsonl):
    """Your own data with tools: the model may call functions of yours before it answers.

    The chat template tells it of them, and shows what they gave. A turn may hold several calls; a turn without one is
    the answer, which the reward functions grade: `completions` are then all messages since the prompt, as TRL gives
    them. Calls that are malformed, raise or take too long show an error and cost nothing else. Signals beside the
    rewards: `calls`, `errors` and `cost`.
    """

    tools: tuple[str, ...] = ()
    """Functions, FILE.py:NAME, with types and docstrings."""
    costs: tuple[float, ...] = ()
    """What a call of each costs; none means 1 each."""
    cap: int = 6
    """Turns, the answer included, after which an episode is cut."""

    bounds: ClassVar[Mapping[str, str]] = {**Jsonl.bounds, "costs": "any number", "cap": "from 1 to 100000"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.costs and len(self.costs) != len(self.tools):
            raise PanoplyError(f"There are {len(self.costs)} costs for {len(self.tools)} tools.")

    @property
    def name(self) -> str:
        return "own-tools"

    @property
    def turn_cap(self) -> int:
        return self.cap

    @property
    def box(self) -> Box:
        if not self.tools:
            raise PanoplyError("The world own-tools needs tools: --tools FILE.py:NAME.")
        return box_of(self.tools, self.seconds, Limits(memory=self.memory, network=self.network))

    @cached_property
    def talk(self) -> Talk:
        if not self.tokenizer.chat_template:
            raise PanoplyError("Tools are called in a model's chat template, and its tokenizer has none.")
        talk = Talk(self.tokenizer, self.box.schemas)
        if not talk.offers_tools:
            raise PanoplyError(
                "The model's chat template has no place for tools: take a model that was taught to call them."
            )
        return talk

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self.talk.stop_tokens

    def _prompts(self) -> dict[int, list[int]]:
        found = {}
        for row in self._brought.rows:
            if row.prompt is None:
                raise self._refused(row, row.wrong or "has no field 'prompt' with text or messages")
            found[row.number] = list(self.talk.opening(_messages(row)))
        return found

    def signals(self) -> frozenset[str] | None:
        return frozenset({*(super().signals() or ()), "calls", "errors", "cost"})

    def cost(self, name: str) -> float:
        names = [source.rpartition(":")[2] for source in self.tools]
        return (self.costs or (1.0,) * len(names))[names.index(name)] if name in names else 0.0

    def close(self) -> None:
        super().close()
        if self.tools:
            self.box.close()

    # -------------------------------------------------------------- episodes

    def play(self, task: Task) -> Play:
        return Using(self, task)

    def act_all(self, plays: Sequence[Play], answers: Sequence[Sequence[int]]) -> list[Reply]:
        """Episodes that end together are graded together."""
        using = cast(Sequence[Using], plays)
        replies = [play.turned(answer) for play, answer in zip(using, answers, strict=True)]
        over = [i for i, reply in enumerate(replies) if reply.done]
        graded = self._graded([using[i] for i in over]) if over else []
        for i, signals in zip(over, graded, strict=True):
            earned = {"success": 0.0, "reward": 0.0} if signals is None else signals
            replies[i] = Reply(
                {**replies[i].signals, **earned}, truncated=replies[i].truncated, failed=signals is None
            )
        return replies

    def _graded(self, plays: Sequence[Using]) -> list[dict[str, float] | None]:
        answers = [[token for said in play.turns for token in said] for play in plays]
        rows = [play.task.data["row"] for play in plays]
        return self.rewarded(rows, [play.messages for play in plays], answers)


class Using(Play):
    """An episode in which tools are called."""

    def __init__(self, world: OwnTools, task: Task):
        super().__init__(task.prompt, task.id)
        self.world, self.task = world, task
        self.turns: list[list[int]] = []
        self.messages: list[dict[str, Any]] = []

    def act(self, answer: Sequence[int]) -> Reply:
        return self.world.act_all([self], [answer])[0]

    def fork(self) -> Play:
        made = cast(Using, super().fork())
        made.turns, made.messages = list(self.turns), list(self.messages)
        return made

    def turned(self, answer: Sequence[int]) -> Reply:
        """Make the calls of a turn; the rewards of one that ends the episode are left to who grades many at once."""
        world = self.world
        self.turns.append(list(answer))
        said = world.talk.said(answer)
        beside, calls = calls_in(world.talk.meant(said))
        if not calls:
            self.messages.append({"role": "assistant", "content": said})
            return Reply({"calls": 0.0, "errors": 0.0, "cost": 0.0})
        spoken = [call.message(i) for i, call in enumerate(calls)]
        self.messages.append({"role": "assistant", "content": beside, "tool_calls": spoken})
        results = [world.box.call(call) for call in calls]
        told = [
            {"role": "tool", "name": call.name or "error", "tool_call_id": one["id"], "content": text}
            for call, one, (text, _) in zip(calls, spoken, results, strict=True)
        ]
        self.messages += told
        self.state = stable_hash(self.state, *(text for text, _ in results))
        signals = {
            "calls": float(len(calls)),
            "errors": float(sum(not worked for _, worked in results)),
            "cost": sum(world.cost(call.name) for call in calls),
        }
        if len(self.turns) >= world.cap:
            return Reply(signals, truncated=True)
        shown = {**ANSWERED, "content": "", "tool_calls": spoken}
        return Reply(signals, world.talk.reply(answer, told, shown), done=False)


def _messages(row: Row) -> list[Any]:
    return row.prompt if isinstance(row.prompt, list) else [{"role": "user", "content": row.prompt}]
