"""What steers a dispatch over several types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MixedGuide:
    """What steers a dispatch.

    Attributes:
        slack: the target end is the lower bound times 1 + slack.
        patience: a MetaOp that finds no room for an allocation that is fast enough takes one that takes up to
            so many times as long, and else waits.
        stretch: for each node, multiplies its seconds in the linear program.
        urgency: for each node, multiplies its urgency.
        prices: by type, multiplies its price.
        mixes: whether a MetaOp may run some ops on one allocation and the others on a slower one; else it
            takes one that is fast enough.
        follows_optimum: whether a MetaOp that is in time takes an allocation on which the linear program's
            optimum runs ops, as long as some of these are left, rather than what is worth least.
        shares: by (node, number of its jobs so far), of its ops that are left, how many to run.
    """

    slack: float
    patience: float
    stretch: tuple[float, ...]
    urgency: tuple[float, ...]
    prices: tuple[float, ...]
    mixes: bool = True
    follows_optimum: bool = False
    shares: Mapping[tuple[int, int], float] = field(default_factory=dict)
