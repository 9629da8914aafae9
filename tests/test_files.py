"""Reading files of others: whatever is wrong with one, a sentence that names file, line and field, and at once."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pytest
import torch
from safetensors.torch import save_file

from panoply import files
from panoply.errors import plain
from panoply.files import BadFile, NoFile, copy_folder


class Facts(TypedDict):
    bytes: int
    share: NotRequired[float | None]


class Listing(TypedDict):
    files: dict[str, Facts]
    words: NotRequired[list[str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "facts.json"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("\x00", "is not valid JSON"),
        ("[]", "it is an object, not a list of 0"),
        ("{}", "it lacks 'files'"),
        ('{"files": 3}', "files is an object, not 3"),
        ('{"files": {"a": {}}}', "files.a lacks 'bytes'"),
        ('{"files": {"a": {"bytes": "3"}}}', "files.a.bytes is a whole number, not '3'"),
        ('{"files": {"a": {"bytes": true}}}', "files.a.bytes is a whole number, not true"),
        ('{"files": {"a": {"bytes": 1e999}}}', "1e999 is not a number"),
        ('{"files": {"a": {"bytes": NaN}}}', "NaN is not a number"),
        ('{"files": {"a": {"bytes": 1' + "0" * 400 + "}}}", "more than 64 bits"),
        ('{"files": {"a": {"bytes": 1' + "0" * 5000 + "}}}", "is not valid JSON"),
        (
            '{"files": {"a": {"bytes": 1, "share": "x"}}}',
            "files.a.share is a finite number or null, not 'x'",
        ),
        ('{"files": {}, "words": [1]}', "words[0] is text, not 1"),
        ('{"files": {"\\u001b[2J": 1}}', "files.\\x1b[2J is an object, not 1"),
        ("[" * 100_000, "nested too deep"),
        ('{"files": {}, "x": ' + "[" * 70 + "]" * 70 + "}", "nested too deep"),
    ],
)
def test_json_that_does_not_fit(text: str, says: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(BadFile) as told:
        files.read_json(file, Listing)
    assert str(file) in str(told.value)
    assert says in str(told.value)
    assert str(told.value).isprintable()


def test_json_that_fits(file: Path) -> None:
    held = {"files": {"a": {"bytes": 1, "share": None, "more": [1]}}, "words": ["x"]}
    file.write_text(json.dumps(held))
    assert files.read_json(file, Listing) == held
    file.write_text("Infinity")
    infinite: Any = files.read_json(file, Any, finite=False)
    assert infinite == float("inf")
    nested = json.loads("[" * 64 + "]" * 64)
    file.write_text(json.dumps(nested))
    assert files.read_json(file, Any) == nested


def test_bytes_that_are_no_text(file: Path) -> None:
    file.write_bytes(b'{"files": "\xff"}')
    with pytest.raises(BadFile, match="not text in UTF-8"):
        files.read_json(file, Listing)
    with pytest.raises(BadFile, match="not text in UTF-8: byte 11"):
        files.read_text(file)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


def _circle(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [_pipe, _socket, _device, _folder, _circle])
def test_no_regular_file(make: Callable[[Path], None], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once; a reader that waits for a pipe's writer would never come back."""
    monkeypatch.chdir(file.parent)
    make(file)
    for read in (
        lambda: files.read_json(file, Any),
        lambda: list(files.read_lines(file, Any)),
        lambda: files.read_tensors(file),
    ):
        with pytest.raises(BadFile, match="facts.json"):
            read()


def test_names_that_no_system_allows(tmp_path: Path) -> None:
    with pytest.raises(NoFile, match="There is no file"):
        files.read_bytes(tmp_path / "none")
    for name in ("x" * 5000, "a\0b", "\udcff"):
        with pytest.raises(BadFile) as told:
            files.read_bytes(tmp_path / name)
        assert str(told.value).isprintable()
        assert not files.is_file(tmp_path / name)
        assert not files.is_folder(tmp_path / name)
        with pytest.raises(BadFile):
            files.read_folder(tmp_path / name, "run")


def test_a_file_that_is_too_large(file: Path) -> None:
    file.write_bytes(b"12345")
    assert files.read_bytes(file, most=5) == b"12345"
    with pytest.raises(BadFile, match="larger than 4 bytes"):
        files.read_bytes(file, most=4)


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{}")
    assert files.read_folder(tmp_path / "run", "run", "run.json") == tmp_path / "run"
    with pytest.raises(NoFile, match="There is no run folder"):
        files.read_folder(tmp_path / "none", "run")
    with pytest.raises(BadFile, match=r"is not a run: it has no x\.json"):
        files.read_folder(tmp_path / "run", "run", "run.json", "x.json")
    with pytest.raises(BadFile, match="is not a run: it is a file"):
        files.read_folder(tmp_path / "run/run.json", "run")


class TestLines:
    def test_numbers_places_and_empty_lines(self, file: Path) -> None:
        file.write_bytes(b'{"bytes": 1}\n\n{"bytes": 2}')
        found = list(files.read_lines(file, Facts))
        assert [(x.number, x.start, x.end, x.value) for x in found] == [
            (1, 0, 13, {"bytes": 1}),
            (3, 14, 26, {"bytes": 2}),
        ]

    def test_a_last_line_torn_by_a_kill(self, file: Path) -> None:
        file.write_bytes(b'{"bytes": 1}\n{"bytes": 2}')
        assert [x.value["bytes"] for x in files.read_lines(file, Facts, growing=True)] == [1]
        assert [x.value["bytes"] for x in files.read_lines(file, Facts)] == [1, 2]

    @pytest.mark.parametrize("line", [b"{", b"[]", b'{"bytes": "x"}', b"\xff", b"[" * 9999, b"null"])
    def test_a_bad_line(self, line: bytes, file: Path) -> None:
        file.write_bytes(b'{"bytes": 1}\n' + line + b'\n{"bytes": 3}\n')
        with pytest.raises(BadFile, match="Line 2 of .*facts.json"):
            list(files.read_lines(file, Facts))
        told: list[BadFile] = []
        assert [x.number for x in files.read_lines(file, Facts, bad=told.append)] == [1, 3]
        assert len(told) == 1

    def test_from_a_place_on(self, file: Path) -> None:
        file.write_bytes(b'{"bytes": 1}\n{"bytes": 2}\n')
        with files.open_file(file) as stream:
            (found,) = files.lines_of(stream, "x", Facts, start=13)
        assert (found.start, found.end, found.value) == (13, 26, {"bytes": 2})


@pytest.mark.parametrize("to", ["/dev/zero", "/"])
def test_a_copy_of_a_folder_ends(to: str, tmp_path: Path) -> None:
    (tmp_path / "from/inside").mkdir(parents=True)
    (tmp_path / "from/inside/a").write_text("b")
    (tmp_path / "from/link").symlink_to(tmp_path / "from/inside/a")
    copy_folder(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to/inside/a").read_text() == (tmp_path / "to/link").read_text() == "b"
    (tmp_path / "from/inside/b").symlink_to(to)
    with pytest.raises(BadFile, match=r"b is not a file|b cannot be read"):
        copy_folder(tmp_path / "from", tmp_path / "again")


def test_yaml() -> None:
    assert files.parse_yaml("{a: [1, x]}", "--set") == {"a": [1, "x"]}
    assert files.parse_yaml("[" * 64 + "]" * 64, "--set")
    for deep in ("[" * 65 + "]" * 65, "[" * 5000, "- " * 5000, "? " * 5000):
        with pytest.raises(BadFile, match="--set is nested too deep"):
            files.parse_yaml(deep, "--set")
    laughs = "[" + ", ".join(f"&a{i} [*a{i - 1}, *a{i - 1}]" if i else "&a0 [1]" for i in range(40)) + "]"
    for text in ("{a: [", "2020-13-45", laughs, "!!python/object:os.system x", "x" * 200_000):
        with pytest.raises(BadFile, match="--set"):
            files.parse_yaml(text, "--set")


def test_tensors(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(3)}, file)
    whole = file.read_bytes()
    assert torch.equal(files.read_tensors(file)["a"], torch.arange(3))
    for bad in (b"", whole[:-1], whole[:9], b"\xff" * 8 + whole, b"hello, this is text"):
        file.write_bytes(bad)
        with pytest.raises(BadFile, match="is not a whole safetensors file"):
            files.read_tensors(file)


def test_plain() -> None:
    assert plain("a\x1b[2Jb\udcff π") == "a\\x1b[2Jb\\udcff π"
