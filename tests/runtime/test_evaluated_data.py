"""What an evaluation reads: every sample once, in order, whoever reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from helpers.data_toys import ByIndex
from helpers.loading import SEED, read, task_of
from spindle_cli.analysis.evaluation import InOrder, ReadBatch, StreamInOrder
from spindle_cli.errors import RunFailedError
from spindle_cli.runtime.loading.passes import NodePasses
from spindle_cli.workload.types import Task

ENDLESS = range(2**62)


class Streamed(IterableDataset[dict[str, Tensor]]):
    """Its samples, with noise that is drawn as they are read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"x": torch.tensor([float(n)]) + 0.1 * torch.rand(1)} for n in range(self.count))


def values(batches: Iterator[ReadBatch]) -> list[Any]:
    """Of each batch its size and all of it, read in two parts."""
    found = []
    for batch in batches:
        parts = [batch.rows(first, last, ("x", "unknown")) for first, last in ((0, 1), (1, batch.size))]
        assert all(part.keys() == {"x"} for part in parts)
        found.append((batch.size, torch.cat([part["x"] for part in parts]).flatten().tolist()))
    return found


def here(task: Task) -> list[Any]:
    """Read by this process."""
    data = StreamInOrder(task, SEED) if isinstance(task.dataset, IterableDataset) else InOrder(task, SEED)
    found = values(data.batches())
    assert values(data.batches()) == found
    return found


@pytest.mark.parametrize("dataset", [ByIndex(10), Streamed(10)], ids=["by index", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_pass_has_all_samples_in_order_and_a_last_smaller_batch(dataset: Any, workers: int) -> None:
    task = task_of(dataset)
    expected = here(task)
    assert [size for size, _ in expected] == [4, 4, 2]
    with read(task, ENDLESS, workers, takers=2, evaluates=True) as takers:
        passes = [NodePasses(taker) for taker in takers]
        for _ in range(3):
            assert [values(each.batches()) for each in passes] == [expected, expected]


def test_a_stream_whose_last_batch_is_full_has_no_other() -> None:
    with read(task_of(Streamed(8)), ENDLESS, evaluates=True) as (taker,):
        passes = NodePasses(taker)
        assert [[batch.size for batch in passes.batches()] for _ in range(2)] == [[4, 4], [4, 4]]


def test_the_next_pass_begins_at_its_beginning_though_one_was_left() -> None:
    task = task_of(Streamed(10))
    with read(task, ENDLESS, evaluates=True) as (taker,):
        passes = NodePasses(taker)
        first = passes.first()
        assert first is not None and first.size == 4
        left = next(passes.batches())
        assert torch.equal(left.rows(0, 4, ("x",))["x"], first.rows(0, 4, ("x",))["x"])
        assert values(passes.batches()) == here(task)


def test_no_samples_are_an_empty_pass() -> None:
    with read(task_of(Streamed(0)), ENDLESS, evaluates=True) as (taker,):
        passes = NodePasses(taker)
        assert passes.first() is None
        assert list(passes.batches()) == []
        assert list(passes.batches()) == []


def test_a_sample_that_fails_is_named_where_it_is_waited_for() -> None:
    with read(task_of(ByIndex(10, fails_at=5)), ENDLESS, evaluates=True) as (taker,):
        batches = NodePasses(taker).batches()
        assert next(batches).size == 4
        with pytest.raises(RunFailedError, match="sample 5 is broken") as caught:
            next(batches)
        assert "samples 4 to 7 of the dataset that task 't' is evaluated on" in caught.value.message
