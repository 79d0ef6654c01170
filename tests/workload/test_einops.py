"""einops between operators: it has a recipe for each number of dimensions, and keeps what it makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from einops import pack, rearrange, repeat, unpack
from einops.layers.torch import Rearrange, Reduce
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload
from workload.shares import gradients_of, run_plain, run_shares

from .toy import WIDTH, Block, Items

CLASSES = 3


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Sequential(Rearrange("b (h p) (w q) -> b (h w) (p q)", p=2, q=2), nn.Linear(4, WIDTH))
        self.cls = nn.Parameter(torch.randn(WIDTH))
        self.first, self.second = Block(), Block()

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(self.cut(image))
        x, sizes = pack([repeat(self.cls, "d -> b d", b=len(x)), x], "b * d")
        cls, x = unpack(self.second(x), sizes, "b * d")
        return cls, x


class Classify(nn.Module):
    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(WIDTH, CLASSES)
        self.mean = Reduce("b n d -> b d", "mean")

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        cls, x = self.trunk(image)
        return functional.cross_entropy(self.head(cls + self.mean(x)), label)


class Restore(nn.Module):
    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(WIDTH, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.head(self.trunk(image)[1])
        made = rearrange(x, "b (h w) (p q) -> b (h p) (w q)", h=image.shape[1] // 2, p=2)
        return functional.mse_loss(made, image)


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_two_tasks_by_einops_train_as_in_plain_pytorch(dp: int) -> None:
    torch.manual_seed(0)
    trunk = Trunk()
    tasks = [
        Task("classify", Classify(trunk), 6, Items(image=(4, 6), label=((), CLASSES))),
        Task("restore", Restore(trunk), 6, Items(image=(4, 6))),
    ]
    graph = analysed(Workload("w", tasks, (Block,)))
    for task in tasks:
        traced, batch = graph.tasks[task.name], Batches(task, seed=1).rows(0, 0, 6)
        assert not any(op.coupled for op in traced.ops)
        parameters = dict(task.module.named_parameters())
        plain, shares = run_plain(task, batch), run_shares(traced, batch, dict.fromkeys(range(9), dp))
        torch.testing.assert_close(shares, plain)
        torch.testing.assert_close(gradients_of(shares, parameters), gradients_of(plain, parameters))
