"""From a workload to its MetaGraph: trace, cut into ops, contract, name; and which repeated blocks a model
holds several equal ones of.

The fingerprint says which workload a profile and a plan were made for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from spindle_cli.analysis.after_update import described, find_constraints, find_following, hold_followed
from spindle_cli.analysis.evaluation import trace_evaluations
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.analysis.metaops.contract import Run, component_path, find_runs, short_names
from spindle_cli.analysis.metaops.finding import Finder
from spindle_cli.analysis.metaops.sharing import SharedBlocks, find_sharing
from spindle_cli.analysis.metaops.task import analyse_task
from spindle_cli.analysis.outside import heard
from spindle_cli.analysis.splitting.shared_state import refuse_left_for_others, refuse_shared_state
from spindle_cli.analysis.tracing.behaviour import Kinds
from spindle_cli.analysis.tracing.regions import Region
from spindle_cli.analysis.tracing.trace import PART_HINT
from spindle_cli.errors import WorkloadError
from spindle_cli.files.artifact import sha256_of
from spindle_cli.training.data.reading import varying_dims
from spindle_cli.workload.building.attributes import values_kept
from spindle_cli.workload.building.contents import GoesOneWayError
from spindle_cli.workload.graph import MetaOp, Op, TaskGraph, ValueSpec, WorkloadGraph, root_of
from spindle_cli.workload.introspection import OF_MODULES, Reads
from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.settings.types import Lengths, TaskLengths
from spindle_cli.workload.step_values import StepValues
from spindle_cli.workload.types import FlowTask, Task, Workload


def analyse(
    workload: Workload,
    memo: AnalysisMemo | None = None,
    lengths: Lengths | None = None,
    *,
    evaluates: bool = False,
) -> WorkloadGraph:
    """Trace every task that is trained and contract it into MetaOps. Nothing is computed, and parameters may
    be on the meta device.

    Args:
        memo: what another process of the same run has found of this workload, which saves time.
        lengths: of batches whose shapes differ, which to trace with; other batches have the shapes of the
            first samples.
        evaluates: all that has an `eval_dataset` is traced as it is evaluated, too.

    Raises:
        WorkloadError: a task cannot be traced or run as it is written; with the place in the user's code and
            what to do.
    """
    with StepValues.of(workload).decisions_refused():
        return _Analyst(memo).analyse(workload, lengths or {}, evaluates=evaluates)


def analyse_for_others(
    workload: Workload,
    memo: AnalysisMemo | None = None,
    lengths: Lengths | None = None,
    *,
    evaluates: bool = False,
) -> tuple[WorkloadGraph, AnalysisMemo]:
    """What `analyse` gives, and what others need not find again: `memo` and more. Raises what `analyse`
    raises.
    """
    analyst = _Analyst(memo)
    with StepValues.of(workload).decisions_refused():
        graph = analyst.analyse(workload, lengths or {}, evaluates=evaluates)
    training_memo = analyst.training.to_memo()
    return graph, training_memo.with_more(analyst.evaluation.to_memo()) if evaluates else training_memo


class _Analyst:
    """`training` and `evaluation` find out how layers behave in either mode."""

    def __init__(self, memo: AnalysisMemo | None) -> None:
        self._memo = memo
        self.training = Finder(memo)

    @cached_property
    def evaluation(self) -> Finder:
        """Made where it is asked for: most workloads are trained alone."""
        return Finder(self._memo)

    def _task(self, task: Task | FlowTask, workload: Workload, lengths: TaskLengths | None) -> TaskGraph:
        shapes = None if lengths is None else lengths.planned
        _refuse_hidden(task)
        try:
            made = analyse_task(task, workload, self.training, shapes=shapes)
        except GoesOneWayError as error:
            raise refusal(task.name, error.message, _reads(task).place_of(error.key), error.hint) from error
        return replace(made, varying=varying_dims(lengths))

    def analyse(self, workload: Workload, lengths: Lengths, *, evaluates: bool) -> WorkloadGraph:
        with values_kept(root_of(task) for task in workload.all_tasks), heard():
            return self._analyse(workload, lengths, evaluates=evaluates)

    def _analyse(self, workload: Workload, lengths: Lengths, *, evaluates: bool) -> WorkloadGraph:
        tasks = {task.name: self._task(task, workload, lengths.get(task.name)) for task in workload.tasks}
        _check_operators_occur(workload, tasks)
        following = find_following(workload, tasks)
        constraints = find_constraints(workload, tasks)
        tasks = hold_followed(tasks, following)
        metaops = _make_metaops(tasks, self.training.observer.kinds)
        graph = WorkloadGraph(
            workload,
            tasks,
            metaops,
            fingerprint(tasks, metaops, described(following, constraints)),
            lengths=dict(lengths),
            following=following,
            constraints=constraints,
        )
        refuse_shared_state(tasks)
        refuse_left_for_others(tasks, self.training.observer.attributes.left_between)
        if not evaluates:
            return graph
        # What training counts is not known in an evaluation either.
        counted = self.training.observer.attributes.counted
        self.evaluation.observer.attributes.counted.extend(counted)
        evaluations = trace_evaluations(graph, self.evaluation)
        only = {task.name: evaluations[task.name] for task in workload.evaluated}
        return replace(
            graph,
            evaluations=evaluations,
            evaluated_metaops=_make_metaops(only, self.evaluation.observer.kinds),
        )


def _reads(task: Task | FlowTask) -> Reads:
    """What a task's forward, and the modules in it, may read."""
    reads = Reads()
    for module in root_of(task).modules():
        reads.of_module(module)
    reads.finish()
    return reads


def _refuse_hidden(task: Task | FlowTask) -> None:
    """Refuse modules that forward uses and that are no parts of the task's to torch: in a list, a dict, or an
    attribute that was set past nn.Module.

    Raises:
        WorkloadError: there is one with parameters or buffers of its own.
    """
    root = root_of(task)
    registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    hidden = [
        (module, key, part)
        for module in root.modules()
        for key, value in vars(module).items()
        if key not in OF_MODULES and isinstance(value, nn.Module | list | tuple | dict)
        for part in pytree.tree_leaves(value)
        if isinstance(part, nn.Module)
        and not registered.issuperset(id(tensor) for tensor in (*part.parameters(), *part.buffers()))
    ]
    reads = _reads(task) if hidden else None
    for module, key, part in hidden:
        if reads is not None and key in reads.names:
            raise refusal(
                task.name,
                f"{type(module).__name__} keeps a {type(part).__name__} in self.{key}, "
                "where torch does not see it: its parameters are neither trained nor saved",
                reads.place_of(key),
                PART_HINT,
            )


def _check_operators_occur(workload: Workload, tasks: dict[str, TaskGraph]) -> None:
    """Refuse an operator class that no task ever runs as an op."""
    run = list(_modules_run(tasks))
    opened = [task.root.get_submodule(name) for task in tasks.values() for name in task.opened]
    only_evaluated = [module for task in workload.evaluated for module in root_of(task).modules()]
    for cls in workload.operator_classes:
        if not any(isinstance(module, cls) for module in (*run, *opened, *only_evaluated)):
            raise WorkloadError(
                f"workload {workload.name!r}: the operator class {cls.__name__} never occurs: "
                f"{_why_never_run(cls, run, tasks)}",
                hint=f"The modules that do: {_held_classes(tasks)}.",
            )


def _modules_run(tasks: Mapping[str, TaskGraph]) -> Iterator[nn.Module]:
    """The layers of all ops, and the modules in the regions that their graphs call."""
    for task in tasks.values():
        for op in task.ops:
            if op.target is not None:
                yield task.root.get_submodule(op.target)
            for node in op.graph.find_nodes(op="call_module"):
                module = task.root.get_submodule(str(node.target))
                if isinstance(module, Region):
                    yield from module.modules()


def _why_never_run(cls: type, run: Sequence[nn.Module], tasks: Mapping[str, TaskGraph]) -> str:
    """Say where modules of an operator class are that no op runs."""
    for outer in run:
        if any(isinstance(part, cls) for part in outer.modules()):
            return f"it occurs only inside {type(outer).__name__}, which is run as one operator itself"
    if any(isinstance(part, cls) for task in tasks.values() for part in task.root.modules()):
        return "the tasks hold such a module, but no task's loss depends on a call of it"
    return "no task holds a module of this class"


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
        positions = [position for position, (owner, _) in enumerate(runs) if owner is task]
        metaops += _task_metaops(task, [(runs[p][1], paths[p], sharing[p]) for p in positions])
    return tuple(metaops)


def _task_metaops(task: TaskGraph, runs: Sequence[tuple[Run, str, SharedBlocks]]) -> list[MetaOp]:
    """The MetaOps of a task; `runs`: its runs of ops, with their component paths and what they share."""
    names = [f"{task.task.name}/{short}" for short in short_names([path for _, path, _ in runs])]
    holder = {op: name for (run, _, _), name in zip(runs, names, strict=True) for op in run.ops}
    metaops: list[MetaOp] = []
    for (run, path, shared), name in zip(runs, names, strict=True):
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


def fingerprint(
    tasks: dict[str, TaskGraph], metaops: tuple[MetaOp, ...], declared: Sequence[object] = ()
) -> str:
    """'sha256:...' of the MetaGraph, the ops' structure, every shape, who shares parameters with whom, and
    what else is done to them (`after_update.described`).

    It does not depend on parameter values, on the dataset's contents, or on how the workload is trained.
    """
    data: dict[str, Any] = {
        "metaops": [_metaop(metaop) for metaop in metaops],
        "tasks": {name: _task(task) for name, task in tasks.items()},
    }
    if declared:
        data["declared"] = list(declared)
    return sha256_of(data)


def _metaop(metaop: MetaOp) -> dict[str, Any]:
    return {
        "name": metaop.name,
        "task": metaop.task,
        "ops": list(metaop.ops),
        "inputs": list(metaop.inputs),
        "inputs_of_every_op": list(metaop.inputs_of_every_op),
        "parameters": metaop.parameters,
        "parameter_blocks": None if metaop.parameter_blocks is None else list(metaop.parameter_blocks),
        "coupled": metaop.coupled,
    }


def _task(task: TaskGraph) -> dict[str, Any]:
    return {
        "batch_size": task.task.batch_size,
        "weight": float(task.task.weight),
        "reduction": task.task.reduction,
        "fields": [_value(value) for value in task.fields.values()],
        "values": [_value(value) for value in task.values.values()],
        "ops": [_op(task, op) for op in task.ops],
    }


def _op(task: TaskGraph, op: Op) -> dict[str, Any]:
    parameters = [task.root.get_parameter(name) for name in op.parameters]
    return {
        "kind": op.kind,
        "target": op.target,
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
        "parameters": [
            [name, list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
            for name, parameter in zip(op.parameters, parameters, strict=True)
        ],
    }


def _value(value: ValueSpec) -> list[Any]:
    return [value.name, list(value.shape), str(value.dtype), value.batch_dim, value.requires_grad]


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_modules(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """With their dotted names behind `name`, the modules of the outermost classes of which some list of
    modules in a model holds two equal ones or more.

    Equal: of the same class, with parameters of the same names and shapes. Only modules that hold others
    count: a layer of a transformer does, its linear maps do not. In a chain of stages of other widths the
    stages' layers are found, not the stages.
    """
    yield from _outermost(model, _repeated_classes(model), name)


def unlisted_layers(graph: WorkloadGraph) -> Iterator[str]:
    """A line for each task that is one op as no class that it holds is an operator, although it has repeated
    blocks: which class to list.
    """
    for name, made in graph.tasks.items():
        # What a FlowTask calls is an operator, whatever is listed.
        if isinstance(made.task, Task) and not _holds_operators(made, graph):
            distinct = {id(module): module for _, module in repeated_modules(made.root, name)}
            counts = Counter(type(module) for module in distinct.values())
            for cls, count in counts.most_common(1):
                yield (
                    f"{name}: all of it is one op, which no plan can take apart, as `operators` lists no "
                    f"class that it holds: list {cls.__name__}, of which it has {count}"
                )


def shape_of(module: nn.Module) -> tuple[object, ...]:
    """What equal modules share: their class, and the names and shapes of their parameters."""
    parameters = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), parameters


def _holds_operators(made: TaskGraph, graph: WorkloadGraph) -> bool:
    return any(isinstance(module, graph.workload.operator_classes) for module in made.root.modules())


def _repeated_classes(model: nn.Module) -> set[type[nn.Module]]:
    classes: set[type[nn.Module]] = set()
    for container in model.modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList):
            continue
        counts = Counter(shape_of(child) for child in container if _has_parts(child))
        classes |= {type(child) for child in container if counts[shape_of(child)] > 1}
    return classes


def _has_parts(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and any(True for _ in module.children())


def _outermost(
    module: nn.Module, classes: set[type[nn.Module]], name: str
) -> Iterator[tuple[str, nn.Module]]:
    if type(module) in classes:
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, classes, f"{name}.{child_name}")
