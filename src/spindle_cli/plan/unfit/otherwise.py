"""Plans where nothing fits that was looked for: those of another strategy, or on fewer nodes.

What gives up speed for memory goes on from the fastest of quick plans; where that has no room, another
strategy's may have. And devices may take more memory than they bring: communicators go to each of them,
shares that are smaller than a sample there are none, and parameters that all share out have to fit the
smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.asked import Asked
from spindle_cli.plan.best.find import Found
from spindle_cli.plan.mixed.parts import Part, parts_of
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.judge import Judged, measure_as_they_are
from spindle_cli.plan.search.passes_apart import apart
from spindle_cli.plan.strategies.spindle import NO_SEARCH
from spindle_cli.plan.types import strategies_on
from spindle_cli.profile.types import Profile
from spindle_cli.units import counted

# Most parts of a cluster that are planned for, those first that leave out whole groups of nodes, or least.
MOST_PARTS = 4

# The best plan for a cluster of what is asked for; None: nothing fits.
Find = Callable[[Cluster, Asked], Found | None]
MakeProblem = Callable[[Profile, Cluster], Problem]


def found_otherwise(
    profile: Profile, cluster: Cluster, asked: Asked, find: Find, make: MakeProblem
) -> Found | None:
    """A plan where `spindle` has found none; None where that fits in no other way either.

    Args:
        find: plans for the cluster, or for a part of it.
        make: indexes the profile for the cluster.
    """
    if asked.strategy != "spindle":
        return None
    quickly = replace(asked, effort=NO_SEARCH)
    others = strategies_on(cluster)[1:]
    found = [_or_none(find, cluster, replace(quickly, strategy=name)) for name in others]
    best = min(filter(None, found), key=lambda each: each.best.rank(), default=None)
    if best is not None or asked.shares_out_more:  # what is to be shared out is so over all devices
        return best
    for part in _parts(cluster):
        of_part = _or_none(find, part.cluster, asked)
        moved = None if of_part is None else _on_all(profile, cluster, part, of_part, make)
        if moved is not None:
            return moved
    return None


def _or_none(find: Find, cluster: Cluster, asked: Asked) -> Found | None:
    """None also where an op has no allocation, which is no reason to have no plan elsewhere."""
    try:
        return find(cluster, asked)
    except NoPlanError:
        return None


def _parts(cluster: Cluster) -> Iterator[Part]:
    """Some parts of a cluster, those without whole groups first, of these and of others the largest first."""
    nodes = {group.label: group.count for group in cluster.nodes}

    def place(part: Part) -> tuple[bool, int]:
        is_whole = all(group.count == nodes[group.label] for group in part.cluster.nodes)
        return not is_whole, -len(part.devices)

    yield from sorted(parts_of(cluster), key=place)[:MOST_PARTS]


def _on_all(profile: Profile, cluster: Cluster, part: Part, found: Found, make: MakeProblem) -> Found | None:
    """The plan for a part as one of the whole cluster; None if that does not fit."""
    cut = None if found.cut is None else replace(found.cut, cluster=cluster)
    problem = make(profile.sharded(found.sharding), cluster) if cut is None else cut.all
    slices = tuple(
        piece.model_copy(update={"devices": tuple(part.devices[device] for device in piece.devices)})
        for piece in found.best.slices
    )
    judged: Judged | None = measure_as_they_are(problem, "spindle", slices, found.best.after)
    if judged is not None and cluster.is_mixed and not judged.is_apart:
        judged = apart(problem, judged)
    if judged is None:
        return None
    idle = cluster.num_devices - len(part.devices)
    stay = "stays" if idle == 1 else "stay"
    note = f"{counted(idle, 'device')} {stay} idle: no plan that was looked for fits with all of them."
    return replace(found, best=judged, cut=cut, note=note if found.note is None else f"{found.note} {note}")
