"""program:shell, commands of which every argument is to matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from panoply.worlds.text.characters import Draws
from panoply.worlds.text.program_shell import (
    Shell,
    by_lot,
    command,
    follows,
    longest_minimal,
    productions,
    rewards,
)
from panoply.worlds.text.shell import ARGUMENTS, Command, minimality, run, similar, tree_of

TREE = tree_of(0)
FILES = {name: lines for name, (lines, _, _) in TREE.items()}


def ran(
    utility: str, arguments: str, files: str = "ab", pattern: str = "o", number: int = 2
) -> tuple[int, str]:
    found = run(Command(utility, files, pattern, number, arguments))
    return found.exit, found.output


def test_the_tree_has_twelve_files_of_which_two_are_hidden() -> None:
    assert len(TREE) == 12
    assert sorted(name for name in TREE if name.startswith(".")) == [".d", ".k"]


def test_utilities_do_what_they_do() -> None:
    a, b = FILES["a"], FILES["b"]
    assert ran("L", "")[1].split() == sorted(n for n in TREE if n[0] != ".")
    assert ran("L", "a")[1].split() == sorted(TREE)
    assert ran("L", "rFE") == (0, "b\na")
    assert ran("L", "lF") == (0, f"{sum(len(x) + 1 for x in a)} a")
    assert ran("H", "nF") == (0, "\n".join(a[:2]))
    assert ran("H", "cF") == (0, "\n".join(a)[:2])
    assert ran("H", "ncF") == ran("H", "cF")
    assert ran("H", "nFE") == (0, "==> a <==\n" + "\n".join(a[:2]) + "\n==> b <==\n" + "\n".join(b[:2]))
    assert ran("H", "qFE")[1] == "\n".join([*a, *b])
    assert ran("S", "FE") == (0, "\n".join(sorted([*a, *b])))
    assert ran("S", "rF") == (0, "\n".join(sorted(a, reverse=True)))
    assert ran("S", "uFF")[1].split("\n") == sorted(set(a))
    assert ran("G", "PF")[1].split("\n") == [x for x in a if "o" in x] or ran("G", "PF")[0] == 1
    assert (
        ran("G", "ivPF")[1].split("\n") == [x for x in a if "o" not in x.lower()] or ran("G", "ivPF")[0] == 1
    )


def test_numbers_are_sorted_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "panoply.worlds.text.shell.tree_of", lambda _: {"a": (("10", "9", "ox"), 0, 0), "b": ((), 0, 0)}
    )
    run.cache_clear()
    try:
        assert ran("S", "F")[1] == "10\n9\nox"
        assert ran("S", "nF")[1] == "ox\n9\n10"
        assert ran("G", "cPF")[1] == "1"
        assert ran("G", "nPF")[1] == "3:ox"
        assert ran("G", "PE")[0] == 1
    finally:
        run.cache_clear()


@pytest.mark.parametrize(
    ("utility", "arguments"),
    [("G", "F"), ("G", "FP"), ("S", ""), ("S", "P"), ("S", "aF"), ("H", "P"), ("R", "P FF"), ("L", "P"), ("T", "a")],
)  # fmt: skip
def test_what_fails_exits_with_another_code(utility: str, arguments: str) -> None:
    for one in arguments.split(" "):
        assert ran(utility, one)[0] != 0


def test_files_change_in_a_copy() -> None:
    gone = run(Command("R", "ab", "o", 2, "FE")).files
    assert {name for name, *_ in gone} == {*TREE} - {"a", "b"}
    assert ran("R", "fFF") == (0, "")
    assert ran("R", "vF") == (0, "removed 'a'")
    times = {name: (read, changed) for name, _, read, changed in run(Command("T", "ab", "o", 2, "aF")).files}
    assert times["a"] == (1, 0)
    assert times["b"] == (0, 0)
    assert "o" in {name for name, *_ in run(Command("T", "ab", "o", 2, "P")).files}
    assert "o" not in {name for name, *_ in run(Command("T", "ab", "o", 2, "cP")).files}
    assert tree_of(0) == TREE


def test_minimality_leaves_out_one_argument_after_another() -> None:
    """`rm -f a b`: without -f the same happens, without a file it does not: two of three matter."""
    assert minimality(Command("R", "ab", "o", 2, "fFE")) == pytest.approx(2 / 3)
    assert minimality(Command("R", "ab", "o", 2, "FE")) == 1
    assert minimality(Command("R", "ab", "o", 2, "vFE")) == 1
    assert minimality(Command("S", "ab", "o", 2, "rrF")) == pytest.approx(1 / 3)
    assert minimality(Command("S", "ab", "o", 2, "")) == 0
    assert minimality(Command("S", "ab", "o", 2, "aF")) == 0
    assert minimality(Command("T", "ab", "o", 2, "cP")) == 0.5, (
        "without a file touch says nothing, either, but fails"
    )
    assert minimality(Command("T", "ab", "o", 2, "cPP")) == 0, (
        "a command that changes no file has none to lose"
    )


def test_outputs_that_nearly_agree_are_alike() -> None:
    assert similar("x" * 40, "x" * 39 + "y", 0.95)
    assert not similar("x" * 40, "x" * 37 + "yyy", 0.95)
    assert similar("abc", "abc", 1.0)
    assert not similar("abc", "abd", 1.0)
    assert similar("kitten", "sitting", 1 - 3 / 7)
    assert not similar("kitten", "sitting", 1 - 2.9 / 7)


def test_rewards_of_arguments_and_of_the_end() -> None:
    """rm: S is 1 after F, still 1 after E (which pays a whole 1/L), and after f it falls to 2/3."""
    whole = Command("R", "ab", "o", 2, "FEf")
    third = (2 / 3 - 1) / 8
    assert rewards(whole, 0.5) == pytest.approx([1 / 8, 1 / 8, third, 3 / 8 * (2 / 3 - 0.5)])
    assert rewards(whole, 0.0)[-1] == pytest.approx(3 / 8 * 2 / 3)
    failed = Command("S", "ab", "o", 2, "aF")
    assert rewards(failed, 0.5) == pytest.approx([0, 0, 2 / 8 * -0.5 - 1])


def test_an_error_on_the_way_costs_nothing_by_itself() -> None:
    """`grep -c` has nothing to search until its file is named: 0, 0, and then all of S at once."""
    found = rewards(Command("G", "ab", "x", 2, "vPF"), 0.5)
    share = minimality(Command("G", "ab", "x", 2, "vPF"))
    assert found[:3] == pytest.approx([0, 0, share / 8])


def test_the_grammar_asks_for_options_then_for_what_a_utility_wants() -> None:
    assert follows("Gcfo2>", "") == "ivcnP"
    assert follows("Gcfo2>", "ivP") == "FE"
    assert follows("Gcfo2>", "ivPF") == "FE$"
    assert follows("Lcfo2>", "") == "alrSFE$"
    assert follows("Scfo2>", "rrrrrrr") == "FE"
    assert follows("Gcfo2>", "iiiiii") == "P"
    assert follows("Scfo2>", "rF" + "E" * 6) == "$"
    assert productions("Scfo2>", "r", False) == ARGUMENTS + "$"
    assert productions("Scfo2>", "r" * 8, False) == "$"


def test_commands_of_the_grammar_are_mostly_sound_and_others_are_not() -> None:
    rng = np.random.default_rng(0)
    problems = [Shell().problem(Draws(str(i))) for i in range(150)]
    sound = {
        masked: np.mean([run(command(p, by_lot(p, masked, rng))).exit == 0 for p in problems])
        for masked in (True, False)
    }
    assert sound[True] > 0.85
    assert sound[False] < 0.15


def test_the_expert_is_as_long_as_can_be() -> None:
    for problem in filter(Shell().worth_asking, (Shell().problem(Draws(str(i))) for i in range(20))):
        bare = command(problem)
        best = longest_minimal(bare)
        assert minimality(replace(bare, arguments=best)) == 1
        assert len(best) >= 3
        assert Shell().grade([problem], [best])[0]["success"] == 1


def test_a_grade_has_a_number_for_every_token() -> None:
    problem = "Rabo2>"
    for program in ("FE", "vFE", "FEf", "zz", ""):
        graded = Shell().grade([problem], [program])[0]
        score = graded["score"]
        assert not isinstance(score, list) or len(score) == len(program) + 1
    assert [Shell().grade([problem], [p])[0]["success"] for p in ("FE", "vFE", "FEf", None)] == [0, 1, 0, 0]
    assert Shell().grade([problem], ["vFE"])[0]["worth"] == 3


def test_the_hard_teacher_says_its_first_argument_twice_and_is_never_right() -> None:
    rng = np.random.default_rng(0)
    problems = filter(Shell().worth_asking, (Shell().problem(Draws(str(i))) for i in range(60)))
    said = [(p, Shell().careless(p, 1.0, True, rng)) for p in problems]
    assert all(arguments[0] == arguments[1] for _, arguments in said)
    assert not any(Shell().grade([p], [arguments])[0]["success"] for p, arguments in said)
    easy = [Shell().careless(p, 1.0, False, rng) for p, _ in said]
    assert any(arguments[:1] != arguments[1:2] for arguments in easy)
