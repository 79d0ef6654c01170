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
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.idle_nodes import MOST_PARTS
from spindle_cli.plan.best.parts import Part, groups_of, on_all, parts_of, with_idle
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.types import strategies_on
from spindle_cli.profile.types import Profile

# The best plan for a cluster of what is asked for; None: nothing fits.
Find = Callable[[Cluster, PlanRequest], PlanResult | None]


def found_otherwise(
    profile: Profile, cluster: Cluster, request: PlanRequest, find: Find
) -> PlanResult | None:
    """A plan where `spindle` has found none; None where that fits in no other way either.

    Args:
        find: plans for the cluster, or for a part of it.
    """
    if request.strategy != "spindle":
        return None
    quickly = replace(request, effort=NO_SEARCH)
    others = strategies_on(cluster)[1:]
    results = [_or_none(find, cluster, replace(quickly, strategy=name)) for name in others]
    best = min(filter(None, results), key=lambda result: result.best.rank(), default=None)
    if best is not None or request.shares_out_more:  # what is to be shared out is so over all devices
        return best
    for part in _parts(cluster):
        of_part = _or_none(find, part.cluster, request)
        if of_part is not None and (moved := on_all(profile, cluster, part, of_part)) is not None:
            idle = cluster.num_devices - len(part.devices)
            return with_idle(moved, idle, "no plan that was looked for fits with all of them")
    return None


def _or_none(find: Find, cluster: Cluster, request: PlanRequest) -> PlanResult | None:
    """None also where an op has no allocation, which is no reason to have no plan elsewhere."""
    try:
        return find(cluster, request)
    except NoPlanError:
        return None


def _parts(cluster: Cluster) -> Iterator[Part]:
    """Some parts of a cluster, those that are whole groups of nodes first, of these and of others the largest
    first.
    """
    parts_by_devices: dict[tuple[int, ...], Part] = {}
    for parts in (groups_of(cluster), parts_of(cluster)):
        for part in sorted(parts, key=lambda some_part: -len(some_part.devices)):
            parts_by_devices.setdefault(part.devices, part)
    yield from list(parts_by_devices.values())[:MOST_PARTS]
