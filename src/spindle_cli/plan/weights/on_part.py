"""Weights of the devices of a part of a cluster."""

from __future__ import annotations

from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardWeights


def weights_on(part: Cluster, weights: ShardWeights, whole: Cluster) -> ShardWeights:
    """Weights of the devices of some nodes by themselves; all of one type and size of memory have the same.

    Args:
        weights: of the devices of the whole cluster.
    """
    kinds = zip(whole.type_of, whole.memory_bytes, strict=True)
    of_kind = dict(zip(kinds, weights, strict=True)) if weights else {}
    part_weights = tuple(
        of_kind[kind] for kind in zip(part.type_of, part.memory_bytes, strict=True) if of_kind
    )
    return part_weights if len(set(part_weights)) > 1 else ()
