"""The twelve things a newcomer does, one after another: python examples/tour/tour.py

1 own model, 2 own data and reward, 3 own method, 4 own world, 5 objects and steps, 6 notebook, 7 export, 8 adapter,
9 report, 10 page, 11 video, 12 compare. Each station is a function that asserts what it shows; everything is written
below one folder (`tour/`, or the one named, which must not be there yet). It takes a few minutes on two cores, and with
--quick half a minute.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

import panoply as pp
from panoply.methods.base.grpo import grpo
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
LONGEST = 8
SHORT = {"sample.max_tokens": LONGEST}


# What a newcomer writes. It lives in this script, and still works in the processes of `compare`.


def brief(completions: list[str], **_: object) -> list[float]:
    """A reward: short answers are better."""
    return [1 - len(text) / LONGEST for text in completions]


@pp.part("credit", equation="A = R − ½")
def half(experience: pp.Experience, *, scale: float = 1.0) -> Tensor:
    """A part: what is above one half is good."""
    episodes = experience.by("episode")
    return scale * episodes.rows(episodes.sum(experience["reward"]) - 0.5)


@pp.method("half-grpo@1", base="grpo")
def half_grpo() -> pp.OnPolicy:
    """GRPO with another credit: a method is a value, and a new one a change to it."""
    return grpo().but(credit=half(), regularise=())


class Tour:
    """Where things go, and how much is done."""

    def __init__(self, folder: Path, quick: bool):
        self.folder, self.quick = folder, quick
        self.model, self.runs = folder / "my-model", folder / "runs"
        self.notes: list[str] = []

    def small(self, **more: Any) -> dict[str, Any]:
        """Settings that fit a tiny model: fewer prompts, and in a hurry fewer still."""
        size = (
            {"sample.prompts": 2, "sample.group": 4}
            if self.quick
            else {"sample.prompts": 8, "sample.group": 8}
        )
        return {"run.held_out": 4 if self.quick else 16, **size, **more}

    def steps(self, many: int) -> int:
        return 2 if self.quick else many


# ------------------------------------------------------------------ the stations


def own_model(tour: Tour) -> str:
    """A Hugging Face folder; yours comes from elsewhere, this one has new weights and a letter a token."""
    tokenizer = Tokenizer.of_characters("0123456789+=", eos="<end>")
    shape = DecoderConfig(vocab_size=tokenizer.vocab_size, width=32, layers=1, heads=2, inner=64, tied=True)
    TextPolicy.fresh(shape, tokenizer, seed=0).save(tour.model)
    (said,) = pp.sample(tour.model, "3+4=", max_tokens=LONGEST)
    assert (tour.model / "config.json").is_file()
    return f"an untrained model says '{said}'"


def own_data_and_reward(tour: Tour) -> str:
    """Rows and a function, as they are in Python."""
    done = pp.train(
        "grpo", data=ROWS, reward=brief, model=tour.model, run=tour.runs / "own", steps=tour.steps(30),
        settings=tour.small(**SHORT, **{"update.lr": 3e-3}), threads=1, progress=pp.Progress(),
    )  # fmt: skip
    rewards = [json.loads(line)["reward"] for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    assert len(rewards) == tour.steps(30)
    assert tour.quick or rewards[-1] > rewards[0] + 0.1, rewards
    assert (done.run / "given" / "data.jsonl").is_file(), "the rows are kept with the run"
    return f"reward {rewards[0]:.2f} → {rewards[-1]:.2f} in {len(rewards)} steps"


def own_method(tour: Tour) -> str:
    """A part is a function over columns; `but` puts it into a method."""
    made = pp.plan(half_grpo(), "chain", model="fresh", settings=tour.small(**{"world.operations": 2}))
    assert made.method_id == "half-grpo@1"
    assert "A = R − ½" in repr(made)
    assert half_grpo().diff(grpo())[0][:2] == ("credit", "half")
    differs = dict.fromkeys(path.split(".")[0] for path, _, _ in half_grpo().diff(grpo()))
    return f"half-grpo differs from grpo in {' and '.join(differs)}"


def own_world(tour: Tour) -> str:
    """A world is a class with tasks and a verifier; examples/plugin_world.py has one in sixty lines."""
    done = pp.train(
        "sft", "reverse", plugins=[HERE.parent / "plugin_world.py"], model="fresh", run=tour.runs / "world",
        steps=tour.steps(100), settings={"data.batch": 16, "run.held_out": 8}, threads=1, progress=pp.Progress(),
    )  # fmt: skip
    found = pp.evaluate(done, problems=8, attempts=1)
    assert 0 <= found.sampled <= 1
    return f"words written backwards: {found.sampled:.0%}"


def objects_and_steps(tour: Tour) -> str:
    """A run in your hands: look at every step, and stop when you have seen enough."""
    steps = pp.steps(
        grpo().but(credit=half(scale=2.0)), "chain", model="fresh", run=tour.runs / "steps", steps=50, threads=1,
        settings=tour.small(**{"world.operations": 2}), progress=pp.Progress(),
    )  # fmt: skip
    for step in steps:
        assert len(step.experience) == step.metrics["decisions"]
        if step.number == tour.steps(5):
            step.stop()
    assert steps.result.after["step"] == tour.steps(5)
    assert "held-out success" in repr(steps.result)
    return f"stopped at step {steps.result.after['step']} of 50: the run is finished"


def notebook(tour: Tour) -> str:
    """notebook.ipynb, by jupyter where it is installed, else its cells in order."""
    sys.path.insert(0, str(HERE))
    from run_notebook import run

    cells = run(HERE / "notebook.ipynb", tour.folder, quick=tour.quick)
    return f"{cells} cells, the method of one of them in other processes too"


def export(tour: Tour) -> str:
    """A folder that transformers opens; `which` says of which step."""
    folder = pp.export(tour.runs / "own", tour.folder / "exported", which="last")
    (said,) = pp.sample(folder, "3+4=", temperature=0, max_tokens=LONGEST)
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        return f"exported; it says '{said}' (transformers is not installed)"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer("3+4=", return_tensors="pt", add_special_tokens=False)["input_ids"]
    written = model.generate(asked, do_sample=False, max_new_tokens=LONGEST)[0, asked.shape[1] :]
    theirs = tokenizer.decode(written, skip_special_tokens=True)
    assert theirs == said.removesuffix("<end>"), (theirs, said)
    return f"transformers says what panoply says: '{theirs}'"


def adapter(tour: Tour) -> str:
    """Low-rank adapters; PEFT opens what is exported."""
    try:
        import peft  # noqa: F401
    except ImportError:
        return "peft is not installed"
    done = pp.train(
        "grpo", data=ROWS, reward=brief, model=tour.model, lora=2, run=tour.runs / "lora", steps=2,
        settings=tour.small(**SHORT), threads=1, progress=pp.Progress(),
    )  # fmt: skip
    folder = pp.export(done, tour.folder / "adapter", which="last", adapter=True)
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert size < (tour.model / "model.safetensors").stat().st_size
    return f"{size:,} bytes beside a model of {(tour.model / 'model.safetensors').stat().st_size:,}"


def report(tour: Tour) -> str:
    """One page that opens offline: panoply report runs/…"""
    from panoply.report.html import write_report
    from panoply.report.study import Study

    page = write_report(Study.of([str(tour.runs / "own")]), tour.folder / "report.html", "The tour")
    assert "The tour" in page.read_text(encoding="utf-8")
    return f"{page.name}, {page.stat().st_size:,} bytes"


def page(tour: Tour) -> str:
    """What `panoply ui` serves, asked without a browser."""
    try:
        from panoply.ui.server import Serving
    except ImportError:
        return "starlette and uvicorn are not installed"
    serving = Serving(tour.runs, port=0)
    ready = threading.Event()
    thread = threading.Thread(target=serving.serve_until_stopped, args=(lambda _: ready.set(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        opened = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert b"<title>" in opened.open(serving.address).read()
        asked = opened.open(f"http://127.0.0.1:{serving.port}/api/runs").read()
    finally:
        serving.should_exit = True
        thread.join(30)
    runs = {run["id"]: run["status"] for run in json.loads(asked)["runs"]}
    assert runs["own"] == "finished"
    return f"panoply ui {tour.runs} shows {len(runs)} runs"


def video(tour: Tour) -> str:
    """The same parts on control, and a policy to watch."""
    settings = {"run.held_out": 4}
    done = pp.train(
        "ppo", "cartpole", run=tour.runs / "cartpole", steps=tour.steps(20), settings=settings, threads=1,
        progress=pp.Progress(),
    )  # fmt: skip
    earned = pp.video(done, tour.folder / "cartpole.gif", which="last")
    assert (tour.folder / "cartpole.gif").read_bytes()[:3] == b"GIF"
    return f"cartpole.gif: balanced for {earned:.0f} steps"


def compare(tour: Tour) -> str:
    """Methods side by side at equal budget, each run in a process of its own."""
    found = pp.compare(
        "grpo", {"half": half_grpo()}, world="chain", seeds=1 if tour.quick else 3,
        budget=f"steps={tour.steps(20)}", workers=1 if tour.quick else None, folder=tour.folder / "compared",
        cache=tour.folder / "cache",
        settings={"run.held_out": 8, **({"sample.prompts": 2} if tour.quick else {})},
    )  # fmt: skip
    assert not found.failed, found.failed
    assert [r.arm.label for r in found.results] == ["grpo", "half"]
    print(found)
    return "grpo and half-grpo in " + ", ".join(p.name for p in sorted((tour.folder / "compared").iterdir()))


STATIONS: tuple[Callable[[Tour], str], ...] = (
    own_model, own_data_and_reward, own_method, own_world, objects_and_steps, notebook, export, adapter, report, page,
    video, compare,
)  # fmt: skip


def main(folder: str = "tour", quick: bool = False) -> None:
    at = Path(folder)
    if at.exists():
        sys.exit(f"{at} is there already: name another folder.")
    at.mkdir(parents=True)
    tour = Tour(at.resolve(), quick)
    for number, station in enumerate(STATIONS, 1):
        print(f"{number:2} {station.__name__.replace('_', ' ')}: {station(tour)}", flush=True)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--quick"]
    main(*words[:1], quick="--quick" in sys.argv)
