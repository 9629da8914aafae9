"""vLLM as an engine (arXiv 2309.06180): it samples, and what it samples from are the weights that a learner gave it.

Tokens go in and come out, nothing is turned into text. What is recorded of a token is the log-probability that it was
drawn with, temperature included. Three things make that true:

* prompts are salted with the version of the weights (`cache_salt`). vLLM keeps keys and values of prompts when it gets
  new weights, and goes on from them as if nothing had happened: measured, a mean |Δ log-prob| of 1.5;
* weights are counted on both sides whenever they were given, bit by bit, unless vLLM has packed them. Those it was
  given first a run measures anyway: the log-probabilities of its first mini-batch must be the learner's;
* what vLLM would do without saying so (cut a distribution, mask a token, penalise it) is refused.

It runs in this process, a step at a time, so that between two tokens nothing happens behind our back: a turn that is
complete ends there. This is the only file that imports vllm, and what its versions differ in stays here. Adapters are
merged where they were learned, and what vLLM gets is a plain model: the same rounding as the learner's.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from panoply.errors import PanoplyError, needs_extra
from panoply.policies.folder import DTYPE_NAMES, whole_weights, write_config
from panoply.policies.moving import AT_ONCE, WORDS, Weights
from panoply.rollout.engine import published
from panoply.rollout.masks import BatchMask
from panoply.rollout.requests import Complete, OnStop, Request, Turn
from panoply.rollout.rollouts import CONTEXT, LENGTH, STOP, Recorder, Rollouts, ends
from panoply.rollout.sampling import Draw, Sampling
from panoply.rollout.stops import StopStrings
from panoply.seeds import stable_hash

if TYPE_CHECKING:
    from panoply.policies.text import TextPolicy

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""In this process, silent, and without touching its threads; what a user has set stands, but for the first."""
BESIDE, ALONE = 0.35, 0.9
"""How much of a GPU it takes: where the learner has the same one, and where it has one to itself."""
COLDEST = 0.01
"""The least temperature but 0 that vLLM draws at: it takes this one where less is asked for."""
_ODD = 0x5851F42D4C957F2D


class VllmEngine:
    """Samples with vLLM on one GPU, or on a CPU with its CPU build. `slots` rows run at once; others wait.

    model     the policy's: who the weights come from, and what says how long a context may be
    memory    the share of a GPU that vLLM takes; left out, `BESIDE` where the model is on a GPU, else `ALONE`
    """

    lacks: ClassVar[frozenset[str]] = frozenset(
        {"mask", "entropy", "allowed", "penalties", "heat", "vectors", "selves", "seeds"}
    )

    def __init__(self, model: Any, tokenizer: Any = None, *, slots: int = 256, memory: float | None = None):
        self.model, self.tokenizer = model, tokenizer
        self.version = -1
        self.comparable: bool | None = None
        """Whether the weights that vLLM holds can be counted; None before it was given any."""
        self.between: Callable[[], int] | None = None
        """Asked before every token: it may publish newer weights, and says of which version those are that draw from
        then on. Rows go on from the keys and values that they have, as with vLLM's own `pause_generation("keep")`."""
        self._strings: dict[tuple[str, ...], StopStrings] = {}
        share = memory or (BESIDE if model.device.type == "cuda" else ALONE)
        self.llm = _started(model, slots, share)

    @classmethod
    def of(cls, policy: TextPolicy, **options: Any) -> VllmEngine:
        return cls(policy.model, policy.tokenizer, **options)

    # -------------------------------------------------------------- weights

    def publish(self, weights: Weights, version: int) -> str:
        """Into the policy's model, which merges adapters, and from there, whole, into vLLM's own layout."""
        found = published(self.model, weights)
        given = dict(whole_weights(self.model))
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(given.items())})
        held: int | None = self.llm.apply_model(_settled)[0]
        if self.comparable is None:
            self.comparable = held == counted(given.values())
        elif self.comparable and held != counted(given.values()):
            raise PanoplyError(
                f"vLLM holds other weights than it was given at step {version}: it would sample from them."
            )
        self.version = version
        return found

    # -------------------------------------------------------------- sampling

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_stop: OnStop | None = None,
        *,
        mask: BatchMask | None = None,
        complete: Complete | None = None,
        entropy: bool = False,
    ) -> Rollouts:
        """As the native engine does, turn after turn; rows go back into vLLM with what they were answered."""
        self._refuse(requests, sampling, mask, entropy)
        strings = self._stop_strings(sampling.stop_strings)
        return _Generation(self, requests, sampling, on_stop, complete, strings).run()

    def _refuse(self, requests: Sequence[Request], sampling: Sampling, mask: Any, entropy: bool) -> None:
        """What a plan has not refused already: it is asked for by a call, or by a task."""
        if self.version < 0:
            raise PanoplyError("vLLM has not been given weights yet: publish them first.")
        asked = {
            "which tokens a mask allows": mask is not None or any(r.mask is not None for r in requests),
            "which tokens a cut leaves (top_p, top_k, min_p)": sampling.truncates,
            "before which token none may end a turn (min_tokens)": sampling.min_tokens > 0,
            "penalties": sampling.counts or sampling.repetition_penalty != 1,
            "temperatures that change within a turn": sampling.heat is not None
            or callable(sampling.temperature),
            "entropies": entropy,
        }
        if told := [what for what, is_so in asked.items() if is_so]:
            raise PanoplyError(
                f"vLLM does not record {told[0]}, so that ratios would be biased: use the native engine."
            )
        if 0 < sampling.temperature < COLDEST:  # type: ignore[operator]
            raise PanoplyError(
                f"vLLM draws at a temperature of {COLDEST} where less is asked for, and {sampling.temperature} would "
                "be recorded, so that ratios would be biased: ask for 0, or use the native engine."
            )
        if any(request.prefix is not None for request in requests):
            raise PanoplyError(
                "vLLM reads tokens alone, and a request begins with vectors: use the native engine."
            )
        context = self.model.config.max_positions
        for index, request in enumerate(requests):
            if not 0 < len(request.prompt) < context:
                raise PanoplyError(
                    f"The prompt of request {index} has {len(request.prompt)} tokens: it must have one at least, and "
                    f"fewer than the context of {context}."
                )

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings | None:
        if not strings:
            return None
        if self.tokenizer is None:
            raise PanoplyError("stop_strings need an engine with a tokenizer.")
        size = self.model.config.vocab_size
        return self._strings.setdefault(
            strings, StopStrings(strings, self.tokenizer, size, torch.device("cpu"))
        )


@dataclass
class _Row:
    """An episode on its way: all its tokens, and where its turn began."""

    row: int
    request: int
    seed: int
    tokens: list[int]
    start: int
    turn: int = 0
    limit: int = 0
    """Tokens of this turn at most."""
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that drew each token, of all turns."""


class _Generation:
    """One call: rows go in, and come back turn by turn."""

    def __init__(
        self,
        engine: VllmEngine,
        requests: Sequence[Request],
        sampling: Sampling,
        on_stop: OnStop | None,
        complete: Complete | None,
        strings: StopStrings | None,
    ):
        self.engine, self.requests, self.sampling = engine, requests, sampling
        self.on_stop, self.complete, self.strings = on_stop, complete, strings
        self.core, self.context = engine.llm.llm_engine, engine.model.config.max_positions
        self.recorder, self.running = Recorder(), dict[str, _Row]()
        self.between, self.version = engine.between, engine.version
        self.looks = complete is not None or strings is not None or self.between is not None
        self.temperature = float(sampling.temperature)  # type: ignore[arg-type]

    def run(self) -> Rollouts:
        prompts: dict[tuple[int, ...], int] = {}
        numbers = [prompts.setdefault(tuple(r.prompt), len(prompts)) for r in self.requests]
        of = [i for i, r in enumerate(self.requests) for _ in r.seeds]
        seeds = [seed for r in self.requests for seed in r.seeds]
        starts = [list(self.requests[i].prompt) for i in of]
        whole = enumerate(zip(of, seeds, starts, strict=True))
        rows = [_Row(row, i, seed, prompt, len(prompt)) for row, (i, seed, prompt) in whole]
        try:
            for row in rows:
                self._begin(row)
            while self.running:
                if self.between is not None:
                    self.version = self.between()
                if ended := [end for out in self.core.step() for end in self._hear(out)]:
                    self._end(ended)
        except BaseException:
            self._drop(list(self.running))
            raise
        found = self.recorder.result(
            {},
            torch.tensor([numbers[i] for i in of], dtype=torch.long),
            torch.tensor([len(self.requests[i].prompt) for i in of], dtype=torch.long),
            torch.tensor(of, dtype=torch.long),
            tuple(self.requests[i].key for i in of),
            {},
        )
        if self.between is None:
            return found
        versions = torch.tensor([version for row in rows for version in row.versions], dtype=torch.long)
        return replace(found, decisions=found.decisions.plus({"version": versions}))

    def _begin(self, row: _Row) -> None:
        """A turn of a row, as a request of its own. Its prompt is found in the cache, if these weights have read it."""
        row.limit, row.logp = min(self._longest(row), self.context - len(row.tokens)), []
        name = f"{self.engine.version}.{row.row}.{row.turn}"
        prompt = {"prompt_token_ids": list(row.tokens), "cache_salt": f"v{self.engine.version}"}
        try:
            self.core.add_request(name, prompt, self._settings(row))
        except Exception as problem:  # temperatures above 2, for one
            raise PanoplyError(f"vLLM cannot sample so: {_last_line(problem)}") from problem
        self.running[name] = row

    def _settings(self, row: _Row) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=self.temperature,
            max_tokens=row.limit,
            stop_token_ids=list(self.sampling.stop_tokens),
            ignore_eos=True,
            seed=stable_hash("vllm", row.seed, row.turn) % 2**62,  # a turn's own: each begins its stream anew
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self.looks else RequestOutputKind.FINAL_ONLY,
        )

    def _hear(self, out: Any) -> Iterator[tuple[_Row, int]]:
        """What vLLM says of a row: more tokens, and whether its turn has ended, and why."""
        name, said = out.request_id, out.outputs[0]
        if name not in self.running:  # dropped while vLLM was speaking of it
            return
        row = self.running[name]
        for token, told in zip(said.token_ids, said.logprobs or (), strict=True):
            row.tokens.append(int(token))
            row.logp.append(float(told[token].logprob))
            row.versions.append(self.version)
            if self.looks and self._is_complete(row.tokens[self._turn_start(row) :]):
                self._drop([name])
                yield row, STOP
                return
        if out.finished:
            del self.running[name]
            full = LENGTH if row.limit == self._longest(row) else CONTEXT
            yield row, STOP if row.tokens[-1] in self.sampling.stop_tokens else full

    def _longest(self, row: _Row) -> int:
        """Tokens that a turn of a row may have, where the context has room for them."""
        return min(self.requests[row.request].most or self.sampling.max_tokens, self.sampling.max_tokens)

    def _turn_start(self, row: _Row) -> int:
        """Where its turn began, which may be in the prompt."""
        return row.start - (self.requests[row.request].begun if row.turn == 0 else 0)

    def _is_complete(self, said: list[int]) -> bool:
        if self.strings is not None and self.strings.completed(said):
            return True
        return self.complete is not None and self.complete(said)

    def _drop(self, names: list[str]) -> None:
        for name in names:
            del self.running[name]
        self.core.abort_request(names)

    def _end(self, ended: list[tuple[_Row, int]]) -> None:
        """Record turns, and ask what follows them."""
        for row, reason in ended:
            self._record(row, reason)
        asked = [self._as_turn(row, why) for row, why in ended if why != CONTEXT]
        replies = iter(self.on_stop(asked) if self.on_stop and asked else [None] * len(asked))
        for row, reason in ended:
            reply = None if reason == CONTEXT else next(replies)
            if reply is None or len(row.tokens) + len(reply) >= self.context:
                more = torch.tensor([reply is not None])
                how = ends(torch.tensor([reason]), more)
                tokens = torch.tensor([row.tokens])
                self.recorder.finish(torch.tensor([row.row]), how, tokens, torch.tensor([tokens.shape[1]]))
                continue
            row.tokens += [int(token) for token in reply]
            row.start, row.turn = len(row.tokens), row.turn + 1
            self._begin(row)

    def _record(self, row: _Row, reason: int) -> None:
        n = len(row.logp)
        here = torch.full((n,), row.row), torch.arange(row.start, row.start + n), torch.full((n,), row.turn)
        tempered = None if self.temperature == 1 else torch.full((n,), self.temperature or 1.0)
        drawn = Draw(torch.tensor(row.tokens[row.start :]), torch.tensor(row.logp), tempered)
        self.recorder.step(*here, torch.ones(n, dtype=torch.bool), drawn)
        self.recorder.turn(*(torch.tensor([value]) for value in (row.row, row.turn, reason)))

    def _as_turn(self, row: _Row, reason: int) -> Turn:
        key = self.requests[row.request].key
        return Turn(row.row, row.request, key, row.turn, list(row.tokens), row.start, reason)


# ------------------------------------------------------------------ vLLM itself


def _started(model: Any, slots: int, share: float) -> Any:
    """vLLM with a model of this layout, whose weights are yet to come. What it is told of it is `config.json` alone."""
    os.environ.update({name: os.environ.get(name, word) for name, word in ENVIRONMENT.items()})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm import LLM
    except ImportError:
        raise needs_extra("vllm", "vllm", "run.engine=vllm") from None
    _numba_beside_it()
    with tempfile.TemporaryDirectory(prefix="panoply-vllm-") as folder:
        write_config(model, Path(folder))
        try:
            return LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=DTYPE_NAMES[model.dtype],
                max_model_len=model.config.max_positions,
                max_num_seqs=slots,
                gpu_memory_utilization=share,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                async_scheduling=False,  # else a token is on its way when weights change
                enforce_eager=not torch.cuda.is_available(),
                disable_log_stats=True,
            )
        except Exception as problem:
            kind = json.loads((Path(folder) / "config.json").read_text()).get("model_type")
            raise PanoplyError(f"vLLM cannot serve this model ({kind}): {_last_line(problem)}") from problem


def _numba_beside_it() -> None:
    """Where Numba was loaded first, vLLM 0.32 on a CPU stumbles over its library, which takes any name for a function.

    It reads `__dict__` of whatever it finds in modules, and gets none of this one.
    """
    if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
        with contextlib.suppress(AttributeError):
            ffi.lib._fntab.setdefault("__dict__", {})


def _settled(model: Any) -> int | None:
    """In vLLM's worker, after its model took new weights: the count of them, or nothing where they were packed.

    On a CPU weights of products are packed, and a head that is tied to the embeddings keeps the old ones: vLLM 0.32
    packs only what it has loaded by name. Then answers are wrong by a mean |Δ log-prob| of 1.1, and nothing says so.
    """
    packed = False
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            packed = True
            if layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
    return None if packed else counted(model.parameters())


@torch.no_grad()
def counted(weights: Iterable[Tensor]) -> int:
    """A number that is the same for the same weights in whatever order, joined or apart, padded with zeros or not.

    The words of all tensors, x, as Σ x·(ax + b) modulo 2⁶⁴: vLLM lays layers that share an input one below the other.
    """
    total = 0
    for weight in weights:
        flat = weight.detach().reshape(-1).view(WORDS[weight.element_size()])
        for at in range(0, len(flat), AT_ONCE):
            words = flat[at : at + AT_ONCE].long()
            total += int((words * (words * _ODD + 1)).sum())
    return total % 2**64


def _last_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{lines[-1][:300].rstrip('.')}." if lines else f"{type(problem).__name__}."
