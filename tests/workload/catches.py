"""Models with a catch: sums, batch norm, masks, rows that mix samples, values without a batch, explicit
flows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.workload.types import FlowTask, Task, Workload

from .structures import PAIRS, Contrast
from .toy import WIDTH, Block, Items, Tower


class Summed(nn.Module):
    """A sum over the samples, over two towers of which one is coupled."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.contrast = Tower(), Tower(5), Contrast()

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        a, b = self.left(image), self.right(words)
        return functional.mse_loss(a, b, reduction="sum") + self.contrast(a * 2, b)


def summed() -> Workload:
    task = Task("t", Summed(), 4, Items(**PAIRS), weight=0.1, reduction="sum")
    mean = Task("pure", SquaredSum(), 6, Items(image=(4, 6)), reduction="sum")
    return Workload("summed", [task, mean], operators=(Block,), coupled=(Contrast,))


class SquaredSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, image: Tensor) -> Tensor:
        return self.tower(image).pow(2).sum()


class Biased(nn.Module):
    """T5-like: the first layer makes a bias that all layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.first = BiasMaker()
        self.rest = nn.ModuleList(BiasUser() for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        x, bias = self.first(self.embed(image))
        for layer in self.rest:
            x = layer(x, bias)
        return x.pow(2).mean()


class BiasMaker(nn.Module):
    """The bias has no batch dimension, and no sample has a part in it: shares have copies."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.bias * 2


class BiasUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.linear(x + bias)


def biased() -> Workload:
    return Workload("biased", [Task("t", Biased(), 4, Items(image=(4, 6)))], operators=(BiasMaker, BiasUser))


class ConvBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width_in, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Batch norm in operators and in glue; an in-place activation in glue; per-sample picking by index."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList([ConvBlock(4, 5), ConvBlock(5, 5)])
        self.tail = Block(6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, image: Tensor, position: Tensor) -> Tensor:
        x = self.act(self.stem(image))
        for block in self.blocks:
            x = block(x)
        x = self.tail(x)
        picked = x[torch.arange(x.shape[0]), position]
        return self.norm(picked).pow(4).mean()


def convnet() -> Workload:
    task = Task("t", ConvNet(), 4, Items(image=(4, 6), position=((), 5)))
    return Workload("convnet", [task], operators=(ConvBlock, Block))


class Masked(nn.Module):
    """A mean over the tokens that count: no mean over samples, so it cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, image: Tensor, mask: Tensor, label: Tensor) -> Tensor:
        x = self.tower.embed(image)
        for block in self.tower.blocks:
            x = block(x)
        losses = functional.cross_entropy(self.last(x).transpose(1, 2), label, reduction="none")
        return (losses * mask).sum() / mask.sum()


def masked() -> Workload:
    data = Items(image=(4, 6), mask=((4,), 2), label=((4,), 5))
    data.data["mask"][:, 0] = 1
    return Workload("masked", [Task("t", Masked(), 4, data)], operators=(Block,))


class SumOverSize(nn.Module):
    """A sum divided by the batch's size is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower(5)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        a, b = self.left(image), self.right(words)
        per_sample = (a - b).pow(2).sum(-1) / image.shape[0]
        return per_sample.sum() + sum([a.sum(), b.sum()]) / (image.size(0) * WIDTH)


def sum_over_size() -> Workload:
    return Workload("sizes", [Task("t", SumOverSize(), 4, Items(**PAIRS))], operators=(Block,))


class Doubling(nn.Module):
    """Two views of each sample as two rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        views = torch.stack([image, image.flip(1)], 1).flatten(0, 1)
        left, right = self.tower(views).unflatten(0, (image.shape[0], 2)).unbind(1)
        return (left - right).pow(2).mean() + words.mean()


def doubling() -> Workload:
    return Workload("doubling", [Task("t", Doubling(), 4, Items(**PAIRS))], operators=(Block,))


class Fuse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.linear(torch.cat([left.mean(1), right.mean(1)], -1))


class FusedLoss(nn.Module):
    def forward(self, fused: Tensor, label: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(fused, label)}


def flows() -> Workload:
    """Two encoders as nn.Sequential chains into one fusion, by add_flow; a second task traces one of them."""
    vision = nn.Sequential(nn.Linear(6, WIDTH), Block(), Block())
    text = nn.Sequential(nn.Linear(5, WIDTH), nn.Sequential(Block(), Block()))
    fuse, loss = Fuse(), FusedLoss()
    task = FlowTask("fused", 4, Items(image=(4, 6), words=(3, 5), label=((), WIDTH)))
    task.add_flow("image", vision).add_flow("words", text)
    task.add_flow(vision, fuse, argument="left").add_flow(text, fuse, argument="right")
    task.add_flow(fuse, loss).add_flow("label", loss, argument="label")
    return Workload("flows", [task, Task("own", Chained(vision), 8, Items(image=(4, 6)))], operators=(Block,))


class Chained(nn.Module):
    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, image: Tensor) -> Tensor:
        return self.chain(image).pow(2).mean()


class Across(nn.Module):
    """Attends across the batch, because nobody said batch_first=True; negatives from the same batch;
    squeeze().
    """

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=first) for first in (True, False)
        )
        self.tower = Tower()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = image
        for layer in self.attend:
            x = layer(x)
        x = self.tower(x)
        margin = (x * x.roll(1, 0)).sum(-1) - self.score(x).squeeze()
        return functional.softplus(margin).mean()


def across() -> Workload:
    task = Task("t", Across(), 4, Items(image=(4, 6)))
    return Workload("across", [task], operators=(nn.TransformerEncoderLayer, Block))


class Deciding(nn.Module):
    """Decides and loops by sizes that every batch has; slices a buffer by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.register_buffer("positions", torch.linspace(0, 1, 30).view(5, 6).double())
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = image.shape
        if image.dim() != 3 or tokens > len(self.positions):
            raise ValueError(f"unexpected {tokens} tokens")
        x = image + self.positions[:tokens]
        for step in range(image.size(1) // 2):
            x = self.blocks[step](x)
            assert x.shape == (batch, tokens, width) or x.shape[1:] == image.shape[1:]
        if mask is not None:
            x = x * mask
        parts = [head(part).sum() for head, part in zip(self.heads, x.chunk(2, -1), strict=True)]
        return sum(parts) / batch / int(width**0.5)


def deciding() -> Workload:
    return Workload("deciding", [Task("t", Deciding(), 4, Items(image=(4, 6)))], operators=(Block,))


class NoOperators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, image: Tensor, unused: Tensor | None = None) -> Tensor:
        x = image if unused is None else unused
        return self.linear(x).mean()


def no_operators() -> Workload:
    return Workload("none", [Task("t", NoOperators(), 4, Items(image=(4, 6)))])
