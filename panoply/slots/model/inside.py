"""What answers look like from inside: states of the policy that wrote them, and how sure it was of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from panoply.experience import Experience, Segments, Table

if TYPE_CHECKING:
    from panoply.policies.text import TextPolicy

Entropies = Literal["mean", "all"]
STATISTICS: Mapping[str, Callable[[Segments, Tensor], Tensor]] = {
    "mean": Segments.mean,
    "last": Segments.last,
    "max": Segments.max,
    "min": Segments.min,
}


@torch.no_grad()
def pooled_states(policy: TextPolicy, experience: Experience, block: int, last: int) -> tuple[Tensor, Tensor]:
    """Of each episode the mean states of its first prompt's last tokens and of its answer's, after so many blocks.

    A token's own state is what the next token is predicted from, so that it is asked for one position on.
    """
    episodes = experience.by("episode")
    context, position = experience["context"], experience["position"]
    shared = experience.context.tensor("shared")[episodes.first(context)]
    back = torch.arange(last)
    of_prompt = shared[:, None] - back  # the state of the last prompt token is asked for at `shared`
    of_prompt = of_prompt.where(of_prompt > 0, 0)
    grid = episodes.grid()  # decisions of each episode in their order, then −1
    place = episodes.count[:, None] - 1 - back
    rows = grid.gather(1, place.clamp(min=0))
    of_answer = torch.where(place >= 0, position[rows] + 1, 0)
    asked = torch.cat([of_prompt, of_answer], 1)
    where = torch.cat([episodes.first(context)[:, None].expand(-1, last), context[rows]], 1)
    there = asked > 0
    pseudo = Experience(
        Table({"context": where[there], "position": asked[there], "action": torch.zeros_like(asked[there])}),
        experience.context,
    )
    need = f"hidden:{block}"
    states = policy.score(pseudo, frozenset({need}))[need].float().cpu()
    spread = torch.zeros(*asked.shape, states.shape[-1])
    spread[there] = states
    prompt, answer = (
        spread[:, half].sum(1) / there[:, half].sum(1, keepdim=True)
        for half in (slice(0, last), slice(last, None))
    )
    return prompt, answer


def token_entropies(experience: Experience, after: list[int], of: Entropies) -> Tensor:
    """[episodes, numbers]: of the whole answer and, where something ends the reasoning, of what is before and after it.

    A part that is empty has zeros.
    """
    episodes, entropy = experience.by("episode"), experience["entropy"].double()
    parts = [torch.ones_like(entropy, dtype=torch.bool)]
    if after:
        said = ends_reasoning(experience, after)
        parts += [said == 0, said == 2]
    found = []
    for inside in parts:
        there = episodes.sum(inside.double()) > 0
        held = Segments(episodes.index[inside])
        for name in STATISTICS if of == "all" else ("mean",):
            column = entropy.new_zeros(len(episodes))
            column[there] = STATISTICS[name](held, entropy[inside])
            found.append(column)
    return torch.stack(found, 1).float()


def ends_reasoning(experience: Experience, after: list[int]) -> Tensor:
    """Of each decision 0 before the first place where an answer says `after`, 1 in it, 2 behind it.

    An answer that never says it is all reasoning; the decisions of an episode stand after one another.
    """
    action, episodes = experience["action"], experience.by("episode")
    row = torch.arange(len(action))
    hit = torch.ones(len(action), dtype=torch.bool)
    for i, token in enumerate(after):
        at = (row + i).clamp(max=len(action) - 1)
        hit &= (action[at] == token) & (episodes.index[at] == episodes.index) & (row + i < len(action))
    first = episodes.rows(episodes.min(torch.where(hit, row, len(action))))
    return (row >= first).long() + (row >= first + len(after)).long()
