"""Prefix sharing: identical log-probabilities and gradients, and less work."""

from __future__ import annotations

import pytest

from panoply import registry
from panoply.methods.reasoning_data.prefix_grouper import prefix_grouper
from panoply.report.pages import shown


@pytest.mark.parametrize(("prompt", "group"), [(48, 8), (5, 1), (100, 3)])
def test_sharing_the_prompt_changes_nothing(prompt: int, group: int) -> None:
    found = prefix_grouper(prompt=prompt, group=group)
    assert found.logp < 1e-5
    assert found.gradient < 1e-5


def test_it_is_registered_as_a_system_and_explained() -> None:
    entry = registry.find("system", "prefix-grouper")
    assert entry.paper == 122
    assert entry.family == "reasoning-data"
    assert "positions restart after the prompt" in " ".join(shown("prefix-grouper").split())
