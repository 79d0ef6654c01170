"""A loss in shares is that of the whole batch, of several batches that of one as large; or it is whole."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ctc_loss, gaussian_nll_loss

from helpers.analysed import analysed
from helpers.torch_versions import broadcasts_variances
from spindle_cli.analysis.losses.counts import count_present, missing_in_sum, sum_present
from spindle_cli.analysis.without_data import Unread
from spindle_cli.workload.graph import ParameterTable, TaskGraph, WorkloadGraph

from .counted_losses import CASES, SAMPLES, build
from .shares import gradients_of, run_cut, run_plain

PER_CHANNEL = "gaussian, a variance per channel"
CUTS = ([0, SAMPLES], [0, 1, SAMPLES], [0, 1, 2, SAMPLES - 1, SAMPLES])


def batches_of(task: TaskGraph, count: int) -> list[dict[str, Tensor]]:
    """The dataset's first batches, in order."""
    data = task.task.dataset.data
    return [
        {name: values[first : first + SAMPLES] for name, values in data.items()}
        for first in range(0, count * SAMPLES, SAMPLES)
    ]


@cache
def graph_of(name: str) -> WorkloadGraph:
    return analysed(build(CASES[name].loss))


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_split_where_it_is_known_to_be_a_mean(name: str) -> None:
    case, graph = CASES[name], graph_of(name)
    op = graph.tasks["t"].ops[-1]
    assert op.coupled == (case.whole is not None), op.coupled_because
    assert (case.whole or "") in (op.coupled_because or "")
    if case.whole is not None:
        assert "counted_losses.py:" in (op.coupled_because or "")
    assert op.shares is not None
    assert op.shares.num_counts == case.counts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=broadcasts_variances if name == PER_CHANNEL else ()) for name in CASES]
)
def test_shares_of_a_loss_add_up_to_it_and_so_do_their_gradients(name: str) -> None:
    graph = graph_of(name)
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


def test_a_mean_of_what_is_not_missing_by_hand() -> None:
    """Of 1, 2, 30 and 4 without the third; a NaN of the model's own is no entry that is missing."""
    values = torch.tensor([1.0, 2.0, 30.0, 4.0], requires_grad=True)
    missing = torch.tensor([False, False, True, False])
    given = values.masked_fill(missing, math.nan)
    sum_present(given, missing).backward()
    assert sum_present(given, missing).item() == 7 and count_present(missing).item() == 3
    assert values.grad.tolist() == [1, 1, 0, 1]
    assert sum_present(given.masked_fill(missing.roll(1), math.nan), missing).isnan()
    assert sum_present(values, missing).isnan()  # an entry that was to be missing and is not


def test_missing_in_rows_by_hand() -> None:
    missing = torch.tensor([[False, False], [True, False]])
    assert missing_in_sum(missing, -1).tolist() == [False, True]
    assert missing_in_sum(missing, dim=1, keepdim=True).tolist() == [[False], [True]]


@pytest.mark.parametrize(
    "variance", [(3, 2), (3,), (3, 1), pytest.param((1, 2), marks=broadcasts_variances)], ids=str
)
def test_a_loss_that_reads_no_value_is_what_torch_gives(variance: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given, wanted, var = torch.randn(3, 2), torch.randn(3, 2), torch.rand(*variance) + 0.1
    for reduction, full in (("none", False), ("mean", True), ("sum", False)):
        expected = gaussian_nll_loss(given, wanted, var, full=full, reduction=reduction)
        with Unread():
            found = gaussian_nll_loss(given, wanted, var, full=full, reduction=reduction)
        torch.testing.assert_close(found, expected)


def test_an_alignment_that_reads_no_value_is_of_its_own_sample() -> None:
    probabilities = torch.zeros(2, 3, 4)
    probabilities[:, 1] = torch.nan
    targets, lengths = torch.ones(3, 1, dtype=torch.long), torch.ones(3, dtype=torch.long)
    with Unread():
        found = ctc_loss(probabilities, targets, lengths * 2, lengths, reduction="none")
        whole = ctc_loss(probabilities, targets, lengths * 2, lengths)
        joined = ctc_loss(torch.zeros(2, 3, 4), torch.ones(3, dtype=torch.long), (2, 2, 2), (1, 1, 1))
    assert found.isnan().tolist() == [False, True, False] and whole.isnan() and whole.dim() == 0
    assert joined.item() == pytest.approx(
        ctc_loss(torch.zeros(2, 3, 4), targets, lengths * 2, lengths).item()
    )
