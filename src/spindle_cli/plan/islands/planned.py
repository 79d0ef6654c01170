"""The plan of a workload that is trained on islands: that of one of them, and what outer steps take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spindle_cli.account.traffic import outer_step_bytes, outer_step_s
from spindle_cli.costs.shares import rebatched
from spindle_cli.errors import NoPlanError
from spindle_cli.files.artifact import validate
from spindle_cli.files.cluster import Cluster, Link, NodeGroup
from spindle_cli.plan.islands.said import lines_of
from spindle_cli.plan.types import Plan, PlannedIslands
from spindle_cli.profile.types import LocalSgd, Profile
from spindle_cli.units import counted

# Makes the plan of a profile for a cluster, without islands.
Planner = Callable[[Profile, Cluster], Plan]


def on_islands(profile: Profile, cluster: Cluster, local_sgd: LocalSgd, make: Planner) -> Plan:
    """The plan of the first island; the others run it on their own devices.

    Args:
        profile: of an island's part of the batches.
        cluster: of all islands.

    Raises:
        NoPlanError: the cluster cannot be divided into such islands, or an island has no plan.
    """
    alone = profile.of_an_island()
    island = island_of(cluster, local_sgd.islands)
    plan = make(alone, island)
    planned = PlannedIslands(
        cluster=cluster,
        outer_step_bytes=outer_step_bytes(plan, local_sgd),
        outer_step_s=outer_step_s(plan, local_sgd, cluster),
        without_s=_without_s(alone, cluster, local_sgd, make),
    )
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    made = validate(Plan, {**fields, "local_sgd": local_sgd, "islands": planned}, where="the plan")
    return made.model_copy(update={"notes": (*made.notes, *lines_of(made))})


def _without_s(alone: Profile, cluster: Cluster, local_sgd: LocalSgd, make: Planner) -> float | None:
    """Predicted seconds of an iteration of the same batches by all devices, which then sum gradients in every
    step; None where there is no such plan.

    Shares that are larger than an island's batch are not known, and are read from the line through those
    that are.
    """
    metaops = [
        rebatched(metaop, metaop.batch_size * local_sgd.islands, more_devices=local_sgd.islands)
        for metaop in alone.metaops
    ]
    try:
        return make(alone.with_metaops(metaops), cluster).mean_iteration_s
    except NoPlanError:
        return None


def island_of(cluster: Cluster, count: int) -> Cluster:
    """The first of `count` islands, which are as many equal runs of the cluster's nodes, in their order.

    Raises:
        NoPlanError: the nodes cannot be divided so, or islands differ.
    """
    nodes = [group for group in cluster.nodes for _ in range(group.count)]
    if len(nodes) % count:
        raise NoPlanError(
            f"{cluster.name!r} has {counted(len(nodes), 'node')}, to be divided between {count} islands "
            "(train.local_sgd)",
            hint=f"Plan for a cluster with a multiple of {count} nodes: an island is whole nodes.",
        )
    size = len(nodes) // count
    for place in range(size, len(nodes)):
        if _unnamed(nodes[place]) != _unnamed(nodes[place % size]):
            raise _unlike(cluster, nodes, place, size)
    if not cluster.has_one_kind_of_links:
        for first in range(size, len(nodes), size):
            _require_same_links(cluster, first, size)
    return _part(cluster, nodes[:size])


def _unnamed(node: NodeGroup) -> NodeGroup:
    """All that counts of a node: nodes of groups with other names may be alike."""
    return node.model_copy(update={"name": None, "count": 1})


def _unlike(cluster: Cluster, nodes: Sequence[NodeGroup], place: int, size: int) -> NoPlanError:
    ours, theirs = nodes[place % size], nodes[place]
    return NoPlanError(
        f"{cluster.name!r}: islands have to be alike (train.local_sgd): node {place % size}, of island 0, "
        f"has {ours.devices} x {ours.device} (group {ours.label}), and node {place}, in the same place of "
        f"island {place // size}, {theirs.devices} x {theirs.device} (group {theirs.label}), and not all "
        "that the cluster file says of them is equal",
        hint="Islands are runs of nodes in the order of the cluster file: put the nodes of an island one "
        "after another, and plan for islands of equal nodes.",
    )


def _require_same_links(cluster: Cluster, first: int, size: int) -> None:
    """Between the nodes of an island, from `first` on, as between those of the first.

    Raises:
        NoPlanError: they differ.
    """
    for a in range(size):
        for b in range(a, size):
            ours, theirs = cluster.link_of_nodes(a, b), cluster.link_of_nodes(first + a, first + b)
            if _speed(ours) != _speed(theirs):
                raise NoPlanError(
                    f"{cluster.name!r}: islands have to be alike (train.local_sgd): the link between nodes "
                    f"{a} and {b}, of island 0, is not that between nodes {first + a} and {first + b}, of "
                    f"island {first // size}",
                    hint="Put the nodes of an island one after another in the cluster file.",
                )


def _speed(link: Link) -> tuple[object, ...]:
    """All that counts of a link, whichever groups it is between."""
    return link.latency_us, link.bandwidth_gb_per_s, link.curve


def _part(cluster: Cluster, nodes: Sequence[NodeGroup]) -> Cluster:
    """The first nodes of a cluster, with the links that they have."""
    counts: list[tuple[NodeGroup, int]] = []
    for node in nodes:
        if counts and counts[-1][0] is node:
            counts[-1] = (node, counts[-1][1] + 1)
        else:
            counts.append((node, 1))
    labels = {group.label for group, _ in counts}
    return cluster.changed(
        name=f"{cluster.name}, an island",
        nodes=tuple(group.model_copy(update={"count": count}) for group, count in counts),
        links=cluster.links.model_copy(
            update={"between": tuple(link for link in cluster.links.between if set(link.groups) <= labels)}
        ),
    )
