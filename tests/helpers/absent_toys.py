"""Pairs of which some have no image: none of the first batch, some of the second, all of the third."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from helpers.layers import TanhLayer
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

WIDTH, BATCH, STEPS = 4, 6, 3
SEED = 0
IN_SECOND = (1, 5)  # rows of the second batch that have an image: shares of 3 have one each


class Pair(nn.Module):
    """A regression over the text and the image, where there is one; a loss of the images that are there."""

    def __init__(self, vision: nn.Module) -> None:
        super().__init__()
        self.vision = vision
        self.text = nn.Sequential(TanhLayer(WIDTH), TanhLayer(WIDTH))
        self.missing = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, text: Tensor, image: Tensor, has_image: Tensor) -> Tensor:
        seen = self.vision(image)
        own = (seen.square().mean(1) * has_image).sum() / has_image.sum().clamp(min=1)
        both = self.text(text) + torch.where(has_image[:, None], seen, self.missing)
        return mse_loss(both, text) + own


class See(nn.Module):
    """A task that always has its images."""

    def __init__(self, vision: nn.Module) -> None:
        super().__init__()
        self.vision = vision

    def forward(self, image: Tensor) -> Tensor:
        return self.vision(image).square().mean()


def build() -> Workload:
    torch.manual_seed(0)
    vision = nn.Sequential(TanhLayer(WIDTH), TanhLayer(WIDTH))
    drawn = torch.randn(2, BATCH * STEPS, WIDTH)
    pairs: list[dict[str, Any]] = [{"text": text} for text in drawn[0]]
    task = Task("pair", Pair(vision), BATCH, pairs, absent={"image": torch.zeros(WIDTH)})
    order = Batches(task, SEED)
    second = [order.indices(1)[row] for row in IN_SECOND]
    for index in (*second, *order.indices(2)):
        pairs[index]["image"] = drawn[1, index]
    see = Task("see", See(vision), BATCH, [{"image": image} for image in drawn[1]])
    return Workload("absent", [task, see], (TanhLayer,))
