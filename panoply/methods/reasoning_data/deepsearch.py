"""DeepSearch: answers are searched for in a tree while training, and its values are the tokens' credit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.evidence.claims import Learns, Shows
from panoply.experience import REPLAY, Experience, Ragged, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.rollout.collector import in_epochs
from panoply.rollout.tree import Branch, Tree
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.shaping import overlong, verdict
from panoply.slots.sample.answers import answers_of
from panoply.slots.sample.groups import LIMITS
from panoply.slots.schedule.schedules import constant
from panoply.slots.surrogate.ratios import clip
from panoply.slots.task_memory import TaskMemory
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

Bonus = Literal["sqrt", "log", "linear"]
After = Literal["frontier", "root"]


# ------------------------------------------------------------------ the search


def backed_up(value: float, outcome: float, gamma: float) -> float:
    """A node's value after an answer below it ended with 1 or −1, which counts γ there.

    A failure never lowers a node that a success has passed, and a success wipes out earlier failures.
    """
    if value * outcome >= 0:
        return value + gamma * outcome
    return gamma * outcome if outcome > 0 else value


class Search:
    """What is known of one task's tree: sums of outcomes, visits, and which node is expanded next."""

    def __init__(
        self,
        tree: Tree,
        root: int,
        group: int,
        deepest: int,
        explore: float,
        weights: tuple[float, float, float],
        bonus: Bonus,
        floor: float,
        after: After,
    ):
        self.tree, self.root, self.group, self.deepest = tree, root, group, deepest
        self.explore, self.weights, self.bonus, self.floor, self.after = explore, weights, bonus, floor, after
        self.at: int | None = root
        """The node to be expanded next; none when there are enough answers, or nothing is left."""
        self.value: dict[int, float] = {root: 0.0}
        self.visits: dict[int, int] = {root: 0}
        self.children: dict[int, list[int]] = {}
        self.kept: list[int] = []
        """Ends that are learned from, in the order they were found."""
        self.others: list[int] = []
        """Further ends, which were found beside those."""

    def outcome(self, node: int) -> float:
        return 1.0 if (self.tree.nodes[node].earned or {}).get("success", 0.0) > 0 else -1.0

    def expanded(self, new: Sequence[int]) -> None:
        """Take note of the children of the node that was expanded, and choose the next."""
        assert self.at is not None
        nodes = self.tree.nodes
        self.children[self.at] = list(new)
        for child in new:
            self.value[child], self.visits[child] = 0.0, 0 if nodes[child].ended else 1
        ended = [child for child in new if nodes[child].ended and nodes[child].earned is not None]
        if ended:
            best = min(ended, key=self._preference)
            self.others += [child for child in ended if child != best]
            self._keep(best)
        if len(self.kept) >= self.group:
            self.at = None
        elif ended or not any(not nodes[child].ended for child in new):
            self.at = self._from_root() if self.after == "root" else self._frontier()
        else:
            self.at = max((c for c in new if not nodes[c].ended), key=self.puct)
        if self.at is None:
            self._fill()

    def _preference(self, end: int) -> tuple[float, float]:
        """Right ones first, then those that were said with most confidence."""
        return -self.outcome(end), self.surprise(self._path(end)[1:])

    def _keep(self, end: int) -> None:
        self.kept.append(end)
        outcome, path = self.outcome(end), self._path(end)
        for node in path:
            gamma = max((self.tree.nodes[node].depth + 1) / len(path), self.floor)
            self.value[node] = backed_up(self.value[node], outcome, gamma)
            self.visits[node] += 1

    def _fill(self) -> None:
        """Where the whole tree is searched and answers are lacking: ends that were found beside others."""
        while len(self.kept) < self.group and self.others:
            best = min(self.others, key=self._preference)
            self.others.remove(best)
            self._keep(best)

    # -------------------------------------------------------------- which node is next

    def mean(self, node: int) -> float:
        """Q = v/N."""
        return self.value[node] / self.visits[node] if self.visits[node] else 0.0

    def puct(self, node: int) -> float:
        parent = self.visits[self.tree.nodes[node].parent]
        seen = self.visits[node]
        return self.mean(node) + (
            self.explore * math.sqrt(math.log(parent) / seen) if parent and seen else 0.0
        )

    def priority(self, node: int) -> float:
        """F = λ₁·tanh Q(parent) + λ₂·(−mean log-probability of its own tokens) + λ₃·depth."""
        quality, doubt, deep = self.weights
        depth = self.tree.nodes[node].depth
        far = {"sqrt": math.sqrt(depth / self.deepest), "log": math.log(depth + 1), "linear": float(depth)}
        known = math.tanh(self.mean(self.tree.nodes[node].parent))
        return quality * known + doubt * self.surprise([node]) + deep * far[self.bonus]

    def _frontier(self) -> int | None:
        """Of all nodes that may be expanded the one that promises most, wherever it is."""
        nodes = self.tree.nodes
        free = [n for n in self.value if n != self.root and n not in self.children and not nodes[n].ended]
        return max(free, key=self.priority) if free else None

    def _from_root(self) -> int | None:
        """From the start down, at each node to the best child under which something is left to be expanded."""
        at = self.root
        while at in self.children:
            alive = [child for child in self.children[at] if self._alive(child)]
            if not alive:
                return None
            at = max(alive, key=self.puct)
        return at

    def _alive(self, node: int) -> bool:
        if self.tree.nodes[node].ended:
            return False
        return node not in self.children or any(self._alive(child) for child in self.children[node])

    def _path(self, node: int) -> list[int]:
        """From the root to a node."""
        path = [node]
        while path[-1] != self.root:
            path.append(self.tree.nodes[path[-1]].parent)
        return path[::-1]

    def surprise(self, edges: Sequence[int]) -> float:
        """−mean log-probability of what was said on some edges."""
        nodes = [self.tree.nodes[edge] for edge in edges]
        return -sum(n.logp for n in nodes) / max(1, sum(n.decisions for n in nodes))


# ------------------------------------------------------------------ sampling


def _equation(held: Any) -> str:
    rounds = (
        f"; rounds over {held.pool} prompts, cached answers where at most {held.rare:g} were right"
        if held.pool
        else ""
    )
    where = "from the root" if held.after == "root" else (
        f"at the largest {held.quality:g}·tanh Q + {held.doubt:g}·H + {held.deep:g}·{held.bonus}(depth)"
    )  # fmt: skip
    return (
        f"{held.prompts} prompts × trees of {held.width} branches every {held.segment} tokens, until {held.group} "
        f"answers are kept; after each, on {where}{rounds}"
    )


def _inert(held: Any, method: Any) -> list[Finding]:
    found: list[Finding] = []
    if not held.pool:
        found.append(("rare", "prompts never come again (sample.pool=0)"))
    if held.after == "root":
        names = ("quality", "doubt", "deep", "bonus")
        found += [(name, "after an answer the search begins at the root") for name in names]
    else:
        found.append(
            ("explore", "only from the root on are there children that differ in visits (sample.after)")
        )
        found += [("bonus", "depth counts nothing (sample.deep=0)")] if held.deep == 0 else []
    if held.squash == 0:
        found.append(("most", "values are not limited (sample.squash=0)"))
    return found


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if held.temperature == 0:
        return [("temperature", f"all {held.width} branches of a node would be the same")]
    if held.pool and held.pool < held.prompts:
        return [("pool", f"a step takes {held.prompts} prompts (sample.prompts)")]
    return []


def _cost(held: Any, of: Lengths) -> Tokens:
    """At most: for every answer that is kept a whole path of expansions."""
    sampled = held.prompts * held.group * held.width * of.answer
    return sampled, held.prompts * (of.prompt + held.group * of.answer)


@part(
    "sample",
    equation=_equation,
    needs={"world:fork", "world:verify", "world:one turn", "signal:success"},
    gives={"column:node_value"},
    state=dict,
    inert=_inert,
    impossible=_impossible,
    cost=_cost,
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "temperature")},
        "width": "at least 2",
        "segment": "at least 1",
        **dict.fromkeys(("explore", "quality", "doubt", "deep", "squash", "pool"), "at least 0"),
        "most": "above 0",
        "floor": "from 0 to 1",
        "rare": "from 0 to 1",
    },
)
def searched(
    state: dict[str, Any],
    collect: Collector,
    *,
    prompts: int = 256,
    group: int = 8,
    width: int = 8,
    segment: int = 256,
    temperature: float = 1.0,
    explore: float = 2.0,
    after: After = "frontier",
    quality: float = 0.4,
    doubt: float = 0.4,
    deep: float = 0.01,
    bonus: Bonus = "sqrt",
    floor: float = 0.1,
    squash: float = 1.0,
    most: float = 1.0,
    pool: int = 0,
    rare: float = 0.25,
) -> tuple[dict[str, Any], Experience]:
    """Answers that a tree search finds, as whole episodes, with the value of the node that each token is in.

    A node is a piece of an answer. It is expanded by `width` pieces at once; as long as none of them ends, the search
    goes on below the best; when some do, one is kept (right before wrong, then the surest), its outcome ±1 is added
    along its path, more to deep nodes than to early ones, and the search goes on at the node that promises most of all.
    A prefix that several answers share is in each of them, and learns as often.

    group      answers that are kept of a tree; fewer only where the whole tree has fewer
    segment    tokens of a piece
    explore    λ of Q + λ·√(ln N(parent)/N), by which a child is chosen; new ones are all alike, and the first is taken
    after      where the search goes on after an answer: at the best of all open nodes, or down from the root
    quality, doubt, deep   λ₁, λ₂ and λ₃ of an open node's worth: Q of its parent, −mean log-probability of its tokens,
               and how deep it lies
    bonus      how depth counts: √(depth/deepest), log(depth + 1), or depth
    floor      the least that an outcome counts for an early node
    squash     values of nodes before the last become most·tanh(v/squash); 0 leaves them, sums that grow with visits
    pool       prompts that come again in rounds: those never solved are searched again, those rarely solved are
               answered as usual beside right answers of before, the others are dropped; 0: new ones for ever
    rare       the share of right answers up to which a prompt counts as rarely solved
    """
    state, search, recall = _asked(state, collect, prompts, pool, rare)
    found: list[Experience] = []
    covered = 0
    if search:
        tasks = collect.numbered(search) if pool else collect.tasks(prompts)
        tree = collect.tree(tasks, temperature)
        deepest = -(-collect.world.max_tokens // segment)
        how = (explore, (quality, doubt, deep), bonus, floor, after)
        searches = [Search(tree, root, group, deepest, *how) for root in range(len(tasks))]
        while growing := [one for one in searches if one.at is not None]:
            first = len(tree.nodes)
            tree.extend([Branch(one.at, width, segment) for one in growing if one.at is not None])
            new: dict[int, list[int]] = {}
            for node in range(first, len(tree.nodes)):
                new.setdefault(tree.nodes[node].parent, []).append(node)
            for one in growing:
                assert one.at is not None
                one.expanded(new[one.at])
        covered = sum(any(one.outcome(end) > 0 for end in one.kept) for one in searches)
        found.append(_valued(tree, searches, squash, most))
    if recall:
        found += _recalled(collect, TaskMemory.of(state), collect.numbered(recall), group, temperature)
    made = found[0] if len(found) == 1 else Experience.mix(found)
    collect.notes = {
        "covered": covered / max(1, len(search)),
        "searched": len(search),
        "recalled": len(recall),
    }
    return (_noted(state, made, group) if pool else state), made


def _valued(tree: Any, searches: Sequence[Search], squash: float, most: float) -> Experience:
    """The answers that were kept, with values as they are at the end of the search."""
    rows: Experience = tree.trajectories([end for one in searches for end in one.kept])
    value = {node: v for one in searches for node, v in one.value.items()}
    sums = torch.tensor([value[node] for node in rows["node"].tolist()])
    last = torch.tensor([tree.nodes[node].ended for node in rows["node"].tolist()])
    limited = torch.where(last, sums, most * (sums / squash).tanh()) if squash else sums
    return rows.with_columns(node_value=limited).without("node")


# ------------------------------------------------------------------ rounds


def _asked(
    state: dict[str, Any], collect: Collector, prompts: int, pool: int, rare: float
) -> tuple[dict[str, Any], list[int], list[int]]:
    """The numbers of the tasks that are searched in this step, and of those answered beside cached answers."""
    if not pool:
        return state, [0] * prompts, []
    if not state:
        collect.tasks(pool)
        state = {
            "round": 0,
            "at": 0,
            "search": torch.arange(pool),
            "recall": torch.zeros(0, dtype=torch.long),
        }
    left = len(state["search"]) + len(state["recall"]) - state["at"]
    if left <= 0:
        state = _next_round(state, collect, pool, rare)
        left = len(state["search"]) + len(state["recall"])
    every = torch.cat([state["search"], state["recall"]])
    order = in_epochs(collect.seed + state["round"], 0, len(every), len(every))
    here = order[state["at"] : state["at"] + min(prompts, left)]
    number = len(state["search"])
    search, recall = ([int(every[i]) for i in here if (i < number) is yes] for yes in (True, False))
    return {**state, "at": state["at"] + len(here)}, search, recall


def _all(pool: int) -> dict[str, Tensor]:
    return {"search": torch.arange(pool), "recall": torch.zeros(0, dtype=torch.long)}


def _next_round(state: dict[str, Any], collect: Collector, pool: int, rare: float) -> dict[str, Any]:
    """Never solved: searched again; rarely: answered beside what was right; where neither is left, all anew."""
    numbers = torch.arange(pool)
    ids = torch.tensor([task.id for task in collect.numbered(range(pool))])
    known = TaskMemory.of(state).look(ids, won=0.0, ever=0.0)
    never, seldom = known["ever"] == 0, (known["ever"] > 0) & (known["won"] <= rare)
    if not bool((never | seldom).any()):
        return {"round": state["round"] + 1, "at": 0, **_all(pool)}
    return {
        **state,
        "round": state["round"] + 1,
        "at": 0,
        "search": numbers[never],
        "recall": numbers[seldom],
    }


def _recalled(
    collect: Collector, memory: TaskMemory, tasks: Sequence[Task], group: int, temperature: float
) -> list[Experience]:
    """Groups of own answers in which some are right ones of an earlier round."""
    ids = torch.tensor([task.id for task in tasks])
    kept = [_unpacked(row)[:group] for row in memory.look(ids, answers=())["answers"].tolist()]
    first = collect.state["groups"]
    collect.state["groups"] += len(tasks)
    into = first + torch.arange(len(tasks))
    found = []
    asking = [i for i, cached in enumerate(kept) if len(cached) < group]
    if asking:
        sizes = [group - len(kept[i]) for i in asking]
        own = collect.episodes([tasks[i] for i in asking], sizes, into=into[asking], temperature=temperature)
        found.append(own)
    place = [i for i, cached in enumerate(kept) for _ in cached]
    if place:
        said = [answer for cached in kept for answer in cached]
        cached = collect.answers([tasks[i] for i in place], said, into=into[place], source=REPLAY)
        with torch.no_grad():
            found.append(cached.with_columns(logp=collect.policy.score(cached)["logp"].cpu()))
    return [rows.with_columns(node_value=_outcomes(rows)) for rows in found]


def _outcomes(rows: Experience) -> Tensor:
    episodes = rows.by("episode")
    right = episodes.sum(rows["signal:success"]) > 0
    return episodes.rows(torch.where(right, 1.0, -1.0))


def _noted(state: dict[str, Any], made: Experience, most: int) -> dict[str, Any]:
    """Of every task of the step: the share of own answers that were right, and up to so many right ones ever."""
    episodes, memory = made.by("episode"), TaskMemory.of(state)
    right, own = episodes.sum(made["signal:success"]) > 0, episodes.first(made["source"]) != REPLAY
    asked = Segments(episodes.first(made["task"]))
    tried = asked.sum(own.float())
    won = asked.sum((right & own).float()) / tried.clamp(min=1)
    known = memory.look(asked.keys, answers=(), ever=0.0)
    said, rows = answers_of(made), []
    for i, before in enumerate(known["answers"].tolist()):
        mine = ((asked.index == i) & right & own).nonzero().flatten().tolist()
        every = {tuple(answer): None for answer in [*_unpacked(before), *(said[e] for e in mine)]}
        rows.append(_packed([list(answer) for answer in every][:most]))
    ever = torch.tensor([float(len(row) > 0) for row in rows])
    written = memory.write(asked.keys, won=won, ever=ever, answers=Ragged.from_lists(rows))
    return {**state, **written.state()}


def _packed(answers: Sequence[Sequence[int]]) -> list[int]:
    """Several answers in one list, each after its length."""
    return [token for answer in answers for token in (len(answer), *answer)]


def _unpacked(row: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    at = 0
    while at < len(row):
        found.append(list(row[at + 1 : at + 1 + row[at]]))
        at += 1 + row[at]
    return found


# ------------------------------------------------------------------ credit


def _credit_equation(held: Any) -> str:
    return "A = v(node) + (R ∓ 1) − mean_group(R)" + (" / (std_group(R) + ε)" if held.scale == "std" else "")


@part(
    "credit",
    equation=_credit_equation,
    needs={"column:node_value"},
    bounds={"epsilon": "from 0 to 1"},
    inert=lambda held, method: (
        [("epsilon", "nothing divides (credit.scale=none)")] if held.scale == "none" else []
    ),
)
def node_value(
    experience: Experience, *, scale: Literal["none", "std"] = "none", epsilon: float = 1e-6
) -> Tensor:
    """The value of the node that a token is in, against the mean of what the group's answers came to.

    What the reward has beyond the outcome ±1, such as a penalty for length, is added to all tokens of its answer.
    """
    episodes, value = experience.by("episode"), experience["node_value"].float()
    returns = episodes.sum(experience["reward"].float())
    groups = Segments(episodes.first(experience["group"]))
    beyond = returns - _last(experience, value)
    advantage = value + episodes.rows(beyond - groups.rows(groups.mean(returns)))
    if scale == "std":
        advantage = advantage / (episodes.rows(groups.rows(groups.std(returns, correction=0))) + epsilon)
    return advantage


def _last(experience: Experience, value: Tensor) -> Tensor:
    """Of each episode what stands on its last token."""
    at = experience["position"] if "position" in experience else torch.arange(len(value))
    episodes = experience.by("episode")
    final = at == episodes.rows(episodes.max(at))
    return episodes.sum(torch.where(final, value, 0.0))


TINY = {
    "sample.prompts": 16,
    "sample.group": 8,
    "sample.width": 4,
    "sample.segment": 3,
    "reward": "verdict",
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.weight_decay": 0.0,
    "update.minibatches": 1,
    "run.steps": 60,
}
CLAIM = Learns(
    "Where one early mistake ruins an answer, searching a tree for answers and crediting tokens with the values of its "
    "nodes learns more than GRPO from as many sampled tokens.",
    method="deepsearch=deepsearch:sample.prompts=32,sample.group=4",
    race="chain",
    also=("success", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", least=0.05),),
)
SCRIPT = "smiles724/DeepSearch, round0.sh"
PUBLISHED: Published = {
    SCRIPT: {
        "sample.prompts": 256,
        "sample.group": 8,
        "sample.width": 8,
        "sample.segment": 256,
        "sample.temperature": 1.0,
        "credit.scale": "none",
        "reward.limit": 16384,
        "reward.cache": 4096,
        "reward.weight": 1.0,
        "surrogate.low": 0.2,
        "surrogate.high": 0.28,
        "surrogate.dual": 10.0,
        "reduce": "token_mean",
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.schedule.warmup": 10,
        "update.weight_decay": 0.1,
        "update.clip": 1.0,
        "update.minibatches": 8,
    },
    "smiles724/DeepSearch, deepsearch/rollout/sglang_mcts_wrapper.py": {
        "sample.explore": 2.0,
        "sample.after": "frontier",
        "sample.quality": 0.4,
        "sample.doubt": 0.4,
        "sample.deep": 0.01,
        "sample.bonus": "sqrt",
        "sample.floor": 0.1,
        "sample.squash": 1.0,
        "sample.most": 1.0,
    },
    "smiles724/DeepSearch, deepsearch/register_replay_buffer.py": {"sample.rare": 0.25},
    "smiles724/DeepSearch, deepsearch/reward_manager/advantage_fn.py": {"credit.epsilon": 1e-6},
}
"""Pieces of 256 tokens are 64 of an answer of 16,384. The script runs GRPO on the trees' values."""


@method("deepsearch@1", paper=182, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def deepsearch() -> OnPolicy:
    """DeepSearch (arXiv 2509.25454). A_t = v(node of t) − mean of the group's outcomes, v backed up in a search tree.

    Instead of independent answers a tree is grown for every prompt, chunk by chunk, and its most promising open node,
    wherever it lies, is expanded next: v ← v + γ·(±1) along the path of every answer that ends, γ from 0.1 at the start
    to 1 at its end. Prompts that were never solved are searched again in the next round, rarely solved ones come with
    right answers of before (`sample.pool`).

    What is surprising: failures never lower a node that lies on the way to a success, and a success wipes out what
    failures have said before. So where all answers fail, early pieces, which failures touch least, are still above the
    mean and are raised. Values are sums that grow with visits, hence the tanh. A prefix that several answers share is
    learned once for each. Of the children of a node that is expanded for the first time none has been visited more than
    the others, so that what the paper chooses by an upper bound is always the first of them, unless the search begins
    at the root again (`sample.after=root`).

    The released code has λ₂ = 0.4 but leaves that term out unless asked (`sample.doubt=0`), and stops with an error
    where a tree has no open node left; here ends that were found beside others are taken then. An answer that is not
    finished counts as wrong, as in its default. Equal pieces of one node are not put together. Cached answers are
    scored by the policy at the start of the step, as the code does.
    """
    return grpo().but(
        sample=searched(),
        reward=overlong(reward=verdict(), limit=16384, cache=4096),
        credit=node_value(),
        surrogate=clip(low=0.2, high=0.28, dual=10.0),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, weight_decay=0.1, schedule=constant(warmup=10), minibatches=8),
    )
