"""Tasks that are only evaluated, over parts of what others train, with parameters of their own."""

from __future__ import annotations

from typing import Any

import eval_toys
import torch
import torch.nn.functional as functional
from eval_toys import CLASSES, WIDTH, Inputs, Items
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload


class Offset(nn.Module):
    """An operator of a task that is only evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Probe(nn.Module):
    """A trained tower between an offset and a head that nothing trains."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.offset, self.layers = Offset(), layers
        self.own = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Any]:
        x = self.offset(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.own(x)
        loss = functional.cross_entropy(logits, label)
        return {"loss": loss, "logits": logits, "best": logits.argmax(1), "label": label}


class Across(nn.Module):
    """Compares all samples, by a tower that one task trains and a head that another does."""

    def __init__(self, layers: nn.ModuleList, head: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = layers, head

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a = x
        for layer in self.layers:
            a = layer(a)
        logits = self.head(a) @ self.head(x).T
        loss = functional.cross_entropy(logits, torch.arange(len(x), device=x.device))
        return {"loss": loss, "features": a}


def build() -> Workload:
    workload = eval_toys.build()
    first, second = workload.tasks
    assert isinstance(first, Task)
    assert isinstance(second, Task)
    layers, head, other = (
        first.module.get_submodule("layers"),
        first.module.get_submodule("head"),
        second.module.get_submodule("layers"),
    )
    assert isinstance(layers, nn.ModuleList)
    assert isinstance(other, nn.ModuleList)
    workload.operators = (*workload.operators, Offset)
    workload.evaluated = [
        # A batch that no four devices, but three can have equal shares of.
        Task(
            "probe",
            Probe(layers),
            3,
            eval_dataset=Items(11, 9),
            metrics={"accuracy": eval_toys.accuracy, "in_order": eval_toys.in_order},
        ),
        Task(
            "across",
            Across(other, head),
            5,
            eval_dataset=Inputs(11, 10),
            metrics={"features": eval_toys.features},
        ),
    ]
    return workload


class Surprise(nn.Module):
    """What a decoder makes of captions, by a loss that looks at all of its words' logits at once."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, image: Tensor, caption: Tensor) -> Tensor:
        context, x = self.decoder.tower(image), self.decoder.embed(caption)
        for layer in self.decoder.layers:
            x = layer(x, context)
        words = (x @ self.decoder.embed.weight.T).log_softmax(-1)
        return functional.nll_loss(words.flatten(0, 1), caption.flatten())


def build_split() -> Workload:
    """The tower of `split_toys`, of which tensor parallelism has cut the layers."""
    import split_toys

    workload = split_toys.build()
    left, _ = workload.tasks
    assert isinstance(left, Task)
    tower = left.module.get_submodule("tower")
    assert isinstance(tower, split_toys.Tower)
    held_out = split_toys.Items(("image", "label"), 7, 5)
    captions = split_toys.Items(("image", "caption"), 5, 8)
    workload.evaluated = [
        Task("probe", split_toys.Left(tower), 6, eval_dataset=held_out),
        Task("surprise", Surprise(workload.tasks[1].module), 4, eval_dataset=captions),
    ]
    return workload
