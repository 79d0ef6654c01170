"""Counting an op's work on tensors without data."""

from __future__ import annotations

import pytest
import torch
from tiny_workload import WIDTH, build
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.costs.flops import Arithmetic
from spindle_cli.profile.estimating.estimate import between
from spindle_cli.profile.op.counting import count_work, with_state
from spindle_cli.profile.op.op_run import OpRun, WallClock
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload


@pytest.fixture(scope="module")
def classify() -> TaskGraph:
    return analysed(build()).tasks["classify"]


def test_a_linear_layers_operations_are_counted_in_both_directions(classify: TaskGraph) -> None:
    work = count_work(classify, classify.ops[1], 16, "float32")
    product = 2 * 16 * WIDTH * WIDTH
    assert work.forward_flops == product
    # Gradients of the weight and of the input.
    assert sum(kernel.flops for kernel in work.backward) == 2 * product
    assert len(work.forward) == 2  # addmm, relu; views start no kernel


def test_the_first_layer_sends_no_gradient_to_the_batch(classify: TaskGraph) -> None:
    first = count_work(classify, classify.ops[0], 16, "float32")
    assert sum(kernel.flops for kernel in first.backward) == 2 * 16 * WIDTH * WIDTH


def test_kept_bytes_are_the_output_once_and_half_in_bfloat16(classify: TaskGraph) -> None:
    # relu saves its result, which is the op's output; the input belongs to the op before.
    assert count_work(classify, classify.ops[1], 16, "float32").activation_bytes == 16 * WIDTH * 4
    assert count_work(classify, classify.ops[1], 16, "bfloat16").activation_bytes == 16 * WIDTH * 2


def test_what_is_counted_to_be_kept_is_what_a_real_run_keeps(classify: TaskGraph) -> None:
    for op in classify.ops[:2]:
        run = OpRun(
            classify.op_module(op), [torch.randn(16, WIDTH)], num_fields=len(op.fields), clock=WallClock()
        )
        assert count_work(classify, op, 16, "float32").activation_bytes == run.kept_bytes()


def test_work_between_two_shares_is_that_of_the_share(classify: TaskGraph) -> None:
    few, many = (count_work(classify, classify.ops[3], rows, "float32") for rows in (2, 16))
    assert between(few, many, 2, 16, 8) == count_work(classify, classify.ops[3], 8, "float32")


def test_every_parameter_costs_a_cast_and_sums_whatever_the_batch(classify: TaskGraph) -> None:
    op = classify.ops[1]
    expected: tuple[tuple[Arithmetic, int, int], ...] = (("float32", 0, 1), ("bfloat16", 1, 2))
    for precision, forward, backward in expected:
        few, many = (count_work(classify, op, rows, precision) for rows in (2, 16))
        tensors = len(op.parameters)
        assert few.forward[: forward * tensors] == many.forward[: forward * tensors]
        assert few.backward[-backward * tensors :] == many.backward[-backward * tensors :]
    # In float32 only the gradient is added to what is there: two reads and a write.
    weight = WIDTH * WIDTH
    assert 3 * weight * 4 in [kernel.num_bytes for kernel in count_work(classify, op, 2, "float32").backward]


def test_a_part_with_two_names_has_its_own_parameters_again_afterwards() -> None:
    """An operator may hold what glue beside it calls."""
    module = nn.Module()
    module.outer = nn.Sequential(nn.Linear(2, 2))
    module.inner = module.outer[0]
    own = dict(module.named_parameters(remove_duplicate=False))
    weight, bias = torch.zeros(2, 2), torch.zeros(2)
    state = {name: weight if name.endswith("weight") else bias for name in own}
    with with_state(module, state):
        assert module.inner.weight is weight
    assert module.inner.weight is own["inner.weight"]


class Descends(nn.Module):
    """A step along a gradient that torch.func takes, by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def energy(one: Tensor) -> Tensor:
            return torch.tanh(self.linear(one)).sum()

        slope: Tensor = torch.func.vmap(torch.func.grad(energy))(x)
        return x - 0.1 * slope


def test_a_number_that_a_gradient_is_multiplied_by_is_no_tensor_that_is_kept() -> None:
    net = nn.Sequential(Descends(), nn.Linear(WIDTH, 1), nn.Flatten(0), MeanSquare())
    task = Task("t", net, 4, [{"input": torch.randn(WIDTH)} for _ in range(4)])
    graph = analysed(Workload("w", [task], operators=(Descends,))).tasks["t"]
    assert count_work(graph, graph.ops[0], 4, "float32").activation_bytes > 0


class MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()
