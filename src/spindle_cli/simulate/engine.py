"""Every device runs its program: posts at once, computes one after another, waits for what it takes.

Nothing here comes from the plan's schedule: a slice starts when its device gets to it and all it takes has
arrived. A step takes the program once for each of its batches; what belongs to the step alone comes with the
last one. It is one of many like it: it begins with the gathers of the one before.

What each device holds in memory is `account/device_memory.py` at the times of the simulation: from the
start of a pass a device holds the most that the pass takes, from its end on what stays of it. So what is
simulated and what is predicted peak at the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from spindle_cli.account.compute import slice_stretches
from spindle_cli.account.device_memory import device_memory, memory_by_pass, optimizer_steps_s
from spindle_cli.account.traffic import communicator_bytes
from spindle_cli.account.types import Collective, Together
from spindle_cli.costs.beyond_curve import BeyondCurve, forwards_again, stalls
from spindle_cli.costs.shares import times_of, times_of_shares
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.program.transfers import gathering_s
from spindle_cli.program.types import COMPUTES, ONCE_A_STEP, RECEIVES, SENDS, Action, Kind, Program, Transfer
from spindle_cli.simulate.network import Clock
from spindle_cli.simulate.traffic import Traffic
from spindle_cli.simulate.types import (
    Activity,
    Cause,
    Collected,
    MemoryStep,
    OptimizerStep,
    Passage,
    Simulation,
    Span,
    Wait,
)

_Compute = tuple[Kind, int]  # F or B, and the slice
_Posted = tuple[Collective, int | None, tuple[int, ...]]  # with its group and its devices
_COLLECTIVES = {
    Kind.LOSSES: Collective.LOSSES,
    Kind.SUM: Collective.SUM,
    Kind.FLAGS: Collective.FLAGS,
    Kind.NORM: Collective.NORM,
    Kind.GATHER: Collective.GATHER,
}


# What waits for collectives.
_AT_END = (Kind.NORM, Kind.UPDATE, Kind.STEP)


@dataclass(slots=True)
class _Device:
    """A device at a place of its step.

    Attributes:
        batches: the actions of each batch.
        batch, place: where it is.
        missing: transfers that each compute of the batch still waits for.
        begun: sums that begin during the backward slice that runs.
        open: collectives of this step that are posted and not ended.
        updated: so many of its parts are updated.
        leaving: what it has sent and has not left, by key and batch.
        paused_at: the slice whose forward pass waits for parameters, and from which op on.
    """

    number: int
    batches: tuple[tuple[Action, ...], ...]
    batch: int = 0
    place: int = 0
    missing: dict[_Compute, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    open: set[_Posted] = field(default_factory=set)
    updated: int = 0
    leaving: set[tuple[int, int]] = field(default_factory=set)
    waiting_since: float | None = None
    paused_at: tuple[int, int] | None = None

    @property
    def action(self) -> Action | None:
        """The action that comes next; None at the end."""
        actions = self.batches[self.batch]
        return actions[self.place] if self.place < len(actions) else None

    @property
    def is_held_up(self) -> bool:
        """Whether the compute that comes next waits for what it takes, or for what has to have left."""
        action = self.action
        assert action is not None and action.slice_index is not None, "asked of a compute"
        left = any((key, self.batch) in self.leaving for key in action.left)
        return left or bool(self.missing.get((action.kind, action.slice_index)))

    def first_together(self) -> int:
        """The place of the first of the messages that start together with the one that comes next: its
        neighbours of the same kind, and of receives those for the same pass.
        """
        actions, place = self.batches[self.batch], self.place
        while place > 0 and _alike(actions[place - 1], actions[self.place]):
            place -= 1
        return place

    def begin(self, batch: int) -> None:
        """Come to a batch, or where it has nothing to do in it to the next; of what that takes nothing is
        there.
        """
        while not self.batches[batch] and batch + 1 < len(self.batches):
            batch += 1
        self.batch, self.place = batch, 0
        self.missing.clear()
        for action in self.batches[batch]:
            if action.kind in RECEIVES and action.transfer is not None:
                compute = _taker(action.transfer)
                self.missing[compute] = self.missing.get(compute, 0) + 1


class Engine:
    """One step of a program; to be run once."""

    def __init__(self, program: Program) -> None:
        plan = program.plan
        self._program = program
        self._clock = Clock()
        self._traffic = Traffic(plan.cluster, self._clock, self._arrived, self._ended)
        self._together = {
            (collective.kind, collective.group, collective.devices): collective
            for collective in program.collectives
        }
        self._awaited = AwaitedOps(program)
        self._ledger = Ledger(plan)
        self._durations = slice_durations(program)
        self._step_s = step_durations(plan)
        self._devices = [
            _Device(number, _batches(program.actions[number], plan.accumulate))
            for number in sorted(program.actions)
        ]
        # Passes that gather parameters, or sum gradients, over all devices of their slice.
        self._meeting = {
            (action.kind, action.slice_index)
            for actions in program.actions.values()
            for action in actions
            if action.shards
        }
        self._gathered: dict[tuple[Kind, int, int], list[tuple[_Device, float]]] = {}
        self._spans: list[Span] = []
        self._waits: list[Wait] = []
        self._steps: list[OptimizerStep] = []

    def run(self) -> Simulation:
        """Run all devices from their first action to their last."""
        for device in self._devices:
            for action in self._program.actions[device.number]:
                if action.kind is Kind.GATHER:
                    self._post(device, action)
        for device in self._devices:
            device.begin(0)
            self._advance(device)
        while events := self._clock.next_moment():
            for event in events:
                event()
            self._traffic.settle()
        assert all(device.action is None for device in self._devices), "proved programs end"
        return Simulation(
            plan=self._program.plan,
            step_s=self._clock.now_s,
            spans=tuple(sorted(self._spans, key=lambda span: (span.start_s, span.device))),
            passages=tuple(
                sorted(self._traffic.passages, key=lambda passage: (passage.start_s, passage.key))
            ),
            collected=tuple(sorted(self._traffic.collected, key=lambda done: (done.start_s, done.devices))),
            waits=tuple(sorted(self._waits, key=lambda wait: (wait.start_s, wait.device))),
            steps=tuple(sorted(self._steps, key=lambda step: (step.device, step.start_s))),
            memory=self._ledger.steps(),
        )

    def _advance(self, device: _Device) -> None:
        """Run a device until it computes, waits, or is done."""
        while (action := device.action) is not None:
            if action.transfer is not None:
                assert action.communicator is not None, "a message has a communicator"
                if action.kind in SENDS:
                    device.leaving.add((action.transfer.key, device.batch))
                together = (device.batch, device.first_together())
                self._traffic.post(device.number, action.transfer, action.communicator, together)
            elif action.kind is Kind.SUM:
                self._come_to_sum(device, action)
            elif action.kind in (Kind.LOSSES, Kind.FLAGS):
                self._open(device, action)
            elif action.kind in COMPUTES:
                assert action.slice_index is not None, "an F or B has a slice"
                self._reach(device, (action.kind, action.slice_index))
                return
            elif not self._end_step(device, action):
                return
            self._next(device)

    def _come_to_sum(self, device: _Device, action: Action) -> None:
        assert action.group is not None, "a SUM has a group"
        if action.group in device.begun:
            device.begun.remove(action.group)
        else:
            self._open(device, action)

    def _next(self, device: _Device) -> None:
        device.place += 1
        if device.action is None and device.batch + 1 < len(device.batches):
            device.begin(device.batch + 1)

    def _open(self, device: _Device, action: Action) -> None:
        """Post what the device waits for at the step's end."""
        device.open.add(self._posted(action))
        self._post(device, action)

    def _posted(self, action: Action) -> _Posted:
        assert action.communicator is not None, "a collective has a communicator"
        devices = self._program.communicators[action.communicator].ranks
        return _COLLECTIVES[action.kind], action.group, devices

    def _post(self, device: _Device, action: Action) -> None:
        """Let a device take part in the collective that an action names."""
        assert action.communicator is not None, "a collective has a communicator"
        self._traffic.join(device.number, self._together[self._posted(action)], action.communicator)

    def _end_step(self, device: _Device, action: Action) -> bool:
        """Come to the norm or an update, which wait for what was posted; whether to go on at once."""
        self._ledger.finish_sums(device.number, self._clock.now_s)
        if self._awaits(device, action):
            device.waiting_since = self._clock.now_s
            return False
        if action.kind is Kind.NORM:
            self._open(device, action)
            return True
        self._update(device, action)
        return False

    def _awaits(self, device: _Device, action: Action) -> bool:
        """Whether something is under way that the norm or an update waits for: all that was posted; but the
        update of a part waits for the losses and for its own sums alone.
        """
        if action.kind is not Kind.UPDATE:
            return bool(device.open)
        awaited = self._program.updates[device.number][device.updated].groups
        return any(kind is Collective.LOSSES or group in awaited for kind, group, _ in device.open)

    def _update(self, device: _Device, action: Action) -> None:
        start_s = self._clock.now_s
        part = self._program.updates[device.number][device.updated]

        def end() -> None:
            self._steps.append(OptimizerStep(device.number, start_s, self._clock.now_s))
            if action.kind is Kind.STEP:
                self._ledger.end_update(device.number, self._clock.now_s)
            device.updated += 1
            self._next(device)
            self._advance(device)

        self._clock.at(start_s + part.seconds(self._step_s[device.number]), end)

    def _reach(self, device: _Device, compute: _Compute) -> None:
        """A device gets to a compute: it starts if everything is there, else it waits."""
        if device.is_held_up:
            device.waiting_since = self._clock.now_s
        else:
            self._gather(device, compute)

    def _gather(self, device: _Device, compute: _Compute) -> None:
        """A device is ready; it starts together with those that it sums something with inside the pass."""
        kind, index = compute
        layout = self._program.layouts[index]
        if compute in self._meeting:
            together = layout.devices
        else:
            together = layout.partners(layout.share_of[device.number])
        if not together:
            self._start(device, compute)
            return
        key = (kind, index, min(together))
        partners = self._gathered.setdefault(key, [])
        partners.append((device, self._clock.now_s))
        if len(partners) < len(together):
            return
        for partner, ready_s in self._gathered.pop(key):
            if ready_s < self._clock.now_s:
                partner.waiting_since = ready_s
                self._end_wait(partner, index, Cause.PARTNER, device.number, index, self._clock.now_s)
            self._start(partner, compute)

    def _start(self, device: _Device, compute: _Compute) -> None:
        kind, index = compute
        now_s = self._clock.now_s
        self._ledger.start_pass(device.number, index, now_s, is_backward=kind is Kind.BACKWARD)
        if kind is Kind.FORWARD:
            self._run_forward(device, index, self._program.slices[index].ops[0], now_s)
        else:
            length_s = self._durations[index].backward_s
            self._begin_sums(device, index, length_s)
            self._clock.at(now_s + length_s, partial(self._end, device, compute, now_s))

    def _run_forward(self, device: _Device, index: int, op: int, start_s: float) -> None:
        """Run a slice forward from an op on, up to one whose parameters are still on their way; since
        `start_s` nothing kept it waiting.
        """
        first, last = self._program.slices[index].ops
        until = self._awaited.next_op(device.number, index, op)
        now_s = self._clock.now_s
        if op == last:
            self._end(device, (Kind.FORWARD, index), start_s)
        elif until == op:
            if now_s > start_s:
                self._spans.append(Span(device.number, Activity.FORWARD, index, start_s, now_s, device.batch))
            device.waiting_since, device.paused_at = now_s, (index, op)
        else:
            until = last if until is None else until
            length_s = self._durations[index].forward_s * (until - op) / (last - first)
            self._clock.at(now_s + length_s, partial(self._run_forward, device, index, until, start_s))

    def _begin_sums(self, device: _Device, index: int, length_s: float) -> None:
        """Let the sums that follow a backward slice, up to the next pass, begin where the op that completes
        them is through.
        """
        first, last = self._program.slices[index].ops
        for action in device.batches[device.batch][device.place + 1 :]:
            if action.kind in COMPUTES or action.kind in (Kind.UPDATE, Kind.STEP):
                return
            if action.kind is Kind.SUM and action.op is not None:
                assert action.group is not None, "a SUM has a group"
                done = (last - action.op) / (last - first)
                device.begun.add(action.group)
                device.open.add(self._posted(action))
                self._clock.at(self._clock.now_s + done * length_s, partial(self._post, device, action))

    def _end(self, device: _Device, compute: _Compute, start_s: float) -> None:
        kind, index = compute
        now_s = self._clock.now_s
        activity = Activity.FORWARD if kind is Kind.FORWARD else Activity.BACKWARD
        self._spans.append(Span(device.number, activity, index, start_s, now_s, device.batch))
        self._ledger.end_pass(device.number, index, now_s, is_backward=kind is Kind.BACKWARD)
        self._next(device)
        self._advance(device)

    def _arrived(self, transfer: Transfer, passage: Passage) -> None:
        """A transfer has ended: its taker may go on, if it stands there and this was the last it missed; and
        whoever has sent it, if that was the last to have left.
        """
        ends = transfer.producer, transfer.consumer
        source, taker = reversed(ends) if transfer.is_gradient else ends
        device, sender = self._devices[transfer.destination], self._devices[transfer.source]
        compute = _taker(transfer)
        device.missing[compute] -= 1
        action = device.action
        if action is not None and (action.kind, action.slice_index) == compute:
            cause = Cause.GRADIENT if transfer.is_gradient else Cause.ACTIVATION
            self._go_on(device, cause, transfer.source, source, passage.posted_s)
        sender.leaving.remove((transfer.key, passage.batch))
        action = sender.action
        if action is not None and passage.batch == sender.batch and transfer.key in action.left:
            self._go_on(sender, Cause.LEAVING, transfer.destination, taker, passage.posted_s)

    def _go_on(
        self, device: _Device, cause: Cause, source: int, source_index: int, moving_since_s: float
    ) -> None:
        """Let a device begin the compute that it has come to, if nothing holds it up any more."""
        if device.waiting_since is None or device.is_held_up:
            return
        action = device.action
        assert action is not None and action.slice_index is not None, "nothing else is held up"
        self._end_wait(device, action.slice_index, cause, source, source_index, moving_since_s)
        self._gather(device, (action.kind, action.slice_index))

    def _ended(self, together: Together, done: Collected, last_device: int) -> None:
        """A collective has ended: those of its devices that only wait for it go on."""
        is_gather = together.kind is Collective.GATHER
        if is_gather and together.group is not None:
            self._awaited.end(together.group)
        for number in done.devices:
            device = self._devices[number]
            if is_gather:
                self._resume(device, done, last_device)
                continue
            device.open.remove((together.kind, together.group, together.devices))
            action = device.action
            if action is None or action.kind not in _AT_END or device.waiting_since is None:
                continue
            if not self._awaits(device, action):
                self._end_wait(device, None, Cause.SUM, last_device, None, done.joined_s)
                self._advance(device)

    def _resume(self, device: _Device, done: Collected, last_device: int) -> None:
        """Go on with a forward pass that has waited for parameters, if these were the last."""
        if device.paused_at is None:
            return
        index, op = device.paused_at
        if self._awaited.next_op(device.number, index, op) == op:
            return
        device.paused_at = None
        self._end_wait(device, index, Cause.GATHER, last_device, None, done.joined_s)
        self._run_forward(device, index, op, self._clock.now_s)

    def _end_wait(
        self,
        device: _Device,
        index: int | None,
        cause: Cause,
        source: int,
        source_index: int | None,
        moving_since_s: float,
    ) -> None:
        start_s, end_s = device.waiting_since, self._clock.now_s
        assert start_s is not None, "only a device that waits ends its wait"
        device.waiting_since = None
        if end_s > start_s:
            moving_s = end_s - max(start_s, moving_since_s)
            self._waits.append(
                Wait(device.number, index, cause, source, source_index, start_s, end_s, moving_s)
            )


def _batches(actions: tuple[Action, ...], count: int) -> tuple[tuple[Action, ...], ...]:
    """A device's actions in each of so many batches; those of the last one end with the update."""
    repeated = tuple(action for action in actions if action.kind not in ONCE_A_STEP)
    last = tuple(action for action in actions if action.kind is not Kind.GATHER)
    return (*[repeated] * (count - 1), last)


def _alike(first: Action, second: Action) -> bool:
    """Whether two neighbours start together."""
    if first.transfer is None or second.transfer is None or first.kind is not second.kind:
        return False
    same_pass = first.kind not in RECEIVES or _taker(first.transfer) == _taker(second.transfer)
    return first.communicator == second.communicator and same_pass


def _taker(transfer: Transfer) -> _Compute:
    """The compute that takes what is transferred."""
    if transfer.is_gradient:
        return Kind.BACKWARD, transfer.producer
    return Kind.FORWARD, transfer.consumer


class AwaitedOps:
    """The gathers of the step before that are not through, by who waits for them where."""

    def __init__(self, program: Program) -> None:
        self._pending: set[int] = set()
        self._groups: dict[tuple[int, int], dict[int, list[int]]] = {}  # (device, slice) -> op -> groups
        if not program.settings.sharded:
            return
        for group in program.groups:
            if not group.is_handed_on:
                continue
            self._pending.add(group.index)
            for index, op in group.awaited_ops(program.slices):
                for device in set(program.slices[index].devices).intersection(group.devices):
                    by_op = self._groups.setdefault((device, index), {})
                    by_op.setdefault(op, []).append(group.index)

    def end(self, group: int) -> None:
        """Note that a group's parameters have been gathered."""
        self._pending.discard(group)

    def next_op(self, device: int, index: int, first: int) -> int | None:
        """The first of a slice's ops from `first` on that still waits for parameters on a device."""
        if not self._pending:
            return None
        waiting = (
            op
            for op, groups in self._groups.get((device, index), {}).items()
            if op >= first and not self._pending.isdisjoint(groups)
        )
        return min(waiting, default=None)


class Ledger:
    """Bytes held by every device, over time."""

    def __init__(self, plan: Plan) -> None:
        self._of = memory_by_pass(
            plan.metaops, plan.slices, plan.cluster, plan, communicator_bytes(plan), plan.turn
        )
        self._steps = [[MemoryStep(0.0, memory.idle_bytes)] for memory in self._of]

    def start_pass(self, device: int, index: int, now_s: float, *, is_backward: bool) -> None:
        """Note that a slice starts to run forward or backward."""
        self._set(device, self._of[device].passes[index, is_backward][0], now_s)

    def end_pass(self, device: int, index: int, now_s: float, *, is_backward: bool) -> None:
        """Note that a slice is through forward or backward."""
        self._set(device, self._of[device].passes[index, is_backward][1], now_s)

    def finish_sums(self, device: int, now_s: float) -> None:
        """A device's passes are over: it waits for its sums, and updates its parameters."""
        self._set(device, self._of[device].update_bytes, now_s)

    def end_update(self, device: int, now_s: float) -> None:
        """Note that a device's iteration is over."""
        self._set(device, self._of[device].idle_bytes, now_s)

    def steps(self) -> tuple[tuple[MemoryStep, ...], ...]:
        """The steps of each device's memory, ascending in time."""
        return tuple(tuple(steps) for steps in self._steps)

    def _set(self, device: int, num_bytes: int, now_s: float) -> None:
        steps = self._steps[device]
        if steps[-1].num_bytes != num_bytes:
            steps.append(MemoryStep(now_s, num_bytes))


@dataclass(frozen=True)
class Duration:
    """Seconds of a slice's forward and backward pass."""

    forward_s: float
    backward_s: float


def slice_durations(program: Program) -> tuple[Duration, ...]:
    """The durations of each of the plan's slices, with what its devices do beside it. Ops that are recomputed
    run forward once more in the backward pass; passes wait for what is copied to host memory and back, and
    begin with what they gather of what is sent in parts.

    Raises:
        InputError: the plan holds no curve point for a slice's dp and tp.
    """
    plan = program.plan
    beyond = BeyondCurve(plan.by_name, plan.cluster, plan)
    durations = [_duration(plan, slice_, beyond) for slice_ in plan.slices]
    gathers_s = gathering_s(plan, program.layouts, program.edges)
    for index, (forward_s, backward_s) in gathers_s.items():
        alone = durations[index]
        durations[index] = Duration(alone.forward_s + forward_s, alone.backward_s + backward_s)
    stretches = slice_stretches(
        plan.processor,
        plan.cluster.node_of,
        plan.slices,
        [duration.forward_s + duration.backward_s for duration in durations],
        plan.by_name,
        (
            (transfer.source, transfer.destination, transfer.num_bytes)
            for actions in program.actions.values()
            for action in actions
            if (transfer := action.transfer) is not None and action.kind in (Kind.SEND, Kind.SEND_GRAD)
        ),
        program.collectives,
        plan.accumulate,
    )
    return tuple(
        Duration(duration.forward_s * stretch, duration.backward_s * stretch)
        for duration, stretch in zip(durations, stretches, strict=True)
    )


def step_durations(plan: Plan) -> tuple[float, ...]:
    """Seconds of the optimizer's step on each device."""
    held = device_memory(plan.metaops, plan.slices, plan.cluster, plan, turn=plan.turn)
    return optimizer_steps_s(held, plan.optimizer_s_per_byte)


def _duration(plan: Plan, slice_: Slice, beyond: BeyondCurve) -> Duration:
    metaop = plan.by_name[slice_.metaop]
    op = times_of(metaop, slice_, plan.cluster)
    if op is None:
        raise InputError(
            f"metaops: {slice_.metaop!r}: no curve point, or share, for dp {slice_.dp}, tp {slice_.tp}, used "
            f"by {slice_.label}",
            hint="Make the plan again with this version; `spindle check` lists everything that is wrong with "
            "it.",
        )
    again_s = op.forward_s * forwards_again(slice_, metaop) / slice_.num_ops
    forward_more_s, backward_more_s = beyond.op_s(slice_, metaop, op.forward_s, op.backward_s + again_s)
    forward_s = slice_.num_ops * (op.forward_s + forward_more_s)
    backward_s = slice_.num_ops * (op.backward_s + backward_more_s + again_s)
    waits = stalls(slice_, metaop, plan.cluster, op, times_of_shares(metaop, slice_, plan.cluster))
    return Duration(forward_s + waits.forward_s, backward_s + waits.backward_s)
