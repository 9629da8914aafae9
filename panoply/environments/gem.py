"""GEM's environments. `math`, `code` and `qa` load data sets from the Hugging Face Hub, and some games word lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from panoply.environments.environment import known


def make(id: str, options: Mapping[str, Any]) -> Told:
    import gem
    from gem.envs.registration import ENV_REGISTRY

    known("environment of gem", id, ENV_REGISTRY)
    return Told(gem.make(id, **options))


class Told:
    """Shows text and takes text, as it is."""

    def __init__(self, env: Any):
        self.env = env

    def reset(self, seed: int) -> str:
        shown, _ = self.env.reset(seed=seed % 2**31)
        return str(shown)

    def step(self, said: str) -> tuple[str, float, bool]:
        shown, reward, terminated, truncated, _ = self.env.step(said)
        return str(shown), float(reward), bool(terminated or truncated)

    def expert(self) -> str | None:
        return None
