"""Preferences in the forms of others: what a line says, what is refused, what is counted, what pairs then learn."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
import torch.nn.functional as F

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.rollout.text import Collector
from panoply.slots.data.rated import rated
from panoply.slots.loss.pairs import logistic
from panoply.slots.loss.values import bradley_terry
from panoply.worlds.text.forms import Row, brought, rows_of, shared
from panoply.worlds.text.jsonl import Jsonl

PAIR = {"prompt": "Sky?", "chosen": "blue", "rejected": "green"}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def one(line: dict[str, Any], **more: Any) -> Row:
    (row,) = rows_of(1, line, more.get("rated", "pairs"), more.get("rating", ""), Counter())
    return row


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms") / "model"
    tokenizer = Tokenizer.of_characters("abcdefghijklmnopqrstuvwxyzHSYN?: ;0123")
    TextPolicy.fresh(DecoderConfig(tokenizer.vocab_size, width=8, layers=1, heads=1), tokenizer, 3).save(
        folder
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def world_of(folder: Path, model: Path, lines: list[dict[str, Any]], **more: Any) -> Jsonl:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Jsonl(data=str(file), model=str(model), longest=32, **more)


# ------------------------------------------------------------------ what a line says


@pytest.mark.parametrize(
    ("line", "form", "prompt", "answers"),
    [
        (PAIR, "pairs", "Sky?", ("blue", "green")),
        ({"chosen": "It is blue.", "rejected": "It is black."}, "pairs with implicit prompts", "It is",
         (" blue.", " black.")),
        ({"chosen": [USER, says("yo")], "rejected": [USER, says("no")]}, "chat pairs with implicit prompts", [USER],
         ("yo", "no")),
        ({"prompt": "Hi", "chosen": [SYSTEM, USER, says("yo")], "rejected": [SYSTEM, USER, says("no")]},
         "chat pairs with implicit prompts", [SYSTEM, USER], ("yo", "no")),
        ({"prompt": [USER], "chosen": [says("yo")], "rejected": [says("no")]}, "chat pairs", [USER], ("yo", "no")),
        ({"prompt": [USER], "chosen": [USER, says("yo")], "rejected": [USER, says("no")]}, "chat pairs", [USER],
         ("yo", "no")),
        ({"prompt": "Hi", "chosen": [says("yo")], "rejected": [says("no")]}, "chat pairs", [USER], ("yo", "no")),
        ({"prompt": [USER], "chosen": "yo", "rejected": "no"}, "pairs", [USER], ("yo", "no")),
    ],
)  # fmt: skip
def test_pairs_of_every_form_are_a_prompt_and_two_answers(
    line: dict[str, Any], form: str, prompt: Any, answers: tuple[str, str]
) -> None:
    row = one(line)
    assert (row.form, row.prompt, (row.answers["chosen"], row.answers["rejected"])) == (form, prompt, answers)
    assert not row.wrong


@pytest.mark.parametrize(
    ("a", "b", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue.", "The sky is black.", "The sky is"),
        ("2+2=4", "2+2=5", "2+2="),
        ("Q?\nblue", "Q?\nblack", "Q?\n"),
        ("Yes", "Yes, sir", ""),
        ("So. Yes.", "So. Yes. Sir.", "So. Yes"),
        ("空は青い", "空は緑だ", "空は"),
        (
            "\n\nHuman: Hi\n\nAssistant: I am",
            "\n\nHuman: Hi\n\nAssistant: I was",
            "\n\nHuman: Hi\n\nAssistant:",
        ),
    ],
)
def test_what_two_texts_share_ends_with_a_word_or_a_turn_and_leaves_an_answer(
    a: str, b: str, prompt: str
) -> None:
    assert a[: shared(a, b)] == prompt
    assert shared(a, b) == shared(b, a) < min(len(a), len(b))


def test_single_answers_and_conversations() -> None:
    row = one({"prompt": "Sky?", "completion": [says("green")], "label": False})
    assert (row.form, row.answers, row.good) == ("labelled answers", {"completion": "green"}, False)
    assert one({"prompt": "Sky?", "completion": "blue", "label": 1}).good
    talk = one({"messages": [USER, says("yo")]})
    assert (talk.prompt, talk.answers) == ([USER], {"completion": "yo"})
    assert one({"messages": [USER]}).prompt == [USER]


def test_votes_by_name_are_a_pair_a_person_and_others_a_probability() -> None:
    dropped: Counter[str] = Counter()
    line = {**PAIR, "votes": {"ann": 1, "bo": "rejected", "cy": "tie"}}
    ann, bo = rows_of(1, line, "pairs", "", dropped)
    assert (ann.annotator, ann.answers["chosen"]) == ("ann", "blue")
    assert (bo.annotator, bo.answers["chosen"], bo.answers["rejected"]) == ("bo", "green", "blue")
    assert dropped == {"ties": 1}
    assert one({**PAIR, "votes": [1, True, 0, "tie"]}).p == 0.625
    turned = one({**PAIR, "p": 0.25})
    assert (turned.p, turned.answers["chosen"]) == (0.75, "green"), "the likelier answer is the chosen one"
    assert one({**PAIR, "annotator": 7}).annotator == one({**PAIR, "annotator_id": "7"}).annotator == "7"


def test_null_is_not_there_as_data_sets_of_several_forms_have_it() -> None:
    empty = {"chosen": None, "rejected": None, "label": None, "votes": None, "p": None, "completions": None}
    assert one({**empty, "prompt": "Sky?", "completion": "blue"}).form == "answers"
    assert one({**empty, "completion": None, "messages": [USER, says("yo")]}).form == "conversations"
    assert one({**empty, **PAIR, "completion": None}) == replace(
        one(PAIR), line={**empty, **PAIR, "completion": None}
    )


ODD = [None, True, 0, -1, 1.5, 10**400, "", "x", "\ud800", [], [None], ["a"], [[]], [{}], {}, {"a": 1}, {"a": {}},
       [{"role": "assistant"}], [{"role": "assistant", "content": [{"type": "text"}]}], [{"response": ["a"]}],
       [{"response": "a", "annotations": ["b"]}, {"response": "b", "score": True}]]  # fmt: skip


FIELDS = (
    "prompt chosen rejected completion label messages votes p margin annotator score_chosen score_rejected completions "
    "ratings"
)


@pytest.mark.parametrize("field", FIELDS.split())
def test_whatever_stands_in_a_field_is_text_or_refused(field: str) -> None:
    """No line of any shape is more than refused, and every answer that is taken is text."""
    bases: list[dict[str, Any]] = [{}, PAIR, {"completion": "a", "prompt": "b"}, {"messages": [USER, says("yo")]},
                                   {"prompt": "x", "completions": ["a", "b"], "ratings": [1, 2]}]  # fmt: skip
    for base in bases:
        for odd in ODD:
            for kind in ("pairs", "lists"):
                for row in rows_of(1, {**base, field: odd}, kind, "", Counter()):  # type: ignore[arg-type]
                    told = [*row.answers.values(), *(text for text, _ in row.rated)]
                    assert all(isinstance(text, str) and "\ud800" not in text for text in told)
                    assert row.prompt is None or isinstance(row.prompt, str | list)
                    assert not (row.wrong and row.answers)


RATED = {
    "instruction": "Colour?",
    "completions": [
        {"response": "red", "overall_score": 9, "annotations": {"help": {"Rating": "2"}, "truth": {"Rating": "N/A"}}},
        {"response": "blue", "annotations": {"help": {"Rating": "5"}, "truth": {"Rating": "3"}}},
        {"response": "red", "fine-grained_score": 1.0},
        {"response": "ochre", "fine-grained_score": 4.0, "annotations": {"help": {"Rating": "1"}}},
        {"response": "?", "annotations": {"help": {"Rating": "N/A"}}},
    ],
}  # fmt: skip


def test_rated_answers_are_pairs_of_different_ratings_or_lists() -> None:
    dropped: Counter[str] = Counter()
    rows = rows_of(1, RATED, "pairs", "", dropped)
    assert [(r.answers["chosen"], r.answers["rejected"]) for r in rows] == [("red", "blue"), ("red", "ochre")]
    assert dropped == {"ties": 1, "answers without a rating": 1, "answers given twice": 1}
    listed = one(RATED, rated="lists", rating="help")
    assert listed.rated == (("blue", 5.0), ("red", 2.0), ("ochre", 1.0))
    best = one(RATED, rated="best", rating="help")
    assert best.answers["chosen"] == "blue"
    assert best.answers["rejected"] in ("red", "ochre")
    beside = {"instruction": "Number?", "generations": ["a", "b"], "ratings": [1, 2], **PAIR}
    assert one(beside).answers["chosen"] == "blue", "a pair that is there already is taken as it is"
    assert one(beside, rated="lists").rated == (("b", 2.0), ("a", 1.0))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({**PAIR, "p": 1.4}, "has the preference p = 1.4, and a probability is from 0 to 1"),
        ({**PAIR, "p": -0.1}, "has the preference p = -0.1"),
        ({**PAIR, "p": "high"}, "has 'high' in 'p', which is no number"),
        ({**PAIR, "votes": []}, "has no vote in 'votes'"),
        ({**PAIR, "votes": [2]}, "has the vote 2, and a vote is 1 or 'chosen'"),
        ({**PAIR, "votes": [1], "p": 0.5}, "has 'p' and 'votes'"),
        ({**PAIR, "votes": {"a": 1}, "annotator": "b"}, "has 'annotator' and votes by name"),
        ({**PAIR, "annotator": 1.5}, "has the annotator 1.5"),
        ({**PAIR, "margin": -1}, "has the margin -1"),
        ({**PAIR, "score_chosen": 1, "score_rejected": 2}, "with 'score_chosen' 1 to one with 2: swap"),
        ({**PAIR, "chosen-rating": 1.0, "rejected-rating": 2.0}, "with 'chosen-rating' 1 to one with 2"),
        ({**PAIR, "prompt": ""}, "has no field 'prompt' with text or messages"),
        ({"chosen": "yes", "rejected": "no"}, "share no beginning"),
        ({"chosen": [says("a")], "rejected": [says("b")]}, "share no first message"),
        ({"prompt": "x", "chosen": "a", "rejected": [says("b")]}, "write both alike"),
        ({"prompt": [USER], "chosen": [says("a"), USER, says("b")], "rejected": [says("c")]},
         "has 3 messages in 'chosen' after those of the prompt"),
        ({"prompt": "x", "completion": "a", "label": "yes"}, "has the label 'yes'"),
        ({"prompt": "x", "completion": "a", "label": 0.5}, "has the label 0.5"),
        ({"prompt": "x", "completions": ["a", "b"], "labels": [True, False]}, "has no rating in 'completions'"),
        ({"prompt": "x", "completions": ["a", "b"], "ratings": [1]}, "has 2 answers in 'completions' and 1 ratings"),
        ({"prompt": "x", "completions": [{"model": "m"}]}, "has no text in answer 1 of 'completions'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_line_is_said_with_its_number(
    line: dict[str, Any], sentence: str, model: Path, tmp_path: Path
) -> None:
    assert sentence in one(line).wrong
    good = {"prompt": "x", "completion": "a", "label": True} if "label" in line else PAIR
    world = world_of(tmp_path, model, [good, line])
    needs = frozenset({"world:teacher"} if "label" in line else {"world:teacher", "world:pairs"})
    world_of(tmp_path, model, [good]).check(needs)
    world = world_of(tmp_path, model, [good, line])
    with pytest.raises(
        PanoplyError, match=r"^Line 2 of .*data\.jsonl has .*|^Line 2 of .* prefers "
    ) as refused:
        world.check(needs)
    assert sentence in str(refused.value)
    assert str(refused.value).endswith(": mend the line, or leave it out.")


def test_what_was_found_and_left_out_is_counted() -> None:
    lines: list[dict[str, Any]] = [
        {**PAIR, "annotator": "ann"},
        {**PAIR, "annotator": "bo", "p": 0.7, "margin": 2},
        {**PAIR, "rejected": "blue"},
        {**PAIR, "chosen_score": 3, "rejected_score": 3},
    ]
    found = brought(list(enumerate(lines, 1)))
    assert found.said() == (
        "4 lines, pairs; 2 pairs of 1 prompts; 2 annotators; 1 with a probability; 1 with a margin; "
        "left out: 1 pair of the same answer twice; left out: 1 tie"
    )
    listed = brought([(1, RATED)], "lists").said()
    assert "1 lists of 3 answers" in listed
    labels = [{"prompt": "x", "completion": "a", "label": label} for label in (True, False, True)]
    assert "2 good and 1 bad answers" in brought(list(enumerate(labels))).said()


def test_a_file_of_ties_alone_is_refused(model: Path, tmp_path: Path) -> None:
    world = world_of(tmp_path, model, [{**PAIR, "rejected": "blue"}])
    with pytest.raises(PanoplyError, match=r"Nothing is left of .*: left out are 1 pair of the same answer"):
        world.check(frozenset({"world:pairs"}))


# ------------------------------------------------------------------ what pairs then learn


def collected(folder: Path, model: Path, lines: list[dict[str, Any]], n: int, **more: Any) -> Any:
    world = world_of(folder, model, lines, held_out_share=0.001, **more)
    collect = Collector(world, TextPolicy.load(model), 0)
    return collect, collect.teacher_pairs(collect.tasks(n))


def test_uncertain_pairs_are_turned_round_as_often_as_people_would(model: Path, tmp_path: Path) -> None:
    lines = [{**PAIR, "p": 0.75}, {**PAIR, "prompt": "Sea?", "annotator": "bo", "margin": 2}]
    collect, made = collected(tmp_path, model, lines, 200)
    soft = made.pairs.tensor("annotator") < 0
    p = made.pairs.tensor("p")
    assert p[~soft].unique().tolist() == [1.0]
    assert set(p[soft].tolist()) == {0.75, 0.25}
    assert abs(float((p[soft] == 0.25).float().mean()) - 0.25) < 0.13  # three deviations
    assert made.pairs.tensor("margin")[~soft].unique().tolist() == [2.0]
    blue = collect.world.tokenizer.encode("blue")
    first = made.by("episode").first(made["action"])
    of = dict(zip(made.by("episode").keys.tolist(), first.tolist(), strict=True))
    for chosen, likely in zip(made.pairs.tensor("chosen").tolist(), p.tolist(), strict=True):
        assert (of[chosen] == blue[0]) == (likely >= 0.5), "p goes with the answers"


def test_cut_answers_that_become_the_same_are_no_pair(model: Path, tmp_path: Path) -> None:
    long = {"prompt": "x", "chosen": "a" * 40 + "b", "rejected": "a" * 40 + "c"}
    _, made = collected(tmp_path, model, [PAIR, long], 4, too_long="cut")
    assert made.pairs.rows == 2


@pytest.mark.parametrize("gamma", [0.0, 0.7])
def test_a_probability_weighs_both_orders_and_turning_changes_nothing(gamma: float) -> None:
    scores = [0.3, -1.1, 0.8, 0.2]
    p = torch.tensor([0.9, 0.4], dtype=torch.float64)

    def loss(order: list[tuple[int, int]], p: torch.Tensor) -> torch.Tensor:
        made = kit.hand(pairs=order, episode=[0, 1, 2, 3], group=[0, 0, 1, 1])
        assert made.pairs is not None
        held = kit.batch(made.with_pairs(made.pairs.plus({"p": p})), logp=scores)
        return logistic(beta=0.5, smoothing=0.1, gamma=gamma, to=None)(held)[0]

    def plain(gap: float) -> float:
        m = torch.tensor(0.5 * gap - gamma, dtype=torch.float64)
        return float(-0.9 * F.logsigmoid(m) - 0.1 * F.logsigmoid(-m))

    wanted = [0.9 * plain(1.4) + 0.1 * plain(-1.4), 0.4 * plain(0.6) + 0.6 * plain(-0.6)]
    assert loss([(0, 1), (2, 3)], p).tolist() == pytest.approx(wanted, rel=1e-12)
    assert loss([(1, 0), (3, 2)], 1 - p).tolist() == pytest.approx(wanted, rel=1e-12)


def test_a_reward_model_leads_by_the_margin_and_weighs_both_orders() -> None:
    said = [0.3, -1.1, 0.8, 0.2]
    made = kit.hand(pairs=[(0, 1), (2, 3)], episode=[0, 1, 2, 3], group=[0, 0, 1, 1])
    assert made.pairs is not None
    columns = {"p": torch.tensor([0.9, 1.0]).double(), "margin": torch.tensor([0.0, 0.5]).double()}
    value, _ = bradley_terry()(kit.batch(made.with_pairs(made.pairs.plus(columns)), judged=said))
    soft = -0.9 * F.logsigmoid(torch.tensor(1.4)) - 0.1 * F.logsigmoid(torch.tensor(-1.4))
    assert value.tolist() == pytest.approx([float(soft), float(-F.logsigmoid(torch.tensor(0.1)))], rel=1e-6)


def test_lists_keep_best_and_worst_and_their_ratings(model: Path, tmp_path: Path) -> None:
    line = {"prompt": "x", "completions": list("abcdef"), "ratings": [3, 1, 6, 2, 5, 4]}
    world = world_of(tmp_path, model, [line, {**line, "prompt": "y"}], rated="lists", held_out_share=0.001)
    collect = Collector(world, TextPolicy.load(model), 0)
    made = rated(batch=5, answers=4)(collect)
    worth = made.lists.ragged("worth").tolist()
    assert [(w[0], w[-1], len(w), w == sorted(w, reverse=True)) for w in worth] == [(6.0, 1.0, 4, True)] * 5
    assert len({tuple(w) for w in worth}) > 1, "others by lot, each time"
    first = made.by("episode").first(made["action"])
    assert world.tokenizer.decode(first[made.lists.ragged("episodes")[0]].tolist())[0] == "c"
    assert made.by("group").keys.tolist() == [0, 1, 2, 3, 4]
    assert rated(batch=5, answers=4)(collect).by("group").keys.tolist() == [5, 6, 7, 8, 9]


def test_the_plan_says_what_was_found(model: Path, tmp_path: Path) -> None:
    rows = [
        {"chosen": [USER, says(f"yo {i}")], "rejected": [USER, says("no")], "votes": [1, 0, 1]}
        for i in range(4)
    ]
    file = world_of(tmp_path, model, rows).data
    text = str(pp.plan("dpo", data=file, model=str(model)))
    assert (
        "4 lines, chat pairs with implicit prompts; 4 pairs of 1 prompts; 4 with a probability"
        in " ".join(text.split())
    )
