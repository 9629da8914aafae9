"""Rollouts that nodes of a swarm share: a folder with a file a round and node, as text, checked line by line.

    FOLDER/rollouts/NODE/0000012.jsonl   what a node offers: a header, then a group of answers a line
    FOLDER/taken/NODE/0000012.jsonl      what it took over from others in that round, so that a round can be repeated
    FOLDER/dropped/NODE.jsonl            what it could not use, and why

Files are written beside their place and renamed, so that a reader sees a whole one or none, whenever a writer is
killed. Nothing that others wrote is trusted: a file, a line or an answer that does not fit is dropped with a reason,
and a problem is only taken for the one at its place in the reader's own world, which grades the answers itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from panoply.checkpoint import clear_errors, remove_unfinished, write_atomically
from panoply.errors import PanoplyError, plain
from panoply.files import BadFile, NoFile, is_folder, parse_json, read_bytes
from panoply.policies.tokenizer import Tokenizer

SCHEMA = 1
"""Of the files; one of another number is dropped, not guessed at."""
MOST_BYTES, MOST_ANSWERS = 2**26, 1024
"""Of a file, and of a group in it."""
NODE = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""What a node may be called: it is the name of a folder."""
REASONS = {
    "unreadable": "no file of rollouts: something else, too large, or not text",
    "schema": "of another version of the format",
    "malformed": "a line that does not fit the format, or answers that no policy here could have given",
    "foreign": "of a problem that this world does not have at that place",
    "ungraded": "answers that the world could not grade",
}
"""Why something is dropped."""
_FILE = re.compile(r"(\d{7})\.jsonl")


class Answer(TypedDict):
    """What was said in an episode: token ids for who has the same vocabulary, text for all others."""

    tokens: list[int]
    text: str
    ended: bool


class Group(TypedDict):
    """A problem, by its place in the training split and by what it is, and the answers to it."""

    task: int
    id: int
    prompt: str
    answers: list[Answer]
    key: NotRequired[str]
    """`NODE/ROUND:LINE`, where it was found."""
    vocabulary: NotRequired[str]
    """Whose ids the tokens are; that of the file where a group does not say."""


class Header(TypedDict):
    """The first line of a file of rollouts."""

    panoply: Literal["rollouts"]
    schema: int
    node: str
    round: int
    vocabulary: str


class Ledger(TypedDict):
    """The first line of a file of what was taken."""

    panoply: Literal["taken"]
    schema: int
    own: str
    """Digest of the node's own answers in that round, which tells a repeated round from one of another run."""
    counts: dict[str, float]
    seen: list[str]


@dataclass
class Dropped:
    """What was not used: how often for each reason, and in sentences."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[dict[str, str]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def add(self, key: str, reason: str, why: str) -> None:
        self.counts[reason] += 1
        self.seen.append(key)
        self.lines.append({"from": key, "reason": reason, "why": plain(why)[:300]})


@dataclass(frozen=True)
class Exchange:
    """One node's view of the folder.

    window   how many of each node's last rounds are offered
    """

    folder: Path
    node: str
    window: int

    # -------------------------------------------------------------- offering

    def offer(self, round: int, groups: Iterable[Group], vocabulary: str) -> None:
        """Publish the groups of a round. Those older than the window go, and later ones that a former life left."""
        home = self._made("rollouts", self.node)
        head: Header = {
            "panoply": "rollouts",
            "schema": SCHEMA,
            "node": self.node,
            "round": round,
            "vocabulary": vocabulary,
        }
        write_atomically(home / _name(round), _lines([head, *groups]))
        for path in home.iterdir():
            found = _FILE.fullmatch(path.name)
            if found and not round - self.window < int(found[1]) <= round:
                path.unlink(missing_ok=True)
        remove_unfinished(home, "*")

    # -------------------------------------------------------------- looking

    def offered(self, seen: Sequence[str], dropped: Dropped) -> tuple[list[Group], list[str]]:
        """What other nodes offer that was not looked at before; and of what was, what is still there."""
        known, groups = set(seen), []
        there: list[str] = []
        for path in self._files(known, dropped, there):
            stem = f"{path.parent.name}/{path.stem}"
            for key, group in _groups(path, stem, known, dropped):
                if key not in known:
                    groups.append(group)
        return groups, [key for key in seen if key.partition(":")[0] in there]

    def _files(self, known: set[str], dropped: Dropped, there: list[str]) -> Iterator[Path]:
        """The last files of every other node; strangers among them are dropped once."""
        for home in _listed(self.folder / "rollouts"):
            if home.name == self.node:
                continue
            if not (NODE.fullmatch(home.name) and is_folder(home)):
                there.append(plain(home.name))
                _drop_once(plain(home.name), "unreadable", f"{home.name} is no node's folder", known, dropped)
                continue
            rounds = []
            for path in _listed(home):
                stem = f"{home.name}/{plain(path.stem)}"
                if _FILE.fullmatch(path.name):
                    rounds.append(path)
                    continue
                there.append(stem)
                _drop_once(stem, "unreadable", f"{path.name} is no name of a round", known, dropped)
            last = rounds[-self.window :]
            there += [f"{home.name}/{path.stem}" for path in last]
            yield from last

    # -------------------------------------------------------------- repeating a round

    def note(self, round: int, head: Ledger, groups: Iterable[Group], dropped: Dropped) -> None:
        """Write down what was taken in a round and what was dropped in it, before anything is learned from it."""
        if dropped.lines:
            path = self._made("dropped") / f"{self.node}.jsonl"
            with clear_errors(f"write {path}"), open(path, "a", encoding="utf-8") as file:
                file.write(_lines({"round": round, **line} for line in dropped.lines))
        write_atomically(self._made("taken", self.node) / _name(round), _lines([head, *groups]))

    def noted(self, round: int, own: str) -> tuple[Ledger, list[Group]] | None:
        """What was taken in this very round before, where it was this run's: then it is taken again."""
        path = self.folder / "taken" / self.node / _name(round)
        try:
            head, *lines = read_bytes(path, MOST_BYTES).splitlines()
            found = parse_json(head, plain(path), Ledger)
            groups = [parse_json(line, plain(path), Group) for line in lines]
        except (BadFile, ValueError):
            return None
        return (found, groups) if found["own"] == own and found["schema"] == SCHEMA else None

    def _made(self, *names: str) -> Path:
        place = self.folder.joinpath(*names)
        with clear_errors(f"make {place}"):
            place.mkdir(parents=True, exist_ok=True)
        return place


def _groups(path: Path, stem: str, known: set[str], dropped: Dropped) -> Iterator[tuple[str, Group]]:
    """The groups of a file that fit the format, each with where it was found."""
    if stem in known:
        return
    try:
        lines = read_bytes(path, MOST_BYTES).splitlines()
        head: Mapping[str, Any] = parse_json(lines[0] if lines else b"", f"Line 1 of {path.name}", dict)
        if head.get("panoply") != "rollouts":
            raise BadFile(f"{path.name} does not begin as a file of rollouts does.")
    except NoFile:
        return  # its node has taken it back by now
    except BadFile as problem:
        dropped.add(stem, "unreadable", str(problem))
        return
    try:
        if head.get("schema") != SCHEMA:
            dropped.add(stem, "schema", f"{path.name} is of version {head.get('schema')}, not {SCHEMA}")
            return
        parse_json(lines[0], f"Line 1 of {path.name}", Header)
    except BadFile as problem:
        dropped.add(stem, "malformed", str(problem))
        return
    for number, line in enumerate(lines[1:], 2):
        key = f"{stem}:{number}"
        try:
            group = parse_json(line, f"Line {number} of {path.name}", Group)
            if not 2 <= len(group["answers"]) <= MOST_ANSWERS:
                raise BadFile(f"Line {number} of {path.name} has {len(group['answers'])} answers.")
        except BadFile as problem:
            if key not in known:
                dropped.add(key, "malformed", str(problem))
            continue
        yield key, {**group, "key": key, "vocabulary": str(head["vocabulary"])}


def _drop_once(key: str, reason: str, why: str, known: set[str], dropped: Dropped) -> None:
    if key not in known:
        dropped.add(key, reason, why)


def _listed(folder: Path) -> list[Path]:
    """What is in a folder, in order; hidden names are files on their way."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _name(round: int) -> str:
    return f"{round:07d}.jsonl"


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# ------------------------------------------------------------------ answers


def vocabulary_of(tokenizer: Tokenizer) -> str:
    """A short hash of what ids stand for."""
    return hashlib.sha256(tokenizer.files["tokenizer.json"]).hexdigest()[:16]


def answer_of(tokens: Sequence[int], tokenizer: Tokenizer) -> Answer:
    """An answer as it is shared: the end token is said apart, since other vocabularies have another one."""
    ended = bool(tokens) and tokens[-1] == tokenizer.eos_id
    said = tokens[:-1] if ended else tokens
    return {"tokens": list(tokens), "text": tokenizer.decode(said), "ended": ended}


def tokens_of(answer: Answer, same: bool, tokenizer: Tokenizer) -> list[int]:
    """The answer in the reader's own tokens: as they are in the `same` vocabulary, elsewhere encoded from its text."""
    if same:
        tokens = answer["tokens"]
    else:
        end = tokenizer.eos_id
        ended = [end] if answer["ended"] and end is not None else []
        tokens = [*tokenizer.encode(answer["text"]), *ended]
    if not tokens:
        raise PanoplyError("An answer without a token is none.")
    if not all(0 <= token < tokenizer.vocab_size for token in tokens):
        raise PanoplyError("An answer has a token that the vocabulary does not have.")
    return tokens
