"""Character tokenizers, exact decoding, and the files transformers reads."""

from __future__ import annotations

from pathlib import Path

import pytest

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
