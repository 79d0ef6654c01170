"""A run for the report: its losses and iteration times, and predicted against measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from spindle_cli.errors import InputError
from spindle_cli.files.run_files import (
    METRICS_FILE,
    PREDICTED_FILE,
    Comparison,
    PredictedVsMeasured,
    StepMetrics,
    read_metrics,
)
from spindle_cli.plan.types import Plan
from spindle_cli.report.measured import measured_iteration
from spindle_cli.report.types import MeasuredDevice, RunView, StepPoint, TimePair

MAX_POINTS = 600


def run_view(plan: Plan, run_dir: Path) -> RunView:
    """What is in a run's folder. A run that has not ended has no predicted.json yet.

    Raises:
        InputError: no run in the folder, a file that cannot be read, or a run of another plan.
    """
    # A resumed run may have done a step again: the later line counts.
    by_step = {metrics.step: metrics for metrics in read_metrics(run_dir)}
    predicted_path = run_dir / PREDICTED_FILE
    compared = PredictedVsMeasured.read(predicted_path) if predicted_path.exists() else None
    if not by_step and compared is None:
        raise InputError(
            f"{run_dir}: neither {METRICS_FILE} nor {PREDICTED_FILE} is in it",
            hint="Give the folder of a run (`spindle launch --run-dir`).",
        )
    if compared is not None:
        _refuse_another_plan(plan, compared, predicted_path)
    steps = [by_step[step] for step in sorted(by_step)]
    steps_per_point = math.ceil(len(steps) / MAX_POINTS) or 1
    return RunView(
        folder=str(run_dir),
        num_steps=len(steps),
        steps_per_point=steps_per_point,
        points=_points(steps, steps_per_point),
        measured_steps=None if compared is None else compared.steps,
        iteration=None if compared is None else _pair("iteration", compared.iteration),
        metaops=() if compared is None else tuple(_pair(each.metaop, each) for each in compared.metaops),
        devices=()
        if compared is None
        else tuple(MeasuredDevice.model_validate(each.model_dump()) for each in compared.devices),
        timeline=measured_iteration(plan, run_dir),
    )


def _refuse_another_plan(plan: Plan, compared: PredictedVsMeasured, path: Path) -> None:
    unknown = [each.metaop for each in compared.metaops if each.metaop not in plan.by_name]
    devices = [each.device for each in compared.devices if each.device >= plan.cluster.num_devices]
    found = f"MetaOp {unknown[0]!r}" if unknown else f"device {devices[0]}" if devices else None
    if found is not None:
        raise InputError(f"{path}: {found} is not in the plan", hint="Give the folder of a run by this plan.")


def _pair(name: str, compared: Comparison) -> TimePair:
    return TimePair(name=name, predicted_s=compared.predicted_s, measured_s=compared.measured_s)


def _points(steps: Sequence[StepMetrics], size: int) -> tuple[StepPoint, ...]:
    points = []
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        tasks = dict.fromkeys(task for metrics in part for task in metrics.task_losses)
        points.append(
            StepPoint(
                step=part[-1].step,
                loss=_mean(metrics.loss for metrics in part),
                task_losses={
                    task: _mean(metrics.task_losses.get(task, math.nan) for metrics in part) for task in tasks
                },
                iteration_s=sum(metrics.iteration_s for metrics in part) / len(part),
            )
        )
    return tuple(points)


def _mean(values: Iterable[float]) -> float | None:
    """None where any value is not finite: a loss that went wrong must be seen."""
    every = list(values)
    mean = sum(every) / len(every)
    return mean if math.isfinite(mean) else None
