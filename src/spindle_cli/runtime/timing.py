"""Where a rank's iterations go: seconds in each slice's forward and backward, waiting for others, waiting for
data.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

import torch


class Activity(StrEnum):
    """What a rank's time is spent on."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"  # for transfers, gradient sums, losses
    DATA = "data"  # for the input pipeline
    OPTIMIZER = "optimizer"  # the update of the parameters, and making the gradients ready for the next step


Mark = float | torch.cuda.Event  # seconds of the host's clock, or a moment in a CUDA stream


def take_mark(device: torch.device) -> Mark:
    """Now, on the device: for CUDA the moment at which its stream gets here, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds between two marks of one device that it has passed."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event), "marks of one device"
    return float(begin.elapsed_time(end)) / 1e3


Key = tuple[Activity, int | None]  # the slice's index for FORWARD and BACKWARD


@dataclass
class Stopwatch:
    """Collects the times of one rank; `seconds` has a total per key for each finished step."""

    device: torch.device
    seconds: dict[Key, list[float]] = field(default_factory=dict)
    _open: list[tuple[Key, Mark, Mark]] = field(default_factory=list)
    _ended: list[tuple[Key, Mark, Mark]] = field(default_factory=list)

    @contextmanager
    def timed(self, activity: Activity, piece: int | None = None) -> Iterator[None]:
        """Count the time of the block."""
        begin = take_mark(self.device)
        yield
        self._open.append(((activity, piece), begin, take_mark(self.device)))

    def end_step(self) -> None:
        """Close a step. Its marks are read when the next one ends, when a device has surely passed them."""
        self._read(self._ended)
        self._ended, self._open = self._open, []

    def close(self) -> None:
        """Read what is left; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._read(self._ended)
        self._ended = []

    def medians(self) -> dict[Key, float]:
        """Median seconds per step of each key, the first step (warm-up) left out where there are more."""
        return {
            key: median(per_step[1:] if len(per_step) > 1 else per_step)
            for key, per_step in self.seconds.items()
        }

    def _read(self, marks: list[tuple[Key, Mark, Mark]]) -> None:
        if not marks:
            return
        totals: dict[Key, float] = {}
        for key, begin, end in marks:
            totals[key] = totals.get(key, 0.0) + seconds_between(begin, end)
        for key, total in totals.items():
            self.seconds.setdefault(key, []).append(total)
