"""Exported folders as others open them: transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.text import TextPolicy

transformers = pytest.importorskip("transformers")
PROMPT = "3+4*2="


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run from chain's warm start, whose adapters have moved."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("export") / "run"
    settings = {"run.device": "cpu", "update.lr": 3e-3}
    return tiny.train(folder, "sft", model="start", lora=2, steps=3, settings=settings).run


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def test_an_exported_model_generates_and_stops_at_its_end(adapted: Path, tmp_path: Path) -> None:
    folder = pp.export(adapted, tmp_path / "model", which="last")
    ours = TextPolicy.load(folder)
    end, pad = ours.tokenizer.eos_id, ours.tokenizer.pad_id
    for name in ("config.json", "generation_config.json"):
        written = json.loads((folder / name).read_text())
        assert (written["eos_token_id"], written["pad_token_id"]) == (end, pad)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    written = model.generate(prompt, max_new_tokens=60, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert written[-1] == end
    assert len(written) < 60
    assert pp.sample(folder, PROMPT, temperature=0, max_tokens=60) == [tokenizer.decode(written)]


def test_an_adapter_opens_on_its_base_and_says_the_same(adapted: Path, tmp_path: Path) -> None:
    import peft

    folder = pp.export(adapted, tmp_path / "adapter", which="last", adapter=True)
    assert not list(folder.glob("model*.safetensors"))
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    merged = pp.load_policy(adapted, which="last")
    assert isinstance(merged, TextPolicy)
    tokens = merged.tokenizer.encode(PROMPT)
    here = logits(model, tokens)
    torch.testing.assert_close(here, merged.model(torch.tensor([tokens]))[0].detach(), atol=1e-4, rtol=1e-4)
    with model.disable_adapter():
        assert (logits(model, tokens) - here).abs().max() > 1e-2


def test_what_has_no_adapter_or_no_base(tmp_path: Path) -> None:
    plain = tiny.train(tmp_path / "plain", steps=1)
    with pytest.raises(PanoplyError, match="trained every weight, so it has no adapter"):
        pp.export(plain.run, tmp_path / "out", which="last", adapter=True)
    pytest.importorskip("peft")
    fresh = tiny.train(tmp_path / "fresh", steps=1, lora=2)
    with pytest.raises(PanoplyError, match="new weights, which no folder holds"):
        pp.export(fresh.run, tmp_path / "out", which="last", adapter=True)


def test_what_a_model_says_of_its_end_stays(tmp_path: Path) -> None:
    """A chat model may end a turn with several tokens; its own files know."""
    policy = TextPolicy.load(tiny.ROOT / "panoply/assets/chain-start")
    policy.save(tmp_path / "a")
    for name, said in (("config.json", [1, 3]), ("generation_config.json", [1, 2])):
        file = tmp_path / "a" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": said}))
    TextPolicy.load(tmp_path / "a").save(tmp_path / "b")
    assert json.loads((tmp_path / "b/config.json").read_text())["eos_token_id"] == [1, 3]
    assert json.loads((tmp_path / "b/generation_config.json").read_text())["eos_token_id"] == [1, 2]
