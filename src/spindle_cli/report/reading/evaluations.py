"""A run's evaluations, thinned where there are very many."""

from __future__ import annotations

import math

from spindle_cli.files.runs.evaluations import Evaluation
from spindle_cli.report.types import EvaluationPoint


class Evaluations:
    """The latest evaluation of each task after each step; of a very long run every second one, or fourth."""

    def __init__(self, max_points: int) -> None:
        """`max_points`: of each task, at most; its newest one comes on top."""
        self._max_points = max_points
        self._of: dict[str, dict[int, Evaluation]] = {}
        self.seconds = 0.0

    def add(self, evaluation: Evaluation) -> None:
        """Take in one more."""
        self._of.setdefault(evaluation.task, {})[evaluation.step] = evaluation
        self.seconds += evaluation.seconds

    @property
    def points(self) -> tuple[EvaluationPoint, ...]:
        """In order of steps."""
        found = [each for of_task in self._of.values() for each in self._thinned(of_task)]
        return tuple(_point(each) for each in sorted(found, key=lambda each: each.step))

    def _thinned(self, of_task: dict[int, Evaluation]) -> list[Evaluation]:
        every = [of_task[step] for step in sorted(of_task)]
        stride = 1
        while len(every) > stride * self._max_points:
            stride *= 2
        kept = every[::stride]
        return kept if kept[-1] is every[-1] else [*kept, every[-1]]


def _point(evaluation: Evaluation) -> EvaluationPoint:
    return EvaluationPoint(
        step=evaluation.step,
        task=evaluation.task,
        num_samples=evaluation.num_samples,
        loss=_finite(evaluation.loss),
        metrics={name: _finite(value) for name, value in evaluation.metrics.items()},
        seconds=evaluation.seconds,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
