"""What an evaluation runs: the forward passes of one task alone, and where, if the task is only evaluated.

Its ops then go to the devices that hold what they take of trained tasks. The plan knows nothing of such a
task. From where the plan has put the trained ones follows a plan of its own, the same on every rank: of
forward passes alone, in which no parameter moves.

What the passes of a program post is what the whole program posts of them, in the same order: the order that
all devices share stays one when all leave out the same. Nothing is made that a device does not post, as a
pass that makes a message is left in with it. So the reasons why the whole cannot hang
(docs/design/program.md) hold for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from spindle_cli.costs.shares import largest_samples, times_of
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan, PlanMetaOp, Slice, Wave
from spindle_cli.profile.types import CurvePoint
from spindle_cli.program.types import Action, Kind, Program


class NeededOp(Protocol):
    """An op of the task; `tensors`: that ops of trained tasks use too."""

    @property
    def metaop(self) -> str: ...
    @property
    def position(self) -> int: ...
    @property
    def inputs(self) -> tuple[int, ...]: ...
    @property
    def tensors(self) -> frozenset[str]: ...
    @property
    def is_whole(self) -> bool: ...


class NeededMetaOp(Protocol):
    """A MetaOp of the task."""

    @property
    def name(self) -> str: ...
    @property
    def num_ops(self) -> int: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def inputs_of_every_op(self) -> tuple[str, ...]: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def inner_output_bytes(self) -> int: ...


class Needs(Protocol):
    """What a task needs; `held`: the tensors of each op of the plan, by MetaOp and position in it."""

    @property
    def task(self) -> str: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def metaops(self) -> Sequence[NeededMetaOp]: ...
    @property
    def ops(self) -> Sequence[NeededOp]: ...
    @property
    def held(self) -> Mapping[tuple[str, int], frozenset[str]]: ...


@dataclass(frozen=True)
class _Home:
    """Devices, and how many of them hold a share together; `forward_s`: that an op takes there for one sample
    of a share, where that is known.
    """

    devices: tuple[int, ...]
    tp: int = 1
    forward_s: float | None = None

    def whole(self) -> _Home:
        """For an op that nothing splits: one device of each share."""
        return _Home(self.devices[:: self.tp])


def place_evaluated(plan: Plan, needs: Needs) -> Plan:
    """The plan of a task that is only evaluated, for `forward_only`; its times are in the order of its
    slices and mean nothing else.

    Raises:
        InputError: no device holds all that one of its ops takes.
    """
    homes = _homes(plan, needs)
    slices: list[Slice] = []
    metaops = [_metaop(metaop, needs) for metaop in needs.metaops]
    curves: dict[str, dict[int, CurvePoint]] = {metaop.name: {} for metaop in metaops}
    for first, last in _runs(needs.ops, homes):
        op, home = needs.ops[first], homes[first]
        groups = len(home.devices) // home.tp
        dp = 1 if op.is_whole else max(n for n in range(1, groups + 1) if needs.batch_size % n == 0)
        slices.append(
            Slice(
                metaop=op.metaop,
                ops=(op.position, op.position + last - first),
                devices=home.devices[: dp * home.tp],
                dp=dp,
                tp=home.tp,
                start_s=len(slices),
                end_s=len(slices) + 1,
            )
        )
        point = CurvePoint(
            num_devices=dp * home.tp,
            dp=dp,
            tp=home.tp,
            forward_s=(home.forward_s or 0.0) * needs.batch_size / dp,
            backward_s=0.0,
            source="estimated",
        )
        curves[op.metaop].setdefault(point.num_devices, point)
    waves = [
        Wave(index=index, start_s=slice_.start_s, end_s=slice_.end_s, slices=(slice_,))
        for index, slice_ in enumerate(slices)
    ]
    kept = {name: getattr(plan, name) for name in plan.model_fields_set}
    timed = [metaop.model_copy(update={"curve": tuple(curves[metaop.name].values())}) for metaop in metaops]
    replaced = {
        "metaops": tuple(timed),
        "waves": tuple(waves),
        "task_sets": (),
        "micro_batches": {},
        "sharding": {},
        "shard_weights": (),
    }
    return Plan(**{**kept, **replaced, "schema_": "spindle.plan/1"})


def _metaop(needed: NeededMetaOp, needs: Needs) -> PlanMetaOp:
    return PlanMetaOp(
        name=needed.name,
        task=needs.task,
        num_ops=needed.num_ops,
        batch_size=needs.batch_size,
        inputs=needed.inputs,
        inputs_of_every_op=needed.inputs_of_every_op,
        output_bytes=needed.output_bytes,
        inner_output_bytes=needed.inner_output_bytes,
    )


def _runs(ops: Sequence[NeededOp], homes: Sequence[_Home]) -> Iterable[tuple[int, int]]:
    """[first, last) of consecutive ops of one MetaOp that have one home."""
    first = 0
    for index in range(1, len(ops) + 1):
        ends = index == len(ops) or (
            ops[index].metaop != ops[first].metaop
            or ops[index].position != ops[index - 1].position + 1
            or homes[index] != homes[first]
        )
        if ends:
            yield first, index
            first = index


def _homes(plan: Plan, needs: Needs) -> list[_Home]:
    homes: dict[int, _Home] = {}
    for index, op in enumerate(needs.ops):
        before = next((homes[producer] for producer in op.inputs if producer in homes), None)
        if op.tensors:
            homes[index] = _home_of(plan, needs, op, before)
        elif before is not None:
            homes[index] = before.whole()
    everywhere = _Home(tuple(range(plan.cluster.num_devices)))
    for index in reversed(range(len(needs.ops))):  # what takes nothing goes where it is taken
        if index not in homes:
            takers = (consumer for consumer, op in enumerate(needs.ops) if index in op.inputs)
            homes[index] = next((homes[consumer].whole() for consumer in takers), everywhere)
    return [homes[index] for index in range(len(needs.ops))]


def _home_of(plan: Plan, needs: Needs, op: NeededOp, before: _Home | None) -> _Home:
    """Where a trained op has all that this one takes, at best where its input is; else the devices that have
    it of several ops.
    """
    homes = [
        _Home(slice_.devices, slice_.tp, _sample_s(plan, slice_))
        for slice_ in plan.slices
        for position in range(*slice_.ops)
        if op.tensors <= needs.held[slice_.metaop, position]
    ]
    if homes:
        return max(homes, key=lambda home: _merit(home, before))
    having = [
        {
            device
            for slice_ in plan.slices
            if slice_.tp == 1
            and any(name in needs.held[slice_.metaop, position] for position in range(*slice_.ops))
            for device in slice_.devices
        }
        for name in op.tensors
    ]
    devices = set[int].intersection(*having)
    if not devices:
        raise InputError(
            f"task {needs.task!r}, which is only evaluated: no device has all that op {op.position} of "
            f"{op.metaop} takes of trained tasks: {', '.join(sorted(op.tensors)[:4])}",
            hint="Take what the tasks train in operators that they train themselves, or plan otherwise.",
        )
    return _Home(tuple(sorted(devices)))


def _merit(home: _Home, before: _Home | None) -> tuple[bool, bool, int]:
    is_here = before is not None and (home.devices, home.tp) == (before.devices, before.tp)
    return is_here, home.tp == 1, len(home.devices) // home.tp


def _sample_s(plan: Plan, slice_: Slice) -> float | None:
    """Seconds of one op's forward pass for one sample of a share."""
    metaop = plan.by_name[slice_.metaop]
    op = times_of(metaop, slice_, plan.cluster)
    return None if op is None else op.forward_s / largest_samples(slice_, metaop.batch_size)


def forward_only(program: Program, task: str, gathering: Collection[int] = ()) -> Program:
    """Leave of a program nothing but the task's forward passes and what they hand to each other, which they
    keep to their end.

    Batch norms take their running statistics, so that passes sum nothing over shares inside; but those of the
    slices `gathering` gather what a loss compares.
    """
    indices = {
        index
        for index, slice_ in enumerate(program.slices)
        if program.plan.by_name[slice_.metaop].task == task
    }
    actions = {
        device: tuple(
            replace(
                action if action.slice_index in gathering else _without_statistics(program, action), left=()
            )
            for action in device_actions
            if _is_of(action, indices)
        )
        for device, device_actions in program.actions.items()
    }
    return replace(program, actions=actions)


def _is_of(action: Action, slices: set[int]) -> bool:
    if action.kind is Kind.FORWARD:
        return action.slice_index in slices
    if action.kind in (Kind.SEND, Kind.RECV):
        return action.transfer is not None and action.transfer.producer in slices
    return False


def _without_statistics(program: Program, action: Action) -> Action:
    if (
        action.kind is Kind.FORWARD
        and action.slice_index is not None
        and program.layouts[action.slice_index].sums_shares
    ):
        return replace(action, communicator=None)
    return action
