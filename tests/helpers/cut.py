"""MetaOps whose batches can be cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helpers.plans import metaop_of
from spindle_cli.profile.types import MetaOpProfile, ShareTime


def cuttable(name: str, num_ops: int, share_s: Mapping[int, float], **more: Any) -> MetaOpProfile:
    """A MetaOp of a batch as large as the largest share, by the seconds of an op on shares of so many
    samples; a third of it forward.
    """
    batch_size = max(share_s)
    curve = {batch_size // n: s for n, s in share_s.items() if batch_size % n == 0}
    metaop = metaop_of(name, num_ops, curve, batch_size=batch_size, **more)
    return metaop.model_copy(update={"shares": shares_of(share_s)})


def shares_of(share_s: Mapping[int, float], tp: int = 1) -> tuple[ShareTime, ...]:
    return tuple(
        ShareTime(samples=n, tp=tp, forward_s=s / 3, backward_s=s * 2 / 3, source="measured")
        for n, s in sorted(share_s.items())
    )
