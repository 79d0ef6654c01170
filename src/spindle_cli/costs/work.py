"""Floating-point operations of one batch's forward and backward passes, as far as anything is trained."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.plan.types import PlanMetaOp
from spindle_cli.profile.metagraph import topological_order
from spindle_cli.profile.types import MetaOp


def flops_by_metaop(metaops: Sequence[PlanMetaOp]) -> dict[str, float] | None:
    """Of each MetaOp's ops on their whole batch; None where the profile has not counted them all.

    A product of matrices is one product forward, and backward one for each operand that takes a gradient.
    Of frozen parameters, and where neither an op nor what comes before it trains anything, there is none.
    """
    found: dict[str, float] = {}
    reached = _reached(metaops)
    for metaop in metaops:
        if metaop.flops_per_op is None:
            return None
        passes = _passes(metaop, is_reached=reached[metaop.name])
        found[metaop.name] = metaop.num_ops * metaop.flops_per_op * passes
    return found


def _passes(metaop: MetaOp, *, is_reached: bool) -> float:
    """Products for each one forward. `is_reached`: by gradients."""
    if not is_reached:
        return 1.0
    return 2.0 + (metaop.trainable_fraction if _has_parameters(metaop) else 1.0)


def _reached(metaops: Sequence[MetaOp]) -> dict[str, bool]:
    """Whether gradients come to each MetaOp: it, or one before it, trains something."""
    by_name = {metaop.name: metaop for metaop in metaops}
    found: dict[str, bool] = {}
    for name in topological_order(metaops):
        metaop = by_name[name]
        own = _has_parameters(metaop) and metaop.trainable_fraction > 0
        found[name] = own or any(found[each] for each in metaop.inputs)
    return found


def _has_parameters(metaop: MetaOp) -> bool:
    return metaop.param_bytes_per_op > 0 or any(metaop.extra_param_bytes.values())
