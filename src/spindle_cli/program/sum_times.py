"""When each gradient sum has its place in the order of all that devices post, and when parameters are needed.

A sum may start when the last op that adds to it has run, by the clock; until then it has no place in the
order. A device whose pass is under way at that time and adds to the sum itself posts it behind that pass, or
inside of it, and so behind all that it has posted before the pass. What other devices have ahead of the sum
must be the same: so its time is moved behind those posts, or, where the pass waits for other devices while it
runs, to the pass's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from spindle_cli.account.types import ParameterGroup
from spindle_cli.plan.types import Slice
from spindle_cli.program.clock import PassClock
from spindle_cli.program.lanes import Lane
from spindle_cli.program.types import Kind


class Completion(NamedTuple):
    """With which slice's backward pass, and after which of its ops, a group's gradients are complete on all
    devices; in the order of when these passes end.
    """

    time: int
    minus_op: int
    piece: int

    @classmethod
    def of(cls, group: ParameterGroup, clock: PassClock) -> Completion:
        """The last of the passes that add to a group."""
        return max(
            cls(clock.end((Kind.BACKWARD, piece)), -op, piece)
            for piece, op in zip(group.slices, group.first_ops, strict=True)
        )


def latest_time(group: ParameterGroup, clock: PassClock, num_devices: int) -> int:
    """The end of the last pass that adds to a group; no sum is later. One over all devices comes behind the
    losses, whose communicator it shares: it may be complete while some devices still run forward.
    """
    complete = Completion.of(group, clock).time
    return complete if len(group.devices) < num_devices else max(complete, clock.forward_ended)


def sum_time(group: ParameterGroup, clock: PassClock, slices: Sequence[Slice], lanes: Sequence[Lane]) -> int:
    """The place of a group's sum in the order of all that is posted, in ticks.

    Args:
        slices: of the program.
        lanes: of all devices.
    """
    latest = latest_time(group, clock, len(lanes))
    if not group.is_summed_at_once:
        return latest
    uses = zip(group.slices, group.first_ops, strict=True)
    time = ceil(max(run_back(clock, slices, piece, op) for piece, op in uses))
    if len(group.devices) == len(lanes):
        time = max(time, clock.forward_ended)
    while True:
        later = max(lanes[device].no_earlier(time, group.slices) for device in group.devices)
        if later == time or later >= latest:
            return min(later, latest)
        time = later


def run_back(clock: PassClock, slices: Sequence[Slice], piece: int, op: int | Fraction) -> Fraction:
    """When a slice has run an op backward, if all of its ops take equally long, in ticks."""
    backward = Kind.BACKWARD, piece
    first_op, last_op = slices[piece].ops
    length = clock.end(backward) - clock.start(backward)
    return clock.start(backward) + length * Fraction(last_op - op) / (last_op - first_op)


def needed_at(group: ParameterGroup, clock: PassClock, slices: Sequence[Slice]) -> Fraction:
    """When the first of all devices comes to an op that uses a group's parameters, if all ops of a slice take
    equally long forward, in ticks.
    """
    return min(
        run_forward(clock, slices, piece, op) for piece, op in zip(group.slices, group.first_ops, strict=True)
    )


def run_forward(clock: PassClock, slices: Sequence[Slice], piece: int, op: int) -> Fraction:
    """When a slice comes to an op forward, if all of its ops take equally long, in ticks."""
    forward = Kind.FORWARD, piece
    first_op, last_op = slices[piece].ops
    length = clock.end(forward) - clock.start(forward)
    return clock.start(forward) + length * Fraction(op - first_op, last_op - first_op)
