"""Operators that change parameters which are trained: SwAV's prototypes, a scale that is held in bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.analysed import analysed
from spindle_cli.analysis.rules.batch_norms import changes_buffers
from spindle_cli.errors import WorkloadError
from spindle_cli.training.optimizing.groups import groups_of_graph
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items


class Prototypes(nn.Module):
    """Scores by prototypes, which are of length one whenever they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.prototypes.weight.copy_(functional.normalize(self.prototypes.weight.data))
        return self.prototypes(x)


class OverTheBatch(Prototypes):
    """Has another reason not to be split."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(0)


class Net(nn.Module):
    def __init__(self, block: nn.Module, head: nn.Module, twice: bool = False) -> None:
        super().__init__()
        self.block, self.head, self.twice = block, head, twice

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.block(x))
        if self.twice:
            scores = scores + self.head(self.block(-x))
        return scores.square().mean()


def workload(*nets: nn.Module, head: type[Prototypes] = Prototypes, listed: bool = False) -> Workload:
    tasks = [Task(f"t{number}", net, 4, Items(x=(4, WIDTH))) for number, net in enumerate(nets)]
    return Workload("w", tasks, (Block, head), coupled=(head,) if listed else ())


@pytest.mark.parametrize("head", [Prototypes, OverTheBatch])
@pytest.mark.parametrize("listed", [False, True])
def test_what_a_forward_changes_is_known_whatever_else_couples_its_samples(
    head: type[Prototypes], listed: bool
) -> None:
    graph = analysed(workload(Net(Block(), head()), head=head, listed=listed))
    block, last = graph.tasks["t0"].ops[:2]
    assert (block.changes, last.changes, last.coupled) == ((), ("head.prototypes.weight",), True)
    assert [changes_buffers(graph.tasks["t0"], op) for op in (block, last)] == [False, True]


@pytest.mark.parametrize("head", [Prototypes, OverTheBatch])
@pytest.mark.parametrize("twice", [False, True])
def test_a_changed_parameter_that_another_op_uses_is_refused(head: type[Prototypes], twice: bool) -> None:
    """It may run on another device, or backward before or after the change."""
    shared = head()
    nets = [Net(Block(), shared, twice=True)] if twice else [Net(Block(), shared), Net(Block(), shared)]
    with pytest.raises(WorkloadError, match=r"changes parameters that are trained, 't0\.head\.prototypes"):
        analysed(workload(*nets, head=head))


def test_the_trained_neighbours_of_a_changed_parameter_may_be_used_by_others() -> None:
    class Beside(Prototypes):
        def __init__(self, block: Block) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.block(x))

    block = Block()
    graph = analysed(workload(Net(block, Beside(block)), head=Beside))
    assert graph.tasks["t0"].ops[1].changes == ("head.prototypes.weight",)


def test_updates_from_a_copy_that_does_not_see_the_change_are_refused() -> None:
    graph = analysed(workload(Net(Block(), Prototypes())))
    groups_of_graph(TrainSettings(precision="bf16-autocast"), graph)
    with pytest.raises(WorkloadError, match="a float32 copy, which would not see it changed"):
        groups_of_graph(TrainSettings(precision="bf16"), graph)
