"""Evaluations are compared by loss, number of samples and, where numbers are sharp, metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spindle_cli.files.runs.records import Evaluation
from spindle_cli.verify.compare import compare_evaluations
from spindle_cli.verify.types import Check


def evaluation(**changes: Any) -> Evaluation:
    fields = {"step": 3, "task": "t", "num_samples": 7, "loss": 2.0, "metrics": {"hits": 0.5}, "seconds": 1.0}
    return Evaluation(**{**fields, **changes})


def compared(*ours: Evaluation, theirs: Evaluation | None = None, metrics: bool = True) -> Check:
    return compare_evaluations(ours, [theirs or evaluation()], 1e-9, metrics=metrics)


def test_the_last_evaluation_of_a_task_counts() -> None:
    check = compared(evaluation(step=2, loss=5.0), evaluation(), evaluation(task="other", loss=9.0))
    assert check.passed and check.compared == 2


def test_a_difference_is_relative_to_plain_pytorchs() -> None:
    assert compared(evaluation(loss=2.0 + 1.9e-9)).passed
    check = compared(evaluation(loss=2.0 + 2.1e-9))
    assert [str(each) for each in check.failures] == [
        "evaluation of t: loss (after step 3): relative difference 1.05e-09"
    ]


@pytest.mark.parametrize(
    "wrong",
    [{"num_samples": 6}, {"step": 2}, {"metrics": {}}, {"metrics": {"hits": 0.51}}, {"loss": math.nan}],
)
def test_another_number_of_samples_step_metric_or_loss_is_found(wrong: dict[str, Any]) -> None:
    assert len(compared(evaluation(**wrong)).failures) == 1


def test_a_missing_evaluation_is_found() -> None:
    assert compared().failures[0].problem == "missing under the plan"


def test_where_rounding_may_move_a_sample_metrics_are_left_out() -> None:
    assert compared(evaluation(metrics={"hits": 0.51}), metrics=False).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_equal_is_equal(value: float) -> None:
    same = evaluation(metrics={"hits": value})
    assert compared(same, theirs=same).passed


def test_a_number_may_differ_by_what_measured_noise_moves_it_and_no_other_number() -> None:
    """Its own loss and metric, each by its own noise, and never by more than any noise excuses."""
    theirs = evaluation(metrics={"far": 1.0, "near": 1.0})
    rounded = evaluation(metrics={"far": 1.0 + 1e-7, "near": 1.0})
    for far, near, failures in ((3e-7, 0.0, 0), (5e-7, 0.0, 1), (0.0, 3e-7, 1)):
        ours = evaluation(metrics={"far": 1.0 + far, "near": 1.0 + near})
        check = compare_evaluations([ours], [theirs], 1e-9, metrics=True, rounded=[rounded])
        assert len(check.failures) == failures
    wild = evaluation(loss=3.0)
    check = compare_evaluations([evaluation(loss=2.01)], [evaluation()], 1e-9, metrics=True, rounded=[wild])
    assert len(check.failures) == 1
