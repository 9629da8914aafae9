"""What papers and released code state is what methods do, and whoever states it is named."""

from __future__ import annotations

import pytest

from panoply import registry
from panoply.errors import PanoplyError
from panoply.published import Origin, contradictions, is_part, origins, statements
from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.report.pages import shown
from panoply.slots.sample.groups import groups

WORKS = [entry for entry in registry.entries("method") if entry.build.__module__.startswith("panoply.")]


@pytest.mark.parametrize("entry", WORKS, ids=lambda entry: entry.name)
def test_a_method_does_what_its_sources_state(entry: registry.Entry) -> None:
    assert contradictions(entry) == []
    assert all(source.strip() and len(source) > 8 for source, *_ in statements(entry)), "who says so?"


@pytest.mark.parametrize("entry", [e for e in WORKS if e.paper], ids=lambda entry: entry.name)
def test_a_published_work_says_what_is_published_of_it(entry: registry.Entry) -> None:
    inherited = ("subpo-a2c", "subpo-ppo")  # subpo on other bases
    assert list(statements(entry)) or entry.name in inherited


def toy(**stated: object) -> registry.Entry:
    """GRPO with another group, on a table that states something of it."""

    @method(
        "toy@1",
        base="grpo",
        presets={"tiny": {"update.lr": 1e-3, "run.steps": 5}},
        published={"the paper": stated},
    )
    def toy() -> OnPolicy:
        grpo: OnPolicy = registry.find("method", "grpo").build()
        return grpo.but(sample=groups(prompts=16, group=4))

    return registry.find("method", "toy")


def test_a_table_that_states_something_else_is_found(registries: None) -> None:
    stated = {
        "sample.group": 4,
        "regularise.entropy.weight": None,
        "tiny:update.lr": 1e-3,
        "tiny:run.steps": 5,
    }
    assert contradictions(toy(**stated)) == []
    wrong = {"sample.group": 8, "regularise.kl.weight": None, "credit.nothing": 1, "tiny:update.lr": 3e-4}
    assert contradictions(toy(**wrong)) == [
        "toy: sample.group is 4, and the paper says 8",
        "toy: regularise.kl.weight is 0.04, and the paper says none",
        "toy: credit.nothing does not exist, and the paper says 1",
        "toy (preset tiny): update.lr is 0.001, and the paper says 0.0003",
    ]
    with pytest.raises(PanoplyError, match=r"Unknown preset of toy 'small'"):
        contradictions(toy(**{"small:update.lr": 1.0}))


def test_every_setting_has_an_origin(registries: None) -> None:
    entry = toy(
        **{"sample.group": 4, "update": "adam", "regularise.entropy.weight": None, "tiny:update.lr": 1e-3}
    )
    found = {origin.path: origin for origin in origins(entry)}
    assert found["sample.group"] == Origin("sample.group", 4, "published", "the paper")
    assert found["update"].says == "published: the paper", "a part that a source names"
    assert "credit" not in found, "others are shown with what they do"
    assert found["update.lr"] == Origin("update.lr", 1e-6, "inherited", "grpo")
    assert found["regularise.entropy.weight"].value is None
    settings = entry.build().settings()
    assert {path for path in settings if not is_part(path, settings)} <= set(found)
    assert is_part("regularise.kl", settings)
    assert is_part("update.schedule", settings)
    tiny = {origin.path: origin for origin in origins(entry, "tiny")}
    assert (tiny["update.lr"].kind, tiny["sample.group"].kind, tiny["run.steps"].kind) == (
        "published",
        "published",
        "chosen",
    )


def test_what_another_part_happens_to_share_is_not_inherited() -> None:
    found = {origin.path: origin for origin in origins(registry.find("method", "dapo"))}
    assert found["sample.temperature"].kind != "inherited", "dapo samples with another part than grpo"
    assert found["credit.scale"].says == "inherited from grpo"
    found = {origin.path: origin for origin in origins(registry.find("method", "gigpo"))}
    assert found["credit.votes"].says == "chosen here"
    found = {origin.path: origin for origin in origins(registry.find("method", "cgpo-codpo"))}
    assert found["sample.prompts"].says == "chosen here", "cgpo's 16 prompts are another part's"


def test_the_page_has_a_line_for_every_setting() -> None:
    page = [" ".join(line.split()) for line in shown("grpo").split("\n")]
    assert "sample.group 64 published: arXiv 2402.03300, §4.2" in page
    assert any(line.startswith("update.beta2 0.999 chosen here") for line in page)
