"""Chat templates: rendered in batches, and refused where they do not end, take too much or cannot be read."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from panoply.errors import PanoplyError
from panoply.policies import chat
from panoply.policies.chat import Refused, check_append_only, render, render_all
from panoply.policies.tokenizer import Tokenizer

PLAIN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def tokenizer(template: str) -> Tokenizer:
    files = dict(Tokenizer.of_characters("ab").files)
    settings = json.loads(files["tokenizer_config.json"])
    files["tokenizer_config.json"] = json.dumps({**settings, "chat_template": template}).encode()
    return Tokenizer(files)


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_batches_come_back_in_order() -> None:
    texts = render_all(tokenizer(PLAIN), [asked(str(i)) for i in range(2 * chat.BATCH + 3)])
    assert texts == [f"u:{i};a:" for i in range(2 * chat.BATCH + 3)]
    assert render(tokenizer(PLAIN), asked("x"), reply=False) == "u:x;"
    assert render(tokenizer("{{ eos_token }}{{ messages | tojson }}"), []) == "<end>[]"
    check_append_only(tokenizer(PLAIN))


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (ENDLESS, r"did not end within 0\.5 s"),
        ("{{ messages[0].content * 2 ** 40 }}", "MemoryError"),
        ("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "answer is longer than"),
        ("{{ 10 ** (10 ** 9) }}", r"cannot be read: it took longer than 2 s"),
        ("{% for %}", "cannot be read: TemplateSyntaxError"),
        (
            "{{ raise_exception('only the user may speak') }}",
            "refuses a conversation: only the user may speak",
        ),
        ("{{ messages.__class__.__mro__ }}", "refuses a conversation"),
        ("{{ messages[0].nothing.at_all }}", "refuses a conversation"),
    ],
)
def test_templates_that_do_not_end_or_do_not_work(
    template: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.5 if template == ENDLESS else 20.0)
    monkeypatch.setattr(chat, "START", 2.0 if "10 **" in template else 30.0)
    with pytest.raises(PanoplyError, match=sentence):
        render(tokenizer(template), asked("x"))


def test_the_conversation_that_is_refused_is_told() -> None:
    moody = tokenizer("{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}")
    with pytest.raises(Refused) as raised:
        render_all(moody, [asked("good")] * (chat.BATCH + 1) + [asked("bad")])
    assert raised.value.number == chat.BATCH + 1


def test_threads_render_beside_one_another_and_after_one_has_ended() -> None:
    """A process ends with the thread that started it, and must not be another's."""
    said = tokenizer(PLAIN)

    def many(name: str) -> list[str]:
        return [render(said, asked(f"{name}{i}")) for i in range(100)]

    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(many, "xy"))
        assert found == [[f"u:{name}{i};a:" for i in range(100)] for name in "xy"]
        assert render(said, asked("z")) == "u:z;a:"
