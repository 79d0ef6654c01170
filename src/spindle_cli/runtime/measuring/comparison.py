"""predicted.json: what the plan said against what the ranks measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

from spindle_cli.costs.share_times import OpSeconds, times_of
from spindle_cli.files.run_files import (
    Comparison,
    DeviceTimes,
    MetaOpComparison,
    PredictedVsMeasured,
    SliceTimes,
    StartUp,
)
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.runtime.measuring.gathering import gather_json
from spindle_cli.runtime.measuring.timing import Activity, Key

RankTimes = dict[Key, float]  # median seconds per step


class Measured(NamedTuple):
    """Seconds of a step's iteration, and what the plan of the tasks that it ran says."""

    measured_s: float
    predicted_s: float


def compare(
    plan: Plan, iterations: Sequence[Measured], ranks: Sequence[RankTimes], start_up: StartUp | None
) -> PredictedVsMeasured:
    """Predicted against measured, for the iteration, for each MetaOp, and where each device's time went.

    Where steps run several sets of tasks, the means of both over the steps; and no MetaOps, whose slices are
    not the same in all of them.

    Args:
        plan: that was run.
        iterations: of every step; the first (warm-up) is left out where there are more.
        ranks: what each rank measured.
        start_up: how long the run took to start.
    """
    counted = iterations[1:] if len(iterations) > 1 else iterations
    usual = fmean if plan.task_sets else median
    return PredictedVsMeasured(
        steps=len(counted),
        iteration=Comparison(
            predicted_s=usual([each.predicted_s for each in counted]),
            measured_s=usual([each.measured_s for each in counted]),
        ),
        metaops=() if plan.task_sets else tuple(_compare_metaop(plan, name, ranks) for name in plan.by_name),
        slices=() if plan.task_sets else _slices(plan, ranks),
        devices=tuple(_device_times(device, times) for device, times in enumerate(ranks)),
        start_up=start_up,
        plan_sha256=plan.sha256(),
    )


def _compare_metaop(plan: Plan, name: str, ranks: Sequence[RankTimes]) -> MetaOpComparison:
    slices = {index: piece for index, piece in enumerate(plan.slices) if piece.metaop == name}
    points = {index: _point(plan, piece) for index, piece in slices.items()}
    forward = Comparison(
        predicted_s=sum(piece.num_ops * points[index].forward_s for index, piece in slices.items()),
        measured_s=sum(_slowest(index, piece, Activity.FORWARD, ranks) for index, piece in slices.items()),
    )
    backward = Comparison(
        predicted_s=sum(piece.num_ops * _backward_s(piece, points[index]) for index, piece in slices.items()),
        measured_s=sum(_slowest(index, piece, Activity.BACKWARD, ranks) for index, piece in slices.items()),
    )
    return MetaOpComparison(
        metaop=name,
        predicted_s=forward.predicted_s + backward.predicted_s,
        measured_s=forward.measured_s + backward.measured_s,
        forward=forward,
        backward=backward,
    )


def _point(plan: Plan, piece: Slice) -> OpSeconds:
    """What a slice was planned by."""
    op = times_of(plan.by_name[piece.metaop], piece, plan.cluster)
    assert op is not None, "`check` has seen to it"
    return op


def _backward_s(piece: Slice, point: OpSeconds) -> float:
    """Of one op on average; what is computed again is part of it."""
    return point.backward_s + point.forward_s * piece.num_recomputed / piece.num_ops


def _slices(plan: Plan, ranks: Sequence[RankTimes]) -> tuple[SliceTimes, ...]:
    return tuple(
        SliceTimes(
            slice=index,
            forward_s=_slowest(index, piece, Activity.FORWARD, ranks),
            backward_s=_slowest(index, piece, Activity.BACKWARD, ranks),
        )
        for index, piece in enumerate(plan.slices)
    )


def _slowest(index: int, piece: Slice, activity: Activity, ranks: Sequence[RankTimes]) -> float:
    return max(ranks[device].get((activity, index), 0.0) for device in piece.devices)


def _device_times(device: int, times: RankTimes) -> DeviceTimes:
    compute_s = sum(
        seconds
        for (activity, _), seconds in times.items()
        if activity in (Activity.FORWARD, Activity.BACKWARD)
    )
    return DeviceTimes(
        device=device,
        compute_s=compute_s,
        wait_s=times.get((Activity.WAIT, None), 0.0),
        data_s=times.get((Activity.DATA, None), 0.0),
        optimizer_s=times.get((Activity.OPTIMIZER, None), 0.0),
        other_s=max(0.0, times.get((Activity.OTHER, None), 0.0)),
    )


def gather_times(mine: RankTimes, device: torch.device) -> list[RankTimes] | None:
    """Every rank's times on rank 0; None on the others. Collective."""
    entries = [[activity.value, piece, seconds] for (activity, piece), seconds in mine.items()]
    gathered = gather_json(entries, device)
    if gathered is None:
        return None
    return [
        {(Activity(activity), piece): seconds for activity, piece, seconds in entries} for entries in gathered
    ]
