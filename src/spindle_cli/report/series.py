"""A run's steps thinned to few points while they come, however many there are: means, and the least and the
most of each, so that a spike of one step among a million is seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from spindle_cli.files.run_files import StepMetrics
from spindle_cli.report.types import StepPoint

MAX_POINTS = 600


@dataclass
class _Spread:
    """How many values there are, their sum, and the least and the most of those that are finite."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        if -math.inf < value < math.inf:
            if value < self.least:  # not min(): this runs ten times a step, of up to millions
                self.least = value
            if value > self.most:
                self.most = value

    def join(self, later: _Spread) -> None:
        self.count += later.count
        self.total += later.total
        self.least = min(self.least, later.least)
        self.most = max(self.most, later.most)

    @property
    def mean(self) -> float | None:
        """None where any value is not finite: a loss that went wrong must be seen."""
        mean = self.total / self.count
        return mean if math.isfinite(mean) else None

    @property
    def range(self) -> tuple[float, float] | None:
        """The least and the most of the values; None where they say no more than the mean."""
        return (self.least, self.most) if self.count > 1 and self.least <= self.most else None


@dataclass
class _Bucket:
    """Consecutive steps, `step` the last of them, as spreads by name."""

    step: int
    values: dict[str, _Spread] = field(default_factory=dict)
    losses: dict[str, _Spread] = field(default_factory=dict)
    flops: float | None = 0.0

    def add(self, values: Mapping[str, float | None], metrics: StepMetrics, flops: float | None) -> None:
        self.step = metrics.step
        for name, value in values.items():
            if value is not None:
                self.values.setdefault(name, _Spread()).add(value)
        for task, loss in metrics.task_losses.items():
            self.losses.setdefault(task, _Spread()).add(loss)
        self.flops = None if flops is None or self.flops is None else self.flops + flops

    def join(self, later: _Bucket) -> None:
        self.step = later.step
        for spreads, added in ((self.values, later.values), (self.losses, later.losses)):
            for name, spread in added.items():
                spreads.setdefault(name, _Spread()).join(spread)
        self.flops = None if self.flops is None or later.flops is None else self.flops + later.flops

    def point(self) -> StepPoint:
        of = self.values
        iteration, wait, empty = of["iteration"], of.get("wait"), _Spread()
        ranges = {task: spread.range for task, spread in self.losses.items()}
        is_known = self.flops is not None and iteration.total > 0
        return StepPoint(
            step=self.step,
            loss=of["loss"].mean,
            loss_range=of["loss"].range,
            task_losses={task: spread.mean for task, spread in self.losses.items()},
            task_loss_ranges={task: spread for task, spread in ranges.items() if spread is not None} or None,
            iteration_s=iteration.total / iteration.count,
            iteration_range_s=iteration.range,
            flops_per_s=(self.flops or 0.0) / iteration.total if is_known else None,
            peak_share=of["peak"].mean if "peak" in of else None,
            least_memory_bytes=_whole(of.get("least_memory", empty).least),
            most_memory_bytes=_whole(of.get("most_memory", empty).most),
            data_wait_s=None if wait is None else wait.mean,
            data_wait_most_s=None if wait is None else wait.most,
        )


def _whole(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


class Series:
    """The points of a run, step after step.

    A point stands for so many steps that there are at most `max_points`: one at first, twice as many whenever
    there would be more.
    """

    def __init__(self, flops_of: Mapping[str, float] | None = None, max_points: int = MAX_POINTS) -> None:
        """`flops_of`: of one step of each task, of one device in the mean; None: not known."""
        self._flops_of = flops_of
        self._max_points = max_points
        self._buckets: dict[int, _Bucket] = {}
        self.steps_per_point = 1
        self.num_steps = 0
        self.last: StepMetrics | None = None

    def add(self, metrics: StepMetrics) -> bool:
        """Add a step.

        Returns:
            False where a step is done again that is part of a point: everything must be read again, without
            what this step makes void.
        """
        if self.last is not None and metrics.step <= self.last.step:
            if self.steps_per_point > 1:
                return False
            self._buckets = {key: held for key, held in self._buckets.items() if held.step < metrics.step}
            self.num_steps = len(self._buckets)
        values = {
            "loss": metrics.loss,
            "iteration": metrics.iteration_s,
            "peak": metrics.peak_share,
            "least_memory": metrics.least_memory_bytes,
            "most_memory": metrics.most_memory_bytes,
            "wait": metrics.data_wait_s,
        }
        key = (metrics.step - 1) // self.steps_per_point
        self._buckets.setdefault(key, _Bucket(metrics.step)).add(values, metrics, self._flops(metrics))
        self.num_steps += 1
        self.last = metrics
        while len(self._buckets) > self._max_points:
            self._halve()
        return True

    def _flops(self, metrics: StepMetrics) -> float | None:
        if self._flops_of is None:
            return None
        return sum(self._flops_of.get(task, 0.0) for task in metrics.task_losses)

    def _halve(self) -> None:
        self.steps_per_point *= 2
        joined: dict[int, _Bucket] = {}
        for key, bucket in self._buckets.items():
            if key // 2 in joined:
                joined[key // 2].join(bucket)
            else:
                joined[key // 2] = bucket
        self._buckets = joined

    @property
    def points(self) -> tuple[StepPoint, ...]:
        """The points in order of steps, which name the losses of all tasks that ran in their steps."""
        return tuple(bucket.point() for bucket in self._buckets.values())

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of all points, in the order in which they first came."""
        return tuple(dict.fromkeys(chain.from_iterable(held.losses for held in self._buckets.values())))
