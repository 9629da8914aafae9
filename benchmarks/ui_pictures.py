"""The pictures of docs/ui.md: train a few small runs, open them in a browser, and take them.

python benchmarks/ui_pictures.py               trains for about two minutes, then writes docs/pictures/*.png
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

SEVERAL = ("--set", "update.epochs=2", "--set", "update.minibatches=2")
RUNS = [
    *(
        (f"grpo-chain-s{s}", ["grpo", "--world", "chain", "--steps", "60", "--seed", str(s), *SEVERAL])
        for s in range(3)
    ),
    *(
        (f"dapo-chain-s{s}", ["dapo", "--world", "chain", "--steps", "60", "--seed", str(s)])
        for s in range(3)
    ),
    ("gigpo-keydoor-s0", ["gigpo", "--world", "keydoor", "--steps", "40", "--set", "run.episodes_every=5"]),
    (
        "grpo-tools-s0",
        ["grpo", "--world", "tools", "--steps", "40", "--set", "run.episodes_every=5", *SEVERAL],
    ),
]
TICKED = [f"{method}-chain-s{s}" for method in ("grpo", "dapo") for s in range(3)]
LIVE = ["rloo", "--world", "chain", "--steps", "400", "--seed", "7"]
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
    for name in TICKED:
        page.locator(".run", has=page.locator(f".run-sub[title='{name}']")).locator(".run-sub").click()
    page.get_by_role("heading", name="6 runs ticked").wait_for()
    take(page, "runs")
    open_episode(page, f"{base}#/run/grpo-tools-s0", "gated")
    page.keyboard.press("c")
    take(page, "inspector")
    page.keyboard.press("d")
    open_episode(page, f"{base}#/run/gigpo-keydoor-s0", "surprise")
    page.keyboard.press("6")
    take(page, "surprising-dark")
    page.keyboard.press("d")
    page.goto(f"{base}#/catalogue")
    page.wait_for_selector("tbody tr")
    take(page, "catalogue")
    report = folder.parent / "report.html"
    command = [
        "report",
        *(str(folder / name) for name in TICKED),
        "-o",
        str(report),
        "--title",
        "GRPO and DAPO on chain",
    ]
    subprocess.run([sys.executable, "-m", "panoply", *command], check=True, stdout=subprocess.DEVNULL)
    page.goto(report.as_uri())
    take(page, "report")
    page.close()


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
        for name, words in RUNS:
            if not (folder / name).exists():
                subprocess.run(train(folder, name, words), check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder / "rloo-chain-s7", ignore_errors=True)
        live = subprocess.Popen(train(folder, "rloo-chain-s7", LIVE), stdout=subprocess.DEVNULL)
        try:
            wait_for(folder / "rloo-chain-s7" / "metrics.jsonl")
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
