"""Running a workload's ops, whole or in shares, is running its plain modules: same loss, same gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spindle_cli.verify.flow import run_flow
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.batches import Batches
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec
from spindle_cli.workload.ops import op_module
from spindle_cli.workload.parameters import ParameterTable
from spindle_cli.workload.types import Task

from . import shapes_of_models


def run_plain(task, batch: dict[str, Tensor]) -> Tensor:
    loss = task.module(**batch) if isinstance(task, Task) else run_flow(task, batch)
    return loss["loss"] if isinstance(loss, dict) else loss


def rows(tensor: Tensor, spec: ValueSpec, first: int, last: int) -> Tensor:
    """The part of a value that belongs to samples [first, last); all of it without a batch dimension."""
    if spec.batch_dim is None:
        return tensor
    return tensor.narrow(spec.batch_dim, first * spec.rows_per_sample, (last - first) * spec.rows_per_sample)


def run_shares(task: TaskGraph, batch: dict[str, Tensor], dp: dict[int, int]) -> Tensor:
    """The task's loss, op by op, op k in dp[k] shares of the batch (a coupled op always in one)."""
    values: dict[str, Tensor] = {}
    size = task.task.batch_size
    for op in task.ops:
        shares = 1 if op.coupled else dp.get(op.index, 1)
        module = op_module(task, op)
        results = [
            run_share(task, op, module, batch, values, share * size // shares, (share + 1) * size // shares)
            for share in range(shares)
        ]
        if op.is_loss:
            weight = 1.0 if task.task.reduction == "sum" else 1 / shares
            return sum(result * weight for result in results)
        for position, name in enumerate(op.outputs):
            dim = task.values[name].batch_dim
            assert dim is not None or shares == 1, f"{name} has no batch dimension, but its op is split"
            parts = [result[position] for result in results]
            values[name] = parts[0] if dim is None else torch.cat(parts, dim)
    raise AssertionError("no op gives the loss")


def run_share(
    task: TaskGraph,
    op: Op,
    module: nn.Module,
    batch: dict[str, Tensor],
    values: dict[str, Tensor],
    first: int,
    last: int,
):
    fields = [rows(batch[name], task.fields[name], first, last) for name in op.fields]
    inputs = [rows(values[name], task.values[name], first, last) for name in op.inputs]
    return module(*fields, *inputs)


def gradients_of(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    for parameter in parameters.values():
        parameter.grad = None
    loss.backward()
    return {name: parameter.grad for name, parameter in parameters.items()}


@pytest.mark.parametrize("name", shapes_of_models.ALL)
@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_ops_in_shares_give_the_plain_loss_and_gradients(name: str, data: st.DataObject) -> None:
    workload = shapes_of_models.build(name)
    graph = analyse(workload)
    parameters = ParameterTable.of(graph).parameters
    for task in workload.tasks:
        traced = graph.tasks[task.name]
        divisors = [n for n in range(1, task.batch_size + 1) if task.batch_size % n == 0]
        dp = {
            op.index: data.draw(st.sampled_from(divisors), label=f"dp of op {op.index}") for op in traced.ops
        }
        batch = Batches(task, seed=1).rows(0, 0, task.batch_size)
        plain = run_plain(task, {key: value.clone() for key, value in batch.items()})
        expected = gradients_of(plain, parameters)
        loss = run_shares(traced, batch, dp)
        found = gradients_of(loss, parameters)
        torch.testing.assert_close(loss, plain)
        for key, gradient in expected.items():
            assert (found[key] is None) == (gradient is None), key
            torch.testing.assert_close(found[key], gradient, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", shapes_of_models.ALL)
def test_values_are_as_predicted(name: str) -> None:
    """Shapes, dtypes and requires_grad found without computing are those of a real run."""
    workload = shapes_of_models.build(name)
    for task, traced in zip(workload.tasks, analyse(workload).tasks.values(), strict=True):
        values: dict[str, Tensor] = {}
        batch = Batches(task, seed=1).rows(0, 0, task.batch_size)
        for op in traced.ops[:-1]:
            result = op_module(traced, op)(*(batch[f] for f in op.fields), *(values[v] for v in op.inputs))
            values.update(zip(op.outputs, result, strict=True))
        assert values.keys() == traced.values.keys()
        for key, value in values.items():
            spec = traced.values[key]
            assert (tuple(value.shape), value.requires_grad) == (spec.shape, spec.requires_grad)


@pytest.mark.parametrize("name", shapes_of_models.ALL)
def test_an_op_uses_the_parameters_that_it_names(name: str) -> None:
    workload = shapes_of_models.build(name)
    for traced in analyse(workload).tasks.values():
        for op in traced.ops:
            used = {id(p) for p in op_module(traced, op).parameters()}
            named = {id(traced.root.get_parameter(n)) for n in op.parameters}
            assert used == named
            assert len(named) == len(op.parameters)


COUPLED = {
    "two_tasks": ["image_text/loss"],
    "coupled_class": ["plain/loss", "scaled/loss"],
    "frozen": ["t/loss"],
    "summed": ["t/contrast", "t/loss"],
    "biased": ["t/first"],
    "convnet": ["t/blocks", "t/blocks-2", "t/tail"],
    "masked": ["t/loss"],
    "across": ["t/attend-2", "t/loss"],
}


@pytest.mark.parametrize("name", shapes_of_models.ALL)
def test_only_what_must_not_be_split_is_coupled(name: str) -> None:
    graph = analyse(shapes_of_models.build(name))
    assert [metaop.name for metaop in graph.metaops if metaop.coupled] == COUPLED.get(name, [])


def test_what_was_found_to_be_coupled_is_said() -> None:
    notes = analyse(shapes_of_models.build("across")).notes
    assert len(notes) == 2
    assert notes[0].startswith("t/attend-2 is never split") and "batch_first=True" in notes[0]
    assert analyse(shapes_of_models.build("coupled_class")).notes == ()
