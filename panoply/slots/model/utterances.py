"""A critic of whole utterances beside a policy, that learns off policy and says what the policy learns from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from panoply.experience import Experience
from panoply.parts import Finding, part
from panoply.policies.penalties import NEUTRAL
from panoply.policies.utterances import Said, UtteranceCritic, q_error, v_error
from panoply.rollout.utterances import FIRST, said_before, said_in, utterances
from panoply.seeds import torch_rng
from panoply.slots.model.model import Model
from panoply.slots.model.remembered import Remembered
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import Adam, adam
from panoply.turns import Tokens, Turn, Turns, turns_of

if TYPE_CHECKING:
    from panoply.loops.seat import Seat
    from panoply.rollout.text import Collector


Says = Literal["new", "replay"]
DRAWN_BY = ("temperature", "top_p", "top_k", "min_p", *NEUTRAL, "max_tokens")
"""Settings of a sample part by which what is said in old states is drawn as well: they are the policy that acts."""


@dataclass(frozen=True)
class Course:
    """How a critic learns: the settings of `utterance_critic`."""

    gamma: float
    tau: float
    lr: float
    clip: float
    updates: int
    batch: int
    states: int
    size: int
    expectile: float | None
    says: Says = "new"


class Judge(Remembered):
    """The critic, its target, its optimiser and its replay: what is saved with a run."""

    def __init__(self, net: UtteranceCritic, collect: Collector, held: Course, how: Mapping[str, Any]):
        self.net, self.target = net, net.frozen()
        self.collect, self.how, self.held = collect, how, held
        self.turns = Turns(held.size)
        self.learning = dict(net.learning())
        self.optimiser = cast(Adam, adam(lr=held.lr)(self.learning.values()))
        self.updates = 0

    def learn(self, step: int) -> dict[str, float]:
        """Some updates on turns of the replay, each followed by a step of the target.

        The policy stands still meanwhile, so that what it says in all of their states is drawn at once.
        """
        held = self.held
        drawn = self.turns.draw(held.updates * held.batch, torch_rng("turns", self.collect.seed, step))
        fresh: list[Tokens] = [turn.said for turn in drawn]
        if held.expectile is None:
            fresh = list[Tokens](said_in(self._utterances(drawn, "critic")))
        losses = []
        for i in range(0, len(drawn), held.batch):
            some = slice(i, i + held.batch)
            losses.append(self._update(drawn[some], fresh[some]))
        means = torch.stack(losses).mean(0).tolist()
        return dict(zip(("q_error", "v_error"), means, strict=True)) | {"turns": float(len(self.turns))}

    def _update(self, turns: list[Turn], fresh: list[Tokens]) -> Tensor:
        held, device = self.held, self.net.trunk.device
        states = [turn.state for turn in turns]
        following, nothing = [turn.then or turn.state for turn in turns], [()] * len(turns)
        with torch.no_grad():
            ahead: Said = self.target([*states, *following], [*fresh, *nothing])
            hoped, then = ahead.q[: len(turns)], ahead.v[len(turns) :]
        now = self.net(states, [turn.said for turn in turns])
        reward = torch.tensor([turn.reward for turn in turns], device=device)
        goes_on = torch.tensor([float(bool(turn.then)) for turn in turns], device=device)
        tau = 0.5 if held.expectile is None else held.expectile
        errors = q_error(now.q, reward, then, goes_on, held.gamma), v_error(now.v, hoped, tau)
        self.optimiser.zero_grad()
        (errors[0] + errors[1]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.learning.values(), held.clip)
        self.optimiser.step()
        self.updates += 1
        pairs = {"critic": (list(self.target.parameters()), [p.data for p in self.net.parameters()])}
        polyak(tau=held.tau)(self.updates, pairs)
        return torch.stack(errors).detach()

    @torch.no_grad()
    def offers(self, step: int) -> Experience:
        """Utterances in states of the replay, new or its own, each with min Q and min V of twins, on all its rows."""
        drawn = self.turns.draw(self.held.states, torch_rng("states", self.collect.seed, step))
        if self.held.says == "new":
            rows = self._utterances(drawn, "actor")
        else:
            read, told = [turn.state for turn in drawn], [turn.said for turn in drawn]
            heat = self.how.get("temperature", 1.0)
            rows = said_before(self.collect, read, told, [turn.task for turn in drawn], heat)
        said: Said = self.net([turn.state for turn in drawn], said_in(rows))
        worth = torch.stack([said.q.amin(1), said.v.amin(1)], dim=1).to(rows["action"].device)
        q, v = worth[rows["episode"] - FIRST].unbind(1)
        return rows.with_columns(q=q, v=v, reward=torch.zeros_like(q))

    def _utterances(self, turns: list[Turn], name: str) -> Experience:
        states, tasks = [turn.state for turn in turns], [turn.task for turn in turns]
        return utterances(self.collect, states, tasks, f"utterances of the {name}", **self.how)

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        moments = {
            f"moment:{name}:{key}": torch.as_tensor(kept)
            for name, parameter in self.learning.items()
            for key, kept in self.optimiser.state[parameter].items()
        }
        return {
            **{f"critic:{name}": p for name, p in self.net.named_parameters()},
            **{f"target:{name}": p for name, p in self.target.named_parameters()},
            **{f"turns:{name}": kept for name, kept in self.turns.state().items()},
            **moments,
            "updates": torch.tensor(self.updates),
        }

    @torch.no_grad()
    def load_state(self, named: Mapping[str, Tensor]) -> None:
        for prefix, net in (("critic", self.net), ("target", self.target)):
            for name, parameter in net.named_parameters():
                parameter.copy_(named[f"{prefix}:{name}"])
        self.turns.load_state({n.removeprefix("turns:"): t for n, t in named.items() if n[:6] == "turns:"})
        self.updates = int(named["updates"])
        for full, kept in named.items():
            if full.startswith("moment:"):
                _, name, key = full.split(":")
                self.optimiser.state[self.learning[name]][key] = kept.to(self.learning[name].device)


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if world.medium != "text":
        return [("", "utterances are of text")]
    weighs = method.credit.settings().get("beta") is not None
    if held.says == "replay" and not weighs:
        return [("says", "what was said before is weighed by exp(β·A), and credit.beta is none")]
    return [("says", "credit.beta weighs what was said before")] if held.says == "new" and weighs else []


@part(
    "model",
    equation=lambda held: (
        f"Q(s, a) → r + {held.gamma:g}·V̄(s′),  V(s) → Q̄(s, a{'' if held.expectile else ' ~ π'}), of whole turns, twice"
    ),
    gives={"column:q", "column:v"},
    impossible=_impossible,
    bounds={
        "gamma": "from 0 to 1",
        "tau": "above 0 to 1",
        "lr": "above 0",
        "clip": "above 0",
        "updates": "at least 1",
        "batch": "at least 1",
        "states": "at least 1",
        "size": "at least 1",
        "warmup": "at least 0",
        "expectile": "above 0 to 1",
    },
)
def utterance_critic(
    seat: Seat,
    *,
    gamma: float = 0.95,
    tau: float = 0.1,
    lr: float = 2e-5,
    clip: float = 1.0,
    updates: int = 50,
    batch: int = 256,
    states: int = 768,
    size: int = 100_000,
    warmup: int = 20,
    expectile: float | None = None,
    says: Says = "new",
) -> Model:
    """Twin Q and V of whole turns, learned from a replay; what the policy learns from are new turns in its states.

    A turn is a transition: what was read, what was said, what that earned, what was read next. Q follows the reward and
    the target's V of what comes next, twin by twin. V follows the target's Q of what the policy *would say now*, not of
    what the replay has: so old turns need no ratio. In the policy's batch stands min Q and min V of the twins.

    updates    of the critic in a step, on `batch` turns each, with a step of the target of `tau` after each
    states     from which the policy says something new to learn from
    size       turns that are remembered
    warmup     steps in which the critic learns alone
    expectile  V follows this expectile of what the replay has said instead (the way to learn without acting)
    says       what the policy learns from in those states: something `new`, or what the `replay` has, weighed (AWR)
    """
    course = Course(gamma, tau, lr, clip, updates, batch, states, size, expectile, says)
    net = UtteranceCritic(cast(Any, seat.open(seat.options.model)), seat.options.seed)
    settings = cast(Any, seat.method).sample.settings()
    how = {name: settings[name] for name in DRAWN_BY if name in settings}
    judge = Judge(net, cast(Any, seat.collect), course, how)
    return Model(judge, instead=_instead, warmup=warmup)


def _instead(judge: Judge, collected: Experience, step: int) -> tuple[Experience, Mapping[str, float]]:
    judge.turns.add(turns_of(collected))
    metrics = judge.learn(step)
    return judge.offers(step), metrics
