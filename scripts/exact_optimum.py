"""How much shorter a schedule is that constraint programming finds, to see how far plans are from the best.

    python scripts/exact_optimum.py PROFILE.json --cluster CLUSTER.yaml [--seconds 60]
    python scripts/exact_optimum.py levels-2 --cluster h800-16-h20-16

Of a profile on a cluster, or of a random workload of `bench_mixed_plan.py` on one of its clusters, or on
one of one type; devices are taken to have ample memory. Needs the optional extra `exact` (ortools).

It starts from the shortest schedule that the planner's own search finds, its slices cut into jobs of some ops
each. Each job may run on any of the allocations of its MetaOp that cost least by the bound's prices, at any
time; jobs of a MetaOp follow each other, a MetaOp starts when its inputs have ended, and no more devices of a
type are busy than there are. What is found then gets its devices as the planner's own schedules do, so that
its iteration, with transfers and sums, can be compared with the plan's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from math import ceil
from pathlib import Path

from bench_mixed_plan import DRAWN
from exact_search import Allocation, Job, Question, answer
from mixed_clusters import cluster_named
from random_mixed_profiles import random_mixed_profile
from random_profiles import random_profile

from spindle_cli.files.cluster import MAX_MEMORY_GIB, Cluster
from spindle_cli.plan.best.posed import PosedProblem, ProblemPoser
from spindle_cli.plan.bound.pricing import column_of
from spindle_cli.plan.mixed.candidates import BASE_JOBS
from spindle_cli.plan.mixed.search import search as search_on_types
from spindle_cli.plan.problem import Node, Point, Problem
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.search.evaluate import best_of
from spindle_cli.plan.search.listing import Timed, to_pieces
from spindle_cli.plan.strategies.spindle import spindle
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile

EFFORT = 1  # as `spindle plan`
# Of a schedule, what a job waits for only because the solver counts in ticks.
HARDLY = 2e-3


def main() -> None:
    """Print the plan's compute and iteration, and those of the best schedule found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", help="a file, or the name of a random workload")
    parser.add_argument("--cluster", required=True, help="a file, or a name")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--pieces", type=int, default=4, help="of a MetaOp's ops, at least (default: 4)")
    parser.add_argument("--allocations", type=int, default=24, help="of a MetaOp, at most (default: 24)")
    arguments = parser.parse_args()
    if find_spec("ortools") is None:
        parser.error("it needs ortools: pip install -c constraints.txt -e '.[exact]'")
    cluster = _cluster(arguments.cluster)
    profile = seen_on(_profile(arguments.profile, cluster), cluster)
    posed = ProblemPoser().posed(profile, cluster)
    plan, _ = posed.best("spindle", EFFORT)
    assert plan is not None, "memory is ample"
    question, points = question_of(posed, arguments.pieces, arguments.allocations)
    jobs = answer(question, arguments.seconds, arguments.workers)
    candidate = candidate_of(posed.problem, jobs, points)
    placed = [evaluated for evaluated in best_of(posed.problem, [candidate]) if evaluated is not None]
    print(
        json.dumps(
            {
                "workload": profile.workload.name,
                "cluster": cluster.name,
                "lower_bound_s": posed.lower_bound_s,
                "plan_compute_s": plan.prediction.compute_s,
                "plan_iteration_s": plan.prediction.iteration_s,
                "searched_compute_s": question.start_end_s,
                "exact_compute_s": candidate.end_s,
                "exact_iteration_s": placed[0].prediction.iteration_s if placed else None,
            }
        )
    )


def _cluster(name: str) -> Cluster:
    if not name.endswith((".yaml", ".yml")):
        return cluster_named(name, MAX_MEMORY_GIB)
    cluster = Cluster.read(Path(name))
    nodes = tuple(group.model_copy(update={"memory_gib": MAX_MEMORY_GIB}) for group in cluster.nodes)
    return cluster.changed(nodes=nodes)


def _profile(name: str, cluster: Cluster) -> Profile:
    if name not in DRAWN:
        return Profile.read(Path(name))
    shape, seed = DRAWN[name]
    return random_mixed_profile(seed, shape, cluster) if cluster.is_mixed else random_profile(seed, shape)


def question_of(
    posed: PosedProblem, pieces: int, most: int
) -> tuple[Question, tuple[tuple[Point, ...], ...]]:
    """The question, and the points that its allocations are of.

    Args:
        pieces: the jobs of a node have at most one so manyth of its ops each.
        most: allocations of a node.
    """
    problem = posed.problem
    start = _shortest(posed)
    kept = [
        _kept(posed, node, {point for (own, point, _), _, _ in start if own == node.index}, most)
        for node in problem.nodes
    ]
    place = [{point: number for number, point in enumerate(own)} for own in kept]
    jobs = [
        Job(node, place[node][point], num_ops, start_s)
        for (node, point, num_ops), start_s, _ in _cut(problem, start, pieces)
    ]
    points = tuple(tuple(node.points[k] for k in kept[node.index]) for node in problem.nodes)
    allocations = tuple(
        tuple(Allocation(each.op_s, each.counts or (each.num_devices,)) for each in own) for own in points
    )
    kinds = problem.cluster.types
    return Question(
        devices=tuple(problem.cluster.num_of_type[kind] for kind in kinds),
        allocations=allocations,
        inputs=tuple(tuple(node.inputs) for node in problem.nodes),
        order=tuple(problem.order),
        start=tuple(sorted(jobs, key=lambda job: job.start_s)),
    ), points


def _shortest(posed: PosedProblem) -> Sequence[Timed]:
    """The shortest schedule that the planner's search finds; its plan has the shortest iteration."""
    found: list[Sequence[Timed]] = []
    if posed.problem.cluster.is_mixed:
        for mixes in (False, True):
            found += search_on_types(posed.problem, posed.bound, BASE_JOBS * 4, EFFORT, mixes=mixes)
    else:
        for candidates in spindle(posed.problem, posed.bound, EFFORT):
            found += [_timed(posed.problem, candidate) for candidate in candidates]
    return min(found, key=lambda timed: max(end_s for _, _, end_s in timed))


def _timed(problem: Problem, candidate: Candidate) -> list[Timed]:
    """A candidate's pieces as jobs."""
    return [
        (
            (piece.node, problem.nodes[piece.node].points.index(piece.point), piece.num_ops),
            piece.start_s,
            piece.end_s,
        )
        for piece in candidate.pieces
    ]


def _kept(posed: PosedProblem, node: Node, used: set[int], most: int) -> list[int]:
    """Those of a node's points that cost least by the bound's prices, the fastest, and those in use."""
    if not posed.problem.cluster.is_mixed:
        return list(range(len(node.points)))
    prices, critical = posed.bound.prices, posed.bound.critical[node.index]

    def cost(point: int) -> float:
        return column_of(node.points[point]).cost(prices, critical)

    fastest = min(range(len(node.points)), key=lambda point: node.points[point].op_s)
    cheapest = sorted(range(len(node.points)), key=cost)[:most]
    return sorted({*cheapest, *used, fastest})


def _cut(problem: Problem, timed: Sequence[Timed], pieces: int) -> Iterator[Timed]:
    """Jobs of at most one so manyth of their node's ops."""
    for (node, point, num_ops), start_s, end_s in timed:
        size = ceil(problem.nodes[node].num_ops / pieces)
        op_s = (end_s - start_s) / num_ops
        for first in range(0, num_ops, size):
            count = min(size, num_ops - first)
            yield (node, point, count), start_s + first * op_s, start_s + (first + count) * op_s


def candidate_of(problem: Problem, jobs: Sequence[Job], points: Sequence[Sequence[Point]]) -> Candidate:
    """A schedule for the placement; jobs on one allocation with hardly a gap between them become one."""
    timed: list[Timed] = []
    hardly_s = max(job.start_s for job in jobs) * HARDLY
    for job in jobs:
        point = points[job.node][job.allocation]
        own = job.node, problem.nodes[job.node].points.index(point), job.num_ops
        start_s = job.start_s
        if timed and timed[-1][0][:2] == own[:2] and start_s - timed[-1][2] < hardly_s:
            (_, _, num_ops), start_s, _ = timed.pop()
            own = (*own[:2], own[2] + num_ops)
        timed.append((own, start_s, start_s + own[2] * point.op_s))
    return Candidate("spindle", to_pieces(problem, timed))


if __name__ == "__main__":
    main()
