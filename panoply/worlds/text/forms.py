"""What a line of JSON says of answers to a prompt, in the forms in which others write such lines.

| form | fields |
|---|---|
| prompts | `prompt`, text or messages |
| answers | `prompt`, `completion`; or `messages` that end with an answer |
| labelled answers | `prompt`, `completion`, `label` |
| pairs | `prompt`, `chosen`, `rejected`; without `prompt`, what both begin with is the prompt |
| rated answers | `prompt` or `instruction`, `completions` (or `generations`) with ratings |

A line becomes rows: a pair, an answer or a list each. What is wrong with a line is said where somebody needs it: a
method that only asks prompts may take a file whose answers are of no use.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

from panoply.seeds import stable_hash

Line = Mapping[str, Any]
Prompt = str | list[dict[str, Any]]
Rated = Literal["pairs", "best", "lists"]

SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
RATINGS = ("rating", "score", "fine-grained_score", "overall_score")
TURN = "\n\nAssistant:"
"""What stands before an answer in dialogues that are one text, as Anthropic writes them."""
ONE = {"ties": "tie", "pairs of the same answer twice": "pair of the same answer twice"}
HALVES = re.compile("[\ud800-\udfff]")
VOTES = {"chosen": 1.0, "rejected": 0.0, "tie": 0.5}


class Wrong(Exception):
    """What is wrong with a line, as what follows its number in a sentence."""


@dataclass(frozen=True)
class Row:
    """One comparison, one answer or one list of answers to a prompt."""

    number: int
    """Of its line."""
    line: Line
    form: str
    prompt: Prompt | None = None
    answers: Mapping[str, str] = field(default_factory=dict, hash=False)
    """`chosen` and `rejected`, or `completion`."""
    p: float | None = None
    """How likely `chosen` is preferred, where that is not certain."""
    margin: float | None = None
    """How far `chosen` must lead."""
    annotator: str | None = None
    good: bool = True
    """Whether a single answer is a good one."""
    rated: tuple[tuple[str, float], ...] = ()
    """All answers of a list with their ratings, the best first."""
    wrong: str = ""
    """Why its answers cannot be used."""


def rows_of(number: int, line: Line, rated: Rated, rating: str, dropped: Counter[str]) -> list[Row]:
    """The rows of a line; what is left out, and why, is counted in `dropped`. A field that is null is not there."""
    bare = Row(number, line, "prompts", _prompt(line))
    line = {name: value for name, value in line.items() if value is not None}
    try:
        several = next((name for name in ("completions", "generations") if _is_list(line.get(name))), None)
        if several and (rated == "lists" or not line.keys() & {"chosen", "rejected"}):
            return _of_list(replace(bare, form="rated answers"), several, rated, rating, dropped)
        if line.keys() & {"chosen", "rejected"}:
            return _of_pair(bare, dropped)
        return [_of_answer(bare, line)]
    except Wrong as error:
        return [replace(bare, wrong=str(error))]


def _prompt(line: Line) -> Prompt | None:
    """Where a line says what is asked."""
    said = line.get("prompt")
    if said is None:
        said = line.get("messages", line.get("instruction"))
    if _is_messages(said):
        return said
    return said if is_text(said) and said != "" else None


# ------------------------------------------------------------------ single answers


def _of_answer(row: Row, line: Line) -> Row:
    if "completion" not in line:
        talk = line.get("messages")
        if "prompt" in line or not _is_messages(talk) or talk[-1].get("role") != "assistant":
            return row
        said, row = _content(talk), replace(row, form="conversations", prompt=talk[:-1] or None)
        if not is_text(said):
            raise Wrong("has no text in the last of its 'messages'")
        return replace(row, answers={"completion": said})
    said = line["completion"]
    text = _content(said) if _is_messages(said) else said
    if not is_text(text):
        raise Wrong("has no field 'completion' with text")
    row = replace(row, form="answers", answers={"completion": text})
    if "label" not in line:
        return row
    label = line["label"]
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise Wrong(f"has the label {label!r:.40}, and an answer is good (true) or bad (false)")
    return replace(row, form="labelled answers", good=bool(label))


# ------------------------------------------------------------------ pairs


def _of_pair(row: Row, dropped: Counter[str]) -> list[Row]:
    line = row.line
    said = {name: line.get(name) for name in ("chosen", "rejected")}
    for name, value in said.items():
        if not (is_text(value) or (_is_messages(value) and is_text(_content(value)))):
            raise Wrong(f"has no field '{name}' with text")
    if said["chosen"] == said["rejected"]:
        dropped["pairs of the same answer twice"] += 1
        return []
    form, prompt, chosen, rejected = _split(line, said["chosen"], said["rejected"])
    row = replace(row, form=form, prompt=prompt, answers={"chosen": chosen, "rejected": rejected})
    row = replace(row, margin=_number(line, "margin"), annotator=_annotator(line))
    if row.margin is not None and row.margin < 0:
        raise Wrong(f"has the margin {row.margin:g}, and 'chosen' cannot lead by less than 0: swap the two")
    if chosen == rejected:
        dropped["pairs of the same answer twice"] += 1
        return []
    if _tied(line):
        dropped["ties"] += 1
        return []
    return _voted(row, dropped)


def _split(line: Line, chosen: Any, rejected: Any) -> tuple[str, Prompt, str, str]:
    """The form of a pair, its prompt, and the two answers after it."""
    given = line.get("prompt")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise Wrong("has text in one of 'chosen' and 'rejected' and messages in the other: write both alike")
    if not isinstance(chosen, str):
        return _split_chat(given, chosen, rejected)
    if given is not None:
        if (prompt := _prompt(line)) is None:
            raise Wrong("has no field 'prompt' with text or messages")
        return "pairs", prompt, chosen, rejected
    at = shared(chosen, rejected)
    if at == 0:
        raise Wrong("has no 'prompt', and 'chosen' and 'rejected' share no beginning that could be it")
    return "pairs with implicit prompts", chosen[:at], chosen[at:], rejected[at:]


def _split_chat(given: Any, chosen: list[Any], rejected: list[Any]) -> tuple[str, Prompt, str, str]:
    """Conversations: the messages that both begin with are the prompt, and one answer each is left."""
    if _is_messages(given):
        form, n = "chat pairs", len(given)
        chosen, rejected = (side[n:] if side[:n] == given else side for side in (chosen, rejected))
        prompt = given
    else:
        form = "chat pairs with implicit prompts"
        n = _alike(chosen[:-1], rejected[:-1])
        prompt = chosen[:n]
        chosen, rejected = chosen[n:], rejected[n:]
        if not prompt and is_text(given) and given:
            form, prompt = "chat pairs", [{"role": "user", "content": given}]
        if not prompt:
            raise Wrong(
                "has no 'prompt', and 'chosen' and 'rejected' share no first message that could be it"
            )
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if len(side) != 1:
            raise Wrong(
                f"has {len(side)} messages in '{name}' after those of the prompt, and one answer each is compared: "
                "cut both conversations after the first message in which they differ"
            )
    return form, prompt, _content(chosen), _content(rejected)


def shared(a: str, b: str) -> int:
    """How many characters two texts share at their beginning, whole words and whole turns of a dialogue.

    An answer is never empty, and a blank before it belongs to it, as tokenizers have it.
    """
    n = min(_alike(a, b), len(a) - 1, len(b) - 1)
    turn = a.rfind(TURN, 0, n)
    if turn >= 0:
        return turn + len(TURN)
    while n > 0 and _in_word(a[n - 1]) and (_in_word(a[n]) or _in_word(b[n])):
        n -= 1
    return n - 1 if n > 0 and a[n - 1] == " " else max(n, 0)


def _alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many elements two sequences share at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(a, b, strict=False)))


def _in_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character in "_'")


def _tied(line: Line) -> bool:
    """Whether the scores of a pair are equal; a pair whose scores contradict it is refused."""
    for better, worse in SCORES:
        scores = _number(line, better), _number(line, worse)
        if scores[0] is None or scores[1] is None:
            continue
        if scores[0] < scores[1]:
            raise Wrong(
                f"prefers an answer with '{better}' {scores[0]:g} to one with {scores[1]:g}: swap the answers, or mend "
                "the scores"
            )
        if scores[0] == scores[1]:
            return True
    return False


def _voted(row: Row, dropped: Counter[str]) -> list[Row]:
    """A pair with the probability that it is preferred; or, where each vote has a name, one pair a person."""
    p, votes = _number(row.line, "p"), row.line.get("votes")
    if p is not None and not 0 <= p <= 1:
        raise Wrong(f"has the preference p = {p:g}, and a probability is from 0 to 1")
    if votes is None:
        return [_likelier_first(row, p)]
    if p is not None:
        raise Wrong("has 'p' and 'votes': leave out one of them")
    if not isinstance(votes, list | dict) or not votes:
        raise Wrong("has no vote in 'votes': give a list of votes, or votes by name, or leave it out")
    if isinstance(votes, list):
        return [_likelier_first(row, sum(map(_vote, votes)) / len(votes))]
    if row.annotator is not None:
        raise Wrong("has 'annotator' and votes by name: leave out one of them")
    found = []
    for name, vote in ((name, _vote(said)) for name, said in votes.items()):
        if vote == 0.5:
            dropped["ties"] += 1
            continue
        found.append(replace(row if vote else _turned(row), annotator=str(name)))
    return found


def _likelier_first(row: Row, p: float | None) -> Row:
    return replace(row, p=p) if p is None or p >= 0.5 else replace(_turned(row), p=1 - p)


def _turned(row: Row) -> Row:
    chosen, rejected = row.answers["rejected"], row.answers["chosen"]
    return replace(row, answers={"chosen": chosen, "rejected": rejected})


def _vote(said: Any) -> float:
    if isinstance(said, str) and said in VOTES:
        return VOTES[said]
    if isinstance(said, bool | int | float) and said in (0, 0.5, 1):
        return float(said)
    raise Wrong(f"has the vote {said!r:.40}, and a vote is 1 or 'chosen', 0 or 'rejected', 0.5 or 'tie'")


def _annotator(line: Line) -> str | None:
    said = line.get("annotator", line.get("annotator_id"))
    if said is None:
        return None
    if not isinstance(said, str | int) or isinstance(said, bool):
        raise Wrong(f"has the annotator {said!r:.40}, and one is named by text or a whole number")
    return str(said)


# ------------------------------------------------------------------ lists


def _of_list(row: Row, several: str, rated: Rated, rating: str, dropped: Counter[str]) -> list[Row]:
    """Rated answers as pairs of different ratings, or as a list."""
    answers = _rated(row.line, several, rating, dropped)
    if rated == "lists":
        if len({worth for _, worth in answers}) < 2:
            dropped["lists without two answers of different ratings"] += 1
            return []
        return [replace(row, rated=answers, answers={"completion": answers[0][0]})]
    twos = list(itertools.combinations(answers, 2))
    unequal = [(a, b) for a, b in twos if a[1] > b[1]]
    dropped["ties"] += len(twos) - len(unequal)
    if rated == "best" and unequal:
        best = [two for two in unequal if two[0] == answers[0]]
        unequal = [best[stable_hash("best", *(text for text, _ in answers)) % len(best)]]
    return [replace(row, answers={"chosen": a, "rejected": b}) for (a, _), (b, _) in unequal]


def _rated(line: Line, several: str, rating: str, dropped: Counter[str]) -> tuple[tuple[str, float], ...]:
    """Different answers with their ratings, the best first; those without a rating are left out."""
    said = line[several]
    beside = next((line[n] for n in ("ratings", "rating", "scores") if _is_list(line.get(n))), None)
    if beside is not None and len(beside) != len(said):
        raise Wrong(f"has {len(said)} answers in '{several}' and {len(beside)} ratings")
    found: dict[str, float] = {}
    for place, one in enumerate(said):
        text = one.get("response", one.get("completion")) if isinstance(one, dict) else one
        if _is_messages(text):
            text = _content(text)
        if not is_text(text):
            raise Wrong(f"has no text in answer {place + 1} of '{several}'")
        worth = _worth(beside[place] if beside is not None else one, rating)
        if worth is None:
            dropped["answers without a rating"] += 1
        elif text in found:
            dropped["answers given twice"] += 1
        else:
            found[text] = worth
    if not found:
        raise Wrong(f"has no rating in '{several}'" + (f" named '{rating}'" if rating else ""))
    return tuple(sorted(found.items(), key=lambda two: -two[1]))


def _worth(one: Any, rating: str) -> float | None:
    """A rating as it stands, or of an answer: the one that is named, or the first that is known, or the mean of all."""
    if not isinstance(one, dict):
        return None if isinstance(one, bool) else _as_number(one)
    noted = one.get("annotations")
    aspects = {
        str(name): _as_number(said.get("Rating"))
        for name, said in (noted.items() if isinstance(noted, dict) else ())
        if isinstance(said, dict)
    }
    if rating:
        return aspects.get(rating, _as_number(one.get(rating)))
    direct = (_as_number(one.get(name)) for name in RATINGS)
    known = [worth for worth in aspects.values() if worth is not None]
    mean = sum(known) / len(known) if known else None
    return next((worth for worth in direct if worth is not None), mean)


# ------------------------------------------------------------------ values


def is_text(said: Any) -> TypeGuard[str]:
    """Half of a surrogate pair, which JSON can spell, is no text: it cannot be tokenised."""
    return isinstance(said, str) and (said.isascii() or HALVES.search(said) is None)


def _is_list(said: Any) -> TypeGuard[list[Any]]:
    return isinstance(said, list) and bool(said)


def _is_messages(said: Any) -> TypeGuard[list[dict[str, Any]]]:
    return _is_list(said) and all(isinstance(message, dict) for message in said)


def _content(messages: Sequence[Mapping[str, Any]]) -> Any:
    """What the last message says."""
    return messages[-1].get("content")


def _as_number(said: Any) -> float | None:
    """A number, also as text, where it is one: ratings come as "4" and as "N/A"."""
    try:
        number = float(said)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _number(line: Line, name: str) -> float | None:
    """A field that is a number or is left out."""
    said = line.get(name)
    if said is None:
        return None
    number = None if isinstance(said, bool | str) else _as_number(said)
    if number is None:
        raise Wrong(f"has {said!r:.40} in '{name}', which is no number")
    return number


# ------------------------------------------------------------------ all lines


@dataclass(frozen=True)
class Brought:
    """All rows of a file."""

    rows: tuple[Row, ...]
    lines: int
    dropped: Mapping[str, int]

    @property
    def annotators(self) -> list[str]:
        """By name, in the order in which they come."""
        return list(dict.fromkeys(row.annotator for row in self.rows if row.annotator is not None))

    def left_out(self) -> list[str]:
        """What was dropped, and how many of each."""
        return [
            f"{n:,} {why if n != 1 else ONE.get(why, why)}" for why, n in sorted(self.dropped.items()) if n
        ]

    def said(self) -> str:
        """How many there are of what, in which form, and what was left out."""
        forms = Counter(row.form for row in self.rows)
        pairs = sum("chosen" in row.answers for row in self.rows)
        parts = [" and ".join(forms)]
        if pairs:
            parts.append(f"{pairs:,} pairs of {len({str(row.prompt) for row in self.rows}):,} prompts")
        if people := self.annotators:
            parts.append(f"{len(people):,} annotators")
        parts += _counted(self.rows)
        parts += [f"left out: {left}" for left in self.left_out()]
        return f"{self.lines:,} lines, {'; '.join(parts)}"


def _counted(rows: Sequence[Row]) -> Iterator[str]:
    soft, led = sum(row.p is not None for row in rows), sum(row.margin is not None for row in rows)
    lists = [len(row.rated) for row in rows if row.rated]
    good = Counter(row.good for row in rows if row.form == "labelled answers")
    if soft:
        yield f"{soft:,} with a probability"
    if led:
        yield f"{led:,} with a margin"
    if lists:
        size = f"{min(lists)}" if min(lists) == max(lists) else f"{min(lists)} to {max(lists)}"
        yield f"{len(lists):,} lists of {size} answers"
    if good:
        yield f"{good[True]:,} good and {good[False]:,} bad answers"


def brought(lines: Sequence[tuple[int, Line]], rated: Rated = "pairs", rating: str = "") -> Brought:
    """All lines of a file as rows."""
    dropped: Counter[str] = Counter()
    rows = [row for number, line in lines for row in rows_of(number, line, rated, rating, dropped)]
    return Brought(tuple(rows), len(lines), dropped)
