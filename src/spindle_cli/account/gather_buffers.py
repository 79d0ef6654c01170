"""Where parameters lie that are gathered for the ops of passes: in one piece of memory, which is there all
the time. What is there at once lies apart; what is not may lie in the same place.

An op's parameters are gathered with the op before it, and go behind the last op that uses them, forward and
backward (`holdings.py`). So two lots are there at once where, in any slice, one is first used no later than
by the op behind the last one that uses the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """The ops of a slice from the first that uses a lot of parameters to the last."""

    piece: int
    first: int
    last: int


@dataclass(frozen=True)
class Lot:
    """Parameters that are gathered together; `spans`: one for each slice that uses them."""

    num_bytes: float
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Places:
    """Where each lot begins, in bytes, and how much all take."""

    offsets: tuple[float, ...]
    num_bytes: float


def places_of(lots: Sequence[Lot]) -> Places:
    """Give each lot its place, as far to the front as those leave room that are there with it and have
    theirs: the largest first, of equal ones the first that is used; or in the order in which they are used,
    whichever takes less. Where both the first and the last of many layers are larger than the others, the
    largest first leave no room for the layer between two that lie apart.
    """
    beside: list[set[int]] = [set() for _ in lots]
    for one, other in _there_at_once(lots):
        beside[one].add(other)
        beside[other].add(one)
    by_use = sorted(range(len(lots)), key=lambda each: lots[each].spans[:1])
    by_size = sorted(by_use, key=lambda each: -lots[each].num_bytes)
    return min((_placed(lots, beside, order) for order in (by_size, by_use)), key=lambda each: each.num_bytes)


def _placed(lots: Sequence[Lot], beside: Sequence[Set[int]], order: Sequence[int]) -> Places:
    """`beside`: of each lot, those that are there with it."""
    offsets = [0.0] * len(lots)
    placed: set[int] = set()
    for number in order:
        taken = sorted((offsets[other], lots[other].num_bytes) for other in beside[number] & placed)
        for begin, num_bytes in taken:
            if begin - offsets[number] >= lots[number].num_bytes:
                break
            offsets[number] = max(offsets[number], begin + num_bytes)
        placed.add(number)
    ends = [begin + lot.num_bytes for begin, lot in zip(offsets, lots, strict=True)]
    return Places(tuple(offsets), max(ends, default=0.0))


def _there_at_once(lots: Sequence[Lot]) -> Iterator[tuple[int, int]]:
    """Pairs of lots, some of them twice."""
    spans = sorted((span, number) for number, lot in enumerate(lots) for span in lot.spans)
    still: list[tuple[Span, int]] = []
    for span, number in spans:
        still = [each for each in still if each[0].piece == span.piece and each[0].last + 1 >= span.first]
        yield from ((number, other) for _, other in still if other != number)
        still.append((span, number))
