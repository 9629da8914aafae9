"""What an engine is, which there are, and what is refused because one lacks it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from panoply.errors import PanoplyError, unknown
from panoply.selves import actors
from panoply.worlds.world import TextWorld

if TYPE_CHECKING:
    from panoply.policies.moving import Weights
    from panoply.policies.text import TextPolicy
    from panoply.regimes import Method
    from panoply.rollout.masks import BatchMask
    from panoply.rollout.requests import Complete, OnStop, Request
    from panoply.rollout.rollouts import Rollouts
    from panoply.rollout.sampling import Sampling

ENGINES = {
    "native": "panoply.rollout.engine:TextEngine",
    "vllm": "panoply.rollout.vllm:VllmEngine",
}
"""By the names that `--engine` takes. Looking at one imports its file, which imports nothing that need not be there."""

LACKING = {
    "turns": "it samples one turn, and {world} answers",
    "mask": "it samples any token, and {world} says which may be drawn",
    "complete": "it ends a turn at stop tokens, and {world} says itself when one is complete",
    "entropy": "it does not say how sure the policy was of a token, and {part} reads that",
    "allowed": "it does not record which tokens a cut has left, so the ratio would be biased: leave out {part}",
    "penalties": "it does not record penalties, so the ratio would be biased: leave out {part}",
    "heat": "{part} changes the temperature from token to token",
    "vectors": "it reads tokens alone, and {part} has the policy read vectors",
    "selves": "it holds the weights of one policy, and {part} lets others act beside the learner",
}
"""What an engine may lack, as the end of the sentence with which a plan is refused. `seeds`, by which a run repeats bit
for bit, may be lacking as well, and nothing is refused for it."""


class Engine(Protocol):
    """What samples text: requests in, decisions out, each with the log-probability it was really drawn with."""

    lacks: ClassVar[frozenset[str]]
    """Of `LACKING` and `seeds`, what it cannot do; a plan that asks for it is refused."""
    model: Any
    """That of the policy it was made for."""
    version: int | None
    """Of the weights it was given last, −1 before any; None where it reads those of `model` in place."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_stop: OnStop | None = None,
        *,
        mask: BatchMask | None = None,
        complete: Complete | None = None,
        entropy: bool = False,
    ) -> Rollouts: ...

    def publish(self, weights: Weights, version: int) -> str:
        """Sample with these weights from now on (see policies/moving.py), and say what came of them: their checksum."""


def kind(name: str) -> Any:
    """An engine's class by its name."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    module, _, held = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), held)


def engine_of(policy: TextPolicy, name: str = "native", **options: Any) -> Engine:
    """What samples from a policy of text: token after token, or for a masked-diffusion model by filling in."""
    if policy.masked:
        from panoply.rollout.denoising import Denoiser

        if name != "native":
            raise PanoplyError(f"A masked-diffusion model is sampled from natively, not by '{name}'.")
        denoiser: Engine = Denoiser(policy)  # type: ignore[arg-type]
        return denoiser
    made: Engine = kind(name).of(policy, **options)
    return made


def check(name: str, method: Method, world: TextWorld) -> None:
    """Refuse what a method asks of its engine, or a world does, and the engine lacks."""
    lacks: frozenset[str] = kind(name).lacks
    for word, part in asked(method, world):
        if word in lacks:
            why = LACKING[word].format(part=part, world=world.name)
            raise PanoplyError(f"run.engine cannot be {name}: {why}.")


def asked(method: Method, world: TextWorld) -> Iterator[tuple[str, str]]:
    """What of `LACKING` is asked for, and by which part or setting."""
    own = type(world)
    if own.play is not TextWorld.play and not world.markov:
        yield "turns", ""
    if own.complete is not TextWorld.complete:
        yield "complete", ""
    if world.play(world.task("train", 0)).restricts:
        yield "mask", ""
    for path, held in method.parts():
        settings, needs = held.settings(), held.needs()
        if held.info.slot == "sample":
            neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
            yield from (("allowed", f"{path}.{n}") for n, v in neutral.items() if settings.get(n, v) != v)
            neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
            yield from (("penalties", f"{path}.{n}") for n, v in neutral.items() if settings.get(n, v) != v)
        yield from ((word, path) for word in ("entropy", "heat", "vectors") if f"engine:{word}" in needs)
        if actors(needs) or "members" in needs:
            yield "selves", path
