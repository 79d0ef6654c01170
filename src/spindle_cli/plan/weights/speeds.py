"""Weights of a cluster's devices by how fast their types run the workload."""

from __future__ import annotations

from math import gcd

from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardWeights
from spindle_cli.profile.types import MetaOpProfile, Profile

# Weights that are not asked for as numbers are per cent of the largest.
FULL = 100


def by_speed(profile: Profile, cluster: Cluster) -> ShardWeights:
    """Weights in proportion to how often a second a device of each type would run all ops of the workload, at
    its best allocation of each; none where the types are equally fast. HAP's ratios of one number per device.

    Args:
        profile: as the cluster's types see it (`seen_on`).
    """
    if not cluster.is_mixed:
        return ()
    alone_s = {kind: _device_seconds(profile, kind) for kind in cluster.types}
    least_s = min(alone_s.values())
    parts = {kind: round(FULL * least_s / own_s) if own_s else FULL for kind, own_s in alone_s.items()}
    return reduced([max(1, parts[kind]) for kind in cluster.type_of])


def _device_seconds(profile: Profile, kind: str) -> float:
    """Of one device of a type, all ops of the workload run once, forward and backward."""
    return sum(metaop.num_ops * _op_device_seconds(metaop, kind) for metaop in profile.metaops)


def _op_device_seconds(metaop: MetaOpProfile, kind: str) -> float:
    return min(point.op_s * point.num_devices for point in metaop.curve if point.device == kind)


def reduced(weights: list[int]) -> ShardWeights:
    """Without their common factor; none where all are equal."""
    if len(set(weights)) == 1:
        return ()
    factor = gcd(*weights)
    return tuple(weight // factor for weight in weights)
