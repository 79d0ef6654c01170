"""Two tasks of residual networks whose batch norms take their statistics from the whole batch: in operators,
several in one, in the glue before, between and after them, and of every kind.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

CLASSES = 5


class Block(nn.Module):
    """Two convolutions that tasks share, each behind it a norm of the task's own."""

    def __init__(self, first: nn.Conv2d, second: nn.Conv2d, momentum: float | None) -> None:
        super().__init__()
        width = second.out_channels
        self.first, self.second = first, second
        self.norm = nn.BatchNorm2d(width, momentum=momentum)
        self.norm_2 = nn.SyncBatchNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm_2(self.second(torch.relu(self.norm(self.first(x))))))


class Reduce(nn.Module):
    """Fewer pixels of more channels: a norm on each of two ways, one without parameters, one that keeps no
    running statistics; and one that is frozen, and couples nothing.
    """

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.main = nn.Conv2d(width_in, width, 3, 2, 1, bias=False)
        self.short = nn.Conv2d(width_in, width, 1, 2, bias=False)
        self.norm_main = nn.BatchNorm2d(width, affine=False)
        self.norm_short = nn.BatchNorm2d(width, track_running_stats=False)
        self.frozen = nn.BatchNorm2d(width).eval()
        self.frozen.running_mean += 0.1

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(
            self.frozen(self.norm_main(self.main(x)) * self.norm_short(self.short(x)).sigmoid())
        )


class Net(nn.Module):
    def __init__(self, convs: list[tuple[nn.Conv2d, nn.Conv2d]], momentum: float | None) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList(Block(*pair, momentum) for pair in convs)
        self.between = nn.BatchNorm2d(4)
        self.reduce = Reduce(4, 6)
        self.after, self.head = nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(image)))
        for block in self.blocks:
            x = block(x)
        x = self.reduce(self.between(x))
        return functional.cross_entropy(self.head(self.after(x.mean((2, 3)))), label)


class Images(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.image = torch.randn(count, 3, 6, 6, generator=drawn) * 2 + 1
        self.label = torch.randint(0, CLASSES, (count,), generator=drawn)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.image[index], "label": self.label[index]}


def build(ignores: bool = True) -> Workload:
    """`ignores`: labels of -100 in one task, so that its shares count differently."""
    torch.manual_seed(0)
    convs = [
        (nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False))
        for _ in range(3)
    ]
    some = Images(36, 1)
    if ignores:
        some.label[::3] = -100
    return Workload(
        "norms",
        [
            Task("few", Net(convs, 0.3), 6, Images(24, 0)),
            Task("many", Net(convs, None), 12, some, weight=0.5),
        ],
        operators=(Block, Reduce),
    )
