"""What forward draws for each sample between operators is split with it, and drawn once, whoever uses it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributions as distributions
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.own_draws import draws_by_itself
from spindle_cli.workload.types import Task, Workload
from workload.shares import run_plain, run_shares

from .toy import WIDTH, Block, Items

BATCH = 6


def _steps(h: Tensor) -> Tensor:
    """As diffusion models draw their timesteps, and look something up by them."""
    drawn = torch.randint(0, 9, (h.shape[0],), device=h.device).long()
    return torch.linspace(1.0, 0.1, 9)[drawn].view(-1, *[1] * (h.dim() - 1))


def _old_noise(h: Tensor) -> Tensor:
    """As the first variational autoencoders of PyTorch wrote it, and those that copy them."""
    return h.data.new(h.size()).normal_()


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "steps": _steps,
    "noise": _old_noise,
    "numbers": lambda h: torch.rand(h.shape[0], 1, 1, device=h.device),
    "mask": lambda h: (torch.rand(len(h)) < 0.5).float()[:, None, None],
    "noise like others": lambda h: h.new_empty(h.shape).normal_(),
    "of a distribution": lambda h: distributions.Normal(h, torch.ones_like(h)).rsample(),
    "of elements together": lambda h: distributions.Independent(distributions.Normal(h, 1.0), 1).sample(),
}


class Net(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third, self.draw = Block(), Block(), Block(), draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        drawn = self.draw(h)
        return (self.third(self.second(h + drawn) * drawn) - drawn).pow(2).mean()


class OnlyInLosses(Net):
    """Losses of two ops use what is drawn, and no operator does."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.draw(x)
        h = self.first(x)
        return (self.second(h) - drawn).pow(2).mean() + (h * drawn).mean()


@pytest.mark.parametrize("net", [Net, OnlyInLosses])
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_for_each_sample_is_split_and_made_once(name: str, net: type[Net]) -> None:
    workload = Workload("w", [Task("t", net(DRAWS[name]), BATCH, Items(x=(4, WIDTH)))], (Block,))
    task = analysed(workload).tasks["t"]
    assert not any(op.coupled for op in task.ops)
    drawn = [node for op in task.ops for node in op.graph.nodes if draws_by_itself(node)]
    assert len(drawn) == 1
    losses = []
    for run in (run_plain, partial(run_shares, dp={op.index: 1 for op in task.ops})):
        torch.manual_seed(1)
        given: Any = task.task if run is run_plain else task
        losses.append(run(given, {"x": torch.ones(BATCH, 4, WIDTH)}))
    torch.testing.assert_close(losses[1], losses[0])
