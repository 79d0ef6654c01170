"""Weights of tasks' losses at any step: points by hand, functions of the user's, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.runtime.step.losses import LossAccumulator
from spindle_cli.training.optimizing.schedules import TaskWeights
from spindle_cli.verify.stepping.update import weights_at
from spindle_cli.workload.file import TrainSettings, WorkloadFile
from spindle_cli.workload.graph import LossShares
from spindle_cli.workload.types import Task

TASKS = [Task("a", nn.Identity(), 2, [], weight=0.5), Task("b", nn.Identity(), 2, [])]


def halving(step: int) -> dict[str, float]:
    return {"a": 2.0**-step}


def not_by_task(step: int) -> float:
    return 1.0


def unknown(step: int) -> dict[str, float]:
    return {"c": 1.0}


def endless(step: int) -> dict[str, float]:
    return {"a": float("inf")}


def fails_later(step: int) -> dict[str, float]:
    return {"a": [1.0, 2.0][step]}


def weights(asked: object) -> TaskWeights:
    return TaskWeights(TrainSettings.model_validate({"task_weights": asked}), TASKS)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([[0, 1.0], [4, 3.0]], [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]),
        ([[1, 8.0], [3, 0.0], [4, -1.0]], [8.0, 8.0, 4.0, 0.0, -1.0, -1.0]),
        ([[2, 7.0]], [7.0] * 6),
    ],
)
def test_between_two_points_it_is_linear_and_beyond_them_as_there(
    points: object, expected: list[float]
) -> None:
    asked = weights({"b": points})
    train = TrainSettings.model_validate({"task_weights": {"b": points}})
    for step, hand in enumerate(expected):
        assert asked.at(step) == {"a": 0.5, "b": hand}
        assert weights_at(train, TASKS, step) == pytest.approx({"a": 0.5, "b": hand}, rel=1e-15)


def test_a_function_says_some_and_the_others_keep_theirs() -> None:
    asked = weights(f"{__name__}:halving")
    assert [asked.at(step) for step in (0, 2)] == [{"a": 1.0, "b": 1.0}, {"a": 0.25, "b": 1.0}]


def test_without_the_key_tasks_keep_their_own() -> None:
    assert TaskWeights(TrainSettings(), TASKS).at(10**9) == {"a": 0.5, "b": 1.0}


def test_backward_passes_of_a_step_start_from_its_weights_and_its_total_has_them() -> None:
    shares = {task.name: LossShares(fx.Graph()) for task in TASKS}
    asked = weights({"a": [[0, 1.0], [2, 3.0]]})
    accumulator = LossAccumulator(TASKS, torch.device("cpu"), 1, shares, weights=asked)
    seen = []
    for step in range(3):
        accumulator.weigh_for(step)
        seen.append(accumulator.seed("a"))
        assert accumulator.seed("b") == 1.0
    assert seen == [1.0, 2.0, 3.0]
    assert accumulator.total({"a": 10.0, "b": 1.0}, 1) == 21.0
    assert accumulator.weights_at(1) == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"c": [[0, 1.0]]}, "there is no task 'c'; the tasks are a, b"),
        (f"{__name__}:not_by_task", "not_by_task gave 1.0 for step 1; expected weights by task"),
        (f"{__name__}:unknown", "there is no task 'c'"),
        (f"{__name__}:endless", "gave inf for task 'a' at step 1; expected a finite number"),
        (f"{__name__}:missing", "has no class or function 'missing'"),
        ("missing:f", "there is no module 'missing'"),
    ],
)
def test_what_gives_no_weights_is_named(asked: object, said: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(said)):
        weights(asked).at(1)


def test_a_function_that_fails_is_named_with_the_step_and_its_line() -> None:
    asked = weights(f"{__name__}:fails_later")
    assert asked.at(1)["a"] == 2.0
    with pytest.raises(WorkloadError, match=r"fails_later failed for step 2: IndexError.*_weights.py:\d+"):
        asked.at(2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"a": []}, "at least 1 item"),
        ({"a": [[3, 1.0], [1, 2.0]]}, "by ascending step, each step once; found steps [3, 1]"),
        ({"a": [[1, 1.0], [1, 2.0]]}, "each step once; found steps [1, 1]"),
        ({"a": [[-1, 1.0]]}, "greater than or equal to 0"),
        ({"a": [[0]]}, "Field required"),
        ({"a": [[0, float("nan")]]}, "finite"),
        ({"a": 0.5}, "expected [[step, weight], ...]"),
        ("not a path", "expected package.module:name or path/to/file.py:name"),
    ],
)
def test_malformed_points_are_refused(asked: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainSettings.model_validate({"task_weights": asked})


def test_a_mistake_in_points_is_told_once_and_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "workload.yaml"
    file.write_text(
        "schema: spindle.workload/1\nmodel: a:b\ntrain: {task_weights: {large: [[5, 1.0], [0, 2.0]]}}\n"
    )
    with pytest.raises(InputError) as caught:
        WorkloadFile.read(file)
    assert caught.value.message == (
        f"{file}: train.task_weights.large: expected [step, weight] by ascending step, each step once; found "
        "steps [5, 0] (found [[5, 1.0], [0, 2.0]])"
    )
