"""Which operators must not be split over the batch, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx, nn

from spindle_cli.workload.splitting.independence import Independence
from spindle_cli.workload.tracing.shapes import Shapes
from spindle_cli.workload.types import FlowTask, Task, Workload

LISTED = "it is listed as coupled"
BATCH_NORM = "it normalises over the batch"
WHOLE = "it hands on a tensor without a batch dimension"
DEPENDENT = "what it gives for a sample depends on the batch's other samples (a missing batch_first=True?)"
NO_MEAN = "its loss is not the {reduction} of one loss per sample"
WHOLE_IN_SUM = "it adds a loss of the whole batch to a sum over samples"


@dataclass
class Trace:
    """A task's trace on its way to ops."""

    task: Task | FlowTask
    root: nn.Module
    graph: fx.Graph
    shapes: Shapes
    loss: fx.Node
    independence: Independence
    operators: list[fx.Node] = field(default_factory=list)  # in execution order; op k runs operators[k]


def why_coupled(trace: Trace, node: fx.Node, workload: Workload) -> str | None:
    """Why an operator must not be split over the batch; None if it may be."""
    module = trace.root.get_submodule(str(node.target))
    if isinstance(module, workload.coupled):
        return LISTED
    if has_batch_norm(module):
        return BATCH_NORM
    if node is not trace.operators[-1] and hands_on_whole(trace, node):
        return WHOLE
    return DEPENDENT if trace.independence.mixes(node, trace.root, trace.shapes) else None


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises over the samples of the batch (only while training)."""
    norm = nn.modules.batchnorm._BatchNorm
    return any(isinstance(part, norm) and part.training for part in module.modules())


def hands_on_whole(trace: Trace, node: fx.Node) -> bool:
    """Whether an operator hands on a tensor that is not one per sample."""
    tensors = [node] if trace.shapes.is_tensor(node) else [n for n in node.users if trace.shapes.is_tensor(n)]
    return any(trace.shapes.batch_dim(tensor).dim is None for tensor in tensors)
