"""A model whose layers take next to nothing, so that a step of it shows what is done around the layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload

NUM_LAYERS, WIDTH, BATCH = 8, 8, 2


class Layer(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer on a batch of (samples, `WIDTH`)."""
        return x + torch.tanh(self.linear(x))


class OtherLayer(Layer):
    """A layer that computes what `Layer` does, but no equal of it: a run of equal layers ends at it."""


class Chain(nn.Module):
    """Layers one after the other; its forward pass gives a loss."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of what the layers make of a batch of (samples, `WIDTH`)."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Numbers(Dataset[dict[str, Tensor]]):
    """Each sample is its number, `WIDTH` times."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((WIDTH,), index / len(self))}


def all_equal() -> Chain:
    """Layers of one class."""
    return Chain(*(Layer() for _ in range(NUM_LAYERS)))


def one_slice() -> Workload:
    """All layers are equal: a plan for one device runs them as one slice."""
    return _workload(all_equal(), (Layer,))


def slice_per_layer() -> Workload:
    """No layer is followed by an equal one: a plan runs each as a slice of its own."""
    layers = (OtherLayer() if number % 2 else Layer() for number in range(NUM_LAYERS))
    return _workload(Chain(*layers), (Layer, OtherLayer))


def _workload(chain: Chain, operators: tuple[type[nn.Module], ...]) -> Workload:
    return Workload(name="overhead", tasks=[Task("toy", chain, BATCH, Numbers())], operators=operators)
