"""Rules of time: durations, order, producers before consumers, one slice a device, waves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from spindle_cli.check.allocations import curve_point
from spindle_cli.check.types import Violation, exact_s, located, place_of, slack_s
from spindle_cli.costs.recompute_and_offload import forwards_again
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
    for wave, piece in located(plan):
        metaop = plan.by_name[piece.metaop]
        point = curve_point(metaop, piece, plan.cluster)
        if point is None:
            continue  # reported as an allocation
        passes = ("lasts",) if piece.backward_s is None else ("forward lasts", "backward lasts")
        lasts = [end_s - start_s for start_s, end_s in piece.times_s]
        needed = zip(passes, lasts, _least_s(piece, metaop, point), strict=True)
        short = [each for each in needed if each[1] < each[2] - slack_s(piece)]
        if not short:
            continue
        told = _timed_by(plan, metaop if profile is None else profile.by_name.get(metaop.name), piece)
        kinds = dict.fromkeys(plan.cluster.type_of[device] for device in piece.devices)
        its_curve = f"the curve of {' and '.join(kinds)}, its devices" if told else "its curve"
        yield Violation(
            rule="duration",
            where=place_of(wave, piece),
            value=" and ".join(f"{what} {exact_s(seconds)}" for what, seconds, _ in short)
            + (f", as on a {told}" if told else ""),
            expected=f"at least {' and '.join(exact_s(least_s) for *_, least_s in short)} "
            f"for {counted(piece.num_ops, 'op')} on {its_curve}",
        )


def _least_s(piece: Slice, metaop: PlanMetaOp, op_s: tuple[float, float]) -> tuple[float, ...]:
    """Seconds of a slice by those of one op forward and backward: of each stretch of `piece.times_s`."""
    forward_s, backward_s = op_s
    again_s = forwards_again(piece, metaop) * forward_s
    both_s = piece.num_ops * forward_s, again_s + piece.num_ops * backward_s
    return (sum(both_s),) if piece.backward_s is None else both_s


def _timed_by(plan: Plan, source: PlanMetaOp | MetaOpProfile | None, piece: Slice) -> str | None:
    """The type of device, if there is one, on which the slice would last as long as the plan says."""
    if source is None or not plan.cluster.is_mixed:
        return None
    samples = sizes(piece) or (source.batch_size / piece.shares_of_batch,)
    for kind in plan.cluster.types:
        known = [share_on_type(source, kind, count, piece.tp) for count in samples]
        found = [each for each in known if each is not None]
        if len(found) < len(known):
            continue
        longest = max(op.forward_s for op in found), max(op.backward_s for op in found)
        least_s = _least_s(piece, plan.by_name[piece.metaop], longest)
        if all(
            abs(end_s - start_s - seconds) <= slack_s(piece)
            for (start_s, end_s), seconds in zip(piece.times_s, least_s, strict=True)
        ):
            return kind
    return None


def order_of_slices(plan: Plan) -> Iterator[Violation]:
    """A MetaOp's slices run one after another, in the order of their ops, and backward in reverse."""
    pieces: dict[tuple[str, int], list[tuple[int, Slice]]] = defaultdict(list)
    for wave, piece in located(plan):
        pieces[piece.metaop, piece.micro_batch].append((wave, piece))
    for parts in pieces.values():
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
    for wave, piece in located(plan):
        if piece.backward_s is not None and piece.backward_s[0] < piece.end_s - slack_s(piece):
            yield Violation(
                rule="backward",
                where=place_of(wave, piece),
                value=f"starts backward at {exact_s(piece.backward_s[0])}",
                expected=f"not before its forward pass has ended at {exact_s(piece.end_s)}",
            )


def _backward_behind(wave: int, piece: Slice, taker: Slice) -> Iterator[Violation]:
    """`piece` starts backward when `taker`, which takes its output, is through backward."""
    if piece.backward_s is None or taker.backward_s is None:
        return
    start_s, ended_s = piece.backward_s[0], taker.backward_s[1]
    if start_s < ended_s - slack_s(piece, taker):
        yield Violation(
            rule="backward",
            where=place_of(wave, piece),
            value=f"starts backward at {exact_s(start_s)}",
            expected=f"not before {taker.label}, which takes its output, is through at {exact_s(ended_s)}",
        )


def producers_first(plan: Plan) -> Iterator[Violation]:
    """A MetaOp starts when all its inputs have ended; backward the inputs when it has."""
    last: dict[tuple[str, int], tuple[int, Slice]] = {}
    first: dict[tuple[str, int], tuple[int, Slice]] = {}
    for wave, piece in located(plan):
        key = piece.metaop, piece.micro_batch
        if key not in last or piece.end_s > last[key][1].end_s:
            last[key] = (wave, piece)
        if key not in first or piece.start_s < first[key][1].start_s:
            first[key] = (wave, piece)
    for (name, number), (wave, piece) in first.items():
        for producer in plan.by_name[name].inputs:
            if (producer, number) not in last:
                continue  # reported as coverage
            wave_of_producer, ended = last[producer, number]
            if piece.start_s < ended.end_s - slack_s(piece, ended):
                yield Violation(
                    rule="producer",
                    where=place_of(wave, piece),
                    value=f"starts at {exact_s(piece.start_s)}",
                    expected=f"not before its input {producer} has ended at {exact_s(ended.end_s)}",
                )
            yield from _backward_behind(wave_of_producer, ended, piece)


def one_slice_a_device(plan: Plan) -> Iterator[Violation]:
    """No device runs two slices, or two passes, at once."""
    busy: dict[int, list[tuple[float, float, int, Slice]]] = defaultdict(list)
    for wave, piece in located(plan):
        for device in set(piece.devices):
            busy[device].extend((start_s, end_s, wave, piece) for start_s, end_s in piece.times_s)
    # One violation for each pair of slices' passes, with all the devices that they collide on.
    collisions: dict[tuple[str, str, float, float], list[int]] = {}
    for device in sorted(busy):
        running_end_s, running = 0.0, None
        for start_s, end_s, wave, piece in sorted(busy[device], key=lambda entry: entry[:3]):
            if running is not None and start_s < running_end_s - slack_s(piece, running):
                key = (place_of(wave, piece), running.label, start_s, running_end_s)
                collisions.setdefault(key, []).append(device)
            if running is None or end_s > running_end_s:
                running_end_s, running = end_s, piece
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
        for piece in wave.slices:
            slack = slack_s(piece)
            if piece.start_s < wave.start_s - slack or piece.end_s > wave.end_s + slack:
                yield Violation(
                    rule="wave-times",
                    where=place_of(wave.index, piece),
                    value=f"runs from {exact_s(piece.start_s)} to {exact_s(piece.end_s)}",
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
    for piece in wave.slices:
        shared = tuple(sorted(device for device in set(piece.devices) if device in user))
        if shared:
            yield Violation(
                rule="wave-devices",
                where=place_of(wave.index, piece),
                devices=shared,
                value=f"also used by {user[shared[0]].label}",
                expected="disjoint devices for the slices of one wave",
            )
        user.update((device, piece) for device in piece.devices)
