"""Plans whose devices share all parameters out by two replica groups, each of which runs every other task."""

from __future__ import annotations

from spindle_cli.account.types import Pass
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardWeights
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.written import Bounds, plan_of
from spindle_cli.plan.bound.any_cut import AnyCut
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.search.evaluate import measure_as_they_are
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.types import Profile


def by_two_replica_groups(profile: Profile, cluster: Cluster, weights: ShardWeights = ()) -> Plan | None:
    """The sequential plan of each half of one node for the tasks that it runs, task after task; None where a
    MetaOp does not run on all devices of a half. `weights`: of the devices, where their ranges differ.
    """
    count = cluster.num_devices // 2
    (group,) = cluster.nodes
    half = cluster.changed(nodes=(group.model_copy(update={"devices": count}),))
    tasks = list(dict.fromkeys(metaop.task for metaop in profile.metaops))
    keys = {metaop.parameters or metaop.name for metaop in profile.metaops}
    shared_out = profile.sharded(dict.fromkeys(keys, Sharding.PARAMETERS)).weighted(weights)
    slices: list[Slice] = []
    order: list[Pass] = []
    for number, task in enumerate(tasks):
        own = profile.with_metaops([metaop for metaop in profile.metaops if metaop.task == task])
        pieces = [
            _on_all(piece, number % 2, count)
            for piece in make_plan(own, half, "sequential", sharding={}).slices
        ]
        first = len(slices)
        order += [Pass(first + index, is_backward=False) for index in range(len(pieces))]
        order += [Pass(first + index, is_backward=True) for index in reversed(range(len(pieces)))]
        slices += pieces
    problem = make_problem(shared_out, cluster)
    points = {node.metaop.name: {(each.dp, each.tp) for each in node.points} for node in problem.nodes}
    if any((piece.dp, piece.tp) not in points[piece.metaop] for piece in slices):
        return None
    evaluated = measure_as_they_are(problem, "sequential", timed(problem, slices, order))
    if evaluated is None:
        return None
    bounds = Bounds(
        lower_bound(make_problem(profile, cluster)).lower_bound_s,
        AnyCut(profile, cluster),
    )
    found = PlanResult(evaluated, is_short=True, sharding=shared_out.sharding)
    return plan_of(profile.weighted(weights), cluster, "sequential", found, bounds)


def _on_all(piece: Slice, replica_group: int, count: int) -> Slice:
    devices = tuple(range(replica_group * count, (replica_group + 1) * count))
    alone = {"backward_start_s": None, "backward_end_s": None, "micro_batch": 0, "micro_batches": 1}
    return piece.model_copy(update={"devices": devices, "dp": count, "tp": 1, "rows": None, **alone})
