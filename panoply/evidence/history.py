"""Earlier verdicts on a claim stay: each with its date, its code, and what was asked differently from then on."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASKED = ("says", "world", "settings", "order", "metric", "better", "budget", "tuning grid")
"""What makes a claim another question."""
SUMMARY = ("date", "commit", "verdict", "metric", "difference", "interval", "margin", "seeds", "why")
"""What is kept of an earlier result."""


def by_former_rule(facts: Mapping[str, Any]) -> bool:
    """Whether a verdict rests on the interquartile mean and its 95 % bootstrap interval, as verdicts once did."""
    return facts["kind"] != "identity" and "p" not in facts and facts["verdict"] != "not able to tell"


def with_history(facts: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """A result with everything that was found before it, oldest first."""
    if before is None:
        return dict(facts)
    passed = {name: before[name] for name in SUMMARY if before.get(name) is not None}
    passed["asked differently since"] = changed(before, facts)
    return {**facts, "history": [*before.get("history", ()), passed]}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Which parts of the question are no longer what they were."""
    return [name for name in ASKED if _asked(before, name) != _asked(after, name)]


def _asked(facts: Mapping[str, Any], name: str) -> Any:
    if name == "tuning grid":
        return {path: list(values) for path, values in facts.get("tuning", {}).get("grid", {}).items()}
    return facts.get(name)


def before_and_now(facts: Mapping[str, Any]) -> tuple[str, str]:
    """The verdict on a claim before this one, with the commit or else the date it is of, and this one."""
    past = facts.get("history", ())
    before, now = (
        f"{of['verdict']} ({of.get('commit') or of['date']})" for of in (past[-1] if past else facts, facts)
    )
    return before if past else "–", now


def is_former(facts: Mapping[str, Any], says: str, reworded: str) -> bool:
    """Whether a result answers what a claim asked before it was reworded."""
    return bool(facts["says"] != says or facts.get("reworded", "") != reworded)


def commit(package: Path = Path(__file__).parent.parent) -> str | None:
    """The commit of the code that measures, with a + where it was changed since; None outside of a repository."""
    if not (package.parent / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(package.parent), *words], capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=7", "HEAD") + "+" * bool(
            git("status", "--porcelain", "--", package.name)
        )
    except (OSError, subprocess.SubprocessError):
        return None
