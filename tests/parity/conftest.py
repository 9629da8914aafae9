"""The two models that parity with TRL is tested on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """See `trl_kit.made`, which is imported only where TRL is."""
    from trl_kit import made

    threads = torch.get_num_threads()
    yield made(tmp_path_factory.mktemp("llama"))
    torch.set_num_threads(threads)
