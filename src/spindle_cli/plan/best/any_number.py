"""Numbers of devices that do not divide a batch: curves with points for shares as equal as can be."""

from __future__ import annotations

from math import ceil, inf

from spindle_cli.costs.shares import point_of_share, share_seconds
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile


def on_any_number(profile: Profile, cluster: Cluster) -> Profile | None:
    """A profile whose curves have points for any number of devices, as long as the largest share takes, where
    an op is faster on it than on fewer; None where none is.
    """
    metaops = tuple(_on_any_number(metaop, cluster) for metaop in profile.metaops)
    if all(new is old for new, old in zip(metaops, profile.metaops, strict=True)):
        return None
    return profile.with_metaops(metaops)


def _on_any_number(metaop: MetaOpProfile, cluster: Cluster) -> MetaOpProfile:
    more: list[CurvePoint] = []
    for tp in sorted({share.tp for share in metaop.shares}):
        for dp in range(2, min(metaop.batch_size, cluster.num_groups(tp)) + 1):
            samples, by_fewer = (ceil(metaop.batch_size / count) for count in (dp, dp - 1))
            if metaop.batch_size % dp == 0 or samples == by_fewer:
                continue
            op = share_seconds(metaop.shares, samples, tp)
            if op is not None and op.forward_s + op.backward_s < _fastest_s(metaop, dp * tp):
                more.append(point_of_share(dp, tp, op))
    if not more:
        return metaop
    curve = sorted((*metaop.curve, *more), key=lambda point: (point.num_devices, point.tp))
    return metaop.model_copy(update={"curve": tuple(curve)})


def _fastest_s(metaop: MetaOpProfile, num_devices: int) -> float:
    """Return the least seconds that one op takes on at most so many devices."""
    return min((point.op_s for point in metaop.curve if point.num_devices <= num_devices), default=inf)
