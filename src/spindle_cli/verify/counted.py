"""Losses that are means over what counts, in plain PyTorch: over all of a step's batches together.

Which losses these are, the workload's analysis says (`Op.shares`); what the mean is, plain PyTorch shows: the
user's module is called on the step's batches joined into one. Only where that would be another model, as
samples of a batch depend on each other, or where it would be no number, as nothing counts, the task's ops are
run one after the other, each on its whole batch, and the loss as the analysis has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.losses.shares import LossCounter
from spindle_cli.workload.memo import AnalysisMemo
from spindle_cli.workload.metaops.ops import share_module
from spindle_cli.workload.types import Workload

Batch = Mapping[str, Tensor]


def counted_losses(workload: Workload, memo: AnalysisMemo | None = None) -> dict[str, CountedLoss]:
    """By task, the losses that are means over what counts. `memo`: see `analyse`."""
    return {
        name: CountedLoss(graph)
        for name, graph in analyse(workload, memo).tasks.items()
        if (shares := graph.ops[-1].shares) is not None and shares.num_counts > 0
    }


class CountedLoss:
    """The loss of one task, whose loss counts something."""

    def __init__(self, graph: TaskGraph) -> None:
        shares = graph.ops[-1].shares
        assert shares is not None and shares.num_counts > 0, "its loss counts nothing"
        self._graph = graph
        self._counter = LossCounter(graph.root, shares)
        self._is_coupled = any(op.coupled or op.talks for op in graph.ops)

    def of(self, batches: Sequence[Batch], call: Callable[[Batch], Tensor]) -> Tensor:
        """The loss of a step's batches together.

        Args:
            batches: each task's fields.
            call: gives the loss of one batch by the user's own module.
        """
        share = 1 / len(batches)
        counts = torch.stack([self._counter.count(_on_cpu(batch), share) for batch in batches]).sum(0)
        if bool((counts == 0).any()) or (self._is_coupled and len(batches) > 1):
            return sum((self._by_ops(batch, share, counts) for batch in batches), torch.zeros(()))
        return call({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})

    def _by_ops(self, batch: Batch, share: float, counts: Tensor) -> Tensor:
        """What one of the batches adds to the loss."""
        values: dict[str, Tensor] = {}
        for op in self._graph.ops:
            arguments = [*(batch[name] for name in op.fields), *(values[name] for name in op.inputs)]
            if op.is_loss:
                counted = counts.to(arguments[0].device)
                loss: Tensor = share_module(self._graph, op)(*arguments, share, *counted.unbind())
                return loss
            values.update(zip(op.outputs, share_module(self._graph, op)(*arguments), strict=True))
        raise AssertionError("the last op gives the loss")


def _on_cpu(batch: Batch) -> dict[str, Tensor]:
    return {name: field.cpu() for name, field in batch.items()}
