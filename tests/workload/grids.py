"""Toys of models that read the sizes of their images from a field."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

WIDTH, PATCHES, BATCH = 8, 6, 4
Join = Callable[["Segments", list[Tensor]], Tensor]
Pick = Callable[[Tensor], Tensor]


def each_by_itself(layer: Segments, parts: list[Tensor]) -> Tensor:
    """What attention over each part gives."""
    return torch.cat([layer.attend(part) for part in parts])


class Segments(nn.Module):
    """Attends within segments of flattened patches; `join` works on the parts that they are split into."""

    def __init__(self, join: Join = each_by_itself) -> None:
        super().__init__()
        self.linear, self.join = nn.Linear(WIDTH, WIDTH), join

    def attend(self, part: Tensor) -> Tensor:
        """One segment's patches see each other."""
        own = self.linear(part)
        return (own @ own.T / WIDTH).softmax(-1) @ own

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """`ends`: where each segment ends, behind a zero."""
        parts = list(torch.split(rows, (ends[1:] - ends[:-1]).tolist()))
        return self.linear(rows) + self.join(self, parts)


class Patches(nn.Module):
    """Two layers over the patches of all images, flattened; `pick` puts them into another order before."""

    def __init__(self, join: Join = each_by_itself, pick: Pick | None = None, per_row: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Segments(join) for _ in range(2))
        self.pick, self.per_row = pick, per_row

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        """`x`: (samples, patches, width); `grid`: (samples, 2), rows and columns of patches."""
        rows = x.flatten(0, 1)
        if self.pick is not None:
            rows = rows[self.pick(grid)]
        sizes = torch.repeat_interleave(grid[:, 1], grid[:, 0]) if self.per_row else grid.prod(-1)
        ends = functional.pad(sizes.cumsum(0), (1, 0))
        for layer in self.layers:
            rows = layer(rows, ends)
        weights = torch.arange(1.0, PATCHES + 1, device=x.device)
        return (rows.unflatten(0, (x.shape[0], PATCHES)).pow(2).mean(2) * weights).mean()


class Shown(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Patches and their grid, which is `odd` in the sample of that number."""

    def __init__(self, odd: int | None = None) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        grid = torch.tensor([3, 2] if index == self.odd else [2, 3])
        return {"x": torch.randn(PATCHES, WIDTH, generator=generator), "grid": grid}


def task_of(module: nn.Module, odd: int | None = None) -> Task:
    """A task of a batch of four."""
    return Task("t", module, BATCH, Shown(odd))


def workload_of(task: Task) -> Workload:
    """With the layers as operators."""
    return Workload("w", [task], (Segments,))
