"""The plan of a workload that is trained on islands: that of one of them, and what outer steps take."""

from __future__ import annotations

from collections.abc import Callable

from spindle_cli.account.averaging import outer_step_bytes, outer_step_s
from spindle_cli.costs.shares import rebatched
from spindle_cli.errors import NoPlanError
from spindle_cli.files.artifact import validate
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.islands.cut import island_of
from spindle_cli.plan.islands.said import lines_of
from spindle_cli.plan.types import Plan, PlannedIslands
from spindle_cli.profile.types import LocalSgd, Profile

# Makes the plan of a profile for a cluster, without islands.
Planner = Callable[[Profile, Cluster], Plan]


def on_islands(profile: Profile, cluster: Cluster, asked: LocalSgd, make: Planner) -> Plan:
    """The plan of the first island; the others run it on their own devices.

    Args:
        profile: of an island's part of the batches.
        cluster: of all islands.

    Raises:
        NoPlanError: the cluster cannot be divided into such islands, or an island has no plan.
    """
    alone = of_an_island(profile)
    island = island_of(cluster, asked.islands)
    plan = make(alone, island)
    planned = PlannedIslands(
        cluster=cluster,
        outer_step_bytes=outer_step_bytes(plan, asked),
        outer_step_s=outer_step_s(plan, asked, cluster),
        without_s=_without_s(alone, cluster, asked, make),
    )
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    made = validate(Plan, {**fields, "local_sgd": asked, "islands": planned}, where="the plan")
    return made.model_copy(update={"notes": (*made.notes, *lines_of(made))})


def of_an_island(profile: Profile) -> Profile:
    """The profile as of a workload that is one island's alone; as it is without islands."""
    if profile.local_sgd is None:
        return profile
    return profile.model_copy(update={"local_sgd": None}).of_file(profile.sha256())


def _without_s(alone: Profile, cluster: Cluster, asked: LocalSgd, make: Planner) -> float | None:
    """Predicted seconds of an iteration of the same batches by all devices, which then sum gradients in every
    step; None where there is no such plan.

    Shares that are larger than an island's batch are not known, and are read from the line through those
    that are.
    """
    metaops = [
        rebatched(metaop, metaop.batch_size * asked.islands, more_devices=asked.islands)
        for metaop in alone.metaops
    ]
    try:
        return make(alone.with_metaops(metaops), cluster).mean_iteration_s
    except NoPlanError:
        return None
