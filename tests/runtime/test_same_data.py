"""A dataset that is another on one of several ranks that read rows of the same batches is refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from helpers.anything import Anything
from spindle_cli.errors import WorkloadError
from spindle_cli.files.request import SeenData
from spindle_cli.runtime.feeding import require_same_data
from spindle_cli.training.data.streams import UNREADABLE, look_at
from spindle_cli.workload.types import Task

Items = list[dict[str, Tensor]]


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from samples(1)


def samples(seed: int, count: int = 6) -> Items:
    random = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(3, generator=random)} for _ in range(count)]


def task(dataset: Any) -> Task:
    return Task("t", Anything(), 2, dataset)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, SeenData]]:
    """What the other ranks say."""
    told: list[dict[str, SeenData]] = []

    def gather(gathered: list[Any], own: Any, **_: object) -> None:
        gathered[:] = [*told, own]

    monkeypatch.setattr(dist, "get_world_size", lambda: len(told) + 1)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    return told


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (samples(2), "the dataset of rank 2 has another first sample than that of rank 0"),
        (samples(1, count=5), "the dataset of rank 2 has another length than that of rank 0"),
    ],
)
def test_another_dataset_than_on_another_rank_is_refused(
    others: list[dict[str, SeenData]], own: Items, message: str
) -> None:
    others += [{"t": look_at(task(samples(1)))}, {}]
    with pytest.raises(WorkloadError, match=f"task 't': {message}") as caught:
        require_same_data([task(own)])
    assert "draw in build()" in str(caught.value.hint)


def test_the_same_is_taken_and_so_is_what_cannot_be_compared(others: list[dict[str, SeenData]]) -> None:
    others += [{"t": look_at(task(samples(1)))}, {}]
    require_same_data([task(samples(1))])
    require_same_data([task(Stream())])
    others[0] = {"t": SeenData(num_samples=6, samples={0: UNREADABLE})}
    require_same_data([task(samples(2))])
