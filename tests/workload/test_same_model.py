"""Running a workload's ops, whole or in shares, is running its plain modules: same loss, same gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spindle_cli.training.batches import Batches
from spindle_cli.workload.graph import ParameterTable

from . import shapes_of_models
from .shares import gradients_of, run_plain, run_shares


@pytest.mark.parametrize("name", shapes_of_models.ALL)
@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_ops_in_shares_give_the_plain_loss_and_gradients(name: str, data: st.DataObject) -> None:
    graph = shapes_of_models.analysed(name)
    parameters = ParameterTable.of(graph).parameters
    for task in graph.workload.tasks:
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
    graph = shapes_of_models.analysed(name)
    for task, traced in zip(graph.workload.tasks, graph.tasks.values(), strict=True):
        values: dict[str, Tensor] = {}
        batch = Batches(task, seed=1).rows(0, 0, task.batch_size)
        for op in traced.ops[:-1]:
            result = traced.op_module(op)(*(batch[f] for f in op.fields), *(values[v] for v in op.inputs))
            values.update(zip(op.outputs, result, strict=True))
        assert values.keys() == traced.values.keys()
        for key, value in values.items():
            spec = traced.values[key]
            assert (tuple(value.shape), value.requires_grad) == (spec.shape, spec.requires_grad)


@pytest.mark.parametrize("name", shapes_of_models.ALL)
def test_an_op_uses_the_parameters_that_it_names(name: str) -> None:
    for traced in shapes_of_models.analysed(name).tasks.values():
        for op in traced.ops:
            used = {id(p) for p in traced.op_module(op).parameters()}
            named = {id(traced.root.get_parameter(n)) for n in op.parameters}
            assert used == named
            assert len(named) == len(op.parameters)


COUPLED = {
    "coupled_class": ["plain/loss", "scaled/loss"],
    "across": ["t/attend-2", "t/loss"],
}


@pytest.mark.parametrize("name", shapes_of_models.ALL)
def test_only_what_must_not_be_split_is_coupled(name: str) -> None:
    graph = shapes_of_models.analysed(name)
    assert [metaop.name for metaop in graph.metaops if metaop.coupled] == COUPLED.get(name, [])


def test_what_was_found_to_be_coupled_is_said() -> None:
    notes = shapes_of_models.analysed("across").notes
    assert len(notes) == 2
    assert notes[0].startswith("t/attend-2 is never split") and "batch_first=True" in notes[0]
    assert shapes_of_models.analysed("coupled_class").notes == ()
