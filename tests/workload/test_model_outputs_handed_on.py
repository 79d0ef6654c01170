"""Model outputs, and other dicts of classes of their own, that one operator gives whole to another."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'spindle-cli[hf]')")

from transformers.utils import ModelOutput

from helpers.analysed import analysed
from spindle_cli.workload.types import Task, Workload
from workload.shares import run_plain, run_shares

from .toy import WIDTH, Items

BATCH = 5


@dataclass
class Output(ModelOutput):
    hidden: Tensor | None = None
    extra: Tensor | None = None
    pooled: Tensor | None = None


class Numbered(OrderedDict[str, Any]):
    """A dict of a class of its own, which cannot be made by names alone."""

    def __init__(self, number: int, **entries: Any) -> None:
        super().__init__(**entries)
        self.number = number


torch.utils._pytree.register_pytree_node(
    Numbered,
    lambda own: (list(own.values()), (own.number, list(own))),
    lambda values, known: Numbered(known[0], **dict(zip(known[1], values, strict=True))),
)


class Encoder(nn.Module):
    def __init__(self, *, is_output: bool = True) -> None:
        super().__init__()
        self.linear, self.is_output = nn.Linear(WIDTH, WIDTH), is_output

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        parts = {"hidden": hidden, "pooled": hidden.mean(1)}
        return Output(**parts) if self.is_output else Numbered(1, **parts)


class ByAttribute(nn.Module):
    """Uses an output as transformers' own code does: by attribute, by number and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Output, scale: float = 1.0) -> Tensor:
        assert isinstance(given, Output) and len(given) == 2 and given.extra is None
        row: Tensor = self.linear(given.hidden).mean(1) + given[1] * scale + given["pooled"]
        return row


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        row: Tensor = self.linear(given["pooled"])
        return row


class Net(nn.Module):
    """Two operators take the same output, one of them by a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.first, self.second = Encoder(), ByAttribute(), ByAttribute()

    def forward(self, x: Tensor) -> Tensor:
        out = self.encoder(x)
        return (self.first(out, scale=2.0) + self.second(given=out)).square().mean()


class NamedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.reader = Encoder(is_output=False), ByName()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.reader(self.encoder(x)).square().mean()
        return loss


@pytest.mark.parametrize("shares", [1, 2, 5])
@pytest.mark.parametrize(("net", "reader"), [(Net, ByAttribute), (NamedNet, ByName)])
def test_what_takes_one_whole_gets_one_in_every_share(
    net: type[nn.Module], reader: type[nn.Module], shares: int
) -> None:
    torch.manual_seed(3)
    task = Task("t", net(), BATCH, Items(x=(4, WIDTH)))
    graph = analysed(Workload("w", [task], (Encoder, reader))).tasks["t"]
    assert not any(op.coupled for op in graph.ops)
    batch = {"x": torch.randn(BATCH, 4, WIDTH)}
    cut = {op.index: shares for op in graph.ops}
    torch.testing.assert_close(run_shares(graph, batch, cut), run_plain(task, batch))


def test_equal_layers_that_take_one_are_one_metaop() -> None:
    task = Task("t", Net(), BATCH, Items(x=(4, WIDTH)))
    first, second = (op for op in analysed(Workload("w", [task], (Encoder, ByAttribute))).tasks["t"].ops[1:3])
    assert (first.target, second.target) == ("first", "second")
    assert first.inputs == second.inputs
