"""A device's program in the making: its passes, and its posts between and inside of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from spindle_cli.account.activations import PASSES_AHEAD, Layout
from spindle_cli.account.step_end import update_parts
from spindle_cli.account.types import ParameterGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Slice
from spindle_cli.program.clock import Compute, PassClock
from spindle_cli.program.lanes import Lane
from spindle_cli.program.sum_times import Completion, in_need, run_back
from spindle_cli.program.transfers import Directory, TimedTransfer
from spindle_cli.program.types import SENDS, Action, Kind, StepSettings

# Of what has the same time the losses come first, which all have run forward for; then the sums, which may
# start while the pass that ends then still runs.
_LOSSES, _SUMS, _OTHERS = range(3)


class Post(NamedTuple):
    """Something to post, in the order of all devices: by time, then by what it is. `before`:
    how many of the device's passes come before it.
    """

    time: int
    rank: int
    number: int
    action: Action
    before: int


@dataclass
class DeviceBuilder:
    """A device's program in the making: `write` merges its passes with its posts.

    `begin`: the clock if no pass waits for parameters, by which these are needed. `lane`: its passes and
    posts by the clock. `groups`: those that it shares with others. `times`: of each group's sum.
    `is_reached`: by slice, whether gradients come to it. `order`: the place of each pass among all.
    `own_bytes`: of gradients that it sums with nobody.
    `completing`: the first op of each of its slices that completes a group with it.
    """

    device: int
    computes: Sequence[Compute]
    slices: Sequence[Slice]
    layouts: Sequence[Layout]
    clock: PassClock
    begin: PassClock
    directory: Directory
    lane: Lane
    groups: Sequence[ParameterGroup]
    times: Mapping[int, int]
    is_reached: Sequence[bool]
    order: Mapping[Compute, int]
    own_bytes: int = 0
    posts: list[Post] = field(default_factory=list)
    completing: dict[tuple[int, int], int] = field(default_factory=dict)  # (slice, group) -> op

    @cached_property
    def _by_pass(self) -> dict[int, list[ParameterGroup]]:
        """By slice, the groups that it gathers, or sums, while it runs."""
        groups_by_slice: dict[int, list[ParameterGroup]] = {}
        for group in self.groups:
            for index in group.slices if group.sharding.is_by_pass else ():
                groups_by_slice.setdefault(index, []).append(group)
        return groups_by_slice

    def _add(self, time: int, rank: int, number: int, action: Action) -> None:
        """Register what this device posts and is no sum."""
        self.posts.append(Post(time, rank, number, action, self.lane.before(time)))

    def add_losses(self, time: int) -> None:
        """Register the sum of the losses."""
        losses = Action(Kind.LOSSES, communicator=self.directory.of_all())
        self._add(time, _LOSSES, 0, losses)

    def add_transfer(self, timed: TimedTransfer) -> None:
        """Register a transfer of which this device is one end."""
        transfer = timed.transfer
        if transfer.source == self.device:
            kind = Kind.SEND_GRAD if transfer.is_gradient else Kind.SEND
        else:
            kind = Kind.RECV_GRAD if transfer.is_gradient else Kind.RECV
        action = Action(kind, transfer=transfer, communicator=self.directory.of_transfer(transfer))
        self._add(timed.time, _OTHERS, transfer.key + 1, action)

    def add_sums(self) -> None:
        """Register the sums of the groups, but of those that are summed in each pass alone."""
        for group in (group for group in self.groups if group.is_summed_at_once):
            time, communicator = self.times[group.index], self.directory.of_sum(group.devices)
            action = Action(Kind.SUM, group=group.index, communicator=communicator)
            before = self.lane.before_sum(time, group.slices)
            self.posts.append(Post(time, _SUMS, group.index, action, before))
            completion = Completion.of(group, self.clock)
            if time == completion.time:
                self.completing[completion.slice_index, group.index] = -completion.minus_op

    def write(self, settings: StepSettings) -> list[Action]:
        """The device's actions: its passes, and its posts in the order of all devices behind as many of these
        as each of them says.
        """
        self.posts.sort(key=lambda post: post[:3])
        actions: list[Action] = []
        posted = 0
        for number, compute in enumerate(self.computes):
            while posted < len(self.posts) and self.posts[posted].before <= number:
                actions.append(self.posts[posted].action)
                posted += 1
            actions.append(self._compute(compute))
        actions.extend(post.action for post in self.posts[posted:])
        actions = self._with_left(self._with_ops(actions))
        everyone = self.directory.of_all()
        if settings.sharded:
            actions.extend(self._flags())
        if settings.checks_gradients:
            actions.append(Action(Kind.NORM, communicator=everyone))
        if settings.updates_early:
            actions.extend(self._updates())
        actions.append(Action(Kind.STEP))
        if settings.sharded:
            actions.extend(self._gathers())
        return actions

    def _compute(self, compute: Compute) -> Action:
        kind, index = compute
        layout = self.layouts[index]
        communicator = self.directory.of_share(layout, layout.share_of[self.device])
        shards = {
            self.directory.of_shards(group.in_replica_group(self.device).devices)
            for group in self._by_pass.get(index, ())
            if (self.is_reached[index] if kind is Kind.BACKWARD else group.sharding.is_fetched)
        }
        return Action(kind, slice_index=index, communicator=communicator, shards=tuple(sorted(shards)))

    def _with_ops(self, actions: Iterable[Action]) -> list[Action]:
        """Give each sum the op of the slice before it with which it may start: the one that completes it, or
        where another slice does, the first behind which that is through. Behind other posts, or where the
        pass itself waits for other devices, which may wait for this sum, it is the slice's first, when the
        pass is through. Never before an earlier sum. A device that has run nothing backward, and adds
        nothing, has no op for it; nor has a sum over replica groups behind a pass that sums what these share
        out, which is there when that pass has ended, and none that follows it.
        """
        written: list[Action] = []
        slice_index: int | None = None
        first_op, least = 0, 0
        may_be_inside, shares_out, is_behind = True, False, False
        for action in actions:
            if action.kind is Kind.BACKWARD:
                assert action.slice_index is not None, "a B has a slice"
                slice_index = action.slice_index
                first_op, last_op = self.slices[slice_index].ops
                least = last_op - 1
                may_be_inside = action.communicator is None and not action.shards
                shares_out, is_behind = bool(action.shards), False
            elif (
                action.kind is Kind.SUM and shares_out and (is_behind or self._is_over_replica_groups(action))
            ):
                is_behind = True
            elif action.kind is Kind.SUM and slice_index is not None:
                assert action.group is not None, "a SUM has a group"
                completing = self.completing.get((slice_index, action.group), first_op)
                least = min(least, self._op_of(slice_index, action.group) if may_be_inside else completing)
                action = replace(action, op=least)
            else:
                may_be_inside = False
            written.append(action)
        return written

    def _with_left(self, actions: Iterable[Action]) -> list[Action]:
        """Give each pass what is given up before it of all that was sent: what went over an edge, before the
        first of the device's passes behind the producer's backward pass, when gradients come back over it;
        the gradients themselves so many passes later, as that pass may still wait for them. Messages that
        start together are given up together.
        """
        written: list[Action] = []
        positions = [self.order[compute] for compute in self.computes]
        sent: list[tuple[list[int], int]] = []  # keys, and before which of the own passes they are given up
        begun = 0
        together: tuple[Kind, int | None] | None = None  # of the last of these
        for action in actions:
            if action.kind in SENDS and action.transfer is not None:
                needed_to = bisect_right(positions, self.order[Kind.BACKWARD, action.transfer.producer])
                needed_to += PASSES_AHEAD if action.transfer.is_gradient else 0
                if together == (action.kind, action.communicator):
                    keys, needed_before = sent.pop()
                    sent.append(([*keys, action.transfer.key], max(needed_to, needed_before)))
                else:
                    sent.append(([action.transfer.key], needed_to))
                together = action.kind, action.communicator
            else:
                together = None
            if action.slice_index is not None:
                left = sorted(key for keys, needed_to in sent if needed_to <= begun for key in keys)
                sent = [entry for entry in sent if entry[1] > begun]
                action = replace(action, left=tuple(left))
                begun += 1
            written.append(action)
        return written

    def _is_over_replica_groups(self, action: Action) -> bool:
        return any(group.replica_groups and group.index == action.group for group in self.groups)

    def _op_of(self, slice_index: int, number: int) -> int:
        """The op of a slice with whose backward the sum of a group may start: the one behind which all slices
        have added to it by the clock, give or take half an op, but not before this one has.
        """
        if (slice_index, number) in self.completing:
            return self.completing[slice_index, number]
        group = next(group for group in self.groups if group.index == number)
        first_ops = group.first_ops
        if group.replica_groups:  # there when whole passes are through
            first_ops = tuple(self.slices[index].ops[0] for index in group.slices)
        uses = zip(group.slices, first_ops, strict=True)
        complete = max(run_back(self.clock, self.slices, *use) for use in uses)
        first_op, last_op = self.slices[slice_index].ops
        completing_op = dict(zip(group.slices, group.first_ops, strict=True)).get(slice_index, last_op - 1)
        half = Fraction(1, 2)
        behind = (
            op
            for op in range(completing_op, first_op, -1)
            if run_back(self.clock, self.slices, slice_index, op - half) >= complete
        )
        return next(behind, first_op)

    def _updates(self) -> list[Action]:
        """Update what is complete, part by part; the last part is left to STEP, which has all else to wait
        for.
        """
        trained = [group for group in self.groups if group.is_trained]
        parts = update_parts(self.own_bytes, trained)
        return [Action(Kind.UPDATE, group=max(part.groups, default=None)) for part in parts[:-1]]

    def _flags(self) -> list[Action]:
        """The flags of each communicator over which what is shared out is summed. Only the update takes them:
        behind all sums, they keep none of another communicator from starting inside a pass.
        """
        shared = {
            self.directory.of_sum(group.devices)
            for group in self.groups
            if group.is_trained and group.sharding is not Sharding.NONE
        }
        return [Action(Kind.FLAGS, communicator=communicator) for communicator in sorted(shared)]

    def _gathers(self) -> list[Action]:
        """Hand on what was updated, but what is gathered for each pass by one replica group."""
        return [
            Action(Kind.GATHER, group=group.index, communicator=self.directory.of_sum(group.devices))
            for group in in_need(self.groups, self.begin, self.slices)
        ]
