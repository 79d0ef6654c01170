"""Numbers of types that NCCL does not know go as others that it does: over a backend that refuses them."""

from __future__ import annotations

import math
import multiprocessing
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spindle_cli.operators.tensor_group import (
    TensorGroup,
    as_sent,
    as_summed,
    fill_with_nothing,
    unless_nothing,
)
from spindle_cli.runtime.backends.strict_backend import (
    STRICT,
    OperationQueue,
    StrictGroup,
    register_strict_backends,
)
from spindle_cli.runtime.communication.collectives import Members, start_gather, start_scatter

CPU = torch.device("cpu")
COMPLEX = [1 + 2j, 3 - 1j, 0.5j, 2 + 0j, -1 + 1j, 4 + 4j]


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn])
def test_what_nccl_does_not_know_goes_as_bytes_of_the_same_memory(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 2], [3, 4]]).to(dtype)
    sent = as_sent(tensor)
    assert sent.dtype == torch.uint8 and sent.numel() == 4 * tensor.itemsize
    assert sent.data_ptr() == tensor.data_ptr()
    assert as_sent(torch.tensor(7).to(dtype)).numel() == tensor.itemsize  # also of no dimension


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64])
def test_what_it_knows_goes_as_it_is(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, dtype=dtype)
    assert as_sent(tensor) is tensor and as_summed(tensor) is tensor


def test_conjugates_and_negatives_are_sent_as_what_they_are() -> None:
    """torch only marks them; their memory has other numbers."""
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    assert as_sent(numbers.conj()).tolist() == [[1.0, -2.0], [3.0, 1.0]]
    assert as_sent(numbers).data_ptr() == numbers.data_ptr()
    negative = torch._neg_view(torch.tensor([1.0, 2.0]))
    assert negative.is_neg() and not as_sent(negative).is_neg()
    assert as_sent(negative).tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_what_is_no_gradient_is_told_from_every_number(dtype: torch.dtype) -> None:
    """Also from what overflows and from numbers that are none."""
    for number in (0.0, 1.0, math.inf, math.nan, -math.nan):
        plain = torch.full((2, 3), number, dtype=dtype)
        assert unless_nothing(plain) is plain
    sent = torch.ones((4, 3), dtype=dtype)
    fill_with_nothing(sent[:, 1:])  # rows that other devices send, or columns
    assert unless_nothing(sent).tolist() == [[1.0, 0.0, 0.0]] * 4  # type: ignore[union-attr]
    fill_with_nothing(sent)
    assert unless_nothing(sent) is None
    assert unless_nothing(sent[:0]) is None


def test_the_strict_backend_refuses_what_nccl_does_not_know() -> None:
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    group = StrictGroup(gloo, 0, 1, OperationQueue())
    for dtype in (torch.complex64, torch.int16):
        tensor = torch.ones(2, dtype=dtype)
        with pytest.raises(TypeError, match=f"Unconvertible NCCL type {dtype}"):
            group.send([tensor], 0, 0)
        with pytest.raises(TypeError, match="Unconvertible"):
            group.recv([tensor], 0, 0)
        with pytest.raises(TypeError, match="Unconvertible"):
            group.reduce_scatter([tensor], [[tensor]])


def talk_as_rank(rank: int, folder: str) -> None:
    register_strict_backends()
    dist.init_process_group(STRICT, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    world = dist.group.WORLD
    for cuts in ((), (0, 2, 6)):
        flat = torch.tensor(COMPLEX) * (rank + 1)  # 1 and 2 times: the sum is 3 times
        members = Members(2, rank, world, cuts=cuts)
        start_scatter(flat, members).finish()
        start_gather(flat, members).wait()
        assert flat.tolist() == [3 * number for number in COMPLEX], cuts

    group = TensorGroup((0, 1), rank, CPU)
    group.join(world)
    own = torch.tensor([[300, -2], [7, 8]], dtype=torch.int16) + rank
    assert group.gather(own[: 2 - rank].contiguous(), (2, 1)).tolist() == [[300, -2], [7, 8], [301, -1]]
    exchanged = group.exchange(own, (1, (1, 1)), (0, (2, 2)), is_gradient=False)
    assert exchanged.tolist() == [[[300], [7], [301], [8]], [[-2], [8], [-1], [9]]][rank]

    for sent in (own, torch.tensor(COMPLEX) + rank):
        arrives = torch.empty_like(sent)
        messages = [
            dist.P2POp(dist.isend, as_sent(sent), 1 - rank),
            dist.P2POp(dist.irecv, as_sent(arrives), 1 - rank),
        ]
        for work in dist.batch_isend_irecv(messages if rank == 0 else messages[::-1]):
            work.wait()
        assert torch.equal(arrives, sent - rank + (1 - rank))
    (Path(folder) / f"done-{rank}").touch()
    dist.barrier()
    os._exit(0)  # the strict backend's threads know no end


@pytest.mark.processes
def test_complex_sums_and_short_whole_numbers_go_over_it(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload([start_scatter.__module__])
    torch.multiprocessing.start_processes(
        talk_as_rank, args=(str(tmp_path),), nprocs=2, start_method="forkserver"
    )
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]


def test_a_reduce_scatter_of_complex_numbers_is_one_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL, inside of an op: torch makes pairs of them for every other collective."""
    seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def reduce_scatter(own: Tensor, laid: Tensor, group: object = None) -> None:
        seen.append((laid.dtype, tuple(laid.shape)))
        own.copy_(laid[: len(own)])

    monkeypatch.setattr("spindle_cli.operators.tensor_group._reduce_scatter", reduce_scatter)
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    group = TensorGroup((0, 1), 0, CPU)
    group.join(dist.group.WORLD or object())  # type: ignore[arg-type]
    own = group.scatter_sum(torch.tensor(COMPLEX), (3, 3))
    assert own.tolist() == COMPLEX[:3]
    assert seen == [(torch.float32, (6, 2))]
