"""Folders as PEFT writes them, and as people then treat them: opened as PEFT opens them, or refused in a sentence."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import own_model
import pytest
import torch
from safetensors.torch import load_file
from test_text import TOKENIZER

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.lora import Lora
from panoply.policies import hub
from panoply.policies.adapter_config import CONFIG, WEIGHTS, named_base, targeted
from panoply.policies.decoder import DecoderConfig
from panoply.policies.folder import load_model
from panoply.policies.lora import Unadapted, add_lora, begun_with
from panoply.policies.text import TextPolicy
from panoply.progress import Progress
from panoply.report.text import next_commands, planned
from panoply.run import Run

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a head that learns": {"modules_to_save": ["lm_head"]},
    "norms that learn": {"modules_to_save": ["norm"]},
    "biases of all layers": {"bias": "all"},
    "factors of the head": {"target_modules": ["q_proj", "lm_head"]},
    "factors of the table": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens that learn": {"trainable_token_indices": [1, 2]},
    "pissa": {"init_lora_weights": "pissa"},
    "some layers": {"layers_to_transform": [0]},
    "all but some": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "a pattern": {"target_modules": r".*\.(q|v)_proj"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_model.write(tmp_path_factory.mktemp("models") / "base")


def adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """PEFT's own, without a tokenizer, moved away from nothing."""
    torch.manual_seed(1)
    config = {"target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(r=4, task_type="CAUSAL_LM", **config),
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_what_peft_has_trained_opens_as_peft_opens_it(base: Path, tmp_path: Path, way: str) -> None:
    folder = adapter(base, tmp_path / "adapter", **WAYS[way])
    tokens = torch.randint(0, 200, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
        plain = load_model(base)(tokens)
        torch.testing.assert_close(load_model(folder)(tokens), theirs, atol=2e-5, rtol=2e-5)
    assert float((plain - theirs).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4, which changed its base in a way"),
        ({"init_lora_weights": "corda"}, "began by init_lora_weights=corda, which changed its base"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication, which makes a deeper model of its base"),
        ({"init_lora_weights": 5}, "init_lora_weights is true or false, text or null, not 5"),
        ({"bias": None}, "bias is text, not null"),
    ],
)  # fmt: skip
def test_what_would_be_another_model_or_none_is_refused(
    said: dict[str, Any], sentence: str, base: Path, tmp_path: Path
) -> None:
    """PEFT opens the first as another model every time, since that begins with a draw."""
    folder = adapter(base, tmp_path / "adapter")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **said}))
    for ask in (
        lambda: load_model(folder),
        lambda: pp.plan("grpo", model=str(folder), lora=4, **data(tmp_path)),
        lambda: train(tmp_path, folder),
    ):
        with pytest.raises(PanoplyError, match=sentence):
            ask()


def test_tokens_that_learn_are_merged_into_two_tables_that_are_one(tmp_path: Path) -> None:
    shape = {"width": 32, "layers": 1, "heads": 4, "max_positions": 64, "model_type": "qwen2", "tied": True}
    TextPolicy.fresh(DecoderConfig(20, **shape), TOKENIZER, 3).save(tmp_path / "base")
    folder = adapter(tmp_path / "base", tmp_path / "adapter", trainable_token_indices=[4, 9])
    tokens = torch.tensor([[3, 4, 9, 7, 4, 5]])
    with torch.no_grad():
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
        torch.testing.assert_close(load_model(folder)(tokens), theirs, atol=2e-5, rtol=2e-5)
    whole = adapter(tmp_path / "base", tmp_path / "whole", modules_to_save=["embed_tokens"])
    with pytest.raises(PanoplyError, match="changes one of two tables that are one there"):
        load_model(whole)


def test_what_training_cannot_go_on_with_says_what_can_be_done(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    with pytest.raises(PanoplyError, match=r'modules_to_save=\["lm_head"\], with which .* leave --lora out'):
        pp.plan("grpo", model=str(folder), lora=4, **data(tmp_path))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"target_modules": ["q_proj"]}, {"model.layers.0.a.q_proj", "model.layers.1.a.q_proj"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, {"model.layers.1.a.q_proj"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, {"model.layers.0.a.q_proj"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "blocks"}, set()),
        ({"target_modules": r".*1\.a\..*"}, {"model.layers.1.a.q_proj", "model.layers.1.a.k_proj"}),
        ({"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*0\..*|.*k_proj"}, {"model.layers.1.a.q_proj"}),
        ({"target_modules": ["proj"]}, set()),
    ],
)  # fmt: skip
def test_layers_are_named_as_peft_names_them(said: dict[str, Any], wanted: set[str]) -> None:
    layers = [f"model.layers.{i}.a.{name}_proj" for i in range(2) for name in "qk"]
    assert targeted({"peft_type": "LORA", "r": 1, "lora_alpha": 1, **said}, layers) == wanted  # type: ignore[typeddict-item]


def data(folder: Path) -> dict[str, Any]:
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(40)))
    (folder / "reward.py").write_text(
        "def good(completions, **_):\n    return [len(c) % 5 / 5 for c in completions]\n"
    )
    return {"data": str(folder / "data.jsonl"), "reward": f"{folder / 'reward.py'}:good"}


FEW = {"sample.prompts": 2, "sample.group": 2, "sample.max_tokens": 4, "run.held_out": 2, "run.steps": 1}


def train(folder: Path, model: Path, **more: Any) -> Run:
    settings = {**FEW, **more.pop("settings", {})}
    done = pp.train(
        "grpo",
        model=str(model),
        run=folder / "run",
        settings=settings,
        progress=Progress(),
        **data(folder),
        **more,
    )
    return Run.open(done.run)


def test_an_adapter_without_a_tokenizer_is_trained_with_its_base_s(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter")
    assert not (folder / "tokenizer.json").exists()
    for more in ({"lora": 4}, {}):
        run = train(tmp_path, folder, **more)
        assert run.status() == "finished"
        shutil.rmtree(run.folder)


def test_an_adapter_of_a_reward_model_says_what_to_do_with_it(base: Path, tmp_path: Path) -> None:
    """What PEFT leaves of a sequence classifier that was trained with LoRA."""
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    peft.get_peft_model(judge, config).save_pretrained(tmp_path / "judge")
    own_model.tokenizer().save_pretrained(tmp_path / "judge")
    sentence = (
        r"is one of a reward model \(task_type SEQ_CLS\), which is opened whole alone: merge it with PEFT"
    )
    asked = {"settings": FEW, "data": data(tmp_path)["data"], "progress": Progress()}
    for ask in (
        lambda: pp.load_policy(tmp_path / "judge"),
        lambda: pp.plan("reward-model", model=str(tmp_path / "judge"), lora=4),
        lambda: pp.train(
            "grpo", model=str(base), reward_model=str(tmp_path / "judge"), run=tmp_path / "run", **asked
        ),
    ):
        with pytest.raises(PanoplyError, match=sentence):
            ask()


def test_an_adapter_s_own_chat_template_is_kept(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter")
    words = own_model.tokenizer("{% for m in messages %}MINE {{ m['content'] }}{% endfor %}")
    words.save_pretrained(folder)
    run = train(tmp_path, folder, lora=4)
    found = pp.export(run.folder, tmp_path / "exported", which="last", adapter=True)
    assert "MINE" in (found / "chat_template.jinja").read_text()


def test_tokens_that_the_base_does_not_have_are_named(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter")
    words = own_model.tokenizer()
    words.add_tokens(["<thought>"])
    words.save_pretrained(folder)
    with pytest.raises(PanoplyError, match="a token <thought> with the id 258, and .* a vocabulary of 258"):
        train(tmp_path, folder, lora=4)


def test_an_adapter_is_taken_out_of_a_run_whose_base_has_moved(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "here")
    run = train(tmp_path, tmp_path / "here", lora=4)
    shutil.move(tmp_path / "here", tmp_path / "there")
    with pytest.raises(PanoplyError, match=r"panoply export RUN DIR --adapter\) and name the base's folder"):
        pp.load_policy(run.folder, which="last")
    found = pp.export(run.folder, tmp_path / "adapter", which="last", adapter=True)
    with pytest.raises(PanoplyError, match="put its base there, or name the base's folder"):
        pp.load_policy(found)
    config = json.loads((found / CONFIG).read_text())
    (found / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "there")}))
    assert pp.load_policy(found).tokenizer.vocab_size == 258


def test_a_file_of_a_checkpoint_that_has_grown_is_not_cut_short(base: Path, tmp_path: Path) -> None:
    run = train(tmp_path, base, lora=4)
    last = sorted(run.checkpoints.iterdir())[-1] / "model" / CONFIG
    last.write_text(last.read_text() + "    ")
    with pytest.raises(PanoplyError, match=r"was changed \(\d+ bytes, where \d+ were written\)"):
        pp.load_policy(run.folder, which="last")


def test_an_adapter_beside_a_model_is_refused(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter")
    shutil.copytree(base, tmp_path / "mixed")
    for name in (CONFIG, WEIGHTS):
        shutil.copy(folder / name, tmp_path / "mixed" / name)
    with pytest.raises(PanoplyError, match="holds an adapter beside a model"):
        load_model(tmp_path / "mixed")
    with pytest.raises(PanoplyError, match="holds an adapter beside a model"):
        train(tmp_path, tmp_path / "mixed", lora=4)


def test_a_pickle_is_not_opened(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "adapter")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(PanoplyError, match="holds a pickle .* nothing is unpickled"):
        load_model(folder)


def test_a_model_of_the_hub_is_named_by_its_revision(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways: what an adapter says, and what is said of a snapshot in the Hub's cache."""
    snapshot = tmp_path / "hub" / "models--someone--small" / "snapshots" / "abc123"
    shutil.copytree(base, snapshot)
    run = train(tmp_path, snapshot, lora=4)
    found = pp.export(run.folder, tmp_path / "adapter", which="last", adapter=True)
    config = json.loads((found / CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/small", "abc123")
    assert named_base(found) == "someone/small@abc123"
    asked: list[str] = []
    monkeypatch.setattr(hub, "fetch", lambda name: asked.append(name) or snapshot)
    assert isinstance(pp.load_policy(found), TextPolicy)
    assert set(asked) == {"someone/small@abc123"}
    assert hub.address(base) == {"base_model_name_or_path": str(base.resolve())}


def held() -> int:
    """Bytes of all weights there are, each once."""
    gc.collect()
    weights = [o for o in gc.get_objects() if type(o) is torch.nn.Parameter]
    return sum({w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}.values())


@pytest.mark.parametrize("settings", [{}, {"dora": True}])
def test_the_reference_is_the_base_itself(base: Path, settings: dict[str, Any]) -> None:
    policy = add_lora(TextPolicy.load(base), 4, settings=Lora(**settings))
    before = held()
    reference = begun_with(policy)
    assert reference is not None
    assert held() == before
    assert isinstance(reference.model, Unadapted) == bool(settings)
    tokens, at = torch.randint(0, 200, (1, 12)), torch.arange(12)[None]
    with torch.no_grad():
        expected = TextPolicy.load(base).model.hidden(tokens, at)
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
        low = policy.model
        if not settings:
            from panoply.policies.low_rank import merge

            merge(low)
        moved = low.hidden(tokens, at)
        torch.testing.assert_close(reference.model.hidden(tokens, at), expected)
        torch.testing.assert_close(low.hidden(tokens, at), moved)
    assert not torch.allclose(moved, expected)
    assert any(weight.requires_grad for weight in low.parameters())


def test_plans_count_a_reference_that_is_a_copy(base: Path, tmp_path: Path) -> None:
    def copies(model: Path, **more: Any) -> list[str]:
        made = pp.plan("grpo", model=str(model), lora=4, settings={**FEW, **more}, **data(tmp_path))
        return [name for name in cost(made).memory_bytes if "reference" in name]

    assert copies(base) == copies(base, **{"lora.dora": True}) == []
    assert copies(adapter(base, tmp_path / "adapter")) == ["reference copy"]


def test_what_is_planned_and_what_comes_next_say_that_there_are_adapters(base: Path, tmp_path: Path) -> None:
    settings = {"lora.rslora": True, "lora.target_modules": "q_proj,v_proj"}
    made = pp.plan("grpo", model=str(base), lora=4, settings={**FEW, **settings}, **data(tmp_path))
    words = " ".join(planned(made).split())
    assert "rank 4, α 8, over the rank's root (rsLoRA), on q_proj, v_proj" in words
    run = train(tmp_path, base, lora=4, dtype="bfloat16")
    assert any("--lora 4 --dtype bfloat16" in command for command, _ in next_commands(run))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"rank_pattern": {"q_proj": 2}}, "rank 4, α 8, on down_proj, q_proj, v_proj"),
        ({"use_rslora": True}, "over the rank's root (rsLoRA), on down_proj"),
        ({"use_dora": True}, "with lengths that learn (DoRA), on down_proj"),
    ],
)
def test_a_plan_says_what_a_folder_s_adapter_is(
    base: Path, tmp_path: Path, said: dict[str, Any], words: str
) -> None:
    """Its own settings and layers, how many numbers learn, and whose decoder that leads through."""
    folder = adapter(base, tmp_path / "adapter", **said)
    made = pp.plan("grpo", model=str(folder), lora=4, settings=FEW, **data(tmp_path))
    page = " ".join(planned(made).split())
    assert words in page
    assert ("DoRA goes through PEFT" in page) == ("use_dora" in said)
    assert cost(made).trainable == sum(w.numel() for w in load_file(folder / WEIGHTS).values())


def test_every_linear_layer_has_peft_s_name_too(base: Path, tmp_path: Path) -> None:
    plans = [
        pp.plan("grpo", model=str(base), lora=4, settings={**FEW, **more}, **data(tmp_path))
        for more in ({}, {"lora.target_modules": "all-linear"})
    ]
    assert len({cost(made).trainable for made in plans}) == 1


def test_a_rank_that_is_given_twice_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match=r"run\.lora is given twice, as 4 and as 8"):
        pp.plan("grpo", model=str(base), lora=4, settings={**FEW, "run.lora": 8}, **data(tmp_path))


def test_a_recipe_gives_adapters_to_stages_that_train_a_policy() -> None:
    made = pp.plan_recipe("rlhf", lora=4, settings={"lora.alpha": 4})
    assert {name: (plan.options.lora, plan.lora.alpha) for name, plan in made.items()} == {
        "imitate": (4, 4.0), "judge": (0, None), "optimise": (4, 4.0),
    }  # fmt: skip
