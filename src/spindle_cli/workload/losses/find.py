"""What a share of a task's loss computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from spindle_cli.workload.losses.counts import Counts
from spindle_cli.workload.losses.expressions import Expression
from spindle_cli.workload.losses.operations import ARITHMETIC
from spindle_cli.workload.losses.reduction import LossForms
from spindle_cli.workload.splitting.coupling import Trace


@dataclass(frozen=True)
class LossPart:
    """A share's part of a loss, and the counts that it needs."""

    part: Expression | Any
    counts: Counts


def find_part(
    trace: Trace, mixed: Collection[fx.Node], reordering: Collection[fx.Node], own_losses: Collection[fx.Node]
) -> LossPart:
    """The part of a loss that each share computes; see `LossForms` for the arguments.

    Raises:
        NotKnownError: the loss is not known to be what the task says, a sum or a mean.
    """
    return _find(trace, mixed, reordering, own_losses, is_whole=False)


def find_part_of_whole(trace: Trace, members: Collection[fx.Node]) -> LossPart:
    """The part that one of a step's batches has of a loss that is computed for the whole batch.

    Args:
        members: nodes of the op that computes it.
    """
    mixed: set[fx.Node] = set()
    for node in trace.graph.nodes:
        if node in members and _is_made_of_all(node, trace, mixed):
            mixed.add(node)
    return _find(trace, mixed, (), (), is_whole=True)


def _is_made_of_all(node: fx.Node, trace: Trace, mixed: Collection[fx.Node]) -> bool:
    """Whether a node's value is made of all samples of the batch."""
    shapes = trace.shapes
    if not shapes.is_tensor(node):
        return False
    inputs = node.all_input_nodes
    if any(source in mixed for source in inputs):
        return True
    tensors = [source for source in inputs if shapes.is_tensor(source)]
    if shapes.batch_dim(node).dim is None:
        return any(shapes.batch_dim(source).dim is not None for source in tensors)
    grows = any(
        not shapes.is_tensor(source)
        and not shapes.holds_tensors(source)
        and shapes.values[source] != shapes.doubled[source]
        for source in inputs
    )
    return grows and node.target in ARITHMETIC


def _find(
    trace: Trace,
    mixed: Collection[fx.Node],
    reordering: Collection[fx.Node],
    own_losses: Collection[fx.Node],
    *,
    is_whole: bool,
) -> LossPart:
    degree = 1 if trace.task.reduction == "sum" else 0
    counts = Counts(trace.shapes, trace.root, trace.operators)
    forms = LossForms(
        trace.shapes, trace.root, mixed, reordering, own_losses, degree, counts, is_whole=is_whole
    )
    return LossPart(forms.part(trace.loss, degree).expression, counts)
