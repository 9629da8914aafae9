"""A memory of your own: panoply train sac --replay newest --plugin examples/plugin_replay.py"""

import torch

import panoply as pp
from panoply.policies.control import ControlPolicy
from panoply.replay import Memory, Replay, Uniform
from panoply.transitions import Transitions


class Newest(Replay):
    newest: int

    def draw(self, count: int, generator: torch.Generator) -> Transitions:
        rows = torch.randint(len(self), (count,), generator=generator)
        ago = rows[::2] % min(self.newest, len(self))
        rows[::2] = (self.written * self.envs - 1 - ago) % (self.room * self.envs)
        return self.rows(rows)


@pp.part("replay", equation="{batch} of the last {size} steps, half of the last {newest}")
def newest(
    policy: ControlPolicy, _seed: int, *, size: int = 10**6, newest: int = 1000, batch: int = 256,
    warmup: int = 100, every: int = 1, updates: int = 1) -> Memory:  # fmt: skip
    def empty(room: int, envs: int) -> Replay:
        made = Newest(policy.observation, policy.action, policy.head, size=room, envs=envs, gamma=0.99)
        made.newest = newest
        return made

    return Uniform(empty, size)
