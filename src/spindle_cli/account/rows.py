"""Who holds which rows of a batch, and which rows move from one layout to another.

Used for activations on the way forward and, with the roles swapped, for their gradients on the way back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Layout:
    """A micro-batch of a batch of `batch_size` samples over `devices`: `dp` shares, each held whole by `tp`
    consecutive devices of the list. `sums_shares`: inside of a pass the shares sum something over all of them
    (the statistics of batch norms). `micro_batch`: (k, K), the k-th of K equal parts of the batch.
    `offsets`: dp + 1 numbers, share i has the samples from `offsets[i]` to `offsets[i + 1]` of the
    micro-batch; None: equal shares.
    """

    devices: tuple[int, ...]
    dp: int
    tp: int
    batch_size: int
    sums_shares: bool = field(default=False, compare=False)
    micro_batch: tuple[int, int] = (0, 1)
    offsets: tuple[int, ...] | None = None

    @cached_property
    def samples(self) -> tuple[int, int]:
        """[first, last) of the batch that all shares have together."""
        number, count = self.micro_batch
        return number * self.batch_size // count, (number + 1) * self.batch_size // count

    @property
    def is_shared(self) -> bool:
        """Whether a share is less than the batch."""
        return self.dp > 1 or self.micro_batch[1] > 1

    @cached_property
    def share_of(self) -> dict[int, int]:
        """Index of the batch share that each device holds."""
        return {device: position // self.tp for position, device in enumerate(self.devices)}

    def member_of(self, device: int) -> int:
        """A device's place among those that hold its share."""
        return self.devices.index(device) % self.tp

    def rows(self, share: int) -> tuple[int, int]:
        """Samples [first, last) of a share, counted in the whole batch."""
        return self.cuts[share], self.cuts[share + 1]

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """dp + 1 samples, counted in the whole batch: share i has those from `cuts[i]` to `cuts[i + 1]`."""
        first, last = self.samples
        if self.offsets is not None:
            return tuple(first + offset for offset in self.offsets)
        return tuple(first + share * (last - first) // self.dp for share in range(self.dp + 1))

    def rows_of(self, device: int) -> tuple[int, int]:
        """Samples [first, last) that a device holds."""
        return self.rows(self.share_of[device])

    def holds(self, device: int, first: int, last: int) -> bool:
        """Whether a device holds all of the samples [first, last)."""
        share = self.share_of.get(device)
        if share is None:
            return False
        own_first, own_last = self.rows(share)
        return own_first <= first and last <= own_last

    def holders(self, share: int) -> tuple[int, ...]:
        """The `tp` devices that hold a share."""
        return self.devices[share * self.tp : (share + 1) * self.tp]

    def partners(self, share: int) -> tuple[int, ...]:
        """The devices that sum something inside of each pass, where a share of it takes part in that; else
        none.
        """
        if self.sums_shares:
            return self.devices
        return self.holders(share) if self.tp > 1 else ()

    def overlaps(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The shares that hold some of the samples [first, last): (share, first, last) of what each holds of
        them, in order.
        """
        cuts = self.cuts
        share = max(0, bisect_right(cuts, first) - 1)
        while share < self.dp:
            low, high = cuts[share], cuts[share + 1]
            if low >= last:
                return
            if low < first:
                low = first
            if high > last:
                high = last
            if low < high:
                yield share, low, high
            share += 1


class Chunk(NamedTuple):
    """Samples [first, last) that `destination` takes from `source`; where both are the same device nothing is
    sent.
    """

    destination: int
    first: int
    last: int
    source: int


def route(source: Layout, destination: Layout) -> tuple[Chunk, ...]:
    """Every chunk that turns one layout into another, ordered by destination, then by row.

    A device that holds the rows itself is its own source; otherwise the holders of a share take turns over
    the destination's devices, so that the load spreads over them. Takes time in proportion to the number of
    chunks.
    """
    return tuple(sorted(_chunks(source, destination)))


def crossing(source: Layout, destination: Layout) -> list[Chunk]:
    """Of `route`, the chunks that one device sends to another, in no particular order."""
    if source == destination:
        return []
    if source.tp == destination.tp == 1 and source.cuts == destination.cuts:  # share by share, as mostly
        shares = zip(destination.devices, source.cuts, source.cuts[1:], source.devices, strict=False)
        return [Chunk(*each) for each in shares if each[0] != each[3] and each[1] < each[2]]
    return [chunk for chunk in _chunks(source, destination) if chunk.source != chunk.destination]


def _chunks(source: Layout, destination: Layout) -> Iterator[Chunk]:
    for share in range(destination.dp):
        pieces = [
            (source.holders(piece), first, last)
            for piece, first, last in source.overlaps(*destination.rows(share))
        ]
        for index, device in enumerate(destination.holders(share)):
            turn = (share * destination.tp + index) % source.tp
            for holders, first, last in pieces:
                yield Chunk(device, first, last, device if device in holders else holders[turn])
