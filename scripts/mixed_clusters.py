"""Clusters of several types by their names, 'h800-16-h20-32': so many devices of each type, 8 a node."""

from __future__ import annotations

from paper_profiles import ROOT

from spindle_cli.files.cluster import Cluster

FOLDER = ROOT / "configs" / "clusters"
# Has all types, and the links between them, that clusters without a file of their own are made of.
MODEL = "h800-16-a800-16-h20-32"


def devices_of(name: str) -> dict[str, int]:
    """How many devices of each type a cluster of this name has."""
    words = name.split("-")
    return {chip: int(count) for chip, count in zip(words[::2], words[1::2], strict=True)}


def cluster_named(name: str, memory_gib: float | None = None) -> Cluster:
    """As its file says, or so many devices of types that `MODEL` has.

    Args:
        memory_gib: of every device; None: what it really has.
    """
    path = FOLDER / f"{name}.yaml"
    cluster = Cluster.read(path) if path.exists() else _made(name)
    if memory_gib is None:
        return cluster
    nodes = tuple(group.model_copy(update={"memory_gib": memory_gib}) for group in cluster.nodes)
    return cluster.changed(nodes=nodes)


def _made(name: str) -> Cluster:
    model, counts = Cluster.read(FOLDER / f"{MODEL}.yaml"), devices_of(name)
    nodes = tuple(
        group.model_copy(update={"count": counts[group.label] // group.devices})
        for group in model.nodes
        if group.label in counts
    )
    between = tuple(link for link in model.links.between if counts.keys() >= set(link.groups))
    return model.changed(name=name, nodes=nodes, links=model.links.model_copy(update={"between": between}))
