"""How long an evaluation is predicted to take: by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.cli.launch_command import evaluation_times
from spindle_cli.files.runs.records import Evaluation, EvaluationTimes, append_evaluation
from spindle_cli.launch.watching.run_report import RunReport, render_report
from spindle_cli.plan.types import Plan
from spindle_cli.simulate.run import evaluation_s, has_times
from spindle_cli.workload.graph import WorkloadGraph

MESSAGE_S = 10e-6 + 2**16 / 5e9  # of a MetaOp's output between two devices of a node


def two_tasks() -> Plan:
    """One task's halves on a device each; another task beside it."""
    first = metaop_of("a/first", 2, {1: 0.3}, batch_size=8)
    second = metaop_of("a/second", 1, {1: 0.9}, batch_size=8, inputs=("a/first",))
    other = metaop_of("b/all", 1, {2: 6.0}, batch_size=4)
    slices = (
        slice_of(first, (0, 2), (0,), 0.0),
        slice_of(second, (0, 1), (1,), 0.6),
        slice_of(other, (0, 1), (0, 1), 1.5),
    )
    plan = plan_of(profile_of(first, second, other), cluster_of(2), [(each,) for each in slices])
    return plan.model_copy(update={"accumulate": 3, "optimizer_state_sharded": True, "clips_gradients": True})


def test_forward_passes_and_their_messages_batch_after_batch() -> None:
    """A third of an op's seconds is forward. No other task, no update, no second batch of a step."""
    batch_s = 2 * 0.1 + MESSAGE_S + 0.3
    assert evaluation_s(two_tasks(), "a", 8) == pytest.approx(batch_s)
    assert evaluation_s(two_tasks(), "a", 20) == pytest.approx(batch_s * 2.5)
    assert evaluation_s(two_tasks(), "b", 4) == pytest.approx(2.0)


def evaluation(task: str, seconds: float, num_samples: int = 8) -> Evaluation:
    return Evaluation(step=1, task=task, num_samples=num_samples, loss=1.0, seconds=seconds)


def test_a_run_says_predicted_and_measured_of_each_task(tmp_path: Path) -> None:
    plan = two_tasks()
    graph = WorkloadGraph(None, {"a": None, "b": None}, (), "")  # type: ignore[arg-type,dict-item]
    for line in (
        evaluation("a", 9.0, num_samples=16),
        evaluation("a", 1.0),
        evaluation("b", 0.1),
        evaluation("a", 0.5),
        evaluation("a", 0.7),
        evaluation("gone", 1.0),
    ):
        append_evaluation(tmp_path, line)
    found = list(evaluation_times(tmp_path, plan, graph))
    predicted_s = evaluation_s(plan, "a", 8)
    assert found == [
        EvaluationTimes(task="a", num_samples=8, times=3, predicted_s=predicted_s, measured_s=0.7),
        EvaluationTimes(task="b", num_samples=8, times=1, predicted_s=4.0, measured_s=0.1),
    ]


def test_a_plan_without_curves_predicts_no_evaluation() -> None:
    plan = two_tasks()
    bare = tuple(metaop.model_copy(update={"curve": metaop.curve[:0]}) for metaop in plan.metaops)
    without = Plan(**{**{name: getattr(plan, name) for name in plan.model_fields_set}, "metaops": bare})
    assert (has_times(plan, "a"), has_times(plan, "c"), has_times(without, "a")) == (True, False, False)


def test_the_closing_lines_say_it(tmp_path: Path) -> None:
    from rich.console import Console

    times = [
        EvaluationTimes(task="a", num_samples=8, times=3, predicted_s=0.5, measured_s=0.7),
        EvaluationTimes(task="b", num_samples=5, times=1, predicted_s=None, measured_s=2.0),
    ]
    report = RunReport(
        run_dir=str(tmp_path),
        node_rank=0,
        workers=1,
        steps=0,
        first=None,
        last=None,
        samples_per_s=None,
        predicted_vs_measured=None,
        evaluations=tuple(times),
        files={},
    )
    console = Console(width=120)
    with console.capture() as captured:
        console.print(render_report(report))
    lines = captured.get().splitlines()
    assert "evaluation of a on 8 samples: predicted 500 ms, measured 700 ms (median of 3)" in lines
    assert "evaluation of b on 5 samples: measured 2 s" in lines
