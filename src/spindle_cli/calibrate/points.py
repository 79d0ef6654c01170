"""What one op took on the shares that a run gave it, without what its devices do beside their slices.

A slice takes n ops x (what the curve says + what comes on top of it, costs/beyond_curve.py) x its stretch
(beside.py). Turned around: the plan's own formulas with the slice's measured seconds in the place of its
predicted ones, solved for the curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.calibrate.reading import Run
from spindle_cli.costs.beyond_curve import BeyondCurve
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import CurvePoint, Profile

Allocation = tuple[str, int, int]  # a MetaOp's name, dp, tp

# Of an op's measured seconds, at least so much is its own.
LEAST_OWN = 0.05


@dataclass(frozen=True)
class OpTimes:
    """Seconds of one op over the whole batch, forward and backward."""

    forward_s: float
    backward_s: float

    @property
    def op_s(self) -> float:
        """Both together."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Measured:
    """What one op took; `weight`: measurements of single ops that it is a mean of. `steps`: of the runs."""

    times: OpTimes
    weight: float
    steps: int


def measured_points(run: Run, profile: Profile, stretches: Sequence[float]) -> Mapping[Allocation, Measured]:
    """What a run says of the points of a profile's curves. Slices that took no time (a clock too coarse for
    them) say nothing.

    Args:
        stretches: of each slice, see `Beside.stretches`.
    """
    found: dict[Allocation, list[Measured]] = {}
    beyond = BeyondCurve(run.plan.by_name, run.plan.cluster, run.plan)
    for piece, took, stretch in zip(run.plan.slices, run.measured.slices, stretches, strict=True):
        if took.forward_s + took.backward_s > 0:
            ops = piece.num_ops * stretch
            own = _own_times(OpTimes(took.forward_s / ops, took.backward_s / ops), piece, profile, beyond)
            steps = run.measured.steps
            one = Measured(own, steps * piece.num_ops, steps)
            found.setdefault((piece.metaop, piece.dp, piece.tp), []).append(one)
    return {key: together(each) for key, each in found.items()}


def together(found: Sequence[Measured]) -> Measured:
    """The mean by weights."""
    weight = sum(each.weight for each in found)
    times = OpTimes(
        sum(each.times.forward_s * each.weight for each in found) / weight,
        sum(each.times.backward_s * each.weight for each in found) / weight,
    )
    return Measured(times, weight, max(each.steps for each in found))


def all_runs(runs: Sequence[Mapping[Allocation, Measured]]) -> dict[Allocation, Measured]:
    """What several runs say together, each by its number of steps."""
    found: dict[Allocation, list[Measured]] = {}
    for points in runs:
        for key, each in points.items():
            found.setdefault(key, []).append(each)
    joined = {key: together(each) for key, each in found.items()}
    steps = {key: sum(each.steps for each in of_runs) for key, of_runs in found.items()}
    return {key: Measured(each.times, each.weight, steps[key]) for key, each in joined.items()}


def point_of(profile: Profile, allocation: Allocation) -> CurvePoint:
    """The point of a profile's curve; there is one."""
    name, dp, tp = allocation
    return next(point for point in profile.by_name[name].curve if (point.dp, point.tp) == (dp, tp))


def _own_times(op: OpTimes, piece: Slice, profile: Profile, beyond: BeyondCurve) -> OpTimes:
    """Of what one op of a slice took, what the curve should say. What gathers of shared-out parameters take
    longer than what they hide behind is as the profile's curve has it.
    """
    point = point_of(profile, (piece.metaop, piece.dp, piece.tp))
    again = piece.num_recomputed / piece.num_ops
    metaop = profile.by_name[piece.metaop]
    more_s = beyond.op_s(piece, metaop, point.forward_s, point.backward_s + again * point.forward_s)
    forward_s = max(op.forward_s - more_s[0], LEAST_OWN * op.forward_s)
    backward_s = max(op.backward_s - more_s[1], LEAST_OWN * op.backward_s)
    if again:  # forward once more, as part of the backward pass
        backward_s = max(backward_s - again * forward_s, LEAST_OWN * backward_s)
    return OpTimes(forward_s, backward_s)
