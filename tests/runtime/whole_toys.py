"""Tasks of which some part runs as it is written, on the whole batch: it decides by values, mixes samples, or
cannot be followed; what is before and behind it may be split.
"""

from __future__ import annotations

import numpy
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from helpers.layers import Block, TanhLayer
from spindle_cli.workload.types import Task, Workload

WIDTH, CLASSES, LENGTH = 6, 4, 5


class Model(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(3, WIDTH), blocks, nn.Linear(WIDTH, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Focal(Model):
    """Ends early where no sample has a label; the scale is used in the other case alone."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__(blocks)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        chances = self.head(self.features(x)).softmax(-1)
        return self.loss(chances, label) + 0.01 * chances.square().sum(-1).mean()

    def loss(self, chances: Tensor, label: Tensor) -> Tensor:
        right = chances.gather(1, label.clamp(min=0)[:, None])[:, 0]
        count = (label >= 0).sum()
        if count == 0:
            return 0 * self.scale * chances.sum()
        return self.scale * (-((1 - right) ** 2) * right.log() * (label >= 0)).sum() / count


class Hardest(Model):
    """Rescales features by their batch in between, and trains with the largest losses; keeps a queue of
    logits, and their centre, for the batches to come.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__(blocks)
        self.register_buffer("queue", torch.zeros(6, CLASSES))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("centre", torch.zeros(CLASSES))

    @torch.no_grad()
    def enqueue(self, logits: Tensor) -> None:
        at = int(self.pointer)
        self.queue[at : at + 2] = logits[:2]
        self.pointer[0] = (at + 2) % len(self.queue)
        self.centre = 0.9 * self.centre + 0.1 * logits.mean(0)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        x = 0.5 * x
        if (label >= 0).sum() > 2:
            x = 3 * x - x.mean(0)
        for block in self.blocks[1:]:
            x = block(x)
        logits = self.head(x)
        known = self.queue.clone().detach().mean(0) - self.centre
        losses = functional.cross_entropy(logits + known, label.clamp(min=0), reduction="none")
        self.enqueue(logits)
        return losses.topk(int(0.5 * losses.numel())).values.mean()


class Preferred(Model):
    """Chosen and rejected answers in one batch, and apart again behind half of the layers; mixed at last."""

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        x = self.first(torch.cat([chosen, rejected]))
        for block in self.blocks[:2]:
            x = block(x)
        better, worse = x.chunk(2)
        apart = better - worse
        for block in self.blocks[2:]:
            apart = block(apart)
        apart = 0.7 * apart + 0.3 * apart.roll(1, 0)
        return -functional.logsigmoid(self.head(self.blocks[0](apart)).sum(-1)).mean()


class Recurrent(nn.Module):
    """Packs its sequences; `total` keeps their length."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        made, (last, _) = self.lstm(packed)
        padded: Tensor = pad_packed_sequence(made, batch_first=True, total_length=x.shape[1])[0]
        return padded + last[-1][:, None]


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return self.linear(x)
        return x.tanh() + self.linear(x)


class Sequences(Model):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__(blocks)
        self.recurrent, self.compiled = Recurrent(), torch.jit.script(Compiled())

    def forward(self, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
        x = self.recurrent(self.features(x), lengths)
        x = self.blocks[0](self.compiled(x))
        return functional.cross_entropy(self.head(x.mean(1)), label.clamp(min=0))


class Items(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int, *names: str) -> None:
        drawn = torch.Generator().manual_seed(seed)
        long = (LENGTH,) if "lengths" in names else ()
        self.fields = {
            name: torch.randn(count, *long, 3, generator=drawn)
            for name in names
            if name not in ("lengths", "label")
        }
        if "label" in names:
            self.fields["label"] = torch.randint(0, CLASSES, (count,), generator=drawn)
            self.fields["label"][torch.rand(count, generator=drawn) < 0.8] = -1
        if "lengths" in names:
            self.fields["lengths"] = torch.randint(1, LENGTH + 1, (count,), generator=drawn)

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}


def build() -> Workload:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
    return Workload(
        "whole",
        [
            Task("focal", Focal(blocks), 6, Items(24, 0, "x", "label")),
            Task("hardest", Hardest(blocks), 8, Items(24, 1, "x", "label"), weight=0.5),
            Task("preferred", Preferred(blocks), 6, Items(24, 2, "chosen", "rejected")),
            Task("sequences", Sequences(blocks), 6, Items(24, 3, "x", "lengths", "label")),
        ],
        operators=(Block, Recurrent),
    )


class Pair(nn.Module):
    """Gives two values, each by a map of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.one(x), x + self.other(x)


class Judge(nn.Module):
    """Asks numpy, so that nothing is known of its gradients without values: the second value never gets one,
    the third in batches with more ones among its marks than zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, z: Tensor, mark: Tensor) -> Tensor:
        with torch.no_grad():
            beside = torch.as_tensor(numpy.tanh(y.cpu().numpy()))
        x = x + beside + torch.tanh(self.map(x))
        return x + z if int(mark.sum()) > len(mark) // 2 else x


class Judged(nn.Module):
    """Steps differ in whether the layers behind the third value get a gradient; a loss that may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.judge = TanhLayer(WIDTH), TanhLayer(WIDTH), Judge()
        self.sometimes, self.pair = nn.Sequential(TanhLayer(WIDTH), TanhLayer(WIDTH)), Pair()

    def forward(self, x: Tensor, y: Tensor, mark: Tensor) -> Tensor:
        one, other = self.pair(x)
        return functional.mse_loss(self.judge(self.first(one), self.never(x), self.sometimes(other), mark), y)


def build_judged() -> Workload:
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(6)
    x, y = (torch.randn(64, WIDTH, generator=drawn) for _ in range(2))
    marks = torch.rand(64, generator=drawn).round().long()
    items = [{"x": x[row], "y": y[row], "mark": marks[row]} for row in range(64)]
    return Workload("judged", [Task("judged", Judged(), 8, items)], (TanhLayer, Pair, Judge))
