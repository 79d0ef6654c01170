"""An evaluation has the constants that forward makes in eval mode, whatever it makes in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.evaluation import analyse_evaluation
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

from .shares import run_cut

BATCH = 4


class Items:
    """Six samples."""

    def __init__(self) -> None:
        self.x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index]}


class Modes(nn.Module):
    """Weighs by other numbers in training than in evaluation, and by the sums of both."""

    def __init__(self, in_training: list[list[float]], in_eval: list[list[float]]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.in_training, self.in_eval = in_training, in_eval

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        out = self.layer(x)
        for numbers in self.in_training if self.training else self.in_eval:
            out = out * torch.tensor(numbers)
        return out.pow(2).mean()


def workload_of(module: nn.Module, **more: object) -> Workload:
    torch.manual_seed(0)
    return Workload("modes", [Task("t", module, BATCH, Items(), **more)], operators=(nn.Linear,))  # type: ignore[arg-type]


def others() -> Workload:
    return workload_of(Modes([[2.0, 3.0]], [[5.0, 7.0]]))


def none_in_training() -> Workload:
    return workload_of(Modes([], [[5.0, 7.0]]))


def in_another_order() -> Workload:
    return workload_of(Modes([[2.0, 3.0], [5.0, 7.0], [1.0, 2.0]], [[5.0, 7.0], [3.0, 2.0]]))


def loss_of(task: TaskGraph, batch: dict[str, Tensor]) -> Tensor:
    return run_cut(task, [batch], {op.index: [0, 1, BATCH] for op in task.ops})


BUILDS = [others, none_in_training, in_another_order]


@pytest.mark.parametrize("build", BUILDS)
def test_a_task_that_is_evaluated_on_data_of_a_script_has_the_constants_of_eval_mode(build) -> None:
    graph = analysed(build())
    trained = graph.tasks["t"]
    batch = {"x": Items().x[:BATCH]}
    before = loss_of(trained, batch)
    evaluated = analyse_evaluation(f"{__name__}:{build.__name__}", graph, "t")
    assert evaluated.root is trained.root
    module = trained.root.eval()
    torch.testing.assert_close(loss_of(evaluated, batch), module(**batch))
    torch.testing.assert_close(loss_of(trained, batch), before)  # which keeps those of training
    torch.testing.assert_close(before, module.train()(**batch))


@pytest.mark.parametrize("build", BUILDS)
def test_a_task_with_data_for_evaluations_has_the_constants_of_eval_mode(build) -> None:
    workload = build()
    workload.tasks[0].eval_dataset = Items()
    graph = analysed(workload, evaluates=True)
    batch = {"x": Items().x[:BATCH]}
    module = graph.tasks["t"].root
    torch.testing.assert_close(loss_of(graph.tasks["t"], batch), module(**batch))
    torch.testing.assert_close(loss_of(graph.evaluations["t"], batch), module.eval()(**batch))


def test_constants_that_are_handed_on_take_no_name_that_is_taken() -> None:
    one, other = (analysed(workload_of(Modes([[a, 3.0]], []))).tasks["t"] for a in (2.0, 5.0))
    other.hand_constants_on(one.root)
    assert one.constants["_tensor_constant0"].tolist() == [2.0, 3.0]
    (taken,) = {
        str(node.target)
        for op in other.ops
        for graph in op.graphs
        for node in graph.nodes
        if "constant" in str(node.target)
    }
    assert getattr(one.root, taken).tolist() == [5.0, 3.0]
