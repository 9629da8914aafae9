"""Small networks for control: features, layers, and both as one, in torch while learning and in NumPy while acting."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, mm, nn
from torch.nn.functional import linear

from panoply.worlds.control.world import Box, Discrete, Space

if TYPE_CHECKING:
    from panoply.policies.balance import Balance
    from panoply.policies.heads import Head
    from panoply.policies.stages import Stages, Timed
    from panoply.policies.star import StarLayers

Activation = Literal["tanh", "relu", "elu"]
Forward = Callable[[NDArray[Any]], NDArray[np.float32]]
Weights = Sequence[tuple[Tensor, Tensor]]
"""Of each layer, its matrix and its bias."""

_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh_,
    "relu": torch.relu_,
    "elu": nn.functional.elu_,
}
"""In place: a layer's output is needed by nobody else."""
_tanh_back = torch.ops.aten.tanh_backward.grad_input
_relu_back = torch.ops.aten.threshold_backward.grad_input
_elu_back = torch.ops.aten.elu_backward.grad_input
_BACK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda slope, y: _tanh_back(slope, y, grad_input=slope),
    "relu": lambda slope, y: _relu_back(slope, y, 0, grad_input=slope),
    "elu": lambda slope, y: _elu_back(slope, 1, 1, 1, True, y, grad_input=slope),
}
"""From ∂/∂y to ∂/∂x where y = f(x), in place, from y alone."""


class Features(nn.Module):
    """Observations as rows of numbers: arrays are flattened, whole numbers one-hot.

    Normalised ones are centred and scaled by what has been seen, and bounded to ±10. What has been seen is taken in
    between a step's learning and the next step's sampling (`learn`), so that sampler and scorer always agree.
    """

    mean: Tensor
    square: Tensor
    count: Tensor

    def __init__(self, space: Space, normalise: bool = False):
        super().__init__()
        self.space, self.normalise = space, normalise and isinstance(space, Box)
        self.size = space.n if isinstance(space, Discrete) else math.prod(space.shape)
        self._shifted: tuple[tuple[int, ...], Tensor, Tensor] | None = None
        if self.normalise:
            self.register_buffer("mean", torch.zeros(self.size, dtype=torch.float64))
            self.register_buffer("square", torch.zeros(self.size, dtype=torch.float64))
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, observation: Tensor) -> Tensor:
        if isinstance(self.space, Discrete):
            return nn.functional.one_hot(observation.long(), self.space.n).float()
        x = observation.float().flatten(1) if observation.dim() != 2 else observation.float()
        if self.normalise:
            mean, scale = self._shift()
            x = ((x - mean) * scale).clamp_(-10, 10)
        return x

    def learn(self, observation: Tensor) -> None:
        """Take more observations into mean and deviation (Chan, Golub and LeVeque 1979)."""
        x = observation.double().flatten(1)
        added, total = float(len(x)), self.count + len(x)
        gap = x.mean(0) - self.mean
        self.square += x.var(0, correction=0) * added + gap**2 * self.count * added / total
        self.mean += gap * added / total
        self.count.copy_(total)

    def _shift(self) -> tuple[Tensor, Tensor]:
        """Mean and scale in float32, computed again when more has been seen, loaded or moved."""
        mean = self.mean
        now = (id(mean), mean._version, self.count._version)
        if self._shifted is None or self._shifted[0] != now:
            self._shifted = now, mean.float(), self._scale().float()
        return self._shifted[1:]

    def _scale(self) -> Tensor:
        spread = (self.square / self.count.clamp(min=1)).sqrt()
        return torch.where(self.count > 0, 1 / (spread + 1e-4), torch.ones_like(spread))

    def numpy(self) -> Forward:
        """The same as a function of arrays, with what has been seen so far."""
        if isinstance(self.space, Discrete):
            rows = np.eye(self.space.n, dtype=np.float32)
            return lambda x: rows[x]
        if not self.normalise:
            return lambda x: x.reshape(len(x), -1).astype(np.float32, copy=False)
        mean, scale = self.mean.float().cpu().numpy(), self._scale().float().cpu().numpy()
        return lambda x: np.clip((x.reshape(len(x), -1).astype(np.float32) - mean) * scale, -10, 10)


def _outputs(activation: str, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The input, and what comes out of every layer; `weights` are a matrix and a bias of each, in turn."""
    found, activate = [x], _TORCH[activation]
    for i in range(0, len(weights) - 2, 2):
        x = activate(linear(x, weights[i]).add_(weights[i + 1]))
        found.append(x)
    return [*found, linear(x, weights[-2]).add_(weights[-1])]


class _Layers(torch.autograd.Function):
    """All layers as one node of the graph, differentiated by hand.

    A small network's products take microseconds, and as long again to be put into a graph, transposed and walked back,
    each with its bias and activation, as nodes of their own. Whoever differentiates the gradient itself (natural
    gradients do) gets it from a graph of plain operations.
    """

    @staticmethod
    def forward(ctx: Any, activation: str, x: Tensor, *weights: Tensor) -> Tensor:
        *inputs, out = _outputs(activation, x, weights)
        ctx.activation, ctx.count = activation, len(weights)
        ctx.save_for_backward(*weights, *inputs)
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        needed, saved = ctx.needs_input_grad[1:], ctx.saved_tensors
        weights, inputs = saved[: ctx.count], saved[ctx.count :]
        if torch.is_grad_enabled():
            return None, *_plain(ctx.activation, inputs[0], weights, needed, slope)
        found: list[Tensor | None] = [None] * (1 + len(weights))
        for i in range(len(weights) - 2, -1, -2):
            x = inputs[i // 2]
            if needed[1 + i]:
                few = x.shape[1] < 32  # then the other way round takes a quarter of the time
                found[1 + i] = mm(x.t(), slope).t().contiguous() if few else mm(slope.t(), x)
                found[2 + i] = slope.sum(0)
            if i:
                slope = _BACK[ctx.activation](mm(slope, weights[i]), x)
            elif needed[0]:
                found[0] = mm(slope, weights[0])
        return None, *found


def _plain(
    activation: str, x: Tensor, weights: Sequence[Tensor], needed: Sequence[bool], slope: Tensor
) -> list[Tensor | None]:
    """The gradient with a graph of its own."""
    y = x
    for i in range(0, len(weights), 2):
        y = nn.functional.linear(y, weights[i], weights[i + 1])
        y = _TORCH[activation](y) if i + 2 < len(weights) else y
    asked = [t for t, wanted in zip((x, *weights), needed, strict=True) if wanted]
    found = iter(torch.autograd.grad(y, asked, slope, create_graph=True))
    return [next(found) if wanted else None for wanted in needed]


class MLP(nn.Module):
    """Linear layers with an activation between them; without hidden layers a linear map (a table, on one-hot rows).

    Orthogonal weights (gain √2 inside, `gain` at the end), biases 0; with `gain` none, uniform ones within 1/√inputs
    (torch's own). A map without hidden layers starts at 0.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        activation: Activation = "tanh",
        gain: float | None = 1.0,
    ):
        super().__init__()
        sizes = [inputs, *hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation, self.gain = activation, gain
        self.weights: Weights = [
            (layer.weight, layer.bias) for layer in self.layers if isinstance(layer, nn.Linear)
        ]
        self._flat = [tensor for pair in self.weights for tensor in pair]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        *inner, last = self.layers
        if inner and self.gain is None:
            for weight, bias in self.weights:
                bound = 1 / math.sqrt(weight.shape[1])
                weight.uniform_(-bound, bound, generator=generator)
                bias.uniform_(-bound, bound, generator=generator)
            return
        for layer in inner:
            nn.init.orthogonal_(layer.weight, math.sqrt(2), generator=generator)  # type: ignore[arg-type]
        if inner:
            nn.init.orthogonal_(last.weight, self.gain or 1.0, generator=generator)  # type: ignore[arg-type]
        else:
            nn.init.zeros_(last.weight)  # type: ignore[arg-type]
        for layer in self.layers:
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def last(self) -> list[nn.Parameter]:
        """The weights that outputs come from."""
        return list(self.layers[-1].parameters())

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Layers.apply(self.activation, x, *self._flat)  # type: ignore[no-any-return, no-untyped-call]
        return _outputs(self.activation, x, self._flat)[-1]

    def through(self, x: Tensor, weights: Weights) -> Tensor:
        """The same with other weights."""
        return _outputs(self.activation, x, [tensor for pair in weights for tensor in pair])[-1]

    def numpy(self, weights: Weights | None = None) -> Forward:
        """The same as a function of arrays, on the very memory of the weights (on a GPU, on a copy).

        For a handful of rows this takes a fifth of what torch needs to get its operations under way.
        """
        arrays = [(w.detach().cpu().numpy().T, b.detach().cpu().numpy()) for w, b in weights or self.weights]
        (*inner, (last, offset)), activate = arrays, _NUMPY[self.activation]

        def forward(x: NDArray[Any]) -> NDArray[np.float32]:
            for weight, bias in inner:
                x = x @ weight
                x += bias
                x = activate(x)
            x = x @ last
            x += offset
            return x

        return forward


def _elu(x: NDArray[Any]) -> NDArray[Any]:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0))).astype(x.dtype)


_NUMPY: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0, out=x),
    "elu": _elu,
}


class Network(nn.Module):
    """Features, layers, and for a policy the head, the stages where it changes with time, and what chooses β."""

    def __init__(
        self,
        features: Features,
        layers: MLP | StarLayers,
        head: Head | None = None,
        stages: Stages | None = None,
        balance: Balance | None = None,
    ):
        super().__init__()
        self.features, self.layers, self.head, self.balance = features, layers, head, balance
        self.stages = stages

    def forward(self, observation: Tensor, turn: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
        """The network of now; with turns, what acts in each.

        beta: of a balanced policy, the coefficient to act by; its own choice where none is given
        """
        x = self.features.forward(observation)  # nobody hooks these: twice less to call
        if self.balance is not None:
            x = self.balance.beside(x, beta)
        if self.stages is None or turn is None:
            return self.layers.forward(x)
        return self.stages.forward(x, turn)

    def numpy(self) -> Timed:
        """What acts, as a function of arrays: observations, and the turns they are seen in."""
        features = self.features.numpy()
        if self.stages is not None:
            staged = self.stages.numpy()
            return lambda x, turn: staged(features(x), turn)
        layers = self.layers.numpy()
        if self.balance is None:
            return lambda x, turn: layers(features(x))
        balance = self.balance.numpy()

        def forward(x: NDArray[Any], turn: NDArray[Any]) -> NDArray[np.float32]:
            seen = features(x)
            return layers(np.concatenate([seen, balance(seen)], -1))

        return forward

    def on_host(self) -> tuple[Timed, Head]:
        """What acts where the worlds are: a function of arrays, and the head, on a GPU as of now."""
        assert self.head is not None
        here = next(self.parameters()).device.type == "cpu"
        return self.numpy(), self.head if here else copy.deepcopy(self.head).to("cpu")
