"""Rules of time: durations, order, producers before consumers, one slice a device, waves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from spindle_cli.check.allocations import curve_point
from spindle_cli.check.types import Violation, exact_s, located, place_of, slack_s
from spindle_cli.costs.beyond_curve import forwards_again
from spindle_cli.costs.shares import share_on_type, sizes
from spindle_cli.plan.types import Plan, PlanMetaOp, Slice, Wave
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.units import counted


def durations(plan: Plan, profile: Profile | None = None) -> Iterator[Violation]:
    """A slice lasts at least ops x (forward_s + backward_s) of its curve point; where it has times for each
    pass, each at least its own part. One violation says both passes.

    An op with recomputation runs its forward pass twice, the second time before it runs backward.

    Args:
        profile: by whose curves, too, it is told which type of device a slice was timed by.
    """
    for wave, slice_ in located(plan):
        metaop = plan.by_name[slice_.metaop]
        point = curve_point(metaop, slice_, plan.cluster)
        if point is None:
            continue  # reported as an allocation
        short = _too_short(slice_, _least_s(slice_, metaop, point))
        if not short:
            continue
        told = _timed_by(plan, metaop if profile is None else profile.by_name.get(metaop.name), slice_)
        kinds = dict.fromkeys(plan.cluster.type_of[device] for device in slice_.devices)
        its_curve = f"the curve of {' and '.join(kinds)}, its devices" if told else "its curve"
        yield Violation(
            rule="duration",
            where=place_of(wave, slice_),
            value=" and ".join(f"{what} {exact_s(seconds)}" for what, seconds, _ in short)
            + (f", as on a {told}" if told else ""),
            expected=f"at least {' and '.join(exact_s(least_s) for *_, least_s in short)} "
            f"for {counted(slice_.num_ops, 'op')} on {its_curve}",
        )


def _too_short(slice_: Slice, least_s: Sequence[float]) -> list[tuple[str, float, float]]:
    """The passes of a slice, or the slice itself where it has one time for both, that last less than
    `least_s`: what lasts, how many seconds, and how many it has to.
    """
    passes = ("lasts",) if slice_.backward_s is None else ("forward lasts", "backward lasts")
    lasts = [end_s - start_s for start_s, end_s in slice_.times_s]
    return [
        (what, seconds, least)
        for what, seconds, least in zip(passes, lasts, least_s, strict=True)
        if seconds < least - slack_s(slice_)
    ]


def _least_s(slice_: Slice, metaop: PlanMetaOp, op_s: tuple[float, float]) -> tuple[float, ...]:
    """Seconds of a slice by those of one op forward and backward: of each stretch of `slice_.times_s`."""
    forward_s, backward_s = op_s
    again_s = forwards_again(slice_, metaop) * forward_s
    both_s = slice_.num_ops * forward_s, again_s + slice_.num_ops * backward_s
    return (sum(both_s),) if slice_.backward_s is None else both_s


def _timed_by(plan: Plan, source: PlanMetaOp | MetaOpProfile | None, slice_: Slice) -> str | None:
    """The type of device, if there is one, on which the slice would last as long as the plan says."""
    if source is None or not plan.cluster.is_mixed:
        return None
    samples = sizes(slice_) or (source.batch_size / slice_.shares_of_batch,)
    for kind in plan.cluster.types:
        op_times = [share_on_type(source, kind, count, slice_.tp) for count in samples]
        measured = [op_time for op_time in op_times if op_time is not None]
        if len(measured) < len(op_times):
            continue
        longest = max(op.forward_s for op in measured), max(op.backward_s for op in measured)
        least_s = _least_s(slice_, plan.by_name[slice_.metaop], longest)
        if all(
            abs(end_s - start_s - seconds) <= slack_s(slice_)
            for (start_s, end_s), seconds in zip(slice_.times_s, least_s, strict=True)
        ):
            return kind
    return None


def order_of_slices(plan: Plan) -> Iterator[Violation]:
    """A MetaOp's slices run one after another, in the order of their ops, and backward in reverse."""
    located_slices: dict[tuple[str, int], list[tuple[int, Slice]]] = defaultdict(list)
    for wave, slice_ in located(plan):
        located_slices[slice_.metaop, slice_.micro_batch].append((wave, slice_))
    for parts in located_slices.values():
        parts.sort(key=lambda entry: entry[1].ops)
        for (_, earlier), (wave, later) in pairwise(parts):
            if later.start_s < earlier.end_s - slack_s(earlier, later):
                yield Violation(
                    rule="order",
                    where=place_of(wave, later),
                    value=f"starts at {exact_s(later.start_s)}",
                    expected=f"not before {earlier.label} has ended at {exact_s(earlier.end_s)}",
                )
        for (wave, earlier), (_, later) in pairwise(parts):
            yield from _backward_behind(wave, earlier, later)


def backward_behind_forward(plan: Plan) -> Iterator[Violation]:
    """A slice's backward pass starts when its forward pass has ended."""
    for wave, slice_ in located(plan):
        if slice_.backward_s is not None and slice_.backward_s[0] < slice_.end_s - slack_s(slice_):
            yield Violation(
                rule="backward",
                where=place_of(wave, slice_),
                value=f"starts backward at {exact_s(slice_.backward_s[0])}",
                expected=f"not before its forward pass has ended at {exact_s(slice_.end_s)}",
            )


def _backward_behind(wave: int, slice_: Slice, taker: Slice) -> Iterator[Violation]:
    """`slice_` starts backward when `taker`, which takes its output, is through backward."""
    if slice_.backward_s is None or taker.backward_s is None:
        return
    start_s, ended_s = slice_.backward_s[0], taker.backward_s[1]
    if start_s < ended_s - slack_s(slice_, taker):
        yield Violation(
            rule="backward",
            where=place_of(wave, slice_),
            value=f"starts backward at {exact_s(start_s)}",
            expected=f"not before {taker.label}, which takes its output, is through at {exact_s(ended_s)}",
        )


def producers_first(plan: Plan) -> Iterator[Violation]:
    """A MetaOp starts when all its inputs have ended; backward the inputs when it has."""
    last: dict[tuple[str, int], tuple[int, Slice]] = {}
    first: dict[tuple[str, int], tuple[int, Slice]] = {}
    for wave, slice_ in located(plan):
        key = slice_.metaop, slice_.micro_batch
        if key not in last or slice_.end_s > last[key][1].end_s:
            last[key] = (wave, slice_)
        if key not in first or slice_.start_s < first[key][1].start_s:
            first[key] = (wave, slice_)
    for (name, number), (wave, slice_) in first.items():
        for producer in plan.by_name[name].inputs:
            if (producer, number) not in last:
                continue  # reported as coverage
            wave_of_producer, ended = last[producer, number]
            if slice_.start_s < ended.end_s - slack_s(slice_, ended):
                yield Violation(
                    rule="producer",
                    where=place_of(wave, slice_),
                    value=f"starts at {exact_s(slice_.start_s)}",
                    expected=f"not before its input {producer} has ended at {exact_s(ended.end_s)}",
                )
            yield from _backward_behind(wave_of_producer, ended, slice_)


def one_slice_a_device(plan: Plan) -> Iterator[Violation]:
    """No device runs two slices, or two passes, at once."""
    busy: dict[int, list[tuple[float, float, int, Slice]]] = defaultdict(list)
    for wave, slice_ in located(plan):
        for device in set(slice_.devices):
            busy[device].extend((start_s, end_s, wave, slice_) for start_s, end_s in slice_.times_s)
    # One violation for each pair of slices' passes, with all the devices that they collide on.
    collisions: dict[tuple[str, str, float, float], list[int]] = {}
    for device in sorted(busy):
        running_end_s, running = 0.0, None
        for start_s, end_s, wave, slice_ in sorted(busy[device], key=lambda entry: entry[:3]):
            if running is not None and start_s < running_end_s - slack_s(slice_, running):
                key = (place_of(wave, slice_), running.label, start_s, running_end_s)
                collisions.setdefault(key, []).append(device)
            if running is None or end_s > running_end_s:
                running_end_s, running = end_s, slice_
    for (where, label, start_s, ended_s), devices in collisions.items():
        yield Violation(
            rule="device-busy",
            where=where,
            devices=tuple(devices),
            value=f"starts at {exact_s(start_s)}",
            expected=f"not before {label} on the same device has ended at {exact_s(ended_s)}",
        )


def waves(plan: Plan) -> Iterator[Violation]:
    """A wave's slices have disjoint devices and lie within its times; waves are ordered by start."""
    for wave in plan.waves:
        yield from _disjoint(wave)
        for slice_ in wave.slices:
            slack = slack_s(slice_)
            if slice_.start_s < wave.start_s - slack or slice_.end_s > wave.end_s + slack:
                yield Violation(
                    rule="wave-times",
                    where=place_of(wave.index, slice_),
                    value=f"runs from {exact_s(slice_.start_s)} to {exact_s(slice_.end_s)}",
                    expected=f"within its wave, {exact_s(wave.start_s)} to {exact_s(wave.end_s)}",
                )
    for earlier, later in pairwise(plan.waves):
        if later.start_s < earlier.start_s - slack_s(*earlier.slices, *later.slices):
            yield Violation(
                rule="wave-order",
                where=f"wave {later.index}",
                value=f"starts at {exact_s(later.start_s)}",
                expected=f"not before wave {earlier.index}, which starts at {exact_s(earlier.start_s)}",
            )


def _disjoint(wave: Wave) -> Iterator[Violation]:
    user: dict[int, Slice] = {}
    for slice_ in wave.slices:
        shared = tuple(sorted(device for device in set(slice_.devices) if device in user))
        if shared:
            yield Violation(
                rule="wave-devices",
                where=place_of(wave.index, slice_),
                devices=shared,
                value=f"also used by {user[shared[0]].label}",
                expected="disjoint devices for the slices of one wave",
            )
        user.update((device, slice_) for device in slice_.devices)
