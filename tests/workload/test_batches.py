"""Which samples make a batch, and what is refused as one."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import default_collate

from helpers.anything import Anything
from helpers.examples import examples
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.training.items import seed_of
from spindle_cli.workload.types import Task


def task_of(dataset: Any, batch_size: int = 4, name: str = "t", **rest: Any) -> Task:
    return Task(name, Anything(), batch_size, dataset, **rest)


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"x": torch.full((2,), index), "y": index} for index in range(count)]


@examples(30)
@given(count=st.integers(1, 40), batch_size=st.integers(1, 40), seed=st.integers(0, 2**63 - 1))
def test_an_epoch_takes_no_sample_twice_and_leaves_out_less_than_a_batch(
    count: int, batch_size: int, seed: int
) -> None:
    if count < batch_size:
        with pytest.raises(WorkloadError, match="fewer than one batch"):
            Batches(task_of(numbered(count), batch_size), seed)
        return
    batches = Batches(task_of(numbered(count), batch_size), seed)
    taken = [index for step in range(batches.steps_per_epoch) for index in batches.indices(step)]
    assert len(taken) == len(set(taken)) == count - count % batch_size
    assert set(taken) <= set(range(count))


def test_epochs_seeds_and_tasks_have_orders_of_their_own() -> None:
    data = numbered(64)
    orders = [
        Batches(task_of(data, 64, name), seed).indices(step)
        for name, seed, step in (("t", 0, 0), ("t", 0, 1), ("t", 1, 0), ("u", 0, 0))
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_of_a_large_dataset_takes_little_memory() -> None:
    """4 bytes a sample, and what is handed out are plain numbers."""
    batches = Batches(task_of(range(100_000), 3), seed=7)
    tracemalloc.start()
    found = batches.indices(5)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 500_000
    seed = seed_of(7, "t", 0)
    order = torch.randperm(100_000, generator=torch.Generator().manual_seed(seed))
    assert found == order[15:18].tolist()
    assert [type(each) for each in found] == [int] * 3


def test_steps_can_be_asked_for_in_any_order() -> None:
    batches = Batches(task_of(numbered(9)), 3)
    forward = [batches.indices(step) for step in range(6)]
    assert [batches.indices(step) for step in (5, 0, 3, 1, 4, 2)] == [forward[s] for s in (5, 0, 3, 1, 4, 2)]


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_takes_the_samples_of_one_undisturbed() -> None:
    undisturbed = Batches(task_of(numbered(22)), 3)  # 5 steps an epoch
    expected = [undisturbed.rows(step, 0, 4)["y"].tolist() for step in range(12)]
    for begin in (3, 5, 8):
        gone_on = Batches(task_of(numbered(22)), 3)
        assert [gone_on.rows(step, 0, 4)["y"].tolist() for step in range(begin, 12)] == expected[begin:]


def test_the_global_generator_has_no_part_in_it() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = Batches(task_of(numbered(9)), 3).indices(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert Batches(task_of(numbered(9)), 3).indices(0) == first


def test_shares_are_rows_of_the_batch_and_fields_of_a_sample_stay_together() -> None:
    batches = Batches(task_of(numbered(20)), 0)
    whole = batches.rows(2, 0, 4)
    parts = [batches.rows(2, 0, 1), batches.rows(2, 1, 4)]
    assert torch.equal(whole["x"], torch.cat([part["x"] for part in parts]))
    assert torch.equal(whole["x"][:, 0], whole["y"])
    assert batches.rows(2, 1, 3, ["y"]).keys() == {"y"}


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], "cannot be put into one batch"),
        ([{"x": 1}, {"y": 1}], "cannot be put into one batch"),
        ([{"x": 1, "y": 1}, {"x": 1, "y": None}], "'y' is None in some of them and a value in others"),
        ([(1, None), (1, 2)], "1 is None in some of them and a value in others"),
        ([{"x": 1, "y": None}, {"x": 1, "y": 1}], "'y' is None in some of them and a value in others"),
        ([(1, 2), (3, 4)], r"a batch is a list of 2 \(tensor, tensor\), and forward takes 'batch'"),
    ],
)
def test_items_that_make_no_batch(items: list[Any], found: str) -> None:
    with pytest.raises(WorkloadError, match=found):
        Batches(task_of(items, 2), 0).rows(0, 0, 2)


def test_a_collate_of_ones_own() -> None:
    def pad(items: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": nn.utils.rnn.pad_sequence([item["x"] for item in items], batch_first=True)}

    items = [{"x": torch.ones(length)} for length in (1, 2, 3, 4)]
    assert Batches(task_of(items, collate=pad), 0).rows(0, 0, 4)["x"].shape == (4, 4)
    with pytest.raises(WorkloadError, match="field 'x' of a batch is a int, expected a tensor"):
        Batches(task_of(items, collate=lambda items: {"x": len(items)}), 0).rows(0, 0, 4)
    wrong = task_of(items, collate=lambda items: {"x": torch.zeros(3, len(items))})
    with pytest.raises(WorkloadError, match=r"batch of 4 samples has shape \(3, 4\)"):
        Batches(wrong, 0).rows(0, 0, 4)


@pytest.mark.parametrize("error", [ZeroDivisionError, IndexError, ValueError])
def test_a_collate_that_raises_is_named_with_its_place(error: type[Exception]) -> None:
    def raises(items: list[Any]) -> dict[str, torch.Tensor]:
        raise error("of no use")

    with pytest.raises(WorkloadError, match=r"test_batches\.py:\d+: task 't'") as caught:
        Batches(task_of(numbered(4), collate=raises), 0).rows(0, 0, 4)
    assert f"its collate raises {error.__name__}: of no use" in caught.value.message


def padded(items: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": nn.utils.rnn.pad_sequence([item["x"] for item in items], batch_first=True)}


def test_a_share_is_padded_as_the_whole_batch_is() -> None:
    items = [{"x": torch.ones(length)} for length in (1, 2, 3, 4)]
    batches = Batches(task_of(items, collate=padded), 0)
    whole = Batches(task_of(items, collate=padded), 0).rows(0, 0, 4)["x"]
    assert torch.equal(torch.cat([batches.rows(0, row, row + 1)["x"] for row in range(4)]), whole)


def test_padding_that_depends_on_the_batch_is_refused() -> None:
    """A batch would get other shapes than the plan's, so its sizes would not hold."""
    items = [{"x": torch.ones(length)} for length in (1, 2, 3, 4)]
    batches = Batches(task_of(items, 1, collate=padded), 0)
    with pytest.raises(WorkloadError, match="other shapes"):
        for step in range(4):
            batches.rows(step, 0, 1)


def test_a_dataset_without_length_or_index() -> None:
    with pytest.raises(WorkloadError, match="no length or no items by index"):
        Batches(task_of(iter([])), 0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.ones(2, requires_grad=True), "requires gradients, which end at the dataset"),
        (torch.ones(2, requires_grad=True) * 2, "requires gradients, which end at the dataset"),
        (torch.ones(2, device="meta"), "has no values: the dataset computes it with parameters"),
    ],
)
@pytest.mark.parametrize("collates", [False, True])
def test_items_that_no_sample_can_be_are_named_before_torch_puts_them_together(
    value: torch.Tensor, expected: str, collates: bool
) -> None:
    """In a worker's process torch has only words about its own arguments for it."""
    more: dict[str, Any] = {"collate": default_collate} if collates else {}
    with pytest.raises(WorkloadError, match=f"field 'x' of the dataset's items {expected}"):
        Batches(task_of([{"x": value}] * 4, **more), seed=0).rows(0, 0, 4)
