"""A field that is taken as the same in every sample is checked wherever a run reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import run_case, world_of_one
from case_runs import SGD, Case
from torch.utils.data import default_collate

from helpers.torch_versions import widens_gradients
from spindle_cli.analysis.fixed import same_in_every_sample
from spindle_cli.errors import WorkloadError
from spindle_cli.files.runs.records import read_evaluations
from spindle_cli.workload.building.load import load
from spindle_cli.workload.types import Task


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def case(name: str, train: dict[str, Any] | None = None, dtype: Any = "float64", **args: object) -> Case:
    return Case(name, (0,), "fixed_toys", args=args, train={**SGD, **(train or {})}, steps=5, dtype=dtype)


@pytest.mark.parametrize("task", ["odd", "odd_evaluated", "odd_only"])
def test_a_sample_that_differs_ends_the_run_where_it_is_read(task: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"'grid' is \[3, 2\] in a sample, and \[2, 3\]"):
        run_case(case("run", **{task: 19}), tmp_path / "run")


@pytest.mark.parametrize(
    "train", [{}, {"compile": "aot_eager"}, {"loader": {"workers": 1}}, {"accumulate": 2}]
)
def test_a_run_whose_samples_are_the_same_ends(train: dict[str, object], tmp_path: Path) -> None:
    request = run_case(case("run", train={**train, "eval_every": 2}), tmp_path / "run")
    lines = [(line.step, line.task, line.num_samples) for line in read_evaluations(request.run_dir)]
    assert lines == [
        (step, task, count) for step in (2, 4, 5) for task, count in (("images", 22), ("own", 21))
    ]


@widens_gradients
def test_what_is_only_evaluated_computes_in_the_numbers_of_the_run(tmp_path: Path) -> None:
    """Its buffers stay converted from one evaluation to the next."""
    made = case("run", dtype=None, train={"precision": "bf16", "eval_every": 2, "lr": 1e-9})
    request = run_case(made, tmp_path / "run")
    (task,) = load(str(request.workload)).workload.evaluated
    assert isinstance(task, Task)
    module = task.module.bfloat16().eval()
    batch = default_collate([task.eval_dataset[index] for index in range(21)])
    with torch.no_grad():
        expected = module(batch["x"].bfloat16(), batch["grid"])["power"].double().mean().item()
    losses = [each.loss for each in read_evaluations(request.run_dir) if each.task == "own"]
    assert losses == pytest.approx([expected] * 3, rel=1e-2)


@pytest.mark.parametrize("shape", [(), (2,), (1, 2)])
def test_a_share_without_samples_is_checked(shape: tuple[int, ...]) -> None:
    row = tuple(range(1, 1 + math.prod(shape)))
    same_in_every_sample(torch.zeros((0, *shape), dtype=torch.int64), "grid", shape, row)
