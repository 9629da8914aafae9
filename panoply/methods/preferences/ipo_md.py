"""IPO on own answers: Online IPO and IPO-MD."""

from __future__ import annotations

from panoply.evidence.claims import Ahead, Learns, Shows
from panoply.evidence.races import SIX_PROMPTS
from panoply.methods.base.online_dpo import online_dpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.loss.pairs import squared
from panoply.slots.reward.signals import signal
from panoply.slots.sample.compared import compared
from panoply.slots.surrogate.preferences import preference

# ------------------------------------------------------------------ where it comes to rest, exactly

TAU, STEPS = 0.05, 5000


def at_rest(seed: int) -> dict[str, float]:
    """In a random circle of preferences: how much nearer to the Nash policy own pairs lead than given ones.

    Given pairs are of the reference's answers or of any, whichever leads nearer. KL is from the Nash policy. Beside it
    is by how much more than half the best answer wins, and the same of IPO-MD, whose resting place is another.
    """
    from panoply.evaluation import preference_games as games

    game, reference = games.random_circle(seed), games.random_reference(seed)
    nash = games.regularised_nash(game, reference, TAU)

    def online(share: float) -> games.Array:
        def step(policy: games.Array) -> games.Array:
            return games.online_ipo(game, reference, policy, tau=TAU, rate=TAU, share=share)

        return games.course(step, reference, STEPS).last

    own, mixed = online(0.0), online(MIXED)
    given = [games.offline_ipo(game, reference, data, tau=TAU) for data in (reference, games.uniform(game))]
    apart = [games.kl(nash, policy) for policy in given]
    return {
        "KL ahead": min(apart) - games.kl(nash, own),
        "KL of online IPO": games.kl(nash, own),
        "KL of IPO": min(apart),
        "KL of IPO-MD": games.kl(nash, mixed),
        "exploited, online IPO": games.exploitability(game, own),
        "exploited, IPO": min(games.exploitability(game, policy) for policy in given),
        "exploited, IPO-MD": games.exploitability(game, mixed),
    }


CLAIM = Ahead(
    "Where preferences go round in a circle, IPO on pairs of its own answers comes to rest at the Nash policy of the "
    "regularised game, and on given pairs, of the reference's answers or of any, elsewhere.",
    at_rest,
)

# ------------------------------------------------------------------ the methods

MIXED = 0.125
"""The reference's share of the logits that IPO-MD samples with."""
DEFINED: Published = {
    "arXiv 2403.08635, the online IPO loss": {
        "sample.group": 2,
        "surrogate.loss": "squared",
        "surrogate.loss.to": "reference",
        "surrogate.loss.per_token": False,
    }
}
"""τ and β were swept; which values were chosen could not be read."""


@method(
    "online-ipo@1",
    paper=151,
    base="online-dpo",
    world="strings",
    claim=CLAIM,
    published=DEFINED,
)
def online_ipo() -> OnPolicy:
    """Online IPO (arXiv 2403.08635). (ρ(y, y′) − 1/2τ)², ρ the difference of Σ log π/π_ref, y and y′ from π itself.

    IPO's loss, but an annotator is asked which of two of the policy's own answers is better. No gradient flows through
    who wrote them, and at every moment its slope is that of self-play,

        E_{y~π, y′~sg(π)}[P(y ≻ y′)] − τ·KL(π‖π_ref),

    so that it comes to rest at the Nash policy of the regularised game: what nobody can gain on, where preferences go
    round in a circle and no answer is the best one. Given pairs lead elsewhere (`panoply run preference-games`).
    With `sample.soft` the aim is (P(y ≻ y′) − ½)/τ, the same gradient without the labels' noise. Sums over tokens are
    what makes it so: means (`surrogate.loss.per_token`, as in TRL) have another resting place. All but pairs and loss
    is Online DPO's; `surrogate.loss.beta` is τ, and its value is IPO's here.
    """
    return online_dpo().but(
        sample=compared(prompts=128, group=2, temperature=1.0),
        reward=signal(name="wins"),
        select=(),
        surrogate=preference(loss=squared(beta=0.1)),
    )


MD_CLAIM = Learns(
    "Where half of a preference is worth and half goes round in a circle, IPO on a mixture's answers ends with a "
    "policy that loses less to whichever perfect rival beats it most than DPO on the policy's own answers does.",
    over="online dpo=online-ipo:surrogate=online-dpo",
    world="strings",
    budget="episodes=10240",
    settings={"world.intransitive": 0.5},
    metric="world:least-win",
    best=0.5,
    also=("success", "true", "mean:questions", "from_reference"),
    shows=(Shows("world:least-win", most=0.45),),
    waives={"problems": SIX_PROMPTS},
)


@method(
    "ipo-md@1",
    paper=151,
    base="online-ipo",
    world="strings",
    claim=MD_CLAIM,
    published=DEFINED,
)
def ipo_md() -> OnPolicy:
    """IPO-MD (arXiv 2403.08635): Online IPO on answers of a mixture, π^{1−β}·π_ref^β.

    Nash-MD lets the policy play against itself pulled towards the reference; here both answers of a pair come from
    there, token by token with logits (1−β)·ℓ + β·ℓ_ref, which is near to the mixture of whole answers and not the same.
    The loss is of the policy alone.

    Surprising: for β > 0 it no longer comes to rest at the Nash policy. In exact circles the best answer against it
    wins the more often the larger β is (`panoply run preference-games`): it is the more careful method, not the more
    exact one. β is `sample.by=mix:0.125:reference`; 0 is Online IPO.
    """
    sample = compared(prompts=128, group=2, temperature=1.0, by=f"mix:{MIXED:g}:reference")
    return online_ipo().but(sample=sample)
