"""predicted.json: what the plan said against what the ranks measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

from spindle_cli.account.compute import compute_of_devices
from spindle_cli.account.traffic import traffic_of
from spindle_cli.costs.beyond_curve import forwards_again
from spindle_cli.costs.shares import OpSeconds, tells_shares_apart, times_of
from spindle_cli.files.run_files import (
    Comparison,
    DeviceTimes,
    MetaOpComparison,
    PassTimes,
    PredictedVsMeasured,
    SetMeasured,
    SliceTimes,
    StartUp,
    TypeTimes,
)
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.runtime.measuring.gathering import gather_json
from spindle_cli.runtime.measuring.timing import COMPUTE, Activity, Key, Stopwatch

RankTimes = dict[Key, float]  # median seconds per step


class RankReport(NamedTuple):
    """What a rank has measured; `least_compute_s`: see `Stopwatch`. `of_sets`: `times` by the tasks that
    steps ran, where not all ran all.
    """

    times: RankTimes
    least_compute_s: float
    of_sets: Mapping[tuple[str, ...], RankTimes] = MappingProxyType({})

    @classmethod
    def of(cls, stopwatch: Stopwatch) -> RankReport:
        """Report what was measured on a rank that has ended its steps."""
        of_sets = {tasks: stopwatch.medians(tasks) for tasks in stopwatch.seconds_of}
        return cls(stopwatch.medians(), stopwatch.least_compute_s(), of_sets)


class Measured(NamedTuple):
    """Seconds of a step's iteration, and what the plan of the tasks that it ran says; which these are."""

    measured_s: float
    predicted_s: float
    tasks: tuple[str, ...] = ()


def compare(
    plan: Plan, iterations: Sequence[Measured], reports: Sequence[RankReport], start_up: StartUp | None
) -> PredictedVsMeasured:
    """Predicted against measured, for the iteration, for each MetaOp and each type of device, and where each
    device's time went.

    Where steps run several sets of tasks, the means of both over the steps, and what the slices of each set's
    plan took in its steps; and no MetaOps, whose slices are not the same in all of them, and no types.

    Args:
        plan: that was run.
        iterations: of every step; the first (warm-up) is left out where there are more.
        reports: of each rank.
        start_up: how long the run took to start.
    """
    counted = iterations[1:] if len(iterations) > 1 else iterations
    usual = fmean if plan.task_sets else median
    ranks = [report.times for report in reports]
    devices = _devices(plan, reports)
    return PredictedVsMeasured(
        steps=len(counted),
        iteration=Comparison(
            predicted_s=usual([iteration.predicted_s for iteration in counted]),
            measured_s=usual([iteration.measured_s for iteration in counted]),
        ),
        metaops=() if plan.task_sets else tuple(_compare_metaop(plan, name, ranks) for name in plan.by_name),
        slices=() if plan.task_sets else _slices(plan, ranks),
        task_sets=tuple(_sets(plan, iterations, reports)) if plan.task_sets else (),
        devices=devices,
        types=() if plan.task_sets else _types(plan, devices),
        start_up=start_up,
        plan_sha256=plan.sha256(),
    )


def _sets(plan: Plan, iterations: Sequence[Measured], reports: Sequence[RankReport]) -> Iterator[SetMeasured]:
    """What was measured of each set of tasks that steps ran, in the order in which they first did."""
    for tasks in dict.fromkeys(iteration.tasks for iteration in iterations):
        set_plan = plan.set_plans.get(tasks, plan)
        ran = [iteration for iteration in iterations if iteration.tasks == tasks]
        counted = ran[1:] if len(ran) > 1 else ran
        ranks = [report.of_sets[tasks] for report in reports]
        yield SetMeasured(
            tasks=tasks,
            steps=len(counted),
            iteration=Comparison(
                predicted_s=set_plan.predicted.iteration_s,
                measured_s=median([iteration.measured_s for iteration in counted]),
            ),
            slices=_slices(set_plan, ranks),
            devices=tuple(_device_times(device, set_plan, times) for device, times in enumerate(ranks)),
        )


def _compare_metaop(plan: Plan, name: str, ranks: Sequence[RankTimes]) -> MetaOpComparison:
    slices = {index: slice_ for index, slice_ in enumerate(plan.slices) if slice_.metaop == name}
    points = {index: _point(plan, slice_) for index, slice_ in slices.items()}
    forward = Comparison(
        predicted_s=sum(slice_.num_ops * points[index].forward_s for index, slice_ in slices.items()),
        measured_s=sum(
            _slowest(index, slice_.devices, Activity.FORWARD, ranks) for index, slice_ in slices.items()
        ),
    )
    backward = Comparison(
        predicted_s=sum(
            slice_.num_ops * _backward_s(plan, slice_, points[index]) for index, slice_ in slices.items()
        ),
        measured_s=sum(
            _slowest(index, slice_.devices, Activity.BACKWARD, ranks) for index, slice_ in slices.items()
        ),
    )
    return MetaOpComparison(
        metaop=name,
        predicted_s=forward.predicted_s + backward.predicted_s,
        measured_s=forward.measured_s + backward.measured_s,
        forward=forward,
        backward=backward,
    )


def _point(plan: Plan, slice_: Slice) -> OpSeconds:
    """Return the times of one op by which a slice was planned."""
    op = times_of(plan.by_name[slice_.metaop], slice_, plan.cluster)
    assert op is not None, "`check` has seen to it"
    return op


def _backward_s(plan: Plan, slice_: Slice, point: OpSeconds) -> float:
    """The seconds of one op's backward pass on average; what is computed again is part of it."""
    again = forwards_again(slice_, plan.by_name[slice_.metaop])
    return point.backward_s + point.forward_s * again / slice_.num_ops


def _slices(plan: Plan, ranks: Sequence[RankTimes]) -> tuple[SliceTimes, ...]:
    return tuple(
        SliceTimes(
            slice=index,
            forward_s=_slowest(index, slice_.devices, Activity.FORWARD, ranks),
            backward_s=_slowest(index, slice_.devices, Activity.BACKWARD, ranks),
            shares=_shares(index, slice_, ranks) if tells_shares_apart(slice_, plan.cluster) else (),
        )
        for index, slice_ in enumerate(plan.slices)
    )


def _shares(index: int, slice_: Slice, ranks: Sequence[RankTimes]) -> tuple[PassTimes, ...]:
    """The times of each share, by the slowest of the devices that hold it together."""
    of_shares = [
        slice_.devices[first : first + slice_.tp] for first in range(0, len(slice_.devices), slice_.tp)
    ]
    return tuple(
        PassTimes(
            forward_s=_slowest(index, devices, Activity.FORWARD, ranks),
            backward_s=_slowest(index, devices, Activity.BACKWARD, ranks),
        )
        for devices in of_shares
    )


def _slowest(index: int, devices: Iterable[int], activity: Activity, ranks: Sequence[RankTimes]) -> float:
    return max(ranks[device].get((activity, index), 0.0) for device in devices)


def _devices(plan: Plan, reports: Sequence[RankReport]) -> tuple[DeviceTimes, ...]:
    if plan.task_sets:  # how long they compute differs from step to step
        return tuple(_device_times(device, plan, report.times) for device, report in enumerate(reports))
    predicted_s = compute_of_devices(plan, traffic_of(plan))
    return tuple(
        _device_times(device, plan, report.times).model_copy(
            update={"predicted_compute_s": own_s, "least_compute_s": report.least_compute_s}
        )
        for device, (report, own_s) in enumerate(zip(reports, predicted_s, strict=True))
    )


def _device_times(device: int, plan: Plan, times: RankTimes) -> DeviceTimes:
    return DeviceTimes(
        device=device,
        type=plan.cluster.type_of[device],
        compute_s=sum(seconds for (activity, _), seconds in times.items() if activity in COMPUTE),
        wait_s=times.get((Activity.WAIT, None), 0.0),
        data_s=times.get((Activity.DATA, None), 0.0),
        optimizer_s=times.get((Activity.OPTIMIZER, None), 0.0),
        other_s=max(0.0, times.get((Activity.OTHER, None), 0.0)),
    )


def _types(plan: Plan, devices: Sequence[DeviceTimes]) -> tuple[TypeTimes, ...]:
    types = []
    for kind, count in plan.cluster.num_of_type.items():
        devices_of_type = [device for device in devices if device.type == kind]
        predicted_s = sum(device.predicted_compute_s or 0.0 for device in devices_of_type)
        measured_s = sum(device.compute_s for device in devices_of_type)
        types.append(TypeTimes(type=kind, num_devices=count, predicted_s=predicted_s, measured_s=measured_s))
    return tuple(types)


def gather_reports(mine: RankReport) -> list[RankReport] | None:
    """Every rank's report on rank 0; None on the others. Collective."""
    of_sets = [[tasks, _rows(times)] for tasks, times in mine.of_sets.items()]
    gathered = gather_json([_rows(mine.times), mine.least_compute_s, of_sets])
    if gathered is None:
        return None
    return [
        RankReport(_times(rows), least_s, {tuple(tasks): _times(set_rows) for tasks, set_rows in of_sets})
        for rows, least_s, of_sets in gathered
    ]


def _rows(times: RankTimes) -> list[list[Any]]:
    return [[activity.value, index, seconds] for (activity, index), seconds in times.items()]


def _times(rows: Iterable[Sequence[Any]]) -> RankTimes:
    return {(Activity(activity), index): seconds for activity, index, seconds in rows}
