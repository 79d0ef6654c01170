"""A layer whose code runs once more in its backward pass is profiled like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.analysed import analysed
from spindle_cli.operators.tensor_parallel import kept_whole, layer_split
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.estimating.fake_memory import fake_memory
from spindle_cli.profile.op.counting import count_work
from spindle_cli.workload.building.memory import drop
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Task, Workload

WIDTH, BATCH = 4, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + torch.dropout(self.linear(x).tanh(), 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Again(Layer):
    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return again


class Net(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(layer(), layer(), layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x)).square().mean()


def graph_of(layer: type[Layer], *, parameters: bool = True, **settings: Any) -> WorkloadGraph:
    torch.manual_seed(0)
    net = Net(layer)
    if not parameters:
        drop(net.parameters())
    task = Task("t", net, BATCH, [{"x": torch.randn(WIDTH)} for _ in range(2 * BATCH)])
    return analysed(Workload("again", [task], operators=(layer,), **settings))


@pytest.mark.parametrize("layer", [Layer, Again])
def test_its_shares_and_its_forward_agree_though_it_drops(layer: type[Layer]) -> None:
    found = check_numbers(graph_of(layer), 0, CheckSettings(threads=1)).tasks[0]
    assert found.checked
    assert found.whole == found.unchecked == {}
    assert found.forward_unchecked is None


def test_its_work_is_counted_with_what_it_computes_again() -> None:
    plain, again = (
        count_work(graph.tasks["t"], graph.tasks["t"].ops[1], BATCH, "float32")
        for graph in (graph_of(layer, parameters=False) for layer in (Layer, Again))
    )
    product = 2 * BATCH * WIDTH * WIDTH
    assert plain.forward_flops == again.forward_flops == product
    assert sum(kernel.flops for kernel in plain.backward) == 2 * product
    assert sum(kernel.flops for kernel in again.backward) == 3 * product
    assert again.activation_bytes < plain.activation_bytes


def test_its_memory_is_estimated_without_what_it_computes_again() -> None:
    plain, again = (
        fake_memory(graph.tasks["t"], graph.tasks["t"].ops[1], BATCH, "float32", TrainSettings())
        for graph in (graph_of(layer, parameters=False) for layer in (Layer, Again))
    )
    assert again.kept_bytes < plain.kept_bytes


class Split(Layer):
    """Goes through two linear maps, that are split over devices."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.back(self.linear(x).relu())


class SplitAgain(Split):
    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return again


class SplitAgainReentrant(Split):
    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.body, x, use_reentrant=True)
        return again


@pytest.mark.parametrize("layer", [Split, SplitAgain, SplitAgainReentrant])
def test_it_is_not_split_by_tensor_parallelism_which_ends_before_it_runs_again(layer: type[Layer]) -> None:
    plans = {layer: {"linear": "colwise", "back": "rowwise"}}
    graph = graph_of(layer, parameters=False, tp_plans=plans)
    task = graph.tasks["t"]
    split = layer_split(graph.workload, task, task.ops[1], 2)
    if layer is Split:
        assert split is not None
        assert kept_whole(graph) == ()
    else:
        assert split is None
        (why,) = kept_whole(graph)
        assert f"{layer.__name__} runs once more in its backward pass" in why
