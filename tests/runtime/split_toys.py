"""A workload with everything that tensor parallelism can get wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from runtime_toys import CLASSES, WIDTH, Items
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

HEADS = 4


class Layer(nn.Module):
    """Attention of x over itself, or over a context, and an MLP. Queries pass through a norm common to all
    heads, whose gradient is a sum over them; one part is never used.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.query_norm = nn.LayerNorm(WIDTH // HEADS)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        source = normed if context is None else context
        query = self.query_norm(self.heads(self.query(normed)))
        scores = query @ self.heads(self.key(source)).transpose(-1, -2)
        weights = functional.dropout(scores.softmax(-1), self.dropout, self.training)
        mixed = (weights @ self.heads(self.value(source))).transpose(1, 2).flatten(2)
        x = x + functional.dropout(self.out(mixed), self.dropout, self.training)
        return x + self.down(functional.gelu(self.up(x)))


class Decoder(Layer):
    """Another class with the same plan."""


PLAN = {
    "query": "colwise",
    "key": "colwise",
    "value": "colwise",
    "query_norm": "replicated_with_grad_allreduce",
    "out": "rowwise",
    "up": "colwise",
    "down": "rowwise",
}


class Tower(nn.Module):
    def __init__(self, depth: int, dropout: float) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(4, WIDTH))
        self.blocks = nn.ModuleList(Layer(dropout) for _ in range(depth))

    def forward(self, image: Tensor) -> Tensor:
        x = image + self.position
        for block in self.blocks:
            x = block(x)
        return x


class Left(nn.Module):
    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.tower(image).mean(1)), label)


class Right(nn.Module):
    """A decoder over the same tower; its embedding is also its head's weight."""

    def __init__(self, tower: Tower, dropout: float) -> None:
        super().__init__()
        self.tower = tower
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Decoder(dropout) for _ in range(2))

    def forward(self, image: Tensor, caption: Tensor) -> Tensor:
        context = self.tower(image)
        x = self.embed(caption)
        for layer in self.layers:
            x = layer(x, context)
        return functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), caption.flatten())


def build(frozen: bool = False, dropout: float = 0.0) -> Workload:
    """Two tasks over one tower. `frozen`: some of what is split in it, and some of what is not."""
    tower = Tower(3, dropout)
    if frozen:
        tower.position.requires_grad_(False)
        for block in tower.blocks:
            for name in ("norm.weight", "norm.bias", "up.weight", "out.bias"):
                block.get_parameter(name).requires_grad_(False)
    return Workload(
        name="split",
        tasks=[
            Task("left", Left(tower), 8, Items(("image", "label"), 40, 1), weight=0.7),
            Task("right", Right(tower, dropout), 4, Items(("image", "caption"), 9, 3)),
        ],
        operators=(Layer, Decoder),
        tp_plans={Layer: PLAN, Decoder: PLAN},
        tp_vocabulary=CLASSES,
        tp_sequence=True,
    )
