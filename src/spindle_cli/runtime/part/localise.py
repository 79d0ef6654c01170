"""Localise: from the request to what this rank holds of the model, and the program that it runs on it.

Every rank analyses the same workload and derives the same program, but only the parameters of its own ops,
and of tasks that are evaluated where it is, ever take memory.

A plan may be written by hand: one that cuts a batch where ops need all of its samples is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from spindle_cli.account.types import ParameterGroup
from spindle_cli.analysis.evaluation import names_of_all, needs_of
from spindle_cli.analysis.localise import LocalWorkload, PartsOf, load_local, place_of_buffer
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.analysis.rules.batch_norms import changed_buffers, changes_buffers
from spindle_cli.check.run import require_planned
from spindle_cli.checkpoint.carry_over import settings_of_run
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest
from spindle_cli.files.sharding import ShardingOf
from spindle_cli.operators.tensor_parallel import PlanSplits, plan_splits
from spindle_cli.operators.whole import LayerCompiler
from spindle_cli.plan.types import Plan
from spindle_cli.program.evaluated import place_evaluated
from spindle_cli.program.link import Programs, link_sets
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Program, StepSettings
from spindle_cli.runtime.communication.wiring import WiredSlice, Wiring, wire
from spindle_cli.runtime.part.blocks import gathered_names, parameters_of_ops, sharding_of
from spindle_cli.runtime.part.local_ops import LocalOps, Place
from spindle_cli.runtime.part.own_ranges import own_parts
from spindle_cli.runtime.part.shards import Cuts, find_cuts
from spindle_cli.runtime.step.compute import LocalSlice
from spindle_cli.training.optimizing.groups import OptimizerGroups, groups_of_graph, require_elementwise
from spindle_cli.training.precision import in_dtype, number_format
from spindle_cli.training.sampling import Schedule, Turns, sets_of, turns_of
from spindle_cli.workload.building.load import resolve
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import Op, ParameterTable, TaskGraph, WorkloadGraph
from spindle_cli.workload.initial.types import OwnPart, OwnValues

# The parameter, the memory of a part of it, and [first, last) of each dimension; None: all of it.
InitialPart = tuple[str, torch.Tensor, tuple[tuple[int, int], ...] | None]


@dataclass(frozen=True)
class EvaluatedPart:
    """By what plan such a task runs, and how that splits its layers."""

    plan: Plan
    splits: PlanSplits


def evaluated_parts(plan: Plan, graph: WorkloadGraph) -> dict[str, EvaluatedPart]:
    """Where the tasks run that are only evaluated, by name. Parameters have to have their shapes.

    Raises:
        InputError: no device holds what one of their ops takes.
    """
    parts: dict[str, EvaluatedPart] = {}
    for task in graph.workload.evaluated:
        task_plan = place_evaluated(plan, needs_of(graph, task.name))
        where = f"the plan to evaluate {task.name!r} by"
        splits = plan_splits(task_plan, graph.only_evaluated(task.name), where, only_evaluated=True)
        parts[task.name] = EvaluatedPart(task_plan, splits)
    return parts


def initial_parts_of_evaluated(graph: WorkloadGraph, table: ParameterTable) -> dict[str, InitialPart]:
    """The parameters, as far as they are here, that only tasks use which are never trained."""
    parameters = names_of_all(graph).parameters.items()
    return {
        name: (name, parameter, None)
        for name, parameter in parameters
        if not (parameter.is_meta or table.users.get(name))
    }


@dataclass(frozen=True)
class StepPart:
    """What steps run that run the same tasks. `program`, `wiring`: of all ranks. `slices`: of this rank, by
    index in the program. `places`: of all of the program's slices, their indices in `plan.every_slice`.
    """

    tasks: tuple[str, ...]
    program: Program
    wiring: Wiring
    slices: dict[int, LocalSlice]
    places: Sequence[int]


@dataclass(frozen=True)
class LocalModel:
    """What one rank knows of the whole run, and what it holds of the model.

    Attributes:
        graph, train: the workload, traced, and how it is trained.
        program, wiring: of all ranks, for all tasks.
        schedule: which tasks run at which step.
        steps: what each set of tasks that occurs is run by.
        sums: the parameter groups of all of these programs together.
        slices: that this rank runs at any step, by index in `plan.every_slice`; those of `program` first.
        parameters: that this rank holds, by canonical name; of those that tensor parallelism splits the
            fragments, by the keys of files/tensors.py. `trained`: those of them that take a gradient.
        table: of the names of all parameters and buffers.
        cuts: into which parts all parameters of the workload are cut.
        ops: what the slices are built by. `dtype`: of everything floating-point; None: that of the workload.
        groups: which optimizer settings each trained parameter has.
        evaluated: where the tasks run that are only evaluated, by name.
        memo: what another process has found of the workload, if it was handed on.
    """

    graph: WorkloadGraph
    train: TrainSettings
    program: Program
    wiring: Wiring
    slices: dict[int, LocalSlice]
    parameters: dict[str, nn.Parameter]
    table: ParameterTable
    cuts: Cuts
    ops: LocalOps
    dtype: torch.dtype | None
    groups: OptimizerGroups
    evaluated: dict[str, EvaluatedPart]
    schedule: Schedule
    steps: tuple[StepPart, ...]
    sums: tuple[ParameterGroup, ...]
    memo: AnalysisMemo | None = None

    @property
    def shards(self) -> dict[str, OwnValues]:
        """What this rank has of those of `parameters` that are shared out, until buckets take it; they
        themselves have no memory.
        """
        return self.ops.shards

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """That this rank holds now and checkpoints have, by canonical name: those that a state_dict would
        hold, and of the others those that forward passes change, without which no run could go on.
        """
        return buffers_of(self.slices.values(), self.table, self._changed_buffers)

    @cached_property
    def _changed_buffers(self) -> frozenset[str]:
        return changed_buffers(self.graph, self.table)

    def with_shape(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """New memory of another shape in the place of a buffer, which forward had made larger or smaller."""
        buffer = self.buffers[name].new_empty(shape)
        for buffer_name, owner, attribute in _buffer_places(self.slices.values(), self.table):
            if buffer_name == name:
                owner._buffers[attribute] = buffer
        return buffer

    @property
    def all_buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer that this rank holds now."""
        return buffers_of(self.slices.values(), self.table, frozenset(self.table.buffers))

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank that take a gradient."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}


@dataclass(frozen=True)
class LoadedPart:
    """What a rank has loaded of the workload, on no device yet; and what follows from it, if that was needed
    to know what to load.
    """

    train: TrainSettings
    dtype: torch.dtype | None
    workload: LocalWorkload
    linked: Linked | None

    def forget(self) -> None:
        """Give up the parameters, in a process that only reads data."""
        for root in {id(task.root): task.root for task in self.workload.graph.tasks.values()}.values():
            for parameter in root.parameters():
                parameter.data = parameter.data.new_empty(0)


def load_rank(request: RunRequest, plan: Plan, rank: int) -> LoadedPart:
    """Build and analyse the workload, with the parameters of this rank's ops alone.

    Raises:
        InputError: the workload is not the one that the plan was made for.
        WorkloadError: it cannot be built or traced.
    """
    train = settings_of_run(resolve(request.workload).train, request.dtype)
    dtype = dtype_of(request, train)
    linked: list[Linked] = []

    def parts_of(graph: WorkloadGraph) -> dict[int, tuple[OwnPart, ...]]:
        if not any(level.is_fetched for level in plan.sharding.values()):
            return {}
        early = Linked.of(request, plan, graph, train)
        linked.append(early)
        whole = {name for name in early.groups.of if is_stepped_whole(name, train, early.groups)}
        return own_parts(early.programs.groups, early.table, early.cuts, rank, whole, dtype)

    workload = load_part(request, plan, rank, parts_of)
    return LoadedPart(train, dtype, workload, linked[-1] if linked else None)


def localise(
    request: RunRequest, plan: Plan, rank: int, device: torch.device, part: LoadedPart | None = None
) -> LocalModel:
    """Link and prove, then build what this rank needs, on its device. `part`: what was loaded; None: that is
    done here, and raises what `load_rank` raises.
    """
    part = part or load_rank(request, plan, rank)
    train, dtype, loaded = part.train, part.dtype, part.workload
    graph = loaded.graph
    programs_before = None if part.linked is None else part.linked.programs
    parts = Linked.of(request, plan, graph, train, programs_before)
    table, splits, cuts, programs = parts.table, parts.splits, parts.cuts, parts.programs
    turns = _turns(request, plan, graph, train)
    typed = graph if dtype is None else in_dtype(graph, dtype)
    wirings = [wire(typed, program) for program in programs.all]
    for wiring in wirings:
        require_whole_batches(wiring.slices, str(request.plan))
    evaluated = evaluated_parts(plan, graph)  # before parameters that are not this rank's lose their shapes
    place = Place(rank, device, dtype, LayerCompiler.of(train), train.loss_chunks)
    ops = LocalOps(table, cuts, splits, _own_slices(plan, wirings, rank), place, loaded.part_values)
    slices = ops.slices()
    names = {cut.key(index): cut.name for cut in cuts.by_name.values() for index in range(cut.count)}
    ops.shards.update(
        loaded.initial.fill_own({key: (names[key], shard) for key, shard in ops.shards.items()})
    )
    loaded.initial.fill(
        {**initial_parts(ops.leaves, cuts, ops.shards), **initial_parts_of_evaluated(graph, table)}
    )
    return LocalModel(
        graph=graph,
        train=train,
        program=programs.whole,
        wiring=wirings[0],
        slices=slices,
        parameters=ops.leaves,
        table=table,
        cuts=cuts,
        ops=ops,
        dtype=dtype,
        groups=parts.groups,
        evaluated=evaluated,
        schedule=Schedule(turns, train.accumulate, request.islands, request.island),
        steps=_step_parts(plan, turns, programs, wirings, slices),
        sums=programs.groups,
        memo=None if request.memo is None else AnalysisMemo.read(request.memo),
    )


@dataclass(frozen=True)
class Linked:
    """What follows from a plan and a workload, whether its parameters are there or not."""

    table: ParameterTable
    splits: PlanSplits
    cuts: Cuts
    groups: OptimizerGroups
    programs: Programs

    @classmethod
    def of(
        cls,
        request: RunRequest,
        plan: Plan,
        graph: WorkloadGraph,
        train: TrainSettings,
        programs: Programs | None = None,
    ) -> Linked:
        """`programs`: those of another build of the workload, which are the same."""
        table = ParameterTable.of(graph)
        splits = plan_splits(plan, graph, str(request.plan))
        groups = groups_of_graph(train, graph)
        require_elementwise(groups, splits.split_parameters(plan, graph, table))
        if programs is None:
            shared_out = sharding_of(plan, graph, table, groups)
            programs = _proven_programs(plan, graph, table, splits, train, shared_out)
        return cls(table, splits, find_cuts(plan, graph, table, splits), groups, programs)


def is_stepped_whole(key: str, train: TrainSettings, groups: OptimizerGroups) -> bool:
    """Whether every rank that holds a trained parameter, or this part of it, keeps its optimizer state."""
    return not (train.shard_optimizer and groups.treats_elements_alone(key))


def _turns(request: RunRequest, plan: Plan, graph: WorkloadGraph, train: TrainSettings) -> Turns:
    """Which tasks run at which step; raises InputError where the plan has nothing for some."""
    turns = turns_of(train, graph.workload.tasks)
    require_planned(plan, sets_of(turns), str(request.plan))
    return turns


def _proven_programs(
    plan: Plan,
    graph: WorkloadGraph,
    table: ParameterTable,
    splits: PlanSplits,
    train: TrainSettings,
    shared_out: ShardingOf,
) -> Programs:
    settings = StepSettings(
        sharded=train.shards_optimizer_state,
        clips=train.clip_norm is not None,
        scales=train.scaling is not None,
        by_parts=plan.updates_by_parts and train.updates_by_parts,
    )
    gathered = gathered_names(plan, graph, table, train.accumulate)
    uses = parameters_of_ops(graph, table, splits.split_names(plan), shared_out, gathered)
    programs = link_sets(plan, uses, settings)
    for program in programs.all:
        prove(program)
    return programs


def _own_slices(plan: Plan, wirings: Sequence[Wiring], rank: int) -> list[WiredSlice]:
    """The slices that a rank runs in any program, each once, by index in `plan.every_slice`."""
    slices: dict[int, WiredSlice] = {}
    for member, wiring in enumerate(wirings):
        for wired, place in zip(wiring.slices, _places(plan, member), strict=True):
            if rank in wired.layout.share_of:
                slices.setdefault(place, replace(wired, index=place))
    return [slices[place] for place in sorted(slices)]


def _places(plan: Plan, member: int) -> Sequence[int]:
    """Where the slices of one of its programs are in `plan.every_slice`."""
    return range(len(plan.slices)) if plan.joint is None else plan.joint.members[member]


def _step_parts(
    plan: Plan,
    turns: Turns,
    programs: Programs,
    wirings: Sequence[Wiring],
    slices: Mapping[int, LocalSlice],
) -> tuple[StepPart, ...]:
    """Make a part of the step for each set of tasks that occurs; that of all tasks without a plan of its own
    is run by the whole.
    """
    members = {tasks: number + 1 for number, tasks in enumerate(programs.of_sets)}
    parts = []
    for task_set in sets_of(turns):
        member = members.get(task_set.tasks, 0)
        places = _places(plan, member)
        local_slices = {
            wired.index: replace(slices[place], wired=wired)
            for wired, place in zip(wirings[member].slices, places, strict=True)
            if place in slices
        }
        parts.append(StepPart(task_set.tasks, programs.all[member], wirings[member], local_slices, places))
    return tuple(parts)


def initial_parts(
    leaves: Mapping[str, nn.Parameter], cuts: Cuts, shared_out: Collection[str]
) -> dict[str, InitialPart]:
    """What initial values go into, by leaf; of those that are shared out there is nothing to fill."""
    parts: dict[str, InitialPart] = {}
    for cut in cuts.by_name.values():
        for index in range(cut.count):
            leaf = leaves.get(cut.key(index))
            if leaf is None or cut.key(index) in shared_out:
                continue
            ranges = None if cut.count == 1 else cut.ranges(index, leaf.shape)
            parts[cut.key(index)] = cut.name, leaf, ranges
    return parts


def dtype_of(request: RunRequest, train: TrainSettings) -> torch.dtype | None:
    """What everything floating-point is converted to; None: nothing is."""
    return number_format(train) if request.dtype is None else getattr(torch, request.dtype)


def buffers_of(
    slices: Collection[LocalSlice], table: ParameterTable, others: Collection[str]
) -> dict[str, torch.Tensor]:
    """Buffers of these slices that a state_dict would hold, and those of `others` that it would not, by
    canonical name, as the modules hold them on the device now.
    """
    buffers: dict[str, torch.Tensor] = {}
    for name, owner, attribute in _buffer_places(slices, table):
        buffer = owner._buffers[attribute]
        if buffer is not None and (attribute not in owner._non_persistent_buffers_set or name in others):
            buffers[name] = buffer
    return buffers


def _buffer_places(
    slices: Collection[LocalSlice], table: ParameterTable
) -> Iterator[tuple[str, nn.Module, str]]:
    """The places of the buffers of these slices: the canonical name, the module that holds the buffer, and
    its name there.
    """
    for local in slices:
        for op, module in zip(local.wired.ops, local.modules, strict=True):
            canonical = table.of_op(local.wired.task.task.name, op.buffers)
            for name, dotted in zip(canonical, op.buffers, strict=True):
                yield name, *place_of_buffer(module, local.wired.task.root, dotted)


def load_part(request: RunRequest, plan: Plan, rank: int, parts_of: PartsOf) -> LocalWorkload:
    """The workload, analysed, with the parameters of this rank's ops; `parts_of`: of which it keeps parts."""

    def choose(graph: WorkloadGraph) -> dict[str, set[int]]:
        require_same_workload(plan, graph, request)
        wanted = ops_of_rank(plan, graph, rank)
        for name, part in evaluated_parts(plan, graph).items():
            wanted.update(ops_of_rank(part.plan, graph.only_evaluated(name), rank))
        return wanted

    memo = None if request.memo is None else AnalysisMemo.read(request.memo)
    # A run that goes on has all values in its checkpoint.
    reads_initial = not request.resume
    lengths = plan.workload.lengths
    return load_local(
        request.workload,
        choose,
        memo=memo,
        lengths=lengths,
        evaluates=True,
        reads_initial=reads_initial,
        parts_of=parts_of,
    )


def require_same_workload(plan: Plan, graph: WorkloadGraph, request: RunRequest) -> None:
    """Refuse a workload whose MetaGraph differs from the one that the plan was made for.

    Raises:
        InputError: naming both fingerprints.
    """
    if graph.fingerprint != plan.workload.fingerprint:
        raise InputError(
            f"{request.workload}: the workload's fingerprint is {graph.fingerprint}, "
            f"but the plan {request.plan} was made for {plan.workload.fingerprint}",
            hint="The workload has changed since it was profiled: profile and plan again.",
        )


def ops_of_rank(plan: Plan, graph: WorkloadGraph, rank: int) -> dict[str, set[int]]:
    """Task name -> indices of the ops that a rank runs."""
    ops: dict[str, set[int]] = {}
    for slice_ in plan.every_slice:
        if rank in slice_.devices:
            metaop = graph.by_name[slice_.metaop]
            ops.setdefault(metaop.task, set()).update(metaop.ops[slice_.ops[0] : slice_.ops[1]])
    return ops


def require_whole_batches(slices: Iterable[WiredSlice], where: str) -> None:
    """Refuse slices that are given a part of a batch of which one of their ops needs all.

    Args:
        slices: of all ranks.
        where: the plan's file.

    Raises:
        InputError: naming the slice, and why it needs its batch.
    """
    for wired in slices:
        cuts = wired.layout.micro_batch[1]
        for op in wired.ops if wired.layout.is_shared else ():
            why = _why_whole(wired.task, op, is_in_micro_batches=cuts > 1)
            if why is not None:
                part = f"1/{cuts} of its batch" if cuts > 1 else f"a batch in {wired.layout.dp} shares"
                name = op.target or "its loss"
                raise InputError(
                    f"{where}: slice {wired.slice.label} is given {part}, and {name} {why}",
                    hint="Plan again from a profile of this workload, which says what may be cut.",
                )


def _why_whole(task: TaskGraph, op: Op, *, is_in_micro_batches: bool) -> str | None:
    """Why an op needs all samples at once; None if it does not."""
    if op.coupled:
        return "computes what depends on all of its samples"
    if is_in_micro_batches and op.talks:
        return "sums or gathers something over all of its samples"
    if is_in_micro_batches and changes_buffers(task, op):
        return "changes buffers with every batch"
    return None
