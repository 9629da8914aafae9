"""PolicyRollout and TriMPI: rules that stand in a prompt are put into the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import DEMONSTRATION, REPLAY, Experience
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Finding, part
from panoply.recipes import Recipe, Stage
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, recipe
from panoply.slots.reward.signals import blend
from panoply.slots.sample.dynamic import varied_groups_of
from panoply.slots.sample.groups import LIMITS

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task


# ------------------------------------------------------------------ answers with the rules in sight


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return sampled * held.rounds, trained


def _kept(held: Any, method: Any) -> list[Finding]:
    if round(held.group * held.guided) == 0:
        return [("keep", "no episode of a group has seen rules (sample.guided)")]
    return []


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes, {held.guided:.0%} of them with the rules in sight"
        + ("" if held.keep else ", which are taken away before anything is scored")
    ),
    needs={"world:privileged", "world:one turn", "world:verify"},
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "max_tokens")},
        "temperature": "above 0 to 100",
        "guided": "from 0 to 1",
        "rounds": "at least 1",
    },
    inert=_kept,
    cost=_cost,
)
def half_guided(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    guided: float = 0.5,
    keep: bool = False,
    rounds: int = 1,
    temperature: float = 1.0,
    max_tokens: int | None = None,
) -> Experience:
    """Groups in which some episodes were sampled with the rules in the prompt, and all are learned without.

    guided   the share of a group that sees the rules
    keep     leave the rules where they were: what is learned then is to read them
    rounds   above 1, groups that are all right or all wrong are dropped and others asked, so many times at most (DAPO)

    Guided answers join the others' group. Their `logp` is what the policy gives them without rules, by the weights
    they were sampled with; by that of sampling, a ratio would be of two prompts. So they are answers of another self
    (source 3), and how unlikely they are is measured: `guided_logp`, and `guided_gap`, by how much more likely each of
    their tokens was with the rules.
    """
    found, enough = [], 0
    for _ in range(rounds):
        tasks, shown = collect.tasks(prompts), round(group * guided)
        keys = collect.state["groups"] + torch.arange(prompts)
        parts = (
            [collect.episodes(tasks, group - shown, **_how(temperature, max_tokens))] if shown < group else []
        )
        if shown:
            into = keys if parts else None
            parts.append(_in_sight(collect, tasks, shown, keys, into, keep, _how(temperature, max_tokens)))
        asked = Experience.mix(parts)
        if rounds == 1:
            return asked
        varied = varied_groups_of(asked, "success")[: prompts - enough]
        enough += len(varied)
        found.append(asked.take(torch.isin(asked["group"], varied)))
        if enough == prompts:
            break
    return Experience.mix([some for some in found if len(some)]) if enough else asked


def _how(temperature: float, max_tokens: int | None) -> dict[str, Any]:
    return {"temperature": temperature, "max_tokens": max_tokens}


def _in_sight(
    collect: Collector,
    tasks: Sequence[Task],
    group: int,
    keys: torch.Tensor,
    into: torch.Tensor | None,
    keep: bool,
    how: dict[str, Any],
) -> Experience:
    """Episodes with the rules in the prompt, as they are scored: with the prompts of their tasks, which have none."""
    shown = collect.episodes([collect.world.privileged(task) for task in tasks], group, into=into, **how)
    if keep:
        return shown
    which = torch.zeros(shown.context.rows, dtype=torch.long)
    which[shown["context"]] = shown["group"] - keys[0]
    bare = shown.reprompted({row: tasks[at].prompt for row, at in enumerate(which.tolist())})
    with torch.no_grad():
        scored = collect.policy.score(bare, frozenset({"entropy"}))
    logp, entropy = scored["logp"].detach().cpu(), scored["entropy"].detach().cpu()
    collect.notes = {
        "guided_success": float(shown.by("episode").sum(shown["signal:success"]).mean()),
        "guided_logp": float(logp.mean()),
        "guided_gap": float((shown["logp"] - logp).mean()),
    }
    return bare.with_columns(logp=logp, entropy=entropy, source=torch.full_like(shown["source"], REPLAY))


# ------------------------------------------------------------------ the stages before


@part(
    "data",
    equation="{batch} whole texts a step: rules, question, thoughts and answer, of {pool} questions",
    needs={"world:privileged", "world:reference", "world:one turn"},
    bounds={"batch": "at least 1", "pool": "at least 1"},
)
def documents(collect: Collector, *, batch: int = 128, pool: int = 256) -> Experience:
    """Texts of which every token but the first is learned, rules and questions too: continued pre-training.

    They are of a fixed pool of questions. The paper's texts have pictures as well, whose tokens are not learned.
    """
    world = collect.world
    tasks = [world.privileged(collect.pool(pool)[at]) for at in collect.shuffled(batch, pool)]
    whole = [(*task.prompt, *world.gold(task)) for task in tasks]
    first = [dataclasses.replace(task, prompt=text[:1]) for task, text in zip(tasks, whole, strict=True)]
    said = collect.answers(first, [text[1:] for text in whole], source=DEMONSTRATION)
    return said.without(*(name for name in said.decisions if name.startswith("signal:")))


@part(
    "data",
    equation="{batch} reference answers a step, to {pool} questions",
    needs={"world:reference"},
    bounds={"batch": "at least 1", "pool": "at least 1"},
)
def worked(collect: Collector, *, batch: int = 128, pool: int = 256) -> Experience:
    """Reference answers to questions of a fixed pool, which show no rules: imitation of thoughts and answer."""
    tasks = [collect.pool(pool)[at] for at in collect.shuffled(batch, pool)]
    return collect.answers(tasks, [collect.world.gold(task) for task in tasks], source=DEMONSTRATION)


# ------------------------------------------------------------------ the works

PUBLISHED: Published = {
    "arXiv 2510.09474, eq. of PoRo-GRPO": {
        "sample": "half_guided",
        "sample.guided": 0.5,
        "sample.keep": False,
        "reward.names": ("success", "format"),
        "credit.baseline": "mean",
        "credit.scale": "std",
    },
}
"""As many answers with the rules as without, one advantage over both halves, accuracy and format. Sizes of groups,
rates and the weight of the KL term were not to be found, and are GRPO's."""

CLAIM = Ranks(
    "Where a policy can read rules and does not know them, GRPO whose groups are half sampled with the rules in sight "
    "learns them by heart sooner than GRPO without rules does, at as many answers; what is trained with the rules in "
    "its prompts and asked without them stays behind both.",
    (
        "",
        "grpo:reward=blend,reward.names=success,format",
        "rules kept=policy-rollout:sample.keep=true,sample.guided=1",
    ),
    "rules",
    "episodes=5120",
    leads=True,
    also=("success", "entropy"),
    shows=(Shows("degenerate_groups", most=0.9),),
)


@method(
    "policy-rollout@1",
    paper=25,
    base="grpo",
    world="rules",
    claim=CLAIM,
    presets={"tiny": TINY},
    published=PUBLISHED,
)
def policy_rollout() -> OnPolicy:
    """PolicyRollout (PoRo-GRPO, arXiv 2510.09474): half of a group answers with the rules in sight, all learn without.

    An assistant's rules fill its prompt. To have them in the weights instead, o_1 … o_G are drawn from π(·|Q) and
    o_{G+1} … o_{2G} from π(·|Q, P), with the rules P before the question. Rewards of all 2G are compared with one
    another, and all are learned after Q alone:

        ρ = π_θ(o|Q)/π_old(o|Q) for both halves,   A = (r − mean over 2G)/std over 2G

    What is surprising: nothing makes up for the guided half having been drawn from elsewhere. Its denominator is π_old
    without rules, so that ρ starts at 1 however unlikely an answer was; watch `guided_logp`. With DAPO:
    `panoply train dapo --sample half_guided --set sample.rounds=10`. The recipe `trimpi` has the stages before.
    """
    return grpo().but(
        sample=half_guided(prompts=16, group=64),
        reward=blend(names=("success", "format")),
    )


@recipe("trimpi@1", paper=25, world="rules")
def trimpi() -> Recipe:
    """TriMPI (arXiv 2510.09474): a document of rules is learned by heart in three stages.

    `read` goes on with pre-training, on texts of rules, question, thoughts and answer, every token of which is learned
    (VM-CPT: −Σ m_t log π(x_t|x_<t)/Σ m_t, m = 0 on tokens of pictures; there are none here). `think` imitates thoughts
    and answers to questions without rules. `explore` is PolicyRollout. Each goes on from the one before, on the same
    few questions in the first two. What the first stage is for: reinforcement alone has to find the rules by trial.
    """
    return Recipe(
        (
            Stage("read", "sft", {"data": "documents"}, {"steps": 40}),
            Stage("think", "sft", {"data": "worked", "data.pool": 64}, {"model": "@read", "steps": 20}),
            Stage("explore", "policy-rollout", {}, {"model": "@think", "reference": "@think"}),
        )
    )
