"""When each gradient sum has its place in the order of all that devices post, and when parameters are needed
and there.

A sum may start when the last op that adds to it has run, by the clock; until then it has no place in the
order. A device whose pass is under way at that time and adds to the sum itself posts it behind that pass, or
inside of it, and so behind all that it has posted before the pass. What other devices have ahead of the sum
must be the same: so its time is moved behind those posts, or, where the pass waits for other devices while it
runs, to the pass's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from spindle_cli.account.activations import Layout
from spindle_cli.account.step_end import collectives_of_step, together_s
from spindle_cli.account.types import Collective, ParameterGroup
from spindle_cli.costs.links import per_node
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.program.clock import PassClock
from spindle_cli.program.lanes import Lane
from spindle_cli.program.types import Kind


class Completion(NamedTuple):
    """With which slice's backward pass, and after which of its ops, a group's gradients are complete on all
    devices; in the order of when these passes end.
    """

    time: int
    minus_op: int
    slice_index: int

    @classmethod
    def of(cls, group: ParameterGroup, clock: PassClock) -> Completion:
        """The last of the passes that add to a group."""
        return max(
            cls(clock.end((Kind.BACKWARD, index)), -op, index)
            for index, op in zip(group.slices, group.first_ops, strict=True)
        )


def sum_time(group: ParameterGroup, clock: PassClock, slices: Sequence[Slice], lanes: Sequence[Lane]) -> int:
    """The place of a group's sum in the order of all that is posted, in ticks.

    Args:
        slices: of the program.
        lanes: of all devices.
    """
    latest = Completion.of(group, clock).time
    if not group.is_summed_at_once:
        return latest
    time = complete_at(group, clock, slices)
    while True:
        later = max(lanes[device].no_earlier(time, group.slices) for device in group.devices)
        if later == time or later >= latest:
            return min(later, latest)
        time = later


def sums_inside(
    groups: Iterable[ParameterGroup], clock: PassClock, slices: Sequence[Slice], layouts: Sequence[Layout]
) -> dict[int, int]:
    """Return the slices inside of whose backward pass a sum to which they add may start, each with the tick
    at which the first one may: the pass waits for no other device, and all have run back what adds to the sum
    by then.
    """
    groups = list(groups)
    by_pass = {index for group in groups if group.sharding.is_by_pass for index in group.slices}
    first_ticks: dict[int, int] = {}
    for group in groups:
        if group.is_summed_at_once:
            complete = complete_at(group, clock, slices)
            for index in group.slices:
                backward = Kind.BACKWARD, index
                has_room = index not in by_pass and not layouts[index].partners(0)
                if has_room and clock.start(backward) < complete < clock.end(backward):
                    first_ticks[index] = min(complete, first_ticks.get(index, complete))
    return first_ticks


def complete_at(group: ParameterGroup, clock: PassClock, slices: Sequence[Slice]) -> int:
    """The tick by which all slices have run back the ops that add to a group's gradients."""
    uses = zip(group.slices, group.first_ops, strict=True)
    return ceil(max(run_back(clock, slices, index, op) for index, op in uses))


def run_back(clock: PassClock, slices: Sequence[Slice], index: int, op: int | Fraction) -> Fraction:
    """When a slice has run an op backward, if all of its ops take equally long, in ticks."""
    backward = Kind.BACKWARD, index
    first_op, last_op = slices[index].ops
    length = clock.end(backward) - clock.start(backward)
    return clock.start(backward) + length * Fraction(last_op - op) / (last_op - first_op)


def needed_at(group: ParameterGroup, clock: PassClock, slices: Sequence[Slice]) -> Fraction:
    """When the first of all devices comes to an op that uses a group's parameters, if all ops of a slice take
    equally long forward, in ticks.
    """
    return min(
        run_forward(clock, slices, index, op) for index, op in zip(group.slices, group.first_ops, strict=True)
    )


def in_need(
    groups: Iterable[ParameterGroup], clock: PassClock, slices: Sequence[Slice]
) -> list[ParameterGroup]:
    """What is handed on behind the update, in the order in which any device comes to need it; of what is
    needed at once, first that whose sum was the last.
    """
    handed_on = [group for group in groups if group.is_handed_on]
    return sorted(handed_on, key=lambda group: (needed_at(group, clock, slices), -group.index))


def parameters_there(groups: Sequence[ParameterGroup], clock: PassClock, plan: Plan) -> dict[int, int]:
    """The tick from which each slice may run forward without a wait for what the step before has updated: the
    gathers are taken to go one after another on each device, in the order in which they are needed.

    Args:
        groups: of the plan's step, by which optimizer state is shared.
        clock: of a step in which nothing has to be gathered.
    """
    gathers = {
        collective.group: collective
        for collective in collectives_of_step(plan, groups, sharded=True, clips=False, scales=False)
        if collective.kind is Collective.GATHER
    }
    ticks_per_s = len(clock.when) * 1e9
    free_s = [0.0] * plan.cluster.num_devices
    there: dict[int, int] = {}
    for group in in_need(groups, clock, plan.slices):
        spread = per_node(group.devices, plan.cluster)
        takes_s = together_s(gathers[group.index], spread, plan.cluster)
        end_s = max(free_s[device] for device in group.devices) + takes_s
        for device in group.devices:
            free_s[device] = end_s
        for index, op in group.awaited_ops(plan.slices):
            before = run_forward(clock, plan.slices, index, op) - clock.start((Kind.FORWARD, index))
            there[index] = max(there.get(index, 0), round(end_s * ticks_per_s - before))
    return there


def last_update_s(
    groups: Sequence[ParameterGroup],
    times: Mapping[int, int],
    losses_at: int,
    clock: PassClock,
    plan: Plan,
    updates_s: Sequence[float],
) -> float:
    """When the last device has updated its parameters, in seconds of the clock: behind its passes, the losses
    and its sums, which are taken to go one after another on each device, from their places on.

    Args:
        groups: in the order of their sums, of which `times` has the places by group.
        losses_at: the place of the losses; behind all passes they are there when the last one ends.
        updates_s: what each device's update takes.
    """
    ticks_per_s = len(clock.when) * 1e9
    sharded = plan.optimizer_state_sharded
    ends_s = [min(losses_at, clock.ended) / ticks_per_s] * plan.cluster.num_devices
    for index, slice_ in enumerate(plan.slices):
        for device in slice_.devices:
            ends_s[device] = max(ends_s[device], clock.end((Kind.BACKWARD, index)) / ticks_per_s)
    free_s = [0.0] * plan.cluster.num_devices
    for collective in collectives_of_step(plan, groups, sharded=sharded, clips=False, scales=False):
        if collective.kind is Collective.SUM and collective.group is not None:
            begins_s = max(
                times[collective.group] / ticks_per_s, *(free_s[device] for device in collective.devices)
            )
            end_s = begins_s + together_s(
                collective, per_node(collective.devices, plan.cluster), plan.cluster
            )
            for device in collective.devices:
                free_s[device] = end_s
    return max(
        max(end_s, summed_s) + update_s
        for end_s, summed_s, update_s in zip(ends_s, free_s, updates_s, strict=True)
    )


def run_forward(clock: PassClock, slices: Sequence[Slice], index: int, op: int) -> Fraction:
    """When a slice comes to an op forward, if all of its ops take equally long, in ticks."""
    forward = Kind.FORWARD, index
    first_op, last_op = slices[index].ops
    length = clock.end(forward) - clock.start(forward)
    return clock.start(forward) + length * Fraction(op - first_op, last_op - first_op)
