"""Read what a run writes, as far as it has come: at once for a report, piece by piece for a live page.

A run's evaluations are thinned where there are very many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import validate
from spindle_cli.files.parsing import parse_json
from spindle_cli.files.run_files import METRICS_FILE, StepMetrics
from spindle_cli.files.runs.evaluations import EVALUATIONS_FILE, Evaluation
from spindle_cli.files.runs.tail import NewLines, Pace, Tail
from spindle_cli.report.reading.series import MAX_POINTS, Series
from spindle_cli.report.types import EvaluationPoint

Line = TypeVar("Line", StepMetrics, Evaluation)
# Takes the message about a line that is not one.
OnDamage = Callable[[InputError], None]


def refuse(error: InputError) -> None:
    """What a report does with a line that is not one."""
    raise error


class Follower:
    """The steps and evaluations of a run, as far as they have been read.

    Attributes:
        steps, evaluations: what counts of them; a step that a resumed run has done again counts once.
        pace: of the latest steps.
        left_bytes: of metrics.jsonl, that `look` would read at once.
    """

    def __init__(
        self, run_dir: Path, flops_of: Mapping[str, float] | None, on_damage: OnDamage = refuse
    ) -> None:
        """`flops_of`: see `Series`."""
        self.run_dir = run_dir
        self._flops_of = flops_of
        self._on_damage = on_damage
        self._metrics = Tail(run_dir / METRICS_FILE)
        self._evaluated = Tail(run_dir / EVALUATIONS_FILE)
        # Where in the file steps are done again: a line's number, and its step.
        self._redone: list[tuple[int, int]] = []
        self._forget_steps()
        self.evaluations = Evaluations(MAX_POINTS)

    def _forget_steps(self) -> None:
        self.steps = Series(self._flops_of)
        self.pace = Pace()
        self.left_bytes = 0

    def look(self) -> bool:
        """Read a piece of what is new.

        Returns:
            Whether there is more.

        Raises:
            InputError: a file cannot be read; or what `on_damage` raises of a line that is not one.
        """
        steps, evaluations = self._metrics.look(), self._evaluated.look()
        self._take_steps(steps)
        if evaluations.begun_anew:
            self.evaluations = Evaluations(MAX_POINTS)
        for number, line in evaluations.lines:
            evaluation = self._parsed(Evaluation, self._evaluated, number, line)
            if evaluation is not None:
                self.evaluations.add(evaluation)
        return self.left_bytes > 0 or evaluations.left_bytes > 0

    @property
    def read_share(self) -> float:
        """The share of metrics.jsonl, as it was found, that has been read."""
        size = self._metrics.offset + self.left_bytes
        return self._metrics.offset / size if size else 1.0

    def _take_steps(self, new_lines: NewLines) -> None:
        if new_lines.begun_anew:
            self._forget_steps()
            self._redone = []
        self.left_bytes = new_lines.left_bytes
        for number, line in new_lines.lines:
            metrics = self._parsed(StepMetrics, self._metrics, number, line)
            if metrics is None or self._is_void(number, metrics.step):
                continue
            if not self.steps.add(metrics):
                self._redone.append((number, metrics.step))
                self._forget_steps()
                self._metrics.rewind()
                self.left_bytes = 1  # more to read, however much it is
                return
            self.pace.add(metrics.iteration_s)

    def _is_void(self, number: int, step: int) -> bool:
        """Whether a later line does this step, or one before it, again."""
        return any(number < later and step >= redone for later, redone in self._redone)

    def _parsed(self, kind: type[Line], tail: Tail, number: int, line: bytes) -> Line | None:
        try:
            return kind.model_validate_json(line)  # a third of the time, of up to millions of lines
        except ValidationError:
            where = f"{tail.path}:{number}"
        try:
            return validate(kind, parse_json(_text(line, where), where=where), where=where)
        except InputError as damage:
            self._on_damage(damage)
            return None


def _text(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not a text in UTF-8 ({error.reason})") from error


class Evaluations:
    """The latest evaluation of each task after each step; of a very long run every second one, or fourth."""

    def __init__(self, max_points: int) -> None:
        """`max_points`: of each task, at most; its newest one comes on top."""
        self._max_points = max_points
        self._of: dict[str, dict[int, Evaluation]] = {}
        self.seconds = 0.0

    def add(self, evaluation: Evaluation) -> None:
        """Add an evaluation."""
        self._of.setdefault(evaluation.task, {})[evaluation.step] = evaluation
        self.seconds += evaluation.seconds

    @property
    def points(self) -> tuple[EvaluationPoint, ...]:
        """The points of all evaluated tasks, in order of steps."""
        evaluations = [evaluation for of_task in self._of.values() for evaluation in self._thinned(of_task)]
        return tuple(
            _point(evaluation) for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.step)
        )

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
