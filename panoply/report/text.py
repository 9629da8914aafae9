"""What the command line prints of plans, runs and evaluations."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply.costs import Activations, cost
from panoply.devices import missing
from panoply.effects import inert
from panoply.errors import plain
from panoply.files import is_file
from panoply.kinds import is_text, kind_of
from panoply.parts import show_value
from panoply.planning import Plan
from panoply.regimes import Method
from panoply.report.fits import LARGE, peak_rows, si, what_fits
from panoply.report.layout import equations, indent, page_width, prose, table
from panoply.run import RECIPE, Run
from panoply.worlds.world import TextWorld

if TYPE_CHECKING:
    from panoply.api import Trained
    from panoply.evaluation.held_out import Evaluation
    from panoply.rollout.playing import Episode

EXACT = 5e7
"""Multiplications up to which a plan solves a world exactly to say how hard it is."""


def part_table(method: Method) -> str:
    """Every slot with its part and how that is set."""
    return table(_part_rows(method))


def _part_rows(method: Method) -> list[tuple[str, str, str]]:
    rows = []
    for slot, value in method.slots().items():
        several = value if isinstance(value, tuple) else (value,)
        for held in several:
            settings = (f"{k}={show_value(v)}" for k, v in held.settings().items())
            rows.append((slot, held.info.name, ", ".join(settings)))
        if not several:
            rows.append((slot, "–", "none"))
    for name, inner in method.seated().items():
        rows += [(f"{name}.{slot}", part, settings) for slot, part, settings in _part_rows(inner)]
    return rows


# ------------------------------------------------------------------ plan


def _activations(kept: Activations) -> str:
    how = (
        "only the stream between blocks is kept, their inside is computed again"
        if kept.recomputed
        else "kept"
    )
    if not kept.bytes:
        return "not counted: the weights of this model have other names than those that are known"
    least = f"the longest sequence alone {si(kept.longest)}B"
    return f"about {si(kept.bytes)}B for {kept.tokens:,} tokens at a time, {least}; {how}"


def _adapters(made: Plan) -> str:
    """What adapters would be, in words."""
    rank, said = made.options.lora, made.adapters()
    alpha = 2.0 * rank if said.alpha is None else said.alpha
    words = [f"rank {rank}", f"α {alpha:g}" + (", over the rank's root (rsLoRA)" if said.rslora else "")]
    words += ["with lengths that learn (DoRA)"] if said.dora else []
    words.append(f"on {', '.join(said.target_modules)}" if said.target_modules else "on every linear layer")
    words += [f"and {', '.join(said.target_parameters)}"] if said.target_parameters else []
    words += [f"over weights in {said.base}"] if said.base != "whole" else []
    return ", ".join(words)


def planned(made: Plan) -> str:
    """The resolved method, its equation, what it needs, and settings without effect."""
    if made.method.regime == "make":
        head = f"{made.method_id} on {made.world_id}, seed {made.options.seed}"
        return "\n".join(
            [head, indent(equations(made.method.equation())), "", "parts", indent(part_table(made.method))]
        )
    needed = cost(made)
    memory = [f"{name} {si(size)}B" for name, size in needed.memory_bytes.items()]
    options = made.options
    learning = (
        "" if needed.trainable == needed.parameters else f", of which {needed.trainable:,} in adapters learn"
    )
    rows = [
        ("parameters", f"{needed.parameters:,}{learning}"),
        *([("adapters", _adapters(made))] if options.lora else []),
        ("tokens a step", f"at most {needed.sampled_tokens:,} sampled, {needed.trained_tokens:,} trained on"),
        ("steps", f"{options.steps}" + (f", or {options.minutes:g} minutes" if options.minutes else "")),
        ("memory", f"{', '.join(memory)}: {si(sum(needed.memory_bytes.values()))}B, and activations"),
        ("activations", _activations(needed.activations)),
        *peak_rows(needed.peak, options.is_spread()),
        (
            "arithmetic",
            f"at most {si(needed.operations)}FLOP a step, {si(needed.operations * options.steps)}FLOP in all",
        ),
    ]
    world = made.world()
    kind = kind_of(world)
    if said := kind.remark(options.model, world, made.adapters()) or kind.runs(options.model, world):
        rows.append(("model", said))
    if said := kind.reads(options.model, world, made.policy_options):
        rows.append(("context", said))
    if why := missing(options.device):
        rows.append(("device", f"{why} This is the plan of a run elsewhere; here it would be refused."))
    if options.is_spread():
        from panoply.scale import placement

        rows += placement.rows(made, needed)
    rows += _exploration(world) + _circle(made, world)
    if is_text(world) and (said := world.about()):
        rows.append(("data", said))
    if is_text(world) and (said := world.walls()):
        rows.append(("sandbox", said))
    pieces = [
        f"{made.method_id} on {made.world_id}, seed {options.seed}",
        indent(equations(made.method.equation())),
        "",
        "parts",
        indent(part_table(made.method)),
        "",
        "needs",
        indent(table([*rows, *(("extra", e) for e in needed.extra_forwards)])),
    ]
    large = options.dtype != "float32" or needed.parameters > LARGE
    if is_text(world) and large and not made.method.seated():
        pieces += [
            "",
            "what such a step takes of a GPU, by the size of the model",
            indent(what_fits(made, needed)),
        ]
    idle = inert(made)
    if idle:
        reasons: dict[str, list[str]] = {}
        for path, reason in idle:
            reasons.setdefault(reason, []).append(path)
        pieces += ["", "defaults without effect here"]
        pieces += [indent(prose(f"{', '.join(paths)}: {reason}")) for reason, paths in reasons.items()]
    return "\n".join(pieces)


def _exploration(world: Any) -> list[tuple[str, str]]:
    """How hard a world with exact values is for random exploration (see evaluation/effective_horizon.py)."""
    mdp = getattr(world, "mdp", None) if "model" in world.access else None
    horizon = getattr(world, "horizon", None)
    if mdp is None or not horizon or mdp.transitions.size * horizon * horizon > EXACT:
        return []
    from panoply.evaluation.effective_horizon import effective_horizon

    found = effective_horizon(mdp, horizon)
    backups = "no backup" if found.k == 1 else f"{(found.k or 1) - 1} backups"
    return [
        (
            "exploration",
            f"effective horizon {found.value:.1f}: greedy by random play's values is best after {backups}",
        )
    ]


def _circle(made: Plan, world: Any) -> list[tuple[str, str]]:
    """That a judge gives answers one number each, and annotators who prefer in a circle have none to give."""
    needs, share = made.method.needs(), getattr(world, "intransitive", 0.0)
    if getattr(getattr(made.method, "sample", None), "third", None) and "signal:preferred" in needs:
        said = "three raters may prefer in a circle: a reward of steps has an order, so it fits their average"
        return [("preferences", said)]
    if not share or "judged" not in needs or "world:prefer" not in needs:
        return []
    said = f"{share:.0%} of them go round in a circle: one number an answer has an order, so it fits their average"
    return [("preferences", said)]


# ------------------------------------------------------------------ results


def trained(result: Trained) -> str:
    """Held-out success before and after, where the run lies, and what to type next."""
    before, after = result.before, result.after
    rows = [(f"held-out {after.get('of', 'success')}", "before", "", "after")]
    for name in (n for n in after if f"{n}_interval" in after):
        interval = _interval(after[f"{name}_interval"], 2)
        rows.append((name, _mean(before, name), "→", f"{after[name]:.3f}  {interval}"))
    for name, rate in after.get("success", {}).items():
        rows.append((f"success, {name}", _mean(before.get("success", {}), name), "→", f"{rate:.3f}"))
    there = after.get("elsewhere", {})
    for name in (n for n in there if f"{n}_interval" in there):
        interval = _interval(there[f"{name}_interval"], 2)
        start = _mean(before.get("elsewhere", {}), name)
        rows.append((f"{name}, in {there['world']}", start, "→", f"{there[name]:.3f}  {interval}"))
    rows += _graded(after)
    if after.get("solved") is not None:
        reached = "reached" if after["solved"] else "not reached"
        rows.append(("solved", "", "", f"the mark of {after['solved_at']:g} is {reached}"))
    nexts = next_commands(Run.open(result.run))
    wide = max(len(command) + len(why) for command, why in nexts) + 4 > page_width()
    listing = "\n".join(f"{why}:\n  {command}" for command, why in nexts) if wide else table(nexts)
    facts = f"{result.seconds:.0f} s of training, run folder {result.run}"
    return "\n".join(
        [
            table(rows, margin=0),
            *found_by(result.run),
            *_best(Run.open(result.run)),
            facts,
            "",
            "what next",
            indent(listing),
        ]
    )


def found_by(run: Path) -> list[str]:
    """What a run's parts have found, or of a recipe those of all its stages (`tells` of a part)."""
    of_recipe = is_file(run.parent / RECIPE)
    runs = sorted(path.parent for path in run.parent.glob("*/run.json")) if of_recipe else [run]
    results = (result for one in runs if (result := Run.open(one).result()) is not None)
    return [sentence for result in results for sentence in result.get("found", [])]


def _mean(measured: Mapping[str, Any], name: str) -> str:
    """A mean, or a dash where nothing could be graded."""
    return f"{measured[name]:.3f}" if name in measured else "–"


def _interval(ends: Sequence[float], digits: int) -> str:
    low, high = (f"{end:.{digits}f}" for end in ends)
    return f"(95 % interval {low} to {high})" if low.startswith("-") else f"(95 % interval {low}–{high})"


def _graded(measured: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    lost = measured.get("ungraded")
    return [("not graded", "", "", f"{lost} answers, which are left out")] if lost else []


def _best(run: Run) -> list[str]:
    """Which step commands take of a run, where that is not its last."""
    result = run.result()
    if result is None or "best" not in result or result["best"]["step"] == result["steps"]:
        return []
    best, last = result["best"]["step"], result["steps"]
    what = "the model before training" if best == 0 else "the best"
    return [f"eval, sample and --model take step {best}, {what}; --which last takes step {last}"]


def _word(value: Any) -> str:
    """A value as `--set` reads it."""
    if isinstance(value, tuple) and any(
        isinstance(v, str) and not re.fullmatch(r"[^\s,\[]+", v) for v in value
    ):
        return json.dumps(value, ensure_ascii=False)
    return ",".join(map(_word, value)) if isinstance(value, tuple) else show_value(value)


def pasted(text: str) -> str:
    """A text as a shell takes it in one line, whatever is in it: quoted, with line breaks and the like written out."""
    if text.isprintable():
        return shlex.quote(text)
    letters = (plain(c) if not c.isprintable() else f"\\{c}" if c in "\\'" else c for c in text)
    return f"$'{''.join(letters)}'"


def _short_prompt(world: TextWorld) -> str:
    """The shortest of a few held-out prompts, or a word for one where all are long."""
    texts = (world.tokenizer.decode(list(world.task("test", i).prompt)) for i in range(8))
    found = min(texts, key=len)
    return found if len(found) <= 200 else "PROMPT"


def _world_words(made: Plan) -> str:
    """The words that name a plan's world and its settings; of one's own data, the file and the reward functions."""
    settings = dict(made.world_options)
    words = [] if made.world_id == "chain@1" else ["--world", made.world_id.split("@")[0]]
    if made.world_id == "jsonl@1":
        rewards, weights = settings.pop("rewards", ()), settings.pop("weights", ())
        words = ["--data", os.path.relpath(settings.pop("data"))]
        for source, weight in zip(rewards, weights or [1.0] * len(rewards), strict=True):
            words += ["--reward", os.path.relpath(source) + (f"={weight:g}" if weight != 1 else "")]
        settings.pop("model", None)
    words += [word for k, v in settings.items() for word in ("--set", f"world.{k}={_word(v)}")]
    return "".join(f" {shlex.quote(word)}" for word in words)


def next_commands(run: Run) -> list[tuple[str, str]]:
    """Commands that make sense after a run, and what each is for."""
    from panoply.rollout.playing import several_turns

    made = run.plan()
    name, folder = made.method_id.split("@")[0], shlex.quote(str(run.folder))
    plugins = "".join(f" --plugin {shlex.quote(os.path.relpath(p))}" for p in made.plugins)
    world = _world_words(made)
    built = made.world()
    if is_text(built):
        prompt = "" if several_turns(built) else f" {pasted(_short_prompt(built))}"
        looking = [
            (f"panoply eval {folder} --k 1,16", "pass@k with intervals"),
            (f"panoply sample {folder}{prompt}", "what the policy says now"),
            (f"panoply export {folder} my-model", "a folder that transformers opens"),
        ]
    else:
        looking = [
            (f"panoply eval {folder}", "returns with intervals"),
            (f"panoply sample {folder} --video {name}.gif", "watch the policy act"),
            (f"panoply export {folder} my-policy", "a folder with the policy"),
        ]
    if made.policy_options.get("head", "distribution") != "distribution":
        return [*looking, (f"panoply show {name}{plugins}", "the equation and the parts that just ran")]
    alike = f" --lora {made.options.lora}" if made.options.lora else ""
    alike += f" --dtype {made.options.dtype}" if made.options.dtype != "float32" else ""
    if made.method.regime == "on_policy":
        other = "grpo" if name == "reinforce" else "reinforce"
        model = "" if made.options.model == "start" else f" --model {shlex.quote(made.options.model)}"
        last = (
            f"panoply train {name}{world}{model}{alike} --credit {other}{plugins}",
            "swap one part for another method's",
        )
    elif "judged" in made.method.needs():
        last = (f"panoply train grpo{world} --reward-model {folder}{plugins}", "learn from what it says")
    else:
        last = (
            f"panoply train grpo{world} --model {folder}{alike}{plugins}",
            "go on from here by trial and error",
        )
    return [
        *looking,
        (f"panoply show {name}{plugins}", "the equation and the parts that just ran"),
        last,
    ]


def played(episode: Episode) -> str:
    """An episode turn by turn: who said what, and what it earned."""
    said = [("prompt", episode.prompt)]
    for turn in episode.turns:
        said += [("policy", turn.said), *([("world", turn.seen)] if turn.seen else [])]
    earned = ", ".join(f"{name} {value:g}" for name, value in episode.signals.items()) or "nothing"
    said.append(("earned", earned if episode.ended else f"{earned}, when the model's context was full"))
    rows = [(who, plain(text, lines=True).replace("\n", "\n" + " " * 8)) for who, text in said]
    return "\n".join(f"{who:<7} {text}" for who, text in rows) + "\n"


def evaluated(found: Evaluation) -> str:
    facts = found.to_json()
    rows = [
        ("model", found.model),
        ("measured", found.of),
        ({"return": "starts", "accuracy": "pairs"}.get(found.of, "problems"), str(found.problems)),
        *([] if found.of == "accuracy" else [("attempts", str(found.attempts))]),
    ]
    for name in found.rates:
        rows.append((name, f"{facts[name]:.3f}  {_interval(facts[f'{name}_interval'], 3)}"))
    rows += [(f"success, {name}", f"{rate:.3f}") for name, rate in found.success.items()]
    rows += [(f"{name}", text) for name, _, _, text in _graded(facts)]
    rows += [(f"  {part}", f"{rate:.3f}") for part, rate in found.parts.items()]
    rows += [(f"pass@{k}", f"{v:.3f}") for k, v in found.pass_at.items()]
    rows += _reliability(found.reliability) if found.reliability else []
    answers = (plain(" ".join(text.split())) for text in found.samples)
    answered = (text if len(text) < page_width() - 2 else text[: page_width() - 3] + "…" for text in answers)
    if facts.get("solved") is not None:
        rows.append(("solved", f"{'yes' if facts['solved'] else 'no'}, at {facts['solved_at']:g}"))
    listing = "\n\nsome greedy answers\n" + indent("\n".join(answered)) if found.samples else ""
    return table(rows, margin=0) + listing


def _reliability(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of a reward model: its margins, how sure it was and how often that was right, and its accuracy by group."""
    rows = [
        ("margin", f"{found['margins']['mean']:+.3f} on average, up to ±{found['margins']['widest']:.3g}"),
        ("calibration error", f"{found['error']:.3f}"),
    ]
    for one in found["calibration"]:
        rows.append((f"  {one['said']:.3f} sure", f"{one['right']:.3f} right, {one['pairs']} pairs"))
    for kind, groups in found["groups"].items():
        rows += [
            (f"  {kind} {plain(name)}", f"{one['accuracy']:.3f} right, {one['pairs']} pairs")
            for name, one in groups.items()
        ]
    return rows


def runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Runs with what they reached; below them those that cannot be read, and why."""
    if not runs:
        return "No runs yet. Make one: panoply train grpo --world chain"
    rows = [("run", "method", "status", "step", "held out")]
    for facts in runs:
        if "problem" in facts:
            continue
        pair = [f"{v:.2f}" if v is not None else "–" for v in (facts["before"], facts["after"])]
        step = f"{facts['step']}/{facts['of']}"
        rows.append(
            (
                facts["run"],
                str(facts["method"]),
                facts["status"],
                step,
                f"{facts['measured']} {' → '.join(pair)}",
            )
        )
    unreadable = [(facts["run"], facts["problem"]) for facts in runs if "problem" in facts]
    pieces = [table(rows) if len(rows) > 1 else "", table(unreadable)]
    return "\n\nunreadable\n".join(piece for piece in pieces if piece)
