"""VGG with 19 layers (Simonyan and Zisserman, arXiv 1409.1556) on small pictures: a convolutional net nine
tenths of whose parameters are in its dense layers.

Shapes: B samples, C channels, H high and wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.options import Size, choose_spec
from spindle_cli.zoo.synthetic import FloatField, LabelField, SyntheticDataset

TASK = "classify"
COLOURS, PICTURE, CLASSES = 3, 32, 10


@dataclass(frozen=True)
class VggSpec:
    """Channels of the convolutions of each stage, all halved in height at its end; units of the dense layers;
    the height to which features are brought before these; and how many samples an iteration has.
    """

    stages: tuple[tuple[int, ...], ...]
    hidden: int
    pooled: int
    batch_size: int


MODELS: dict[Size, VggSpec] = {
    "paper": VggSpec(((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4), 4096, 7, 2048),
    "laptop": VggSpec(((8,), (16,), (16, 16)), 64, 3, 16),
}


class ConvStage(nn.Module):
    """Convolutions of 3 x 3, each with a ReLU, then the largest of every 2 x 2."""

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        before = (channels, *widths)
        self.convs = nn.ModuleList(
            nn.Conv2d(taken, given, kernel_size=3, padding=1)
            for taken, given in zip(before, widths, strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, H] -> [B, C', H / 2, H / 2]."""
        for conv in self.convs:
            x = functional.relu(conv(x))
        return functional.max_pool2d(x, 2)


class DenseLayer(nn.Module):
    """A linear map and a ReLU."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.map = nn.Linear(taken, given)

    def forward(self, x: Tensor) -> Tensor:
        """[B, W] -> [B, W']."""
        return functional.relu(self.map(x))


class ClassLoss(nn.Module):
    """A linear map to the classes and the mean cross-entropy."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """[B, W] and classes [B] -> scalar."""
        return functional.cross_entropy(self.head(x), label)


class Vgg(nn.Module):
    """Classifies pictures."""

    def __init__(self, spec: VggSpec) -> None:
        super().__init__()
        widths = (COLOURS, *(stage[-1] for stage in spec.stages))
        self.stages = nn.ModuleList(
            ConvStage(taken, stage) for taken, stage in zip(widths, spec.stages, strict=False)
        )
        self.pool = nn.AdaptiveAvgPool2d(spec.pooled)
        self.dense = nn.ModuleList(
            (DenseLayer(widths[-1] * spec.pooled**2, spec.hidden), DenseLayer(spec.hidden, spec.hidden))
        )
        self.loss = ClassLoss(spec.hidden, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """[B, 3, 32, 32] and classes [B] -> scalar loss."""
        x = image
        for stage in self.stages:
            x = stage(x)
        x = self.pool(x).flatten(1)
        for layer in self.dense:
            x = layer(x)
        loss: Tensor = self.loss(x, label)
        return loss


def pictures() -> SyntheticDataset:
    """Made-up pictures of CIFAR-10's size, with a class each."""
    return SyntheticDataset({"image": FloatField((COLOURS, PICTURE, PICTURE)), "label": LabelField(CLASSES)})


def build(size: Size = "paper", batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """One task, on synthetic pictures of CIFAR-10's size.

    Args:
        size: one of MODELS.
        batch_sizes: samples per iteration; those of MODELS by default.

    Raises:
        WorkloadError: a size that there is not, or `batch_sizes` for an unknown task.
    """
    spec, batch_size = choose_spec("vgg", MODELS, size, TASK, batch_sizes)
    return Workload(
        name="vgg19" if size == "paper" else "vgg-laptop",
        tasks=[Task(TASK, Vgg(spec), batch_size, pictures())],
        operators=(ConvStage, DenseLayer, ClassLoss),
    )
