"""A random model by its number: pieces before, inside, between and after operators, and a loss."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from model_fuzz.losses import COUPLED, MEANS, PAIRED, SUMS, Head
from model_fuzz.pieces import COUPLING, INSIDE, SEPARATE, TOKENS, WIDTH, Piece
from spindle_cli.workload.types import Task, Workload

_PLANTED = 0.35  # of the models, how many have a coupling planted in them; of the losses likewise
_INSIDE = 0.1  # of the models, how many begin with what operators alone may do
_SUMMED = 0.15  # of the tasks, how many have reduction="sum"
_MOST_SAMPLES = 18


@dataclass(frozen=True)
class Recipe:
    """What a model is made of. `before`, `between` and `after` are glue; each of `blocks` an operator.

    `batches`: of a step, which is computed as one batch of all their samples.
    """

    number: int
    batch_size: int
    before: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    between: tuple[str, ...]
    after: tuple[str, ...]
    loss: str
    is_loss_operator: bool
    alphas: tuple[float, ...]
    batches: int = 1

    @property
    def is_sum(self) -> bool:
        """Whether its task has reduction="sum"."""
        return self.loss in SUMS

    @property
    def couples(self) -> bool:
        """Whether anything in it couples the samples of the batch."""
        pieces = {
            *self.before,
            *self.between,
            *self.after,
            *(name for block in self.blocks for name in block),
        }
        return bool(pieces & COUPLING.keys()) or self.loss in {**PAIRED, **COUPLED}


def recipe(seed: int, number: int) -> Recipe:
    """The recipe of one model."""
    draw = random.Random(f"{seed}/{number}")

    def pieces(least: int, most: int) -> list[str]:
        return [draw.choice(list(SEPARATE)) for _ in range(draw.randint(least, most))]

    parts = [pieces(0, 1), *[pieces(1, 3) for _ in range(draw.randint(1, 3))], pieces(0, 1), pieces(0, 2)]
    if draw.random() < _PLANTED:
        chosen = draw.choice(parts)
        chosen.insert(draw.randint(0, len(chosen)), draw.choice(list(COUPLING)))
    whole = {**PAIRED, **COUPLED}
    losses = whole if draw.random() < _PLANTED else SUMS if draw.random() < _SUMMED else MEANS
    before, *blocks, between, after = (tuple(part) for part in parts)
    loss, is_operator = draw.choice(list(losses)), draw.random() < 0.3
    count = len(before) + sum(map(len, blocks)) + len(between) + len(after)
    alphas = tuple(draw.choice((0.0, 0.5)) for _ in range(count))
    size, batches = draw.choice((7, 8, 9)), draw.choice((1, 1, 2))
    if draw.random() < _INSIDE and blocks[0][0] in SEPARATE:
        blocks[0] = (draw.choice(list(INSIDE)), *blocks[0][1:])
    return Recipe(number, size, before, tuple(blocks), between, after, loss, is_operator, alphas, batches)


class Block(nn.Module):
    """An operator of some pieces."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, channels], as it is given."""
        for piece in self.pieces:
            x = piece(x)
        return x


class LossHead(Head):
    """A loss that is an operator of its own."""


class Model(nn.Module):
    """A recipe as a module."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        alphas = iter(recipe.alphas)

        def made(names: tuple[str, ...]) -> list[Piece]:
            return [Piece(name, next(alphas)) for name in names]

        self.before = nn.ModuleList(made(recipe.before))
        self.blocks = nn.ModuleList(Block(made(names)) for names in recipe.blocks)
        self.between, self.after = nn.ModuleList(made(recipe.between)), nn.ModuleList(made(recipe.after))
        self.head = (LossHead if recipe.is_loss_operator else Head)(recipe.loss)

    def forward(self, x: Tensor, label: Tensor, target: Tensor, mask: Tensor, padded: Tensor) -> Tensor:
        """The loss of a batch."""
        for piece in self.before:
            x = piece(x)
        for position, block in enumerate(self.blocks):
            x = block(x)
            for piece in self.between if position == 0 else ():
                x = piece(x)
        for piece in self.after:
            x = piece(x)
        return self.head(x, label, target, mask, padded)


class Drawn(Dataset[dict[str, Tensor]]):
    """Samples drawn once, in double precision."""

    def __init__(self, count: int = _MOST_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

        self.fields = {"x": normal(TOKENS, WIDTH), "target": normal(WIDTH)}
        self.fields["label"] = torch.randint(WIDTH, (count,), generator=generator)
        self.fields["mask"] = (normal(TOKENS) > 0).double()
        self.fields["mask"][:, 0] = 1
        labels = torch.randint(WIDTH, (count, TOKENS), generator=generator)
        lengths = torch.randint(TOKENS + 1, (count, 1), generator=generator)
        self.fields["padded"] = labels.masked_fill(torch.arange(TOKENS) >= lengths, -100)

    def __len__(self) -> int:
        return len(self.fields["x"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}


def workload(recipe: Recipe) -> Workload:
    """A recipe as a workload of one task, in double precision."""
    torch.manual_seed(recipe.number)
    model = Model(recipe).double()
    task = Task("t", model, recipe.batch_size, Drawn(), reduction="sum" if recipe.is_sum else "mean")
    operators = (Block, LossHead) if recipe.is_loss_operator else (Block,)
    return Workload("fuzz", [task], operators)
