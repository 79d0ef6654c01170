"""Losses that are means over what counts, in plain PyTorch: over all of a step's batches together.

Which losses these are, the workload's analysis says (`Op.shares`); what the mean is, plain PyTorch shows: the
user's module is called on the step's batches joined into one. Only where that would be another model, as
samples of a batch depend on each other, or where it would be no number, as nothing counts, the task's ops are
run one after the other, each on its whole batch, and the loss as the analysis has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, fx

from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.at_lengths import LengthTracer, module_over
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.training.precision import in_numbers
from spindle_cli.verify.stepping.arithmetic import Arithmetic
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.workload.graph import Op, TaskGraph
from spindle_cli.workload.settings.types import Lengths
from spindle_cli.workload.types import Workload

Batch = Mapping[str, Tensor]


def counted_losses(
    workload: Workload,
    source: str = "",
    memo: AnalysisMemo | None = None,
    lengths: Lengths | None = None,
    arithmetic: Arithmetic | None = None,
) -> dict[str, CountedLoss]:
    """Return the losses that are means over what counts, by task.

    Args:
        source: of the workload, which is built again where batches have several lengths.
        memo, lengths: see `analyse`.
        arithmetic: that the losses are computed in; None: as the workload is.
    """
    graph = analyse(workload, memo, lengths)
    tracer = None
    if lengths:
        tracer = LengthTracer(load_abstract(source, reads_initial=False).workload, graph, memo)
    return {
        name: CountedLoss(task, tracer if task.varying else None, arithmetic)
        for name, task in graph.tasks.items()
        if (shares := task.ops[-1].shares) is not None and shares.num_counts > 0
    }


class CountedLoss:
    """The loss of one task, whose loss counts something."""

    def __init__(
        self,
        graph: TaskGraph,
        tracer: LengthTracer | None = None,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        """`tracer`: where batches have several lengths. `arithmetic`: of the constants at these."""
        self._graph = graph
        self._arithmetic = arithmetic or Arithmetic(torch.device("cpu"))
        self._tracer = tracer
        self._by_length: dict[tuple[tuple[str, tuple[int, ...]], ...], _AtLength] = {}
        self._is_coupled = any(op.coupled or op.talks for op in graph.ops)

    def fit(self, batches: Sequence[Batch]) -> None:
        """Trace the task at the lengths of these batches; before constants are made in other numbers."""
        for batch in batches:
            self._at(batch)

    def parts(
        self, batches: Sequence[Batch], call: Callable[[Batch], Tensor]
    ) -> Sequence[Callable[[], Tensor]]:
        """Return the loss of a step's batches together, as the sum of what each of these gives. Each is to go
        backward before the next is called: an operator's forward may change what it computes with.

        Args:
            batches: each task's fields.
            call: gives the loss of one batch by the user's own module.
        """
        share = 1 / len(batches)
        counted = [self._at(batch).counter.count(_on_cpu(batch), share) for batch in batches]
        counts = torch.stack(counted).sum(0)
        shapes = {tuple((name, field.shape[1:]) for name, field in batch.items()) for batch in batches}
        # Joined, a forward that moves parameters would do so once for several.
        is_each_by_itself = self._is_coupled or bool(self._graph.moves)
        if bool((counts == 0).any()) or (is_each_by_itself and len(batches) > 1) or len(shapes) > 1:
            return [partial(self._by_ops, batch, share, counts) for batch in batches]
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        return [partial(call, joined)]

    def _by_ops(self, batch: Batch, share: float, counts: Tensor) -> Tensor:
        """Return what one of the batches adds to the loss."""
        at = self._at(batch)
        self._graph.move_as_forward()
        values: dict[str, Tensor] = {}
        for op in at.graph.ops:
            arguments = [*(batch[name] for name in op.fields), *(values[name] for name in op.inputs)]
            if op.is_loss:
                counted = counts.to(arguments[0].device)
                loss: Tensor = at.module(op)(*arguments, share, *counted.unbind())
                return loss
            values.update(zip(op.outputs, at.module(op)(*arguments), strict=True))
        raise AssertionError("the last op gives the loss")

    def _at(self, batch: Batch) -> _AtLength:
        """Return the task at the length of a batch."""
        key = tuple((name, tuple(batch[name].shape[1:])) for name in self._graph.varying)
        if key not in self._by_length:
            graph, constants = self._graph, dict[str, Tensor]()
            if self._tracer is not None:
                traced = self._tracer.at(graph.task.name, dict(key))
                device, dtype = self._arithmetic.device, self._arithmetic.dtype
                dtype = dtype if dtype is torch.float64 else None  # else it makes them in float32
                graph = traced.over(graph)
                constants = {
                    name: in_numbers(value, device, dtype) for name, value in traced.constants.items()
                }
            self._by_length[key] = _AtLength(graph, constants)
        return self._by_length[key]


class _AtLength:
    """A task's ops for batches of one length; `constants`: see `TaskAtLength`."""

    def __init__(self, graph: TaskGraph, constants: Mapping[str, Tensor]) -> None:
        shares = graph.ops[-1].shares
        assert shares is not None and shares.counts is not None, "its loss counts nothing"
        self.graph = graph
        self.counter = LossCounter(module_over(shares.counts, constants, graph.root), shares)
        self._constants = constants

    def module(self, op: Op) -> fx.GraphModule:
        """Return an op as `share_module` gives it."""
        graph = op.graph if op.shares is None else op.shares.graph
        return module_over(graph, self._constants, self.graph.root)


def _on_cpu(batch: Batch) -> dict[str, Tensor]:
    return {name: field.cpu() for name, field in batch.items()}
