"""Evaluations of a run, predicted against measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.files.runs.evaluations import Evaluation, EvaluationTimes, read_evaluations
from spindle_cli.plan.types import Plan

if TYPE_CHECKING:
    from spindle_cli.workload.graph import WorkloadGraph


def evaluation_times(run_dir: Path, plan: Plan, graph: WorkloadGraph) -> Iterator[EvaluationTimes]:
    """Predict and measure the evaluation of each task that was evaluated, on as many samples as the last
    time.

    Raises:
        InputError: the run's evaluations.jsonl cannot be read.
    """
    from spindle_cli.simulate.run import evaluation_s, has_times

    by_task: dict[str, list[Evaluation]] = {}
    for line in read_evaluations(run_dir):
        by_task.setdefault(line.task, []).append(line)
    for task, lines in by_task.items():
        num_samples = lines[-1].num_samples
        measured = [line.seconds for line in lines if line.num_samples == num_samples]
        if task not in graph.tasks and task not in graph.evaluations:
            continue  # of the workload as it was, before the run was gone on with
        own = _plan_of(task, plan, graph)
        yield EvaluationTimes(
            task=task,
            num_samples=num_samples,
            times=len(measured),
            predicted_s=evaluation_s(own, task, num_samples) if has_times(own, task) else None,
            measured_s=statistics.median(measured),
        )


def _plan_of(task: str, plan: Plan, graph: WorkloadGraph) -> Plan:
    """By which it is evaluated."""
    if task in graph.tasks:
        return plan
    from spindle_cli.program.evaluated import place_evaluated
    from spindle_cli.workload.evaluated.needs import needs_of

    return place_evaluated(plan, needs_of(graph, task))
