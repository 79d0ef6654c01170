"""What a profile predicts of a plan's slices where they are, in the order that they have."""

from __future__ import annotations

from dataclasses import replace

from spindle_cli.account.activations import pass_order, slice_edges
from spindle_cli.account.device_memory import device_memory, optimizer_steps_s
from spindle_cli.account.traffic import traffic_of
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.placing.predict import Prediction, predict
from spindle_cli.plan.problem import Problem, make_problem
from spindle_cli.plan.schedule import placed_slices
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


def _timed(problem: Problem, plan: Plan) -> tuple[Slice, ...]:
    if plan.slices[0].backward_s is not None:
        return timed(problem, plan.slices, pass_order(plan, slice_edges(plan)))
    pieces = [
        piece.model_copy(update={"start_s": 0.0, "end_s": piece.num_ops * problem.point_of(piece).op_s})
        for piece in plan.slices
    ]
    return as_early_as_possible(pieces, problem.profile.by_name)
