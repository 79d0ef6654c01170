"""Plans that leave nodes idle, where links to more nodes cost more than these bring: on devices of one type
(of several: `mixed/parts.py`), and any of them as plans of the whole cluster.

Parts are whole groups of nodes: nodes of one group are alike, and what a schedule on some of them gains is
small beside a second search of all. No schedule of whole batches on n devices ends before the work by the
allocations that take least of the devices' time, over n. Parts for which that, and then the linear program,
is below the best iteration so far are planned for, where memory is short only if a quick plan comes near.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.asked import Asked
from spindle_cli.plan.best.find import Found
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.mixed.parts import Part, groups_of
from spindle_cli.plan.pipelines.drafts import may_gain
from spindle_cli.plan.problem import WORTH, Problem, make_problem
from spindle_cli.plan.search.judge import measure_as_they_are
from spindle_cli.plan.search.memory_fallback import NEAR
from spindle_cli.plan.search.passes_apart import apart
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.profile.types import Profile
from spindle_cli.units import counted

# Most parts whose bound is worked out, the largest first.
MOST_PARTS = 2

# The best plan for a cluster of what is asked for; None: nothing fits.
Find = Callable[[Cluster, Asked], Found | None]
MakeProblem = Callable[[Profile, Cluster], Problem]


def or_on_fewer(profile: Profile, cluster: Cluster, asked: Asked, whole: Found, find: Find) -> Found:
    """A plan, or one that leaves nodes of one type idle and is shorter by `WORTH`.

    Args:
        whole: the best plan of those that may use all devices.
        find: plans for a part of the cluster.
    """
    is_free = asked.strategy == "spindle" and asked.effort != NO_SEARCH and not asked.shares_out_more
    if not is_free or len(cluster.nodes) == 1:
        return whole
    best, problem = whole, make_problem(profile, cluster)
    if not may_gain(whole.best.prediction, lower_bound(problem).lower_bound_s):
        return whole
    for part in _parts(problem, (1 - WORTH) * whole.best.prediction.iteration_s):
        best_s = best.best.prediction.iteration_s
        try:
            if lower_bound(make_problem(profile, part.cluster)).lower_bound_s >= (1 - WORTH) * best_s:
                continue
            # Where memory is short a search takes long, and what makes it so shows in a quick plan.
            if whole.is_short and not _comes_near(
                find(part.cluster, replace(asked, effort=NO_SEARCH)), best_s
            ):
                continue
            searched = find(part.cluster, asked)
        except NoPlanError:  # an op has no allocation there
            continue
        moved = None if searched is None else on_all(profile, cluster, part, searched, make_problem)
        if moved is not None and moved.best.prediction.iteration_s < (1 - WORTH) * best_s:
            why = "sums over the links to more nodes would take longer than these save"
            best = with_idle(moved, cluster, part, why)
    return best


def _comes_near(quick: Found | None, than_s: float) -> bool:
    return quick is not None and quick.best.prediction.iteration_s <= NEAR * than_s


def _parts(problem: Problem, than_s: float) -> list[Part]:
    """Parts in which a schedule could end earlier."""
    work_s = sum(
        node.num_ops * min(point.num_devices * point.op_s for point in node.points) for node in problem.nodes
    )
    found = [part for part in groups_of(problem.cluster) if work_s / len(part.devices) < than_s]
    return sorted(found, key=lambda part: -len(part.devices))[:MOST_PARTS]


def on_all(profile: Profile, cluster: Cluster, part: Part, found: Found, make: MakeProblem) -> Found | None:
    """The plan for a part as one of the whole cluster; None if that does not fit.

    Args:
        make: indexes the profile for the cluster.
    """
    cut = None if found.cut is None else replace(found.cut, cluster=cluster)
    problem = make(profile.sharded(found.sharding), cluster) if cut is None else cut.all
    slices = tuple(
        piece.model_copy(update={"devices": tuple(part.devices[device] for device in piece.devices)})
        for piece in found.best.slices
    )
    judged = measure_as_they_are(problem, "spindle", slices, found.best.after)
    if judged is not None and cluster.is_mixed and not judged.is_apart:
        judged = apart(problem, judged)
    return None if judged is None else replace(found, best=judged, cut=cut)


def with_idle(found: Found, cluster: Cluster, part: Part, why: str) -> Found:
    """The plan with a note of which devices stay idle, and why."""
    idle = cluster.num_devices - len(part.devices)
    note = f"{counted(idle, 'device')} {'stays' if idle == 1 else 'stay'} idle: {why}."
    return replace(found, note=note if found.note is None else f"{found.note} {note}")
