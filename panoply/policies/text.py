"""A language model as a policy: it scores the decisions of an experience, loads, saves and copies itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table, moved
from panoply.policies import divergence, taps
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.folder import generation_config, load_model, save_model
from panoply.policies.foreign import Foreign
from panoply.policies.layout import Rows, lay_out
from panoply.policies.low_rank import copied, plain
from panoply.policies.moving import laid_like
from panoply.policies.penalties import NEUTRAL, Said
from panoply.policies.rotary import wider
from panoply.policies.scoring import Head, scored
from panoply.policies.steering import Steered, TokenValues, of_values_alone, read_values
from panoply.policies.thoughts import Thoughts, read_thoughts
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.words import tokenizer_of

if TYPE_CHECKING:
    from panoply.policies.lora import Adapted
    from panoply.worlds.world import Task


class TextPolicy:
    """A model and its tokenizer. `shared=False` scores each sequence in its own row: slower, and equal."""

    medium = "text"
    masked = False
    """Whether it fills in masks instead of going on from the left (policies/masked.py)."""

    def __init__(
        self,
        model: Decoder | Foreign | Steered,
        tokenizer: Tokenizer,
        *,
        shared: bool = True,
        files_beside: dict[str, bytes] | None = None,
    ):
        if tokenizer.vocab_size > model.config.vocab_size:
            raise PanoplyError(
                f"The tokenizer has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size}."
            )
        self.model, self.tokenizer, self.shared = model, tokenizer, shared
        self.files_beside = dict(files_beside or {})
        self.outputs: dict[str, Tensor] = {}
        """Output weights of snapshots that whole distributions are compared with."""
        self.adapted: Adapted | None = None
        """Its low-rank adapters, where it has some."""

    @classmethod
    def load(
        cls,
        folder: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        context: int = 0,
    ) -> TextPolicy:
        """The model in a folder, for sequences of up to `context` tokens; 0: as many as it was made for."""
        _check_dtype(dtype, torch.device(device))
        model = load_model(folder, dtype, device, context)
        policy = _kind(model, cls)(model, tokenizer_of(folder), files_beside=generation_config(folder))
        if (thoughts := read_thoughts(Path(folder), model.config.width)) is not None:
            policy.think(thoughts)
        if (values := read_values(Path(folder), model)) is not None:
            policy.steer(values)
        return policy

    @classmethod
    def fresh(
        cls,
        config: DecoderConfig,
        tokenizer: Tokenizer,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> TextPolicy:
        """Random weights that depend on config and seed only: no global generator is read or moved."""
        with torch.device("meta"):
            model = Decoder(config)
        # what torch's `to_empty` does, without the sympy that it imports
        model._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype))  # type: ignore[no-untyped-call]
        model.tie()
        model.initialise(seed)
        return _kind(model, cls)(model.to(device=device, dtype=dtype).eval(), tokenizer)

    def save(self, folder: str | Path) -> None:
        """A Hugging Face folder, replaced as a whole: a crash leaves the old one."""
        files_beside = {**self.files_beside, **self.tokenizer.files}
        save_model(self.model, folder, files_beside=files_beside, roles=self.tokenizer.roles)

    @property
    def thoughts(self) -> Thoughts | None:
        """What the model feeds back to itself while it decodes."""
        return getattr(self.model, "thoughts", None)

    def think(self, thoughts: Thoughts) -> None:
        """Have thoughts from now on: sampled with, scored with, learned, copied and saved."""
        if not isinstance(self.model, Decoder):
            raise PanoplyError(
                "Inputs that are vectors need a model that runs natively, without adapters of PEFT: transformers "
                "reads tokens alone here."
            )
        self.model.thoughts = thoughts.to(self.device)
        thoughts.know(self.tokenizer, self.model.config.vocab_size)

    @property
    def values(self) -> TokenValues | None:
        """Values of tokens, by which it acts."""
        return self.model.values if isinstance(self.model, Steered) else None

    def steer(self, values: TokenValues) -> None:
        """Act by the model's logits and β times values of tokens from now on; the model itself learns no more."""
        if isinstance(self.model, Steered):
            raise PanoplyError(
                "The model is steered by values of tokens already: start from the model that was steered."
            )
        if not isinstance(self.model, Decoder) or self.masked or self.thoughts is not None:
            raise PanoplyError(
                "Values of tokens need a model that runs natively, goes on from the left, and reads tokens alone."
            )
        self.model = Steered(self.model, values)

    @property
    def context_length(self) -> int:
        return self.model.config.max_positions

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def packs(self) -> bool:
        """Whether sequences are scored end to end in one row, without padding."""
        return bool(getattr(self.model, "packs", False))

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in self.model.parameters() if p.requires_grad)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    @torch.no_grad()
    def load_weights(self, folder: str | Path) -> None:
        """Overwrite the weights in place with those of a folder of the same layout."""
        saved = dict(TextPolicy.load(folder, self.model.dtype, self.device).named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.copy_(laid_like(saved[name], parameter))

    def copy(self) -> TextPolicy:
        """A frozen snapshot that later training does not touch."""
        model = copied(self.model).requires_grad_(False).eval()
        return type(self)(model, self.tokenizer, shared=self.shared, files_beside=self.files_beside)

    def apart(self) -> TextPolicy:
        """A model that begins as this one and may become something else, a critic say: all weights are its own.

        A copy is no beginning for that: with adapters it shares what is frozen, which would learn with it.
        """
        if isinstance(self.model, Steered):
            raise PanoplyError(
                "A model that is steered by values of tokens begins as no other: take one that is not."
            )
        return type(self)(plain(self.model), self.tokenizer, files_beside=self.files_beside)

    @torch.no_grad()
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any bit of any weight."""
        return fingerprint(self.model.state_dict().items())

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """What the model says of each decision: `logp`, and the outputs that `needs` names (see taps.py).

        Under the distribution that was sampled from: the columns `temperature`, the penalties,
        `allowed` and `cut` apply (see scoring.Head).
        `divergence:Q@SNAPSHOT` compares the whole distribution with that of a snapshot (see `remember`).
        """
        outputs = [taps.parse(n) for n in sorted(needs) if n != "logp" and not n.startswith(divergence.NEED)]
        if isinstance(self.model, Steered) and of_values_alone(outputs, needs):
            return self._of_values(self.model, experience, outputs)
        depths = sorted({output.block for output in outputs if output.block is not None})
        found: dict[str, list[Tensor]] = {}
        order = []
        for rows, part, last, tapped in self._passes(experience, depths):
            blocks = {depth: _pick(state, part.state) for depth, state in tapped.items()}
            scores = self._read(experience, rows.decision, _pick(last, part.state), blocks, outputs, needs)
            for name, column in scores.items():
                found.setdefault(name, []).append(column)
            order.append(part.decision)
        whole = {o.need: o.of_all(self, experience) for o in outputs if o.whole}
        if not order:
            nobody = torch.zeros(0, dtype=torch.long)
            none = torch.zeros(0, self.model.config.width, device=self.device, dtype=self.model.dtype)
            return {
                **self._read(experience, nobody, none, dict.fromkeys(depths, none), outputs, needs),
                **whole,
            }
        back = torch.cat(order).argsort()
        return {name: torch.cat(columns)[back] for name, columns in found.items()} | whole

    def _of_values(
        self, model: Steered, experience: Experience, outputs: Sequence[taps.Output]
    ) -> dict[str, Tensor]:
        """What values of tokens say of each decision: the model that they steer need not be read."""
        last = TextPolicy(model.values.trunk, self.tokenizer, shared=self.shared).states(experience)
        seen = taps.Pass(model, last, {}, moved(experience["action"], last.device), Head())
        return {output.need: output.read(seen) for output in outputs}

    def states(self, experience: Experience) -> Tensor:
        """The last hidden state [decisions, width] that each decision was predicted from."""
        passes = list(self._passes(experience))
        order = torch.cat([part.decision for _, part, _, _ in passes])
        return torch.cat([_pick(last, part.state) for _, part, last, _ in passes])[order.argsort()]

    def prompt_states(self, tasks: Sequence[Task], block: int | None = None) -> Tensor:
        """[tasks, width]: what the model knows when it has read a prompt and said nothing, its last token's state.

        After all blocks and the final norm, or after so many blocks. Equal prompts are read once.
        """
        prompts = list(dict.fromkeys(tuple(task.prompt) for task in tasks))
        number = {prompt: i for i, prompt in enumerate(prompts)}
        lengths, row = torch.tensor([len(p) for p in prompts]), torch.arange(len(prompts))
        asked = Experience(
            Table({"context": row, "position": lengths, "action": torch.zeros_like(row)}),
            Table({"tokens": Ragged.from_lists(prompts), "prompt": row, "shared": lengths}),
        )
        if block is None:
            found = self.states(asked)
        else:
            found = self.score(asked, frozenset({f"hidden:{block}"}))[f"hidden:{block}"]
        return found[torch.tensor([number[tuple(task.prompt)] for task in tasks], device=found.device)]

    def _passes(
        self, experience: Experience, depths: Sequence[int] = ()
    ) -> Iterator[tuple[Rows, Rows, Tensor, dict[int, Tensor]]]:
        """Forward passes over all contexts: rows, the same beside the model, last states, and those at `depths`."""
        self._check_length(experience)
        # Attention costs as much as the rest of a block on rows of about six times the width.
        dense, packed = 6 * self.model.config.width, self.packs
        for rows in lay_out(experience, shared=self.shared, dense=dense, packed=packed):
            part = rows.to(self.device)
            laid: dict[str, Any] = {"packing": part.packing} if packed else {"segments": part.segments}
            if part.inputs is not None:
                laid["inputs"] = part.inputs
            last, tapped = self.model.hidden_states(part.tokens, part.positions, **laid, taps=depths)
            yield rows, part, last, tapped

    def remember(self, name: str, snapshot: TextPolicy, experience: Experience) -> Tensor:
        """The column `distribution@NAME`: the states a snapshot predicts decisions from. Its output weights stay."""
        self.outputs[name] = snapshot.model.head_weight.detach().clone()
        return snapshot.states(experience)

    def _read(
        self,
        experience: Experience,
        decision: Tensor,
        last: Tensor,
        blocks: Mapping[int, Tensor],
        outputs: Sequence[taps.Output],
        needs: frozenset[str],
    ) -> dict[str, Tensor]:
        """All that is asked of some decisions, from the states they were predicted from."""
        at, device = decision.to(experience["action"].device), last.device
        action = moved(experience["action"][at], device)
        head = self._head(experience, at, action)

        def column(name: str) -> Tensor:
            return moved(experience[name][at], device)

        if isinstance(self.model, Steered):
            found = self.model.scored(last, action, head, "entropy" in needs)
        else:
            found = scored(last, self.model.head_weight, action, head, "entropy" in needs)
        if (thoughts := self.thoughts) is not None and "vectors" in experience.context:
            found |= thoughts.scored(found, *_vectors_of(experience, at), last)
        for output in (o for o in outputs if o.need != "entropy" and not o.whole):
            found[output.need] = output.read(taps.Pass(self.model, last, blocks, action, head, column))
        for need, q, to in divergence.parse(needs):
            other = moved(experience[f"distribution@{to}"][at], device)
            found[need] = divergence.of_tokens(last, self.model.head_weight, other, self.outputs[to], head, q)
        return found

    def _head(self, experience: Experience, at: Tensor, action: Tensor) -> Head:
        """How the decisions `at` were drawn from their logits."""
        device = action.device
        temperature, cut = (
            moved(experience[name][at], device) if name in experience else None
            for name in ("temperature", "cut")
        )
        allowed, longest = None, 0
        if "allowed" in experience:
            listed = experience.decisions.ragged("allowed").take(at)
            longest = int(listed.lengths.max()) if len(listed) else 0  # here, where nobody has to wait for it
            allowed = listed.to(device) if longest else None
        penalised = any(name in experience for name in NEUTRAL)
        said = Said.before(experience, at, device) if penalised else None
        return Head(temperature, allowed, self.model.softcap, cut, action, said, longest=longest)

    def _check_length(self, experience: Experience) -> None:
        longest = int(experience["position"].max()) if len(experience) else 0
        if longest > self.context_length:
            raise PanoplyError(
                f"A sequence of {longest} tokens is longer than the model's context of {self.context_length}."
                f"{wider(self.model.config)}"
            )


def _kind(model: Decoder | Foreign, usual: type[TextPolicy]) -> type[TextPolicy]:
    """The policy that a model is: its config says whether it reads from the left or all at once."""
    if getattr(model.config, "causal", True):
        return usual
    from panoply.policies.masked import MaskedPolicy

    return MaskedPolicy


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Sixteen hex digits that change with any bit of any weight."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights, key=lambda named: named[0]):
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise PanoplyError(f"Weights can be float32, bfloat16 or float16, not {dtype}.")
    if dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise PanoplyError("This GPU has no bfloat16: use run.dtype=float16 or float32.")


def _vectors_of(experience: Experience, at: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the decisions `at` were taken with a vector, and those vectors."""
    table = experience.context
    places, vectors = table.ragged("vectors_at"), table.ragged("vectors").values
    longest = table.ragged("tokens").lengths.max() + 1
    row = torch.arange(len(places), device=places.values.device).repeat_interleave(places.lengths)
    known = row * longest + places.values  # in order: rows one after another, and in each from left to right
    asked = experience["context"][at] * longest + experience["position"][at]
    found = torch.searchsorted(known, asked).clamp(max=len(known) - 1)
    there = known[found] == asked if len(known) else torch.zeros_like(asked, dtype=torch.bool)
    return there.nonzero().flatten(), vectors[found[there]]


def _pick(states: Tensor, index: Tensor) -> Tensor:
    return states.reshape(-1, states.shape[-1]).index_select(0, index)
