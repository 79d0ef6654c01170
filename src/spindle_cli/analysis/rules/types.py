"""What is known of a tensor: how its entries belong to the samples of the batch."""

from __future__ import annotations

from dataclasses import dataclass


class MixesError(Exception):
    """An operation does not act on samples one by one, or is not known to; the text says why."""


@dataclass(frozen=True)
class Whole:
    """A tensor that is the same for every batch: a parameter, a constant, what is made of them."""


@dataclass(frozen=True)
class Batch:
    """Every entry belongs to one sample and depends on nothing else of the batch.

    Dimension `dim` has `outer * samples * inner` entries: entry (o, sample, i) of it belongs to the sample.
    The rows of a sample lie together where `outer` is 1.

    Attributes:
        numbered: the value along `dim` is so many times the sample's own number, 0 to samples - 1
            (torch.arange over the batch): good for picking something out of each sample, and nothing else.
            0: it is something else.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    numbered: int = 0

    @property
    def is_cut_by_rows(self) -> bool:
        """Whether samples [a, b) are entries [a * inner, b * inner), as values between ops are cut."""
        return self.outer == 1


@dataclass(frozen=True)
class Reduced:
    """No batch dimension, and a sum (`degree` 1) or a mean (0) over samples of what each gives by itself.

    Attributes:
        counted: a mean over the labels that count (ignore_index, class weights), not over samples.
    """

    degree: int
    counted: bool = False


@dataclass(frozen=True)
class Mixed:
    """Depends on the batch in another way, or nothing is known. `place`: 'file:line' in the user's code."""

    why: str
    place: str | None = None

    def __str__(self) -> str:
        return f"{self.why} ({self.place})" if self.place else self.why


@dataclass(frozen=True)
class Pairs:
    """An entry for each two samples: along dimension `dims[0]` one of them, along `dims[1]` the other.

    Attributes:
        cuts: of `dims`, those along which a share's part follows from the share's own samples and a gather of
            all others' values; a softmax along the one leaves the other alone.
    """

    dims: tuple[int, int]
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, first: int, second: int) -> Pairs:
        """Every entry by itself, so that either dimension may be cut."""
        dims = (min(first, second), max(first, second))
        return cls(dims, dims)


@dataclass(frozen=True)
class Part:
    """No batch dimension: the values of the shares add up to that of the whole batch."""


State = Whole | Batch | Reduced | Mixed | Pairs | Part
WHOLE = Whole()
UNUSED = Mixed("what this kernel gives beside its result is not followed")
