"""A plan's slices where they are, in the order that they have: what a profile predicts of them, and the same
with activations in host memory.
"""

from __future__ import annotations

from dataclasses import replace

from spindle_cli.account.activations import edges_between, order_passes, pass_order, slice_edges
from spindle_cli.account.device_memory import device_memory, optimizer_steps_s
from spindle_cli.account.traffic import traffic_of
from spindle_cli.costs.recompute_and_offload import hidden_on, links_of_shares, spread_over
from spindle_cli.costs.shares import OpSeconds
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.placing.predict import Prediction, predict
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import SHORTEST_S, Problem
from spindle_cli.plan.schedule import placed_slices
from spindle_cli.plan.search.judge import Judged, measure_as_they_are
from spindle_cli.plan.sets.restrict import as_early_as_possible
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.types import Profile


def predicted_by(profile: Profile, plan: Plan) -> Prediction:
    """The iteration of a plan's slices on their devices, over the plan's links.

    Args:
        profile: of the plan's workload, as its cluster sees it; whose MetaOps say what is gathered.
    """
    profile = profile.sharded(plan.sharding).weighted(plan.shard_weights)
    problem = make_problem(profile, plan.cluster)
    slices = _timed(problem, plan)
    held = device_memory(profile.metaops, slices, plan.cluster, profile, turn=plan.turn)
    placed = replace(placed_slices(problem, slices), sums_by_node=plan.sums_by_node)
    if plan.joint is None:
        traffic = traffic_of(placed, problem.uses)
    else:
        traffic = traffic_of(replace(placed, joint=plan.joint, member=plan.member))
    steps_s = optimizer_steps_s(held, profile.optimizer_s_per_byte)
    return predict(problem, slices, traffic, max(piece.last_s for piece in slices), steps_s)


def moving_instead(problem: Problem, judged: Judged) -> Judged:
    """The plan whose slices that recompute move activations to host memory instead, of as many ops as hide:
    those of all MetaOps, or of one after another, as far as that fits and is shorter. It is for plans that
    the search over everything at once cannot say.
    """
    best = judged
    recomputing = dict.fromkeys(piece.metaop for piece in judged.slices if piece.recompute)
    if not problem.cluster.knows_host_links:
        return judged
    for chosen in [set(recomputing), *({name} for name in recomputing)]:
        slices = [_moving(problem, piece) if piece.metaop in chosen else piece for piece in best.slices]
        if any(piece.offload != before.offload for piece, before in zip(slices, best.slices, strict=True)):
            order = order_passes(slices, edges_between(slices, problem.profile.by_name))
            found = measure_as_they_are(problem, judged.strategy, timed(problem, slices, order))
            if found is not None and found.rank() < best.rank():
                best = found
    return best


def _moving(problem: Problem, piece: Slice) -> Slice:
    """The slice with activations of as many ops in host memory as hide, if it recomputes and moves none."""
    if not piece.recompute or piece.offload:
        return piece
    point, links = problem.point_of(piece), links_of_shares(piece, problem.cluster)
    op = OpSeconds(point.forward_s, point.backward_s - point.again * point.forward_s)
    share = hidden_on(piece, problem.profile.by_name[piece.metaop], op, links)
    return piece.model_copy(update={"offload": spread_over(*piece.ops, share)})


def _timed(problem: Problem, plan: Plan) -> tuple[Slice, ...]:
    if plan.slices[0].backward_s is not None:
        return timed(problem, plan.slices, pass_order(plan, slice_edges(plan)))
    pieces = []
    for piece in plan.slices:
        op_s = max(sum(problem.op_s_of(piece)), SHORTEST_S)
        pieces.append(piece.model_copy(update={"start_s": 0.0, "end_s": piece.num_ops * op_s}))
    return as_early_as_possible(pieces, problem.profile.by_name)
