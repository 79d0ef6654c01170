"""Which operators must not be split over the batch, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx, nn

from spindle_cli.analysis.own_draws import draws_random_numbers
from spindle_cli.analysis.rules.batch_norms import has_other_norms
from spindle_cli.analysis.rules.types import Mixed, Reduced, Whole
from spindle_cli.analysis.rules.views import DIFFERENT
from spindle_cli.analysis.splitting.independence import Independence
from spindle_cli.analysis.splitting.samples import Samples
from spindle_cli.analysis.tracing.shapes import Shapes
from spindle_cli.workload.types import FlowTask, Task, Workload

LISTED = "it is listed as coupled"
CONTRASTIVE = "it is named as contrastive"
BATCH_NORM = "it normalises over the batch"
WHOLE = "it hands on a tensor without a batch dimension"
DEPENDENT = "it is not known to act on samples one by one: {why}"
TRIED = "what it gives for a sample was seen to depend on the batch's other samples"
NO_MEAN = "its loss is not the {reduction} of one loss per sample"
MIXES_BEFORE = "{name!r}, which leads to it, mixes the samples of the batch{why}"
OUT_OF_ORDER = "the rows of a sample do not lie together in what it takes or hands on ({place})"
WHOLE_IN_SUM = "it adds a loss of the whole batch to a sum over samples"


@dataclass
class Trace:
    """A task's trace, with what is known of its nodes, before it is cut into ops."""

    task: Task | FlowTask
    root: nn.Module
    graph: fx.Graph
    shapes: Shapes
    loss: fx.Node
    independence: Independence
    samples: Samples
    operators: list[fx.Node] = field(default_factory=list)  # in execution order; op k runs operators[k]


def why_coupled(trace: Trace, node: fx.Node, workload: Workload) -> str | None:
    """Why an operator must not be split over the batch; None if it may be."""
    module = trace.root.get_submodule(str(node.target))
    if isinstance(module, workload.coupled):
        return LISTED
    if isinstance(module, workload.contrastive):
        return CONTRASTIVE
    if has_other_norms(module):
        return BATCH_NORM
    if node is not trace.operators[-1] and hands_on_whole(trace, node):
        return WHOLE
    return why_mixing(trace, node) or _why_no_loss(trace, node)


def why_mixing(trace: Trace, node: fx.Node) -> str | None:
    """Why a node may not be run for some samples of a batch alone; None if it may."""
    why = trace.samples.why_not(node)
    if why is not None:
        return DEPENDENT.format(why=why) + _batch_first(trace, node)
    if not all(trace.samples.is_cut_by_rows(one) for one in (node, *node.all_input_nodes)):
        return None  # rows that are tried must lie together
    return TRIED if trace.independence.mixes(node, trace.root, trace.shapes) else None


def puts_samples_together(trace: Trace, node: fx.Node) -> bool:
    """Whether a node compares or adds up entries of different samples: scores and labels in other orders."""
    why = trace.samples.why_not(node)
    return why is not None and why.why == DIFFERENT


def _batch_first(trace: Trace, node: fx.Node) -> str:
    """The usual cause, where a layer takes its samples along dimension 1."""
    if node.op != "call_module":
        return ""
    parts = trace.root.get_submodule(str(node.target)).modules()
    along_one = any(getattr(part, "batch_first", None) is False for part in parts)
    return " (a missing batch_first=True?)" if along_one else ""


def _why_no_loss(trace: Trace, node: fx.Node) -> str | None:
    """Why what an operator gives without a batch is not the loss of its samples that the task speaks of."""
    reduction = trace.task.reduction
    wrong = trace.samples.degrees(node) - {1 if reduction == "sum" else 0}
    return NO_MEAN.format(reduction=reduction) if wrong else None


def hands_on_whole(trace: Trace, node: fx.Node) -> bool:
    """Whether an operator hands on a tensor that is neither one per sample nor the same for every batch, or
    nothing that is one per sample.
    """
    tensors = [node] if trace.shapes.is_tensor(node) else [n for n in node.users if trace.shapes.is_tensor(n)]
    whole = [tensor for tensor in tensors if trace.shapes.batch_dim(tensor).dim is None]
    if not whole:
        return False
    return len(whole) == len(tensors) or not all(is_same_for_all(trace, tensor) for tensor in whole)


def is_same_for_all(trace: Trace, node: fx.Node) -> bool:
    """Whether a node gives tensors that neither a sample nor chance has a part in (a position bias): every
    share has the same.

    What an operator gives is taken as the same for every batch by whoever uses it (see `Samples`), so what
    the node comes from is asked too, back to the operators.
    """
    if not all(isinstance(state, Whole) for state in trace.samples.states(node)):
        return False
    seen, left = {node}, [node]
    while left:
        source = left.pop()
        if any(isinstance(state, Reduced | Mixed) for state in trace.samples.states(source)):
            return False
        if source not in trace.operators:
            if draws_random_numbers(source, trace.root):
                return False
            left += [earlier for earlier in source.all_input_nodes if earlier not in seen]
            seen.update(left)
    return True
