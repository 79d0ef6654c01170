"""Derive every device's program from a plan.

1. edges: which slice takes whose output; one order of all passes           (account/activations.py)
2. clock: when each pass would run, behind chunks and gathers that it needs  (clock.py)
3. transfers: these chunks, forward and back, in one order                   (transfers.py)
4. groups: parameters summed together, in the order they are complete        (account/groups.py)
5. communicators: what all of it goes over                                   (transfers.py)
6. actions: each device's own passes, with its posts between them            (device_builder.py)

Everything that is communicated has a time of the clock, and so a place in one order of all of it. A device
posts its own in that order, each before the first of its passes that ends later; but sums that a pass adds
to behind it (sum_times.py). So what a pass takes is posted before it, what it makes after it, and no device
posts two things the other way round than another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from spindle_cli.account.activations import Layout, backward_order, pass_order, slice_edges, slice_layouts
from spindle_cli.account.device_memory import device_memory, optimizer_steps_s
from spindle_cli.account.groups import ParameterUses, gathered_matrices, parameter_groups, with_ways
from spindle_cli.account.joint import groups_of_member, joint_groups
from spindle_cli.account.step_end import own_bytes
from spindle_cli.account.traffic import uses_of, with_matrices
from spindle_cli.account.types import Edge, ParameterGroup, Pass
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.program.clock import Clocks, Compute, PassClock
from spindle_cli.program.device_builder import DeviceBuilder
from spindle_cli.program.lanes import Lane, lane_passes, other_posts
from spindle_cli.program.reached import reached_slices
from spindle_cli.program.sum_times import (
    Completion,
    complete_at,
    last_update_s,
    parameters_there,
    sum_time,
    sums_inside,
)
from spindle_cli.program.transfers import (
    Directory,
    TimedTransfer,
    find_communicators,
    find_transfers,
    in_order,
    maker_of,
    taker_of,
)
from spindle_cli.program.types import Communicator, Kind, Program, StepSettings, Transfer


def link(
    plan: Plan, parameters: ParameterUses | None = None, settings: StepSettings | None = None
) -> Program:
    """Every device's actions for one iteration.

    Args:
        plan: a plan that passes `check`; where it has plans for sets of tasks, or is one of them, its program
            is one of those that `link_sets` gives.
        parameters: the trained parameters of each op, from who knows them exactly; every rank must give the
            same. Without them, what the plan says (`planned_parameters`).
        settings: of the training; without them, what the plan knows of it.
    """
    return link_sets(plan, parameters, settings).whole


@dataclass(frozen=True)
class Programs:
    """The programs of a plan: of all tasks, and of each set of tasks that it has a plan for, by its tasks.

    They have the same communicators, and their groups are parts of the same sums: what several of them sum
    has the same blocks, devices and fragment in each.

    Attributes:
        groups: of all of them together.
    """

    whole: Program
    of_sets: Mapping[tuple[str, ...], Program]
    groups: tuple[ParameterGroup, ...]

    @property
    def all(self) -> tuple[Program, ...]:
        """All programs, that of all tasks first."""
        return (self.whole, *self.of_sets.values())


def link_sets(
    plan: Plan, parameters: ParameterUses | None = None, settings: StepSettings | None = None
) -> Programs:
    """The programs of a plan's steps; the arguments are those of `link`."""
    settings = settings or StepSettings(
        plan.optimizer_state_sharded, plan.clips_gradients, plan.scales_losses, plan.updates_by_parts
    )
    uses = uses_of(plan) if parameters is None else parameters
    sets = plan.set_plans
    routed_plans = [_Moving.of(set_plan) for set_plan in (plan, *sets.values())]
    groups = _groups_of_all(plan, routed_plans[0].order, uses, sharded=settings.sharded)
    if settings.sharded:
        routed_plans = [routed_plan.behind_gathers(groups) for routed_plan in routed_plans]
    communicators = find_communicators(
        plan.cluster.num_devices,
        [transfer for routed_plan in routed_plans for transfer in routed_plan.routed],
        groups,
        [layout for routed_plan in routed_plans for layout in routed_plan.layouts],
    )
    directory = Directory(communicators)
    whole, *of_sets = (
        routed_plan.program(groups, directory, communicators, settings) for routed_plan in routed_plans
    )
    together = whole.groups if plan.joint is None else groups
    return Programs(whole, dict(zip(sets, of_sets, strict=True)), together)


def _groups_of_all(
    plan: Plan, order: Sequence[Pass], uses: ParameterUses, *, sharded: bool
) -> tuple[ParameterGroup, ...]:
    width = plan.gradient_bytes_per_param
    if plan.joint is None:
        last_first = backward_order(order)[::-1]
        groups = parameter_groups(plan.slices, last_first, uses, plan.cluster, width)
        groups = with_matrices(groups, gathered_matrices(plan.slices, plan.by_name, plan.accumulate))
    else:
        groups = joint_groups(plan.joint, uses, plan.cluster, width)
    return with_ways(groups, plan.shard_weights, plan.cluster, sharded=sharded, by_node=plan.sums_by_node)


class _Posting(NamedTuple):
    """`transfers`: in the order in which all devices post them. `losses_at`: when the losses have their
    place. `lanes`: of each device. `groups`: in the order of their sums. `times`: of these, by group.
    """

    transfers: Sequence[TimedTransfer]
    losses_at: int
    lanes: Sequence[Lane]
    groups: tuple[ParameterGroup, ...]
    times: Mapping[int, int]


@dataclass(frozen=True)
class _Moving:
    """Steps 1 to 3 of a plan. `routed`: all transfers, in no order. `begin`: the clock if no pass waits for
    parameters. `there`: of slices that do, the tick from which they may run forward.
    """

    plan: Plan
    layouts: tuple[Layout, ...]
    edges: tuple[Edge, ...]
    order: tuple[Pass, ...]
    routed: Sequence[Transfer]
    clocks: Clocks
    begin: PassClock
    clock: PassClock
    there: Mapping[int, int]

    @classmethod
    def of(cls, plan: Plan) -> _Moving:
        layouts, edges = slice_layouts(plan), slice_edges(plan)
        order = pass_order(plan, edges)
        routed = find_transfers(plan, layouts, edges)
        clocks = Clocks(plan, order, layouts, edges)
        clock = clocks.clock()
        return cls(plan, layouts, edges, order, routed, clocks, clock, clock, {})

    def behind_gathers(self, groups: tuple[ParameterGroup, ...]) -> _Moving:
        """With the clock of the step's last batch, of a step that begins with gathers of these groups."""
        if self.plan.accumulate > 1:
            return self
        there = parameters_there(self._groups_of_plan(groups), self.begin, self.plan)
        return replace(self, clock=self.clocks.clock(there), there=there)

    def _groups_of_plan(self, groups: tuple[ParameterGroup, ...]) -> tuple[ParameterGroup, ...]:
        """Choose this plan's groups among those of all plans that run in turn."""
        joint = self.plan.joint
        return groups if joint is None else groups_of_member(joint, groups, self.plan.member)

    @cached_property
    def computes(self) -> Mapping[int, Sequence[Compute]]:
        """Each device's passes in the order in which it runs them."""
        return _computes(self.plan, self.order)

    @cached_property
    def places(self) -> Mapping[Compute, int]:
        """The place of each pass in the order of all."""
        kinds = {True: Kind.BACKWARD, False: Kind.FORWARD}
        return {(kinds[is_backward], index): place for place, (index, is_backward) in enumerate(self.order)}

    def program(
        self,
        groups: tuple[ParameterGroup, ...],
        directory: Directory,
        communicators: tuple[Communicator, ...],
        settings: StepSettings,
    ) -> Program:
        """Steps 4 to 6. `groups`: of all plans that run in turn with this one."""
        plan = self.plan
        posting = self._posting(self._groups_of_plan(groups), directory, settings)
        groups, times = posting.groups, posting.times
        reached = reached_slices(len(plan.slices), groups, self.edges)
        local_bytes = own_bytes(groups)
        builders = {
            device: DeviceBuilder(
                device,
                computes,
                plan.slices,
                self.layouts,
                self.clock,
                self.begin,
                directory,
                posting.lanes[device],
                [group for group in groups if device in group.devices and len(group.devices) > 1],
                times,
                reached,
                self.places,
                local_bytes.get(device, 0),
            )
            for device, computes in self.computes.items()
        }
        for timed in posting.transfers:
            builders[timed.transfer.source].add_transfer(timed)
            builders[timed.transfer.destination].add_transfer(timed)
        for builder in builders.values():
            builder.add_losses(posting.losses_at)
            builder.add_sums()
        return Program(
            plan=plan,
            slices=plan.slices,
            layouts=self.layouts,
            order=self.order,
            edges=self.edges,
            groups=groups,
            communicators=communicators,
            settings=settings,
            actions={device: tuple(builder.write(settings)) for device, builder in builders.items()},
        )

    def _posting(
        self, groups: Sequence[ParameterGroup], directory: Directory, settings: StepSettings
    ) -> _Posting:
        """Messages that come in a backward pass are posted ahead of it, and hold up all sums that start
        inside of it; or behind it, and come later themselves: whichever lets the last device update sooner.
        """
        inside = sums_inside(groups, self.clock, self.plan.slices, self.layouts)
        ahead, behind = (
            in_order(self.routed, self.clock, self.computes, held_up) for held_up in (None, inside)
        )
        posting = self._with_losses(ahead, groups, directory, settings)
        if [timed.time for timed in ahead] == [timed.time for timed in behind]:
            return posting
        posted_behind = self._with_losses(behind, groups, directory, settings)
        return posted_behind if self._ends_s(posted_behind) < self._ends_s(posting) else posting

    def _with_losses(
        self,
        transfers: Sequence[TimedTransfer],
        groups: Sequence[ParameterGroup],
        directory: Directory,
        settings: StepSettings,
    ) -> _Posting:
        """The losses come as soon as all have run forward, so that updates may begin. A device that is in a
        backward pass then posts them ahead of it, and all sums that start inside of it have to wait until
        the last device has run forward: where that holds any sum up, and no update of parts waits for the
        losses, they come behind all passes, unless a device that ends before the others would be later with
        its own update than they are with theirs.
        """
        clock = self.clock
        early = self._posting_at(clock.forward_ended, transfers, groups, directory)
        if settings.updates_early or clock.backward_began >= clock.forward_ended:
            return early
        late = self._posting_at(clock.ended + 1, transfers, groups, directory)
        if sorted(early.times.values()) == sorted(late.times.values()):
            return early
        if settings.checks_gradients:  # every update waits for the last sum
            return late
        return early if self._ends_s(early) < self._ends_s(late) else late

    def _ends_s(self, posting: _Posting) -> float:
        """When the last device has updated its parameters, if messages are sent when they are posted."""
        plan = self.plan
        posted: dict[tuple[Compute, Compute], int] = {}
        for timed in posting.transfers:
            ends = maker_of(timed.transfer), taker_of(timed.transfer)
            posted[ends] = max(posted.get(ends, 0), timed.time)
        clock = self.clocks.clock(self.there, posted)
        times = {
            group.index: max(posting.times[group.index], complete_at(group, clock, plan.slices))
            for group in posting.groups
        }
        return last_update_s(posting.groups, times, posting.losses_at, clock, plan, self._updates_s)

    @cached_property
    def _updates_s(self) -> Sequence[float]:
        """The seconds that each device's update takes."""
        plan = self.plan
        held = device_memory(plan.metaops, plan.slices, plan.cluster, plan, turn=plan.turn)
        return optimizer_steps_s(held, plan.optimizer_s_per_byte)

    def _posting_at(
        self,
        losses_at: int,
        transfers: Sequence[TimedTransfer],
        groups: Sequence[ParameterGroup],
        directory: Directory,
    ) -> _Posting:
        posts = other_posts(losses_at, transfers, self.plan.cluster.num_devices)
        lanes = [
            Lane.of(lane_passes(device, computes, self.clock, self.layouts, directory, groups), posts[device])
            for device, computes in sorted(self.computes.items())
        ]
        ordered, times = _in_order(groups, self.clock, self.plan.slices, lanes)
        return _Posting(transfers, losses_at, lanes, ordered, times)


def _computes(plan: Plan, order: Sequence[Pass]) -> dict[int, list[Compute]]:
    """Each device's passes in the order in which it runs them."""
    computes: dict[int, list[Compute]] = {device: [] for device in range(plan.cluster.num_devices)}
    for index, is_backward in order:
        for device in plan.slices[index].devices:
            computes[device].append((Kind.BACKWARD if is_backward else Kind.FORWARD, index))
    return computes


def _in_order(
    groups: Iterable[ParameterGroup], clock: PassClock, slices: Sequence[Slice], lanes: Sequence[Lane]
) -> tuple[tuple[ParameterGroup, ...], dict[int, int]]:
    """The groups in the order of their sums, numbered anew, and the times of these sums by number."""
    timed = [(sum_time(group, clock, slices, lanes), group) for group in groups]
    timed.sort(key=lambda entry: (entry[0], Completion.of(entry[1], clock), entry[1].index))
    ordered = tuple(replace(group, index=index) for index, (_, group) in enumerate(timed))
    return ordered, {index: time for index, (time, _) in enumerate(timed)}
