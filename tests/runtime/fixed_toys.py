"""Tasks that read the values of a field, for training and for evaluations; and one that is only evaluated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

WIDTH, PATCHES = 4, 6


class Segments(nn.Module):
    """Sums patches within each image, of flattened ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        parts = torch.split(self.linear(rows), sizes.tolist())
        return torch.cat([part - part.mean(0) for part in parts])


class Images(nn.Module):
    """`x`: (samples, patches, width); `grid`: (samples, 2), rows and columns of patches."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, grid: Tensor) -> dict[str, Tensor]:
        rows, sizes = x.flatten(0, 1), grid.prod(-1)
        for layer in self.layers:
            rows = layer(rows, sizes)
        power = rows.unflatten(0, (x.shape[0], PATCHES)).pow(2).mean((1, 2))
        return {"loss": power.mean(), "power": power}


class Shifted(nn.Module):
    """An operator with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("by", torch.linspace(0.1, 0.7, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.by)


class Own(nn.Module):
    """Only evaluated: a layer of its own in front of those that are trained."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.first, self.images = Shifted(), Images(layers)

    def forward(self, x: Tensor, grid: Tensor) -> dict[str, Tensor]:
        return self.images(self.first(x), grid)


class Grids(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images of one size, but for the sample `odd`."""

    def __init__(self, count: int, odd: int | None = None) -> None:
        self.count, self.odd = count, odd

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        grid = torch.tensor([3, 2] if index == self.odd else [2, 3])
        return {"x": torch.randn(PATCHES, WIDTH, generator=generator), "grid": grid}


def power(results: dict[str, Tensor]) -> float:
    return float(results["power"].double().mean())


def build(
    odd: int | None = None, odd_evaluated: int | None = None, odd_only: int | None = None, only: bool = True
) -> Workload:
    layers = nn.ModuleList(Segments() for _ in range(2))
    metrics = {"power": power}
    trained = Task(
        "images", Images(layers), 4, Grids(20, odd), eval_dataset=Grids(22, odd_evaluated), metrics=metrics
    )
    workload = Workload("fixed", [trained], operators=(Segments, Shifted))
    if only:
        workload.evaluated = [Task("own", Own(layers), 4, eval_dataset=Grids(21, odd_only), metrics=metrics)]
    return workload
