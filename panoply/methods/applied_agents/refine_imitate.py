"""Refine and Imitate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.evidence.claims import Learns
from panoply.experience import OPEN, REPLAY, TERMINATED, Column, Experience, Ragged, Segments, Table
from panoply.methods.objectives.mdpo import mirror
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.rollout.utterances import FIRST, said_in, utterances
from panoply.slots.credit.groups import episode_returns
from panoply.slots.reduce.averages import sequence_mean
from panoply.slots.sample.groups import LIMITS
from panoply.slots.surrogate.sequences import sequence_clip
from panoply.slots.update.optimisers import adam
from panoply.worlds.world import Play, earned

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

Place = tuple[int, tuple[int, ...], Play, list[int]]
"""In a transcript: whose task it is, what was read until then, the dialogue as it stands, and what was replied."""


def transcript(world: Any, task: Any) -> list[Place]:
    """Every place of a dialogue of the world's expert at which something is replied."""
    play, read, found = world.play(task), tuple(task.prompt), list[Place]()
    while True:
        said = world.expert(play)
        found.append((task.id, read, play.fork(), said))
        reply = play.act(said)
        if reply.done:
            return found
        read = tuple(reply.observation) if world.markov else (*read, *said, *reply.observation)


def _cost(held: Any, of: Lengths) -> Tokens:
    replies = held.prompts * (held.candidates + held.demonstrations)
    return held.prompts * held.candidates * of.answer, replies * (of.prompt + of.context)


@part(
    "sample",
    equation=lambda held: (
        f"{held.candidates} replies at every place of {held.prompts} transcripts"
        f"{', and what was replied there' if held.demonstrations else ''}"
    ),
    needs={"world:reference", "world:fork", "signal:passed"},
    bounds={**{name: LIMITS[name] for name in ("prompts", "temperature")}, "candidates": "at least 1"},
    impossible=lambda held, method, world: (
        [("", "episodes have a single turn")] if getattr(world, "turn_cap", 0) == 1 else []
    ),
    cost=_cost,
)
def candidates(
    collect: Collector,
    *,
    prompts: int = 4,
    candidates: int = 10,
    demonstrations: bool = True,
    temperature: float = 1.0,
) -> Experience:
    """Replies to people's side of recorded dialogues, each an episode of its own; no user is simulated.

    What is read is always what was said in the transcript. Candidates of one place are a group.

    prompts          transcripts a step
    candidates       replies at each place of them
    demonstrations   whether the reply of the transcript is learned from beside them (source `replay`), its `logp` being
                     the policy's of now
    """
    places = [place for task in collect.tasks(prompts) for place in transcript(collect.world, task)]
    first = collect.state["groups"]
    collect.state["groups"] += len(places)
    asked = [place for place in places for _ in range(candidates)]
    states, tasks = [read for _, read, _, _ in asked], [task for task, *_ in asked]
    drawn = utterances(collect, states, tasks, "candidates", temperature=temperature)
    number = collect._number(len(asked))
    rows = drawn.with_columns(
        episode=number[drawn["episode"] - FIRST],
        group=first + (drawn["episode"] - FIRST) // candidates,
        **_signals([play for _, _, play, _ in asked], said_in(drawn), drawn["episode"] - FIRST),
    )
    return Experience.mix([rows, _demonstrated(collect, places, first)]) if demonstrations else rows


def _demonstrated(collect: Collector, places: list[Place], first: int) -> Experience:
    """The replies of the transcripts, scored by the policy as it is."""
    lengths = torch.tensor([len(said) for *_, said in places])
    row = torch.arange(len(places)).repeat_interleave(lengths)
    within = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
    shared = torch.tensor([len(read) for _, read, _, _ in places])
    prompts: dict[tuple[int, ...], int] = {}
    number = torch.tensor([prompts.setdefault(read, len(prompts)) for _, read, _, _ in places])
    columns: dict[str, Column] = {
        "task": torch.tensor([task for task, *_ in places])[row],
        "group": first + row,
        "episode": collect._number(len(places))[row],
        "turn": torch.zeros_like(row),
        "state": torch.tensor([play.state for _, _, play, _ in places])[row],
        "version": torch.full_like(row, collect.version),
        "context": row,
        "position": shared[row] + within,
        "action": torch.tensor([token for *_, said in places for token in said]),
        "source": torch.full_like(row, REPLAY),
        "end": torch.where(Segments(row).is_last(), TERMINATED, OPEN),
        **_signals([play for _, _, play, _ in places], [said for *_, said in places], row),
    }
    texts = Ragged.from_lists([[*read, *said] for _, read, _, said in places])
    rows = Experience(Table(columns), Table({"tokens": texts, "prompt": number, "shared": shared}))
    with torch.no_grad():
        known = collect.policy.score(rows, frozenset({"entropy"}))
    return rows.with_columns(**{name: known[name].cpu() for name in ("logp", "entropy")})


def _signals(plays: list[Play], said: list[list[int]], row: Tensor) -> dict[str, Column]:
    """What the detectors say of each reply in its place, on its last token."""
    heard = [play.fork().act(reply).signals for play, reply in zip(plays, said, strict=True)]
    last = Segments(row).is_last()
    names = sorted({name for signals in heard for name in signals})
    return {f"signal:{n}": torch.tensor([earned(s.get(n, 0.0)) for s in heard])[row] * last for n in names}


def _detected_inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = []
    if world.max_tokens < held.longest:
        found.append(("longest", f"no reply has more than {world.max_tokens} tokens"))
    if not method.sample.settings().get("demonstrations", True):
        found.append(("human", "replies of transcripts are not learned from (sample.demonstrations)"))
    return found


@part(
    "reward",
    equation="{odd} if too short or long, {fails} if it fails, {passes} if it passes, {persuades} with an appeal",
    needs=lambda held: frozenset({"world:verify", "signal:passed", f"signal:{held.appeal}"}),
    inert=_detected_inert,
    bounds={
        **dict.fromkeys(("odd", "fails", "passes", "persuades", "scarce", "human"), "any number"),
        **dict.fromkeys(("shortest", "longest", "enough"), "at least 0"),
    },
)
def detected(
    experience: Experience,
    *,
    passes: float = 2.0,
    persuades: float = 4.0,
    fails: float = -2.0,
    scarce: float = 0.5,
    odd: float = -3.0,
    human: float = 10.0,
    enough: int = 3,
    shortest: int = 2,
    longest: int = 50,
    appeal: str = "appeal",
) -> Tensor:
    """What a reply earns by what detectors of contradictions and repetitions say of it, on its last token.

    passes, persuades   without a fault; and with an appeal beside
    scarce              for either, where fewer than `enough` candidates of the place pass
    odd                 for `shortest` tokens and fewer, and for `longest` and more, whatever they say
    human               for the reply of the transcript
    """
    episodes = experience.by("episode")
    passed = episodes.sum(experience["signal:passed"]) > 0
    appeals = episodes.sum(experience[f"signal:{appeal}"]) > 0
    own = episodes.first(experience["source"]) != REPLAY
    groups = Segments(episodes.first(experience["group"]))
    few = groups.rows(groups.sum((passed & own).float()) < enough)
    value = torch.where(passed, torch.where(appeals, persuades, passes), torch.tensor(fails))
    value = torch.where(passed & few, scarce, value)
    value = torch.where((episodes.count <= shortest) | (episodes.count >= longest), odd, value)
    value = torch.where(own, value, human)
    return episodes.rows(value) * episodes.is_last()


@part(
    "credit",
    equation="A = clip((R − mean) / (std + {epsilon}), ±{limit}) of the last {size} replies",
    state=lambda: {"earned": torch.zeros(0)},
    bounds={"size": "at least 2", "limit": "above 0", "epsilon": "from 0 to 1"},
)
def buffered(
    state: dict[str, Any],
    experience: Experience,
    *,
    size: int = 512,
    limit: float = 2.0,
    epsilon: float = 1e-5,
) -> tuple[dict[str, Any], Tensor]:
    """A reply's reward against those of the last steps, demonstrations among them; the first step's against its own."""
    returns, _ = episode_returns(experience)
    known = state["earned"] if len(state["earned"]) > 1 else returns
    advantage = ((returns - known.mean()) / (known.std() + epsilon)).clamp(-limit, limit)
    kept = torch.cat([state["earned"], returns.cpu()])[-size:]
    return {"earned": kept}, experience.by("episode").rows(advantage)


CLAIM = Learns(
    "Replies in recorded dialogues that are sampled, checked for contradictions and repetitions and paid for that, "
    "with no user simulated, lead to more conversations without a fault than imitating as many careless replies.",
    over="sft",
    world="guess:talk",
    budget="steps=60",
    waives={
        "room": "careless replies are what is imitated, and how little carelessness that removes is what is to be "
        "changed; the start is right in a fifth of the conversations, so that it is not at the floor"
    },
    reworded="Imitation filled 5 % of the room, so that the gate of room is waived.",
)
PUBLISHED: Published = {
    "wyshi/consistency, PPO.py": {
        "sample.candidates": 10,
        "reward.passes": 2.0,
        "reward.fails": -2.0,
        "reward.scarce": 0.5,
        "reward.human": 10.0,
        "credit.epsilon": 1e-5,
        "credit.limit": 2.0,
        "credit.size": 512,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "regularise.mirror.weight": 0.01,
        "update.lr": 2e-5,
        "update.epochs": 2,
        "update.minibatches": 2,
    },
    "reported of arXiv 2012.15375": {"reward.persuades": 4.0, "reward.odd": -3.0},
}


@method(
    "refine-imitate@1",
    paper=183,
    base="ppo",
    world="guess:talk",
    presets={"tiny": {"sample.prompts": 8, "update.lr": 3e-4, "update.beta2": 0.95, "run.steps": 60}},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("data=demos", "feedback=program", "reward=rule", "granularity=turn"),
)
def refine_imitate() -> OnPolicy:
    """Refine and Imitate (arXiv 2012.15375).

    A dialogue model that imitates people repeats and contradicts itself. Here it is refined without a simulated user:
    at every place of a recorded dialogue it makes several replies, detectors say of each whether it repeats or
    contradicts, and that is its reward; the person's own reply is among them and earns most. One ratio a sentence, the
    geometric mean of its tokens', is bounded as in PPO, and a KL of whole distributions holds the model to its start:

        L = max(−A·ρ, −A·clip(ρ, 0.8, 1.2)) + 0.01·KL(π‖π_0),   A = clip((R − μ)/(σ + 1e-5), ±2),   no critic

    μ and σ are of the last 512 replies, demonstrations included, or their +10 would shift everything. A demonstration
    was not drawn by the policy; its ratio is to the policy of the step's beginning: a push that the clip bounds.

    The released code divides the old log-probability of the reference term by the length once more; that is not
    followed. The detectors are the world's (signals `passed` and `appeal`), exact where the paper has classifiers. The
    selector that ranks replies by how human they are is `reward-model` on the same world's pairs; ranking by it at run
    time, after filtering with the detectors, is not built. The number of passing candidates below which a pass earns
    less (`enough`) is chosen here. Perplexity and how many pairs of words differ, which the paper reports too, are not
    measured.
    """
    return OnPolicy(
        sample=candidates(),
        reward=detected(),
        credit=buffered(),
        surrogate=sequence_clip(low=0.2, high=0.2),
        regularise=(mirror(weight=0.01, to="reference"),),
        reduce=sequence_mean(),
        update=adam(lr=2e-5, epochs=2, minibatches=2),
    )
