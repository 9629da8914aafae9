"""The page in a real browser."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from panoply.evaluation.reliability import reliability


def tick(page: Any, name: str) -> None:
    page.locator(".run", has=page.locator(f".run-sub[title='{name}']")).locator(".run-sub").click()


def curves(page: Any, metric: str) -> str:
    """What a chart says of itself to a screen reader."""
    found = page.locator(f"figure[data-metric='{metric}'] .u-over")
    found.wait_for()
    return str(found.get_attribute("aria-label"))


def test_open_and_tick_two_runs_and_see_two_curves(page: Any) -> None:
    page.wait_for_selector(".run")
    assert page.url.endswith("/")  # the token has left the address bar
    tick(page, "tools-s0")
    tick(page, "chain")
    page.get_by_role("heading", name="2 runs ticked").wait_for()
    assert page.locator(".legend li").count() == 2
    told = curves(page, "reward")
    assert "grpo · tools ends at" in told
    assert "grpo · chain ends at" in told
    assert page.locator("table th", has_text="update.lr").count() == 1
    tick(page, "tools-s1")
    page.get_by_role("heading", name="3 runs ticked").wait_for()
    assert page.locator(".legend li", has_text="2 seeds").count() == 1


def test_search_and_keyboard_in_the_list(page: Any) -> None:
    page.wait_for_selector(".run")
    page.keyboard.press("/")
    page.keyboard.type("tools seed 1")
    page.get_by_text(re.compile(r"^1 of \d+ runs$")).wait_for()
    page.locator(".rows").focus()
    page.keyboard.press("x")
    page.get_by_role("heading", name="1 run ticked").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="grpo on tools").wait_for()


def test_a_running_run_is_drawn_while_it_learns(page: Any, runs: Path) -> None:
    folder = runs / "live"
    shutil.copytree(runs / "chain", folder, ignore=shutil.ignore_patterns("result.json", "metrics.jsonl"))
    rows = (runs / "chain" / "metrics.jsonl").read_text().splitlines(keepends=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as a training does
            (folder / "metrics.jsonl").write_text(rows[0])
            page.reload()
            page.get_by_role("heading", name="1 run, running now").wait_for()
            badge = page.locator(".run", has=page.locator(".run-sub[title='live']")).locator(".badge.running")
            assert badge.inner_text() == "1 / 2"
            with open(folder / "metrics.jsonl", "a") as metrics:
                metrics.write(rows[1])
            page.locator(".badge.running", has_text="2 / 2").wait_for()
            reward = json.loads(rows[1])["reward"]
            page.locator(f"figure[data-metric=reward] [aria-label*='ends at {reward:.4g}']").wait_for()
        finally:
            shutil.rmtree(folder)


SHADES = """(shades) => {
  const pen = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (...layers) => {
    for (const layer of layers) { pen.fillStyle = layer; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const found = {};
  for (const shade of shades) {
    const token = document.createElement('span');
    token.className = `t ${shade}`;
    document.body.append(token);
    const { color, backgroundColor } = getComputedStyle(token);
    found[shade] = contrast(rgb(color), rgb(variable('--card'), backgroundColor));
    token.remove();
  }
  const quiet = rgb(variable('--quiet'));
  for (const paper of ['--paper', '--card', '--sunk']) found[paper] = contrast(quiet, rgb(variable(paper)));
  return found;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_on_every_shade(page: Any, theme: str) -> None:
    page.wait_for_selector(".run")
    page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
    found = page.evaluate(SHADES, ["d0", "d5", "d10", "d15", "d20", "q5", "q10"])
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_an_unreadable_run_says_why(page: Any) -> None:
    page.wait_for_selector(".run")
    page.locator(".run.unreadable", has_text="torn").locator("a").click()
    page.get_by_role("alert").get_by_text("is not valid JSON").wait_for()


@pytest.fixture
def inspector(page: Any) -> Any:
    """An episode of several turns, opened by way of its run."""
    page.wait_for_selector(".run")
    page.locator(".run", has=page.locator(".run-sub[title='tools-s0']")).locator("a").click()
    page.get_by_role("heading", name="grpo on tools").wait_for()
    page.locator(".episode", has_text="turns").first.click()
    page.wait_for_selector(".lane .t.selected")
    return page


def test_decisions_are_coloured_by_advantage(inspector: Any) -> None:
    inspector.locator("button[data-column=entropy]").click()
    assert inspector.locator("button[data-column=entropy]").get_attribute("aria-checked") == "true"
    assert inspector.locator(".t.q10").count() > 0
    inspector.keyboard.press("1")
    assert inspector.locator("button[data-column=advantage]").get_attribute("aria-checked") == "true"
    assert inspector.locator(".t[class*=' q']").count() == 0
    background = "e => getComputedStyle(e).backgroundColor"
    shades = {t.evaluate(background) for t in inspector.locator(".t[class*=' d']").all()[:40]}
    assert len(shades) >= 1


def test_turns_and_decisions_by_keyboard(inspector: Any) -> None:
    told = inspector.locator(".detail p").first
    assert re.match(r"decision 1 of \d+, turn 1 of", told.inner_text())
    inspector.keyboard.press("ArrowDown")
    assert "turn 2 of" in told.inner_text()
    inspector.keyboard.press("ArrowRight")
    inspector.keyboard.press("ArrowLeft")
    inspector.keyboard.press("ArrowLeft")
    assert "turn 1 of" in told.inner_text()
    inspector.keyboard.press("End")
    assert re.match(r"decision (\d+) of \1\b", told.inner_text())
    inspector.keyboard.press("f")
    assert inspector.locator(".lane.current .turn.folded").count() == 1
    here = inspector.url
    inspector.keyboard.press("j")
    inspector.wait_for_url(lambda url: url != here)
    inspector.keyboard.press("Escape")
    inspector.get_by_role("heading", name="grpo on tools").wait_for()


def test_the_group_stands_side_by_side(inspector: Any) -> None:
    inspector.get_by_role("button", name="group of 4").wait_for()
    titles = inspector.locator(".lane-title").all_inner_texts()
    assert sum(int((re.findall(r"× (\d+)", title) or ["1"])[0]) for title in titles) == 4
    advantages = [float(re.findall(r"Â (\S+)", title)[0].replace("−", "-")) for title in titles]
    assert advantages == sorted(advantages, reverse=True)
    inspector.keyboard.press("g")
    inspector.get_by_role("button", name="this episode alone").wait_for()
    assert inspector.locator(".lane").count() == 1
    prompt, output = (inspector.locator(".context").nth(k) for k in (0, 1))
    assert prompt.get_attribute("aria-expanded") == "false"
    assert output.get_attribute("aria-expanded") == "true"  # it is short
    prompt.click()
    assert prompt.get_attribute("aria-expanded") == "true"


def record(episode: int, pieces: list[str], position: list[int], **more: Any) -> str:
    columns = {"turn": [0] * len(position), "logp": [-1.0] * len(position), "group": 0, "end": 1, "gates": {}}
    whole = {"text": "".join(pieces), "pieces": pieces, "tokens": [*range(len(pieces))], "position": position}
    return (
        json.dumps({"step": 1, "episode": episode, "task": 5, **whole, "signals": {}, **columns, **more})
        + "\n"
    )


@pytest.fixture
def written(page: Any, serving: Any, runs: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens an episode, by its place, of a run that has the given ones."""
    folder = runs / request.node.name  # what a server has read of a run it does not read again
    shutil.copytree(runs / "chain", folder)

    def opened(*records: str, at: int = 0) -> Any:
        (folder / "episodes.jsonl").write_text("".join(records))
        page.wait_for_selector(".run")
        place = len("".join(records[:at]).encode())
        page.goto(f"http://127.0.0.1:{serving.port}/#/run/{folder.name}/episode/{place}")
        page.wait_for_selector(".t.selected")
        return page

    yield opened
    shutil.rmtree(folder)


def test_an_episode_is_a_conversation_with_credit_costs_and_verdicts(written: Any) -> None:
    """By turn. Whatever a program printed is text, and a script in it does not run (the policy would report it)."""
    bad = "<img src=x onerror=alert(1)>"
    page = written(
        record(
            0,
            ["ask ", "call ", "two ", bad, "again ", "ok", "answer"],
            [1, 2, 4, 6],
            turn=[0, 0, 1, 2],
            advantage=[0.5, 1.0, -0.5, 0.25],
            reward=[0.0, 0.0, -0.25, 1.0],
            signals={"calls": [[1, 1.0], [2, 1.0]], "ran": [[1, 1.0]], "cost": [[1, 0.5]], "success": [[3, 1.0]],
                     "invalid": [[2, 1.0]]},
            verdicts=[[1, f"printed {bad}"]],
        )
    )  # fmt: skip
    heads = [head.replace("\n", " ") for head in page.locator(".turn-head").all_inner_texts()]
    assert "turn 1 2 decisions Â 0.75 calls 1 ran 1 cost 0.50" in re.sub(r"\s+", " ", heads[0])
    assert "turn 2 1 decision Â −0.50 r −0.25 calls 1 invalid 1" in re.sub(r"\s+", " ", heads[1])
    assert "turn 3 1 decision Â 0.25 r 1" in re.sub(r"\s+", " ", heads[2])
    assert re.search(r"calls 2\s+ran 1\s+cost 0.50\s+invalid 1", page.locator(".lane-title").inner_text())
    first = page.locator(".turn").nth(0)
    assert first.locator(".verdict.bad").inner_text().split("\n") == ["✗ ran, and is wrong", f"printed {bad}"]
    assert first.locator(".context-text").all_inner_texts() == ["ask", bad]  # the output belongs to its call
    assert page.locator(".turn").nth(1).locator(".verdict.bad").inner_text() == "✗ invalid"
    assert page.locator(".turn").nth(2).locator(".verdict").count() == 0
    assert page.locator(".inspector img").count() == 0
    shades = [chip.get_attribute("class") for chip in page.locator(".turn-head .credit").all()]
    assert shades == ["credit d18", "credit d5", "credit d13"]


def test_branched_episodes_are_a_tree(written: Any) -> None:
    """Every branch an episode: 0 and 1 follow the task, 2, 3 and 4 follow 1; 3 and 4 are the same."""
    rows = [
        record(e, ["ask ", text], [1], parent=parent, group=group, advantage=[a], reward=[r])
        for e, parent, group, text, a, r in (
            (0, -1, 0, "left", -0.25, 0.25), (1, -1, 0, "right", 0.25, 0.75), (2, 1, 1, "up", -0.5, 0.25),
            (3, 1, 1, "down", 0.25, 1.0), (4, 1, 1, "down", 0.25, 1.0), (9, -7, 3, "elsewhere", 0.0, 0.0),
        )
    ]  # fmt: skip
    page = written(*rows, at=2)
    told = page.locator(".tree-box")
    flat = re.sub(r"\s+", " ", told.inner_text())
    assert flat == "ask left Â −0.25 R 0.25 right Â 0.25 R 0.75 up Â −0.50 R 0.25 down × 2 Â 0.25 R 1"
    assert told.locator("li li .branch-said").all_inner_texts() == ["up", "down"]
    assert told.locator(".branch.on .branch-said").all_inner_texts() == ["right", "up"]
    told.locator(".branch", has_text="left").click()
    page.get_by_text("group 0, episode 0").wait_for()
    page.keyboard.press("b")
    assert told.is_hidden()
    page.keyboard.press("b")
    assert told.locator(".branch[aria-current]").inner_text().startswith("left")


def test_episodes_with_a_beginning_in_common_are_a_tree(written: Any) -> None:
    """Whole episodes: 0 and 1 share node 4, what lies between two forks is one branch, and 2 stands alone."""
    rows = [
        record(e, ["ask ", *said], [1, 2, 3], node=node, advantage=credit, reward=[0.0, 0.0, r])
        for e, said, node, credit, r in (
            (0, ["go ", "on ", "left"], [4, 5, 6], [0.5, 0.0, 0.0], 1.0),
            (1, ["go ", "no ", "right"], [4, 7, 7], [0.0, -0.5, -0.5], 0.0),
            (2, ["stay ", "and ", "rest"], [8, 8, 9], [0.0, 0.0, 0.0], 0.0),
        )
    ]
    page = written(*rows, at=1)
    flat = re.sub(r"\s+", " ", page.locator(".tree-box").inner_text())
    assert (
        flat == "ask go Â 0.25 R 0.50 2 episodes on left Â 0 R 1 no right Â −0.50 R 0 stay and rest Â 0 R 0"
    )
    assert page.locator(".branch.on .branch-said").all_inner_texts() == ["go", "no right"]
    page.locator(".branch", has_text="on left").click()
    page.get_by_text("decision 2 of 3").wait_for()
    assert page.locator(".branch.on .branch-said").all_inner_texts() == ["go", "on left"]


def test_a_long_episode_exists_only_where_it_is_seen(page: Any, serving: Any) -> None:
    page.wait_for_selector(".run")
    page.goto(f"http://127.0.0.1:{serving.port}/#/run/long/episode/0")
    page.wait_for_selector(".t.selected")
    assert page.locator(".lane").count() == 8
    page.keyboard.press("End")
    page.get_by_text("decision 4000 of 4000, turn 20 of 20").wait_for()
    for _ in range(3):  # and up again by turns
        page.keyboard.press("ArrowUp")
    page.get_by_text("decision 3201 of 4000, turn 17 of 20").wait_for()
    for _ in range(40):  # rows above are measured when they are first drawn, and the place is then set again
        box = page.locator(".t.selected").bounding_box()
        if 0 < box["y"] < 900:
            break
        page.wait_for_timeout(50)
    assert 0 < box["y"] < 900
    page.wait_for_timeout(300)
    beside = "e => [...document.elementsFromPoint(e.getBoundingClientRect().x + 2, e.getBoundingClientRect().y + 60)]"
    assert page.locator(".t.selected").evaluate(f"{beside}.some((x) => x.classList.contains('t'))")
    assert 200 < page.locator(".t").count() < 16_000  # of 32,000


def test_the_gate_that_acted_is_named(page: Any) -> None:
    page.wait_for_selector(".run")
    page.locator(".run", has=page.locator(".run-sub[title='chain']")).locator("a").click()
    page.get_by_label("Order of episodes").select_option("gated")
    page.locator(".episode").first.click()
    page.wait_for_selector(".t.gated")
    page.keyboard.press("c")
    assert re.search(r"clip_(high|low)\s+in surrogate\.clip", page.locator(".gates").inner_text())
    page.locator(".lane.current .t.gated").first.hover()
    assert "surrogate.clip" in page.locator("#tip").inner_text()


def test_the_most_surprising_episodes_come_first(inspector: Any) -> None:
    inspector.get_by_label("Order of episodes").select_option("surprise")
    inspector.get_by_text("A hacked reward shows here first").wait_for()
    scores = [
        float(t.replace("✦", ""))
        for t in inspector.locator(".inspector .side .pill[title^=surprise]").all_inner_texts()
    ]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[-1]


def test_episodes_by_advantage_and_the_same_ones_once(page: Any, serving: Any) -> None:
    page.wait_for_selector(".run")
    page.goto(f"http://127.0.0.1:{serving.port}/#/run/tools-s0")
    page.get_by_label("Order of episodes").select_option("advantage")
    rows = page.locator(".run-page .episode").all_inner_texts()
    shown = [float(re.findall(r"Â (\S+)", row)[0].replace("−", "-")) for row in rows]
    assert shown == sorted(shown, reverse=True)
    found = serving.answers.episodes({"run": "tools-s0"})["episodes"]
    heading = page.get_by_role("heading", name="Episodes (").inner_text()
    assert heading == f"Episodes ({len(found)})"
    distinct = len({e["like"] for e in found})
    assert distinct < len(found)
    assert page.locator(".run-page .episode").first.get_attribute("aria-setsize") == str(distinct)
    assert page.locator(".run-page .pill.count").first.inner_text().startswith("× ")


def test_axes_are_labelled(page: Any) -> None:
    """uPlot draws labels on its canvas: what it was told is what it draws."""
    page.wait_for_selector(".plot canvas")
    page.evaluate("() => { window.plots = []; const Real = uPlot; window.uPlot = class extends Real { "
                  "constructor(o, ...rest) { super(o, ...rest); plots.push(o); } }; }")  # fmt: skip
    page.keyboard.press("d")
    for _ in range(100):  # the page's own policy forbids to wait by a function
        if page.evaluate("plots.length"):
            break
        page.wait_for_timeout(50)
    labels = page.evaluate("plots.map((o) => o.axes.map((a) => a.label))")
    assert all(x == "step" for x, _ in labels)
    assert [y for _, y in labels] == page.locator("figcaption").all_inner_texts()


def test_an_entry_opens_at_its_top_and_the_list_stays_where_it_was(page: Any) -> None:
    page.get_by_role("link", name="Catalogue").click()
    page.wait_for_selector("tbody tr")
    page.get_by_role("link", name="sppo", exact=True).scroll_into_view_if_needed()
    place = page.evaluate("document.getElementById('view').scrollTop")
    assert place > 300
    page.get_by_role("link", name="sppo", exact=True).click()
    page.get_by_role("heading", name="Equation").wait_for()
    assert page.evaluate("document.getElementById('view').scrollTop") == 0
    page.go_back()
    page.wait_for_selector("tbody tr")
    assert abs(page.evaluate("document.getElementById('view').scrollTop") - place) < 2


def test_a_run_shows_its_equation_and_what_was_changed(page: Any, serving: Any) -> None:
    page.wait_for_selector(".run")
    page.goto(f"http://127.0.0.1:{serving.port}/#/run/chain")
    page.get_by_role("heading", name="Changes from grpo").wait_for()
    assert "maximise" in page.locator(".equation").inner_text()
    assert page.get_by_role("row", name="update.lr 1e-06 0.003").count() == 1


def test_a_reward_model_is_drawn(page: Any, serving: Any, runs: Path) -> None:
    result = runs / ".cache" / "abc" / "result.json"
    found = reliability([2.0, -1.0, 0.5], [1.0, 1.0, 0.6], {"annotator": ["<i>ann</i>", "bo", "bo"]})
    kept = json.loads(result.read_text())
    result.write_text(json.dumps({**kept, "after": {**kept["after"], "reliability": found}}))
    page.goto(f"{serving.address}#/run/.cache/abc")
    page.wait_for_selector(".drawn")
    titles = page.locator("section[aria-label='Reward model'] figcaption").all_inner_texts()
    assert titles == ["calibration", "margins", "accuracy by annotator"]
    assert page.locator(".drawn").nth(2).locator("rect").count() == 2
    assert "<i>ann</i>" in page.locator(".drawn").nth(2).locator("text").all_text_contents()
    result.write_text(json.dumps(kept))


def test_workers_have_lanes_that_grow_and_one_process_has_none(page: Any, serving: Any, runs: Path) -> None:
    folder, home = runs / "spread", f"http://127.0.0.1:{serving.port}/#/run"
    shutil.copytree(runs / "chain", folder, ignore=shutil.ignore_patterns("result.json"))
    said = {"node": "<b>n1</b>", "busy": 3.0, "wait": 1.0, "tokens": 9, "memory_mb": 2048.0, "version": 4}
    lines = [
        {"step": 1, "worker": w, "role": w[:7], "restarts": 0, **said} for w in ("learner-0", "sampler-0")
    ]
    rows = [{**json.loads(row), "lag": 1} for row in (folder / "metrics.jsonl").read_text().splitlines()]
    try:
        page.wait_for_selector(".run")
        page.goto(f"{home}/chain")
        page.get_by_role("heading", name="Equation").wait_for()
        assert page.locator(".workers").is_hidden()
        (folder / "workers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        page.goto(f"{home}/spread")
        page.get_by_text("1 learner (75 % busy), 1 sampler (75 % busy) on 1 machine; no restart.").wait_for()
        assert page.locator(".worker .run-sub").first.inner_text() == "<b>n1</b>"
        assert page.locator(".workers .lag").is_hidden()
        page.locator(".lane-time").first.hover()
        assert "version 4, 0 restarts" in page.locator("#tip").inner_text()
        with open(folder / "workers.jsonl", "a") as file:
            file.write(json.dumps({**lines[1], "step": 2, "restarts": 1}) + "\n")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        page.reload()
        page.locator("canvas[aria-label='sampler-0: 75 % busy, version 4, 1 restart']").wait_for()
        page.locator(".workers .lag [aria-label='lag: lag ends at 1']").wait_for()
    finally:
        shutil.rmtree(folder)


def test_the_catalogue(page: Any) -> None:
    page.get_by_role("link", name="Catalogue").click()
    page.get_by_label("Search works").fill("dapo")
    page.get_by_role("link", name="dapo", exact=True).click()
    page.get_by_role("heading", name="Changes from grpo").wait_for()


def test_a_run_of_an_older_version(page: Any) -> None:
    page.wait_for_selector(".run")
    page.locator(".run", has=page.locator(".run-sub[title='older']")).locator("a").click()
    page.get_by_role("heading", name="? on ?").wait_for()
    page.locator("figcaption", has_text="score").wait_for()
    page.get_by_text("None recorded yet").wait_for()


def test_light_and_dark(page: Any) -> None:
    page.wait_for_selector(".run")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.keyboard.press("d")
    assert page.evaluate(paper) != light


def test_the_report_opens_offline(browser: Any, runs: Path, tmp_path: Path) -> None:
    from panoply.report.html import write_report
    from panoply.report.study import Study

    file = write_report(Study.of([str(runs)]), tmp_path / "report.html")
    page = browser.new_page()
    asked: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.goto(file.as_uri())
    page.wait_for_selector(".u-over[aria-label^='reward:'][aria-label*='grpo · tools ends at']")
    assert page.locator(".plot canvas").count() == page.locator(".plot").count() >= 6
    page.close()
    assert asked == [file.as_uri()]
    assert problems == []
