"""One piece of a device's memory in which parameters lie while they are gathered.

A flat tensor that is given up has a storage without memory; while it is fetched, its storage has its place in
the piece. So nothing is asked of the allocator in a pass. A place that somebody still has is never lent.

A torch that cannot exchange what two storages have (before 2.13) has no such piece: parameters are then
gathered into memory that the allocator gives for each gather.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor

# Whether this torch can exchange what two storages have.
EXCHANGES_STORAGES = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
# Places begin at multiples of so many bytes, as torch's allocator of GPUs lays out what it gives.
ALIGNMENT_BYTES = 512


class GatherMemory:
    """The piece, and who has which place of it.

    `flat`: all of it, in bytes.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._lent: dict[int, int] = {}  # begin -> end

    def lend(self, flat: Tensor, begin: int) -> bool:
        """Give a tensor without memory its place; False, and nothing else, where any of it is lent."""
        end = begin + flat.numel() * flat.itemsize
        assert end <= self.flat.nbytes, "places are laid out for all of them"
        if any(begin < other_end and other_begin < end for other_begin, other_end in self._lent.items()):
            return False
        _swap(flat, self._place(begin, end))
        self._lent[begin] = end
        return True

    def take_back(self, flat: Tensor, begin: int) -> None:
        """A tensor that has its place here has no memory any more."""
        assert flat.data_ptr() == self.flat.data_ptr() + begin, "it has its place"
        _swap(flat, torch.empty(0, dtype=torch.uint8, device=flat.device).untyped_storage())
        del self._lent[begin]

    def _place(self, begin: int, end: int) -> torch.UntypedStorage:
        """A storage over part of the piece, which it does not own."""
        address = self.flat.data_ptr() + begin
        made: Any = torch._C._construct_storage_from_data_pointer(address, self.flat.device, end - begin)
        return cast("torch.UntypedStorage", made)


def _swap(flat: Tensor, target: torch.UntypedStorage) -> None:
    """Exchange what the tensor's storage has with what the other one has."""
    storage: Any = flat.untyped_storage()  # whose method the stubs leave out
    storage._swap_data_ptr_(target)
