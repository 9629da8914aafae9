"""How fast `panoply ui` is in a real browser, with many runs and with long episodes.

    python benchmarks/ui.py                        1,000 runs, groups of 8 episodes of 10,000 decisions
    python benchmarks/ui.py --runs 100 --keep DIR  fewer, and keep what was made

The runs are written as a training would write them (200 steps each, some running). The page is opened several times in
new browser profiles, the first time with a server that has read nothing yet; times are the browser's own, from the
start of the navigation. Results go to results/bench-ui.json.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS, EPISODES, ROUNDS = 200, 8, 5
WORDS = (
    "the ",
    "sum ",
    "of ",
    "a",
    "nd ",
    "wait",
    ", ",
    "so ",
    "x",
    " = ",
    "12",
    "7",
    ".\n",
    "hence ",
    "not ",
    "yes",
)
METHODS, WORLDS = ("grpo@1", "dapo@1", "rloo@1", "ppo@1"), ("chain@1", "tools@1", "keydoor@1")


def make_runs(root: Path, count: int) -> None:
    """Folders as a training leaves them: a plan, a line of metrics a step, a result."""
    dice = random.Random(0)
    for i in range(count):
        folder = root / f"2026-01-{1 + i % 28:02d}-{METHODS[i % 4][:-2]}-{WORLDS[i % 3][:-2]}-s{i}"
        folder.mkdir(parents=True)
        method = {"id": METHODS[i % 4], "update": {"part": "update.adam", "lr": 3e-4, "epochs": 1 + i % 2}}
        plan = {"method": method, "world": {"id": WORLDS[i % 3]}, "run": {"seed": i, "steps": STEPS}}
        created = f"2026-01-{1 + i % 28:02d}T{i % 24:02d}:00:00"
        write(folder / "run.json", {"panoply": "0.1.0", "created": created, "plan": plan})
        rate = dice.uniform(10, 60)
        rows = []
        for step in range(1, STEPS + 1):
            row = {
                name: dice.random()
                for name in ("loss", "entropy", "clip_high", "gradient_norm", "episode_length")
            }
            row |= {
                "step": step,
                "seconds": step / 4,
                "decisions": 2048,
                "reward": 1 - math.exp(-step / rate),
            }
            if step % 20 == 0:
                row["held_out_sampled"] = row["reward"]
            rows.append(json.dumps(row) + "\n")
        (folder / "metrics.jsonl").write_text("".join(rows))
        after = {"sampled": 0.9, "sampled_interval": [0.85, 0.95]}
        write(folder / "result.json", {"steps": STEPS, "before": {**after, "sampled": 0.3}, "after": after})


def make_episodes(folder: Path, decisions: int) -> None:
    """One group of long episodes of twenty turns, each after a tool output, with every column there is."""
    dice = random.Random(1)
    every = decisions // 20
    with open(folder / "episodes.jsonl", "w") as file:
        for episode in range(EPISODES):
            pieces, position = ["What is it? "] * 50, []
            for i in range(decisions):
                if i % every == 0:
                    pieces += ["tool said 42\n"] * 20
                position.append(len(pieces))
                pieces.append(dice.choice(WORDS))
            numbers = {
                "logp": [round(-dice.expovariate(2), 5) for _ in position],
                "entropy": [round(dice.expovariate(2), 5) for _ in position],
                "advantage": [round(dice.gauss(0, 1), 5) for _ in position],
                "ratio": [round(math.exp(dice.gauss(0, 0.1)), 5) for _ in position],
                "value": [round(dice.random(), 5) for _ in position],
                "reward": [0.0] * (decisions - 1) + [float(episode % 2)],
            }
            record = {
                "step": STEPS,
                "episode": episode,
                "group": 0,
                "task": 7,
                "text": "".join(pieces),
                "pieces": pieces,
                "tokens": [WORDS.index(p) if p in WORDS else 99 for p in pieces],
                "position": position,
                "turn": [i // every for i in range(decisions)],
                **numbers,
                "gates": {"surrogate.clip:clip_high": [i for i, r in enumerate(numbers["ratio"]) if r > 1.2]},
                "end": 1,
            }
            file.write(json.dumps(record) + "\n")


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """`panoply ui` in a process of its own; gives its address."""
    command = [sys.executable, "-u", "-m", "panoply", "ui", str(folder), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http\S+", process.stdout.readline())
        assert found is not None
        try:
            yield found.group(0)
        finally:
            process.terminate()


def open_runs(browser: Any, address: str) -> dict[str, float]:
    """Milliseconds from navigation to the first paint, the list of runs, and drawn curves."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.add_init_script(MARKS)
    page.goto(address)
    page.wait_for_selector(".u-wrap canvas")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
    painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    found = {
        name: page.evaluate(js)
        for name, js in (("first_paint", painted), ("list", "listed"), ("curves", "drawn"))
    }
    found["nodes"] = page.evaluate("document.querySelectorAll('*').length")
    page.close()
    return {k: round(v, 1) for k, v in found.items()}


MARKS = """
const marks = { listed: ".run", drawn: ".u-wrap canvas" };
new MutationObserver(() => {
  for (const [name, what] of Object.entries(marks)) {
    if (document.querySelector(what)) {
      delete marks[name];
      requestAnimationFrame(() => { window[name] = performance.now(); });
    }
  }
}).observe(document, { childList: true, subtree: true });
"""
FRAMES = """async () => {
  const times = [];
  for (let i = 0; i < 40; i++) {
    const start = performance.now();
    %s;
    await new Promise((done) => requestAnimationFrame(() => {
      const after = new MessageChannel();
      after.port1.onmessage = done;
      after.port2.postMessage(0);
    }));
    times.push(performance.now() - start);
  }
  return times;
}"""
"""Milliseconds from each act to the end of the frame that shows it."""
ACTS = {
    "next_decision": "dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }))",
    "next_turn": "dispatchEvent(new KeyboardEvent('keydown', { key: i % 2 ? 'ArrowUp' : 'ArrowDown' }))",
    "next_gated": "dispatchEvent(new KeyboardEvent('keydown', { key: 'c' }))",
    "recolour": "dispatchEvent(new KeyboardEvent('keydown', { key: String(1 + i % 6) }))",
    "scroll": "document.querySelector('.lanes').scrollTop += 900",
}


def inspect(browser: Any, address: str, run: str) -> dict[str, Any]:
    """How an episode opens, and how long after a key or a scroll the next frame is there."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(address)
    page.wait_for_selector(".run")
    start = page.evaluate(f"location.hash = '#/run/{run}/episode/0', performance.now()")
    page.wait_for_selector(".t.selected")
    found: dict[str, Any] = {"open": round(page.evaluate("performance.now()") - start, 1)}
    found["lanes"] = page.locator(".lane").count()
    for name, act in ACTS.items():
        times = sorted(page.evaluate(FRAMES % act))
        found[name] = {"median": round(statistics.median(times), 1), "worst": round(times[-1], 1)}
    found["nodes"] = page.evaluate("document.querySelectorAll('*').length")
    page.close()
    return found


def measure(folder: Path) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    path = next(
        (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
    )
    if path is None:
        sys.exit("This needs a browser: chromium or google-chrome.")
    long = sorted(p.name for p in folder.iterdir() if (p / "episodes.jsonl").exists())[0]
    with sync_playwright() as play, server(folder) as address:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        cold, *warm = [open_runs(browser, address) for _ in range(ROUNDS)]
        inspected = inspect(browser, address, long)
        version = browser.version
        browser.close()
    middle = {k: round(statistics.median(w[k] for w in warm), 1) for k in cold}
    return {"browser": f"Chromium {version}", "cold": cold, "warm": middle, "inspector": inspected}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--decisions", type=int, default=10_000)
    parser.add_argument("--keep", metavar="DIR", help="make the runs there, and leave them")
    parser.add_argument("--output", default="results/bench-ui.json")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen.keep or temporary) / "runs"
        if not folder.exists():
            make_runs(folder, chosen.runs)
            make_episodes(next(iter(sorted(folder.iterdir()))), chosen.decisions)
        found = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "load": round(os.getloadavg()[0], 2),
            "unit": "milliseconds",
            "runs": chosen.runs,
            "decisions": chosen.decisions,
            **measure(folder),
        }
    write(Path(chosen.output), found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
