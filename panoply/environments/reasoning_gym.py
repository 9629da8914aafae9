"""reasoning-gym's data sets: a question, an answer, a score. All are made here, and nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from panoply.environments.environment import NoSuch, known

PROBLEMS = 2**31 - 1
"""Of a data set; number i is made from its seed and i alone, when it is asked for."""


def make(id: str, options: Mapping[str, Any]) -> Question:
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    known("data set of reasoning-gym", id, DATASETS)
    fields = DATASETS[id][1].__dataclass_fields__
    for name in options:
        known(f"option of {id}", name, [field for field in fields if field not in ("seed", "size")])
    try:
        return Question(create_dataset(id, seed=0, size=PROBLEMS, **options))
    except (AssertionError, TypeError, ValueError) as error:
        raise NoSuch(f"reasoning-gym cannot make {id}: {error or 'an option is out of range'}.") from error


class Question:
    """An episode of one turn."""

    def __init__(self, data: Any):
        self.data = data
        self.item: dict[str, Any] = {}

    def reset(self, seed: int) -> str:
        self.item = self.data[seed % PROBLEMS]
        return str(self.item["question"])

    def step(self, said: str) -> tuple[str, float, bool]:
        """What stands between the last pair of tags is the answer; without tags, all that was said."""
        tagged = re.findall(r"<answer>(.*?)</answer>", said, re.DOTALL)
        answer = (tagged[-1] if tagged else said).strip()
        return "", float(self.data.score_answer(answer or None, self.item)), True

    def expert(self) -> str | None:
        answer = self.item["answer"]
        return None if answer is None else f"<answer>{answer}</answer>"
