"""A vision transformer (Dosovitskiy et al., arXiv 2010.11929) on small pictures.

Shapes: B samples, S patches and the class token, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, EncoderLayer
from spindle_cli.zoo.options import Size, choose_spec
from spindle_cli.zoo.single_task.vgg import CLASSES, COLOURS, PICTURE, TASK, ClassLoss, pictures

PATCH = 4


@dataclass(frozen=True)
class VitSpec:
    """Sizes of the model, and how many samples an iteration has."""

    width: int
    layers: int
    heads: int
    batch_size: int


MODELS: dict[Size, VitSpec] = {"paper": VitSpec(768, 12, 12, 2048), "laptop": VitSpec(32, 3, 2, 16)}


class Patches(nn.Module):
    """Cuts pictures into patches, and puts a token for the class before them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Conv2d(COLOURS, width, kernel_size=PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, (PICTURE // PATCH) ** 2 + 1, width))

    def forward(self, image: Tensor) -> Tensor:
        """[B, 3, 32, 32] -> [B, 65, W]."""
        x = self.map(image).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position


class Vit(nn.Module):
    """Classifies pictures."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.patches = Patches(spec.width)
        self.layers = nn.ModuleList(EncoderLayer(spec.width, spec.heads) for _ in range(spec.layers))
        self.loss = ClassLoss(spec.width, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """[B, 3, 32, 32] and classes [B] -> scalar loss."""
        x = self.patches(image)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.loss(x[:, 0], label)
        return loss


def build(size: Size = "paper", batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """One task, on synthetic pictures of CIFAR-10's size.

    Args:
        size: one of MODELS.
        batch_sizes: samples per iteration; those of MODELS by default.

    Raises:
        WorkloadError: a size that there is not, or `batch_sizes` for an unknown task.
    """
    spec, batch_size = choose_spec("vit", MODELS, size, TASK, batch_sizes)
    return Workload(
        name="vit" if size == "paper" else "vit-laptop",
        tasks=[Task(TASK, Vit(spec), batch_size, pictures())],
        operators=(Patches, EncoderLayer, ClassLoss),
        tp_plans=TP_PLANS,
    )
