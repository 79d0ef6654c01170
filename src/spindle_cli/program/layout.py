"""Who holds which rows of a batch, and which rows move from one layout to another.

Used for activations on the way forward and, with the roles swapped, for their gradients on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Layout:
    """A batch of `batch_size` samples over `devices`: `dp` shares, each held whole by `tp` consecutive devices of the list."""

    devices: tuple[int, ...]
    dp: int
    tp: int
    batch_size: int

    @cached_property
    def share_of(self) -> dict[int, int]:
        """Index of the batch share that each device holds."""
        return {device: position // self.tp for position, device in enumerate(self.devices)}

    def rows(self, share: int) -> tuple[int, int]:
        """Samples [first, last) of a share."""
        return share * self.batch_size // self.dp, (share + 1) * self.batch_size // self.dp

    def rows_of(self, device: int) -> tuple[int, int]:
        """Samples [first, last) that a device holds."""
        return self.rows(self.share_of[device])

    def holders(self, share: int) -> tuple[int, ...]:
        """The `tp` devices that hold a share."""
        return self.devices[share * self.tp : (share + 1) * self.tp]


@dataclass(frozen=True, order=True)
class Chunk:
    """Samples [first, last) that `destination` takes from `source`; where both are the same device nothing is sent."""

    destination: int
    first: int
    last: int
    source: int


def route(source: Layout, destination: Layout) -> tuple[Chunk, ...]:
    """Every chunk that turns one layout into another, ordered by destination, then by row.

    A device that holds the rows itself is its own source; otherwise the holder at the same position of the share's devices,
    so that the load spreads over them.
    """
    chunks: list[Chunk] = []
    for position, device in enumerate(destination.devices):
        first, last = destination.rows_of(device)
        for share in range(source.dp):
            low, high = source.rows(share)
            low, high = max(low, first), min(high, last)
            if low < high:
                holders = source.holders(share)
                taken_from = device if device in holders else holders[position % destination.tp % source.tp]
                chunks.append(Chunk(device, low, high, taken_from))
    return tuple(sorted(chunks))
