"""Outputs of a forward pass, by name: what a part may need of a policy beside `logp`.

    @tap
    def likeliest(seen: Pass) -> Tensor:
        "log π of the likeliest token."
        return seen.over_vocabulary(lambda logp: logp.amax(-1))

A term with `needs={"likeliest"}` finds it in `batch.now["likeliest"]`, with gradient; and any part that needs
`likeliest@old` finds the column of that name, as the snapshot `old` gives it.

A need is `NAME[:ARGUMENT…][*TEMPERATURE]`: `hidden:8`, `logp:2:normed`, `logp*1.2`. Arguments are the function's own,
checked by their types; one called `block` says after how many blocks the state is kept (`seen.state`). A temperature
multiplies the one that was sampled at.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from panoply.errors import PanoplyError, unknown
from panoply.experience import Experience, Ragged
from panoply.policies.attention import maps
from panoply.policies.scoring import Head, chunk_of, chunks, scored

Norm = Literal["raw", "normed"]


def _no_column(name: str) -> Tensor:
    raise KeyError(name)


@dataclass(frozen=True)
class Pass:
    """Some decisions, and the states of the model that they were predicted from."""

    model: Any
    last: Tensor
    """[decisions, width], after the final norm."""
    blocks: Mapping[int, Tensor]
    """The same after so many blocks, where a tap asks for it."""
    action: Tensor
    head: Head
    """Temperature and cut of the distribution that was sampled from."""
    column: Callable[[str], Tensor] = _no_column
    """What the experience holds of these decisions, by the name of a column."""

    def logp_of(self, action: Tensor) -> Tensor:
        """log π of other tokens than those that were said, one for each decision."""
        head = dataclasses.replace(self.head, action=action)
        return scored(self.last, self.model.head_weight, action, head, False)["logp"]

    def state(self, block: int | None = None, norm: Norm = "raw") -> Tensor:
        """After so many blocks; none: all of them and the final norm, which the last block's state has in any case."""
        if block is None:
            return self.last
        state = self.blocks[block]
        return self.model.normed(state) if norm == "normed" and block < self.model.config.layers else state

    def scores(self, state: Tensor, entropy: bool = False) -> dict[str, Tensor]:
        """`logp` of the actions, and `entropy`, where `state` is read through the output weights."""
        return scored(state, self.model.head_weight, self.action, self.head, entropy)

    def over_vocabulary(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """What `reduce` makes of all log-probabilities, [some decisions, vocabulary] at a time, one value a decision.

        What could not be drawn has −∞. No chunk is kept: the backward pass computes it again.
        """
        weight, found = self.model.head_weight, []
        for rows in chunks(len(self.last), chunk_of(self.last, weight)) or [slice(0, 0)]:
            reduced = functools.partial(self._reduced, reduce, rows)
            if torch.is_grad_enabled():
                found.append(checkpoint(reduced, self.last[rows], weight, use_reentrant=False))
            else:
                found.append(reduced(self.last[rows], weight))
        return torch.cat(found)

    def _reduced(
        self, reduce: Callable[[Tensor], Tensor], rows: slice, state: Tensor, weight: Tensor
    ) -> Tensor:
        return reduce(self.head.free_logits(state, weight, rows).log_softmax(-1))

    def at(self, temperature: float) -> Pass:
        """The same at so many times the temperature."""
        return dataclasses.replace(self, head=self.head.times_temperature(temperature, self.last))


@dataclass(frozen=True)
class Output:
    """A need, taken apart."""

    need: str
    name: str
    arguments: tuple[Any, ...]
    temperature: float
    block: int | None
    """The number of blocks after which a state is kept for it."""
    whole: bool
    """Whether it is of all of an experience at once, `(policy, experience, …)`, with rows of unequal length."""

    def read(self, seen: Pass) -> Tensor:
        seen = seen if self.temperature == 1 else seen.at(self.temperature)
        found: Tensor = _TAPS[self.name](seen, *self.arguments)
        return found

    def of_all(self, policy: Any, experience: Experience) -> Any:
        if torch.is_grad_enabled():
            raise PanoplyError(
                f"'{self.need}' has rows of unequal length, which no term can be given: ask a snapshot for it, as in "
                f"{self.need}@old."
            )
        return _TAPS[self.name](policy, experience, *self.arguments)


_TAPS: dict[str, Callable[..., Any]] = {}


def tap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register an output of text policies under the function's name."""
    name, first = function.__name__, [*inspect.signature(function).parameters][:2]
    if first[:1] != ["seen"] and first != ["policy", "experience"]:
        raise PanoplyError(f"The output '{name}' is a function of seen, or of policy and experience.")
    if untyped := [key for key in _settings(function) if key not in function.__annotations__]:
        raise PanoplyError(
            f"The argument '{untyped[0]}' of the output '{name}' has no type: write one after a colon."
        )
    known = _TAPS.get(name)
    if known is not None and known.__module__ != function.__module__:
        raise PanoplyError(
            f"The output '{name}' is registered twice, by {known.__module__} and {function.__module__}."
        )
    _TAPS[name] = function
    parse.cache_clear()
    return function


def split(need: str) -> tuple[str, str]:
    """`logp*1.2@old` is the output `logp*1.2` of the snapshot `old`."""
    output, _, snapshot = need.partition("@")
    return output, snapshot


@functools.cache
def parse(need: str) -> Output:
    """Take a need apart; one that is not an output is refused in a sentence."""
    from panoply.values import parse

    rest, star, factor = need.partition("*")
    name, *words = rest.split(":")
    if name not in _TAPS:
        raise unknown("output of a text policy", name, sorted(_TAPS))
    try:
        temperature = float(factor) if star else 1.0
    except ValueError:
        temperature = math.nan
    if not 0 < temperature < math.inf:
        raise PanoplyError(
            f"'{need}' has no temperature: write a number above 0 after the *, as in {rest}*1.2."
        )
    function = _TAPS[name]
    whole, *_ = inspect.signature(function).parameters
    hints, defaults = typing.get_type_hints(function), _settings(function)
    if len(words) > len(defaults):
        raise PanoplyError(f"'{need}' has too many arguments: {name} takes {', '.join(defaults) or 'none'}.")
    pairs = dict(zip(defaults, words, strict=False))
    given = {key: parse(f"{key} of '{need}'", word, hints[key]) for key, word in pairs.items()}
    if lacking := [key for key, default in defaults.items() if key not in given and default is MISSING]:
        raise PanoplyError(f"'{need}' lacks its {lacking[0]}: write {name}:{lacking[0].upper()}.")
    if whole == "policy" and star:
        raise PanoplyError(f"'{need}' is the same at every temperature: leave out *{factor}.")
    block = given.get("block") if whole == "seen" else None
    return Output(need, name, tuple(given.values()), temperature, block, whole == "policy")


def block_of(need: str) -> int | None:
    """The block that a need is read off; None where it is read off none, or is no output."""
    output, _ = split(need)
    name = output.partition("*")[0].partition(":")[0]
    return parse(output).block if name in _TAPS else None


MISSING: Any = inspect.Parameter.empty


def _settings(function: Callable[..., Any]) -> dict[str, Any]:
    """A tap's own arguments, after what it looks at, and their defaults."""
    found = inspect.signature(function).parameters
    return {name: p.default for name, p in found.items() if name not in ("seen", "policy", "experience")}


# ------------------------------------------------------------------ what every text policy has


@tap
def logp(seen: Pass, block: int | None = None, norm: Norm = "raw") -> Tensor:
    """log π of the action; `logp:K` as block K alone would predict it, `logp:K:normed` through the final norm."""
    return seen.scores(seen.state(block, norm))["logp"]


@tap
def entropy(seen: Pass, block: int | None = None, norm: Norm = "raw") -> Tensor:
    """Of the distribution that was sampled from; `entropy:K` of what block K alone would predict."""
    return seen.scores(seen.state(block, norm), entropy=True)["entropy"]


@tap
def hidden(seen: Pass, block: int) -> Tensor:
    """[decisions, width]: the state after so many blocks that each decision was predicted from."""
    return seen.state(block)


@tap
def mean_logp(seen: Pass) -> Tensor:
    """The mean of log π over all tokens that could have been drawn, each counted alike."""

    def mean(logp: Tensor) -> Tensor:
        possible = logp > -math.inf
        return torch.where(possible, logp, 0.0).sum(-1) / possible.sum(-1)

    return seen.over_vocabulary(mean)


@tap
def attention(policy: Any, experience: Experience, block: int, head: int | None = None) -> Ragged:
    """How much each decision's prediction attends, in a block, to every token before it; of one head, or their mean."""
    return maps(policy, experience, block, head)
