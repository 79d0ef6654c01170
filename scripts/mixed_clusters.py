"""Clusters of several types by their names, 'h800-16-h20-32': so many devices of each type, 8 a node;
'h800-16-h20-32-at-3': with at most 3 GB/s between nodes; 'h800-16-h20-16-free': with links that take no time.
"""

from __future__ import annotations

from paper_profiles import ROOT

from spindle_cli.files.cluster import Cluster, Link

FOLDER = ROOT / "configs" / "clusters"
# Has all types, and the links between them, that clusters without a file of their own are made of.
MODEL = "h800-16-a800-16-h20-32"
AT = "-at-"
FREE = "-free"
# Of a link that takes no time.
NO_TIME = {"latency_us": 0.0, "bandwidth_gb_per_s": 1e9}


def devices_of(name: str) -> dict[str, int]:
    """How many devices of each type a cluster of this name has."""
    words = without_speed(name).split("-")
    return {chip: int(count) for chip, count in zip(words[::2], words[1::2], strict=True)}


def without_speed(name: str) -> str:
    """The name of the same cluster with the links that it has."""
    return name.removesuffix(FREE).partition(AT)[0]


def cluster_named(name: str, memory_gib: float | None = None) -> Cluster:
    """As its file says, or so many devices of types that `MODEL` has.

    Args:
        memory_gib: of every device; None: what it really has.
    """
    base, _, gb_per_s = name.removesuffix(FREE).partition(AT)
    path = FOLDER / f"{base}.yaml"
    cluster = Cluster.read(path) if path.exists() else _made(base)
    if gb_per_s:
        cluster = _at_most(cluster, float(gb_per_s)).changed(name=name)
    if name.endswith(FREE):
        cluster = _without_time(cluster).changed(name=name)
    if memory_gib is None:
        return cluster
    nodes = tuple(group.model_copy(update={"memory_gib": memory_gib}) for group in cluster.nodes)
    return cluster.changed(nodes=nodes)


def _at_most(cluster: Cluster, gb_per_s: float) -> Cluster:
    """With links between nodes that are no faster."""
    links = cluster.links

    def speed(link: Link) -> dict[str, float]:
        return {"bandwidth_gb_per_s": min(gb_per_s, link.bandwidth_gb_per_s)}

    slower = {
        "inter_node": links.inter_node.model_copy(update=speed(links.inter_node)),
        "between": tuple(link.model_copy(update=speed(link)) for link in links.between),
    }
    return cluster.changed(links=links.model_copy(update=slower))


def _without_time(cluster: Cluster) -> Cluster:
    """With links between devices that take no time."""
    links = cluster.links
    faster = {
        "intra_node": links.intra_node.model_copy(update=NO_TIME),
        "inter_node": links.inter_node.model_copy(update=NO_TIME),
        "between": tuple(link.model_copy(update=NO_TIME) for link in links.between),
    }
    nodes = tuple(group.model_copy(update={"links": None}) for group in cluster.nodes)
    return cluster.changed(nodes=nodes, links=links.model_copy(update=faster))


def _made(name: str) -> Cluster:
    model, counts = Cluster.read(FOLDER / f"{MODEL}.yaml"), devices_of(name)
    nodes = tuple(
        group.model_copy(update={"count": counts[group.label] // group.devices})
        for group in model.nodes
        if group.label in counts
    )
    between = tuple(link for link in model.links.between if counts.keys() >= set(link.groups))
    return model.changed(name=name, nodes=nodes, links=model.links.model_copy(update={"between": between}))
