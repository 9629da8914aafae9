"""Words by which works are found: what each means, and which of them follow from what a work is.

Three surveys order methods by questions that have an answer for every one of them. Each question is an axis here, and
each answer a tag, `feedback=offline`. What a method's parts ask of a world answers most of them; where they do not, or
where they would mislead, the work says it itself (`tags=`), and of that question nothing else holds. Settings are those
that a method is registered with: PPO on a reward model is another row of the same tables. Where one survey asks more
coarsely what another asks too, its answer follows from the other's.
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


ERA, TECHNIQUES, AGENTS = "rl-era-of-llms", "rl4llm-survey", "agent-optimization-survey"
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
    Axis(
        "source",
        "whose episodes it learns from",
        AGENTS,
        {
            "expert": "those of somebody who shows how it is done: people, or a stronger model",
            "self": "its own, as it explores",
            "agents": "those of several policies that act in one run",
            "given": "those that were there before, good and bad",
        },
    ),
    Axis(
        "granularity",
        "what a number of credit is for",
        AGENTS,
        {
            "token": "a token",
            "turn": "a turn, a step of a solution, or an action in control",
            "trajectory": "a whole episode, or an answer",
        },
    ),
    Axis(
        "stage",
        "which stage of training it is",
        AGENTS,
        {
            "sft": "imitation, of others or of its own successes",
            "rl": "learning from rewards",
            "preference": "learning from pairs or lists, by a loss on them",
            "hybrid": "several of these, in turn",
            "judge": "a reward model, for others to learn from",
        },
    ),
    Axis(
        "failures",
        "what becomes of episodes that fail",
        AGENTS,
        {
            "contrast": "they are made less likely than those that do better, or worth less",
            "discard": "they are left out, and successes imitated",
            "alike": "they are imitated like all others, where there are any",
            "correct": "they are set right first",
        },
    ),
    Axis(
        "param_free",
        "whether the model's weights stay as they are",
        AGENTS,
        {
            "no": "weights learn",
            "yes": "what changes is what the model is told: instructions, memories, examples",
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
    "curriculum": "what it is asked changes as it learns",
    "recipe": "stages, each a run",
    "algorithm": "solves a small problem by itself: panoply run NAME",
    "system": "is about how things run: panoply run NAME",
    "protocol": "judges: panoply run NAME, panoply eval RUN --by NAME",
    "survey": "orders works: panoply show NAME",
}
"""Tags beside the axes."""
REGIMES = ("on-policy", "off-policy", "offline", "dataset", "several")


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
    found = _said(said, follow)
    return _said(said, found | of_agents(found)) if {"recipe", *REGIMES} & found else found


def _said(said: set[str], follow: Iterable[str]) -> set[str]:
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
    found |= {f"optimisation={_optimisation(method, found)}", f"granularity={_granularity(method, control)}"}
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


EACH = {"return_to_go", "over_others", "token_group"}
"""Credits without a critic that differ from one decision of an episode to the next."""
WHOLE = {"pair", "list", "group", "episode"}
"""Units of losses that have one number for an answer."""


def _granularity(method: Method, control: bool) -> str:
    """By what gives credit, or where nothing does by the losses; in control a decision is a turn."""
    slots, single = method.slots(), "turn" if control else "token"
    credit: Any = slots.get("credit")
    if credit is not None:
        if credit.info.name == "episode_and_anchor":
            return "turn"
        return single if credit.info.name in EACH or "column:value" in credit.needs() else "trajectory"
    units = {term.info.unit for term in method.terms()}
    if "transition" in units:
        return "turn"
    return "trajectory" if units & WHOLE else single


STAGES: Mapping[str, tuple[str, ...]] = {
    "sft": ("imitation", "rejection"),
    "rl": ("critic", "critic-free", "value", "differentiated"),
    "preference": ("direct",),
    "judge": ("judge",),
}
"""Which ways to move a policy are one stage to those who train agents."""


def of_agents(found: set[str]) -> set[str]:
    """What follows, of the questions that are asked of agents, from answers to the others."""
    ways = {name for name, ways in STAGES.items() if found & {f"optimisation={way}" for way in ways}}
    hybrid = len(ways - {"judge"}) > 1 or "optimisation=hybrid" in found
    own = "agents" if "several" in found else "self"
    sources = {own} if "feedback=online" in found else set()
    sources |= {"expert"} if "data=demos" in found else set()
    failures = {"contrast"} if ways - {"sft"} else set()
    failures |= {"discard"} if "optimisation=rejection" in found else set()
    failures |= {"alike"} if "optimisation=imitation" in found else set()
    return {
        *(f"stage={name}" for name in (*ways, *(["hybrid"] if hybrid else []))),
        *(f"source={name}" for name in sources or {"given"}),
        *(f"failures={name}" for name in failures),
        "param_free=no",
    }


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
        found |= _said(set(entry.tags), of_method(made))
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
