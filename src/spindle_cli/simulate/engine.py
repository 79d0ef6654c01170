"""Every device runs its program: posts at once, computes one after another, waits for what it takes.

Nothing here comes from the plan's schedule: a slice starts when its device gets to it and all it takes has
arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from spindle_cli.program.types import Action, Kind, Program, Transfer
from spindle_cli.simulate.clock import Clock
from spindle_cli.simulate.durations import slice_durations, step_durations
from spindle_cli.simulate.ledger import Ledger
from spindle_cli.simulate.traffic import Traffic
from spindle_cli.simulate.types import (
    Activity,
    Cause,
    GroupSum,
    OptimizerStep,
    Passage,
    Simulation,
    Span,
    Wait,
)

_Compute = tuple[Kind, int]  # F or B, and the slice
# Small, or counted with what they belong to: a sum's time is that of its scatter and its gather.
_NOT_TIMED = (Kind.LOSSES, Kind.FLAGS, Kind.NORM, Kind.GATHER)


@dataclass(slots=True)
class _Device:
    """A device at a step of its program.

    `missing`: transfers that each compute still waits for. `begun`: sums that begin during the backward slice
    that runs. `open_sums`: begun and not ended.
    """

    number: int
    actions: tuple[Action, ...]
    step: int = 0
    missing: dict[_Compute, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    open_sums: int = 0
    waiting_since: float | None = None


class Engine:
    """One iteration of a program; to be run once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._clock = Clock()
        self._traffic = Traffic(program, self._clock, self._arrived, self._summed)
        self._ledger = Ledger(program.plan)
        self._durations = slice_durations(program)
        self._step_s = step_durations(program.plan)
        self._devices = [_Device(number, program.actions[number]) for number in sorted(program.actions)]
        self._gathered: dict[tuple[Kind, int, int], list[tuple[_Device, float]]] = {}
        self._spans: list[Span] = []
        self._waits: list[Wait] = []
        self._steps: list[OptimizerStep] = []
        for device in self._devices:
            for action in device.actions:
                if action.kind in (Kind.RECV, Kind.RECV_GRAD) and action.transfer is not None:
                    compute = _taker(action.transfer)
                    device.missing[compute] = device.missing.get(compute, 0) + 1

    def run(self) -> Simulation:
        """From the first action to the last."""
        for device in self._devices:
            self._advance(device)
        while events := self._clock.next_moment():
            for event in events:
                event()
            self._traffic.settle()
        assert all(device.step == len(device.actions) for device in self._devices), "proved programs end"
        return Simulation(
            plan=self._program.plan,
            iteration_s=self._clock.now_s,
            spans=tuple(sorted(self._spans, key=lambda span: (span.start_s, span.device))),
            passages=tuple(
                sorted(self._traffic.passages, key=lambda passage: (passage.start_s, passage.key))
            ),
            sums=tuple(sorted(self._traffic.sums, key=lambda done: (done.start_s, done.group))),
            waits=tuple(sorted(self._waits, key=lambda wait: (wait.start_s, wait.device))),
            steps=tuple(sorted(self._steps, key=lambda step: step.device)),
            memory=self._ledger.steps(),
        )

    def _advance(self, device: _Device) -> None:
        """Run a device until it computes, waits, or is done."""
        while device.step < len(device.actions):
            action = device.actions[device.step]
            if action.transfer is not None:
                self._traffic.post(action.transfer)
            elif action.kind is Kind.SUM:
                assert action.group in device.begun, "a SUM begins during the backward slice before it"
                device.begun.remove(action.group)
            elif action.kind in _NOT_TIMED:
                pass
            elif action.kind is Kind.STEP:
                self._ledger.finish_sums(device.number, self._clock.now_s)
                if device.open_sums:
                    device.waiting_since = self._clock.now_s
                else:
                    self._update(device)
                return
            else:
                assert action.piece is not None, "an F or B has a slice"
                self._reach(device, (action.kind, action.piece))
                return
            device.step += 1

    def _update(self, device: _Device) -> None:
        start_s = self._clock.now_s

        def end() -> None:
            self._steps.append(OptimizerStep(device.number, start_s, self._clock.now_s))
            self._ledger.end_update(device.number, self._clock.now_s)
            device.step += 1
            self._advance(device)

        self._clock.at(start_s + self._step_s[device.number], end)

    def _reach(self, device: _Device, compute: _Compute) -> None:
        """A device gets to a compute: it starts if everything is there, else it waits."""
        if device.missing.get(compute):
            device.waiting_since = self._clock.now_s
        else:
            self._gather(device, compute)

    def _gather(self, device: _Device, compute: _Compute) -> None:
        """A device is ready; with tensor parallelism it starts together with those that hold the same
        share.
        """
        kind, piece = compute
        layout = self._program.layouts[piece]
        if layout.tp == 1:
            self._start(device, compute)
            return
        key = (kind, piece, layout.share_of[device.number])
        partners = self._gathered.setdefault(key, [])
        partners.append((device, self._clock.now_s))
        if len(partners) < layout.tp:
            return
        for partner, ready_s in self._gathered.pop(key):
            if ready_s < self._clock.now_s:
                partner.waiting_since = ready_s
                self._end_wait(partner, piece, Cause.PARTNER, device.number, piece, self._clock.now_s)
            self._start(partner, compute)

    def _start(self, device: _Device, compute: _Compute) -> None:
        kind, piece = compute
        now_s, duration = self._clock.now_s, self._durations[piece]
        self._ledger.start_pass(device.number, piece, now_s, is_backward=kind is Kind.BACKWARD)
        if kind is Kind.FORWARD:
            length_s = duration.forward_s
        else:
            length_s = duration.backward_s
            self._begin_sums(device, piece, length_s)
        self._clock.at(now_s + length_s, partial(self._end, device, compute, now_s))

    def _begin_sums(self, device: _Device, piece: int, length_s: float) -> None:
        """Let the sums that follow a backward slice begin where the op that completes them is through."""
        first, last = self._program.slices[piece].ops
        for action in device.actions[device.step + 1 :]:
            if action.kind in (Kind.BACKWARD, Kind.STEP):
                return
            if action.kind is Kind.SUM:
                assert action.group is not None and action.op is not None, "a SUM has a group and an op"
                done = (last - action.op) / (last - first)
                device.begun.add(action.group)
                device.open_sums += 1
                join = partial(self._traffic.join, device.number, self._program.groups[action.group])
                self._clock.at(self._clock.now_s + done * length_s, join)

    def _end(self, device: _Device, compute: _Compute, start_s: float) -> None:
        kind, piece = compute
        activity = Activity.FORWARD if kind is Kind.FORWARD else Activity.BACKWARD
        self._spans.append(Span(device.number, activity, piece, start_s, self._clock.now_s))
        self._ledger.end_pass(device.number, piece, self._clock.now_s, is_backward=kind is Kind.BACKWARD)
        device.step += 1
        self._advance(device)

    def _arrived(self, transfer: Transfer, passage: Passage) -> None:
        """A transfer has ended: its taker may go on, if it stands there and this was the last it missed."""
        device = self._devices[transfer.destination]
        compute = _taker(transfer)
        device.missing[compute] -= 1
        action = device.actions[device.step]
        if device.missing[compute] or device.waiting_since is None or (action.kind, action.piece) != compute:
            return
        cause = Cause.GRADIENT if transfer.is_gradient else Cause.ACTIVATION
        source_piece = transfer.consumer if transfer.is_gradient else transfer.producer
        self._end_wait(device, compute[1], cause, transfer.source, source_piece, passage.posted_s)
        self._gather(device, compute)

    def _summed(self, done: GroupSum, last_device: int) -> None:
        """A sum has ended: those of its devices that only wait for it step."""
        for number in done.devices:
            device = self._devices[number]
            device.open_sums -= 1
            at_step = device.actions[device.step].kind is Kind.STEP
            if at_step and not device.open_sums and device.waiting_since is not None:
                self._end_wait(device, None, Cause.SUM, last_device, None, done.joined_s)
                self._advance(device)

    def _end_wait(
        self,
        device: _Device,
        piece: int | None,
        cause: Cause,
        source: int,
        source_piece: int | None,
        moving_since_s: float,
    ) -> None:
        start_s, end_s = device.waiting_since, self._clock.now_s
        assert start_s is not None, "only a device that waits ends its wait"
        device.waiting_since = None
        if end_s > start_s:
            moving_s = end_s - max(start_s, moving_since_s)
            self._waits.append(
                Wait(device.number, piece, cause, source, source_piece, start_s, end_s, moving_s)
            )


def _taker(transfer: Transfer) -> _Compute:
    """The compute that takes what is transferred."""
    if transfer.is_gradient:
        return Kind.BACKWARD, transfer.producer
    return Kind.FORWARD, transfer.consumer
