"""Policies and critics for control worlds: small networks that act on arrays and score experience."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from panoply import devices
from panoply.errors import PanoplyError, plain, unknown
from panoply.experience import Column, Experience, moved
from panoply.files import conform
from panoply.parts import check_fields, types_of
from panoply.policies import divergence, taps
from panoply.policies.balance import WIDTH, Balance
from panoply.policies.folder import read_config
from panoply.policies.heads import Categorical, Head, Std, head_for
from panoply.policies.mlp import MLP, Activation, Features, Network
from panoply.policies.stages import Stages
from panoply.policies.star import StarLayers
from panoply.policies.weights import WHOLE, check_fit, read_weights
from panoply.seeds import torch_rng
from panoply.worlds.control.world import ControlWorld, Discrete, Space, space_from_json, space_to_json

ARCHITECTURE = "PanoplyControl"
WIDEST = 65_536
SMALL = 10_000_000
"""Weights up to which one vector of all of them is faster to move than many tensors."""


@dataclass(frozen=True)
class PolicySpec:
    """What a control policy is made of: settings `policy.NAME`."""

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers; none makes it linear, and a table where observations are whole numbers."""
    activation: Activation = "tanh"
    shared: bool = False
    """One network for all things of a kind in an observation, such as stores, with a number of the action for each."""
    squash: bool = False
    """Continuous actions through tanh into their bounds, instead of cut there."""
    std: Std = "free"
    """The standard deviation of continuous actions: parameters of their own, an output of the network, or fixed."""
    log_std: float = 0.0
    """Where parameters of their own start."""
    head: Literal["distribution", "bounded", "certain", "values"] = "distribution"
    """What the network puts out: a distribution of actions; an action between its bounds (noise is added when it
    acts); one that is taken as it is; or what each of n actions is worth (the best is taken)."""
    epsilon: float = 0.05
    """How often a policy of values takes any action instead."""
    atoms: int = 51
    """Into how many points of `span` a policy of values spreads its returns; 1 means none: plain values."""
    span: tuple[float, float] = (-10.0, 10.0)
    normalise: bool = False
    """Observations centred and scaled by what has been seen."""
    stages: int = 0
    """Of how many first turns frozen copies of the network can be kept: a policy that changes with time."""
    balanced: bool = False
    """The network takes a coefficient β beside the observation, which a second one chooses in every state."""
    betas: tuple[float, float] = (1.0, 5.0)
    """The range of that coefficient."""

    bounds: ClassVar[Mapping[str, str]] = {
        "hidden": f"from 1 to {WIDEST}",
        "log_std": "from -20 to 20",
        "epsilon": "from 0 to 1",
        "atoms": "from 1 to 100000",
        "span": "any number",
        "stages": "from 0 to 100000",
        "betas": "any number",
    }

    def __post_init__(self) -> None:
        check_fields(self, "policy")
        if self.shared and self.stages:
            raise PanoplyError("policy.shared cannot be together with policy.stages.")
        if self.balanced and (self.shared or self.stages):
            raise PanoplyError("policy.balanced cannot be together with policy.shared or policy.stages.")
        if not 0 <= self.betas[0] < self.betas[1]:
            raise PanoplyError(f"policy.betas is a range, from at least 0 to more, not {self.betas}.")


class Config(TypedDict):
    """What the `config.json` of a saved policy or critic says."""

    model: str
    spec: dict[str, Any]
    observation: dict[str, Any]
    action: dict[str, Any]


class ControlModel:
    """What policy and critic share: weights in a folder of safetensors and JSON."""

    sees = "observation"
    """The context column that it looks at."""

    def __init__(self, model: Network, spec: PolicySpec, observation: Space, action: Space):
        self.model, self.spec, self.observation, self.action = model, spec, observation, action
        self.device = next(model.parameters()).device
        self.small = sum(p.numel() for p in model.parameters()) <= SMALL
        """Whether the learner is to keep all weights in one vector."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def fingerprint(self) -> str:
        """Sixteen hex digits that change with any bit of any weight."""
        from panoply.policies.text import fingerprint

        return fingerprint(self.model.state_dict().items())

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.detach().cpu().contiguous() for name, w in self.model.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        facts = {
            "architectures": [ARCHITECTURE],
            "model_type": "panoply-control",
            "model": type(self).__name__,
            "spec": dataclasses.asdict(self.spec),
            "observation": space_to_json(self.observation),
            "action": space_to_json(self.action),
        }
        (folder / "config.json").write_text(json.dumps(facts, indent=1))

    @torch.no_grad()
    def load_weights(self, folder: str | Path) -> None:
        """Overwrite the weights in place with those of a folder of the same layout."""
        saved = read_weights([Path(folder) / WHOLE])
        mine = self.model.state_dict()
        check_fit({name: tuple(weight.shape) for name, weight in mine.items()}, saved, plain(folder))
        for name, weight in mine.items():
            weight.copy_(saved[name])

    def observe(self, experience: Experience) -> Tensor:
        return moved(experience.looked_up(self.sees), self.device)


class ControlPolicy(ControlModel):
    """A network and a distribution of actions."""

    medium = "control"
    head: Head

    def __init__(self, model: Network, spec: PolicySpec, observation: Space, action: Space):
        super().__init__(model, spec, observation, action)
        assert model.head is not None
        self.head = model.head

    @classmethod
    def fresh(
        cls, observation: Space, action: Space, spec: PolicySpec | None = None, seed: int = 0
    ) -> ControlPolicy:
        """Random weights that depend on spec and seed only."""
        spec = spec or PolicySpec()
        more = {name: getattr(spec, name) for name in ("head", "epsilon", "atoms", "span")}
        head = head_for(action, spec.squash, spec.std, spec.log_std, **more)
        features, balance = Features(observation, spec.normalise), None
        if spec.balanced:
            balance = Balance(features.size, spec.hidden, spec.activation, spec.betas)
            balance.layers.initialise(torch_rng("balance", seed))
        inputs = features.size + (WIDTH if spec.balanced else 0)
        # Values of orthogonal weights run away: what one state teaches reaches too far into the others.
        gain = None if spec.head == "values" else 0.01
        layers: MLP | StarLayers
        if spec.shared:
            layers = StarLayers(observation, spec.hidden, head.width, spec.activation, gain)
        else:
            layers = MLP(inputs, spec.hidden, head.width, spec.activation, gain)
        layers.initialise(torch_rng("policy", seed))
        stages = Stages(layers, spec.stages) if spec.stages and isinstance(layers, MLP) else None
        return cls(Network(features, layers, head, stages, balance), spec, observation, action)

    @classmethod
    def load(cls, folder: str | Path) -> ControlPolicy:
        facts, where = read_config(Path(folder)), plain(Path(folder) / "config.json")
        conform(facts, Config, where)
        if facts["model"] != cls.__name__:
            raise PanoplyError(f"{plain(folder)} holds no policy for control but a {plain(facts['model'])}.")
        observation, action = (
            space_from_json(facts[name], f"{name} in {where}") for name in ("observation", "action")
        )
        policy = cls.fresh(observation, action, spec_from(facts["spec"]))
        policy.load_weights(folder)
        return policy

    def to(self, device: torch.device) -> ControlPolicy:
        self.model.to(device)
        self.device = device
        return self

    def copy(self, seeing_alike: bool = False) -> ControlPolicy:
        """A frozen snapshot that later training does not touch; `seeing_alike`: but for what normalisation learns."""
        features = self.model.features
        model = copy.deepcopy(self.model, {id(features): features} if seeing_alike else {}).requires_grad_(
            False
        )
        return ControlPolicy(model, self.spec, self.observation, self.action)

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """`logp` of each decision, and of `needs` `entropy`, under the distribution it was sampled from.

        `logp*T` and `entropy*T` are at T times its temperature.
        `divergence:Q@SNAPSHOT` compares the whole distribution with the snapshot's column `distribution@SNAPSHOT`.
        """
        divergences = divergence.parse(needs)
        outputs = [taps.parse(supplied(n)) for n in sorted(needs - {n for n, _, _ in divergences})]
        out, mask, temperature = self._outputs(experience)
        action = moved(experience["action"], out.device)
        found = self.head.score(out, action, mask, temperature, "entropy" in needs)
        for output in outputs:
            if output.temperature != 1:
                scaled = output.temperature * (out.new_ones(len(out)) if temperature is None else temperature)
                found[output.need] = self.head.score(out, action, mask, scaled, entropy=True)[output.name]
        for name, q, to in divergences:
            other = moved(experience[f"distribution@{to}"], out.device)
            found[name] = self.head.divergence(self.head.distribution(out, mask, temperature), other, q)
        return found

    def _outputs(self, experience: Experience) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The network's outputs, what is legal, and the temperature: the distribution each decision was drawn from."""
        turn = moved(experience["turn"], self.device) if self.spec.stages else None
        out = self.model(self.observe(experience), turn)
        mask = moved(experience.looked_up("legal"), out.device) if "legal" in experience.context else None
        temperature = moved(experience["temperature"], out.device) if "temperature" in experience else None
        return out, mask, temperature

    def remember(self, name: str, snapshot: ControlPolicy, experience: Experience) -> Tensor:
        """The column `distribution@NAME`: the distributions that a snapshot would have drawn the decisions from."""
        return snapshot.distribution(experience)

    def distribution(self, experience: Experience) -> Tensor:
        """All there is to know of the distributions of the decisions, for the head's `divergence`."""
        return self.head.distribution(*self._outputs(experience))

    @torch.no_grad()
    def chances(self, observation: NDArray[Any]) -> NDArray[Any]:
        """How likely each action is in each of these observations, [n, actions]; for a choice of one action alone."""
        chooses = isinstance(self.head, Categorical) and isinstance(self.action, Discrete)
        if not chooses or self.spec.stages:
            raise PanoplyError("Only a policy that chooses one action at random has a probability of each.")
        out = self.model(torch.as_tensor(observation, device=self.device))
        found: NDArray[Any] = self.head.distribution(out, None, None).double().exp().cpu().numpy()
        return found

    def learn_statistics(self, experience: Experience, once: bool = False) -> None:
        """Take what was observed into the normalisation, where there is one; `once`: unless it has some already."""
        features = self.model.features
        if features.normalise and not (once and features.count):
            features.learn(experience.context.tensor("observation").to(self.device))


class ValueNet(ControlModel):
    """V(s), and what else `outputs` names: layers of its own, features and their normalisation those of the policy."""

    outputs: tuple[str, ...] = ("value",)

    @classmethod
    def of(cls, policy: ControlPolicy, seed: int = 0, outputs: tuple[str, ...] = ("value",)) -> ValueNet:
        spec = policy.spec
        layers = MLP(policy.model.features.size, spec.hidden, len(outputs), spec.activation)
        layers.initialise(torch_rng("critic", seed))
        network = Network(policy.model.features, layers.to(policy.device))
        made = cls(network, spec, policy.observation, policy.action)
        made.outputs = outputs
        return made

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        return self.named(self.observe(experience))

    def named(self, observation: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.outputs, self.model(observation).unbind(-1), strict=True))

    def values(self, observation: Tensor) -> Tensor:
        return self.model(observation)[:, 0]  # type: ignore[no-any-return]

    def columns(self, experience: Experience) -> dict[str, Column]:
        """Of all that was seen in one pass: `value` of each decision's state, `next_value` of the one after it."""
        found = self.named(experience.context.tensor(self.sees).to(self.device))
        here: dict[str, Column] = {name: x.cpu()[experience["context"]] for name, x in found.items()}
        return here | {"next_value": found["value"].cpu()[experience["next"]]}


class CentralNet(ValueNet):
    """V of what all seats of a game see, for a critic: policies go on seeing what is theirs.

    It looks at the column `joint`: a seat's own view first, then those of the seats after it, so that one network
    values every seat.
    """

    sees = "joint"

    @classmethod
    def over(cls, policy: ControlPolicy, seats: int, seed: int = 0) -> CentralNet:
        spec, features = policy.spec, policy.model.features
        layers = MLP(seats * features.size, spec.hidden, 1, spec.activation)
        layers.initialise(torch_rng("critic", seed))
        return cls(_Joined(features, layers.to(policy.device)), spec, policy.observation, policy.action)


class _Joined(Network):
    """The same features of several observations side by side."""

    def forward(self, observation: Tensor, turn: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
        each = self.features.forward(observation.flatten(0, 1))
        return self.layers.forward(each.reshape(len(observation), -1))


def supplied(need: str) -> str:
    """A need that a control policy has an output for, or one sentence."""
    if need.partition("*")[0] not in ("logp", "entropy"):
        raise PanoplyError(
            f"A control policy cannot supply '{need}', which a part needs; it has logp and entropy."
        )
    return need


def is_control(folder: Path) -> bool:
    """Whether a folder holds a model for control."""
    return ARCHITECTURE in (read_config(folder).get("architectures") or ())


def spec_from(settings: Mapping[str, Any]) -> PolicySpec:
    """Settings by name as a spec."""
    from panoply.values import parse

    hints = types_of(PolicySpec)
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in hints:
            raise unknown("setting of the policy", name, hints)
        found[name] = parse(f"policy.{name}", value, hints[name]) if isinstance(value, str) else value
    return PolicySpec(**found)


def open_policy(
    source: str,
    world: ControlWorld,
    seed: int,
    device: str = "auto",
    settings: Mapping[str, Any] | None = None,
) -> ControlPolicy:
    """New weights (`start`, `fresh`), or those of a run, a checkpoint or a folder."""
    from panoply.which import model_folder

    devices.check(device)
    where = torch.device("cpu" if device == "auto" else device)
    if source in ("start", "fresh"):
        return ControlPolicy.fresh(world.observation, world.action, spec_from(settings or {}), seed).to(where)
    policy = ControlPolicy.load(model_folder(source))
    for what in ("observation", "action"):
        mine, theirs = getattr(policy, what), getattr(world, what)
        if type(mine) is not type(theirs) or mine.shape != theirs.shape or _count(mine) != _count(theirs):
            raise PanoplyError(
                f"The policy {source} was made for another {what} than {world.name} has: {mine}."
            )
    return policy.to(where)


def _count(space: Space) -> Any:
    return getattr(space, "n", getattr(space, "nvec", None))
