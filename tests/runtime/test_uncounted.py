"""A step in which a task counts nothing: it is named in the metrics, and trains nothing of the task."""

from __future__ import annotations

from pathlib import Path

import pytest
from alone import run_case, world_of_one
from case_runs import Case
from padded_toys import BATCH, LABELS, build

from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import StepMetrics, read_metrics
from spindle_cli.training.batches import Batches

STEPS = 6


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_metrics_name_a_task_in_the_steps_in_which_it_counts_nothing(
    accumulate: int, tmp_path: Path
) -> None:
    train = {"optimizer": "SGD", "lr": 0.1, "accumulate": accumulate}
    case = Case("padded", (0,), toys="padded_toys", train=train, steps=STEPS)
    with world_of_one():
        request: RunRequest = run_case(case, tmp_path / "run")
    batches = Batches(build().tasks[1], seed=0)
    expected = []
    for step in range(STEPS):
        numbers = range(step * accumulate, (step + 1) * accumulate)
        labels = [LABELS[index] for number in numbers for index in batches.indices(number)]
        assert len(labels) == BATCH * accumulate
        expected.append(("padded",) if set(labels) == {-100} else ())
    metrics = list(read_metrics(request.run_dir))
    assert [step.uncounted_tasks for step in metrics] == expected
    assert [step.task_losses["padded"] == 0 for step in metrics] == [bool(names) for names in expected]
    assert len(set(expected)) == 2, "the steps differ"


def test_a_line_of_metrics_has_the_key_only_where_there_is_such_a_task() -> None:
    plain = StepMetrics(step=1, loss=2.0, iteration_s=0.1)
    assert "uncounted" not in plain.to_line()
    named = plain.model_copy(update={"uncounted_tasks": ("a", "b")})
    assert StepMetrics.from_line(named.to_line(), where="here") == named
