"""The report: one HTML file with everything in it, which opens without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from panoply.errors import PanoplyError
from panoply.report.curves import curve, differences, settings_of
from panoply.report.episodes import MEASURED, Index, known
from panoply.report.method import described
from panoply.report.run_index import RESULT
from panoply.report.study import Found, Study

EPISODES, DECISIONS = 6, 1500
"""How many episodes of an experiment are shown, and how many decisions of each."""


def write_report(study: Study, file: Path, title: str | None = None) -> Path:
    page = render(study, title)
    try:
        file.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise PanoplyError(f"Cannot write {file}: {error.strerror}.") from error
    return file


def render(study: Study, title: str | None = None) -> str:
    """The page as text. Curves are drawn by uPlot from numbers in the page; the rest needs no script."""
    heading = title or " and ".join([e.label for e in study.experiments][:3]) or "Report"
    data = {
        m: [{**curve(e, m).to_json(), "place": i} for i, e in enumerate(study.experiments)]
        for m in study.metrics
    }
    body = [
        f"<h1>{escape(heading)}</h1>",
        f'<p class="quiet">{escape(study.summary())} Lines are means over seeds, bands reach from the lowest seed to '
        "the highest.</p>",
        _notes(study.notes),
        _legend(study),
        "".join(
            f'<figure class="card"><figcaption>{escape(m)}</figcaption><div class="plot" data-metric="{escape(m)}">'
            "</div></figure>"
            for m in study.metrics
        ).join(('<div class="grid">', "</div>")),
        _drawings(study),
        f"<h2>Results</h2>{_results(study)}",
        _findings(study),
        _differences(study) if len(study.experiments) > 1 else _configuration(study),
        f"<h2>Sampled episodes</h2>{_episodes(study)}",
        f"<h2>Runs</h2>{_runs(study)}",
    ]
    return _PAGE.format(
        title=escape(heading),
        style=_asset("vendor/uplot/uPlot.min.css") + _asset("report.css"),
        library=_script(_asset("vendor/uplot/uPlot.iife.min.js")),
        charts=_script(_asset("js/charts.js") + _DRAW),
        body="\n".join(body),
        data=json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{library}</script>
<script type="module">{charts}</script>
</body></html>
"""
_DRAW = """
const found = JSON.parse(document.getElementById("data").textContent);
let drawn = [];
function draw() {
  for (const c of drawn) c.destroy();
  drawn = [...document.querySelectorAll(".plot")].map((box) =>
    chart(box, { title: box.dataset.metric, curves: found[box.dataset.metric] }));
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""


def _asset(path: str) -> str:
    return (resources.files("panoply.ui") / "static" / path).read_text(encoding="utf-8")


def _script(text: str) -> str:
    return text.replace("</script", "<\\/script")


# ------------------------------------------------------------------ pieces


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain words; the first cell of a row is its heading."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    lines = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _notes(notes: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{escape(n)}</li>" for n in notes)}</ul>' if notes else ""


def _legend(study: Study) -> str:
    entries = (
        f'<li><i class="s{i % 10}"></i>{escape(e.label)} <span class="quiet">{_seeds(m)}</span></li>'
        for i, (e, m) in enumerate(zip(study.experiments, study.members, strict=True))
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _seeds(members: Sequence[Found]) -> str:
    return f"{len(members)} seeds" if len(members) > 1 else f"seed {members[0].facts['seed']}"


def _drawings(study: Study) -> str:
    figures = "".join(
        f'<figure class="card"><figcaption>{escape(drawing.title)} <span class="quiet">{escape(label)}</span>'
        f'</figcaption>{drawing.svg()}<p class="quiet">{escape(drawing.note)}</p></figure>'
        for label, drawing in study.drawings()
    )
    return f'<h2>Reward models</h2><div class="grid">{figures}</div>' if figures else ""


def _results(study: Study) -> str:
    rows = []
    for e, members in zip(study.experiments, study.members, strict=True):
        facts = [m.facts for m in members]
        done = sum(f["status"] == "finished" for f in facts)
        rows.append(
            (
                e.label,
                f"{done} of {len(facts)}",
                _span([f["step"] for f in facts], 0),
                ", ".join(sorted({f["measured"] for f in facts})),
                _span([f["before"] for f in facts]),
                _span([f["after"] for f in facts]),
                _span([f["reward"] for f in facts]),
                _span([f["seconds"] for f in facts], 1),
            )
        )
    head = ("experiment", "finished", "steps", "held out", "before", "last", "last reward", "seconds")
    return _table(head, rows)


def _findings(study: Study) -> str:
    """What parts have found, run by run, such as groups of annotators (`tells` of a part)."""
    told = []
    for member in (m for members in study.members for m in members):
        found = (member.index.json(member.name, RESULT) or {}).get("found")
        told += [(member.name, str(sentence)) for sentence in (found if isinstance(found, list) else [])]
    return f"<h2>Found</h2>{_table(('run', ''), told)}" if told else ""


def _span(values: Sequence[float | None], digits: int = 3) -> str:
    """The mean, and the lowest and highest where they differ."""
    known = [v for v in values if isinstance(v, int | float)]
    if not known:
        return "–"
    mean = f"{sum(known) / len(known):.{digits}f}"
    low, high = f"{min(known):.{digits}f}", f"{max(known):.{digits}f}"
    return mean if low == high else f"{mean} [{low}, {high}]"


def _differences(study: Study) -> str:
    rows = [(path, *values) for path, values in differences(study.plans())]
    table = _table(["setting", *(e.label for e in study.experiments)], rows)
    return f"<h2>Differences in configuration</h2>{table}"


def _configuration(study: Study) -> str:
    """Of one experiment: how it was started, its equation, what was changed, and every setting."""
    (members,), plan = study.members, next(iter(study.plans().values()))
    pieces = [
        f"<h2>Command</h2><pre>{escape(command)}</pre>"
        for command in dict.fromkeys(str(m.config.get("command", "")) for m in members[:1])
        if command not in ("", "python")
    ]
    if found := described(plan):
        pieces.append(f"<h2>Equation</h2><pre>{escape(chr(10).join(found['equation']))}</pre>")
        head, none = ("setting", f"{found['against']} as published", "here"), "It is set as it is published."
        changes = _table(head, found["changes"]) if found["changes"] else f'<p class="quiet">{none}</p>'
        pieces.append(f"<h2>Changes from {escape(found['against'])}</h2>{changes}")
    chosen = plan.get("chosen")
    marked = set(chosen) if isinstance(chosen, list) and all(isinstance(c, str) for c in chosen) else set()
    rows = [(f"{path} *" if path in marked else path, word) for path, word in settings_of(plan).items()]
    table = _table(("setting", "value"), rows)
    about = "Those that were chosen for this run have a star."
    pieces.append(f"<details><summary>All settings</summary><p class='quiet'>{about}</p>{table}</details>")
    return "".join(pieces)


def _runs(study: Study) -> str:
    rows = []
    for e, members in zip(study.experiments, study.members, strict=True):
        for m in members:
            result = m.index.json(m.name, RESULT) or {}
            rows.append(
                (
                    m.name,
                    e.label,
                    str(m.facts["seed"]),
                    m.facts["status"],
                    m.facts["created"].replace("T", " "),
                    str(m.config.get("hash", "–")),
                    str(result.get("fingerprint", "–")),
                    m.facts["version"],
                )
            )
    return _table(("run", "experiment", "seed", "status", "started", "plan", "weights", "panoply"), rows)


# ------------------------------------------------------------------ episodes


def _episodes(study: Study) -> str:
    pieces = []
    for e, members in zip(study.experiments, study.members, strict=True):
        index = Index(members[0].index, members[0].name)
        rows = index.rows()
        if not rows:
            pieces.append(f"<h3>{escape(e.label)}</h3><p class='quiet'>None was recorded.</p>")
            continue
        rows = [r for r in rows if r["like"] == r["at"]]
        newest = _spread([r for r in rows if r["step"] == rows[-1]["step"]], EPISODES // 2)
        odd = sorted(rows, key=lambda r: -r["surprise"])[: EPISODES - len(newest)]
        pieces.append(
            f"<h3>{escape(e.label)}, {escape(members[0].name)}</h3>"
            "<p class='quiet'>Decisions are coloured by advantage, blue where they are reinforced and orange where "
            "they are discouraged; those a gate acted on are underlined. The line above a turn has its mean advantage, "
            "its reward and what was counted; an arrow leads to what came of it where it was run.</p>"
        )
        for kind, chosen in (("of the last recorded step", newest), ("most surprising", odd)):
            for row in chosen:
                record = index.record(row["at"])
                if record is not None:
                    pieces.append(_episode(record, row, kind))
    return "".join(pieces)


def _spread(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Rows by advantage, the highest first; where there are too many, the best, the worst and some between."""
    ordered = sorted(
        rows, key=lambda r: -math.inf if r["advantage"] is None else r["advantage"], reverse=True
    )
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def _episode(record: dict[str, Any], row: dict[str, Any], kind: str) -> str:
    decision_at = {p: i for i, p in enumerate(record["position"][:DECISIONS])}
    advantage = record.get("advantage") or []
    most = max((abs(a) for a in advantage if a), default=1.0)
    gates: dict[int, list[str]] = {}
    for name, acted in record["gates"].items():
        for i in acted:
            gates.setdefault(i, []).append(name)
    end = max(decision_at, default=-1) + 1
    heads, verdicts = _turns(record), dict(record["verdicts"])
    spans: list[str] = []
    context: list[str] = []
    for at, piece in enumerate(record["pieces"][:end]):
        if at not in decision_at:
            context.append(piece)
            continue
        if context:
            look = "context output" if spans else "context"
            spans.append(f'<span class="{look}">{escape("".join(context))}</span>')
            context = []
        i = decision_at[at]
        if i in heads:
            spans.append(f'<span class="turn">{escape(heads[i])}</span>')
        spans.append(_token(piece, i, advantage, most, gates, record))
        if i in verdicts:
            spans.append(f'<span class="turn">→ {escape(verdicts[i])}</span>')
    cut = len(record["position"]) - DECISIONS
    if cut > 0:
        spans.append(f'<span class="quiet"> … and {cut} more decisions</span>')
    same = f", {row['count']} that are the same" if row.get("count", 1) > 1 else ""
    worth = f"return {_short(row['return'])}, advantage {_short(row['advantage'])}"
    branch = f", branches from episode {row['parent']}" if (row["parent"] or -1) >= 0 else ""
    facts = f"{kind}{same}{branch}: step {row['step']}, {worth}, surprise {row['surprise']:.2f}"
    return f'<figure class="episode"><figcaption>{escape(facts)}</figcaption><pre>{"".join(spans)}</pre></figure>'


def _turns(record: dict[str, Any]) -> dict[int, str]:
    """What stands above each turn, by its first decision; nothing where the only one has nothing to tell."""
    turn = record.get("turn") or [0] * len(record["position"])
    rows: dict[int, list[int]] = {}
    for i, t in enumerate(turn):
        rows.setdefault(t, []).append(i)
    if "tokens" not in record or (len(rows) < 2 and not record["verdicts"]):
        return {}
    found = {}
    for t, of in rows.items():
        inside = set(of)
        credit = known([a for i, a in enumerate(record.get("advantage") or []) if i in inside])
        said = [f"turn {t + 1}", *([f"advantage {_short(sum(credit) / len(credit))}"] if credit else [])]
        earned = {"reward": list(enumerate(record.get("reward") or [])), **record["signals"]}
        for name, pairs in earned.items():
            total = sum(known([value for row, value in pairs if row in inside]))
            said += [f"{name} {_short(total)}"] if total else []
        found[of[0]] = ", ".join(said)
    return found


def _token(
    piece: str, i: int, advantage: list[Any], most: float, gates: dict[int, list[str]], record: dict[str, Any]
) -> str:
    value = advantage[i] if i < len(advantage) else None
    shade = "" if not value else f"{'d' if value < 0 else 'u'}{math.ceil(5 * min(1.0, abs(value) / most))}"
    columns = [f"{n} {_short(record[n][i])}" for n in MEASURED if i < len(record.get(n) or [])]
    told = ", ".join([*columns, *gates.get(i, [])])
    look = " ".join(["t", shade, "gated" if i in gates else ""]).strip()
    return f'<span class="{look}" title="{escape(told)}">{escape(piece) or "·"}</span>'


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
