"""One device's part of an op that tensor parallelism splits, or one share of an op whose shares sum or
gather, run by itself: what the devices sum is counted, and its time comes from the links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from spindle_cli.costs.links import all_gather_s, all_reduce_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.operators.split_op import PartialOp, View, region_of
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.op.op_run import copy_of
from spindle_cli.profile.types import PhaseTimes
from spindle_cli.workload.graph import TaskGraph


def _counted(
    kind: Literal["sum", "gather"], forward: tuple[int, ...], backward: tuple[int, ...]
) -> tuple[BatchSum, ...]:
    ahead, back = Counter(forward), Counter(backward)
    return tuple(
        BatchSum(kind=kind, num_bytes=num_bytes, forward=ahead[num_bytes], backward=back[num_bytes])
        for num_bytes in sorted({*ahead, *back})
    )


@dataclass(frozen=True)
class SplitSums:
    """Bytes of each activation that the devices sum in the forward pass, and of each gradient in the backward
    pass; of all rows of what they gather forward, and of what they sum and hand back in parts. Along a
    sequence: of all positions of what they gather, or sum and hand out in parts, in each pass; and of what a
    device has of what they exchange around experts.
    """

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    gathers: tuple[int, ...] = ()
    scatters: tuple[int, ...] = ()
    forward_along: tuple[int, ...] = ()
    backward_along: tuple[int, ...] = ()

    def as_batch_sums(self) -> tuple[BatchSum, ...]:
        """Return these sums, counted by their bytes."""
        sums = _counted("sum", self.forward, self.backward)
        return sums + _counted("gather", self.gathers, self.scatters)

    def added_to(self, times: PhaseTimes, tp: int, cluster: Cluster) -> PhaseTimes:
        """Return the times of one device's part with those of its sums, over `tp` devices of a node."""
        forward_s, backward_s = (
            sum(all_reduce_s(num_bytes, range(tp), cluster) for num_bytes in sums)
            + sum(all_gather_s(num_bytes, range(tp), cluster) for num_bytes in along)
            for sums, along in (
                (self.forward, self.forward_along),
                (self.backward, self.backward_along),
            )
        )
        return times.model_copy(
            update={
                "forward_s": times.forward_s + forward_s,
                "backward_s": times.backward_s + backward_s,
                "communication_s": forward_s + backward_s,
            }
        )


@dataclass
class SumCounter(TensorGroup):
    """Stands for the other devices of a group, and only counts what they would sum.

    `itemsize`: bytes of an element by dtype, where they are not the tensor's own.
    """

    itemsize: Callable[[torch.dtype], int] | None = None
    _forward: list[int] = field(default_factory=list)
    _backward: list[int] = field(default_factory=list)
    _gathers: list[int] = field(default_factory=list)
    _scatters: list[int] = field(default_factory=list)
    _forward_along: list[int] = field(default_factory=list)
    _backward_along: list[int] = field(default_factory=list)

    def sum_(self, tensor: Tensor, *, is_gradient: bool) -> None:
        """Count a sum over the shares, and give the tensor itself."""
        (self._backward if is_gradient else self._forward).append(self._bytes(tensor))

    def max_(self, tensor: Tensor) -> None:
        """Count it: it moves as a sum does."""
        self._forward.append(self._bytes(tensor))

    def gather(self, rows: Tensor, per_share: Sequence[int]) -> Tensor:
        """Give this share's rows in the place of those of all, which takes memory and time as those do."""
        whole = torch.cat([rows] * -(-sum(per_share) // len(rows)))[: sum(per_share)]
        self._gathers.append(whole.nbytes)
        return whole

    def scatter_sum(self, whole: Tensor, per_share: Sequence[int]) -> Tensor:
        """Give this share's part of the rows."""
        self._scatters.append(whole.nbytes)
        return whole[: per_share[0]].clone()

    def gather_along(self, positions: Tensor, dim: int, sizes: Sequence[int], *, is_gradient: bool) -> Tensor:
        """Give this device's positions in the place of those of all."""
        whole = torch.cat([positions.narrow(dim, 0, size) for size in sizes], dim)
        self._along(whole, is_gradient)
        return whole

    def scatter_sum_along(
        self, whole: Tensor, dim: int, sizes: Sequence[int], *, is_gradient: bool
    ) -> Tensor:
        """Give this device's positions."""
        self._along(whole, is_gradient)
        return whole.narrow(dim, 0, sizes[0]).clone()

    def exchange(
        self,
        part: Tensor,
        cut: tuple[int, Sequence[int]],
        joined: tuple[int, Sequence[int]],
        *,
        is_gradient: bool,
    ) -> Tensor:
        """Give this device's part in the place of those of all; counted by what it has, of which it keeps a
        part and sends the rest, as when so much is gathered.
        """
        (cut_dim, cut_sizes), (dim, sizes) = cut, joined
        kept = part.narrow(cut_dim, 0, max(cut_sizes))
        self._along(part, is_gradient)
        return torch.cat([kept.narrow(dim, 0, size) for size in sizes], dim)

    def _along(self, whole: Tensor, is_gradient: bool) -> None:
        (self._backward_along if is_gradient else self._forward_along).append(self._bytes(whole))

    def _bytes(self, tensor: Tensor) -> int:
        return tensor.nbytes if self.itemsize is None else tensor.numel() * self.itemsize(tensor.dtype)

    def take(self) -> SplitSums:
        """Return what was counted so far, in one run."""
        return SplitSums(
            tuple(self._forward),
            tuple(self._backward),
            tuple(self._gathers),
            tuple(self._scatters),
            tuple(self._forward_along),
            tuple(self._backward_along),
        )


def one_part(op: nn.Module, split: LayerSplit, sums: SumCounter) -> PartialOp:
    """Return the first device's part of an op, with parameters of its own; the op is left as it is."""
    module = copy_of(op)
    made: dict[int, View] = {}
    views: dict[str, View] = {}
    for name, whole in module.named_parameters(remove_duplicate=False):
        if name not in split.dims:
            continue
        if id(whole) not in made:
            dim = split.dims[name]
            part = whole.detach().narrow(dim, 0, -(-whole.shape[dim] // split.degree)).clone()
            made[id(whole)] = View((nn.Parameter(part, whole.requires_grad),), dim)
            whole.data = whole.new_empty(0)
        views[name] = made[id(whole)]
    return PartialOp(module, views, region_of(module, split, sums))


def equal_cuts(task: TaskGraph, rows: int) -> tuple[int, ...]:
    """Return where the shares of a task's batch end that have so many samples each, which divide it."""
    return tuple(range(0, task.task.batch_size + 1, rows))
