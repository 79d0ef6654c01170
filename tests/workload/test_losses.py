"""A loss in shares is that of the whole batch, of several batches that of one as large; or it is whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.parameters import ParameterTable

from .counted_losses import CASES, SAMPLES, build
from .shares import gradients_of, run_cut, run_plain

CUTS = ([0, SAMPLES], [0, 1, SAMPLES], [0, 1, 2, SAMPLES - 1, SAMPLES])


def batches_of(task: TaskGraph, count: int) -> list[dict[str, Tensor]]:
    """The dataset's first batches, in order."""
    data = task.task.dataset.data
    return [
        {name: values[first : first + SAMPLES] for name, values in data.items()}
        for first in range(0, count * SAMPLES, SAMPLES)
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_split_where_it_is_known_to_be_a_mean(name: str) -> None:
    case = CASES[name]
    graph = analyse(build(case.loss))
    op = graph.tasks["t"].ops[-1]
    assert op.coupled == (case.whole is not None), op.coupled_because
    assert (case.whole or "") in (op.coupled_because or "")
    if case.whole is not None:
        assert "counted_losses.py:" in (op.coupled_because or "")
    assert op.shares is not None
    assert op.shares.num_counts == case.counts


@pytest.mark.parametrize("name", CASES)
def test_shares_of_a_loss_add_up_to_it_and_so_do_their_gradients(name: str) -> None:
    graph = analyse(build(CASES[name].loss))
    task, parameters = graph.tasks["t"], ParameterTable.of(graph).parameters
    last = task.ops[-1].index
    for count in (1, 3):
        batches = batches_of(task, count)
        if CASES[name].whole is None:  # the loss of one batch that is as large
            plain = run_plain(task.task, {key: torch.cat([b[key] for b in batches]) for key in batches[0]})
        else:
            plain = sum(run_plain(task.task, batch) for batch in batches) / count
        expected = gradients_of(plain, parameters)
        for cut in CUTS[: 4 - count]:
            loss = run_cut(task, batches, {last: cut, last - 1: [0, 3, SAMPLES]})
            torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
            for key, gradient in gradients_of(loss, parameters).items():
                torch.testing.assert_close(gradient, expected[key], rtol=1e-10, atol=1e-13)
