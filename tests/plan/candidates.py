"""Candidates by hand, for tests of placement and prediction."""

from __future__ import annotations

from helpers.plans import profile_of
from spindle_cli.account.traffic import traffic_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.assemble import exact_slices
from spindle_cli.plan.placing.predict import Prediction, predict
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Point, Problem
from spindle_cli.plan.schedule import Candidate, Placed, UnplacedSlice, placed_slices
from spindle_cli.profile.types import MetaOpProfile


def problem_of(cluster: Cluster, *metaops: MetaOpProfile, **training: object) -> Problem:
    return make_problem(profile_of(*metaops).model_copy(update=training), cluster)


def candidate_of(problem: Problem, *jobs: tuple[int, int, int, int, float]) -> Candidate:
    """From (node, first op, last op, devices, start)."""
    pieces = []
    for node, first, last, num_devices, start_s in jobs:
        point = point_of(problem, node, num_devices)
        pieces.append(UnplacedSlice(node, first, last, point, start_s, start_s + (last - first) * point.op_s))
    return Candidate("by hand", tuple(pieces))


def point_of(problem: Problem, node: int, num_devices: int) -> Point:
    return next(point for point in problem.nodes[node].points if point.num_devices == num_devices)


def predicted(problem: Problem, placed: Placed, compute_s: float, step_s: float = 0.0) -> Prediction:
    """The prediction of a placed candidate whose devices all take `step_s` for the optimizer's step."""
    slices = exact_slices(problem, placed)
    traffic = traffic_of(placed_slices(problem, slices), problem.uses)
    return predict(problem, slices, traffic, compute_s, (step_s,) * problem.num_devices)
