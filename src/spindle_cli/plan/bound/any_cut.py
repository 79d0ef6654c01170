"""A bound of all schedules, however batches are cut: into any number of micro-batches, shares of any size."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.plan.bound.bound import FLOAT_SLACK
from spindle_cli.profile.metagraph import topological_order
from spindle_cli.profile.types import MetaOpProfile, Profile


def lower_bound_any_s(profile: Profile, num_devices: int) -> float:
    """Seconds before which no schedule of a workload's MetaOps ends.

    The larger of two: the work, each MetaOp's samples on shares of the size that takes least of the devices'
    time for a sample, over all devices; and the longest chain of MetaOps, each on the share that is through
    first. What a share takes is linear between two that are known, so that both are least on one of these.
    """
    kinds = {metaop.name: _shares(metaop, num_devices) for metaop in profile.metaops}
    work_s = sum(
        metaop.num_ops * metaop.batch_size * min(tp * op_s / samples for samples, tp, op_s in kinds[name])
        for name, metaop in profile.by_name.items()
    )
    longest_s: dict[str, float] = {}
    for name in topological_order(profile.metaops):
        metaop = profile.by_name[name]
        before_s = max((longest_s[producer] for producer in metaop.inputs), default=0.0)
        longest_s[name] = before_s + metaop.num_ops * min(op_s for *_, op_s in kinds[name])
    return max(work_s / num_devices, *longest_s.values()) * (1 - FLOAT_SLACK)


def _shares(metaop: MetaOpProfile, num_devices: int) -> Sequence[tuple[float, int, float]]:
    """(samples, tp, seconds of one op) of every share that is known."""
    whole = [
        (metaop.batch_size / point.dp, point.tp, point.op_s)
        for point in metaop.curve
        if point.num_devices <= num_devices
    ]
    parts = [
        (float(share.samples), share.tp, share.forward_s + share.backward_s)
        for share in metaop.shares
        if share.tp <= num_devices
    ]
    return [*whole, *parts]
