"""How large the shares of a slice are: equal ones, or by its `rows`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from spindle_cli.costs.memory import SliceShape
from spindle_cli.files.cluster import Cluster


def sizes(piece: SliceShape) -> Sequence[int] | None:
    """Samples of each share; None where all have as many."""
    return None if piece.rows is None else [last - first for first, last in pairwise(piece.rows)]


def tells_shares_apart(piece: SliceShape, cluster: Cluster) -> bool:
    """Whether what single shares of a slice took is kept: they are of unequal size, or the cluster has
    devices of several types.
    """
    return piece.rows is not None or cluster.is_mixed


def cuts_like(piece: SliceShape, samples: int) -> float:
    """Into how many shares of so many samples the whole batch would be cut, of a slice with `rows`."""
    assert piece.rows is not None, "equal shares need no rows to say their size"
    return piece.rows[-1] * (piece.shares_of_batch // piece.dp) / samples


def cuts_by_share(piece: SliceShape) -> Sequence[float]:
    """For each share, into how many as large as it the whole batch would be cut."""
    own = sizes(piece)
    if own is None:  # as many as there are devices for, of a plan that nobody has checked
        return (piece.shares_of_batch,) * ceil(len(piece.devices) / piece.tp)
    return [cuts_like(piece, samples) for samples in own]


def largest_samples(piece: SliceShape, batch_size: int) -> float:
    """Samples of its largest share, of a batch of `batch_size`."""
    own = sizes(piece)
    return batch_size / piece.shares_of_batch if own is None else max(own)


def cuts_like_largest(piece: SliceShape) -> float:
    """Into how many shares as large as its largest the whole batch would be cut."""
    own = sizes(piece)
    return piece.shares_of_batch if own is None else cuts_like(piece, max(own))
