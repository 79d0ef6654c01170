"""Types of device that do not differ: names of one, whose plans are those of a cluster of one type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.assemble import plan_metaop
from spindle_cli.plan.types import Plan
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.points import OfDevice, by_device
from spindle_cli.profile.types import Profile


def are_alike(profile: Profile) -> bool:
    """Whether every op takes as long on all types of a profile, as a cluster sees it."""
    return all(
        _equal(each.curve, len(profile.devices)) and _equal(each.shares, len(profile.devices))
        for each in profile.metaops
    )


def _equal(entries: Sequence[OfDevice], num_types: int) -> bool:
    if not entries:
        return True
    of_types = [
        [entry.model_copy(update={"device": None}) for entry in own] for own in by_device(entries).values()
    ]
    return len(of_types) == num_types and all(own == of_types[0] for own in of_types)


def as_one_type(cluster: Cluster) -> Cluster:
    """The same with the first type's name for all devices."""
    labels = Counter(group.label for group in cluster.nodes)
    nodes = [group.model_copy(update={"device": cluster.types[0]}) for group in cluster.nodes]
    # Links between groups go by their names; those without one were called by their type.
    for place, group in enumerate(cluster.nodes):
        if group.name is None and labels[group.label] == 1:
            nodes[place] = nodes[place].model_copy(update={"name": group.device})
    return cluster.changed(nodes=tuple(nodes))


def with_types(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """A plan of `as_one_type(cluster)` as one of the cluster.

    Args:
        profile: as the cluster's types see it.
    """
    seen = seen_on(profile, cluster)
    slices = [piece for wave in plan.waves for piece in wave.slices]
    metaops = tuple(plan_metaop(metaop, slices, cluster) for metaop in seen.metaops)
    return plan.model_copy(update={"cluster": cluster, "metaops": metaops})
