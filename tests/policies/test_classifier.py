"""Reward models as folders: what transformers makes of ours, what we make of its, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, SHAPE
from own_model import write

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.policies.classifier import Classifier, open_judge
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.experts import Mixing
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.value import ValueModel, padding_of
from panoply.rollout.text import Collector
from panoply.worlds.text.chain import Chain

transformers: Any = pytest.importorskip("transformers")
AUTO = transformers.AutoModelForSequenceClassification
LETTERS = "0123456789abcdefghijkl"
WORDS = Tokenizer.of_characters(LETTERS)
"""Pads with a token of its own, unlike the worlds' tokenizers."""
SPARSE: dict[str, dict[str, object]] = {
    "experts": {"model_type": "qwen3_moe", "mixing": Mixing(4, 2, 20)},
    "experts of one tensor": {
        "model_type": "gpt_oss", "mixing": Mixing(4, 2, 20, bias=True, alpha=1.702, limit=7.0), "windows": (5, 0),
    },
}  # fmt: skip
WITHOUT = "granite"
"""transformers has no sequence classifier of this layout."""
CPU = (torch.float32, "cpu")


def judge(outputs: tuple[str, ...] = ("value",), tokenizer: Tokenizer = WORDS, **layout: Any) -> ValueModel:
    """A small reward model with random weights and a random head."""
    config = DecoderConfig(**{"vocab_size": tokenizer.vocab_size, **SHAPE, **layout})
    found = ValueModel.of(TextPolicy.fresh(config, tokenizer, seed=2), outputs)
    torch.nn.init.normal_(found.head.weight, std=0.2, generator=torch.Generator().manual_seed(0))
    return found


@pytest.fixture
def answers(tiny_collector: Collector) -> Experience:
    """Random answers of unequal length, two of which end in tokens of padding."""
    draw = torch.Generator().manual_seed(1)
    lengths = (1, 2, 3, 5, 8, 13, 4, 6)
    said = [torch.randint(1, WORDS.vocab_size, (n,), generator=draw).tolist() for n in lengths]
    said[3][-1], said[5][-2:] = 0, [0, 0]
    return tiny_collector.answers(tiny_collector.tasks(8), said)


def said_by_transformers(folder: Path, rows: Experience, at_once: bool = True) -> torch.Tensor:
    """What it says of whole contexts, [answers, outputs]: of all in a padded batch, or of one after another."""
    model = AUTO.from_pretrained(folder).eval()
    tokens = rows.context.ragged("tokens")
    texts = [tokens[i] for i in rows.by("episode").first(rows["context"]).tolist()]
    with torch.no_grad():
        if not at_once:
            return torch.cat([model(text[None]).logits for text in texts])
        ids = torch.nn.utils.rnn.pad_sequence(
            texts, batch_first=True, padding_value=model.config.pad_token_id
        )
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(text) for text in texts])[:, None]
        return model(ids, attention_mask=mask.long()).logits


@pytest.mark.parametrize("layout", sorted({*LAYOUTS, *SPARSE} - {WITHOUT}))
def test_transformers_opens_ours_and_we_open_its(layout: str, answers: Experience, tmp_path: Path) -> None:
    ours = judge(("kind", "brief"), **{**LAYOUTS, **SPARSE}[layout])
    ours.save(tmp_path / "ours")
    model = AUTO.from_pretrained(tmp_path / "ours")
    assert model.config.id2label == {0: "kind", 1: "brief"}
    assert type(model).__name__ == model.config.architectures[0]
    with torch.no_grad():
        found = torch.stack([*ours.judgements(answers).values()], 1)
    torch.testing.assert_close(said_by_transformers(tmp_path / "ours", answers), found, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "theirs")
    WORDS.save(tmp_path / "theirs")
    back = open_judge(tmp_path / "theirs", *CPU, WORDS)
    assert isinstance(back, ValueModel)
    assert back.outputs == ("kind", "brief")
    assert back.fingerprint() == ours.fingerprint()


def test_a_layout_that_only_transformers_runs_judges_too(answers: Experience, tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = {"vocab_size": WORDS.vocab_size + 3, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    for labels, pad in ((1, 0), (3, None)):
        folder = tmp_path / str(labels)
        config = transformers.GPT2Config(**size, num_labels=labels, pad_token_id=pad)
        transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
        WORDS.save(folder)
        found = open_judge(folder, *CPU, WORDS)
        assert isinstance(found, Classifier)
        assert found.outputs == (("value",) if labels == 1 else ("LABEL_0", "LABEL_1", "LABEL_2"))
        expected = said_by_transformers(folder, answers, at_once=pad is not None)
        judged = torch.stack([*found.judgements(answers).values()], 1)
        torch.testing.assert_close(judged, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.judge(answers), expected.sum(1), atol=1e-5, rtol=1e-5)


def test_where_padding_is_the_end_the_end_is_read(tiny_collector: Collector, tmp_path: Path) -> None:
    """Then transformers takes one answer at a time; of others' folders its rule holds, which passes over ends."""
    words = Tokenizer.load(write(tmp_path / "plain"))
    assert words.pad_id == words.eos_id
    assert padding_of(words) is None
    ours = judge(tokenizer=words)
    rows = tiny_collector.answers(tiny_collector.tasks(2), [[5, 6, words.eos_id or 0], [5, 6]])
    ours.save(tmp_path / "ours")
    with torch.no_grad():
        ended, cut = ours.judge(rows).tolist()
    assert abs(ended - cut) > 1e-3
    found = said_by_transformers(tmp_path / "ours", rows, at_once=False)
    assert found[:, 0].tolist() == pytest.approx([ended, cut], abs=1e-5)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps({**config, "pad_token_id": words.eos_id}))
    theirs = open_judge(tmp_path / "ours", *CPU, words)
    expected = said_by_transformers(tmp_path / "ours", rows)[:, 0].tolist()
    with torch.no_grad():
        assert theirs.judge(rows).tolist() == pytest.approx(expected, abs=1e-5)


def test_one_option_makes_a_folder_the_reward(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    words = Chain(operations=2).tokenizer
    judge(tokenizer=words).save(one)
    judge(("kind", "brief"), words).save(two)
    long = {"models.reward_model.folder": str(one), "reward.name": "model"}
    short = pp.plan("grpo", "chain", reward_model=one)
    assert short.method == pp.plan("grpo", "chain", settings=long).method
    nested = pp.plan("ppo-max-alone", "chain", reward_model=one).method.settings()
    assert nested["reward.reward.name"] == "model"
    output = {"models.reward_model.outputs": "kind"}
    assert pp.plan("grpo", "chain", reward_model=two, settings=output).method.settings()["reward.name"] == (
        "model_kind"
    )
    both = {"models.reward_model.outputs": "kind,brief"}
    blend = pp.plan(
        "grpo", "chain", reward="blend", reward_model=two,
        settings={**both, "reward.names": "model_kind,model_brief"},
    )  # fmt: skip
    assert blend.method.settings()["models.reward_model.folder"] == str(two)
    for method, asked, sentence in (
        (
            "grpo",
            {"reward_model": two, "settings": both},
            "--reward blend --set reward.names=model_brief,model_kind",
        ),
        ("grpo", {"reward_model": tmp_path / "none"}, "There is no folder"),
        ("dpo", {"reward_model": one}, "--reward-model has no effect"),
    ):
        with pytest.raises(PanoplyError, match=sentence):
            pp.plan(method, "chain", **asked)
    with pytest.raises(PanoplyError, match="not for all stages of a recipe"):
        pp.plan_recipe("rlhf", "strings", reward_model=str(one))
    with pytest.raises(PanoplyError, match="reward models are of text"):
        pp.plan("ppo", "cartpole", reward_model=one)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    swapped = Tokenizer.of_characters("".join(reversed(LETTERS)))
    judge(tokenizer=swapped).save(tmp_path / "swapped")
    with pytest.raises(
        PanoplyError, match=r"another tokenizer than the policy: the token '.' is \d+ here and \d+ there"
    ):
        open_judge(tmp_path / "swapped", *CPU, WORDS)
    fewer = Tokenizer.of_characters(LETTERS[:-1])
    judge(tokenizer=fewer).save(tmp_path / "fewer")
    with pytest.raises(PanoplyError, match=r"is \d+ here and not known there"):
        open_judge(tmp_path / "fewer", *CPU, WORDS)
    assert fewer.differs(WORDS) == ""  # who knows more can read


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"id2label": {"0": "kind"}}, "does not name each of them in id2label"),
        ({"id2label": {"0": "kind", "1": "kind"}}, "does not name each of them in id2label"),
        ({"pad_token_id": "x"}, "is a whole number"),
    ],
)
def test_a_config_that_says_nonsense_is_refused(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    judge(("kind", "brief")).save(tmp_path / "two")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    (tmp_path / "two" / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(PanoplyError, match=sentence):
        open_judge(tmp_path / "two", *CPU, WORDS)
