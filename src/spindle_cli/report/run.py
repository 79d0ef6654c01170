"""A run as the report shows it, and what was measured of its iterations.

What a run writes is read as far as it has come: at once for a report, line by line for a live page. Its
evaluations are thinned where there are very many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TypeVar

from pydantic import ValidationError

from spindle_cli.costs.flops import flops_by_metaop
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import parse_json, validate
from spindle_cli.files.run_files import (
    METRICS_FILE,
    PREDICTED_FILE,
    Comparison,
    PredictedVsMeasured,
    SetMeasured,
    StepMetrics,
)
from spindle_cli.files.runs.records import (
    EVALUATIONS_FILE,
    TIMELINE_FILE,
    AttemptEvent,
    Evaluation,
    MeasuredSpan,
    MeasuredStep,
    MeasuredTimeline,
    NewLines,
    Pace,
    Tail,
    read_attempts,
)
from spindle_cli.plan.types import Plan
from spindle_cli.report.series import MAX_POINTS, Series
from spindle_cli.report.types import (
    Attempt,
    EvaluationPoint,
    Happening,
    MeasuredDevice,
    MeasuredIteration,
    RunView,
    SetPair,
    TimePair,
    runs_of,
)

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


# The order in which they are drawn: computes on top.
_LAYERS = ("wait", "data", "sum", "gather", "transfer", "optimizer", "forward", "backward")


def measured_iteration(plan: Plan, run_dir: Path) -> MeasuredIteration | None:
    """Return the kept step of median length; None where the run has left no timeline. Where steps run sets of
    tasks, those count whose slices are all of the plan of all tasks, which is what the report draws.

    Raises:
        InputError: the timeline is malformed, or of another plan's run.
    """
    path = run_dir / TIMELINE_FILE
    if not path.exists():
        return None
    timeline = MeasuredTimeline.read(path)
    timeline.require_of(plan.sha256(), len(plan.every_slice), plan.cluster.num_devices, where=path)
    steps = [step for step in timeline.steps if _is_drawn(step, len(plan.slices))]
    if not steps:
        return None
    usual_s = median(_length_s(step) for step in steps)
    step = min(steps, key=lambda step: abs(_length_s(step) - usual_s))
    return MeasuredIteration(
        step=step.step,
        iteration_s=_length_s(step),
        clock_error_s=timeline.clock_error_s,
        happenings=_happenings(step),
    )


def _is_drawn(step: MeasuredStep, num_slices: int) -> bool:
    return all((span.slice or 0) < num_slices for spans in step.devices for span in spans)


def _length_s(step: MeasuredStep) -> float:
    return step.end_s - step.start_s


def _happenings(step: MeasuredStep) -> tuple[Happening, ...]:
    """Return what happened on all devices, from the beginning of the step; what began before it is cut off
    there.
    """
    happenings = [
        _happening(span, device, step.start_s)
        for device, spans in enumerate(step.devices)
        for span in spans
        if span.end_s > step.start_s
    ]
    return tuple(sorted(happenings, key=lambda happening: _LAYERS.index(happening.kind)))


def _happening(span: MeasuredSpan, device: int, zero_s: float) -> Happening:
    devices = {device} if span.peer is None else {device, span.peer}
    return Happening(
        kind=span.kind,
        start_s=max(span.start_s - zero_s, 0.0),
        end_s=span.end_s - zero_s,
        runs=runs_of(devices),
        slice=span.slice,
        source_slice=span.source_slice,
        cause=span.cause,
        is_gradient=span.is_gradient,
        num_bytes=span.num_bytes,
    )


def run_view(plan: Plan, run_dir: Path) -> RunView:
    """Return what is in a run's folder. A run that has not ended has no predicted.json yet.

    Raises:
        InputError: no run in the folder, a file that cannot be read, or a run of another plan.
    """
    follower = Follower(run_dir, flops_by_task(plan))
    while follower.look():
        pass
    compared = compared_of(plan, run_dir)
    if follower.steps.last is None and compared is None:
        raise InputError(
            f"{run_dir}: neither {METRICS_FILE} nor {PREDICTED_FILE} is in it",
            hint="Give the folder of a run (`spindle launch --run-dir`).",
        )
    timeline, events = measured_iteration(plan, run_dir), tuple(read_attempts(run_dir))
    return view_of(follower, step_s(plan), compared, timeline, events)


def step_s(plan: Plan) -> float:
    """Seconds of a step, of all its batches, as the plan predicts it, on average."""
    return plan.mean_iteration_s * plan.accumulate


def view_of(
    follower: Follower,
    predicted_s: float | None,
    compared: PredictedVsMeasured | None,
    timeline: MeasuredIteration | None,
    events: tuple[AttemptEvent, ...],
) -> RunView:
    """Return what has been read of a run so far, as it is shown; `predicted_s`: of a step."""
    steps = follower.steps
    return RunView(
        folder=str(follower.run_dir),
        num_steps=steps.num_steps,
        last_step=None if steps.last is None else steps.last.step,
        tasks=steps.tasks,
        predicted_s=predicted_s,
        steps_per_point=steps.steps_per_point,
        points=steps.points,
        measured_steps=None if compared is None else compared.steps,
        iteration=None if compared is None else _pair("iteration", compared.iteration),
        task_sets=() if compared is None else tuple(map(_set_pair, compared.task_sets)),
        metaops=()
        if compared is None
        else tuple(_pair(metaop.metaop, metaop) for metaop in compared.metaops),
        devices=()
        if compared is None
        else tuple(MeasuredDevice.model_validate(device.model_dump()) for device in compared.devices),
        timeline=timeline,
        evaluations=follower.evaluations.points,
        attempts=tuple(
            Attempt(time_s=event.time_s, step=event.step, cause=event.message)
            for event in events
            if event.event == "started"
        ),
    )


def compared_of(plan: Plan, run_dir: Path) -> PredictedVsMeasured | None:
    """Return a run's predicted.json; None where it has not ended.

    Raises:
        InputError: it is malformed, or of a run by another plan.
    """
    path = run_dir / PREDICTED_FILE
    if not path.exists():
        return None
    compared = PredictedVsMeasured.read(path)
    _refuse_another_plan(plan, compared, path)
    return compared


def flops_by_task(plan: Plan) -> dict[str, float] | None:
    """Floating-point operations of one step of each task, for one device in the mean; None where the profile
    has not counted them all.
    """
    flops = flops_by_metaop(plan.metaops)
    if flops is None:
        return None
    by_task: dict[str, float] = {}
    for metaop in plan.metaops:
        metaop_flops = plan.accumulate * flops[metaop.name] / plan.cluster.num_devices
        by_task[metaop.task] = by_task.get(metaop.task, 0.0) + metaop_flops
    return by_task


def _refuse_another_plan(plan: Plan, compared: PredictedVsMeasured, path: Path) -> None:
    unknown = [metaop.metaop for metaop in compared.metaops if metaop.metaop not in plan.by_name]
    tasks = {metaop.task for metaop in plan.metaops}
    others = [task for task_set in compared.task_sets for task in task_set.tasks if task not in tasks]
    devices = [device.device for device in compared.devices if device.device >= plan.cluster.num_devices]
    named = [
        *(f"MetaOp {name!r}" for name in unknown),
        *(f"task {task!r}" for task in others),
        *(f"device {device}" for device in devices),
    ]
    first = next(iter(named), None)
    if first is not None:
        raise InputError(f"{path}: {first} is not in the plan", hint="Give the folder of a run by this plan.")


def _set_pair(measured: SetMeasured) -> SetPair:
    pair = _pair(f"iteration of {', '.join(measured.tasks)}", measured.iteration)
    return SetPair(**pair.model_dump(), tasks=measured.tasks, steps=measured.steps)


def _pair(name: str, compared: Comparison) -> TimePair:
    return TimePair(name=name, predicted_s=compared.predicted_s, measured_s=compared.measured_s)
