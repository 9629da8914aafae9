"""Composing methods: round trips, diffs, borrowed slots, settings by path, plug-ins."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from panoply import extensions, registry
from panoply.compose import assign, method_from_json, resolve
from panoply.errors import PanoplyError
from panoply.regimes import Dataset, OnPolicy
from panoply.slots.credit.groups import group
from panoply.slots.credit.moving import moving_baseline
from panoply.slots.regularise.terms import entropy, kl
from panoply.slots.schedule.schedules import cosine, linear
from panoply.slots.surrogate.ratios import clip
from panoply.values import parse

METHODS = [e.name for e in registry.entries("method")]


def sentence(call: Any, *args: Any, **options: Any) -> str:
    """The one sentence a call is refused with."""
    with pytest.raises(PanoplyError) as caught:
        call(*args, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("preset", [None, "tiny"])
def test_round_trip(name: str, preset: str | None) -> None:
    method = resolve(name, preset=preset).method
    data = method.to_json()
    for read in (json.loads(json.dumps(data)), yaml.safe_load(yaml.safe_dump(data))):
        again = method_from_json(read)
        assert again == method
        assert again.hash() == method.hash()
        assert again.diff(method) == []


@pytest.mark.parametrize("name", METHODS)
def test_equations_print(name: str) -> None:
    method = resolve(name).method
    assert all(line and "{" not in line for line in method.equation())
    slots = {*method.slot_of, *method.seated()}
    assert all(path.split(".")[0] in slots for path in method.settings())


def test_hash_depends_on_every_setting() -> None:
    plain = resolve("grpo").method
    assert plain.hash() == resolve("grpo@1").method.hash() == plain.hash()
    others = [
        resolve("grpo", settings={"surrogate.low": 0.1}).method,
        resolve("grpo", settings={"update.schedule.warmup": 1}).method,
        resolve("grpo", settings={"regularise.kl": "none"}).method,
        resolve("grpo", preset="tiny").method,
    ]
    assert len({plain.hash(), *(m.hash() for m in others)}) == 5


def test_diff() -> None:
    grpo = resolve("grpo").method
    other = grpo.but(credit=moving_baseline(), regularise=(entropy(weight=0.5),))
    assert grpo.diff(other) == [
        ("credit", "group", "moving_baseline"),
        ("credit.baseline", "mean", None),
        ("credit.scale", "std", None),
        ("credit.epsilon", "0.0001", None),
        ("regularise.kl", "kl", None),
        ("regularise.kl.weight", "0.04", None),
        ("regularise.kl.estimator", "k3", None),
        ("regularise.kl.descends", "none", None),
        ("regularise.kl.to", "reference", None),
        ("credit.decay", None, "0.9"),
        ("regularise.entropy", None, "entropy"),
        ("regularise.entropy.weight", None, "0.5"),
    ]
    close = resolve("grpo", settings={"update.lr": 1.00000001e-6}).method
    assert [path for path, _, _ in grpo.diff(close)] == ["update.lr"]


def test_but_checks_the_slot() -> None:
    grpo = resolve("grpo").method
    assert sentence(grpo.but, credit=clip()) == "The slot 'credit' takes a credit part, not surrogate.clip."
    assert sentence(grpo.but, credit=(group(),)).startswith("The slot 'credit' takes a credit part, not")
    assert (
        sentence(grpo.but, regularise=(group(),))
        == "The slot 'regularise' takes a regularise part, not credit.group."
    )
    assert sentence(grpo.but, regularize=(kl(),)).endswith("Did you mean 'regularise'?")
    assert sentence(grpo.but, credit=3) == "The slot 'credit' takes a credit part, not 3."
    assert grpo.but(regularise=kl()) == grpo.but(regularise=(kl(),)), "one part is a list of one"
    assert sentence(resolve("sft").method.but, losses=()) == "A dataset method needs at least one loss."


def test_broken_json_is_a_sentence() -> None:
    data = resolve("grpo").method.to_json()
    assert sentence(method_from_json, {**data, "regime": "onpolicy"}).endswith("Did you mean 'on_policy'?")
    assert sentence(method_from_json, {**data, "kredit": {}}).endswith("Did you mean 'credit'?")
    del data["credit"]
    assert "slot 'credit'" in sentence(method_from_json, data)


# ------------------------------------------------------------------ settings by path


@pytest.mark.parametrize(
    ("path", "value", "slot", "expected"),
    [
        ("credit.scale", "none", "credit", group(scale="none")),
        ("credit.epsilon", "1e-3", "credit", group(epsilon=1e-3)),
        ("credit.epsilon", 1e-3, "credit", group(epsilon=1e-3)),
        ("credit", "moving_baseline", "credit", moving_baseline()),
        ("surrogate.dual", "3", "surrogate", clip(dual=3.0)),
        ("surrogate.dual", "none", "surrogate", clip()),
        ("regularise.kl", "0.1", "regularise", (kl(weight=0.1),)),
        ("regularise.kl", 0.1, "regularise", (kl(weight=0.1),)),
        ("regularise.kl", "none", "regularise", ()),
        ("regularise.kl", None, "regularise", ()),
        ("regularise.kl", False, "regularise", ()),
        ("regularise", "none", "regularise", ()),
        ("regularise", "entropy", "regularise", (entropy(),)),
        ("regularise.kl.estimator", "k1", "regularise", (kl(estimator="k1"),)),
        ("regularise.kl.weight", "linear", "regularise", (kl(weight=linear()),)),
        ("regularise.entropy", "0.2", "regularise", (kl(), entropy(weight=0.2))),
        ("regularise.entropy", True, "regularise", (kl(), entropy())),
        ("regularise.entropy.weight", 0.2, "regularise", (kl(), entropy(weight=0.2))),
    ],
)
def test_assign(path: str, value: Any, slot: str, expected: Any) -> None:
    assert assign(resolve("grpo").method, path, value).slots()[slot] == expected


@pytest.mark.parametrize(
    ("word", "annotation", "value"),
    [
        ("q_proj,v_proj", tuple[str, ...], ("q_proj", "v_proj")),
        ("*_proj", tuple[str, ...], ("*_proj",)),
        ("q_proj,*v_proj", tuple[str, ...], ("q_proj", "*v_proj")),
        ("[qv]_proj", tuple[str, ...], ("[qv]_proj",)),
        ('["a,b","c"]', tuple[str, ...], ("a,b", "c")),
        ("1,2", tuple[int, ...], (1, 2)),
    ],
)
def test_words_that_are_lists(word: str, annotation: Any, value: Any) -> None:
    """Of text a pattern stands as it is, though YAML takes it for a reference or a list."""
    assert parse("lora.target_modules", word, annotation) == value


def test_a_name_that_adapters_have_too_is_not_taken_for_theirs() -> None:
    assert "lora" not in sentence(resolve, "sac", settings={"alpha": "0.1"})


def test_a_word_that_yaml_refuses_is_no_list_of_numbers() -> None:
    assert "references" in sentence(parse, "policy.hidden", "*a", tuple[int, ...])


def test_assign_inside_a_part_inside_a_part() -> None:
    grpo = resolve("grpo").method
    warm = assign(grpo, "update.schedule.warmup", "7")
    assert warm.settings()["update.schedule.warmup"] == 7
    curved = assign(assign(grpo, "update.schedule", "cosine"), "update.schedule.end", "0.1")
    assert curved.settings()["update.schedule"] == "cosine"
    assert curved.slots()["update"].settings()["schedule"] == cosine(end=0.1)  # type: ignore[union-attr]
    fading = assign(assign(grpo, "regularise.kl.weight", "linear"), "regularise.kl.weight.end", "0.5")
    assert fading.slots()["regularise"] == (kl(weight=linear(end=0.5)),)


def test_settings_keep_the_order_of_terms() -> None:
    both = resolve("grpo", settings={"regularise.entropy": 0.1}).method
    again = assign(both, "regularise.kl", "0.5")
    assert [p.info.name for p in again.terms()] == ["clip", "kl", "entropy"]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("update.lr", "fast", "update.lr takes a number, not 'fast'."),
        ("update.lr", [1], "update.lr takes a number, not (1,)."),
        ("update.epochs", "1.5", "update.epochs takes a whole number, not 1.5."),
        ("update.lrr", "1", "Unknown setting of update (adam) 'lrr'. Did you mean 'lr'?"),
        ("update.schedule.warmp", "1", "Unknown setting of update.schedule (constant) 'warmp'. Did you mean 'warmup'?"),
        ("update.lr.warmup", "1", "update.lr is 1e-06, not a part: it has no setting 'warmup'."),
        ("updates.lr", "1", "Unknown setting 'updates.lr'. Did you mean 'update.lr'?"),
        ("lora", "8", "Unknown setting 'lora'. Did you mean 'run.lora'?"),
        ("lora_alpha", "8", "Unknown setting 'lora_alpha'. Did you mean 'lora.alpha'?"),
        ("dtype", "bfloat16", "Unknown setting 'dtype'. Did you mean 'run.dtype'?"),
        ("regularise.k1", "1", "Unknown regularise part 'k1'. Did you mean 'kl'?"),
        ("regularise.kl.estimator", "k4", "regularise.kl.estimator takes k1, k2 or k3, not 'k4'."),
        ("select.varied_groups", "0.5",
         "select.varied_groups has no weight: set it to true or false, or set select.varied_groups.SETTING."),
        ("credit", "grupo", "Unknown credit part or method 'grupo'. Did you mean 'group'?"),
        ("update.schedule", "cosin", "Unknown schedule part 'cosin'. Did you mean 'cosine'?"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_sentence(path: str, value: Any, expected: str) -> None:
    assert sentence(resolve, "grpo", settings={path: value}) == expected


def test_unknown_names() -> None:
    assert sentence(resolve, "reinforse") == "Unknown method 'reinforse'. Did you mean 'reinforce'?"
    assert sentence(resolve, "grpo@9") == "Unknown method 'grpo@9'. Did you mean 'grpo@1'?"
    assert sentence(registry.find, "world", "chian") == "Unknown world 'chian'. Did you mean 'chain'?"
    assert (
        sentence(registry.find_part, "credit", "grup") == "Unknown credit part 'grup'. Did you mean 'group'?"
    )
    assert sentence(registry.parts, "kredit") == "Unknown slot 'kredit'. Did you mean 'credit'?"


# ------------------------------------------------------------------ borrowing


def test_borrow_from_a_method() -> None:
    mixed = resolve("grpo", slots={"credit": "reinforce", "reduce": "reinforce"}).method
    lender = resolve("reinforce").method
    assert isinstance(mixed, OnPolicy)
    assert isinstance(lender, OnPolicy)
    assert mixed.credit == lender.credit == moving_baseline(decay=0.9)
    assert mixed.surrogate == clip()
    assert mixed.reduce == lender.reduce


def test_borrow_a_part_by_name() -> None:
    assert resolve("reinforce", slots={"credit": "group"}).method.slots()["credit"] == group()
    assert resolve("reinforce", slots={"regularise": "entropy"}).method.slots()["regularise"] == (entropy(),)


def test_borrow_from_a_preset() -> None:
    """What is borrowed comes as the preset has it, whether or not the borrower has that preset."""
    found = resolve("reinforce", preset="tiny", slots={"surrogate": "grpo"}).method
    assert found.slots()["surrogate"] == clip(high=0.28)


def test_settings_come_after_borrowed_slots() -> None:
    resolved = resolve("grpo", slots={"credit": "reinforce"}, settings={"credit.decay": "0.5"})
    assert resolved.method.slots()["credit"] == moving_baseline(decay=0.5)
    assert resolved.chosen == {"credit", "credit.decay"}
    assert resolved.id == "grpo@1"


def test_borrowing_what_does_not_fit() -> None:
    assert sentence(resolve, "grpo", slots={"credit": "sft"}).startswith(
        "'sft' has no slot 'credit': it is a dataset method"
    )
    assert sentence(resolve, "sft", slots={"credit": "grpo"}).startswith(
        "Unknown slot of the dataset regime 'credit'."
    )
    assert isinstance(resolve("sft", slots={"losses": "dpo"}).method, Dataset)


# ------------------------------------------------------------------ plug-ins

PLUGIN = '''
from panoply import method, part
from panoply.compose import resolve

@part("credit", equation="A = 1")
def toy_flat(experience, *, height: float = 1.0):
    """The same for all."""
    return experience["reward"] * 0 + height

@method("toy-flat@1", base="grpo")
def toy():
    """A toy."""
    return resolve("grpo").method.but(credit=toy_flat())
'''


def test_plugin_file(tmp_path: Path, registries: None) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    assert sentence(resolve, "toy-flat").startswith("Unknown method 'toy-flat'.")
    extensions.load_plugin(file)
    first = registry.parts("credit")["toy_flat"]
    extensions.load_plugin(str(file))
    assert registry.parts("credit")["toy_flat"] is first
    assert resolve("toy-flat").method.settings()["credit.height"] == 1.0
    assert resolve("grpo", slots={"credit": "toy_flat"}).method.settings()["credit.height"] == 1.0
    assert resolve("grpo", slots={"credit": "toy-flat"}).method == resolve("toy-flat").method
    assert [e.id for e in registry.entries("method")].count("toy-flat@1") == 1
    data = resolve("toy-flat").method.to_json()
    assert method_from_json(json.loads(json.dumps(data))) == resolve("toy-flat").method


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def broken(:", "SyntaxError"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import not_a_module_at_all", "ModuleNotFoundError"),
        ("from panoply import part\n@part('credits')\ndef f(e): ...", "Did you mean 'credit'"),
        ("from panoply import method\n@method('toy')\ndef f(): ...", "'toy' is not a versioned id"),
        ("from panoply import method\n@method('grpo@1')\ndef f(): ...", "'grpo@1' is registered twice"),
        (
            "from panoply import part\n@part('credit')\ndef group(e): ...",
            "'credit.group' is registered twice",
        ),
    ],
)
def test_broken_plugins_are_one_sentence(tmp_path: Path, registries: None, text: str, problem: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    assert problem in sentence(extensions.load_plugin, file)
    assert problem in sentence(extensions.load_plugin, file), "the second time too"
    file.write_text("")
    extensions.load_plugin(file)


def test_missing_plugin() -> None:
    assert sentence(extensions.load_plugin, "nowhere.py") == "There is no plug-in file 'nowhere.py'."


def test_installed_plugins(tmp_path: Path, registries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_installed.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("toys", "toy_installed", "panoply.plugins")
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: (point,) if group == "panoply.plugins" else ()
    )
    assert resolve("toy-flat").method.settings()["credit"] == "toy_flat"
    assert "toy_flat" in registry.parts("credit")


def test_broken_installed_plugins_are_named(registries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("toys", "not_a_module_at_all", "panoply.plugins")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (point,))
    for _ in range(2):
        assert sentence(registry.entries).startswith("The installed plug-in 'toys' cannot be loaded")
    resolve("grpo")


def test_newest_version_unless_one_is_named(registries: None) -> None:
    build = registry.find("method", "grpo").build
    for version in (9, 10):
        registry.method(f"grpo@{version}")(build)
    assert registry.find("method", "grpo").id == "grpo@10"
    assert registry.find("method", "grpo@1").id == "grpo@1"
