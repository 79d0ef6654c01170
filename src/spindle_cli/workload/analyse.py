"""From a workload to its MetaGraph: trace, cut into ops, contract, name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.data.reading import first_samples
from spindle_cli.workload.fingerprint import fingerprint
from spindle_cli.workload.graph import IGNORED_LABEL, MetaOp, TaskGraph, WorkloadGraph
from spindle_cli.workload.memo import AnalysisMemo
from spindle_cli.workload.metaops.contract import Run, find_runs
from spindle_cli.workload.metaops.naming import component_path, short_names
from spindle_cli.workload.metaops.ops import make_ops
from spindle_cli.workload.metaops.sharing import SharedBlocks, find_sharing
from spindle_cli.workload.splitting.independence import Independence
from spindle_cli.workload.tracing.flow import flow_graph
from spindle_cli.workload.tracing.kind import Kinds
from spindle_cli.workload.tracing.observe import Observer
from spindle_cli.workload.tracing.trace import trace_task
from spindle_cli.workload.types import FlowTask, Task, Workload

_SAMPLES = 2  # enough to see that items fit together


def analyse(workload: Workload, memo: AnalysisMemo | None = None) -> WorkloadGraph:
    """Trace every task and contract it into MetaOps. Nothing is computed, and parameters may be on the meta
    device.

    Args:
        memo: what another process of the same run has found of this workload, which saves time.

    Raises:
        WorkloadError: a task cannot be traced or run as it is written; with the place in the user's code and
            what to do.
    """
    observer = Observer(memo)
    return _analyse(workload, observer, Independence(observer))


def analyse_for_others(
    workload: Workload, memo: AnalysisMemo | None = None
) -> tuple[WorkloadGraph, AnalysisMemo]:
    """What `analyse` gives, and what others need not find again: `memo` and more. Raises what `analyse`
    raises.
    """
    observer = Observer(memo)
    independence = Independence(observer)
    graph = _analyse(workload, observer, independence)
    found = AnalysisMemo(
        torch_version=torch.__version__,
        observed=observer.observed(),
        findings=independence.verdicts.findings(),
        mixes=independence.tried(),
    )
    return graph, found if observer.memo is None else observer.memo.with_more(found)


def _analyse(workload: Workload, observer: Observer, independence: Independence) -> WorkloadGraph:
    tasks = {task.name: analyse_task(task, workload, observer, independence) for task in workload.tasks}
    _check_operators_occur(workload, tasks)
    metaops = _make_metaops(tasks, observer.kinds)
    return WorkloadGraph(workload, tasks, metaops, fingerprint(tasks, metaops))


def analyse_task(
    task: Task | FlowTask,
    workload: Workload,
    observer: Observer,
    independence: Independence,
    *,
    keeps_results: bool = False,
) -> TaskGraph:
    """One task's ops and values; `keeps_results`: also of what forward returns beside the loss.

    Raises:
        WorkloadError: it cannot be traced or run as it is written.
    """
    _check_not_lazy(task)
    samples = first_samples(task, _SAMPLES)

    def made_of(root: nn.Module, graph: fx.Graph) -> TaskGraph:
        return make_ops(
            task, root, graph, samples, workload, observer, independence, keeps_results=keeps_results
        )

    if isinstance(task, FlowTask):
        flows = flow_graph(task, tuple(samples))
        return made_of(flows.root, flows.graph)
    traced = trace_task(task, workload, samples, observer)
    made = replace(made_of(task.module, traced.graph), decided=traced.decided)
    if not _is_better_opened(made, samples):
        return made
    try:
        traced = trace_task(task, workload, samples, observer, made.loss_inside)
        opened = made_of(task.module, traced.graph)
    except WorkloadError:
        return made
    if opened.ops[-1].coupled or opened.loss_shares.all_must_count:
        return made
    return replace(opened, opened=made.loss_inside, decided=traced.decided)


def _is_better_opened(task: TaskGraph, samples: Mapping[str, Tensor]) -> bool:
    """Whether an operator gives a loss that is not split, or a mean that leaves labels of the samples out:
    traced into, its loss is treated as one in the task's forward.
    """
    if task.loss_inside is None:
        return False
    last = task.ops[-1]
    if last.coupled:
        return last.coupled_because is not None
    trusted = task.loss_shares.all_must_count
    return any(bool((samples[name] == IGNORED_LABEL).any()) for name in trusted)


def _check_not_lazy(task: Task | FlowTask) -> None:
    """Refuse modules whose parameters take their shapes from the first batch."""
    modules = [task.module] if isinstance(task, Task) else [flow.consumer for flow in task.flows]
    lazy = [name for module in modules for name, part in module.named_parameters() if is_lazy(part)]
    if lazy:
        raise WorkloadError(
            f"task {task.name!r}: the parameter {lazy[0]!r} has no shape yet",
            hint="Give the layer its input size, or run its forward once where it is built.",
        )


def _check_operators_occur(workload: Workload, tasks: dict[str, TaskGraph]) -> None:
    """Refuse an operator class that no task ever runs as an op."""
    used = [
        task.root.get_submodule(op.target)
        for task in tasks.values()
        for op in task.ops
        if op.target is not None
    ]
    opened = [task.root.get_submodule(task.opened) for task in tasks.values() if task.opened is not None]
    for cls in workload.operator_classes:
        if any(isinstance(module, cls) for module in (*used, *opened)):
            continue
        inside = next(
            (outer for outer in used if any(isinstance(part, cls) for part in outer.modules())), None
        )
        if inside is not None:
            what = f"it occurs only inside {type(inside).__name__}, which is run as one operator itself"
        elif any(isinstance(part, cls) for task in tasks.values() for part in task.root.modules()):
            what = "the tasks hold such a module, but no task's loss depends on a call of it"
        else:
            what = "no task holds a module of this class"
        raise WorkloadError(
            f"workload {workload.name!r}: the operator class {cls.__name__} never occurs: {what}",
            hint=f"The modules that do: {_held_classes(tasks)}.",
        )


def _held_classes(tasks: dict[str, TaskGraph]) -> str:
    held: dict[str, None] = {}
    for task in tasks.values():
        for module in task.root.modules():
            if not isinstance(module, nn.ModuleList | nn.ModuleDict) and module is not task.root:
                held[type(module).__name__] = None
    names = list(held)
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def _make_metaops(tasks: dict[str, TaskGraph], kinds: Kinds) -> tuple[MetaOp, ...]:
    runs = [(task, run) for task in tasks.values() for run in find_runs(task, kinds)]
    paths = [component_path([task.ops[op].target for op in run.ops]) for task, run in runs]
    sharing = find_sharing([(task, run.ops, path) for (task, run), path in zip(runs, paths, strict=True)])
    metaops: list[MetaOp] = []
    for task in tasks.values():
        own = [position for position, (owner, _) in enumerate(runs) if owner is task]
        names = [f"{task.task.name}/{short}" for short in short_names([paths[position] for position in own])]
        metaops += _task_metaops(
            task, [runs[p][1] for p in own], names, [paths[p] for p in own], [sharing[p] for p in own]
        )
    return tuple(metaops)


def _task_metaops(
    task: TaskGraph,
    runs: Sequence[Run],
    names: Sequence[str],
    paths: Sequence[str],
    sharing: Sequence[SharedBlocks],
) -> list[MetaOp]:
    holder = {op: name for run, name in zip(runs, names, strict=True) for op in run.ops}
    metaops: list[MetaOp] = []
    for run, name, path, shared in zip(runs, names, paths, sharing, strict=True):
        first = task.ops[run.ops[0]]
        inputs = dict.fromkeys(holder[task.producer[value]] for value in first.inputs)
        every = dict.fromkeys(holder[task.producer[value]] for value in run.common)
        metaops.append(
            MetaOp(
                name=name,
                task=task.task.name,
                ops=run.ops,
                inputs=tuple(inputs),
                inputs_of_every_op=tuple(every),
                parameters=shared.key,
                parameter_blocks=shared.blocks,
                component=path,
                coupled=first.coupled,
            )
        )
    return metaops
