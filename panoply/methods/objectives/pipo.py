"""Policy Improvement Policy Optimization: learn again from the last batch, if what it taught has helped."""

from __future__ import annotations

from typing import Any

import torch

from panoply.episodes import as_tensors, earlier, from_tensors
from panoply.evidence.claims import Ranks, Shows
from panoply.evidence.races import find
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import episode_returns, group

BEFORE, NOW = 0, 1
"""Values of `stage`: rows of the step before, and of this one."""
_GROUP = group()


def improvement(mean: float, window: list[float], rise: float, fall: float, floor: float) -> float:
    """φ = clip((μ − mean of the window) / its sample deviation, −fall, rise)."""
    past = torch.tensor(window, dtype=torch.float64)
    spread = max(float(past.std()), floor)
    return float(min(rise, max(-fall, (mean - float(past.mean())) / spread)))


def _impossible(held: Any, method: Any) -> list[Finding]:
    if "column:improvement" not in method.credit.needs():
        return [("", "the credit does not weigh by how much was improved: take credit=retrospective")]
    if method.select[-1].info.name != held.info.name:
        return [("", "what it keeps for the next step is what all others leave, so it is the last in select")]
    return []


@part(
    "select",
    equation=lambda held: (
        f"the batch before, first, if φ ≠ 0: φ = clip((mean R − μ)/σ, −{held.fall:g}, {held.rise:g}), μ and σ of the "
        f"last {held.window} batches"
    ),
    state=lambda: {"means": []},
    gives=("column:stage", "column:improvement"),
    impossible=_impossible,
    bounds={"window": "at least 2", "rise": "above 0", "fall": "at least 0", "floor": "above 0"},
)
def and_previous(
    state: dict[str, Any],
    experience: Experience,
    *,
    window: int = 8,
    rise: float = 0.5,
    fall: float = 0.0,
    floor: float = 1e-6,
) -> tuple[dict[str, Any], Experience]:
    """This batch and, where success has risen or fallen, the one before: `stage` 0 with its own `logp` and rewards.

    `improvement` is φ on all rows. Nothing is looked back at before the window is full, nor where φ is 0: a step with
    no gradient would still move the weights, by what the optimiser remembers.

    window: how many past batches are compared with; this one is not among them
    rise, fall: φ is at most `rise`, and at least −`fall`; above 0, a batch after which less was earned is unlearned
    floor: σ is at least this, or a flat window would make any difference infinite
    """
    if not len(experience):
        return state, _staged(experience, NOW, 0.0)
    means: list[float] = state["means"]
    mean = float(episode_returns(experience)[0].double().mean())
    phi = improvement(mean, means, rise, fall, floor) if len(means) == window else 0.0
    found = _staged(experience, NOW, phi)
    if phi:
        before = from_tensors({name: kept for name, kept in state.items() if name != "means"})
        found = Experience.mix([_staged(before, BEFORE, phi), found])
    return {"means": [*means, mean][-window:], **as_tensors(earlier(experience))}, found


def _staged(experience: Experience, stage: int, phi: float) -> Experience:
    rows = torch.full((len(experience),), stage, device=experience["action"].device)
    return experience.with_columns(stage=rows, improvement=torch.full_like(rows, phi, dtype=torch.float32))


@part(
    "credit",
    equation=lambda held: f"{held.credit.equation()}; of the batch before G·A/Σ|A|·φ",
    needs={"column:stage", "column:improvement"},
)
def retrospective(experience: Experience, *, credit: Part = _GROUP) -> dict[str, torch.Tensor]:
    """Another credit for each batch alone; what it says of the batch before becomes G·A/Σ_group|A|·φ (PIPO).

    The batch before is credited as it was then, from the rewards it earned then: the numbers are the same. Its sizes
    are not: dividing by the group's mean |A| leaves shares, and φ alone says how large the step is. Where A differs
    inside of an episode, the mean over its decisions counts in the group.
    """
    found: dict[str, torch.Tensor] = {}
    for stage in (BEFORE, NOW):
        rows = (experience["stage"] == stage).nonzero().flatten()
        if not len(rows):
            continue
        of = experience.take(rows)
        credited = credit(of)
        columns = credited if isinstance(credited, dict) else {"advantage": credited}
        if stage == BEFORE:
            columns = {**columns, "advantage": _shares(of, columns["advantage"])}
        for name, column in columns.items():
            found.setdefault(name, column.new_zeros(len(experience), *column.shape[1:]))[rows] = column
    return found


def _shares(before: Experience, advantage: torch.Tensor) -> torch.Tensor:
    """G·A/Σ|A|·φ; 0 where a group has no difference."""
    episodes = before.by("episode")
    groups = Segments(episodes.first(before["group"]))
    size = groups.mean(episodes.mean(advantage).abs())
    share = torch.where(size > 0, 1 / size, 0.0)
    return advantage * episodes.rows(groups.rows(share)) * before["improvement"].to(advantage.dtype)


PUBLISHED: Published = {
    "the authors' page (index.html)": {
        "select.and_previous.window": 8,
        "select.and_previous.rise": 0.5,
        "select.and_previous.fall": 0.0,
        "credit.credit.baseline": "mean",
        "credit.credit.scale": "std",
    },
}
"""No training code is released, and neither batch sizes nor rates are on the page."""

FRONTIER = find("frontier")
CLAIM = Ranks(
    "Learning again from the batch before, but only when this one earned more than the last eight, learns more from as "
    "many episodes than GRPO, and more than GRPO that learns from every batch twice.",
    ("", FRONTIER.baseline, f"twice={FRONTIER.baseline}:update.epochs=2"),
    FRONTIER.world,
    FRONTIER.budget,
    settings=FRONTIER.settings,
    tune=FRONTIER.tune,
    leads=True,
    also=("success", "mean:updates", "mean:gradient_norm"),
    shows=(Shows("mean:degenerate_groups", least=0.1),),
)


@method(
    "pipo@1",
    paper=45,
    base="grpo",
    claim=CLAIM,
    published=PUBLISHED,
)
def pipo() -> OnPolicy:
    """Policy Improvement Policy Optimization (PIRL, arXiv 2604.00860): a look back before every step.

    Group-relative gradients grow like 1/(p(1 − p)) as a prompt's success p nears 0 or 1, and nobody checks whether
    what they did was good. So a step has two stages. First, if this batch earned more than the last eight did, in
    their deviations, φ = clip((μ_t − μ)/σ, 0, 0.5) > 0, the batch *before* is learned from once more, by its own
    answers' shares G·A/Σ|A| times φ and with the ratio to the policy that gave them; then this batch, as always. The
    two never share a mini-batch, and each has the update's epochs and mini-batches.

    What is surprising: what decides is a difference between batches of other prompts, of which √(p(1 − p)/N) is
    chance, so small batches look back at random. Any group-relative method can be looked back with: `credit.credit`,
    `surrogate` and `reduce` are its own (a `regularise` term would be in both stages). The form is that of the first
    version; the rate of the first stage is not published, and is the same as the second's. μ on a fixed set of
    prompts instead of the batch is not built.
    """
    return grpo().but(select=(and_previous(),), credit=retrospective(), regularise=())
