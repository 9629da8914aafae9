"""DialTree-RPO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.costs import Lengths, Tokens
from panoply.errors import PanoplyError
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.rollout.tree import Branch
from panoply.seeds import torch_rng
from panoply.slots.reduce.averages import sequence_mean
from panoply.slots.sample.groups import LIMITS
from panoply.slots.select.filters import varied_groups
from panoply.slots.surrogate.ratios import clip

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.rollout.text_tree import TextTree


def _cost(held: Any, of: Lengths) -> Tokens:
    """Of all trees, should they be as wide as they may be: an episode's tokens are spread over its turns."""
    wide = held.prompts * held.width * held.branches
    return wide * of.answer, held.prompts * held.most * (of.prompt + of.context)


def _impossible(held: Any, method: Any, world: Any) -> Iterable[Finding]:
    if getattr(world, "turn_cap", 0) == 1:
        yield "", "episodes have a single turn"
    if getattr(world, "markov", False):
        yield "", f"every turn in {world.name} has a prompt of its own, and a dialogue is one text"
    if not held.tags:
        yield "tags", "name the words that mark the form of a turn, such as <think>"


@part(
    "sample",
    equation="{prompts} goals × trees of turns, {branches} from each of {width} dialogues at most, {most} of them",
    needs=lambda held: frozenset({"world:fork", "world:verify", *(f"signal:{name}" for name in held.pruned)}),
    gives={"column:tag"},
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "temperature")},
        "branches": "at least 2",
        "width": "at least 1",
        "most": "at least 2",
    },
    impossible=_impossible,
    cost=_cost,
)
def dialogue_trees(
    collect: Collector,
    *,
    prompts: int = 16,
    branches: int = 4,
    width: int = 8,
    most: int = 32,
    temperature: float = 1.0,
    pruned: tuple[str, ...] = ("malformed", "astray"),
    tags: tuple[str, ...] = ("T", "Q", "."),
) -> Experience:
    """A tree of dialogues for each goal; those that reach an end unpruned are one group, whole from their first turn.

    Turns that several of them begin with stand in each, so that their gradient counts as often. Column `tag` marks
    tokens of the form. Nothing is sampled again where pruning leaves few.

    branches   turns that are tried in each dialogue under way
    width      dialogues of a goal that go on, drawn from those that are left
    most       dialogues of a goal that are learned from
    pruned     signals of a turn after which a dialogue is dropped, such as a turn that is malformed or beside the point
    tags       words that mark the form of a turn
    """
    tree, dropped = collect.tree(collect.tasks(prompts), temperature), set[int]()
    dice = torch_rng("prune", collect.seed, collect.version)
    while going := _live(tree, dropped, width, pruned, dice):
        tree.extend([Branch(node, branches) for node in going])
    ends = _per_task(
        tree, [i for i, node in enumerate(tree.nodes) if node.ended and i not in dropped], most, dice
    )
    if not ends:
        raise PanoplyError(
            "Pruning left no dialogue of any goal: try more branches, or imitate first what a turn must look like."
        )
    rows = tree.trajectories(ends)
    return rows.with_columns(tag=torch.isin(rows["action"], _ids(collect, tags)))


def _live(
    tree: TextTree, dropped: set[int], width: int, pruned: tuple[str, ...], dice: torch.Generator
) -> list[int]:
    """Dialogues that go on: not at an end, not pruned by what their last turn was, and at most so many of a goal."""
    for i, node in enumerate(tree.nodes):
        earned = node.earned or {}
        if any(earned.get(name) for name in pruned) and not earned.get("success"):
            dropped.add(i)
    found = _per_task(tree, [i for i in tree.open() if i not in dropped], width, dice)
    dropped.update(set(tree.open()) - set(found))
    return found


def _per_task(tree: TextTree, nodes: list[int], most: int, dice: torch.Generator) -> list[int]:
    """At most so many nodes of each goal, drawn at random, in their order."""
    found: list[int] = []
    for task in range(len(tree.tasks)):
        mine = [i for i in nodes if tree.nodes[i].task == task]
        found += sorted(mine[k] for k in torch.randperm(len(mine), generator=dice)[:most].tolist())
    return found


def _ids(collect: Collector, tags: tuple[str, ...]) -> Tensor:
    words = collect.policy.tokenizer
    return torch.tensor([token for tag in tags for token in words.encode(tag)])


@part(
    "surrogate",
    equation=lambda held: (
        f"{'1[no tag or A ≥ 0]·' if held.protect else ''}min(ρA, clip(ρ, {1 - held.low:g}, {1 + held.high:g})·A)"
    ),
    idle="advantage",
    needs={"column:tag"},
    bounds={"low": "from 0 to 1", "high": "at least 0", "weight": "above 0"},
)
def form_kept(
    batch: Batch,
    *,
    low: float = 0.2,
    high: float = 0.2,
    protect: bool = True,
    weight: float | Part = 1.0,
) -> Values:
    """PPO's bounded ratio, but 0 for tokens of the form (`tag`) in dialogues that did worse than their group.

    A failed dialogue failed by what it said, and its form was right. They still count in the length of the dialogue.
    """
    value, stats = clip(low=low, high=high)(batch)
    spared = batch["tag"].bool() & (batch["advantage"] < 0)
    if protect:
        value = torch.where(spared, torch.zeros_like(value), value)
    return value, {**stats, "spared": spared & protect}


@part("reduce", equation="mean over dialogues, mean over their tokens / dialogues that share them")
def leaf_mean(experience: Experience, mask: Tensor) -> Tensor:
    """Every dialogue weighs the same, and a token that k of them begin with 1/k in each: it was drawn once."""
    weight: Tensor = sequence_mean()(experience, mask)
    place = Segments(experience["node"] * (int(experience["position"].max()) + 1) + experience["position"])
    return weight / place.rows(place.sum(mask.float())).clamp(min=1)


CLAIM = Ranks(
    "Where three questions must come in the right order, dialogues that branch after every turn, and tags that "
    "failures do not punish, learn more from as many tokens than whole dialogues side by side, and than the same trees "
    "without sparing the tags.",
    ("", "grpo", "tags unspared=dialtree-rpo:surrogate.protect=false"),
    world="guess:gate",
    budget="decisions=100k",
    settings={"run.held_out": 128},
    leads=True,
    also=("success", "world:well_formed"),
    shows=(Shows("mean:malformed", least=0.02),),
)
PUBLISHED: Published = {
    "reported of arXiv 2510.02286, its experiments": {"sample.branches": 4, "sample.most": 32},
    "reported of arXiv 2510.02286, its method": {
        "credit.baseline": "mean",
        "credit.scale": "std",
        "surrogate.protect": True,
        "reduce": "sequence_mean",
    },
}


@method(
    "dialtree-rpo@1",
    paper=5,
    base="grpo",
    world="guess:gate",
    presets={
        "tiny": {
            **{name: value for name, value in TINY.items() if name not in ("sample.group", "reduce")},
            "sample.prompts": 8,
            "sample.branches": 3,
            "sample.most": 16,
        }
    },
    claim=CLAIM,
    published=PUBLISHED,
)
def dialtree_rpo() -> OnPolicy:
    """DialTree-RPO: Tree-based Dialogue Reinforced Policy Optimization (arXiv 2510.02286).

    A goal is pursued in a tree: after every turn several next ones are tried in each dialogue under way, those that are
    malformed or beside the point are pruned, and at most `width` go on. All that reach an end are one group of GRPO, so
    that many of its members differ in one turn only. Success is 1 where some turn brought it about, else 0. And the
    tokens of the form (tags) learn nothing from dialogues that did worse than their group:

        J = E (1/G) Σ_i (1/|τ_i|) Σ_t M_t·min(ρA, clip(ρ)·A) − β·KL,   M_t = 1 − 1[tag ∧ A < 0]

    Without that, failures unlearn the form, which they did right: the paper saw malformed turns rise from nearly none
    to more than 70 %. Trees are for training; what is evaluated is one dialogue.

    The paper trains an attacker of language models. Nothing here needs that: the partner is a gatekeeper of a few
    signs. How many dialogues go on (`width`) is chosen here; the rate and the weight of the KL term are GRPO's. Turns
    that many dialogues begin with count in each of them, as published; `reduce=leaf_mean` divides by their number.
    Groups of one dialogue, or whose dialogues all did the same, are left out.
    """
    return grpo().but(
        sample=dialogue_trees(),
        select=(varied_groups(),),
        surrogate=form_kept(),
    )
