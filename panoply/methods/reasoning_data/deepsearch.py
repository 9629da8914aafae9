"""DeepSearch: answers are searched for in a tree while training, and its values are the tokens' credit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.rollout.tree import Branch
from panoply.slots.credit.groups import nothing_divides
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.shaping import overlong, verdict
from panoply.slots.sample.groups import LIMITS
from panoply.slots.sample.rounds import asked, noted, recalled
from panoply.slots.sample.searching import After, Bonus, Search
from panoply.slots.schedule.schedules import constant
from panoply.slots.surrogate.ratios import clip
from panoply.slots.task_memory import TaskMemory
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


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
    state, search, recall = asked(state, collect, prompts, pool, rare)
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
        found += recalled(collect, TaskMemory.of(state), collect.numbered(recall), group, temperature)
    made = found[0] if len(found) == 1 else Experience.mix(found)
    collect.notes = {
        "covered": covered / max(1, len(search)),
        "searched": len(search),
        "recalled": len(recall),
    }
    return (noted(state, made, group) if pool else state), made


def _valued(tree: Any, searches: Sequence[Search], squash: float, most: float) -> Experience:
    """The answers that were kept, with values as they are at the end of the search."""
    rows: Experience = tree.trajectories([end for one in searches for end in one.kept])
    value = {node: v for one in searches for node, v in one.value.items()}
    sums = torch.tensor([value[node] for node in rows["node"].tolist()])
    last = torch.tensor([tree.nodes[node].ended for node in rows["node"].tolist()])
    limited = torch.where(last, sums, most * (sums / squash).tanh()) if squash else sums
    return rows.with_columns(node_value=limited).without("node")


# ------------------------------------------------------------------ credit


def _credit_equation(held: Any) -> str:
    return "A = v(node) + (R ∓ 1) − mean_group(R)" + (" / (std_group(R) + ε)" if held.scale == "std" else "")


@part(
    "credit",
    equation=_credit_equation,
    needs={"column:node_value"},
    bounds={"epsilon": "from 0 to 1"},
    inert=nothing_divides,
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


@method(
    "deepsearch@1",
    paper=182,
    base="grpo",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("granularity=turn",),
)
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
