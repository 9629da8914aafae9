"""Reasoning Palette: answers differ by the random vector that each begins with, and not token by token alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panoply.errors import PanoplyError
from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.methods.base.sft import sft
from panoply.parts import Finding, Part, part
from panoply.recipes import Recipe, Stage
from panoply.regimes import Dataset, OnPolicy
from panoply.registry import Published, method, recipe
from panoply.seeds import numpy_rng, stable_hash, torch_rng
from panoply.slots.sample.groups import LIMITS, greedy_cuts

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

Colours = Literal["vae", "noise"]
"""What a prefix is made of: a decoded z, or numbers with the mean and spread of the embeddings it would be of."""


# ------------------------------------------------------------------ the palette


class Palette(nn.Module):
    """A variational autoencoder of mean embeddings: [n, width] to z and back."""

    def __init__(self, width: int, size: int, inner: int):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, 2 * size))
        self.decoder = nn.Sequential(nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, width))

    def loss(self, h: Tensor, noise: Tensor, beta: float) -> Tensor:
        """‖h − ĥ‖² + β·KL(N(μ, σ²)‖N(0, 1)), on average."""
        mean, log_var = self.encoder(h).chunk(2, dim=-1)
        back = self.decoder(mean + (log_var / 2).exp() * noise)
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1)
        found: Tensor = ((h - back).square().sum(-1) + beta * divergence).mean()
        return found


def mean_embeddings(table: Tensor, texts: list[list[int]]) -> Tensor:
    """[texts, width]: h = (1/N)·Σ E(token) over question and answer."""
    lengths = torch.tensor([len(text) for text in texts])
    row = torch.arange(len(texts)).repeat_interleave(lengths)
    tokens = torch.tensor([token for text in texts for token in text])
    summed = torch.zeros(len(texts), table.shape[1]).index_add(0, row, table[tokens])
    return summed / lengths[:, None]


def fitted(h: Tensor, size: int, inner: int, beta: float, steps: int, seed: int) -> Palette:
    """A palette of mean embeddings, by Adam on all of them. It depends on them and on the seed alone.

    It is fitted in units of their spread, since they are short, and then put into weights of their own scale.
    """
    dice, shift, unit = torch_rng("palette", seed), h.mean(0), h.std().clamp(min=1e-8)
    plain = (h - shift) / unit
    made = Palette(h.shape[1], size, inner)
    with torch.no_grad():
        for weight in made.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.0
            weight.copy_(torch.randn(weight.shape, generator=dice) * scale)
    optimiser = torch.optim.Adam(made.parameters(), lr=3e-3)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            made.loss(plain, torch.randn(len(h), size, generator=dice), beta).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    with torch.no_grad():
        reads, writes = (cast(nn.Linear, layer) for layer in (made.encoder[0], made.decoder[2]))
        reads.weight.div_(unit)
        reads.bias.sub_(reads.weight @ shift)
        writes.weight.mul_(unit)
        writes.bias.mul_(unit).add_(shift)
    return made.requires_grad_(False)


def _made(collect: Collector, held: dict[str, Any]) -> dict[str, Tensor]:
    """The palette of a world and of the embeddings that a run of it begins with, and what is drawn from it."""
    from panoply.policies.build import open_policy

    world, seed = collect.world, collect.seed
    begun: Any = open_policy(held["embeddings"], world, seed, "cpu").model
    if not hasattr(begun, "thoughts"):
        raise PanoplyError(
            "A prefix of vectors needs a model that runs natively: transformers reads tokens here."
        )
    tasks = collect.numbered(range(held["pairs"]))
    chosen = [t for t in tasks if not held["toward"] or world.part_of(t) == held["toward"]]
    rng = numpy_rng("palette", seed)
    told = {
        t.id: [token for lesson in world.lessons(t, rng) for part in lesson for token in part] for t in tasks
    }
    if begun.config.width != (width := collect.policy.model.config.width):
        raise PanoplyError(
            f"Embeddings of {held['embeddings']} have {begun.config.width} numbers and the policy's {width}: name the "
            "model that the policy began as."
        )
    table = begun.embed(torch.arange(begun.config.vocab_size)).detach().float()
    h = mean_embeddings(table, [told[t.id] for t in tasks])
    if held["colours"] == "noise":
        return {"mean": h.mean(0), "spread": h.std(0).diag()}
    vae = fitted(h, held["size"], held["inner"], held["beta"], held["fit"], seed)
    made = {f"decoder.{name}": w.detach() for name, w in vae.decoder.state_dict().items()}
    mean, spread = torch.zeros(held["size"]), torch.eye(held["size"])
    if held["toward"]:
        if len(chosen) < 2:
            raise PanoplyError(f"{world.name} has no kind of problem '{held['toward']}' to draw vectors for.")
        mu, log_var = vae.encoder(mean_embeddings(table, [told[t.id] for t in chosen])).chunk(2, dim=-1)
        mean = mu.mean(0)
        spread = torch.linalg.cholesky(torch.cov(mu.T) + log_var.exp().mean(0).diag())
    return {"mean": mean, "spread": spread, **made}


def prefixes(palette: dict[str, Tensor], episodes: list[int], length: int, seed: int) -> Tensor:
    """[episodes, length, width]: Dec(z), z drawn by a hash of seed and episode. Its scale is that of the decoder."""
    size = len(palette["mean"])
    draws = [torch.randn(length, size, generator=torch_rng("colour", seed, e)) for e in episodes]
    z = palette["mean"] + torch.stack(draws) @ palette["spread"].T
    if "decoder.0.weight" not in palette:
        return z
    inner = F.gelu(F.linear(z, palette["decoder.0.weight"], palette["decoder.0.bias"]))
    return F.linear(inner, palette["decoder.2.weight"], palette["decoder.2.bias"])


def _settings(held: Any, method: Any, world: Any) -> list[Finding]:
    found: list[Finding] = []
    if held.colours == "noise":
        found += [
            (name, "nothing is fitted to make noise") for name in ("size", "inner", "beta", "fit", "toward")
        ]
    return found


LIMITS_OF_IT = {
    "length": "from 1 to 64", "pairs": "at least 2", "size": "at least 1", "inner": "at least 1", "beta": "at least 0",
    "fit": "at least 1",
}  # fmt: skip


@part(
    "data",
    equation="{batch} demonstrations a step, each after {length} vectors Dec(z), z from N(0, 1)",
    needs={"world:teacher", "world:text"},
    state=dict,
    bounds={**LIMITS_OF_IT, "batch": "at least 1"},
    inert=_settings,
)
def coloured(
    state: dict[str, Tensor],
    collect: Collector,
    *,
    batch: int = 128,
    length: int = 1,
    colours: Colours = "vae",
    pairs: int = 5000,
    size: int = 16,
    inner: int = 128,
    beta: float = 1.0,
    fit: int = 400,
    toward: str = "",
    embeddings: str = "start",
) -> tuple[dict[str, Tensor], Experience]:
    """The teacher's answers to fresh tasks, each after a random prefix that has nothing to do with it.

    length            vectors of a prefix
    colours           what they are: decoded z, or `noise` with the mean and spread of what z would be decoded to
    pairs             questions and answers that the palette is fitted to, at the first step
    size, inner       numbers in z, and of the layer between
    beta              how much the palette pays for telling z apart, where mean embeddings have a spread of 1
    fit               steps by which it is fitted
    toward            a kind of problem (`trapped` in styles) whose z are drawn; empty: all, from N(0, 1)
    embeddings        whose are averaged: a model's, by name; the same in every stage of a recipe
    """
    held = {"pairs": pairs, "size": size, "inner": inner, "beta": beta, "fit": fit, "toward": toward}
    palette = state or _made(collect, {**held, "colours": colours, "embeddings": embeddings})
    first = collect.state["episodes"]
    told = collect.demonstrations(collect.tasks(batch))
    vectors = prefixes(palette, list(range(first, first + told.context.rows)), length, collect.seed)
    return palette, told.prefixed(vectors)


@part("schedule", equation="1 for the first {switch} of a run, then 0", bounds={"switch": "from 0 to 1"})
def two_phase(step: int, total: int, *, switch: float = 0.5) -> float:
    """All, and from some part of the run on nothing."""
    return float(step < switch * total)


def _groups_inert(held: Any, method: Any, world: Any) -> list[Finding]:
    return [*greedy_cuts(held, method, world), *_settings(held, method, world)]


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes at temperature {held.temperature:g}, a share ρ of them after "
        f"{held.length} vectors Dec(z) of their own,  ρ = {held.share}"
    ),
    needs={"world:teacher", "world:text", "engine:vectors"},
    state=dict,
    bounds={**LIMITS, **LIMITS_OF_IT, "share": "from 0 to 1"},
    inert=_groups_inert,
)
def explored(
    state: dict[str, Tensor],
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_tokens: int | None = None,
    share: float | Part = 1.0,
    length: int = 1,
    colours: Colours = "vae",
    pairs: int = 5000,
    size: int = 16,
    inner: int = 128,
    beta: float = 1.0,
    fit: int = 400,
    toward: str = "",
    embeddings: str = "start",
) -> tuple[dict[str, Tensor], Experience]:
    """Groups of which a share of the episodes begin with a random prefix, each with its own.

    Prefixes are recorded with the answers, so that they are scored after the same one, now and before. How many of a
    group have one is ρ times its size, rounded up or down by chance. Advantages are against the whole group.

    share     ρ; as a schedule, how it falls over the run. What is evaluated has no prefix, and is trained by the rest
    length    vectors of a prefix; the rest is as of data.coloured, and must be the same where a stage has taught it
    """
    held = {"pairs": pairs, "size": size, "inner": inner, "beta": beta, "fit": fit, "toward": toward}
    palette = state or _made(collect, {**held, "colours": colours, "embeddings": embeddings})
    assert not isinstance(share, Part)
    first, begun = collect.state["episodes"], collect.state["groups"]
    count = [int(share * group + _chance(collect.seed, begun + g)) for g in range(prompts)]
    wanted = [g * group + i for g, n in enumerate(count) for i in range(n)]
    given: list[Tensor | None] = [None] * (prompts * group)
    if wanted:
        vectors = prefixes(palette, [first + i for i in wanted], length, collect.seed)
        for i, vector in zip(wanted, vectors, strict=True):
            given[i] = vector
    found = collect.episodes(
        collect.tasks(prompts),
        group,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        prefixes=given if wanted else (),
    )
    collect.notes = {**collect.notes, "prefixed": len(wanted) / len(given)}
    return palette, found


def _chance(seed: int, group: int) -> float:
    return stable_hash("prefixed", seed, group) % 2**20 / 2**20


# ------------------------------------------------------------------ stages and the recipe

SFT_TINY = {"data.pairs": 1000, "update.lr": 3e-4, "run.steps": 10, "update.schedule.warmup": 0}
TINY = {**GRPO_TINY, "sample.pairs": 1000}
"""As for GRPO, and fewer questions to fit the palette to."""
WARM_UP: Published = {"arXiv 2512.17206": {"data.length": 1, "data.pairs": 5000, "data.colours": "vae"}}
PUBLISHED: Published = {
    "arXiv 2512.17206": {
        "sample.length": 1,
        "sample.pairs": 5000,
        "sample.colours": "vae",
        "sample.share": "two_phase",
        "sample.share.switch": 0.5,
    },
}
"""Two phases are the paper's for GRPO; with RLOO it is `sample.share=linear`. Sizes of networks and β are not given."""


@method("palette-warm-up@1", base="sft", presets={"tiny": SFT_TINY}, published=WARM_UP)
def palette_warm_up() -> Dataset:
    """The first stage of Reasoning Palette (arXiv 2512.17206): imitation after random prefixes, for about ten steps.

    −log p(o | [Dec(z); q]), z from N(0, 1). Prefixes have nothing to do with the answers, so that a model that learns
    for long learns to pass them over: it is to get used to them, and no more.
    """
    return sft().but(data=coloured())


@method("reasoning-palette-alone@1", paper=186, base="grpo", presets={"tiny": TINY}, published=PUBLISHED)
def reasoning_palette_alone() -> OnPolicy:
    """The last stage of Reasoning Palette (arXiv 2512.17206): GRPO in which answers explore by their prefixes.

    J = ρ·J(q, z) + (1 − ρ)·J(q): a share ρ of a group's answers begin with a vector Dec(z) of their own, and ρ is 1 for
    half of the run and then 0, or falls (`sample.share=linear`). Without the second half the policy that is evaluated,
    which has no prefix, would never have been trained.
    """
    return grpo().but(sample=explored(share=two_phase()))


CLAIM = Learns(
    "Where the way of writing that a policy is used to fails on half of all problems, answers that explore by their "
    "prefixes find more right ones than GRPO does from the same warm-up, after as many episodes.",
    over="GRPO=reasoning-palette:explore.sample.share=0",
    world="styles",
    budget="explore.episodes=7680",
    metric="success",
    tune={"explore.update.lr": (1e-4, 3e-4, 1e-3)},
    also=("area", "prefixed", "entropy", "total_decisions"),
    shows=(Shows("success", least=0.2),),
)


@recipe("reasoning-palette@1", paper=186, world="styles", claim=CLAIM)
def reasoning_palette() -> Recipe:
    """Reasoning Palette (arXiv 2512.17206): a random vector before the prompt decides how an answer is gone about.

    Temperature changes an answer token by token, and seldom its plan. Here a variational autoencoder learns what mean
    embeddings h of questions with answers look like, ‖h − ĥ‖² + β·KL; a decoded z is one more "token" that stands
    before the prompt; ten steps of imitation make the model used to it; and GRPO lets a share of the answers, falling
    to none, begin with a z each. They are scored after the z they were begun with. What is evaluated has no prefix.

    What is surprising: a mean embedding is short, and is fed as short as it is; and imitation takes z from N(0, 1),
    whatever the answer, so that it teaches nothing of what z means. `explore.sample.toward` draws z as problems of one
    kind are encoded, `colours=noise` needs no autoencoder (as for models that see). The palette is a function of the
    start's embeddings, the world's teacher and the seed: each stage makes the same one when it begins, and keeps it.
    Reconstructed: the networks' sizes, β, and how they are fitted. Not built: counting different ways among greedy
    answers, one z each; `collect.episodes(…, prefixes=…)` at temperature 0 gives such answers.
    """
    return Recipe(
        (
            Stage("warm", "palette-warm-up", options={"steps": 10}),
            Stage("explore", "reasoning-palette-alone", {}, {"model": "@warm"}),
        )
    )
