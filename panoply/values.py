"""Values of settings: from files (parts by name, tuples as lists), and from words of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_origin

from panoply import parts as part_module
from panoply.errors import PanoplyError, plain, unknown
from panoply.files import NotYaml, parse_yaml
from panoply.parts import SLOTS, Part, fits, options
from panoply.registry import find_part


def part_from_json(data: Mapping[str, Any]) -> Part:
    """The part that `Part.to_json` wrote down: `{"part": "credit.group", "scale": "std"}`."""
    settings = dict(data)
    slot, _, name = str(settings.pop("part")).partition(".")
    cls = find_part(slot, name)
    for setting in settings:
        if setting not in cls.annotations():
            raise unknown(f"setting of {cls.info.id}", setting, cls.annotations())
    return cls(**{k: value_from_json(v) for k, v in settings.items()})


def value_from_json(value: Any) -> Any:
    """A setting as a file holds it: parts by their names, tuples as lists, anything else as it is."""
    if isinstance(value, Mapping) and "part" in value:
        return part_from_json(value)
    if isinstance(value, list):
        return tuple(value_from_json(v) for v in value)
    return value


def parse(where: str, text: str, annotation: Any) -> Any:
    """A command-line word as the annotation wants it; a part of another slot is named by its name."""
    word = text.strip()
    guesses: list[Any] = [None] if word.lower() in ("none", "null") else []
    guesses += [{"true": True, "false": False}[word.lower()]] if word.lower() in ("true", "false") else []
    for number in (int, float):
        try:
            guesses.append(number(word))
        except ValueError:
            continue
    whole = value_from_json(yaml_value(word)) if word.startswith("[") else word
    if not isinstance(whole, str):
        guesses.append(whole)
    elif "," in word or any(get_origin(option) is tuple for option in options(annotation)):
        guesses += _lists(word.split(","), tuple[str, ...] in options(annotation))
    guesses.append(word)
    for option in options(annotation):
        for guess in guesses:
            good, coerced = fits(guess, option)
            if good:
                return coerced
        if option is Part and word.lower() not in ("true", "false", "none", "null"):
            slot = where.rsplit(".", 1)[-1]
            return find_part(slot if slot in SLOTS else "schedule", word)()
    return part_module.check(where, guesses[0], annotation)


def _lists(words: list[str], texts: bool) -> list[tuple[Any, ...]]:
    """What words between commas may be: as YAML reads them, and as they stand, where it takes text for something else.

    Of `texts` a word may be what YAML refuses, such as the pattern `*_proj`.
    """
    found: list[tuple[Any, ...]] = []
    try:
        found.append(tuple(value_from_json(yaml_value(w)) for w in words))
    except PanoplyError:
        if not texts:
            raise
    return [*found, tuple(words)]


def yaml_value(word: str) -> Any:
    """What YAML makes of a word, or the word itself where it is none."""
    try:
        return parse_yaml(word, f"'{plain(word[:40])}'")
    except NotYaml:
        return word
