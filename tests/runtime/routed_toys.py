"""A workload of layers with experts, which two tasks share."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from runtime_toys import CLASSES, WIDTH, Items
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.experts import MixtureOfExperts

EXPERTS, CAPACITY = 4, 2


class Layer(nn.Module):
    """Tokens are mixed by a map of them, then go to their experts; gives two results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(4, 4)
        self.mixture = MixtureOfExperts(WIDTH, 2 * WIDTH, EXPERTS, CAPACITY)

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        out, own = self.mixture(self.norm(x))
        return x + out, balance + own


class Net(nn.Module):
    """A tower with a map ahead of it, and a head of its own."""

    def __init__(self, tower: nn.ModuleList) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.tower = tower
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.map(image)
        balance = x.new_zeros(x.shape[0])
        for layer in self.tower:
            x, balance = layer(x, balance)
        return functional.cross_entropy(self.head(x.mean(1)), label) + 0.01 * balance.mean()


def build(frozen: bool = False) -> Workload:
    """Batches of 8 and 4; `frozen`: some of what is cut, and some of what is not."""
    tower = nn.ModuleList(Layer() for _ in range(3))
    if frozen:
        for layer in tower:
            for name in ("mixture.experts.up", "norm.weight"):
                layer.get_parameter(name).requires_grad_(False)
    torch.nn.init.normal_(tower[1].get_parameter("mixture.experts.up_bias"))
    return Workload(
        name="experts",
        tasks=[
            Task("left", Net(tower), 8, Items(("image", "label"), 32, 1)),
            Task("right", Net(tower), 4, Items(("image", "label"), 16, 2), weight=0.5),
        ],
        operators=(Layer,),
        tp_plans={Layer: {"mixture.experts": "expertwise"}},
    )
