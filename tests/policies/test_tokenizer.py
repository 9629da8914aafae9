"""Character tokenizers, exact decoding, and the files transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from panoply.errors import PanoplyError
from panoply.policies.tokenizer import Tokenizer

ALPHABET = "0123456789+*=$ \n#é"


def test_one_token_a_character_in_the_order_given() -> None:
    tokenizer = Tokenizer.of_characters(ALPHABET)
    assert tokenizer.encode("01<end>") == [2, 3, 1]
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, len(ALPHABET) + 2)
    assert tokenizer.special_tokens == {"<pad>": 0, "<end>": 1}


@pytest.mark.parametrize("text", ["", "12 + 3 =  15\n\n#é", "<pad>1<end>$ ", " 1", "1 "])
def test_decoding_is_exact(text: str) -> None:
    tokenizer = Tokenizer.of_characters(ALPHABET)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_opens_what_is_saved(tmp_path: Path) -> None:
    import transformers

    tokenizer = Tokenizer.of_characters(ALPHABET, ["<pad>", "<sep>", "<end>"])
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "1 2\n3<sep>+<end>"
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.pad_token_id, theirs.eos_token_id) == (tokenizer.pad_id, tokenizer.eos_id) == (0, 2)
    again = Tokenizer.load(tmp_path)
    assert again.files == tokenizer.files
    assert again.encode(text) == tokenizer.encode(text)


def test_settings_are_read_in_both_spellings_and_kept_verbatim(tmp_path: Path) -> None:
    Tokenizer.of_characters("ab").save(tmp_path)
    settings = '{"eos_token": {"content": "<end>", "lstrip": false},  "chat_template": "{{ x }}"}'
    (tmp_path / "tokenizer_config.json").write_text(settings)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_id == tokenizer.pad_id == 1
    assert tokenizer.bos_id is None
    assert tokenizer.chat_template == "{{ x }}"
    tokenizer.save(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer_config.json").read_text() == settings


def test_errors_are_sentences(tmp_path: Path) -> None:
    tokenizer = Tokenizer.of_characters("ab")
    with pytest.raises(PanoplyError, match="no token for 'x'"):
        tokenizer.encode("abx")
    with pytest.raises(PanoplyError, match="no token '<sep>'"):
        tokenizer.id("<sep>")
    with pytest.raises(PanoplyError, match="twice"):
        Tokenizer.of_characters("aba")
    with pytest.raises(PanoplyError, match="no tokenizer.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PanoplyError, match="cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("post_processor", "settings", "expected"),
    [
        (None, {}, [3, 4]),
        ("<bos> $A", {}, [1, 3, 4]),
        ("<bos> $A", {"add_bos_token": False}, [1, 3, 4]),
        (None, {"add_bos_token": True}, [3, 4]),
    ],
)
def test_a_plain_prompt_begins_as_transformers_begins_it(
    tmp_path: Path, post_processor: str | None, settings: dict[str, bool], expected: list[int]
) -> None:
    folder = with_bos(tmp_path, post_processor, settings)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    assert ours.encode_prompt("ab") == expected == theirs("ab").input_ids
    assert ours.encode("ab") == [3, 4]


def test_a_prompt_is_not_ended(tmp_path: Path) -> None:
    """What a post-processor puts after a text would keep a policy from going on."""
    folder = with_bos(tmp_path, "<bos> $A <end>", {})
    assert Tokenizer.load(folder).encode_prompt("ab") == [1, 3, 4]


def with_bos(folder: Path, post_processor: str | None, settings: dict[str, bool]) -> Path:
    """The tokens <pad> <bos> <end> a b, and what is said to go around a text."""
    made = Tokenizer.of_characters("ab", ["<pad>", "<bos>", "<end>"])
    core = tokenizers.Tokenizer.from_str(made.files["tokenizer.json"].decode())
    if post_processor is not None:
        core.post_processor = TemplateProcessing(
            single=post_processor, special_tokens=[("<bos>", 1), ("<end>", 2)]
        )
    made.save(folder)
    core.save(str(folder / "tokenizer.json"))
    said = {**made.settings, "bos_token": "<bos>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("tokenizer.json", b"{", "cannot be read"),
        ("tokenizer.json", b"\xff\xfe", "cannot be read"),
        ("tokenizer.json", b"[" * 100_000, "cannot be read"),
        (
            "tokenizer_config.json",
            b"[1]",
            "tokenizer_config.json cannot be used: it is an object, not a list of 1",
        ),
        ("tokenizer_config.json", b"{" * 100_000, "tokenizer_config.json is"),
        ("special_tokens_map.json", b"7", "special_tokens_map.json cannot be used"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
    ],
)
def test_files_that_are_no_tokenizers(tmp_path: Path, file: str, content: bytes, sentence: str) -> None:
    Tokenizer.of_characters(ALPHABET).save(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(PanoplyError, match=sentence):
        Tokenizer.load(tmp_path)


def test_a_special_token_that_is_no_text(tmp_path: Path) -> None:
    Tokenizer.of_characters(ALPHABET).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 3}')
    with pytest.raises(PanoplyError, match="eos_token is text, not 3"):
        _ = Tokenizer.load(tmp_path).eos_id
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\udcff"}')  # half a character
    with pytest.raises(PanoplyError, match="no token"):
        _ = Tokenizer.load(tmp_path).eos_id


def test_of_several_templates_the_default_one(tmp_path: Path) -> None:
    Tokenizer.of_characters(ALPHABET).save(tmp_path)
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.load(tmp_path).chat_template == "d"
