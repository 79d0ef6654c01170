"""Floating-point operations of one batch's forward and backward passes, as far as anything is trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spindle_cli.plan.types import PlanMetaOp
from spindle_cli.profile.metagraph import topological_order
from spindle_cli.profile.types import MetaOp


def flops_by_metaop(metaops: Sequence[PlanMetaOp]) -> dict[str, float] | None:
    """The floating-point operations of each MetaOp's ops on their whole batch; None where the profile has not
    counted them all.
    """
    flops = flops_by_pass(metaops)
    if flops is None:
        return None
    return {metaop.name: metaop.num_ops * sum(flops[metaop.name]) for metaop in metaops}


def flops_by_pass(metaops: Sequence[PlanMetaOp]) -> dict[str, tuple[float, float]] | None:
    """The floating-point operations of one op of each MetaOp on its whole batch, forward and backward; None
    where the profile has not counted them all. What is done again, where activations are recomputed, does not
    count.

    A product of matrices is one product forward, and backward one for each operand that takes a gradient.
    Of frozen parameters, and where neither an op nor what comes before it trains anything, there is none.
    """
    flops: dict[str, tuple[float, float]] = {}
    reached = reached_by_gradients(metaops)
    for metaop in metaops:
        forward = metaop.flops_per_op
        if forward is None:
            return None
        flops[metaop.name] = forward, forward * _backward_products(metaop, is_reached=reached[metaop.name])
    return flops


def _backward_products(metaop: MetaOp, *, is_reached: bool) -> float:
    """Counts the products of a backward pass for each product forward. `is_reached`: by gradients."""
    if not is_reached:
        return 0.0
    return 1.0 + (metaop.trainable_fraction if _has_parameters(metaop) else 1.0)


def reached_by_gradients(metaops: Collection[MetaOp]) -> dict[str, bool]:
    """Whether gradients come to each MetaOp: it, or one before it, trains something."""
    by_name = {metaop.name: metaop for metaop in metaops}
    reached: dict[str, bool] = {}
    for name in topological_order(metaops):
        metaop = by_name[name]
        trains_any = _has_parameters(metaop) and metaop.trainable_fraction > 0
        reached[name] = trains_any or any(reached[producer] for producer in metaop.inputs)
    return reached


def _has_parameters(metaop: MetaOp) -> bool:
    return metaop.param_bytes_per_op > 0 or any(metaop.extra_param_bytes.values())
