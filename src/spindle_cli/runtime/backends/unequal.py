"""Gathers and reduce-scatters of unequal ranges over gloo, which has those of equal ones alone.

As torch makes them over NCCL: a broadcast of each range, or a reduction of each, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


def gather(gloo: Any, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> None:
    """An `allgather` over torch's group for gloo, to its end."""
    (ranges,), (own,) = outputs, inputs
    if _are_equal(ranges):
        gloo.allgather(outputs, inputs, *_given(options)).wait()
        return
    ranges[gloo.rank()].copy_(own)  # nothing, where it is a part of what is gathered
    for root, each in enumerate(ranges):
        if each.numel():  # gloo has no message of nothing
            gloo.broadcast([each], _from(root)).wait()


def reduce_scatter(gloo: Any, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None) -> None:
    """A `reduce_scatter` over torch's group for gloo, to its end."""
    (own,), (ranges,) = outputs, inputs
    if _are_equal(ranges):
        gloo.reduce_scatter(outputs, inputs, *_given(options)).wait()
        return
    for root, each in enumerate(ranges):
        if each.numel():
            total = each.clone()  # gloo leaves sums of some ranks in what the others gave
            gloo.reduce([total], _to(root, options)).wait()
            if root == gloo.rank():
                own.copy_(total)


def _are_equal(ranges: Sequence[Tensor]) -> bool:
    return len({each.numel() for each in ranges}) == 1


def _given(options: Any) -> tuple[Any, ...]:
    return () if options is None else (options,)


def _from(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def _to(root: int, of_all: Any) -> Any:
    options = dist.ReduceOptions()
    options.rootRank = root
    if of_all is not None:
        options.reduceOp = of_all.reduceOp
    return options
