"""A plan on its way to another process or machine: as its JSON, with the files it names.

Plug-ins, definitions of a script or notebook, functions of rewards and tools, and data travel by what is in them. Where
a file of the same path and content lies already, that one is used; elsewhere it is written to a folder that lasts as
long as the process. Models do not travel: their weights are published, and their folders are opened where they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from panoply import given, session
from panoply.errors import PanoplyError
from panoply.files import BadFile, read_bytes
from panoply.planning import Plan
from panoply.rewards import here

MOST = 2**30
"""Bytes of files that travel with a plan."""
_FILE = re.compile(r"(?P<before>(?:own:|agent:)?)(?P<path>/[^\0]*?)(?P<after>(?::[^/]*)?)", re.DOTALL)
"""A file as settings name it: alone, or with the function in it that is meant."""


def packed(plan: Plan) -> dict[str, Any]:
    """All of a plan as plain values, to be `unpacked` anywhere."""
    if (why := session.missing(plan)) is not None:
        raise PanoplyError(why)
    for word in plan.world_options.get("rewards", ()):
        if here.is_here(word):
            raise PanoplyError(
                f"The reward function '{word.partition(':')[2]}' lives in this process, where others cannot ask it: "
                "put it into a file, --reward FILE.py:NAME."
            )
    data = plan.to_json()
    return {"plan": data, "files": files_in(data), "seat": plan.seat, "gifts": sorted(plan.gifts)}


def unpacked(parcel: Mapping[str, Any]) -> Plan:
    """The plan that was packed; its plug-ins are loaded here."""
    plan = Plan.from_json(Unpacked(parcel["files"]).here(parcel["plan"]))
    return dataclasses.replace(plan, seat=parcel["seat"], gifts=frozenset(parcel["gifts"]))


def files_in(data: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that a plan, or a recipe's, names as JSON, by their paths. Folders of models are not among them."""
    files: dict[str, bytes] = {}
    _walked(data, lambda found: _take(found, files))
    return files


class Unpacked:
    """Files that came along, laid down where they are not there already."""

    def __init__(self, files: Mapping[str, bytes]):
        self.files = files
        self.laid: dict[str, str] = {}
        """Where each lies now, by where it lay."""

    def here(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Values that name the files where they lie here."""
        found: dict[str, Any] = _walked(data, self._put)
        return found

    def back(self, text: str) -> str:
        """A text that names them where they lay before."""
        for before, now in self.laid.items():
            text = text.replace(now, before)
        return text

    def _put(self, found: re.Match[str]) -> str:
        path = found["path"]
        if path not in self.files or _same(path, self.files[path]):
            return found[0]
        digest = hashlib.sha256(self.files[path]).hexdigest()[:16]
        target = given.room() / digest / Path(path).name
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.files[path])
        self.laid[path] = str(target)
        return f"{found['before']}{target}{found['after']}"


def _take(found: re.Match[str], files: dict[str, bytes]) -> str:
    """Read a file that is named, once."""
    path = found["path"]
    if path not in files and os.path.isfile(path):
        if sum(map(len, files.values())) + os.path.getsize(path) > MOST:
            raise PanoplyError(
                f"{path} is too large to travel ({os.path.getsize(path) / 2**30:.1f} GiB): a plan takes files of at "
                f"most {MOST / 2**30:.0f} GiB to its workers."
            )
        files[path] = read_bytes(path)
    return found[0]


def _same(path: str, content: bytes) -> bool:
    try:
        return read_bytes(path) == content
    except BadFile:
        return False


def _walked(value: Any, change: Callable[[re.Match[str]], str]) -> Any:
    """A value of JSON with every string changed that may name a file."""
    if isinstance(value, str):
        found = _FILE.fullmatch(value)
        return change(found) if found else value
    if isinstance(value, list | tuple):
        return [_walked(inner, change) for inner in value]
    if isinstance(value, Mapping):
        return {key: _walked(inner, change) for key, inner in value.items()}
    return value
