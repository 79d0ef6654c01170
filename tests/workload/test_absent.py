"""Samples that lack a field: what a batch has in its place, and shares that train what the whole does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.absent_toys import build
from helpers.analysed import analysed
from helpers.anything import Anything
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.training.data.reading import first_samples
from spindle_cli.workload.building.checks import check_workload
from spindle_cli.workload.types import Task, Workload

from .shares import run_cut, run_plain

ZEROS = {"image": torch.zeros(2)}


def task_of(items: list[Any], batch_size: int = 2, **rest: Any) -> Task:
    return Task("t", Anything(), batch_size, items, **{"absent": ZEROS, **rest})


def test_what_is_absent_is_filled_and_a_field_says_so() -> None:
    task = task_of([{"x": 1.0, "image": torch.ones(2)}, {"x": 2.0}, {"x": 3.0, "image": None}], 3)
    batch = first_samples(task, 3)
    assert batch["image"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert batch["has_image"].tolist() == [True, False, False]
    assert batch["has_image"].dtype is torch.bool
    rows = Batches(task, 0).rows(0, 0, 3)
    assert rows["has_image"].tolist() == [x == 1.0 for x in rows["x"].tolist()]


def test_another_stand_in_than_zeros_is_what_stands_there() -> None:
    batch = first_samples(task_of([{}, {}], absent={"image": torch.tensor([3, 4])}), 2)
    assert batch["image"].tolist() == [[3, 4], [3, 4]]


@pytest.mark.parametrize("fields", [("image",), ("has_image",), ("x",), ("x", "image", "has_image")])
def test_a_rank_that_reads_some_fields_gets_those(fields: tuple[str, ...]) -> None:
    items = [{"x": 1.0}, {"x": 2.0, "image": torch.ones(2)}]
    batches = Batches(task_of(items), 0)
    whole = batches.rows(0, 0, 2)
    part = batches.rows(0, 0, 2, fields)
    assert set(part) == set(fields)
    assert all(torch.equal(part[name], whole[name]) for name in fields)


def test_an_array_of_numpys_is_as_good_as_a_tensor() -> None:
    batch = first_samples(task_of([{"image": np.ones(2, np.float32)}, {}]), 2)
    assert batch["image"].tolist() == [[1, 1], [0, 0]]


def test_a_collate_of_the_users_gets_whole_items() -> None:
    def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([item[name] for item in items]) for name in ("image", "has_image")}

    batch = first_samples(task_of([{}, {"image": torch.ones(2)}], collate=collate), 2)
    assert batch["has_image"].tolist() == [False, True]


def test_the_datasets_own_items_stay_as_they_are() -> None:
    items = [{"x": 1.0}, {"x": 2.0}]
    first_samples(task_of(items), 2)
    assert items == [{"x": 1.0}, {"x": 2.0}]


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"image": torch.ones(3)}, r"\(3,\) of torch.float32.*absent.*\(2,\)"),
        ({"image": torch.ones(2, dtype=torch.float64)}, "float64"),
        ({"has_image": True}, "has the field 'has_image'"),
        (torch.ones(2), "an item is a Tensor"),
    ],
)
def test_items_that_do_not_fit_are_refused(item: Any, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        first_samples(task_of([item, item]), 2)


@pytest.mark.parametrize("absent", [{"image": 0}, ["image"], {1: torch.zeros(1)}])
def test_absent_that_is_no_tensor_by_field_is_refused(absent: Any) -> None:
    with pytest.raises(WorkloadError, match="absent is"):
        check_workload(Workload("w", [task_of([{}], absent=absent)]), "here")


@pytest.mark.parametrize("present", [(), (4,), (0, 3), (0, 1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("cuts", [(0, 6), (0, 3, 6), (0, 1, 6), (0, 2, 3, 6)], ids=str)
def test_shares_train_the_whole_batch_where_some_none_or_all_have_it(
    present: tuple[int, ...], cuts: tuple[int, ...], absent_pair: Any
) -> None:
    graph, module = absent_pair
    torch.manual_seed(1)
    batch = {"text": torch.randn(6, 4).double(), "image": torch.randn(6, 4).double()}
    batch["has_image"] = torch.tensor([row in present for row in range(6)])
    expected, plain = gradients(run_plain(graph.task, batch), module)
    found, split = gradients(run_cut(graph, [batch], {op.index: list(cuts) for op in graph.ops}), module)
    assert found == pytest.approx(expected, abs=1e-12)
    assert [g is None for g in split] == [g is None for g in plain]
    for one, other in zip(split, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def gradients(loss: Tensor, module: nn.Module) -> tuple[float, list[Tensor]]:
    parameters = list(module.parameters())
    return loss.item(), list(torch.autograd.grad(loss, parameters, allow_unused=True))


@pytest.fixture(scope="module")
def absent_pair() -> Any:
    task = analysed(build()).tasks["pair"]
    task.root.double()
    assert not any(op.coupled for op in task.ops)
    return task, task.root
