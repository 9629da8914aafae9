"""The pictures of docs/ui.md: train a few small runs, open them in a browser, and take them.

python benchmarks/ui_pictures.py               trains for some minutes, then writes docs/pictures/*.png
python benchmarks/ui_pictures.py --keep DIR    keeps the runs there, and uses them where they are already
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from ui import server

WORLD = ["--world", "house", "--plugin", str(Path(__file__).with_name("ui_world.py"))]
SEVERAL = ["--set", "update.epochs=2", "--set", "update.minibatches=2", "--set", "run.episodes_every=5"]
START = ["sft", *WORLD, "--model", "fresh", "--steps", "200"]
"""A policy that has imitated a careless teacher; the others go on from it."""
RUNS = {
    f"{method}-house-s{seed}": [method, *WORLD, *settings, "--steps", "40", "--seed", str(seed)]
    for method, settings in (("grpo", SEVERAL), ("dapo", ["--set", "run.episodes_every=5"]))
    for seed in range(2)
}
BRANCHED = [
    "arpo-entropy",
    *WORLD,
    "--steps",
    "2",
    "--set",
    "sample.prompts=8",
    "--set",
    "run.episodes_every=1",
]
LIVE = ["rloo", *WORLD, "--steps", "400", "--seed", "7"]
PICTURES = Path("docs/pictures")


def train(folder: Path, name: str, words: list[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "panoply",
        "train",
        *words,
        "--threads",
        "1",
        "--quiet",
        "--run",
        str(folder / name),
    ]


def wait_for(file: Path) -> None:
    """Until the run that goes on beside the pictures has begun."""
    for _ in range(120):
        if file.exists() and file.read_bytes().count(b"\n") > 5:
            return
        time.sleep(1)


def take(page: Any, name: str) -> None:
    """A picture with few colours, so that it is small."""
    page.wait_for_timeout(600)
    picture = Image.open(io.BytesIO(page.screenshot()))
    PICTURES.mkdir(exist_ok=True)
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        PICTURES / f"{name}.png", optimize=True
    )


def pictures(browser: Any, address: str, folder: Path) -> None:
    page = browser.new_page(viewport={"width": 1360, "height": 820}, color_scheme="light")
    page.goto(address)
    page.wait_for_selector(".run")
    base = page.url
    for name in RUNS:
        page.locator(".run", has=page.locator(f".run-sub[title='{name}']")).locator(".run-sub").click()
    page.get_by_role("heading", name=f"{len(RUNS)} runs ticked").wait_for()
    take(page, "runs")
    open_episode(page, f"{base}#/run/grpo-house-s0", "gated")
    page.keyboard.press("o")
    page.keyboard.press("c")
    take(page, "inspector")
    page.keyboard.press("d")
    open_episode(page, f"{base}#/run/grpo-house-s0", "surprise")
    page.keyboard.press("6")
    take(page, "surprising-dark")
    page.keyboard.press("d")
    branched(page, f"{base}#/run/arpo-house")
    page.goto(f"{base}#/catalogue")
    page.wait_for_selector("tbody tr")
    take(page, "catalogue")
    report = folder.parent / "report.html"
    command = [
        "report",
        *(str(folder / name) for name in RUNS),
        "-o",
        str(report),
        "--title",
        "GRPO and DAPO search a house",
    ]
    subprocess.run([sys.executable, "-m", "panoply", *command], check=True, stdout=subprocess.DEVNULL)
    page.goto(report.as_uri())
    take(page, "report")
    page.close()


def branched(page: Any, run: str) -> None:
    """The tree of a group in which something was found, and one of its episodes as a conversation."""
    page.keyboard.press("1")
    open_episode(page, run, "advantage")
    take(page, "branches")
    page.keyboard.press("b")
    page.keyboard.press("g")
    page.keyboard.press("o")
    take(page, "turns")
    page.keyboard.press("g")
    page.keyboard.press("b")


def open_episode(page: Any, run: str, order: str) -> None:
    page.goto(run)
    page.wait_for_selector(".run-page")
    page.get_by_label("Order of episodes").select_option(order)
    page.locator(".episode").first.click()
    page.wait_for_selector(".t.selected")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", metavar="DIR", help="where the runs are made and left")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen.keep or temporary) / "runs"
        begin = ["--model", str(folder / "start")]
        for name, words in {
            "start": START,
            **{name: [*words, *begin] for name, words in {**RUNS, "arpo-house": BRANCHED}.items()},
        }.items():
            if not (folder / name).exists():
                subprocess.run(train(folder, name, words), check=True)
        shutil.rmtree(folder / "rloo-house-s7", ignore_errors=True)
        live = subprocess.Popen(train(folder, "rloo-house-s7", [*LIVE, *begin]))
        try:
            wait_for(folder / "rloo-house-s7" / "metrics.jsonl")
            with sync_playwright() as play, server(folder) as address:
                path = shutil.which("chromium") or shutil.which("google-chrome")
                browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
                pictures(browser, address, folder)
                browser.close()
        finally:
            live.terminate()
            live.wait()


if __name__ == "__main__":
    main()
