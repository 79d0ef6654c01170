"""Devices that sum and gather tensors together inside of an op's passes; and how tensors go over a
communicator whose library knows fewer types of numbers than torch.

torch's group for NCCL has whole numbers of 8, 32 and 64 bits, and real ones (its `getNcclDataType`): others
go as their bytes, and complex numbers as pairs of real ones. torch.distributed does the latter by itself, but
not in a reduce-scatter. gloo takes more; what goes over it goes in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from spindle_cli.errors import PeerLostError

KNOWN = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


def as_sent(tensor: Tensor) -> Tensor:
    """What goes over a communicator of a contiguous tensor that is sent, received or gathered: a view of it,
    but where it is the conjugate, or the negative, of what its memory has.
    """
    if tensor.dtype in KNOWN:
        return tensor.resolve_neg()
    if tensor.is_complex():
        return as_summed(tensor)
    return tensor.reshape(-1).view(torch.uint8)


def as_summed(tensor: Tensor) -> Tensor:
    """A view of a tensor that is summed, in numbers that can be."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


# No number (NaN), with bits that no arithmetic makes, by the bytes of a number.
_NOTHING = {2: 0x7FD5, 4: 0x7FD5_AA55, 8: 0x7FFD_5AA5_55AA_A55A}
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fill_with_nothing(tensor: Tensor) -> None:
    """Let a tensor say that there is no gradient, to who gets its bits."""
    bits = _bits(tensor)
    bits.fill_(_NOTHING[bits.element_size()])


def unless_nothing(tensor: Tensor) -> Tensor | None:
    """A tensor, with zeros where a part of it says that there is no gradient; None where all of it does. The
    host waits for it.
    """
    bits = _bits(tensor)
    is_nothing = bits == _NOTHING[bits.element_size()]
    count = int(is_nothing.count_nonzero())
    if count == bits.numel():
        return None
    if count:
        bits.masked_fill_(is_nothing, 0)
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor's memory as whole numbers."""
    real = as_summed(tensor)
    return real.view(_WHOLE[real.element_size()])


# torch 2.13 has given these new names, and warns of the old ones.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass
class TensorGroup:
    """The devices that hold one batch share of a slice, or each one share of it, as one of them sees it.

    `member`: its place among `ranks`. The communicator comes when all ranks' programs are known (`join`).
    """

    ranks: tuple[int, ...]
    member: int
    device: torch.device
    _communicator: dist.ProcessGroup | None = None

    def join(self, communicator: dist.ProcessGroup | None) -> None:
        """Take the communicator of these ranks."""
        self._communicator = communicator

    def sum_(self, tensor: Tensor, *, is_gradient: bool) -> None:  # noqa: ARG002 - for who counts sums
        """Sum a contiguous tensor, an activation or a gradient, over the group, in place.

        Raises:
            PeerLostError: another device is gone, or did not answer within the timeout.
        """
        with _losing_peers():
            dist.all_reduce(tensor, group=self._joined())

    def max_(self, tensor: Tensor) -> None:
        """Take the largest of each entry of a contiguous tensor over the group, in place.

        Raises:
            PeerLostError: as `sum_`.
        """
        with _losing_peers():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._joined())

    def gather(self, shard: Tensor, per_share: Sequence[int]) -> Tensor:
        """The rows of all members, in their order, which have `per_share` of them; of a contiguous tensor.

        Raises:
            PeerLostError: as `sum_`.
        """
        most, order = max(per_share), self._order()
        every = shard.new_empty((len(self.ranks), most, *shard.shape[1:]))
        padded = functional.pad(shard, (*(0, 0) * (shard.dim() - 1), 0, most - len(shard)))
        with _losing_peers():
            _all_gather(as_sent(every.flatten(0, 1)), as_sent(padded), group=self._joined())
        parts = [every[order[share], :rows] for share, rows in enumerate(per_share)]
        return torch.cat(parts) if _uneven(per_share, order) else every.flatten(0, 1)

    def complete(self, parts: Tensor) -> None:
        """Fill in the parts that the other members have of a flat, contiguous tensor, which has a part for
        each in the ascending order of their ranks.

        Raises:
            PeerLostError: as `sum_`.
        """
        shard = parts.view(len(self.ranks), -1)[self._order()[self.member]]
        if dist.get_backend(self._joined()) != "nccl":  # which alone knows that a part is in its place
            shard = shard.clone()
        with _losing_peers():
            _all_gather(as_sent(parts), as_sent(shard), group=self._joined())

    def scatter_sum(self, whole: Tensor, per_share: Sequence[int]) -> Tensor:
        """Sum over the members rows like those that `gather` gives, and give this one's own.

        Raises:
            PeerLostError: as `sum_`.
        """
        most, order = max(per_share), self._order()
        laid = whole
        if _uneven(per_share, order):
            laid = whole.new_zeros((len(self.ranks), most, *whole.shape[1:]))
            for share, part in enumerate(torch.split(whole, list(per_share))):
                laid[order[share], : len(part)] = part
            laid = laid.flatten(0, 1)
        with _losing_peers():
            if dist.get_backend(self._joined()) == "nccl":
                shard = laid.new_empty((most, *laid.shape[1:]))
                _reduce_scatter(as_summed(shard), as_summed(laid), group=self._joined())
            else:  # what gloo calls a reduce-scatter is an all-reduce: twice the bytes
                parts = torch.empty_like(laid)
                dist.all_to_all_single(parts, laid, group=self._joined())
                shard = (
                    parts.view(len(self.ranks), most, *laid.shape[1:])
                    .sum(0, dtype=_wide(laid))
                    .to(laid.dtype)
                )
        return shard[: per_share[self.member]]

    def gather_along(
        self,
        shard: Tensor,
        dim: int,
        sizes: Sequence[int],
        *,
        is_gradient: bool,  # noqa: ARG002 - as `sum_`
    ) -> Tensor:
        """What all members have along a dimension, in their order, which have `sizes` of it; of a contiguous
        tensor.

        Raises:
            PeerLostError: as `sum_`.
        """
        if shard.shape[:dim].numel() == 1:  # its memory is that of rows
            return self.gather(shard.movedim(dim, 0).contiguous(), sizes).movedim(0, dim)
        every = self.gather(padded(shard, dim, max(sizes)).unsqueeze(0), (1,) * len(sizes))
        parts = [part.narrow(dim, 0, size) for part, size in zip(every.unbind(), sizes, strict=True)]
        return torch.cat(parts, dim)

    def scatter_sum_along(
        self,
        whole: Tensor,
        dim: int,
        sizes: Sequence[int],
        *,
        is_gradient: bool,  # noqa: ARG002 - as `sum_`
    ) -> Tensor:
        """Sum over the members tensors like those that `gather_along` gives, and give this one's own part.

        Raises:
            PeerLostError: as `sum_`.
        """
        if whole.shape[:dim].numel() == 1:
            return self.scatter_sum(whole.movedim(dim, 0).contiguous(), sizes).movedim(0, dim).contiguous()
        most = max(sizes)
        parts = [padded(part, dim, most) for part in torch.split(whole, list(sizes), dim)]
        shard = self.scatter_sum(torch.stack(parts), (1,) * len(sizes))[0]
        return shard.narrow(dim, 0, sizes[self.member]).contiguous()

    def exchange(
        self,
        shard: Tensor,
        cut: tuple[int, Sequence[int]],
        joined: tuple[int, Sequence[int]],
        *,
        is_gradient: bool,  # noqa: ARG002 - as `sum_`
    ) -> Tensor:
        """All-to-all: of a tensor that each member has all of along one dimension, and its own part of along
        another, its own part along the first and all along the second.

        Args:
            shard: this member's tensor.
            cut: a dimension, and how much of it each member gets.
            joined: another one, and how much of it each member has.

        Raises:
            PeerLostError: as `sum_`.
        """
        (cut_dim, cut_sizes), (dim, sizes) = cut, joined
        parts = torch.split(shard, list(cut_sizes), cut_dim)
        at_place = sorted(range(len(self.ranks)), key=self._order().__getitem__)
        shapes = []
        for member in at_place:
            shape = list(shard.shape)
            shape[cut_dim], shape[dim] = cut_sizes[self.member], sizes[member]
            shapes.append(torch.Size(shape))
        sent = torch.cat([parts[member].flatten() for member in at_place])
        received = sent.new_empty(sum(shape.numel() for shape in shapes))
        bytes_each = 1 if sent.dtype in KNOWN or sent.is_complex() else sent.itemsize
        with _losing_peers():
            dist.all_to_all_single(
                as_sent(received),
                as_sent(sent),
                [shape.numel() * bytes_each for shape in shapes],
                [parts[member].numel() * bytes_each for member in at_place],
                group=self._joined(),
            )
        flat = torch.split(received, [shape.numel() for shape in shapes])
        of_member = {
            member: part.view(shape) for member, part, shape in zip(at_place, flat, shapes, strict=True)
        }
        return torch.cat([of_member[member] for member in range(len(self.ranks))], dim)

    def _joined(self) -> dist.ProcessGroup:
        assert self._communicator is not None, "a group is joined before training"
        return self._communicator

    def _order(self) -> list[int]:
        """Each member's place in the communicator, whose ranks ascend."""
        ascending = sorted(self.ranks)
        return [ascending.index(rank) for rank in self.ranks]


def padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor with zeros behind it, `size` along a dimension."""
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor
    return functional.pad(tensor, (*(0, 0) * (tensor.dim() - dim - 1), 0, missing))


def _uneven(per_share: Sequence[int], order: Sequence[int]) -> bool:
    return len(set(per_share)) > 1 or list(order) != sorted(order)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


@contextmanager
def _losing_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises DistBackendError and plain RuntimeErrors alike
        raise PeerLostError(f"lost contact with another worker: {error}") from error
