"""Clusters whose links are slow."""

from __future__ import annotations

from helpers.plans import cluster_of
from spindle_cli.files.cluster import Cluster


def apart(num_devices: int, gb_per_s: float = 0.01, memory_gib: float = 4000) -> Cluster:
    """Devices that are a node each, behind a link without latency."""
    cluster = cluster_of(num_devices, devices_per_node=1, memory_gib=memory_gib)
    link = cluster.links.inter_node.model_copy(update={"bandwidth_gb_per_s": gb_per_s, "latency_us": 0.0})
    return cluster.changed(links=cluster.links.model_copy(update={"inter_node": link, "intra_node": link}))
