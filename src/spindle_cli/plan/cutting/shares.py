"""What one op of a MetaOp takes on a share of so many samples, on each type of device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spindle_cli.costs.shares import KnownShares, OpSeconds, shares_on_type
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import MetaOpProfile

Seconds: TypeAlias = npt.NDArray[np.float64]
# Of so many MetaOps, types and degrees what was worked out is kept.
_MOST_KEPT = 4096
# Of larger batches it would take too long, and too much memory, to know every share.
MOST_SAMPLES = 2**18


@dataclass(frozen=True, eq=False)
class TypeTimes:
    """On one type of device, by samples from 0 to the whole batch; infinite where nothing is known. Equal to
    itself alone.

    Attributes:
        of_samples: each pass of an op, as it is known.
        op_s: of both passes, with what is recomputed.
        at_most_s: the longest of all known shares up to this one.
        at_least_s: the shortest of all shares from this one on.
        fewest: samples of the smallest share that is known; more than the batch where none is.
    """

    of_samples: tuple[OpSeconds | None, ...]
    op_s: Seconds
    at_most_s: Seconds
    at_least_s: Seconds
    fewest: int


@dataclass(frozen=True)
class ShareTimes:
    """What shares of a MetaOp take at one degree of tensor parallelism.

    `of_types`: in the order of the cluster's types.
    """

    tp: int
    batch_size: int
    of_types: tuple[TypeTimes, ...]


def share_times(
    metaop: MetaOpProfile,
    cluster: Cluster,
    *,
    forwards: float = 1,
    degrees: Collection[int] | None = None,
) -> tuple[ShareTimes, ...]:
    """Return the times of shares for some degrees, or for each that shares or curve have, ascending; one
    object for equal curves and shares.

    Args:
        forwards: how often an op runs forward: twice where it is recomputed, between where some ops are.

    Raises:
        NoPlanError: the batch has more samples than are cut over several types.
    """
    if metaop.batch_size > MOST_SAMPLES:
        raise NoPlanError(
            f"{metaop.name}: a batch of {metaop.batch_size:,} samples; at most {MOST_SAMPLES:,} are cut over "
            "devices of several types",
            hint="Make the batch smaller (`accumulate` in the train settings takes several for one step), or "
            "let a sample be several of yours.",
        )
    if degrees is None:
        degrees = {share.tp for share in metaop.shares} | {point.tp for point in metaop.curve}
    return tuple(
        ShareTimes(
            tp,
            metaop.batch_size,
            tuple(
                _of_type(shares_on_type(metaop, kind, tp), metaop.batch_size, forwards)
                for kind in cluster.types
            ),
        )
        for tp in sorted(degrees)
    )


@lru_cache(_MOST_KEPT)
def _of_type(shares: KnownShares, batch_size: int, forwards: float) -> TypeTimes:
    of_samples = (None, *(shares.seconds(samples) for samples in range(1, batch_size + 1)))
    op_s = np.array([np.inf if op is None else forwards * op.forward_s + op.backward_s for op in of_samples])
    known_s = np.where(np.isinf(op_s), -np.inf, op_s)
    at_most_s = np.maximum.accumulate(known_s)
    at_most_s[np.isinf(op_s)] = np.inf
    at_least_s = np.minimum.accumulate(op_s[::-1])[::-1]
    finite = np.flatnonzero(np.isfinite(op_s))
    fewest = int(finite[0]) if finite.size else batch_size + 1
    return TypeTimes(of_samples, op_s, at_most_s, at_least_s, fewest)
