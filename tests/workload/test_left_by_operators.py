"""What an operator leaves on itself (a loss that balances experts) is read by nobody else: a trace would have
what was there before.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items


class Router(nn.Module):
    """Keeps what a further loss is made of, as mixtures of experts do; `begin`: what is there before."""

    def __init__(self, begin: Any) -> None:
        super().__init__()
        self.block = Block()
        if begin is not None:
            self.kept = begin

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        if isinstance(getattr(self, "kept", None), list):
            self.kept.append(y.pow(2).mean())
        else:
            self.kept = y.pow(2).mean()
        return y


class Layer(nn.Module):
    def __init__(self, begin: Any) -> None:
        super().__init__()
        self.router = Router(begin)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.router(x)
        return out


class Net(nn.Module):
    def __init__(self, begin: Any, *, reads: bool) -> None:
        super().__init__()
        self.layers, self.reads = nn.ModuleList([Layer(begin), Layer(begin)]), reads

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss = x.pow(2).mean()
        if not self.reads:
            return loss
        kept = [layer.router.kept for layer in self.layers]  # type: ignore[union-attr]
        return loss + sum(sum(each) if isinstance(each, list) else each for each in kept)  # type: ignore[arg-type]


def workload(begin: Any, *, reads: bool) -> Workload:
    return Workload("w", [Task("t", Net(begin, reads=reads), 6, Items(x=(4, WIDTH)))], (Layer,))


@pytest.mark.parametrize("begin", [0.0, None, []], ids=["number", "nothing", "list"])
def test_reading_what_an_operator_leaves_on_itself_is_refused(begin: Any) -> None:
    with pytest.raises(WorkloadError, match=r"forward asks for kept of Router, which an operator") as refused:
        analyse(workload(begin, reads=True))
    assert re.search(r"test_left_by_operators\.py:\d+: task 't'", str(refused.value))


def test_what_an_operator_leaves_on_itself_stays_its_own() -> None:
    made = workload(0.0, reads=False)
    analyse(made)
    task = made.tasks[0]
    assert isinstance(task, Task) and isinstance(task.module, Net)
    assert [layer.router.kept for layer in task.module.layers] == [0.0, 0.0]  # type: ignore[union-attr]
