"""Text to token ids and back, over the `tokenizers` library; the same files as transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from panoply.errors import PanoplyError, plain
from panoply.files import brief, is_file, parse_json, read_bytes

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a folder may hold of a tokenizer. All are kept as they were read and written back unchanged."""


class Tokenizer:
    """`encode` adds nothing and `decode` leaves out nothing: ids are the record, text a rendering of them.

    `encode_prompt` is for text that stands at the very beginning.
    """

    def __init__(self, files: Mapping[str, bytes]):
        self.files = dict(files)
        self.settings: dict[str, Any] = self._object("tokenizer_config.json")
        self._older = self._object("special_tokens_map.json")
        """Where old folders keep the names of special tokens."""
        self.chat_template = self._template()
        self._core = tokenizers.Tokenizer.from_str(self.files["tokenizer.json"].decode())
        self._core.no_padding()
        self._core.no_truncation()
        self.special_tokens = {
            token.content: i for i, token in self._core.get_added_tokens_decoder().items() if token.special
        }

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        folder = Path(folder)
        if not is_file(folder / "tokenizer.json"):
            raise PanoplyError(f"{plain(folder)} has no tokenizer.json.")
        files = {name: read_bytes(folder / name) for name in FILES if is_file(folder / name)}
        try:
            return cls(files)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as problem:  # the library raises bare Exception, and panics are not even that
            said = plain(problem).rstrip(".")
            raise PanoplyError(f"The tokenizer in {plain(folder)} cannot be read: {said}.") from None

    @classmethod
    def of_characters(
        cls,
        alphabet: str,
        specials: Sequence[str] = ("<pad>", "<end>"),
        pad: str | None = None,
        eos: str | None = None,
    ) -> Tokenizer:
        """One token per character, ids in the order given, specials first.

        Unless named, the first special is padding and the last ends a text.
        """
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

        if len(set(alphabet)) < len(alphabet):
            raise PanoplyError("The alphabet names a character twice.")
        vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
        core = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=""))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        core.decoder = decoders.Fuse()
        core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if specials:
            settings |= {"pad_token": pad or specials[0], "eos_token": eos or specials[-1]}
        files = {
            "tokenizer.json": core.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(settings, indent=2),
        }
        return cls({name: text.encode() for name, text in files.items()})

    def encode(self, text: str) -> list[int]:
        try:
            return list(self._core.encode(text, add_special_tokens=False).ids)
        except Exception:  # the library raises bare Exception
            known = self._core.get_vocab()
            strange = next((c for c in text if c not in known), text)
            raise PanoplyError(f"The tokenizer has no token for {strange!r}.") from None

    def encode_prompt(self, text: str) -> list[int]:
        """A plain text as `transformers` gives it to a model: with what belongs before every text, such as BOS.

        The post-processor in `tokenizer.json` says so, and like transformers 5 nothing else (`add_bos_token` in
        the settings is passed over). What it puts at the end is left out, since a prompt is to be continued.
        Chat templates write such tokens themselves.
        """
        ids = self.encode(text)
        whole = list(self._core.encode(text, add_special_tokens=True).ids)
        places = range(len(whole) - len(ids) + 1)
        start = next((i for i in places if whole[i : i + len(ids)] == ids), 0)
        return [*whole[:start], *ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._core.decode(list(ids), skip_special_tokens=False))

    def token(self, ident: int) -> str:
        """How the vocabulary spells one id."""
        return str(self._core.id_to_token(ident))

    def id(self, token: str) -> int:
        """The id of a token named exactly, such as `<end>`."""
        is_text = token.isascii() or token.encode(errors="ignore").decode() == token
        ident = self._core.token_to_id(token) if is_text else None
        if ident is None:
            raise PanoplyError(f"The tokenizer has no token {token!r}.")
        return int(ident)

    def differs(self, other: Tokenizer) -> str:
        """In what the ids of this one mean something else to another, in words; nothing where all mean the same.

        The other may know more tokens, such as one that was added for padding.
        """
        theirs = other._core.get_vocab(with_added_tokens=True)
        for token, ident in self._core.get_vocab(with_added_tokens=True).items():
            if theirs.get(token) != ident:
                there = f"{theirs[token]} there" if token in theirs else "not known there"
                return f"the token {plain(token)!r} is {ident} here and {there}"
        return ""

    @property
    def ids(self) -> list[int]:
        """Of all tokens, those that were added included."""
        return list(self._core.get_vocab(with_added_tokens=True).values())

    @property
    def vocab_size(self) -> int:
        return int(self._core.get_vocab_size(with_added_tokens=True))

    @cached_property
    def bos_id(self) -> int | None:
        return self._named("bos_token")

    @cached_property
    def eos_id(self) -> int | None:
        return self._named("eos_token")

    @property
    def pad_id(self) -> int | None:
        """The padding token's id, or where there is none the end token's."""
        pad = self._named("pad_token")
        return self.eos_id if pad is None else pad

    @property
    def roles(self) -> dict[str, int]:
        """The ids of tokens with a role, as `config.json` names them."""
        found = {"bos_token_id": self.bos_id, "eos_token_id": self.eos_id, "pad_token_id": self.pad_id}
        return {name: ident for name, ident in found.items() if ident is not None}

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)

    def _named(self, role: str) -> int | None:
        """Either a plain string or the long form with its `content`; old folders keep it in another file."""
        value = self.settings.get(role)
        value = self._older.get(role) if value is None else value
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise PanoplyError(f"The tokenizer's {role} is text, not {brief(value)}.")
        return None if value is None else self.id(value)

    def _object(self, name: str) -> dict[str, Any]:
        return parse_json(self.files.get(name, b"{}"), name, dict, finite=False)

    def _template(self) -> str | None:
        """The chat template, from the file of its own or the settings; of several by name, the default one."""
        if "chat_template.jinja" in self.files:
            return self.files["chat_template.jinja"].decode()
        template = self.settings.get("chat_template")
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None
