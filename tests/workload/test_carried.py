"""A layer that reads what it kept of an earlier batch stays whole; what is kept otherwise is no matter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.splitting.carried import carried_on, kept_by
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items


def _hidden_state(layer: Any, y: Tensor) -> Tensor:
    if layer.kept is not None:
        y = y + layer.kept[0]
    layer.kept = (y.detach(), None)
    return y


def _memory_of_equal_shape(layer: Any, y: Tensor) -> Tensor:
    """No share of a sample fails, and none differs where all batches are cut alike."""
    if layer.kept is not None and layer.kept.shape == y.shape:
        y = y + layer.kept
    layer.kept = y.detach()
    return y


def _running_mean(layer: Any, y: Tensor) -> Tensor:
    before = torch.zeros_like(y[0]) if layer.kept is None else layer.kept
    layer.kept = 0.9 * before + 0.1 * y.detach().mean(0)
    return y - before


def _map_for_others(layer: Any, y: Tensor) -> Tensor:
    layer.kept = y.softmax(-1).detach()
    return y


def _angles_that_save_work(layer: Any, y: Tensor) -> Tensor:
    if layer.kept is None:
        layer.kept = torch.arange(y.shape[1], device=y.device)[:, None].cos()
    kept: Tensor = layer.kept
    return y * kept


CASES: dict[Callable[[Any, Tensor], Tensor], bool] = {
    _hidden_state: True,
    _memory_of_equal_shape: True,
    _running_mean: True,
    _map_for_others: False,
    _angles_that_save_work: False,
}


class Keeping(nn.Module):
    def __init__(self, keep: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.keep = Block(), keep
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(self, self.block(x))


class Net(nn.Module):
    def __init__(self, keep: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = Block(), Keeping(keep)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out.pow(2).mean()


def test_what_was_there_before_a_forward_is_not_made_of_its_batch() -> None:
    layer = Keeping(_hidden_state)
    layer.kept = (torch.ones(WIDTH), None)
    again = partial(layer, torch.ones(2, WIDTH))
    assert carried_on(layer, kept_by(layer), again) == {}
    assert list(carried_on(layer, {}, again)) == ["kept"]


@pytest.mark.parametrize("keep", CASES, ids=lambda keep: keep.__name__)
def test_a_layer_that_reads_what_it_kept_of_another_batch_stays_whole(
    keep: Callable[[Any, Tensor], Tensor],
) -> None:
    net = Net(keep)
    graph = analyse(Workload("w", [Task("t", net, 6, Items(x=(4, WIDTH)))], (Block, Keeping)))
    coupled = {op.target: op.coupled_because for op in graph.tasks["t"].ops if op.coupled}
    if CASES[keep]:
        assert "reads self.kept, which an earlier one has made of its own batch" in (coupled["second"] or "")
    else:
        assert coupled == {}
    assert net.second.kept is None
