"""What losses count: known one step ahead, summed over ranks and batches; nothing counted is a loss of 0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.analysed import analysed
from helpers.feeds import feed_of
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.analysis.losses.expressions import over_count
from spindle_cli.runtime.step.counting import CountedShare, Counting, Portion
from spindle_cli.runtime.step.data import Feed
from spindle_cli.runtime.step.losses import LossAccumulator
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

CPU = torch.device("cpu")
LABELS = [0, -100, 1, -100, -100, -100, 2, 1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(self.linear(x), label)


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parts(batches_per_step: int) -> tuple[LossAccumulator, Feed, list[int]]:
    """Of a rank with two shares of batches of 4, samples 1 and 2 to 3; and what it counts of each of the
    first batches.
    """
    items = [{"x": torch.ones(3), "label": torch.tensor(label)} for label in LABELS * 3]
    task = Task("t", Model(), 4, items)
    graph = analysed(Workload("w", [task])).tasks["t"]
    shares = graph.ops[-1].shares
    assert shares is not None
    accumulator = LossAccumulator([task], CPU, batches_per_step, {"t": shares})
    counter = LossCounter(graph.root, shares)
    rows = accumulator.layout.rows["t"]
    counting = Counting(
        [CountedShare("t", samples, 0.25, counter, rows) for samples in ((1, 2), (2, 4))], accumulator.layout
    )
    portions = (Portion("t", (1, 2), ("label",)), Portion("t", (2, 4), ("label",)))
    batches = Batches(task, 0)
    feed = feed_of({"t": batches}, portions, range(3), batches_per_step=batches_per_step, counting=counting)
    counted = [
        sum(int(items[index]["label"]) != -100 for index in batches.indices(number)[1:])
        for number in range(6)
    ]
    return accumulator, feed, counted


@pytest.mark.parametrize("batches_per_step", [1, 2])
def test_a_step_has_the_counts_of_its_own_batches(alone: None, batches_per_step: int) -> None:
    accumulator, feed, counted = parts(batches_per_step)
    accumulator.begin(feed.counts(0))
    for step in range(3):
        first = step * batches_per_step
        share, count = accumulator.arguments("t", (1, 3))
        assert share == 0.5 / batches_per_step
        assert count == sum(counted[first : first + batches_per_step])
        for _ in range(batches_per_step):
            feed.take()
        accumulator.count_next(feed.counts(step + 1))
        accumulator.start_sum()
        accumulator.take()
    feed.close()


def test_the_first_step_has_the_counts_of_all_ranks(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator, feed, _ = parts(1)
    # As of three ranks that count alike.
    monkeypatch.setattr(dist, "all_reduce", lambda sums, **_: sums.mul_(3))
    accumulator.begin(torch.tensor([2.0], dtype=torch.float64))
    assert accumulator.arguments("t", (1, 3))[1] == 6
    feed.close()


def test_what_counts_nothing_in_the_next_step_is_named(alone: None) -> None:
    accumulator, feed, _ = parts(1)
    assert accumulator.begin(torch.zeros(1)) == ("t",)
    accumulator.count_next(torch.ones(1))
    accumulator.start_sum()
    assert accumulator.read(accumulator.take()).uncounted_next == ()
    accumulator.start_sum()
    assert accumulator.read(accumulator.take()).uncounted_next == ("t",)
    feed.close()


def test_over_nothing_a_mean_is_zero_and_has_no_gradient() -> None:
    value = torch.tensor([2.0, 3.0], requires_grad=True)
    assert torch.equal(over_count(value, torch.tensor(4.0, dtype=torch.float64)), torch.tensor([0.5, 0.75]))
    over = over_count(value, torch.tensor(0.0, dtype=torch.float64))
    over.sum().backward()
    assert torch.equal(over, torch.zeros(2))
    assert torch.equal(value.grad, torch.zeros(2))
