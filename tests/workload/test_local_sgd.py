"""`train.local_sgd`: what it may say, and the workload and the batches of each island."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from helpers.toy_workload import build
from spindle_cli.errors import WorkloadError
from spindle_cli.training.sampling import Schedule, Turns
from spindle_cli.workload.building.load import as_on_an_island
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.types import LocalSgd, nearest_multiples

TWO = {"islands": 2, "every": 4}


def settings(local_sgd: object = TWO, **more: Any) -> TrainSettings:
    return TrainSettings(**{"steps": 8, "local_sgd": local_sgd, **more})


def test_the_outer_optimizer_is_dilocos_unless_told() -> None:
    asked = settings().local_sgd
    assert asked is not None
    assert (asked.outer.lr, asked.outer.momentum, asked.outer.nesterov, asked.bits) == (0.7, 0.9, True, 32)
    assert settings({**TWO, "outer": {"momentum": 0}}).local_sgd.outer.nesterov is False  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("local_sgd", "more", "message"),
    [
        (True, {}, "expected a dict, such as {islands: 2, every: 500}"),
        ({"islands": 2}, {}, "every"),
        ({"every": 4}, {}, "islands"),
        ({"islands": 1, "every": 4}, {}, "greater than or equal to 2"),
        ({"islands": 65, "every": 4}, {}, "less than or equal to 64"),
        ({"islands": 2, "every": 0}, {}, "greater than or equal to 1"),
        ({"islands": True, "every": 4}, {}, "expected a number, not true or false"),
        ({**TWO, "bits": 4}, {}, "32, 16 or 8"),
        ({**TWO, "steps": 4}, {}, "steps"),
        ({**TWO, "outer": 0.7}, {}, "expected a dict, such as {lr: 0.7"),
        ({**TWO, "outer": {"lr": 0}}, {}, "greater than 0"),
        ({**TWO, "outer": {"momentum": 1}}, {}, "less than 1"),
        ({**TWO, "outer": {"momentum": 0, "nesterov": True}}, {}, "goes with a momentum above 0"),
        (TWO, {"steps": 10}, "steps: 10 is no multiple of local_sgd.every, 4"),
        (TWO, {"steps": 3}, "such as 4"),
        (TWO, {"eval_every": 2}, "eval_every: 2 is no multiple"),
        (TWO, {"sampling": {"every": {"a": 2}}}, "does not go with sampling"),
        (TWO, {"ema": {"decay": 0.9}}, "does not go with ema"),
        (TWO, {"precision": "fp16-autocast"}, "does not go with precision: fp16-autocast"),
        (TWO, {"precision": "bf16"}, "does not go with precision: bf16"),
    ],
)
def test_what_cannot_be_meant_is_refused(local_sgd: object, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace("{", r"\{").replace("[", r"\[")):
        settings(local_sgd, **more)


def test_a_step_is_due_after_every_so_many_and_the_nearest_are_told() -> None:
    asked = LocalSgd(**TWO)
    assert [done for done in range(1, 10) if asked.has_outer_step(done)] == [4, 8]
    assert [nearest_multiples(steps, 4) for steps in (3, 5, 7)] == ["4", "4 or 8", "4 or 8"]


def test_state_is_the_common_point_and_the_momentum() -> None:
    """Of AdamW, whose own state is twice the parameters."""
    assert settings().state_per_param(2.0) == 4.0
    assert settings({**TWO, "outer": {"momentum": 0}}).state_per_param(2.0) == 3.0
    assert TrainSettings().state_per_param(2.0) == 2.0


def test_bytes_that_are_sent_are_by_the_bits() -> None:
    assert [LocalSgd(**TWO, bits=bits).sent_share for bits in (32, 16, 8)] == [1.0, 0.5, 0.25]
    assert [LocalSgd(**TWO, bits=bits).is_rounded for bits in (32, 16, 8)] == [False, True, True]


def test_an_island_has_its_part_of_every_batch_and_the_same_modules() -> None:
    whole = build()
    own = as_on_an_island(whole, settings(), "toy")
    assert [task.batch_size for task in own.tasks] == [4, 2]
    assert [task.batch_size for task in whole.tasks] == [8, 4]  # which a function may hand out again
    assert [task.module for task in own.tasks] == [task.module for task in whole.tasks]
    assert as_on_an_island(whole, TrainSettings(), "toy") is whole


@pytest.mark.parametrize(
    ("change", "train", "message"),
    [
        ({"batch_size": 9}, {}, "task 'large': its batch of 9 samples cannot be divided between 2 islands"),
        ({"reduction": "sum"}, {}, "its loss is a sum over the batch"),
        ({}, {"loader": {"workers": 1}}, "it has loader workers"),
    ],
)
def test_a_task_that_cannot_be_divided_is_refused(
    change: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    workload = build()
    for name, value in change.items():
        setattr(workload.tasks[0], name, value)
    with pytest.raises(WorkloadError, match=message):
        as_on_an_island(workload, settings(**train), "toy")


def test_a_stream_is_refused() -> None:
    workload = build()
    workload.tasks[1].dataset = iter([])
    with pytest.raises(WorkloadError, match="task 'small': its dataset is iterable"):
        as_on_an_island(workload, settings(), "toy")


def test_islands_take_the_batches_of_a_step_one_each_in_their_order() -> None:
    """Two batches a step on three islands: the run's batches 0 and 1 are of step 0, batch 2 of step 1."""
    of_island = [Schedule(Turns(None, ["a"], 0), 2, 3, number) for number in range(3)]
    assert [[each.own_number("a", number) for number in range(3)] for each in of_island] == [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5, 8],
    ]
    assert [list(each.own_numbers(range(1, 3))["a"]) for each in of_island] == [
        [6, 9, 12, 15],
        [7, 10, 13, 16],
        [8, 11, 14, 17],
    ]
    alone = Schedule(Turns(None, ["a"], 0), 2)
    assert alone.own_numbers(range(1, 3))["a"] == range(2, 6)


def test_the_workload_file_says_where_it_is_wrong(tmp_path: Path) -> None:
    from spindle_cli.errors import InputError
    from spindle_cli.workload.file import WorkloadFile

    path = tmp_path / "w.yaml"
    path.write_text("{schema: spindle.workload/1, model: a:b, train: {local_sgd: {islands: 2, evry: 4}}}")
    with pytest.raises(InputError, match=r"train.local_sgd.*evry"):
        WorkloadFile.read(path)
