"""Labels that an operator's own mean ignores end a run that splits it, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.analysed import analysed
from helpers.feeds import feed_of
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.step.counting import Portion
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

CPU = torch.device("cpu")


class Head(nn.Module):
    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.linear, self.ignored = nn.Linear(3, 4), ignore_index

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(self.linear(x), label, ignore_index=self.ignored)


class Model(nn.Module):
    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.head = Head(ignore_index)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.head(x, label)


def task(ignore_index: int = -100, labels: tuple[int, ...] = (1, -100, 2, 3)) -> Task:
    items = [{"x": torch.ones(3), "label": torch.tensor(label)} for label in labels]
    return Task("t", Model(ignore_index), 4, items)


def test_labels_of_an_operator_s_mean_are_looked_at_where_none_is_seen_to_be_ignored() -> None:
    (op,) = analysed(Workload("w", [task(labels=(1, 3, -100, 2))], operators=(Head,))).tasks["t"].ops
    assert op.target == "head" and not op.coupled
    assert op.shares is not None
    assert op.shares.all_must_count == ("label",)


@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_a_loss_inside_an_operator_is_split_as_one_in_forward(ignore_index: int) -> None:
    made = task(ignore_index, (1, ignore_index, 2, 3))
    graph = analysed(Workload("w", [made], operators=(Head,)))
    (op,) = graph.tasks["t"].ops
    assert (op.target, op.coupled, graph.tasks["t"].opened) == (None, False, ("head",))
    assert op.shares is not None
    assert (op.shares.all_must_count, op.shares.num_counts) == ((), 1)
    assert set(op.parameters) == {"head.linear.weight", "head.linear.bias"}
    batch = Batches(made, 0).rows(0, 0, 4)
    counter = LossCounter(graph.tasks["t"].root, op.shares)
    counts = sum(counter.count({"label": batch["label"][rows]}, 0.5) for rows in (slice(1), slice(1, 4)))
    parts = [
        graph.tasks["t"].share_module(op)(batch["x"][rows], batch["label"][rows], 0.5, *counts)
        for rows in (slice(1), slice(1, 4))
    ]
    torch.testing.assert_close(parts[0] + parts[1], made.module(**batch))


def test_an_operator_stays_whole_where_its_loss_could_not_be_split_in_forward_either() -> None:
    class Root(Head):
        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return super().forward(x, label).sqrt()

    made = task()
    made.module.head = Root(-100)
    graph = analysed(Workload("w", [made], operators=(Root,)))
    (op,) = graph.tasks["t"].ops
    assert (op.target, op.coupled, graph.tasks["t"].opened) == ("head", True, ())


def test_an_ignored_label_is_refused_where_all_must_count() -> None:
    portions = (Portion("t", (0, 4), ("x", "label")),)
    batches = {"t": Batches(task(), 0)}
    feed_of(batches, portions, range(1)).take()
    with pytest.raises(WorkloadError, match="'label' has labels of -100"):
        feed_of(batches, portions, range(1), all_must_count={"t": ("label",)}).take()
