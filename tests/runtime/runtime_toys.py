"""Small workloads with everything that a runtime can get wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Collection

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from spindle_cli.workload.types import Task, Workload

WIDTH = 8
CLASSES = 5


def halved(update: int) -> float:
    """A factor of the learning rate."""
    return 0.5**update


def slower(update: int) -> float:
    """Another one."""
    return 1 / (1 + update)


class Items(Dataset[dict[str, Tensor]]):
    """Samples of a task: 4 tokens of an image, 3 words, a label, 5 words of a caption."""

    def __init__(self, names: tuple[str, ...], count: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        fields = {
            "image": torch.randn(count, 4, WIDTH, generator=drawn),
            "words": torch.randint(0, 11, (count, 3), generator=drawn),
            "label": torch.randint(0, CLASSES, (count,), generator=drawn),
            "caption": torch.randint(0, 11, (count, 5), generator=drawn),
        }
        self.fields = {name: fields[name] for name in names}
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}


class DrawnItems(Items):
    """The same with noise, another order of the words and another label, from three generators."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        if "label" in item:
            item["label"] = torch.tensor(random.randrange(CLASSES))
        if "words" in item:
            item["words"] = item["words"][torch.from_numpy(np.random.permutation(3))]
        shift = torch.rand(())  # of all fields of a sample alike
        item["image"] = item["image"] + shift
        if "caption" in item:
            item["caption"] = (item["caption"] + int(shift * 11)) % 11
        return item


def masked(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collate that hides words of the whole batch at random."""
    batch: dict[str, Tensor] = default_collate(items)
    batch["caption"][torch.rand(batch["caption"].shape) < 0.5] = 0
    return batch


class Block(nn.Module):
    """A layer with a part that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.linear(self.norm(x)))


class TimeMajorBlock(nn.Module):
    """Takes and gives [tokens, batch, width]: the batch comes second; a second output besides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.linear(x))
        # A view in another shape: fails on a part of a tensor that is not contiguous.
        return hidden.view(-1).view(x.shape), hidden.sum(dim=(0, 2))


class CrossBlock(nn.Module):
    """A decoder layer: every one takes the encoder's output, and hands on a bias that has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        # Without a bias: softmax makes its gradient zero but for rounding, which Adam would turn into steps.
        self.context = nn.Linear(WIDTH, WIDTH, bias=False)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, context: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        bias = torch.tanh(bias + self.shift)
        scores = self.query(x) @ self.context(context).transpose(1, 2)
        return x + scores.softmax(-1) @ context + bias, bias


class Fuse(nn.Module):
    """Two inputs of one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.left(a) * self.right(b))


class Contrast(nn.Module):
    """A loss that couples the samples of a batch, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        logits = functional.normalize(a, dim=-1) @ functional.normalize(b, dim=-1).T * self.scale
        labels = torch.arange(len(a), device=a.device)
        return functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)


class Center(nn.Module):
    """Couples the samples and gives a value without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).mean((0, 1))


class Project(nn.Module):
    """Takes five rows for each sample, and a value that belongs to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, center: Tensor) -> Tensor:
        return self.linear(rows) + center


class Vision(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(4, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, image: Tensor) -> Tensor:
        x = image + self.position
        for block in self.blocks:
            x = block(x)
        return x


class Text(nn.Module):
    """Its embedding is frozen."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.embed.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return x


class Pairs(nn.Module):
    def __init__(self, vision: Vision, text: Text) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self.contrast = Contrast()

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        return self.contrast(self.vision(image).mean(1), self.text(words).mean(1))


class Classify(nn.Module):
    """Fuses two towers, one of them with the batch in the second dimension; the loss is glue."""

    def __init__(self, vision: Vision, text: Text, reduction: str) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self.mix = nn.ModuleList(TimeMajorBlock() for _ in range(2))
        self.fuse = Fuse()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.reduction = reduction

    def forward(self, image: Tensor, words: Tensor, label: Tensor) -> dict[str, Tensor]:
        mixed = self.text(words).transpose(0, 1)
        extra = 0
        for layer in self.mix:
            mixed, summary = layer(mixed)
            extra = extra + summary
        fused = self.fuse(self.vision(image).mean(1), mixed.mean(0) + extra.unsqueeze(1))
        return {"loss": functional.cross_entropy(self.head(fused), label, reduction=self.reduction)}


class Caption(nn.Module):
    """A decoder over the vision tower's output; its embedding is also its head's weight."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.vision = vision
        self.embed = nn.Embedding(11, WIDTH)
        self.center = Center()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(CrossBlock() for _ in range(3))
        self.project = Project()

    def forward(self, image: Tensor, caption: Tensor) -> Tensor:
        context = self.vision(image)
        x, bias = self.embed(caption), self.bias
        for layer in self.layers:
            x, bias = layer(x, context, bias)
        logits = self.project(x.flatten(0, 1), self.center(context)) @ self.embed.weight.T
        return functional.cross_entropy(logits, caption.flatten())


def build(
    reduction: str = "mean",
    frozen_tower: bool = False,
    tasks: Collection[str] = ("pairs", "classify", "caption"),
    caption_batch: int = 4,
    draws: bool = False,
) -> Workload:
    """Three tasks over shared towers, or some of them, with unequal batches and weights."""
    items = DrawnItems if draws else Items
    collate = masked if draws else None
    vision, text = Vision(), Text()
    if frozen_tower:
        text.requires_grad_(False)
    known = (
        Task("pairs", Pairs(vision, text), 8, items(("image", "words"), 40, 1), weight=0.7),
        Task(
            "classify",
            Classify(vision, text, reduction),
            12,
            items(("image", "words", "label"), 30, 2),
            weight=0.1 if reduction == "sum" else 1.5,
            reduction=reduction,
        ),
        Task("caption", Caption(vision), caption_batch, items(("image", "caption"), 9, 3), collate=collate),
    )
    chosen = [task for task in known if task.name in tasks]
    return Workload(
        name="toy",
        tasks=chosen,
        operators=_used(chosen, Block, TimeMajorBlock, CrossBlock, Fuse, Project),
        coupled=_used(chosen, Contrast, Center),
    )


def _used(tasks: Collection[Task], *classes: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    modules = [module for task in tasks for module in task.module.modules()]
    return tuple(cls for cls in classes if any(isinstance(module, cls) for module in modules))


class Broken(Block):
    """Fails once it is given real values; tracing gives it none."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            raise ValueError("the layer's own error")
        return super().forward(x)


def build_broken() -> Workload:
    """The last layer of a tower fails in training."""
    workload = build()
    blocks = workload.tasks[0].module.get_submodule("vision.blocks")
    blocks[3] = Broken()
    return Workload(
        name="broken",
        tasks=workload.tasks,
        operators=(*workload.operators, Broken),
        coupled=workload.coupled,
    )


def build_anew() -> Workload:
    """Initial values that no seed fixes."""
    torch.manual_seed(os.getpid())
    return build()


class Moving(nn.Module):
    """Whatever moves in training apart from parameters: chance, running statistics, a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.spectral = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(torch.tanh(self.spectral(self.norm(x))), 0.3)


class MovingTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Moving() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        for layer in self.layers:
            image = layer(image)
        return functional.cross_entropy(self.head(image.mean(1)), label)


def build_moving() -> Workload:
    """For one device: its layers couple the samples."""
    task = Task("moving", MovingTask(), 6, Items(("image", "label"), 30, 4))
    return Workload("moving", [task], operators=(), coupled=(Moving,))
