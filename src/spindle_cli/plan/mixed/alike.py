"""Types of device that do not differ: names of one, whose plans are those of a cluster of one type."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.assemble import plan_metaop
from spindle_cli.plan.types import Plan
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.points import OfDevice, by_device
from spindle_cli.profile.types import Profile


def are_alike(profile: Profile) -> bool:
    """Whether every op takes as long on all types of a profile, as a cluster sees it."""
    return all(
        _equal(metaop.curve, len(profile.devices)) and _equal(metaop.shares, len(profile.devices))
        for metaop in profile.metaops
    )


def _equal(entries: Sequence[OfDevice], num_types: int) -> bool:
    if not entries:
        return True
    of_types = [
        [entry.model_copy(update={"device": None}) for entry in of_type]
        for of_type in by_device(entries).values()
    ]
    return len(of_types) == num_types and all(of_type == of_types[0] for of_type in of_types)


def as_one_type(cluster: Cluster) -> Cluster:
    """Return the cluster with the first type's name for all devices."""
    labels = [group.label for group in cluster.nodes]
    # Links between groups go by their names; those without one were called by their type, maybe several.
    names = [
        label if labels.count(label) == 1 else f"{label}, group {place}" for place, label in enumerate(labels)
    ]
    nodes = tuple(
        group.model_copy(update={"device": cluster.types[0], "name": name})
        for group, name in zip(cluster.nodes, names, strict=True)
    )
    between = tuple(
        link.model_copy(update={"groups": (names[a], names[b])})
        for link in cluster.links.between
        for a, b in combinations_with_replacement(range(len(names)), 2)
        if {labels[a], labels[b]} == set(link.groups)
    )
    return cluster.changed(nodes=nodes, links=cluster.links.model_copy(update={"between": between}))


def with_types(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """A plan of `as_one_type(cluster)` as one of the cluster.

    Args:
        profile: as the cluster's types see it.
    """
    seen = seen_on(profile, cluster)
    slices = [slice_ for wave in plan.waves for slice_ in wave.slices]
    metaops = tuple(plan_metaop(metaop, slices, cluster) for metaop in seen.metaops)
    return plan.model_copy(update={"cluster": cluster, "metaops": metaops})
