"""Outputs of a forward pass against whole softmaxes in float64, their gradients, and the grammar of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_text import CONFIG, TOKENIZER, experience
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.policies import taps
from panoply.policies.attention import Focus
from panoply.policies.control import ControlPolicy
from panoply.policies.decoder import Decoder
from panoply.policies.taps import Pass, tap
from panoply.policies.text import TextPolicy
from panoply.worlds.control.world import Box, Discrete
from panoply.worlds.world import Task

RAGGED = [(6, [3, 1, 4]), (2, [3]), (1, [2])]


def policy() -> TextPolicy:
    """Norms that do something, or a forgotten one would not be seen."""
    made = TextPolicy.fresh(CONFIG, TOKENIZER, dtype=torch.float64)
    with torch.no_grad():
        inner: Any = made.model
        inner.model.norm.weight.mul_(torch.linspace(0.5, 1.5, CONFIG.width))
    return made


def altered() -> Experience:
    """Temperatures, and every third decision with a cut."""
    data = experience(RAGGED)
    allowed = [[int(a), (int(a) + 1) % 14] if i % 3 == 0 else [] for i, a in enumerate(data["action"])]
    columns: dict[str, Any] = {
        "temperature": torch.linspace(0.5, 2, len(data), dtype=torch.float64),
        "allowed": Ragged.from_lists(allowed),
    }
    return data.with_columns(**columns)


def by_hand(
    of: TextPolicy, data: Experience, block: int | None = None, normed: bool = True, heat: float = 1.0
) -> Tensor:
    """[decisions, vocabulary] log-probabilities, one sequence at a time from whole logits."""
    rows, inner = [], of.model
    assert isinstance(inner, Decoder)
    for i, (c, p) in enumerate(zip(data["context"].tolist(), data["position"].tolist(), strict=True)):
        tokens = data.context.ragged("tokens")[c][None, :p]
        positions = torch.arange(p)[None]
        x = inner.model.embed_tokens(tokens)
        sight = _causal(p)
        for layer in list(inner.model.layers)[:block]:
            x = layer(x, inner.rotations(positions, x.dtype), sight, None)
        x = inner.model.norm(x) if normed else x
        logits = (x[0, -1] @ of.model.head_weight.t()) / heat
        if "temperature" in data:
            logits = logits / data["temperature"][i]
        if "allowed" in data and len(ids := data.decisions.ragged("allowed")[i]):
            logits = logits.index_fill(
                0, torch.tensor(sorted(set(range(14)) - set(ids.tolist()))), -torch.inf
            )
        rows.append(logits.log_softmax(0))
    return torch.stack(rows)


def _causal(length: int) -> Any:
    from panoply.policies.attention import Visibility

    return Visibility(torch.arange(length)[None], None, False, torch.float64)


def of_action(logp: Tensor, data: Experience) -> Tensor:
    return logp.gather(1, data["action"][:, None])[:, 0]


def entropies(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)


def means(logp: Tensor) -> Tensor:
    return torch.stack([row[row > -torch.inf].mean() for row in logp])


Reference = Callable[[TextPolicy, Experience], Tensor]
REFERENCES: dict[str, Reference] = {
    "logp:1": lambda p, d: of_action(by_hand(p, d, 1, normed=False), d),
    "logp:1:normed": lambda p, d: of_action(by_hand(p, d, 1), d),
    "logp:2": lambda p, d: of_action(by_hand(p, d), d),
    "logp:0:normed": lambda p, d: of_action(by_hand(p, d, 0), d),
    "logp*1.2": lambda p, d: of_action(by_hand(p, d, heat=1.2), d),
    "logp:1*0.5": lambda p, d: of_action(by_hand(p, d, 1, normed=False, heat=0.5), d),
    "entropy*1.2": lambda p, d: entropies(by_hand(p, d, heat=1.2)),
    "entropy:1": lambda p, d: entropies(by_hand(p, d, 1, normed=False)),
    "mean_logp": lambda p, d: means(by_hand(p, d)),
}


@pytest.mark.parametrize("need", REFERENCES)
@pytest.mark.parametrize("data", [experience(RAGGED), altered()], ids=["plain", "altered"])
def test_outputs_are_those_of_whole_softmaxes(need: str, data: Experience) -> None:
    model = policy()
    found, expected = model.score(data, frozenset({need}))[need], REFERENCES[need](model, data)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("need", ["logp:1", "logp:1:normed", "mean_logp", "logp*1.2"])
def test_outputs_have_their_gradient(need: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "chunk_of", lambda *_: 3)
    model, data = policy(), altered().take(torch.arange(8))
    weights = list(model.parameters())
    mix = torch.linspace(-1, 2, len(data), dtype=torch.float64)
    found, expected = (
        torch.autograd.grad((value * mix).sum(), weights, allow_unused=True)
        for value in (model.score(data, frozenset({need}))[need], REFERENCES[need](model, data))
    )
    for mine, slow in zip(found, expected, strict=True):
        assert (mine is None) == (slow is None)
        if mine is not None and slow is not None:
            torch.testing.assert_close(mine, slow, atol=1e-9, rtol=1e-9)


def test_one_pass_gives_them_all() -> None:
    model, data = policy(), altered()
    needs = frozenset({*REFERENCES, "entropy", "hidden:1"})
    with torch.no_grad():
        together = model.score(data, needs)
        assert together.keys() == needs | {"logp"}
        for need in needs:
            assert torch.equal(together[need], model.score(data, frozenset({need}))[need])
        none = model.score(data.take(torch.zeros(len(data), dtype=torch.bool)), needs)
    assert {name: len(column) for name, column in none.items()} == dict.fromkeys(needs | {"logp"}, 0)


def test_attention_is_where_the_state_comes_from() -> None:
    """A map times the values of a block is what its attention puts out."""
    model, data = policy(), experience([(5, [3, 2]), (2, [4])])
    inner: Any = model.model
    with torch.no_grad():
        found = model.score(data, frozenset({"attention:2:3", "attention:2"}))
        mean, one = (found[n] for n in ("attention:2", "attention:2:3"))
        block = inner.model.layers[1]
        for i in (0, 3, len(data) - 1):
            c, p = int(data["context"][i]), int(data["position"][i])
            assert len(one[i]) == p == len(mean[i])
            positions = torch.arange(p)[None]
            _, tapped = model.model.hidden_states(
                data.context.ragged("tokens")[c][None, :p], positions, taps=(1,)
            )
            q, k, v = block.self_attn.project(
                block.input_layernorm(tapped[1]), inner.rotations(positions, torch.float64)[0]
            )
            whole = _causal(p).attend(q, k, v, Focus())[0, -1]
            torch.testing.assert_close(one[i].double() @ v[0, :, 1], whole[3], atol=1e-6, rtol=1e-6)
            heads = model.score(data, frozenset(f"attention:2:{h}" for h in range(4)))
            expected = torch.stack([heads[f"attention:2:{h}"][i] for h in range(4)]).mean(0)
            torch.testing.assert_close(mean[i], expected)


def test_prompt_states_are_those_of_the_last_prompt_token() -> None:
    model = policy()
    tasks = [Task(i, prompt) for i, prompt in enumerate([(3, 4, 5), (7,), (3, 4, 5), (3, 4)])]
    with torch.no_grad():
        for block in (None, 1):
            found = model.prompt_states(tasks, block)
            for task, state in zip(tasks, found, strict=True):
                tokens = torch.tensor(task.prompt)[None]
                last, tapped = model.model.hidden_states(
                    tokens, torch.arange(tokens.shape[1])[None], taps=(1,)
                )
                torch.testing.assert_close(state, (last if block is None else tapped[1])[0, -1])


# ------------------------------------------------------------------ names


@pytest.fixture
def likeliest() -> Iterator[None]:
    def likeliest(seen: Pass, least: float = -1.0) -> Tensor:
        """As a plug-in would write it."""
        return seen.over_vocabulary(lambda logp: logp.amax(-1).clamp(min=least))

    tap(likeliest)
    yield
    del taps._TAPS["likeliest"]


def test_a_plug_in_registers_one(likeliest: None) -> None:
    model, data = policy(), altered()
    found = model.score(data, frozenset({"likeliest:-0.5", "likeliest*2"}))
    expected = by_hand(model, data)
    torch.testing.assert_close(found["likeliest:-0.5"], expected.amax(-1).clamp(min=-0.5))
    hot = by_hand(model, data, heat=2.0).amax(-1)
    torch.testing.assert_close(found["likeliest*2"], hot.clamp(min=-1.0))


@pytest.mark.parametrize(
    ("need", "said"),
    [
        ("hiden:1", "Unknown output of a text policy 'hiden'. Did you mean 'hidden'"),
        ("logp:1:normed:2", "too many arguments: logp takes block, norm"),
        ("logp:x", "block of 'logp:x' takes a whole number or none"),
        ("logp:1:bare", "norm of 'logp:1:bare' takes raw or normed"),
        ("logp*0", r"write a number above 0 after the \*"),
        ("logp*hot", r"write a number above 0 after the \*"),
        ("hidden", "lacks its block: write hidden:BLOCK"),
        ("attention:1*2", "the same at every temperature"),
        ("logp:9", "no hidden state 9 in 2 layers"),
        ("attention:3", "no attention of block 3 in 2 blocks of 4 heads"),
        ("attention:1:4", "no attention of block 1, head 4, in 2 blocks"),
    ],
)
def test_a_name_that_is_none_is_a_sentence(need: str, said: str) -> None:
    with pytest.raises(PanoplyError, match=said), torch.no_grad():
        policy().score(experience(RAGGED), frozenset({need}))


def test_a_term_cannot_have_rows_of_unequal_length() -> None:
    with pytest.raises(PanoplyError, match="ask a snapshot for it, as in attention:1@old"):
        policy().score(experience(RAGGED), frozenset({"attention:1"}))


def test_what_cannot_be_registered() -> None:
    with pytest.raises(PanoplyError, match="'parse' is a function of seen, or of policy and experience"):
        tap(taps.parse)
    with pytest.raises(PanoplyError, match="argument 'k' of the output 'untyped' has no type"):

        @tap
        def untyped(seen: Pass, k=1) -> Tensor:  # type: ignore[no-untyped-def]
            return seen.last


def test_control_has_temperatures_and_no_blocks() -> None:
    model = ControlPolicy.fresh(Box((3,), (-1.0,) * 3, (1.0,) * 3), Discrete(4))
    rows = torch.arange(5)
    seen = Table({"observation": torch.linspace(-1, 1, 15).view(5, 3)})
    data = Experience(
        Table({"context": rows, "action": rows % 4, "temperature": torch.full((5,), 0.1)}), seen
    )
    with torch.no_grad():
        found = model.score(data, frozenset({"logp*3", "entropy*3"}))
        logp = (model.model(seen.tensor("observation")) / 0.3).log_softmax(-1)
        torch.testing.assert_close(found["logp*3"], of_action(logp, data))
        torch.testing.assert_close(found["entropy*3"], entropies(logp))
        with pytest.raises(
            PanoplyError, match="cannot supply 'logp:1', which a part needs; it has logp and entropy"
        ):
            model.score(data, frozenset({"logp:1"}))
        with pytest.raises(PanoplyError, match="cannot supply 'mean_logp'"):
            model.score(data, frozenset({"mean_logp"}))
