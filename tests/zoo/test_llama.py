"""The language model that fits no device whole: its size, and a plan for it from meta tensors alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.zoo import llama

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(("size", "billions"), [("70b", 70.3), ("300m", 0.305)])
def test_it_has_as_many_parameters_as_its_name_says(size: str, billions: float) -> None:
    loaded = load_abstract(str(CONFIGS / "workloads" / f"llama-{size}.yaml"))
    model = loaded.workload.tasks[0].module
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_both_tasks_train_one_model_on_texts_of_their_lengths() -> None:
    workload = llama.build("laptop", batch_sizes={"write": 4})
    write, instruct = workload.tasks
    assert write.module.model is instruct.module.model
    assert [(task.batch_size, task.dataset[0]["text"].shape) for task in workload.tasks] == [
        (4, (25,)),
        (16, (9,)),
    ]


def test_a_size_that_there_is_not_is_refused() -> None:
    with pytest.raises(WorkloadError, match="llama: size: found '7b', expected one of 70b, 300m, laptop"):
        llama.build("7b")  # type: ignore[arg-type]
