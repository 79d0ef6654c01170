"""A plan's slices where they are, in the order that they have: what a profile predicts of them, and the same
with activations in host memory.
"""

from __future__ import annotations

from dataclasses import replace

from spindle_cli.account.activations import edges_between, order_passes, pass_order, slice_edges
from spindle_cli.account.device_memory import device_memory, optimizer_steps_s
from spindle_cli.account.traffic import traffic_of
from spindle_cli.costs.beyond_curve import hidden_on, links_of_shares, spread_over
from spindle_cli.costs.shares import OpSeconds
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.placing.predict import Prediction, predict
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import SHORTEST_S, Problem
from spindle_cli.plan.schedule import placed_slices
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, measure_as_they_are
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
    return predict(problem, slices, traffic, max(slice_.last_s for slice_ in slices), steps_s)


def moving_instead(problem: Problem, evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """The plan whose slices that recompute move activations to host memory instead, of as many ops as hide:
    those of all MetaOps, or of one after another, as far as that fits and is shorter. It is for plans that
    the search over everything at once cannot say.
    """
    best = evaluated
    recomputing = dict.fromkeys(slice_.metaop for slice_ in evaluated.slices if slice_.recompute)
    if not problem.cluster.knows_host_links:
        return evaluated
    for chosen in [set(recomputing), *({name} for name in recomputing)]:
        slices = [_moving(problem, slice_) if slice_.metaop in chosen else slice_ for slice_ in best.slices]
        if any(slice_.offload != before.offload for slice_, before in zip(slices, best.slices, strict=True)):
            order = order_passes(slices, edges_between(slices, problem.profile.by_name))
            moved = measure_as_they_are(problem, evaluated.strategy, timed(problem, slices, order))
            if moved is not None and moved.rank() < best.rank():
                best = moved
    return best


def _moving(problem: Problem, slice_: Slice) -> Slice:
    """The slice with activations of as many ops in host memory as hide, if it recomputes and moves none."""
    if not slice_.recompute or slice_.offload:
        return slice_
    point, links = problem.point_of(slice_), links_of_shares(slice_, problem.cluster)
    op = OpSeconds(point.forward_s, point.backward_s - point.again * point.forward_s)
    share = hidden_on(slice_, problem.profile.by_name[slice_.metaop], op, links)
    return slice_.model_copy(update={"offload": spread_over(*slice_.ops, share)})


def _timed(problem: Problem, plan: Plan) -> tuple[Slice, ...]:
    if plan.slices[0].backward_s is not None:
        return timed(problem, plan.slices, pass_order(plan, slice_edges(plan)))
    pieces = []
    for slice_ in plan.slices:
        op_s = max(sum(problem.op_s_of(slice_)), SHORTEST_S)
        pieces.append(slice_.model_copy(update={"start_s": 0.0, "end_s": slice_.num_ops * op_s}))
    return as_early_as_possible(pieces, problem.profile.by_name)
