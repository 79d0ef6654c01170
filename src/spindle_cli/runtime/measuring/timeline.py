"""timeline.json: the last steps of every rank, gathered and put on rank 0's clock.

How far each rank's clock is from rank 0's is found as in NTP: rank 0 asks, a rank answers with its time,
and the answer is taken to be given halfway between question and arrival. Of several rounds the quickest
counts: the answer cannot be further off than half of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spindle_cli.account.types import ParameterGroup
from spindle_cli.files.runs.records import MeasuredSpan, MeasuredStep, MeasuredTimeline
from spindle_cli.plan.types import Plan
from spindle_cli.program.types import Program, Transfer
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.measuring.gathering import gather_json
from spindle_cli.runtime.measuring.timing import Activity, KeptStep, Lap, Stopwatch

# Decimals of seconds: nanoseconds.
DECIMALS = 9
# Shorter waits are none: they say that there was nothing to wait for.
_LEAST_WAIT_S = 10e-6


@dataclass(frozen=True)
class StepProgram:
    """What a step ran: `places`: of its slices, in `plan.every_slice`."""

    program: Program
    places: Sequence[int]


@dataclass(frozen=True)
class Ran:
    """What the steps of a run were.

    Attributes:
        plan: of all of them.
        of_step: what a step ran, counted from 0.
        groups: the parameter groups of all programs together.
    """

    plan: Plan
    of_step: Callable[[int], StepProgram]
    groups: Sequence[ParameterGroup]


def gather_timeline(stopwatch: Stopwatch, ran: Ran) -> MeasuredTimeline | None:
    """The steps that every rank's stopwatch has kept, on rank 0; None on the others. Collective."""
    offsets = clock_offsets()
    gathered = gather_json([_step_row(stopwatch, kept) for kept in stopwatch.steps])
    if gathered is None:
        return None
    assert offsets is not None
    return make_timeline(ran, [[RankStep.of(row) for row in rows] for rows in gathered], offsets)


@dataclass(frozen=True)
class LapRow:
    """A lap as it travels, on its rank's clock. `transfer`: the key of one."""

    kind: str
    start_s: float
    end_s: float
    slice_index: int | None
    cause: Any
    transfer: int | None
    group: int | None


@dataclass(frozen=True)
class RankStep:
    """A step (counted from 0) of one rank, on its clock."""

    step: int
    start_s: float
    end_s: float
    laps: tuple[LapRow, ...]

    @classmethod
    def of(cls, row: Sequence[Any]) -> RankStep:
        """Makes a step of the row that another rank has sent."""
        step, start_s, end_s, laps = row
        return cls(step, start_s, end_s, tuple(LapRow(*lap) for lap in laps))


def _step_row(stopwatch: Stopwatch, kept: KeptStep) -> list[Any]:
    laps = [_lap_row(stopwatch, lap) for lap in kept.laps]
    return [kept.step, stopwatch.clock_s(kept.begin), stopwatch.clock_s(kept.end), laps]


def _lap_row(stopwatch: Stopwatch, lap: Lap) -> list[Any]:
    key = None if lap.transfer is None else lap.transfer.key
    begin_s, end_s = stopwatch.clock_s(lap.begin), stopwatch.clock_s(lap.end)
    return [lap.kind.value, begin_s, end_s, lap.slice_index, lap.cause, key, lap.group]


def make_timeline(
    ran: Ran, ranks: Sequence[Sequence[RankStep]], offsets: Sequence[Offset]
) -> MeasuredTimeline:
    """The ranks' steps (the same of each) on one clock, from the beginning of rank 0's first."""
    zero_s = ranks[0][0].start_s if ranks[0] else 0.0
    shifts = [-zero_s - offset.ahead_s for offset in offsets]
    steps = []
    for position, first in enumerate(ranks[0]):
        taken_s: dict[tuple[int, str, int | None], float] = {}
        for device, (rank_steps, shift) in enumerate(zip(ranks, shifts, strict=True)):
            for lap in rank_steps[position].laps:
                taken_s.setdefault((device, lap.kind, lap.slice_index), lap.start_s + shift)
        what = ran.of_step(first.step)
        devices = (
            _Device(ran, what, device, shift, taken_s).spans(rank_steps[position].laps)
            for device, (rank_steps, shift) in enumerate(zip(ranks, shifts, strict=True))
        )
        start_s, end_s = first.start_s + shifts[0], first.end_s + shifts[0]
        steps.append(MeasuredStep(step=first.step + 1, start_s=start_s, end_s=end_s, devices=tuple(devices)))
    return MeasuredTimeline(
        plan_sha256=ran.plan.sha256(),
        clock_error_s=max(offset.error_s for offset in offsets),
        steps=tuple(steps),
    )


class _Device:
    """One device's laps as spans. `taken_s`: when which device first began what."""

    def __init__(
        self,
        ran: Ran,
        what: StepProgram,
        device: int,
        shift_s: float,
        taken_s: Mapping[tuple[int, str, int | None], float],
    ) -> None:
        self._groups = ran.groups
        self._places = what.places
        self._shift_s = shift_s
        self._taken_s = taken_s
        self._sent: dict[int, Transfer] = {
            action.transfer.key: action.transfer
            for action in what.program.actions[device]
            if action.transfer is not None and action.transfer.source == device
        }

    def spans(self, laps: Sequence[LapRow]) -> tuple[MeasuredSpan, ...]:
        """Makes spans of a device's laps, sorted by their start."""
        spans = [self._span(lap) for lap in laps if not _is_no_wait(lap)]
        return tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s)))

    def _span(self, lap: LapRow) -> MeasuredSpan:
        start_s = round(lap.start_s + self._shift_s, DECIMALS)
        end_s = round(lap.end_s + self._shift_s, DECIMALS)
        if lap.transfer is not None:
            return self._transfer(self._sent[lap.transfer], start_s)
        num_bytes = 0 if lap.group is None else self._groups[lap.group].moved_bytes
        return MeasuredSpan.model_validate(
            {
                "kind": lap.kind,
                "start_s": start_s,
                "end_s": end_s,
                "slice": None if lap.slice_index is None else self._places[lap.slice_index],
                "cause": lap.cause,
                "group": lap.group,
                "num_bytes": num_bytes,
            }
        )

    def _transfer(self, transfer: Transfer, start_s: float) -> MeasuredSpan:
        taker, source = transfer.consumer, transfer.producer
        if transfer.is_gradient:
            taker, source = source, taker
        activity = Activity.BACKWARD if transfer.is_gradient else Activity.FORWARD
        return MeasuredSpan(
            kind="transfer",
            start_s=start_s,
            end_s=max(start_s, round(self._taken_s[transfer.destination, activity.value, taker], DECIMALS)),
            slice=self._places[taker],
            source_slice=self._places[source],
            is_gradient=transfer.is_gradient,
            peer=transfer.destination,
            num_bytes=transfer.num_bytes,
        )


def _is_no_wait(lap: LapRow) -> bool:
    waits = lap.kind in (Activity.WAIT, Activity.DATA)
    return waits and lap.end_s - lap.start_s < _LEAST_WAIT_S


_ROUNDS = 8


@dataclass(frozen=True)
class Offset:
    """`ahead_s`: of rank 0's clock; `error_s`: at most so far off."""

    ahead_s: float
    error_s: float


def clock_offsets() -> list[Offset] | None:
    """The offsets of every rank's `time.perf_counter`, by rank, on rank 0; None on the others. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    message = torch.zeros(1, dtype=torch.float64)
    if rank != 0:
        for _ in range(_ROUNDS):
            dist.recv(message, src=0, group=host_group())
            dist.send(message.fill_(time.perf_counter()), dst=0, group=host_group())
        return None
    return [Offset(0.0, 0.0), *(_ask(peer, message) for peer in range(1, world))]


def _ask(peer: int, message: torch.Tensor) -> Offset:
    rounds: list[Offset] = []
    for _ in range(_ROUNDS):
        asked_s = time.perf_counter()
        dist.send(message, dst=peer, group=host_group())
        dist.recv(message, src=peer, group=host_group())
        theirs_s = float(message.item())
        rounds.append(offset_of(asked_s, theirs_s, time.perf_counter()))
    return min(rounds, key=lambda offset: offset.error_s)


def offset_of(asked_s: float, theirs_s: float, answered_s: float) -> Offset:
    """From one round: when rank 0 asked and was answered, and the other's time in between."""
    return Offset(theirs_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2)
