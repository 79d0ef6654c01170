"""What is known of the initial values of parameters and buffers that are in files, and of parts of them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from spindle_cli.workload.initial.tensor_files import Ranges, TensorPlace, read_parts

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
        """Return the box, as a view."""
        for dim, (first, last) in enumerate(self.ranges or ()):
            whole = whole.narrow(dim, first, last - first)
        return whole

    def of(self, whole: Tensor) -> Tensor:
        """A copy of the elements, as a vector; of a whole box, as it is."""
        return self.in_box(self.box_in(whole)).clone(memory_format=torch.contiguous_format)

    def in_box(self, box: Tensor) -> Tensor:
        """Return the elements in the box."""
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


@dataclass(frozen=True)
class InitialValues:
    """Where the initial values of a workload are.

    Attributes:
        places: canonical name of a parameter or buffer -> the tensor that it starts from.
        sources: of each of these the index of its source.
        dtypes: those that the workload's own build has given them.
        new: what keeps the values of the build, in the workload's order.
        paths: of the sources; `given`: as the workload file has them.
    """

    places: Mapping[str, TensorPlace] = field(default_factory=dict)
    sources: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    given: tuple[str, ...] = ()

    def fill(self, parts: Mapping[str, tuple[str, Tensor, Ranges]]) -> None:
        """Put initial values into parts of parameters and buffers; of what has none nothing is changed.

        Args:
            parts: any key -> canonical name, the part's memory, and which [first, last) of each dimension it
                is; None: all of it.

        Raises:
            InputError: a file cannot be read.
        """
        wanted = {
            key: (self.places[name], ranges)
            for key, (name, _, ranges) in parts.items()
            if name in self.places
        }
        with torch.no_grad():
            for key, values in read_parts(wanted):
                name, target, _ = parts[key]
                target.copy_(values.to(self.dtypes[name]))  # a run may compute in other numbers than build's

    def fill_own(self, parts: Mapping[str, tuple[str, OwnValues]]) -> dict[str, OwnValues]:
        """Fill parts of which only some elements are there, and give what then is there of each, where
        initial values are in a file, of which one part at a time is read.

        Args:
            parts: any key -> canonical name, and what there is.

        Raises:
            InputError: a file cannot be read.
        """
        wanted = {
            key: (self.places[name], values.part.ranges)
            for key, (name, values) in parts.items()
            if name in self.places
        }
        filled = {}
        for key, box in read_parts(wanted):
            name, values = parts[key]
            values.values.copy_(values.part.in_box(box.to(self.dtypes[name])))
            filled[key] = replace(values, fingerprint=fingerprint(box))
        return filled

    def lines(self) -> Iterator[str]:
        """Yield what is taken from where, for people."""
        counts = Counter(self.sources.values())
        for index, path in enumerate(self.paths):
            yield f"initial values of {_counted(counts[index])} from {path}"
        if self.new:
            yield f"new, with the values of build: {_counted(len(self.new))}"


def _counted(count: int) -> str:
    return "1 parameter or buffer" if count == 1 else f"{count} parameters and buffers"
