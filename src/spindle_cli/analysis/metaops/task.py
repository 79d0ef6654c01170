"""One task's ops and values: its forward traced, and cut.

Operators with losses that can be split with the task's own are traced into.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from spindle_cli.analysis.fixed import SEEN, ReadsValuesError, with_fixed
from spindle_cli.analysis.metaops.finding import Finder
from spindle_cli.analysis.metaops.ops import make_ops
from spindle_cli.analysis.pairs.find import NAMED
from spindle_cli.analysis.splitting.coupling import CONTRASTIVE
from spindle_cli.analysis.tracing.flow import flow_graph
from spindle_cli.analysis.tracing.regions import Regions, UnfitError
from spindle_cli.analysis.tracing.trace import trace_task
from spindle_cli.errors import WorkloadError
from spindle_cli.training.data.reading import FEW, at_shapes, first_samples
from spindle_cli.workload.arguments import arguments_of
from spindle_cli.workload.graph import IGNORED_LABEL, Op, TaskGraph
from spindle_cli.workload.refuse import sparse_gradient
from spindle_cli.workload.types import FlowTask, Task, Workload


def analyse_task(
    task: Task | FlowTask,
    workload: Workload,
    finder: Finder,
    *,
    keeps_results: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    like: TaskGraph | None = None,
) -> TaskGraph:
    """Trace one task and cut it into ops.

    Args:
        finder: of how layers behave.
        keeps_results: also of what forward returns beside the loss.
        shapes: of one sample of fields that are to have others than the first samples.
        like: the task at another length, or as it is trained, by which is decided which operators are opened,
            and which parameters and buffers ops have at hand.

    Raises:
        WorkloadError: it cannot be traced or run as it is written.
    """
    _check_not_lazy(task)
    _check_dense(task)
    samples = at_shapes(first_samples(task, FEW), shapes or {})
    arguments = arguments_of(task)
    left_out = () if arguments is None else arguments.left_out
    finder.observer.samples.pop(task.name, None)
    regions = Regions(task.module if isinstance(task, Task) else None)
    first: ReadsValuesError | None = None
    while True:
        try:
            graph = _analyse_with(
                task, samples, workload, finder, regions, keeps_results=keeps_results, like=like
            )
            return replace(graph, left_out_of_items=left_out)
        except ReadsValuesError as error:
            first = first or error
            read = error.fields - set(shapes or {})
            fixed = with_fixed(samples, read, partial(first_samples, task, SEEN))
            if fixed is not None:
                samples = fixed
            elif task.name not in finder.observer.samples:
                # What cannot do without values runs whole from now on.
                finder.observer.samples[task.name] = partial(_more_samples, task, samples)
            elif not regions.extended(error):
                raise (first if isinstance(error, UnfitError) and not error.tells else error) from None


def _analyse_with(
    task: Task | FlowTask,
    samples: Mapping[str, Tensor],
    workload: Workload,
    finder: Finder,
    regions: Regions,
    *,
    keeps_results: bool,
    like: TaskGraph | None,
) -> TaskGraph:
    def made_of(root: nn.Module, graph: fx.Graph) -> TaskGraph:
        return make_ops(
            task, root, graph, samples, workload, finder, keeps_results=keeps_results, trained=like
        )

    if isinstance(task, FlowTask):
        flows = flow_graph(task, tuple(samples))
        return made_of(flows.root, flows.graph)

    def traced_into(names: tuple[str, ...]) -> TaskGraph:
        traced = trace_task(task, workload, samples, finder.observer, names, regions)
        made = made_of(task.module, traced.graph)
        return replace(made, opened=names, decided=traced.decided, moves=traced.moves, modes=traced.modes)

    if like is not None:
        return traced_into(like.opened)
    made = traced_into(())
    reasons: list[str] = []
    for names in better_opened(made, samples):
        try:
            opened = traced_into(names)
        except WorkloadError as error:
            reasons.append(str(error).split("\n", 1)[0])
            continue
        loss = opened.ops[-1]
        if not loss.coupled and not opened.loss_shares.all_must_count:
            return opened
        reasons.append(finder.pairs.why_not(opened, loss) or str(loss.coupled_because))
    return said_why(made, reasons[0]) if reasons else made


def _more_samples(task: Task | FlowTask, samples: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """More of a task's samples than those that it is traced with, in the same shapes."""
    try:
        seen = first_samples(task, SEEN)
    except WorkloadError:  # samples of several lengths, which make no batch
        return samples
    return at_shapes(seen, {name: tuple(value.shape[1:]) for name, value in samples.items()})


def _modules(task: Task | FlowTask) -> list[nn.Module]:
    return [task.module] if isinstance(task, Task) else [flow.consumer for flow in task.flows]


def _check_dense(task: Task | FlowTask) -> None:
    """Refuse embeddings whose gradients have some rows alone, and parameters and buffers that are sparse."""
    for module in _modules(task):
        for name, part in module.named_modules():
            is_embedding = isinstance(part, nn.Embedding | nn.EmbeddingBag)
            if is_embedding and part.sparse and part.weight.requires_grad:
                raise sparse_gradient(task.name, f"{name}.weight" if name else "weight")
        held = (*module.named_parameters(), *module.named_buffers())
        for name, tensor in held:
            if tensor.layout is not torch.strided:
                raise WorkloadError(
                    f"task {task.name!r}: {name!r} is of layout {tensor.layout}, which devices could "
                    "not send each other and checkpoints not keep",
                    hint="Keep what it is made of in buffers, and make it in forward: "
                    "torch.sparse_coo_tensor(self.indices, self.values, size).",
                )


def _check_not_lazy(task: Task | FlowTask) -> None:
    """Refuse modules whose parameters take their shapes from the first batch."""
    modules = _modules(task)
    lazy = [name for module in modules for name, part in module.named_parameters() if is_lazy(part)]
    if lazy:
        raise WorkloadError(
            f"task {task.name!r}: the parameter {lazy[0]!r} has no shape yet",
            hint="Give the layer its input size, or run its forward once where it is built.",
        )


def better_opened(task: TaskGraph, samples: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Operators that may better be traced into, most of them first: what is in them is then part of the
    task's forward.

    They are the last one, where it gives a loss that is not split or a mean that leaves labels of the
    `samples` out; and those before it that give losses of the whole batch to the last op (contrastive ones,
    in CoCa).
    """
    inside = () if task.loss_inside is None else (task.loss_inside,)
    last = inside if inside and _is_last_better_opened(task, samples) else ()
    terms = [op.target for op in task.ops[:-1] if op.target is not None and _gives_terms(task, op)]
    choices = [tuple(dict.fromkeys([*terms, *more])) for more in (last, inside)] if terms else []
    return [names for names in dict.fromkeys([*choices, last]) if names]


def said_why(task: TaskGraph, why: str) -> TaskGraph:
    """A task whose contrastive operators could not be traced into, with the reason where they are named."""
    because = NAMED.format(why=why)
    ops = (
        replace(op, coupled_because=because) if op.coupled_because == CONTRASTIVE else op for op in task.ops
    )
    return replace(task, ops=tuple(ops))


def _is_last_better_opened(task: TaskGraph, samples: Mapping[str, Tensor]) -> bool:
    first = max(op.index for op in task.ops if op.target == task.loss_inside)
    if any(op.coupled for op in task.ops[first:]):
        return any(op.coupled_because is not None for op in task.ops[first:])
    trusted = task.loss_shares.all_must_count
    return any(bool((samples[name] == IGNORED_LABEL).any()) for name in trusted)


def _gives_terms(task: TaskGraph, op: Op) -> bool:
    """Whether an operator runs whole, and gives single numbers that the loss alone is made of."""
    if not op.coupled or op.coupled_because is None or not op.outputs:
        return False
    if any(task.values[name].shape != () for name in op.outputs):
        return False
    given = set(op.outputs)
    return all(user.is_loss for user in task.ops if given & set(user.inputs))
