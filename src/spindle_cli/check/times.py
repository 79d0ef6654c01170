"""Rules of time: durations, order, producers before consumers, one slice a device, waves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from spindle_cli.check.structure import curve_point
from spindle_cli.check.types import Violation, exact_s, located, place_of, slack_s
from spindle_cli.plan.types import Plan, Slice, Wave


def durations(plan: Plan) -> Iterator[Violation]:
    """A slice lasts at least ops x (forward_s + backward_s) of its curve point.

    A slice with recomputation runs its forward pass twice.
    """
    for wave, piece in located(plan):
        point = curve_point(plan.by_name[piece.metaop], piece)
        if point is None:
            continue  # reported as an allocation
        forward_s, backward_s = point
        needed_s = piece.num_ops * (forward_s * (2 if piece.recompute else 1) + backward_s)
        if piece.end_s - piece.start_s < needed_s - slack_s(piece):
            yield Violation(
                rule="duration",
                where=place_of(wave, piece),
                value=f"lasts {exact_s(piece.end_s - piece.start_s)}",
                expected=f"at least {exact_s(needed_s)} for {piece.num_ops} ops on its curve",
            )


def order_of_slices(plan: Plan) -> Iterator[Violation]:
    """A MetaOp's slices run one after another, in the order of their ops."""
    pieces: dict[str, list[tuple[int, Slice]]] = defaultdict(list)
    for wave, piece in located(plan):
        pieces[piece.metaop].append((wave, piece))
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


def producers_first(plan: Plan) -> Iterator[Violation]:
    """A MetaOp starts when all its inputs have ended."""
    last: dict[str, Slice] = {}
    first: dict[str, tuple[int, Slice]] = {}
    for wave, piece in located(plan):
        if piece.metaop not in last or piece.end_s > last[piece.metaop].end_s:
            last[piece.metaop] = piece
        if piece.metaop not in first or piece.start_s < first[piece.metaop][1].start_s:
            first[piece.metaop] = (wave, piece)
    for metaop in plan.metaops:
        for producer in metaop.inputs:
            if metaop.name not in first or producer not in last:
                continue  # reported as coverage
            wave, piece = first[metaop.name]
            ended = last[producer]
            if piece.start_s < ended.end_s - slack_s(piece, ended):
                yield Violation(
                    rule="producer",
                    where=place_of(wave, piece),
                    value=f"starts at {exact_s(piece.start_s)}",
                    expected=f"not before its input {producer} has ended at {exact_s(ended.end_s)}",
                )


def one_slice_a_device(plan: Plan) -> Iterator[Violation]:
    """No device runs two slices at once."""
    busy: dict[int, list[tuple[float, float, int, Slice]]] = defaultdict(list)
    for wave, piece in located(plan):
        for device in set(piece.devices):
            busy[device].append((piece.start_s, piece.end_s, wave, piece))
    # One violation for each pair of slices, with all the devices that they collide on.
    collisions: dict[tuple[str, str], tuple[Slice, Slice, list[int]]] = {}
    for device in sorted(busy):
        running_end_s, running = 0.0, None
        for start_s, end_s, wave, piece in sorted(busy[device], key=lambda entry: entry[:3]):
            if running is not None and start_s < running_end_s - slack_s(piece, running):
                key = (place_of(wave, piece), running.label)
                collisions.setdefault(key, (piece, running, []))[2].append(device)
            if running is None or end_s > running_end_s:
                running_end_s, running = end_s, piece
    for (where, _), (piece, running, devices) in collisions.items():
        yield Violation(
            rule="device-busy",
            where=where,
            devices=tuple(devices),
            value=f"starts at {exact_s(piece.start_s)}",
            expected=f"not before {running.label} on the same device has ended at {exact_s(running.end_s)}",
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
