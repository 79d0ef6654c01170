"""Build a workload with only some of its parameters real, and those with exactly the values that a full build
gives.

The workload is built twice. The first build is abstract and tells which parameters, by order of birth, the
wanted ops use. In the second, all others go to the meta device as they are born; where their initialisation
draws random numbers, as many are drawn and thrown away, so that the generator is at the same place for the
wanted ones. Where only ranges of some are wanted, these are whole one at a time (building/ranged.py).

A graph that was traced on one build is bound to the other, without tracing again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.evaluation import evaluated_on_its_own
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.analysis.metaops.cut import names_used
from spindle_cli.analysis.tracing.behaviour import REGION, NoTwinError, Twins
from spindle_cli.analysis.tracing.modes import give_modes
from spindle_cli.analysis.tracing.regions import Region
from spindle_cli.workload.building.load import Births, LoadedWorkload, Source, build, read_initial, resolve
from spindle_cli.workload.building.memory import drop
from spindle_cli.workload.building.partial import NotInPartError, build_abstract, build_kept
from spindle_cli.workload.graph import CONSTANT, TaskGraph, WorkloadGraph, root_of
from spindle_cli.workload.initial.types import OwnPart, OwnValues
from spindle_cli.workload.settings.types import Lengths
from spindle_cli.workload.types import FlowTask, Task, Workload


@dataclass(frozen=True)
class LocalWorkload(LoadedWorkload):
    """A workload of which only some parameters are real, and its graph.

    `part_values`: by id, the values of the wanted parts of parameters that are not wanted whole; those
    parameters are on the meta device.
    """

    graph: WorkloadGraph
    part_values: Mapping[int, Sequence[OwnValues]]


Wanted = Mapping[str, Collection[int]]  # task name -> indices of its ops
# Given the workload's graph, by id, of which of its parameters only parts are wanted.
PartsOf = Callable[[WorkloadGraph], Mapping[int, tuple[OwnPart, ...]]]


def _all_whole(_: WorkloadGraph) -> Mapping[int, tuple[OwnPart, ...]]:
    return {}


def load_local(
    source: str,
    wanted: Wanted | Callable[[WorkloadGraph], Wanted],
    *,
    relative_to: Path | None = None,
    memo: AnalysisMemo | None = None,
    lengths: Lengths | None = None,
    unused: bool = False,
    evaluates: bool = False,
    reads_initial: bool = True,
    parts_of: PartsOf = _all_whole,
) -> LocalWorkload:
    """What `load` gives, bit for bit, but only with the parameters that the wanted ops use; the others are on
    the meta device. Parameters whose values are in files (`initial`) still have those of the build, so that
    whoever needs only a part of one reads only that.

    Args:
        source: a workload YAML file, 'package.module:function' or 'path/to/file.py:function'.
        wanted: task name -> indices of its ops; or what says so when it is given the workload's graph.
        relative_to: folder that relative paths start from; the current one if None.
        memo, lengths, evaluates: see `analyse`.
        unused: the parameters that no op uses are real, too, with their values from files.
        reads_initial: otherwise files of initial values need not be there, and all values are the build's;
            but what tasks have that are only evaluated is in no checkpoint, so that these need them always.
        parts_of: the parameters of the wanted ops of which only parts are wanted.

    A build that needs the values of parameters that are not wanted is done in full, and then what is not
    wanted is dropped.

    Raises:
        InputError, WorkloadError: as `load` and `analyse` do.
    """
    resolved = resolve(source, relative_to=relative_to)
    try:
        find_graph = partial(analyse, memo=memo, lengths=lengths, evaluates=evaluates)
        graph, part_values = _build_in_part(resolved, wanted, find_graph, parts_of, unused=unused)
    except NotInPartError:
        graph = analyse(build(resolved), memo, lengths, evaluates=evaluates)
        _keep_only(graph, wanted, unused=unused)
        part_values = _taken_apart(graph, parts_of(graph))
    filled = _unused(graph) if unused else {}
    initial = read_initial(
        resolved,
        graph.workload,
        where=lambda tensor: not isinstance(tensor, nn.Parameter) or id(tensor) in filled,
        needed=reads_initial,
    )
    return LocalWorkload(graph.workload, resolved.train, source, graph, part_values, initial=initial)


def in_the_abstract(
    source: Source, find_graph: Callable[[Workload], WorkloadGraph]
) -> tuple[Births, WorkloadGraph]:
    """How a workload's parameters came to be, of which none is real, and the graph of that build."""
    births, workload = build_abstract(source)
    return births, find_graph(workload)


def _build_in_part(
    source: Source,
    wanted: Wanted | Callable[[WorkloadGraph], Wanted],
    find_graph: Callable[[Workload], WorkloadGraph],
    parts_of: PartsOf,
    *,
    unused: bool,
) -> tuple[WorkloadGraph, dict[int, Sequence[OwnValues]]]:
    first, graph = in_the_abstract(source, find_graph)
    real = _real_parameters(graph, wanted, unused=unused)
    if any(key not in first.numbers for key in real):
        raise NotInPartError  # came to be in a way that we do not see
    kept = {first.numbers[key] for key in real}
    parts = {first.numbers[key]: own_parts for key, own_parts in parts_of(graph).items()}
    second, workload = build_kept(source, first, kept, parts)
    bound = rebind(graph, workload) or find_graph(workload)
    there = {id(parameter) for root in _roots(bound) for parameter in root.parameters()}
    if any(id(second.parameters[number]) not in there for number in parts):
        raise NotInPartError  # others have taken their places
    part_values: dict[int, Sequence[OwnValues]] = {}
    for number, own_parts in parts.items():
        parameter = second.parameters[number]
        values = second.ranged.values_of(parameter)
        part_values[id(parameter)] = values or _taken_from(parameter, own_parts)
    return bound, part_values


def _taken_apart(
    graph: WorkloadGraph, parts: Mapping[int, tuple[OwnPart, ...]]
) -> dict[int, Sequence[OwnValues]]:
    """Take the wanted parts out of whole parameters, whose memory is given back."""
    by_id = {id(parameter): parameter for root in _roots(graph) for parameter in root.parameters()}
    return {key: _taken_from(by_id[key], own_parts) for key, own_parts in parts.items()}


def _taken_from(parameter: nn.Parameter, parts: Sequence[OwnPart]) -> tuple[OwnValues, ...]:
    values = tuple(OwnValues(part, part.of(parameter.detach()), None) for part in parts)
    drop([parameter])
    return values


def _used(
    graph: WorkloadGraph, wanted: Wanted | Callable[[WorkloadGraph], Wanted]
) -> dict[int, nn.Parameter]:
    """Parameters that the wanted ops use, by id."""
    chosen = wanted(graph) if callable(wanted) else wanted
    return {
        id(parameter): parameter
        for task, indices in chosen.items()
        for index in indices
        for parameter in _parameters(graph.tasks.get(task) or graph.evaluations[task], index)
    }


def _real_parameters(
    graph: WorkloadGraph, wanted: Wanted | Callable[[WorkloadGraph], Wanted], *, unused: bool
) -> dict[int, nn.Parameter]:
    """Parameters that the wanted ops use and, where `unused` says so, those that no op uses; by id."""
    return _used(graph, wanted) | (_unused(graph) if unused else {})


def _unused(graph: WorkloadGraph) -> dict[int, nn.Parameter]:
    """Parameters that no op uses, by id."""
    used = _used(graph, {name: range(len(task.ops)) for name, task in graph.tasks.items()})
    return {
        id(parameter): parameter
        for root in _roots(graph)
        for parameter in root.parameters()
        if id(parameter) not in used
    }


def _roots(graph: WorkloadGraph) -> list[nn.Module]:
    """The modules of all tasks, those that are only evaluated among them."""
    return [*(task.root for task in graph.tasks.values()), *map(root_of, graph.workload.evaluated)]


def _parameters(task: TaskGraph, index: int) -> list[nn.Parameter]:
    return [task.root.get_parameter(name) for name in task.ops[index].parameters]


def _keep_only(
    graph: WorkloadGraph, wanted: Wanted | Callable[[WorkloadGraph], Wanted], *, unused: bool
) -> None:
    real = _real_parameters(graph, wanted, unused=unused)
    for root in _roots(graph):
        drop(parameter for parameter in root.parameters() if id(parameter) not in real)


def rebind(graph: WorkloadGraph, workload: Workload) -> WorkloadGraph | None:
    """What `analyse(workload)` gives, where `graph` is of the same workload built another time.

    None where the builds differ: a name that an op uses is not there, or stands for something else. (A graph
    names what it uses, and holds none of it.)
    """
    if [task.name for task in workload.tasks] != list(graph.tasks):
        return None
    tasks = {task.name: _rebound(graph.tasks[task.name], task) for task in workload.tasks}
    given = {task.name: task for task in (*workload.tasks, *map(evaluated_on_its_own, workload.evaluated))}
    if not graph.evaluations.keys() <= given.keys():
        return None
    evaluations = {name: _rebound(task_graph, given[name]) for name, task_graph in graph.evaluations.items()}
    rebound = {name: task for name, task in tasks.items() if task is not None}
    evaluated = {name: task for name, task in evaluations.items() if task is not None}
    if len(rebound) + len(evaluated) < len(tasks) + len(evaluations):
        return None
    for task in rebound.values():
        give_modes(task.root, task.modes)
    return replace(graph, workload=workload, tasks=rebound, evaluations=evaluated)


def _rebound(task_graph: TaskGraph, task: Task | FlowTask) -> TaskGraph | None:
    if type(task_graph.task) is not type(task):
        return None
    root = root_of(task)
    try:
        _hand_on(task_graph, root)
    except NoTwinError:
        return None
    return replace(task_graph, task=task, root=root) if _has_what_is_used(root, task_graph) else None


def _hand_on(task_graph: TaskGraph, root: nn.Module) -> None:
    """Let a root hold what the trace has left on the other build's: tensors that forward has made of numbers,
    and regions, over the modules of its own.

    Raises:
        NoTwinError: a region uses something of which nothing is known in this build.
    """
    left = {
        name: getattr(task_graph.root, name)
        for op in task_graph.ops
        for graph in op.graphs
        for node in graph.nodes
        if node.op in ("get_attr", "call_module")
        and (name := str(node.target)).startswith((CONSTANT, REGION))
    }
    twins = Twins(task_graph.root, root) if left else None
    for name, value in left.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise NoTwinError
        vars(root)[name] = value.over(twins) if isinstance(value, Region) and twins else value


def _has_what_is_used(root: nn.Module, task_graph: TaskGraph) -> bool:
    try:
        return all(names_used(root, op.graph) == (op.computed_with, op.buffers) for op in task_graph.ops)
    except AttributeError:  # torch's for a name that is not there
        return False


def place_of_buffer(module: nn.Module, root: nn.Module, dotted: str) -> tuple[nn.Module, str]:
    """Which module of an op's holds a buffer of its task's root, and by which name."""
    owner, _, name = dotted.rpartition(".")
    if dotted not in dict(module.named_buffers(remove_duplicate=False)):
        for region in module.modules():
            place = region.place_of(root.get_submodule(owner), name) if isinstance(region, Region) else None
            if place is not None:
                return place
    return module.get_submodule(owner), name
