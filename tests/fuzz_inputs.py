# ruff: noqa: E501
"""Bad input of every kind, made from a seed: what a person, a cut cable or somebody with ill will might hand over.

A kind is a function `(rng, place)` that makes one input below the folder `place` and gives it to Panoply. It returns when
the input was taken or refused in a sentence; anything else that it raises is a finding (see tests/fuzz.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import tiny

import panoply as pp
from panoply import cli, parts, registry
from panoply.errors import PanoplyError
from panoply.progress import Progress

Kind = Callable[[Random, Path], None]
DEEP = "[" * 3000 + "]" * 3000
WORDS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, -(10**400), 0.5, -0.0, 1e308, float("inf"), float("-inf"),
    float("nan"), "", "x", "none", "true", "0", "-1", "1e999", "nan", ".inf", "x" * 3000, "é\x1b[2J\u202e", "\udcff",
    "a\0b", "../../etc/passwd", "/dev/zero", "grpo@1", "chain@1", "{", "[1, 2", "{a: *b}", "2020-13-45", [], {}, [1], ["x"],
    {"part": "credit.group"}, {"part": "credit.nothing"}, {"part": 3}, {"id": None}, [[]], [None], {"": {}},
)  # fmt: skip
"""Values that stand in for others; the largest and strangest of each type among them."""


# ------------------------------------------------------------------ things to spoil, made once


@functools.cache
def originals() -> Path:
    """A run of text with a checkpoint to go on from, one of control, a model folder, logged data and own data."""
    root = Path(tempfile.mkdtemp(prefix="panoply-fuzz-"))
    tiny.train(root / "text", steps=2, settings={"run.checkpoint_every": 1, "run.episodes_every": 1})
    small = {
        "sample.envs": 2,
        "sample.length": 8,
        "run.held_out": 2,
        "policy.hidden": (4,),
        "run.device": "cpu",
    }
    pp.train("ppo", "cartpole", run=root / "control", steps=1, threads=1, settings=small, progress=Progress())
    shutil.copytree(root / "text/checkpoints/step-0000002/model", root / "model")
    world = registry.find("world", "logged:cartpole-random").build(size=60)
    world.data.save(root / "logged")
    rows = [
        {"prompt": f"{i}+1=", "completion": "2", "chosen": "2", "rejected": "3", "more": i} for i in range(8)
    ]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def spoilt(name: str, place: Path) -> Path:
    """A copy that may be spoilt."""
    source, target = originals() / name, place / name
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return target


# ------------------------------------------------------------------ how things are spoilt


def strange(rng: Random) -> Any:
    return rng.choice(WORDS)


def spoil_value(value: Any, rng: Random) -> Any:
    """The value with something in it replaced, removed or added."""
    spots: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        held = waiting.pop()
        inner = held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
        for key, one in inner:
            spots.append((held, key))
            waiting.append(one)
    if not spots or rng.random() < 0.1:
        return strange(rng)
    held, key = rng.choice(spots)
    if rng.random() < 0.25:
        del held[key]
    else:
        held[key] = strange(rng)
    return value


def spoil_text(text: bytes, rng: Random) -> bytes:
    """Bytes that are cut, flipped, doubled or nested."""
    at = rng.randrange(len(text) + 1)
    flipped = bytearray(text)
    for _ in range(rng.randint(1, 8)):
        if flipped:
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    return rng.choice(
        (b"", text[:at], bytes(flipped), text + text[:at], DEEP.encode(), text[:at] + b"\xff" + text[at:])
    )


def spoil_file(path: Path, rng: Random) -> None:
    """A file of other content, or something else in its place."""
    whole = path.read_bytes() if path.is_file() else b""
    way = rng.random()
    if way < 0.6 and path.suffix in (".json", ".jsonl"):
        with contextlib.suppress(ValueError, RecursionError):
            if path.suffix == ".json":
                path.write_text(json.dumps(spoil_value(json.loads(whole), rng)))
            else:
                lines = [json.loads(line) for line in whole.splitlines()]
                number = rng.randrange(len(lines)) if lines else 0
                lines[number : number + 1] = [spoil_value(line, rng) for line in lines[number : number + 1]]
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return
    if way < 0.8:
        path.write_bytes(spoil_text(whole, rng))
        return
    path.unlink(missing_ok=True)
    kind = rng.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        path.symlink_to("/dev/zero")


def spoil_folder(folder: Path, rng: Random, names: Sequence[str] = ("*",)) -> None:
    files = sorted(p for name in names for p in folder.rglob(name) if p.is_file())
    for path in rng.sample(files, min(len(files), rng.choice((1, 1, 2)))):
        spoil_file(path, rng)


def reseal(checkpoint: Path) -> None:
    """A manifest that fits what is there now, as somebody who changes a checkpoint would write it."""
    files = [
        p for p in checkpoint.rglob("*") if p.is_file() and not p.is_symlink() and p.name != "manifest.json"
    ]
    listing = {
        str(p.relative_to(checkpoint)): {
            "bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()
        }
        for p in files
    }  # fmt: skip
    with contextlib.suppress(OSError):
        (checkpoint / "manifest.json").unlink(missing_ok=True)  # it may be a pipe by now
        (checkpoint / "manifest.json").write_text(json.dumps({"step": 1, "files": listing}))


# ------------------------------------------------------------------ handing it over


def command(*words: str) -> None:
    """A command in this process. Whatever it prints, it ends with 0 or, with one sentence, with 2."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main([str(word) for word in words])
    except SystemExit as ended:
        code = int(ended.code or 0)
        assert code in (0, 2), f"exit code {code}"
        if code:
            assert err.getvalue().strip(), "refused without a word"
            assert "Traceback" not in err.getvalue()


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """A sentence is a good answer."""
    with contextlib.suppress(PanoplyError):
        yield


@contextlib.contextmanager
def own_registries() -> Iterator[None]:
    """What is registered inside is forgotten after it."""
    registry.entries()
    for slot in parts.SLOTS:
        registry.parts(slot)
    held = {slot: dict(known) for slot, known in parts._PARTS.items()}
    entries = dict(registry.ENTRIES)
    try:
        yield
    finally:
        for slot, known in parts._PARTS.items():
            known.clear()
            known.update(held[slot])
        registry.ENTRIES.clear()
        registry.ENTRIES.update(entries)


# ------------------------------------------------------------------ the kinds


OPTIONS = ("--world", "--set", "--preset", "--seed", "--steps", "--minutes", "--model", "--reference", "--device", "--dtype",
           "--threads", "--credit", "--data", "--reward", "--plugin", "--json", "--which", "--k", "--problems", "--attempts",
           "--temperature", "--lora", "-n", "--max-tokens", "--help", "--trust", "--video")  # fmt: skip


def command_lines(rng: Random, place: Path) -> None:
    """Words in any order after a command that does not train for long."""
    names = rng.choice(
        ("plan", "show", "list", "runs", "eval", "sample", "export", "report", "claim", "compare", "train")
    )
    known = ["grpo", "ppo", "dpo", "sac", "rlhf", "chain", "cartpole", "credit.group", "run", str(originals() / "text"),
             str(originals() / "model"), str(place), "update.lr=1", "world.operations=2"]  # fmt: skip
    words = [names]
    for _ in range(rng.randint(0, 5)):
        words.append(rng.choice((rng.choice(known), rng.choice(OPTIONS), text_of(strange(rng)))))
    if names in ("train", "compare", "claim"):
        words = [names, "no-such-method", *words[2:]]
    elif names in ("eval", "sample", "export", "report"):
        words = [names, rng.choice(known[-5:-2]), *words[2:]]
    if names == "eval":
        words += ["--problems", "2", "--attempts", "1"]
    command(*words)


def text_of(value: Any) -> str:
    """A value as a word of a command line, which cannot hold a NUL."""
    try:
        return (value if isinstance(value, str) else json.dumps(value)).replace("\0", "")
    except ValueError:
        return "9" * 5000


def settings(rng: Random, place: Path) -> None:
    """A setting of a method, a world, the policy or the run that is anything at all, in Python and as a word."""
    name, world = rng.choice((("grpo", "chain"), ("dpo", "chain"), ("ppo", "cartpole"), ("sac", "pendulum"),
                              ("iql", "logged:cartpole-random"), ("spo-tree", "chain"), ("gigpo", "keydoor"),
                              ("npg", "tabular"), ("ppo", "grid"), ("td3", "pointmass"), ("sft", "add"),
                              ("kto", "strings"), ("otc", "tools"), ("ppo", "bandit"), ("hdpo", "inventory"),
                              ("ppo", "minesweeper"), ("grpo", "manyanswers")))  # fmt: skip
    method = registry.find("method", name).build()
    built = registry.find("world", world).build
    fields = getattr(built, "__dataclass_fields__", {})
    policy = ("hidden", "activation", "std", "log_std", "atoms", "span", "stages", "epsilon", "betas")
    paths = [*method.settings(), *(f"world.{f}" for f in fields), *(f"policy.{p}" for p in policy)]
    paths += [f"run.{f}" for f in pp.planning.Options.__dataclass_fields__]
    chosen: dict[str, Any] = {rng.choice(paths): strange(rng) for _ in range(rng.choice((1, 1, 2)))}
    if rng.random() < 0.5:
        chosen = {path: text_of(value) for path, value in chosen.items()}
    with refused():
        made = pp.plan(name, world, settings=chosen, model="fresh")
        json.dumps(made.to_json(), allow_nan=False)
        from panoply.report.text import planned

        planned(made)


def setting_words(rng: Random, place: Path) -> None:
    """YAML and JSON as the value of a setting: cut, nested, referring to itself."""
    base = rng.choice((DEEP, "{a: {b: [1, 2]}}", "&a [*a]", "[&a [1], *a, *a]", '{"part": "credit.group", "scale": "std"}',
                       "!!python/object/apply:os.system [x]", "- a\n- b", "2001-01-01", "0x_", "1_000", "!!set {a}",
                       "[" + "1," * 5000 + "]", "? a : b", "a: b: c", "%YAML 9", "--- x", "'", "@"))  # fmt: skip
    word = spoil_text(base.encode(), rng).decode("utf-8", "replace").replace("\0", "")[:20_000]
    path = rng.choice(
        (
            "credit",
            "update.schedule",
            "world.levels",
            "run.sinks",
            "reward.name",
            "regularise.kl",
            "policy.hidden",
        )
    )
    command("plan", "grpo", "--set", f"{path}={word or 'x'}")
    with refused():
        pp.plan("grpo", settings={path: spoil_value({"part": "schedule.linear", "end": 0.1, "x": [1]}, rng)})


def data_files(rng: Random, place: Path) -> None:
    """One's own data, spoilt anywhere in the file."""
    file = spoilt("data.jsonl", place)
    spoil_file(file, rng)
    method = rng.choice(("sft", "dpo"))
    command("plan", method, "--data", file, "--model", originals() / "model")
    with refused():
        world = registry.find("world", "jsonl").build(data=str(file), model=str(originals() / "model"))
        task = world.task("train", 0)
        for use in (
            lambda: world.gold(task),
            lambda: world.pair(task, None),
            lambda: world.grade(task, [1, 2]),
        ):
            with refused():
                use()


def checkpoints(rng: Random, place: Path) -> None:
    """A checkpoint that was spoilt, and often sealed again, is what a run goes on from."""
    run = spoilt("text", place)
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints/step-0000002")
    newest = run / "checkpoints/step-0000001"
    names = rng.choice((("state.json",), ("state.safetensors",), ("manifest.json",), ("*",)))
    spoil_folder(newest, rng, names)
    if rng.random() < 0.6:
        reseal(newest)
    command("train", "--resume", run, "--quiet")
    command("export", run, place / "exported", "--which", rng.choice(("best", "last", "1", "9")))


def run_folders(rng: Random, place: Path) -> None:
    """The records of a run, spoilt, before every command that looks at runs."""
    name = rng.choice(("text", "control"))
    run = spoilt(name, place)
    spoil_folder(run, rng, ("run.json", "metrics.jsonl", "episodes.jsonl", "result.json", "lock"))
    command("runs", place)
    command("runs", place, "--json")
    looks = (["eval", run, "--problems", "2", "--attempts", "1"], ["sample", run, "1+1=", "--max-tokens", "3"],
             ["report", run, "--out", place / "out.html"], ["train", "--resume", run, "--quiet"],
             ["plan", "grpo", "--model", run])  # fmt: skip
    command(*map(str, rng.choice(looks)))
    with refused():
        pp.Trained.of(pp.run.Run.open(run)).policy()


def model_folders(rng: Random, place: Path) -> None:
    """A model folder, spoilt."""
    folder = spoilt("model", place)
    spoil_folder(folder, rng, rng.choice((("config.json",), ("tokenizer*.json",), ("*",))))
    command("sample", folder, "1+1=", "--max-tokens", "3")
    command("plan", "grpo", "--model", folder)


SNIPPETS = (
    "import panoply as pp\n@pp.method('mine@1')\ndef mine(): return {value}\n",
    "import panoply as pp\n@pp.method({value})\ndef mine(): return pp.grpo()\n",
    "import panoply as pp\n@pp.part({value})\ndef mine(x, *, a: int = 1): return x\n",
    "import panoply as pp\n@pp.part('credit', bounds={value})\ndef mine(x, *, a: int = 1): return x\n",
    "import panoply as pp\n@pp.part('credit')\ndef mine(x, *, a: {value} = 1): return x\n",
    "import panoply as pp\n@pp.part('credit', equation={value})\ndef mine(x, *, a: float = 1.0): return x\n",
    "import panoply as pp\n@pp.part('credit', needs={value})\ndef mine(x): return x\n",
    "import panoply as pp\n@pp.world('mine@1')\nclass Mine: pass\n",
    "import panoply as pp\n@pp.world({value})\nclass Mine(pp.Chain): pass\n",
    "import panoply as pp\n@pp.method('mine@1', presets={value})\ndef mine(): raise ValueError('no')\n",
    "import sys\nsys.exit({value})\n",
    "raise {value}\n",
    "def f(): return f()\nf()\n",
    "{value}",
    "\x00",
    "x = " + "(" * 500 + ")" * 500,
    "import panoply as pp\npp.grpo = {value}\ndel pp.grpo\n",
)


def plug_ins(rng: Random, place: Path) -> None:
    """A plug-in that raises, ends, returns nothing or registers nonsense."""
    file = place / rng.choice(("mine.py", "mine", "m" * 200 + ".py"))
    text = rng.choice(SNIPPETS).replace(
        "{value}", rng.choice((repr(strange(rng)), "None", "print", "'credit'", "type"))
    )
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    if rng.random() < 0.1:
        spoil_file(file, rng)
    with own_registries():
        words = rng.choice((["plan", "mine"], ["show", "mine"], ["list"], ["plan", "grpo", "--credit", "mine"],
                            ["plan", "grpo", "--world", "mine"], ["show", "credit.mine"], ["list", "parts"]))  # fmt: skip
        command(*words, "--plugin", str(file))


def logged_files(rng: Random, place: Path) -> None:
    """Logged data with other columns, shapes and types, and Minari's files with anything in them."""
    import torch
    from safetensors.torch import load_file, save_file

    from panoply.worlds.logged.data import LoggedData

    folder = spoilt("logged", place)
    if rng.random() < 0.6:
        columns = load_file(folder / "data.safetensors")
        name = rng.choice(sorted(columns))
        made = columns[name]
        ways: list[Callable[[], torch.Tensor]] = [
            lambda: made[:-1], lambda: made.reshape(-1), lambda: made[None], lambda: made.float() * float("nan"),
            lambda: made.to(torch.int64) - 7, lambda: made.to(torch.bool), lambda: made.to(torch.bfloat16),
            lambda: made[:0], lambda: made.to(torch.float64) * 1e300, lambda: torch.tensor(3.0),
            lambda: made.flip(0).contiguous(), lambda: made.to(torch.complex64),
        ]  # fmt: skip
        columns[name] = rng.choice(ways)()
        if rng.random() < 0.2:
            del columns[name]
        save_file({k: v.contiguous() for k, v in columns.items()}, folder / "data.safetensors")
    else:
        spoil_folder(folder, rng)
    with refused():
        LoggedData.load(folder).experience()
    with refused():
        world = registry.find("world", "logged:cartpole-random").build(file=str(folder))
        world.data.experience()
    command("plan", "iql", "--world", "logged:cartpole-random", "--set", f"world.file={folder}")


def minari_files(rng: Random, place: Path) -> None:
    """What Minari finds where it looks for its data sets."""
    from panoply.worlds.logged import minari

    data = place / "mine/data-v0/data"
    data.mkdir(parents=True)
    (data / "main_data.hdf5").write_bytes(spoil_text(b"\x89HDF\r\n\x1a\n" + bytes(64), rng))
    facts = {"dataset_id": "mine/data-v0", "total_steps": 3, "total_episodes": 1, "data_format": "hdf5",
             "observation_space": None, "action_space": None, "minari_version": "0.5.0"}  # fmt: skip
    (data / "metadata.json").write_text(json.dumps(spoil_value(facts, rng)))
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(place)
    try:
        with refused():
            minari.read(rng.choice(("mine/data-v0", "mine", "", "../x", "a" * 500, "mine/data-v1")))
    finally:
        if before is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = before


def ui_requests(rng: Random, place: Path) -> None:
    """Questions to the page about spoilt runs, with any words in them."""
    from starlette.exceptions import HTTPException

    from panoply.report.run_index import RunIndex
    from panoply.ui.server import Answers, _json

    run = spoilt(rng.choice(("text", "control")), place)
    if rng.random() < 0.7:
        spoil_folder(run, rng, ("run.json", "metrics.jsonl", "episodes.jsonl", "result.json"))
    answers = Answers(RunIndex(place))
    ask = {"run": run.name, "runs": run.name, "id": "grpo"}
    for _ in range(rng.randint(0, 3)):
        key = rng.choice(("run", "runs", "at", "metric", "x", "smooth", "id", "cached", "stamp", "together"))
        ask[key] = rng.choice(
            (text_of(strange(rng)), run.name, "0", "step", "reward", "99999999999999999999")
        )
    for question in rng.sample(
        ("runs", "curves", "run", "compare", "episodes", "episode", "works", "work"), 3
    ):
        with contextlib.suppress(HTTPException, PanoplyError):
            _json(getattr(answers, question)(ask))


def odd_places(rng: Random, place: Path) -> None:
    """Names too long for a file system, not UTF-8, with NUL, of pipes and devices, wherever a path is taken."""
    os.mkfifo(place / "pipe")
    (place / os.fsdecode(b"caf\xe9")).mkdir()
    odd = rng.choice((str(place / "pipe"), "x" * 300, "/".join(["y" * 200] * 30), str(place / os.fsdecode(b"caf\xe9")),
                      os.fsdecode(b"\xff\xfe"), "/dev/zero", "/dev/null", "/proc/self/mem", "", " ", "~", str(place)))  # fmt: skip
    uses = (["runs", odd], ["eval", odd], ["eval", odd, "--world", "chain"], ["sample", odd, "1+1="], ["report", odd],
            ["export", odd, str(place / "o")], ["export", str(originals() / "text"), odd], ["train", "--resume", odd],
            ["plan", "grpo", "--model", odd], ["plan", "sft", "--data", odd + ".jsonl", "--model", str(originals() / "model")],
            ["plan", "grpo", "--plugin", odd], ["plan", "grpo", "--world", odd], ["plan", odd], ["show", odd],
            ["plan", "grpo", "--reference", odd], ["plan", "iql", "--world", "logged:cartpole-random", "--set", f"world.file={odd}"],
            ["train", "grpo", *tiny.words(), "--model", "fresh", "--steps", "1", "--quiet", "--run", odd])  # fmt: skip
    command(*rng.choice(uses))


KINDS: tuple[Kind, ...] = (
    command_lines, settings, setting_words, data_files, checkpoints, run_folders, model_folders, plug_ins, logged_files,
    minari_files, ui_requests, odd_places,
)  # fmt: skip


def one(seed: int) -> Kind:
    """Make the input of a seed and hand it over, in a folder of its own; kinds take turns."""
    kind = KINDS[seed % len(KINDS)]
    originals()
    with (
        tempfile.TemporaryDirectory(prefix="panoply-input-", ignore_cleanup_errors=True) as place,
        contextlib.chdir(place),
    ):
        kind(Random(seed), Path(place))
    return kind
