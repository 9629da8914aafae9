"""Once this package is installed, `panoply train cubed-grpo` works without --plugin: see pyproject.toml."""

from torch import Tensor

import panoply as pp
from panoply.methods.base.grpo import TINY, grpo


@pp.part("reward", equation="{name}³")
def cubed(experience: pp.Experience, *, name: str = "steps") -> Tensor:
    """A signal of partial success, cubed, so that the last part of the way counts most."""
    return experience[f"signal:{name}"] ** 3


@pp.method("cubed-grpo@1", base="grpo", presets={"tiny": TINY})
def cubed_grpo() -> pp.OnPolicy:
    """GRPO on the cube of the share of right steps."""
    return grpo().but(reward=cubed())
