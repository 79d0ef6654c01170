"""From what ops take of memory on some shares to what they take on any: linear in the samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from spindle_cli.profile.types import OpMemory, ShareMemory

# Of one op: (samples, what that share takes), each number of samples once.
Shares = Sequence[tuple[int, ShareMemory]]

_KEYS = ("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes")


def op_memory(
    ops: Sequence[Shares], tp: int, batch_size: int, joined: Sequence[int] = ()
) -> tuple[OpMemory, ...]:
    """What the ops of a MetaOp take, neighbours that take the same together; none if one is not known.

    `joined`: of each op, as `OpMemory.joined_bytes`; absent: 0.
    """
    if not all(ops):
        return ()
    fits = [tuple(_fit(shares, key, batch_size) for key in _KEYS) for shares in ops]
    kept = [_selective(shares, fit[0][0], batch_size) for shares, fit in zip(ops, fits, strict=True)]
    found: list[OpMemory] = []
    first = 0
    for (fit, whole, selective), run in groupby(zip(fits, joined or [0] * len(fits), kept, strict=True)):
        pairs = dict(zip(_KEYS, fit, strict=True))
        found.append(OpMemory(tp=tp, first_op=first, joined_bytes=whole, selective_bytes=selective, **pairs))
        first += len(list(run))
    return tuple(found)


def selective_share(ops: Sequence[Shares]) -> float | None:
    """The share of the ops' forward passes that runs again, on average, where all but what takes longest is
    recomputed: by the largest shares for which this is known. None where it is not known of an op.
    """
    largest = [
        max(
            ((rows, memory.selective.share) for rows, memory in shares if memory.selective is not None),
            default=None,
        )
        for shares in ops
    ]
    known = [each[1] for each in largest if each is not None]
    return sum(known) / len(known) if known and len(known) == len(largest) else None


def _selective(shares: Shares, fixed: int, batch_size: int) -> tuple[int, int] | None:
    """What is kept where an op is recomputed but for what takes longest, of the shares that this is known
    of; of one alone as much whatever the share as where nothing is recomputed (`fixed`): parameters that were
    cast are kept in any case.
    """
    points = [(rows, each.selective.kept_bytes) for rows, each in shares if each.selective is not None]
    if len(points) == 1:
        points.append((0, min(fixed, points[0][1])))
    return _line(points, batch_size) if points else None


def _fit(shares: Shares, key: str, batch_size: int) -> tuple[int, int]:
    """(whatever the share, for the whole batch): the line through the smallest and the largest share, raised
    until no share lies above it.
    """
    return _line([(rows, getattr(memory, key)) for rows, memory in shares], batch_size)


def _line(known: Sequence[tuple[int, int]], batch_size: int) -> tuple[int, int]:
    points = sorted(known)
    (few, least), (many, most) = points[0], points[-1]
    slope = max(0.0, (most - least) / (many - few)) if many > few else most / many
    fixed = max(0.0, *(taken - slope * rows for rows, taken in points))
    return round(fixed), round(slope * batch_size)
