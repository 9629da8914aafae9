"""Rhythm credit: attention shows which tokens plan and which ones are built on, and these count for more."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.policies.attention import tokens_of, whole_maps
from panoply.policies.taps import tap
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.credit.groups import group
from panoply.slots.sample.groups import groups
from panoply.slots.update.optimisers import adam

_GROUP = group()
MOST_LAYERS, AT_ONCE = 5, 2**24
"""Layers that are looked at, and numbers of maps that are held at a time."""


# ------------------------------------------------------------------ what attention shows


def middle_layers(layers: int) -> list[int]:
    """Up to five blocks, counted from 1, evenly spaced over the middle third of them."""
    first, last = layers // 3 + 1, -(-2 * layers // 3)
    number = min(MOST_LAYERS, last - first + 1)
    return [round(float(x)) for x in torch.linspace(first, last, number)]


def spans(maps: Tensor, said: Tensor) -> Tensor:
    """[rows, heads]: how far back each head looks from the tokens of an answer, on average.

    The first token does not count: heads that look at nothing rest on it.
    """
    place = torch.arange(maps.shape[-1], device=maps.device)
    far = (place[:, None] - place[None, :]).clamp(min=0).to(maps.dtype)
    far[:, 0] = 0
    return (maps * far).sum(-1).mul(said[:, None]).sum(-1) / said.sum(-1, keepdim=True)


def looking_back(local: Tensor, window: int) -> Tensor:
    """WAAD_t = Σ_s A[t,s]·min(t − s, W)."""
    place = torch.arange(local.shape[-1], device=local.device)
    return (local * (place[:, None] - place[None, :]).clamp(0, window)).sum(-1)


def looked_at(anywhere: Tensor, said: Tensor, nearest: int, farthest: int) -> Tensor:
    """FAI_s: the mean of A[t,s] over the answer's t from s + nearest to s + farthest; NaN where there is none."""
    place = torch.arange(anywhere.shape[-1], device=anywhere.device)
    later = place[:, None] - place[None, :]
    counted = ((later >= nearest) & (later <= farthest)) & said[:, :, None].bool()
    return (anywhere * counted).sum(1) / counted.sum(1)


@tap
def rhythm(
    policy: Any,
    experience: Experience,
    window: int,
    nearest: int,
    farthest: int,
    heads: float,
) -> Tensor:
    """[decisions, 2]: WAAD, how far back local heads look from each token, and FAI, how much global ones look at it.

    Local are the `heads` (a share) that look least far back from this answer, global as many that look furthest.
    Contexts of one length are read together, without kernels.
    """
    tokens, position = tokens_of(experience), experience["position"]
    blocks = middle_layers(policy.model.config.layers)
    number = max(1, round(heads * len(blocks) * policy.model.config.heads))
    found = torch.zeros(len(experience), 2)
    asked = experience.by("context")
    ends = asked.max(position) + 1
    for length in sorted(set(ends.tolist())):
        alike = (ends == length).nonzero().flatten()
        held = len(blocks) * policy.model.config.heads * length**2
        for some in alike.split(max(1, AT_ONCE // held)):
            read = torch.stack([tokens[int(row)][:length] for row in asked.keys[some]])
            maps = torch.cat(whole_maps(policy, read, blocks), dim=1).cpu()
            place = torch.full((len(asked),), -1)
            place[some] = torch.arange(len(some))
            rows = (place[asked.index] >= 0).nonzero().flatten()
            at = place[asked.index[rows]], position[rows]
            said = torch.zeros(read.shape)
            said[at] = 1.0
            order = spans(maps, said).argsort(dim=1, stable=True)
            local, anywhere = (
                maps.gather(1, chosen[:, :, None, None].expand(-1, -1, length, length)).mean(1)
                for chosen in (order[:, :number], order[:, -number:])
            )
            found[rows, 0] = looking_back(local, window)[at]
            found[rows, 1] = looked_at(anywhere, said, nearest, farthest)[at]
    return found


# ------------------------------------------------------------------ credit


def top(values: Tensor, share: float) -> Tensor:
    """Marks in each row the largest share of what is no NaN; among equals the first."""
    there = ~values.isnan()
    number = (share * there.sum(1).double()).round()
    order = values.nan_to_num(nan=-torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    return there & (rank < number[:, None])


def coupled(back: Tensor, change: Tensor, anchors: Tensor, before: int, alpha: float) -> Tensor:
    """What is added for each token, in shares of γ − 1: [answers, tokens], NaN of `back` and `change` being no token.

    An anchor that itself looks near, after a token that looked far back, owes its place to that one: they share.
    """
    sills = [x.nanmedian(1, keepdim=True).values for x in (back, change)]
    shifted = [
        torch.nn.functional.pad(change, (k, 0), value=torch.nan)[:, : change.shape[1]]
        for k in range(1, before + 1)
    ]
    earlier = torch.stack(shifted).nan_to_num(nan=-torch.inf)
    most, which = earlier.max(0)
    owing = anchors & (back <= sills[0]) & (most >= sills[1])
    introduced = torch.zeros_like(anchors)
    answer, token = owing.nonzero(as_tuple=True)
    introduced[answer, token - 1 - which[answer, token]] = True
    return (anchors & ~owing).float() + (1 - alpha) * owing + alpha * introduced


def _need(window: int, nearest: int, farthest: int, heads: float) -> str:
    return f"rhythm:{window}:{nearest}:{farthest}:{heads:g}@old"


def _needs(held: Any) -> frozenset[str]:
    need = _need(held.window, held.nearest, held.farthest, held.heads)
    return frozenset({"world:text"} if held.by == "lot" else {"world:text", need})


def _equation(held: Any) -> str:
    which = {
        "coupled": "anchors, and what introduces them",
        "local": "the largest changes of WAAD",
        "anchor": "the largest FAI",
        "least": "the smallest FAI",
        "lot": "some drawn by lot",
    }[held.by]
    signs = "" if held.signs == "both" else f" where it is {held.signs}"
    return f"{held.credit.equation()}, times {held.amplify:g}{signs} on {held.share:g} of an answer's tokens: {which}"


def _inert(held: Any, method: Any) -> list[Finding]:
    found: list[Finding] = []
    if held.by != "coupled":
        found += [
            (name, f"only by=coupled has what introduces an anchor, not by={held.by}")
            for name in ("alpha", "before")
        ]
    if held.by not in ("coupled", "local"):
        found.append(("window", f"by={held.by} looks at no WAAD"))
    if held.by in ("local", "lot"):
        found += [(name, f"by={held.by} looks at no FAI") for name in ("nearest", "farthest")]
    if held.by == "lot":
        found.append(("heads", "by=lot looks at no attention"))
    return found


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.credit.info.slot != "credit":
        return [("credit", "it gives no advantages")]
    if held.nearest > held.farthest:
        return [("farthest", f"tokens are looked back at from {held.nearest} later on (credit.nearest)")]
    return []


@part(
    "credit",
    equation=_equation,
    needs=_needs,
    inert=_inert,
    impossible=_impossible,
    bounds={
        "amplify": "at least 0",
        "share": "above 0 to 1",
        "window": "at least 1",
        "nearest": "at least 1",
        "farthest": "at least 1",
        "heads": "above 0 to 0.5",
        "before": "at least 1",
        "alpha": "from 0 to 1",
    },
)
def on_rhythm(
    experience: Experience,
    *,
    credit: Part = _GROUP,
    by: Literal["coupled", "local", "anchor", "least", "lot"] = "coupled",
    amplify: float = 1.5,
    share: float = 0.4,
    window: int = 10,
    nearest: int = 10,
    farthest: int = 100,
    heads: float = 0.3,
    before: int = 3,
    alpha: float = 0.5,
    signs: Literal["both", "positive", "negative"] = "both",
) -> dict[str, Tensor]:
    """Another credit, times γ on those tokens of each answer that attention shows to matter.

    by         `local`: where WAAD, how far back local heads look, changes most to the next token; `anchor`: the tokens
               with most FAI, to which global heads look back; `coupled`: anchors, and those that look near themselves
               share γ with the token before them that looked far; for comparisons `least`, the least FAI, and `lot`
    amplify    γ
    share      of an answer's tokens that are marked, by local change or as anchors
    window     distances count up to this in WAAD
    nearest, farthest   from how far behind a token is looked back at, in FAI; the last tokens have none
    heads      the share of heads that are local, and of those that are global
    before     so many tokens before an anchor may have introduced it
    alpha      the share of γ − 1 that goes to who introduced it
    signs      which advantages are multiplied
    """
    found = credit(experience)
    columns: dict[str, Tensor] = found if isinstance(found, dict) else {"advantage": found}
    rows = _answers(experience)
    inside, place = rows >= 0, rows.clamp(min=0)
    if by == "lot":
        lots = torch.rand(rows.shape, generator=torch_rng("rhythm", int(experience["episode"].min())))
        added = top(lots.masked_fill(~inside, torch.nan), share).float()
    else:
        need = _need(window, nearest, farthest, heads)
        back, index = (experience[need].cpu()[place, k].masked_fill(~inside, torch.nan) for k in (0, 1))
        change = torch.full_like(back, torch.nan)
        change[:, :-1] = (back[:, :-1] - back[:, 1:]).abs()
        ranked = {"local": change, "least": -index}.get(by, index)
        added = top(ranked, share).float()
        if by == "coupled":
            added = coupled(back, change, added.bool(), before, alpha)
    factor = torch.ones(len(experience))
    factor[rows[inside]] = 1 + (amplify - 1) * added[inside]
    advantage = columns["advantage"]
    scaled = advantage * factor.to(advantage)
    if signs != "both":
        scaled = torch.where((advantage > 0) == (signs == "positive"), scaled, advantage)
    return {**columns, "advantage": scaled}


def _answers(experience: Experience) -> Tensor:
    """Row numbers [contexts, longest] in the order of positions, then −1: an answer is what was said in a context."""
    order = experience["position"].argsort(stable=True)
    grid = Segments(experience["context"][order]).grid()
    return torch.where(grid >= 0, order[grid.clamp(min=0)], -1).cpu()


TINY = {
    **{path: value for path, value in GRPO_TINY.items() if path != "regularise.kl"},
    "sample.prompts": 16,
    "credit.window": 4,
    "credit.nearest": 2,
    "credit.farthest": 16,
    "update.minibatches": 1,
}
"""Short answers are looked back at from nearer, and distances end sooner."""
CLAIM = Learns(
    "From as many answers, advantages that are half as large again on the tokens that plan and on those that are built "
    "on, as attention shows them, get further than GRPO.",
    race="frontier",
    also=("success", "mean:gradient_norm", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", most=0.7),),
)
PUBLISHED: Published = {
    "arXiv 2510.13554": {
        "credit.by": "coupled",
        "credit.window": 10,
        "credit.nearest": 10,
        "credit.farthest": 100,
        "credit.share": 0.4,
        "credit.amplify": 1.5,
        "credit.heads": 0.3,
        "credit.signs": "both",
        "sample.prompts": 512,
        "sample.temperature": 1.0,
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.minibatches": 16,
    }
}
"""No code was found. The paper names 1, 2 and 3 for `before`; `alpha` and both thresholds, each answer's medians, are
reconstructed, and so is what is not listed here, which is GRPO's."""


@method(
    "rhythm-credit@1",
    paper=15,
    base="grpo",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("granularity=token",),
)
def rhythm_credit() -> OnPolicy:
    """Rhythm credit, WAAD and FAI (arXiv 2510.13554). Ã_t = γ_t·A_t, γ_t up to 1.5, by attention maps of one more pass.

    Heads that look near look far back for a moment where a new piece of reasoning is planned (WAAD jumps); some tokens
    are anchors that later ones keep looking back at (FAI). Both count for more, whatever the sign of A; an anchor that
    looks near itself shares with the token before it that looked far.

    What is surprising: heads are sorted anew for every answer, by how far they look in it. The first token is left out
    of that, since idle heads rest there; the last tokens have no FAI and are no anchors. Larger advantages are larger
    steps, so a comparison tunes the rate of both sides, and `credit.by=lot` marks as many tokens by chance.

    Do not expect much of it on small models: a decoder of two layers has eight heads or so, of which thirty per cent
    are two, and the answers of `chain` have a rhythm of three tokens that every head knows, so that what is marked is
    nearly the same place in all of them. The pass is eager, one length at a time, so long answers are slow.
    """
    return grpo().but(
        sample=groups(prompts=512, group=64),
        credit=on_rhythm(),
        regularise=(),
        update=adam(lr=1e-6, minibatches=16),
    )
