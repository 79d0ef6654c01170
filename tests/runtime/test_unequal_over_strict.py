"""Over the strict backend, ranges of unequal sizes are gathered and summed as over NCCL: right by numbers,
and in the order in which they were posted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spindle_cli.runtime.backends.strict_backend import OperationQueue, StrictGroup

# What three ranks own of a flat tensor: of unequal sizes, with nothing for one of them, of one size.
SIZES = ((3, 1, 4), (0, 5, 2), (2, 2, 2))
RANKS = range(3)
TIMEOUT_S = 30.0


def in_group(run: Callable[[StrictGroup, int], object], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What each of three ranks, a thread each with one communicator of them all, gives."""
    store = dist.HashStore()

    def as_rank(rank: int) -> object:
        gloo = dist.ProcessGroupGloo(store, rank, len(RANKS), timedelta(seconds=timeout_s))
        return run(StrictGroup(gloo, rank, len(RANKS), OperationQueue()), rank)

    with ThreadPoolExecutor(len(RANKS)) as threads:
        return [done.result() for done in [threads.submit(as_rank, rank) for rank in RANKS]]


def numbers(rank: int, sizes: tuple[int, ...]) -> Tensor:
    """A flat tensor of this rank: 100, 101, ... of rank 1."""
    return torch.arange(100.0 * rank, 100.0 * rank + sum(sizes))


def gathered_in_place(group: StrictGroup, rank: int, sizes: tuple[int, ...]) -> tuple[Tensor, Any]:
    """The gathering that the runtime starts: each rank's range is where it belongs."""
    flat = numbers(rank, sizes)
    parts = list(flat.split(sizes))
    return flat, group.allgather([parts], [parts[rank]])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_gather_gives_every_rank_the_ranges_of_all_others(sizes: tuple[int, ...]) -> None:
    def gather(group: StrictGroup, rank: int) -> Tensor:
        flat, work = gathered_in_place(group, rank, sizes)
        work.wait()
        return flat

    expected = torch.cat([numbers(rank, sizes).split(sizes)[rank] for rank in RANKS])
    for found in in_group(gather):
        assert torch.equal(found, expected)


def test_a_gather_takes_what_is_elsewhere() -> None:
    def gather(group: StrictGroup, rank: int) -> list[float]:
        flat = torch.zeros(3)
        group.allgather([list(flat.split((2, 0, 1)))], [torch.full(((2, 0, 1)[rank],), rank + 1.0)]).wait()
        return flat.tolist()

    assert in_group(gather) == [[1.0, 1.0, 3.0]] * 3


@pytest.mark.parametrize(("operation", "factor"), [("SUM", 1.0), ("MAX", None)], ids=["sum", "max"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_reduce_scatter_gives_each_rank_the_sum_of_its_range(
    sizes: tuple[int, ...], operation: str, factor: float | None
) -> None:
    def scatter(group: StrictGroup, rank: int) -> tuple[Tensor, Tensor]:
        flat, own = numbers(rank, sizes), torch.full((sizes[rank],), -1.0)
        options = dist.ReduceScatterOptions()
        options.reduceOp = getattr(dist.ReduceOp, operation)
        group.reduce_scatter([own], [list(flat.split(sizes))], options).wait()
        return own, flat

    everyone = torch.stack([numbers(rank, sizes) for rank in RANKS])
    expected = everyone.sum(0) if factor else everyone.amax(0)
    for rank, (own, flat) in enumerate(in_group(scatter)):
        assert torch.equal(own, expected.split(sizes)[rank])
        assert torch.equal(flat, numbers(rank, sizes)), "what is not this rank's own is left alone"


def test_a_sum_into_its_own_range_as_the_runtime_asks_for_it() -> None:
    """(3, 1, 4) elements: of rank 2 the last four of 100 r + 0..7, summed over r: 300 + 3 k."""

    def scatter(group: StrictGroup, rank: int) -> list[float]:
        parts = list(numbers(rank, SIZES[0]).split(SIZES[0]))
        group.reduce_scatter([parts[rank]], [parts]).wait()
        return parts[rank].tolist()

    assert in_group(scatter) == [[300.0, 303.0, 306.0], [309.0], [312.0, 315.0, 318.0, 321.0]]


def test_it_is_one_operation_behind_what_was_posted_before() -> None:
    """Rank 0 posts a message to rank 1 first, and rank 1 takes it behind the gather: neither ever ends."""

    def in_other_orders(group: StrictGroup, rank: int) -> None:
        message = torch.zeros(1)
        early = [group.send([message], 1, 0)] if rank == 0 else []
        _, work = gathered_in_place(group, rank, SIZES[0])
        late = [group.recv([message], 0, 0)] if rank == 1 else []
        for each in (*early, work, *late):
            each.wait()

    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|closed"):
        in_group(in_other_orders, timeout_s=0.5)
