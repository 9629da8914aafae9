"""Words by which works are found: what each means, and which of them follow from what a work is.

Two surveys order methods by questions that have an answer for every one of them. Each question is an axis here, and
each answer a tag, `feedback=offline`. What a method's parts ask of a world answers most of them; where they do not, or
where they would mislead, the work says it itself (`tags=`), and of that question nothing else holds. Settings are those
that a method is registered with: PPO on a reward model is another row of the same tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from panoply.errors import PanoplyError

if TYPE_CHECKING:
    from panoply.method_base import Method
    from panoply.parts import Part
    from panoply.recipes import Recipe


class Axis(NamedTuple):
    """A question of a survey, and the answers there are."""

    key: str
    asks: str
    survey: str
    answers: Mapping[str, str]

    def tags(self) -> dict[str, str]:
        return {f"{self.key}={answer}": meaning for answer, meaning in self.answers.items()}


ERA, TECHNIQUES = "rl-era-of-llms", "rl4llm-survey"
AXES = (
    Axis(
        "data",
        "what it learns from",
        ERA,
        {
            "demos": "answers or actions of somebody who can do it",
            "prefs": "which of two answers is better, or whether one is good",
            "scores": "numbers: rewards of an environment, of a model or of raters",
            "rules": "what a program says that checks answers",
        },
    ),
    Axis(
        "dynamics",
        "whether it uses what follows an action without trying it",
        ERA,
        {
            "known": "goes back to states, branches there, or differentiates through what follows",
            "unknown": "sees what came of decisions alone, though of text, which only gets longer, more is known",
        },
    ),
    Axis(
        "feedback",
        "when feedback is given",
        ERA,
        {
            "online": "on what the policy does while it learns",
            "offline": "before learning begins, on what others did",
        },
    ),
    Axis(
        "feedback",
        "who gives it",
        TECHNIQUES,
        {
            "annotators": "people who compare or rate answers, or a world's model of them",
            "judge": "another model, or a world's judge of steps",
            "self": "the policy itself",
            "teacher": "somebody who shows how it is done",
            "program": "a checker of answers",
            "environment": "a world that is acted in",
        },
    ),
    Axis(
        "on_policy",
        "whose decisions it learns from",
        ERA,
        {
            "yes": "those of the policy as it is: one update on each batch",
            "near": "those of the policy a few updates ago",
            "no": "those of others, or of any earlier self",
        },
    ),
    Axis(
        "reward",
        "what the reward is",
        TECHNIQUES,
        {
            "none": "there is none: given answers are imitated",
            "rule": "what a program says of an answer",
            "environment": "what a world pays for actions",
            "learned": "a model's number, fitted to feedback",
            "pairwise": "how often an answer is preferred to others",
            "implicit": "the policy's own log-probabilities, as losses on pairs have it",
            "judge": "what a judge says of an answer",
            "process": "something for every step, not for the end alone",
            "several": "a sum or a limit of several numbers",
        },
    ),
    Axis(
        "optimisation",
        "how the policy is moved",
        TECHNIQUES,
        {
            "critic": "by the gradient of a policy whose value a network learns (PPO, SAC)",
            "critic-free": "by the policy gradient, with a baseline from the answers (GRPO, RLOO)",
            "direct": "by a loss on preferred and other answers (DPO, KTO)",
            "value": "by learning values of which it takes the best (DQN)",
            "imitation": "by the likelihood of given answers (SFT)",
            "rejection": "by the likelihood of its own best answers (RAFT, STaR)",
            "differentiated": "by a gradient through the dynamics",
            "judge": "not at all: what learns is a reward model",
            "hybrid": "in one way first and in another afterwards",
            "constrained": "under limits",
        },
    ),
)
"""Every method and every recipe has a tag of each."""
OTHERS = {
    "on-policy": "regime: collects, learns, forgets",
    "off-policy": "regime: acts into a replay and learns from it",
    "offline": "regime: learns from a replay of logged data",
    "dataset": "regime: descends losses on given data",
    "several": "regime: several learners in one run",
    "critic": "has networks beside the policy",
    "text": "a world of text",
    "control": "a world of observations and actions",
    "teachers": "learns from several teachers",
    "recipe": "stages, each a run",
    "algorithm": "solves a small problem by itself: panoply run NAME",
    "system": "is about how things run: panoply run NAME",
    "protocol": "judges: panoply run NAME, panoply eval RUN --by NAME",
    "survey": "orders works: panoply show NAME",
}
"""Tags beside the axes."""


def meanings() -> dict[str, str]:
    """What every tag means that has a meaning everywhere."""
    return {tag: meaning for axis in AXES for tag, meaning in axis.tags().items()} | OTHERS


def check(id: str, tags: Iterable[str]) -> None:
    """Refuse an answer that a survey's question does not have."""
    known = meanings()
    for tag in tags:
        key = tag.partition("=")[0]
        if tag not in known and any(axis.key == key for axis in AXES):
            answers = ", ".join(name for axis in AXES if axis.key == key for name in axis.answers)
            raise PanoplyError(f"'{id}' has the tag {tag}; {key} is one of {answers}.")


def joined(stated: Iterable[str], follow: Iterable[str]) -> set[str]:
    """What a work says of itself, and of every question that it does not answer, what follows."""
    said = set(stated)
    answered = {tag for axis in AXES if said & axis.tags().keys() for tag in axis.tags()}
    return said | (set(follow) - answered)


def unanswered(id: str, tags: Iterable[str]) -> str | None:
    """What is to be done about a method or a recipe of which a survey's question has no answer."""
    for axis in AXES:
        if not axis.tags().keys() & set(tags):
            return (
                f"'{id}' does not say {axis.asks}, and it does not follow from its parts: add one of "
                f"{', '.join(axis.tags())} to tags=(…) of its decorator (panoply list --tags says what they mean)."
            )
    return None


# ------------------------------------------------------------------ what follows

DEMOS = ("data=demos", "feedback=teacher")
PREFS = ("data=prefs", "feedback=annotators")
COMPARED = (*PREFS, "reward=pairwise")
CHECKED = ("data=rules", "feedback=program")
RULES = (*CHECKED, "reward=rule")
PAID = ("data=scores", "feedback=environment", "reward=environment")
ASKED: Mapping[str, tuple[str, ...]] = {
    "world:prefer": COMPARED,
    "world:preference": COMPARED,
    "world:pairs": PREFS,
    "world:judge": ("data=scores", "feedback=judge", "reward=judge", "reward=process"),
    "world:referee": ("data=scores", "feedback=self", "reward=judge"),
    **dict.fromkeys(
        (
            "world:demonstrations",
            "world:teacher",
            "world:reference",
            "world:lines",
            "world:hint",
            "world:privileged",
        ),
        DEMOS,
    ),
    "world:conclusion": (*RULES, "reward=process"),
    "world:tools": (*RULES, "reward=several"),
}
"""What follows from what a part asks of a world: from the first of these alone, since a teacher makes pairs, too."""
SIGNALS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("success", "format", "ended", "malformed", "missed", "overused", "invalid"), RULES),
    **dict.fromkeys(("proxy", "model"), ("data=scores", "feedback=annotators", "reward=learned")),
    "preferred": (*PREFS, "reward=learned"),
    "wins": COMPARED,
}
"""What follows from the signal that a reward is made of. In control a world pays all but those that annotators give."""
ANNOTATED = ("model", "preferred", "wins")
KNOWN = {"world:fork", "world:differentiable", "world:model", "given tokens"}
"""What a part needs, or gives, that goes back to states: branches, gradients, the beginnings of given answers."""
CONTROL = {"world:control", "world:step", "world:data", "world:discrete actions", "world:continuous actions"}


def of_method(method: Method, control: bool = False) -> set[str]:
    """What follows from a method's parts; `control` says whether it is at home in a world that is acted in."""
    seats = method.seated()
    if seats:
        own = (_of_part(held, control) for path, held in method.parts() if path.split(".")[0] not in seats)
        return _rewarded(set().union(*own, *(of_method(held, control) for held in seats.values())))
    needs = method.needs()
    control = control or bool(CONTROL & needs)
    found = set().union(*(_of_part(held, control) for _, held in method.parts()))
    gives = frozenset().union(*(held.info.gives for _, held in method.parts()))
    found |= {"dynamics=known" if KNOWN & (needs | gives) else "dynamics=unknown"}
    found |= {f"feedback={when}" for when in _when(method)} | {f"on_policy={_on_policy(method)}"}
    found |= {f"optimisation={_optimisation(method, found)}"}
    return _rewarded({*found, "reward=none"} | _by_what_is_learned(method, found))


def _rewarded(found: set[str]) -> set[str]:
    """The same without saying that there is no reward, where there is one."""
    some = any(tag.startswith("reward=") and tag != "reward=none" for tag in found)
    return found - {"reward=none"} if some else found


def _of_part(held: Part, control: bool) -> set[str]:
    """What a part asks of a world, and what a reward is made of. Pairs that are but data are no reward."""
    needs = held.needs()
    found = set(next((tags for need, tags in ASKED.items() if need in needs), ()))
    found -= {"reward=pairwise"} if held.info.slot == "data" else set()
    if held.info.slot == "reward":
        signals = [need.removeprefix("signal:") for need in needs if need.startswith("signal:")]
        paid = control and not set(ANNOTATED).intersection(signals)
        found |= set(PAID) if paid else {tag for name in signals for tag in SIGNALS.get(name, ())}
        found |= {"reward=several"} if len(signals) > 1 else set()
    return found


def _when(method: Method) -> Iterator[str]:
    """Feedback is on what the policy does wherever it acts: in a sample part, a game, or data that are its episodes."""
    slots = method.slots()
    data: Any = slots.get("data")
    acted = data is not None and "episodes" in data.info.gives
    if "sample" in slots or acted:
        yield "online"
    if data is not None and not acted and method.regime != "off_policy":
        yield "offline"


def _on_policy(method: Method) -> str:
    slots, settings = method.slots(), method.settings()
    if method.regime != "on_policy" or "replay" in slots:
        return "no"
    updates = settings.get("update.epochs", 1) * settings.get("update.minibatches", 1)
    return "yes" if method.acts_alone and updates == 1 else "near"


def _optimisation(method: Method, found: set[str]) -> str:
    needs = method.needs()
    if any(need.startswith("judged") for need in needs):
        return "judge"
    if needs & {"policy:values", "policy:atoms"}:
        return "value"
    if method.regime in ("off_policy", "offline"):
        return "critic"
    if any(term.info.unit in ("pair", "list") for term in method.terms()):
        return "direct"
    if method.regime == "on_policy":
        return "critic" if "column:value" in needs else "critic-free"
    if "earns" in needs:
        return "differentiated"
    return "direct" if "data=prefs" in found else "imitation"


def _by_what_is_learned(method: Method, found: set[str]) -> set[str]:
    """What follows from logged data depends on what is learned from them; so does the reward of pairs."""
    more: set[str] = set()
    if "world:data" in method.needs():
        more |= set(DEMOS if "optimisation=imitation" in found else PAID)
    elif method.regime in ("off_policy", "offline") or "earns" in method.needs():
        more |= set(PAID)
    if "optimisation=direct" in found and "data=prefs" in found:
        more |= {"reward=implicit"}
    return more | ({"reward=learned"} if "optimisation=judge" in found else set())


def of_recipe(recipe: Recipe) -> set[str]:
    """What follows from all stages together."""
    from panoply import compose, registry

    found: set[str] = set()
    for stage in recipe.stages:
        if stage.make is not None:
            found |= _of_make(stage.make)
            continue
        entry = registry.find("method", stage.method)
        made = compose.resolve(stage.method, settings=_own(stage.settings)).method
        found |= joined(entry.tags, of_method(made))
    ways = {tag for tag in found if tag.startswith("optimisation=")}
    if len(ways - {"optimisation=imitation", "optimisation=judge"}) > 1:
        found |= {"optimisation=hybrid"}
    return _rewarded(found)


def _of_make(held: Part) -> set[str]:
    """Data that a part makes: of a teacher, or of own answers that a program looks at."""
    own = "world:verify" in held.needs() and "policy" in held.settings()
    return _of_part(held, control=False) | ({*CHECKED, "feedback=online"} if own else set())


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stage that are its method's."""
    return {k: v for k, v in settings.items() if not k.startswith(("world.", "policy.", "run.", "lora."))}
