"""Agentic Reinforced Policy Optimization: episodes that branch after calls where the policy became unsure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.evidence.claims import Identity, Learns, Shows
from panoply.experience import Experience, Segments, Table
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.rollout.tree import Branch
from panoply.seeds import numpy_rng, torch_rng
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.shaping import gated
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import LIMITS
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.rollout.text_tree import TextTree

When = Literal["after", "before"]


def branches(draw: float, rise: float, chance: float, weight: float) -> bool:
    """Whether an episode branches: with probability clip(chance + weight·rise), by a draw between 0 and 1."""
    return min(1.0, max(0.0, draw - weight * rise)) <= chance


class Growth:
    """Trees that grow a turn at a time until each has `total` ends."""

    def __init__(
        self, tree: TextTree, total: int, initial: int, factor: int, chance: float, weight: float, when: When
    ):
        self.tree, self.total, self.initial, self.factor = tree, total, initial, factor
        self.chance, self.weight, self.when = chance, weight, when
        self.log_vocabulary = math.log(tree.collect.world.tokenizer.vocab_size)
        self.begun = [0] * len(tree.tasks)
        """Episodes of each task, those that branched off included."""
        self.followed: dict[int, int] = {}
        """Nodes at which it is to be decided whether to branch, with the turn that followed."""
        self.first: dict[int, float] = {}
        """Of a node: the entropy of the first turn of its episode."""

    def grow(self) -> None:
        while orders := self._orders():
            before = len(self.tree.nodes)
            self.tree.extend(orders)
            seen: set[int] = set()
            for node in range(before, len(self.tree.nodes)):
                self._note(node, first=self.tree.nodes[node].parent not in seen)
                seen.add(self.tree.nodes[node].parent)

    def _note(self, node: int, *, first: bool) -> None:
        """In the released code an episode that branched off has its next turn for its first one."""
        parent = self.tree.nodes[node].parent
        begins = parent < len(self.tree.tasks) or (self.when == "before" and not first)
        self.first[node] = self.tree.nodes[node].entropy if begins else self.first[parent]
        if parent >= len(self.tree.tasks) and self.tree.nodes[parent].branches == 1:
            self.followed[parent] = node

    def _orders(self) -> list[Branch]:
        """One more turn of every open episode, and what branches off; where all have ended, episodes from the start."""
        roots, early = len(self.tree.tasks), self.when == "before"
        found = [Branch(i, 1 + (self._more(i, i) if early else 0)) for i in self.tree.open() if i >= roots]
        if not early:
            asked, self.followed = self.followed, {}
            found += [Branch(i, more) for i, after in asked.items() if (more := self._more(i, after))]
        busy = {self.tree.nodes[branch.node].task for branch in found}
        for task in (task for task in range(roots) if task not in busy):
            fresh = self.total - self.begun[task] if self.begun[task] else self.initial
            self.begun[task] += fresh
            found += [Branch(task, fresh)] if fresh else []
        return found

    def _more(self, node: int, looked_at: int) -> int:
        """How many episodes branch off at a node: up to Z − 1, each by a draw of its own, while there is room."""
        task, collect = self.tree.nodes[node].task, self.tree.collect
        rise = (self.tree.nodes[looked_at].entropy - self.first[node]) / self.log_vocabulary
        draws = numpy_rng("branch", collect.seed, self.tree._first, node).random(self.factor - 1)
        room = self.total - self.begun[task]
        more = sum(branches(float(draw), rise, self.chance, self.weight) for draw in draws[:room])
        self.begun[task] += more
        return more


def _inert(held: Any, method: Any) -> list[Finding]:
    if held.initial < held.group:
        return []
    why = "all episodes of a group begin at the start (sample.initial), and none branches off"
    return [(name, why) for name in ("factor", "chance", "weight", "tokens", "when")]


def _cost(held: Any, of: Lengths) -> Tokens:
    rows = held.prompts * held.group
    return rows * of.answer, rows * (of.prompt + of.context)


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes, {held.initial} of them from the start; others branch after "
        f"replies, with probability {held.chance:g} + {held.weight:g}·ΔH"
    ),
    needs={"world:fork", "world:text", "engine:entropy"},
    gives={"column:node"},
    inert=_inert,
    cost=_cost,
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "temperature")},
        "initial": "at least 1",
        "factor": "from 2 to 1000",
        "chance": "from 0 to 1",
        "weight": "from 0 to 1000",
        "tokens": "at least 1",
    },
)
def branched(
    collect: Collector,
    *,
    prompts: int = 128,
    group: int = 16,
    initial: int = 8,
    factor: int = 2,
    chance: float = 0.5,
    weight: float = 0.2,
    tokens: int = 20,
    when: When = "after",
    temperature: float = 1.0,
) -> Experience:
    """A group of episodes for each task, some of which branch off others after a reply of the world.

    With probability clip(chance + weight·ΔH) an episode goes on as two from there, ΔH = (H − H₀)/log |V|: H is the mean
    entropy of the first tokens of a turn, H₀ that of the episode's first turn. Turns in common are in every episode
    that has them (column `node`), and were played once. Where all of a task's episodes end too early for a whole
    group, the rest begin from the start.

    group     M: episodes of a task in the end
    initial   N: of them, those that begin at the start; M at most
    factor    Z: how many an episode may become at once
    tokens    k: of a turn, how many tokens its entropy is the mean of
    when      which turn is looked at: the one `after` the reply, as the paper has it, or as in the released code the
              one `before` it, which made the call
    """
    tree = collect.tree(collect.tasks(prompts), temperature)
    tree.looked_at = tokens
    Growth(tree, group, min(initial, group), factor, chance, weight, when).grow()
    ends = [i for i, node in enumerate(tree.nodes) if node.ended]
    collect.notes = {
        **collect.notes,
        "branched": sum(n.branches > 1 for n in tree.nodes[prompts:]) / len(ends),
    }
    return tree.trajectories(ends)


_GROUP = group()


@part(
    "credit",
    equation=lambda held: f"mean over the episodes through a decision of [{held.inner.equation()}]",
    needs={"column:node"},
)
def hard(experience: Experience, *, inner: Part = _GROUP) -> Tensor:
    """What several episodes have in common gets the mean of their advantages: A = (1/d)·Σ A_i (ARPO's hard form).

    The soft form is plain group credit: each copy of such a turn has its own episode's advantage, and their gradients
    add up to the same, as long as no bound on the ratio tells them apart.
    """
    nodes = Segments(experience["node"])
    return nodes.rows(nodes.mean(inner(experience)))


def hard_and_soft(seed: int) -> Mapping[str, float]:
    """How far gradients of the two forms are apart, relative, at ratio 1: on a random tree of eight ends."""
    rng = torch_rng("hard and soft", seed)
    paths = [
        (i // 4, 2 + i // 2, 6 + i) for i in range(8)
    ]  # two, four and eight nodes, of three decisions each
    node = torch.tensor([n for path in paths for n in path for _ in range(3)])
    episode = torch.arange(8).repeat_interleave(9)
    reward = torch.zeros(72, dtype=torch.float64)
    reward[8::9] = torch.randn(8, generator=rng, dtype=torch.float64)
    rows = Experience(
        Table({"node": node, "episode": episode, "group": torch.zeros_like(node), "reward": reward}),
        Table({}),
    )
    action = torch.randint(5, (14 * 3,), generator=rng)
    place = node * 3 + torch.arange(3).repeat(24)
    found = []
    for credit in (hard(), group()):
        logits = torch.randn(
            14 * 3, 5, generator=torch_rng("logits", seed), dtype=torch.float64
        ).requires_grad_()
        logp = logits.log_softmax(-1)[place, action[place]]
        ratio = (logp - logp.detach()).exp()
        found.append(torch.autograd.grad((ratio * credit(rows)).mean(), logits)[0])
    return {"largest relative difference": float((found[0] - found[1]).abs().max() / found[1].abs().max())}


CLAIM = Learns(
    "For as many tool calls, of which some give false results, episodes that branch after calls where the policy "
    "became unsure teach more than as many episodes from the start.",
    over="grpo:sample.group=16,sample.prompts=8",
    world="tools",
    budget="signal:calls=5k",
    settings={"world.easy": 0.0, "world.noise": 0.2},
    also=("success", "total_episodes"),
    shows=(Shows("calls", least=0.5),),
)
PUBLISHED: Published = {
    "dongguanting/ARPO, scripts/ARPO_7B_Reasoning_1node.sh": {
        "sample.prompts": 128,
        "sample.group": 16,
        "sample.initial": 8,
        "sample.factor": 2,
        "sample.chance": 0.5,
        "sample.weight": 0.2,
        "update.lr": 1e-6,
        "update.minibatches": 8,
        "regularise.kl.weight": None,
    },
    "dongguanting/ARPO, vllm_rollout_with_tools.py": {"sample.tokens": 20},
    "arXiv 2507.19849, the advantage": {"credit": "group", "sample.when": "after"},
}
"""A mini-batch of 16 prompts of 128: eight of them. The released KL term has a weight of 0."""
DONE = {"reduce", "regularise.kl", "sample.group"}
_TINY = {
    **{k: v for k, v in TINY.items() if k not in DONE},
    "sample.prompts": 8,
    "update.minibatches": 1,
}


@method(
    "arpo-entropy@1",
    paper=86,
    base="grpo",
    world="tools",
    presets={"tiny": _TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def arpo_entropy() -> OnPolicy:
    """ARPO: agentic reinforced policy optimization (arXiv 2507.19849).

    After a tool's reply a policy is often unsure of what to do. Half of a group's episodes begin at the start; the
    others branch off them after replies, with probability 0.5 + 0.2·ΔH, the more likely the more entropy has risen
    since the first turn. So a call is paid once for all that go on from its result. Then GRPO over the whole group:
    turns in common are in every episode that has them, and their gradients average its advantages by themselves (the
    soft form); `--credit hard` gives them that mean, which at ratio 1 is the same gradient.

    Episodes that branch are not independent: a group's mean leans to prefixes that have many. A malformed episode
    earns −1.

    Where paper and code differ: the paper looks at the turn after a reply, the code at the one before it
    (`sample.when=before`), and sums the ten likeliest terms of twenty tokens, so that its ΔH is about twenty times as
    large; here H is the mean of exact entropies over log |V|. Not built: the bonus of 0.1 for using two kinds of tools,
    which no world here has, and the imitation that comes first (worlds ship a start).
    """
    return grpo().but(
        sample=branched(),
        reward=gated(gate=signal(name="invalid", scale=-1.0), then=signal(), above=-0.5, otherwise=-1.0),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, minibatches=8),
    )


@method(
    "arpo-hard@1",
    paper=86,
    base="arpo-entropy",
    world="tools",
    claim=Identity(
        "At ratio 1 the mean advantage for what episodes have in common, and each episode's own advantage for its "
        "copy, give one gradient.",
        hard_and_soft,
        within=1e-6,
    ),
    published={"arXiv 2507.19849, the advantage": {"credit": "hard"}},
    tags=("granularity=turn",),
)
def arpo_hard() -> OnPolicy:
    """ARPO with hard advantages (arXiv 2507.19849): what episodes have in common gets the mean of their advantages."""
    return arpo_entropy().but(credit=hard())
