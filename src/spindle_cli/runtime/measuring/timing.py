"""Where a rank's iterations go: what it did from when to when; totals per step, and the last steps whole.

On CUDA times are events in the device's stream, so that nothing is stopped to be timed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist

from spindle_cli.files.runs.records import WaitCause
from spindle_cli.program.types import Transfer


class Activity(StrEnum):
    """What a rank's time is spent on."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"  # for transfers, gradient sums, losses
    DATA = "data"  # for the input pipeline
    OPTIMIZER = "optimizer"  # the update of the parameters, and making the gradients ready for the next step
    OTHER = "other"  # what is left of the step


COMPUTE = (Activity.FORWARD, Activity.BACKWARD)
# Parts of a run that are looked at one by one, to tell what lasts from what passes.
_PARTS = 4


class Passing(StrEnum):
    """What goes on beside a rank's own activities."""

    SEND = "send"  # of a transfer; its end is not known here, the taker has it
    SUM = "sum"  # of a parameter group's gradients
    GATHER = "gather"  # of a parameter group's new values


class DeviceMark(Protocol):
    """A moment in a device's stream, as `torch.cuda.Event` has it."""

    def query(self) -> bool:
        """Say whether the device has come to this mark."""

    def synchronize(self) -> None:
        """Wait until the device has come to this mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to a later one; both must have been passed."""


Mark = float | DeviceMark  # seconds of the host's clock, or a moment in a device's stream


def take_mark(device: torch.device) -> Mark:
    """Now, on the device: for CUDA the moment at which its stream gets here, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record()
    mark: DeviceMark = event
    return mark


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds between two marks of one device that it has passed."""
    if isinstance(begin, float):
        assert isinstance(end, float), "marks of one device"
        return end - begin
    return begin.elapsed_time(end) / 1e3


def has_passed(mark: Mark) -> bool:
    """Whether the device has come to a mark; asked without waiting for it."""
    return isinstance(mark, float) or mark.query()


def await_mark(mark: Mark) -> None:
    """Wait until the device has come to a mark."""
    if not isinstance(mark, float):
        mark.synchronize()


Key = tuple[Activity, int | None]  # the slice's index for FORWARD and BACKWARD


@dataclass(frozen=True, slots=True)
class Lap:
    """Something that lasted.

    `slice_index`: of FORWARD and BACKWARD, and of a WAIT the slice that waits. `cause`: of a WAIT.
    `transfer`: of a SEND. `group`: of a SUM or GATHER.
    """

    kind: Activity | Passing
    begin: Mark
    end: Mark
    slice_index: int | None = None
    cause: WaitCause | None = None
    transfer: Transfer | None = None
    group: int | None = None

    @property
    def key(self) -> Key | None:
        """What it is counted as; None: it takes none of the rank's time."""
        if isinstance(self.kind, Passing):
            return None
        return self.kind, self.slice_index if self.kind in COMPUTE else None


class Stopwatch:
    """Collects the times of one rank; `seconds` has a total per key for each finished step, `computed_s` what
    it computed in each. `seconds_of`: the same by the tasks that steps run, where not all run all.

    `steps`: the last steps, each with its number, its beginning, its end and its laps.
    """

    def __init__(
        self, device: torch.device, keep_steps: int = 0, *, watches_collectives: bool = False
    ) -> None:
        """`keep_steps`: so many steps are kept whole.

        `watches_collectives`: note when sums and gathers end, too (on the CPU alone). A thread of torch's
        then needs the interpreter for a moment, so it is for those who ask.
        """
        self.device = device
        self.seconds: dict[Key, list[float]] = {}
        self.seconds_of: dict[tuple[str, ...], dict[Key, list[float]]] = {}
        self.computed_s: list[float] = []  # in each finished step, forward and backward
        self.steps: deque[KeptStep] = deque(maxlen=keep_steps)
        self._watches = watches_collectives and device.type == "cpu"
        self._origin, self._origin_s = self._take_origin()
        self._begin = take_mark(device)
        self._tasks: tuple[str, ...] | None = None
        self._open: list[Lap] = []
        self._timed: list[Lap] = []  # blocks that are timed now, the inmost last
        self._unread: deque[KeptStep] = deque()

    @contextmanager
    def timed(
        self, activity: Activity, slice_index: int | None = None, cause: WaitCause | None = None
    ) -> Iterator[None]:
        """Count the time of the block, without that of a block inside of it that is timed itself."""
        begin = take_mark(self.device)
        if self._timed:
            self._open.append(replace(self._timed[-1], end=begin))
        self._timed.append(Lap(activity, begin, begin, slice_index, cause))
        yield
        end = take_mark(self.device)
        self._open.append(replace(self._timed.pop(), end=end))
        if self._timed:
            self._timed[-1] = replace(self._timed[-1], begin=end)

    def note_send(self, transfer: Transfer) -> None:
        """A transfer is on its way from now on."""
        now = take_mark(self.device)
        self._open.append(Lap(Passing.SEND, now, now, transfer=transfer))

    def watch(self, kind: Passing, group: int, work: dist.Work) -> None:
        """A collective has begun; note it when it ends."""
        if not self._watches:
            return
        begin = take_mark(self.device)

        def ended(_: object) -> None:
            self._open.append(Lap(kind, begin, take_mark(self.device), group=group))

        work.get_future().add_done_callback(ended)

    def begin_step(self, tasks: tuple[str, ...] | None = None) -> None:
        """Open a step. `tasks`: that it runs; None: as every step."""
        self._begin, self._tasks = take_mark(self.device), tasks

    def end_step(self, step: int) -> None:
        """Close a step. Its marks are read as soon as the device has passed them all: the host may be many
        batches ahead of it.
        """
        laps, self._open = self._open, []
        ended = KeptStep(step, self._begin, take_mark(self.device), laps, self._tasks)
        self.steps.append(ended)
        self._unread.append(ended)
        while self._unread and has_passed(self._unread[0].end):
            self._read(self._unread.popleft())

    def close(self) -> None:
        """Read what is left; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while self._unread:
            self._read(self._unread.popleft())
        # A device counts milliseconds in float32, a quarter of one at a time after an hour, and its clock
        # drifts from the host's: what is asked for now is of the last steps.
        self._origin, self._origin_s = self._take_origin()

    def medians(self, tasks: tuple[str, ...] | None = None) -> dict[Key, float]:
        """Median seconds per step of each key, the first step (warm-up) left out where there are more.
        `tasks`: of the steps that run these.
        """
        return {
            key: median(per_step[1:] if len(per_step) > 1 else per_step)
            for key, per_step in (self.seconds if tasks is None else self.seconds_of[tasks]).items()
        }

    def least_compute_s(self) -> float:
        """What `computed_s` is over the quarter of the steps in which its median is least, the first step
        left out where there are more; 0 without a step.
        """
        counted = self.computed_s[1:] or self.computed_s
        parts = min(_PARTS, len(counted))
        borders = [len(counted) * part // parts for part in range(parts + 1)] if parts else []
        return min((median(counted[first:last]) for first, last in pairwise(borders)), default=0.0)

    def clock_s(self, mark: Mark) -> float:
        """A mark that the device has passed, on the host's clock (`time.perf_counter`): the more exactly, the
        nearer to `close`.
        """
        return self._origin_s + seconds_between(self._origin, mark)

    def _take_origin(self) -> tuple[Mark, float]:
        origin = take_mark(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return origin, time.perf_counter()
        assert isinstance(origin, float)
        return origin, origin

    def _read(self, step: KeptStep) -> None:
        totals: dict[Key, float] = {}
        for lap in step.laps:
            if lap.key is not None:
                totals[lap.key] = totals.get(lap.key, 0.0) + seconds_between(lap.begin, lap.end)
        # Measured, not what is left of the medians: a median of sums is more than a sum of medians.
        totals[Activity.OTHER, None] = seconds_between(step.begin, step.end) - sum(totals.values())
        self.computed_s.append(sum(total for (activity, _), total in totals.items() if activity in COMPUTE))
        of_tasks = {} if step.tasks is None else self.seconds_of.setdefault(step.tasks, {})
        for key, total in totals.items():
            self.seconds.setdefault(key, []).append(total)
            of_tasks.setdefault(key, []).append(total)


@dataclass(frozen=True, slots=True)
class KeptStep:
    """A step (counted from 0) and what the rank did in it. `tasks`: that it ran; None: as every step."""

    step: int
    begin: Mark
    end: Mark
    laps: list[Lap]
    tasks: tuple[str, ...] | None = None
