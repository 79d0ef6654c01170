"""Bytes of a device in host memory and back: blocks of locked memory, and streams of their own to copy on.

Host memory is taken in blocks of one size, which are used again from step to step: to a power of two torch
rounds up what it locks, and to lock memory takes long.

A copy out waits for what the device has computed so far; before the memory it is copied from is given up,
what is computed next waits for it. Memory that is copied back to is taken by the stream that computes
(`runtime/memory/copy_stream.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from spindle_cli.costs.beyond_curve import HOST_BLOCK_BYTES
from spindle_cli.runtime.memory.copy_stream import CopyStream

if TYPE_CHECKING:
    from torch import Tensor


class HostMemory:
    """The blocks of a rank, and what copies from and to its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # with its index, as tensors have it
        self._is_cuda = device.type == "cuda"
        self._free: list[Tensor] = []
        self._out, self._back = CopyStream(device), CopyStream(device)

    def take(self) -> Tensor:
        """Return a free block of host memory, or a new one."""
        if self._free:
            return self._free.pop()
        return torch.empty(HOST_BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda)

    def give_back(self, blocks: Sequence[Tensor]) -> None:
        """Take blocks back whose copies nothing needs any more."""
        self._free.extend(blocks)

    def copy_out(self, blocks: Sequence[Tensor], here: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Start to copy all of `here`, bytes of the device, into blocks, one after another; gives what has
        happened when that is done. None: it is done.
        """
        return self._out.copy(parts_of(blocks, here))

    def copy_back(self, here: Sequence[Tensor], blocks: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Start to copy blocks of host memory back to the device."""
        return self._back.copy((part, block) for block, part in parts_of(blocks, here))

    def await_copy(self, copied: torch.cuda.Event | None) -> None:
        """Let what is computed next wait for a copy."""
        self._back.await_copy(copied)


def blocks_for(num_bytes: int) -> int:
    """How many blocks so many bytes take."""
    return -(-num_bytes // HOST_BLOCK_BYTES)


def parts_of(blocks: Sequence[Tensor], here: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part of a block, in order, with the bytes that go there."""
    block, filled = 0, 0
    for tensor in here:
        done, size = 0, tensor.numel()
        while done < size:
            if filled == HOST_BLOCK_BYTES:
                block, filled = block + 1, 0
            count = min(size - done, HOST_BLOCK_BYTES - filled)
            yield blocks[block][filled : filled + count], tensor[done : done + count]
            done, filled = done + count, filled + count
