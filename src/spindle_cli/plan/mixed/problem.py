"""The planning problem on a cluster of several types: nodes whose points are allocations over the types."""

from __future__ import annotations

from dataclasses import replace

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.mixed.cutting.allocations import allocations, recomputing
from spindle_cli.plan.problem import MemoryFallback, Point, Problem, make_problem
from spindle_cli.profile.types import MetaOpProfile, Profile


def make_mixed_problem(profile: Profile, cluster: Cluster, fallback: MemoryFallback | None = None) -> Problem:
    """The problem; each node's points are `allocations`, the fastest last.

    Args:
        profile: as the cluster's types see it (`profile/mixed/seen.py`).
        fallback: which ops are recomputed; layers are split where that is fastest alone.

    Raises:
        NoPlanError: a MetaOp has no allocation.
    """
    known: list[tuple[object, tuple[Point, ...]]] = []

    def points(metaop: MetaOpProfile) -> tuple[Point, ...]:
        key = metaop.batch_size, metaop.curve, metaop.shares
        for other, own in known:
            if other == key:
                return own
        known.append((key, allocations(metaop, cluster)))
        return known[-1][1]

    problem = make_problem(profile, cluster, fallback)
    nodes = []
    for node in problem.nodes:
        own = points(node.metaop)
        again = tuple(map(recomputing, own)) if node.points[0].recompute else own
        nodes.append(replace(node, points=again))
    return replace(problem, nodes=tuple(nodes))
