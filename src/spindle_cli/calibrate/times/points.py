"""What one op took on the shares that a run gave it, without what its devices do beside their slices.

A slice takes n ops x (what the curve says + what comes on top of it, costs/beyond_curve.py) x its stretch
(beside.py). Turned around: the plan's own formulas with the slice's measured seconds in the place of its
predicted ones, solved for the curve.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from spindle_cli.calibrate.reading import Run
from spindle_cli.costs.beyond_curve import BeyondCurve, forwards_again
from spindle_cli.costs.parameters import level_of
from spindle_cli.costs.shares import largest_samples, share_seconds, sizes, tells_shares_apart, times_of_share
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.run_files import PassTimes
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.mixed.seen import seen_on, type_in
from spindle_cli.profile.types import MetaOpProfile, Profile

# A MetaOp's name; into how many shares as large as the one that ran its batch would be cut, which is dp where
# a whole batch is in equal shares; and tp.
Allocation = tuple[str, Fraction | int, int]

# Of an op's measured seconds, at least so much is its own.
LEAST_OWN = 0.05


@dataclass(frozen=True)
class OpTimes:
    """Seconds of one op over the whole batch, forward and backward."""

    forward_s: float
    backward_s: float

    @property
    def op_s(self) -> float:
        """Seconds of an op's forward and backward pass together."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Measured:
    """What one op took; `weight`: measurements of single ops that it is a mean of. `steps`: of the runs."""

    times: OpTimes
    weight: float
    steps: int


Points = Mapping[Allocation, Measured]  # of one type of device


def measured_points(run: Run, profile: Profile, stretches: Sequence[float]) -> Mapping[str, Points]:
    """Return what a run says of the times of a profile's shares, by its types of device. Slices that took no
    time (a clock too coarse for them) say nothing.

    Args:
        stretches: of each slice, see `Beside.stretches`.
    """
    by_type: dict[str, dict[Allocation, list[tuple[_Timed, Measured]]]] = {}
    plan, seen = run.plan, seen_on(profile, run.plan.cluster)
    beyond = BeyondCurve(plan.by_name, plan.cluster, plan)
    for index, (slice_, stretch) in enumerate(zip(plan.slices, stretches, strict=True)):
        metaop, ops = seen.by_name[slice_.metaop], slice_.num_ops * stretch
        for timed in _shares_that_ran(run, index, metaop):
            share, kind, took, _ = timed
            if took.op_s <= 0:
                continue
            op = OpTimes(took.forward_s / ops, took.backward_s / ops)
            op_times = _own_times(op, run, slice_, share, metaop, beyond)
            one = Measured(op_times, run.measured.steps * slice_.num_ops, run.measured.steps)
            of_type = by_type.setdefault(type_in(profile, kind), {})
            of_type.setdefault(_allocation(slice_, share, metaop), []).append((timed, one))
    return {kind: {key: _of_run(alike) for key, alike in shares.items()} for kind, shares in by_type.items()}


class _Timed(NamedTuple):
    """A share of a slice, its number; the type of its devices; and what these took for it.

    `decides`: a plan says what the slice takes by it.
    """

    share: int
    kind: str
    took: OpTimes
    decides: bool = True


def _of_run(timed_shares: Sequence[tuple[_Timed, Measured]]) -> Measured:
    """Return what a run says of a share: by the slices that it decides, where there are any, so that these
    are predicted as they were.
    """
    deciding = [measured for timed, measured in timed_shares if timed.decides]
    return together(deciding or [measured for _, measured in timed_shares])


def _shares_that_ran(run: Run, index: int, metaop: MetaOpProfile) -> Iterator[_Timed]:
    """Yield the shares of a slice that were timed, on which type, and for how long. Among those that are
    alike, as large and on the same type, it is the first one, with what the slowest took: the slice waits for
    it.

    On one type a plan says of a slice what its largest share takes: that has what the slowest device took. A
    smaller one says nothing where the profile knows nothing of it, or where it waits for larger ones inside.
    """
    slice_, took, cluster = run.plan.slices[index], run.measured.slices[index], run.plan.cluster
    whole = OpTimes(took.forward_s, took.backward_s)
    if not tells_shares_apart(slice_, cluster):
        yield _Timed(0, cluster.device_type, whole)
        return
    largest = largest_samples(slice_, metaop.batch_size)
    for (kind, samples), alike in _alike(slice_, metaop, cluster).items():
        slowest = _slowest(took.shares[share] for share in alike)
        if cluster.is_mixed:
            yield _Timed(alike[0], kind, slowest)
        elif samples == largest:
            yield _Timed(alike[0], kind, whole)
        elif _is_told(slice_, alike[0], metaop, run.plan):
            yield _Timed(alike[0], kind, slowest, decides=False)


def _alike(slice_: Slice, metaop: MetaOpProfile, cluster: Cluster) -> dict[tuple[str, float], list[int]]:
    """Return a slice's shares by the type of their devices and their samples."""
    samples_by_share: Sequence[float] = (
        sizes(slice_) or (metaop.batch_size / slice_.shares_of_batch,) * slice_.dp
    )
    alike: dict[tuple[str, float], list[int]] = {}
    for share, samples in enumerate(samples_by_share):
        kind = cluster.type_of[slice_.devices[share * slice_.tp]]
        alike.setdefault((kind, samples), []).append(share)
    return alike


def _slowest(shares: Iterable[PassTimes]) -> OpTimes:
    listed = list(shares)
    return OpTimes(max(share.forward_s for share in listed), max(share.backward_s for share in listed))


def _is_told(slice_: Slice, share: int, metaop: MetaOpProfile, plan: Plan) -> bool:
    """Whether what a smaller share took is its own, and the profile knows what it should have taken: where
    shares sum something inside of their passes, or gather parameters there, all take as long as the largest.
    """
    if metaop.batch_sums or level_of(metaop, plan.sharding).is_by_pass:
        return False
    return times_of_share(metaop, slice_, share, plan.cluster) is not None


def _allocation(slice_: Slice, share: int, metaop: MetaOpProfile) -> Allocation:
    samples_by_share = sizes(slice_)
    ways = (
        slice_.shares_of_batch
        if samples_by_share is None
        else Fraction(metaop.batch_size, samples_by_share[share])
    )
    return slice_.metaop, ways, slice_.tp


def together(measurements: Sequence[Measured]) -> Measured:
    """Return the mean of measurements, by their weights."""
    weight = sum(measured.weight for measured in measurements)
    times = OpTimes(
        sum(measured.times.forward_s * measured.weight for measured in measurements) / weight,
        sum(measured.times.backward_s * measured.weight for measured in measurements) / weight,
    )
    return Measured(times, weight, max(measured.steps for measured in measurements))


def all_runs(runs: Iterable[Points]) -> dict[Allocation, Measured]:
    """Return what several runs say together, each by its number of steps."""
    by_allocation: dict[Allocation, list[Measured]] = {}
    for points in runs:
        for key, measured in points.items():
            by_allocation.setdefault(key, []).append(measured)
    joined = {key: together(measured) for key, measured in by_allocation.items()}
    steps = {key: sum(measured.steps for measured in of_runs) for key, of_runs in by_allocation.items()}
    return {key: Measured(measured.times, measured.weight, steps[key]) for key, measured in joined.items()}


def known_times(metaop: MetaOpProfile, ways: Fraction | int, tp: int) -> OpTimes:
    """Return what one type's curve, or its shares, say of a share that ran; one of them has it."""
    for point in metaop.curve:
        if (point.dp, point.tp) == (ways, tp):
            return OpTimes(point.forward_s, point.backward_s)
    share = share_seconds(metaop.shares, float(metaop.batch_size / ways), tp)
    assert share is not None, "`require_belongs` has seen to it"
    return OpTimes(share.forward_s, share.backward_s)


def _own_times(
    op: OpTimes, run: Run, slice_: Slice, share: int, metaop: MetaOpProfile, beyond: BeyondCurve
) -> OpTimes:
    """Return what the curve should say where one op of a slice took `op` on a share. What gathers of
    shared-out parameters take longer than what they hide behind is as the profile's curve has it.
    """
    profiled = times_of_share(metaop, slice_, share, run.plan.cluster)
    assert profiled is not None, "`require_belongs` has seen to it"
    again = forwards_again(slice_, metaop) / slice_.num_ops
    more_s = beyond.op_s(slice_, metaop, profiled.forward_s, profiled.backward_s + again * profiled.forward_s)
    forward_s = max(op.forward_s - more_s[0], LEAST_OWN * op.forward_s)
    backward_s = max(op.backward_s - more_s[1], LEAST_OWN * op.backward_s)
    if again:  # forward once more, as part of the backward pass
        backward_s = max(backward_s - again * forward_s, LEAST_OWN * backward_s)
    return OpTimes(forward_s, backward_s)
