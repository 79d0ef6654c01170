"""Plans that run each task in two stages of devices, in micro-batches of which two are open at a time."""

from __future__ import annotations

from spindle_cli.account.types import Pass
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.micro_batches import in_micro_batches
from spindle_cli.plan.best.written import Bounds, plan_of
from spindle_cli.plan.bound.any_cut import AnyCut
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.search.evaluate import measure_as_they_are
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.types import Profile

MICRO_BATCHES = 8


def in_two_stages(profile: Profile, cluster: Cluster) -> Plan | None:
    """The first half of each task's slices by the sequential plan for one device on the first device, the
    others on the second, task after task; None if it does not fit.
    """
    (group,) = cluster.nodes
    alone = cluster.changed(nodes=(group.model_copy(update={"devices": 1}),))
    task_of = {metaop.name: metaop.task for metaop in profile.metaops}
    cut = in_micro_batches(profile, dict.fromkeys(task_of.values(), MICRO_BATCHES), cluster)
    whole = make_plan(profile, alone, "sequential", sharding={}).slices
    slices: list[Slice] = []
    order: list[Pass] = []
    for task in dict.fromkeys(task_of.values()):
        pieces, first = [piece for piece in whole if task_of[piece.metaop] == task], len(slices)
        stages = [int(2 * place >= len(pieces)) for place in range(len(pieces))]
        for number in range(MICRO_BATCHES):
            slices += [
                cut.numbered(piece, number).model_copy(update={"devices": (stage,)})
                for piece, stage in zip(pieces, stages, strict=True)
            ]
        for number in range(MICRO_BATCHES + 1):
            own = range(first + number * len(pieces), first + (number + 1) * len(pieces))
            if number < MICRO_BATCHES:
                order += [Pass(index, is_backward=False) for index in own]
            if number:
                order += [Pass(index - len(pieces), is_backward=True) for index in reversed(own)]
    evaluated = measure_as_they_are(cut.all, "sequential", timed(cut.all, slices, order))
    if evaluated is None:
        return None
    bounds = Bounds(
        lower_bound(make_problem(profile, cluster)).lower_bound_s,
        AnyCut(profile, cluster),
    )
    return plan_of(profile, cluster, "sequential", PlanResult(evaluated, is_short=False, cut=cut), bounds)
