"""What a rank has of a parameter of which it keeps a part alone."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

_PRINTED = 16384  # elements that a fingerprint looks at


@dataclass(frozen=True)
class OwnPart:
    """A part of a parameter: elements [first, last), row by row, of the box `ranges` of it; None: of all of
    it, and all of the box.

    `key`: what the part is called.
    """

    key: str
    ranges: tuple[tuple[int, int], ...] | None
    elements: tuple[int, int] | None

    def box_in(self, whole: Tensor) -> Tensor:
        """The box, as a view."""
        for dim, (first, last) in enumerate(self.ranges or ()):
            whole = whole.narrow(dim, first, last - first)
        return whole

    def of(self, whole: Tensor) -> Tensor:
        """A copy of the elements, as a vector; of a whole box, as it is."""
        return self.in_box(self.box_in(whole)).clone(memory_format=torch.contiguous_format)

    def in_box(self, box: Tensor) -> Tensor:
        """The elements in the box."""
        if self.elements is None:
            return box
        first, last = self.elements
        return box.reshape(-1)[first:last]

    def put_into(self, whole: Tensor, values: Tensor) -> None:
        """Write the elements where they belong."""
        box = self.box_in(whole)
        if self.elements is None:
            box.copy_(values)
            return
        first, last = self.elements
        flat = box.reshape(-1)
        flat[first:last] = values
        box.copy_(flat.view(box.shape))


@dataclass(frozen=True)
class OwnValues:
    """What is kept of a part: its elements, and a fingerprint of the whole parameter as it was when it was
    filled as a whole; None: it was not.
    """

    part: OwnPart
    values: Tensor
    fingerprint: int | None


def fingerprint(whole: Tensor) -> int:
    """CRC-32 of some of its elements, evenly apart."""
    flat = whole.detach().reshape(-1)
    some = flat[:: -(-flat.numel() // _PRINTED) or 1].contiguous().cpu()
    return zlib.crc32(some.view(torch.uint8).numpy().data) if some.numel() else 0
