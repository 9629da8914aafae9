"""Sampled episodes: a few whole groups a step, with all that is known of each of their decisions.

They are what the inspector shows. Recording is rare (`run.episodes_every`) and looks at the chosen episodes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from panoply.batch import Batch
from panoply.evaluation.surprise import surprise
from panoply.experience import KEY_UNITS, OPEN, Experience, Segments, transcript
from panoply.parts import Part

Decode = Callable[[Sequence[int]], str]
Verdict = Callable[[Sequence[int], Sequence[int]], str]
"""What came of a turn that is a program, by what was seen and what was said."""
Key = tuple[int, int, int]
"""A decision, however its batch is cut or ordered: episode, turn, position."""
COLUMNS = {"turn", "node", "logp", "entropy", "kept", "reward", "value", "source", "train"}
"""Columns that are recorded where they exist, and so is every `logp@NAME`."""
DULL = {"source": 0, "train": 1}
"""What a column holds almost always; then it is not recorded."""
VERDICT = 400
"""Characters of a verdict that are kept."""
EPISODES, WHOLE_GROUP, WHOLE_TREE = 8, 16, 64
"""About how many episodes a step records, and how many of one group, or of one tree, at most."""


class Watch:
    """What the learner says of the chosen episodes: ratio, log-probability, and which gate acted on which decision.

    A gate is a boolean column among a term's metrics: it is true where the term cut or bounded a decision. The ratio
    is the one the surrogate saw in the last update; gates are those that acted in any update of the step.
    """

    def __init__(self, episodes: Tensor):
        self.episodes = episodes
        self.columns: dict[str, dict[Key, float]] = {}
        self.gates: dict[str, set[Key]] = {}
        self.kept: set[Key] = set()

    @torch.no_grad()
    def see(self, term: Part, view: Batch, stats: Mapping[str, Tensor]) -> None:
        """Called by the learner for each term and micro-batch."""
        mask = torch.isin(view["episode"], self.episodes.to(view["episode"].device))
        if not bool(mask.any()):
            return
        keys = _keys(view.experience, mask)
        if "logp" in view.now:
            self._keep("logp@now", keys, view.now["logp"][mask])
            against = term.settings().get("against", "behaviour")
            then = "logp" if against == "behaviour" else f"logp@{against}"
            comparable = term.info.scores == "sampled" or not view.experience.altered
            if term.info.slot == "surrogate" and then in view and comparable:
                self._keep("ratio", keys, view.log_ratio(against)[mask].exp())
        for name, column in stats.items():
            if column.dtype == torch.bool and term.info.unit in ("decision", *KEY_UNITS):
                rows = column if len(column) == len(mask) else view.by(term.info.unit).rows(column)
                acted = {key for key, on in zip(keys, rows[mask].tolist(), strict=True) if on}
                self.gates.setdefault(f"{term.info.id}:{name}", set()).update(acted)

    def credited(self, learned: Experience) -> None:
        """Note what was left after selection, and the credit it was given."""
        mask = torch.isin(learned["episode"], self.episodes)
        keys = _keys(learned, mask)
        self.kept.update(keys)
        if "advantage" in learned:
            self._keep("advantage", keys, learned["advantage"][mask])

    def said(self) -> dict[str, Any]:
        """What was seen, to be told elsewhere."""
        return {"columns": self.columns, "gates": self.gates}

    def hear(self, said: Mapping[str, Any]) -> None:
        """Add what was seen elsewhere of other decisions."""
        for name, known in said["columns"].items():
            self.columns.setdefault(name, {}).update(known)
        for name, acted in said["gates"].items():
            self.gates.setdefault(name, set()).update(acted)

    def _keep(self, name: str, keys: Sequence[Key], values: Tensor) -> None:
        known = {k: v for k, v in zip(keys, values.tolist(), strict=True) if not math.isnan(v)}
        self.columns.setdefault(name, {}).update(known)


def choose(experience: Experience) -> Tensor:
    """The episodes to record: whole groups, the first ones and that of the most surprising episode.

    Of branched episodes a whole tree stands for a group. The first of a large one are its trunk: branches come later.
    """
    episodes = experience.by("episode")
    group = episodes.first(experience["group"])
    most = WHOLE_TREE if "parent" in experience else WHOLE_GROUP
    if "parent" in experience:
        group = _trees(episodes.keys, episodes.first(experience["parent"]))
    chosen: list[int] = []
    for g in Segments(group).keys.tolist():
        if chosen and len(chosen) + int((group == g).sum()) > EPISODES:
            break
        chosen += episodes.keys[group == g][:most].tolist()
    if "reward" in experience and "logp" in experience:
        expected = experience["logp@reference" if "logp@reference" in experience else "logp"]
        odd = -episodes.mean(expected.float())
        scores = surprise(episodes.sum(experience["reward"].float()).cpu(), odd.cpu())
        odd_one = group[int(scores.argmax())]
        chosen += episodes.keys[group == odd_one][:most].tolist()
    return torch.tensor(sorted(set(chosen)), device=experience["episode"].device)


def _trees(episodes: Tensor, parents: Tensor) -> Tensor:
    """By which first episode's own parent, a negative number, a tree of episodes is known."""
    root: dict[int, int] = {}
    for episode, parent in sorted(zip(episodes.tolist(), parents.tolist(), strict=True)):
        root[episode] = root.get(parent, parent)  # branches come after what they branch from
    return torch.tensor([root[episode] for episode in episodes.tolist()], device=episodes.device)


def sampled_episodes(
    step: int,
    decode: Decode | None,
    collected: Experience,
    watch: Watch,
    verdict: Verdict | None = None,
) -> list[dict[str, Any]]:
    """The watched episodes as records: ids are the record, text its rendering."""
    return [_record(step, decode, collected, watch, episode, verdict) for episode in watch.episodes.tolist()]


def _record(
    step: int,
    decode: Decode | None,
    collected: Experience,
    watch: Watch,
    episode: int,
    verdict: Verdict | None,
) -> dict[str, Any]:
    mask = collected["episode"] == episode
    keys = _keys(collected, mask)
    record: dict[str, Any] = {"step": step, "episode": episode}
    record |= {
        name: int(collected[name][mask][0]) for name in ("group", "task", "parent") if name in collected
    }
    record |= _rendered(decode, collected, episode, mask)
    signals = {}
    for name in collected.decisions:
        if name.startswith("signal:"):
            earned = enumerate(_plain(collected[name][mask].tolist()))
            signals[name.removeprefix("signal:")] = [[row, value] for row, value in earned if value]
        elif name in COLUMNS or name.startswith("logp@"):
            values = _plain(collected[name][mask].tolist())
            if any(value != DULL.get(name) for value in values):
                record[name] = values
    for name, known in watch.columns.items():
        if any(key in known for key in keys):
            record[name] = _plain([known.get(key) for key in keys])
    record["signals"] = signals
    if verdict is not None and (found := _verdicts(verdict, collected, mask)):
        record["verdicts"] = found
    acted = {name: [i for i, k in enumerate(keys) if k in on] for name, on in watch.gates.items()}
    record["gates"] = {name: rows for name, rows in acted.items() if rows}
    if "end" in collected:
        record["end"] = int(collected["end"][mask][-1])
    if not any(key in watch.kept for key in keys):
        record["left_out"] = True
    return record


def _verdicts(verdict: Verdict, experience: Experience, mask: Tensor) -> list[list[Any]]:
    """What came of each turn that is over, on its last decision, where its world runs something."""
    if "tokens" not in experience.context or "end" not in experience:
        return []
    columns = [experience[name][mask].tolist() for name in ("context", "position")]
    turn = experience["turn"][mask].tolist() if "turn" in experience else [0] * len(columns[0])
    tokens = experience.context.ragged("tokens")
    turns: dict[int, list[tuple[int, int, int]]] = {}
    for row, (at, position) in enumerate(zip(*columns, strict=True)):
        turns.setdefault(turn[row], []).append((row, at, position))
    if int(experience["end"][mask][-1]) == OPEN:
        turns.pop(turn[-1])
    found = []
    for decisions in turns.values():
        _, at, first = decisions[0]
        seen = tokens[at].tolist()
        said = verdict(seen[:first], [seen[position] for _, _, position in decisions])
        found.append([decisions[-1][0], said[:VERDICT]])
    return [pair for pair in found if pair[1]]


def _rendered(decode: Decode | None, experience: Experience, episode: int, mask: Tensor) -> dict[str, Any]:
    """What was said, token by token; of decisions that are no tokens, the actions."""
    if decode is None or "tokens" not in experience.context:
        return {"actions": _plain(experience["action"][mask].tolist())}
    tokens, position = transcript(experience, episode)
    pieces = spelled(tokens, decode)
    return {"text": "".join(pieces), "pieces": pieces, "tokens": tokens, "position": position}


def spelled(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Each token's text. Tokens that make a character only together have it at the first, and nothing at the others."""
    alone = {token: decode([token]) for token in set(tokens)}
    pieces: list[str] = []
    broken: list[int] = []
    for token in [*tokens, None]:
        if token is not None and "\ufffd" in alone[token]:
            broken.append(token)
            continue
        if broken:
            pieces += [decode(broken), *[""] * (len(broken) - 1)]
            broken = []
        if token is not None:
            pieces.append(alone[token])
    return pieces


def _keys(experience: Experience, mask: Tensor) -> list[Key]:
    columns = [experience["episode"][mask].tolist()]
    for name in ("turn", "position"):
        columns.append(experience[name][mask].tolist() if name in experience else [0] * len(columns[0]))
    return list(zip(*columns, strict=True))


def _plain(values: Sequence[Any]) -> list[Any]:
    """Short numbers for JSON, which has no word for what is not finite; of rows of numbers, row by row."""
    return [_plain(x) if isinstance(x, list) else _short(x) for x in values]


def _short(x: float | None) -> float | int | None:
    return None if x is None or not math.isfinite(x) else round(x, 5) + 0
