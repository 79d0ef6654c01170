"""Losses of pairs of samples, of which some count: a share knows of its own samples alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items


class Ranked(nn.Module):
    """Of each two samples the one with the higher label is to have the higher score."""

    def __init__(self, reduce: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.reduce = Block(), reduce

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        score = self.block(x)[:, 0, 0]
        above = label.unsqueeze(1) > label.unsqueeze(0)
        return self.reduce(functional.softplus(score.unsqueeze(0) - score.unsqueeze(1)), above)


@pytest.mark.parametrize(
    ("reduce", "is_split"),
    [
        (lambda losses, above: (losses * above).mean(), True),
        (lambda losses, above: losses[above].mean(), False),
        (lambda losses, above: (losses * above).sum() / above.sum().clamp(min=1), False),
    ],
    ids=["over all pairs", "selected", "counted"],
)
def test_a_mean_over_pairs_that_count_is_whole(
    reduce: Callable[[Tensor, Tensor], Tensor], is_split: bool
) -> None:
    """A share counts among its own samples alone, where most of the batch's pairs are none."""
    data = Items(x=(5, WIDTH), label=((), 5))
    graph = analysed(Workload("w", [Task("t", Ranked(reduce), 8, data)], (Block,))).tasks["t"]
    assert [op.contrasts for op in graph.ops if op.is_loss] == [is_split]
    assert [op.coupled for op in graph.ops if op.is_loss] == [not is_split]
