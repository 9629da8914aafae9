"""BabyAI's missions, in Minigrid, as text: the mission, what lies in sight, an action a turn. Its bot is the expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from panoply.environments.environment import known

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")


def make(id: str, options: Mapping[str, Any]) -> Mission:
    import gymnasium
    import minigrid  # noqa: F401 -- registers its environments

    missions = {i: i.removeprefix("BabyAI-").rsplit("-v", 1)[0] for i in gymnasium.registry if "BabyAI-" in i}
    ids = {**{short: i for i, short in missions.items()}, **{i: i for i in missions}}
    known("mission of BabyAI", id, ids)
    for name in options:
        known("option of babyai", name, [])
    return Mission(gymnasium.make(ids[id], disable_env_checker=True))


class Mission:
    """The last word that is an action is done; without one nothing is, and the turn is lost."""

    def __init__(self, env: Any):
        self.env = env
        self.seen: Any = None
        self.bot: Any = None
        self.past: Any = None

    def reset(self, seed: int) -> str:
        from minigrid.utils.baby_ai_bot import BabyAIBot

        self.seen, _ = self.env.reset(seed=seed % 2**31)
        self.bot, self.past = BabyAIBot(self.env), None
        return f"Mission: {self.seen['mission']}.\nActions: {', '.join(ACTIONS)}.\n{self._view()}"

    def step(self, said: str) -> tuple[str, float, bool]:
        words = [word for word in said.lower().replace(".", " ").split() if word in ACTIONS]
        if not words:
            return f"Say one of: {', '.join(ACTIONS)}.", 0.0, False
        action = ACTIONS.index(words[-1])
        self.seen, reward, terminated, truncated, _ = self.env.step(action)
        self.past = self.env.unwrapped.actions(action)
        over = bool(terminated or truncated)
        return self._view(), float(reward > 0), over

    def expert(self) -> str | None:
        try:
            return ACTIONS[int(self.bot.replan(self.past))]
        except Exception:  # the bot gives up by failing, after detours it did not expect
            return None

    def _view(self) -> str:
        """What lies in sight, by how far ahead and to which side it is, the nearest first."""
        from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

        image = self.seen["image"]
        wide, deep = image.shape[:2]
        middle, found = wide // 2, []
        for x in range(wide):
            for y in range(deep):
                kind, colour, state = (int(n) for n in image[x, y])
                name = IDX_TO_OBJECT[kind]
                if name in ("unseen", "empty", "floor") or (x, y) == (middle, deep - 1):
                    continue
                ahead, side = deep - 1 - y, x - middle
                if name == "wall" and (side or ahead != 1):
                    continue  # the one in front is what matters
                shut = f"{('open', 'closed', 'locked')[state]} " if name == "door" else ""
                where = [f"{ahead} ahead"] if ahead else []
                where += [f"{abs(side)} to the {'left' if side < 0 else 'right'}"] if side else []
                what = "wall" if name == "wall" else f"{shut}{IDX_TO_COLOR[colour]} {name}"
                found.append((ahead + abs(side), f"{what} {' and '.join(where) or 'here'}"))
        held = self.env.unwrapped.carrying
        carrying = f" You carry a {held.color} {held.type}." if held else ""
        return f"You see: {'; '.join(text for _, text in sorted(found)) or 'nothing'}.{carrying}"
