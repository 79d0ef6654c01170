"""The planning problem on a cluster of several types: nodes whose points are allocations over the types."""

from __future__ import annotations

from dataclasses import replace

from spindle_cli.costs.recompute_and_offload import Again
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.sharding import chosen_on_all
from spindle_cli.plan.cutting.allocations import (
    allocations,
    on_all_devices,
    recomputed,
)
from spindle_cli.plan.problem import MemoryFallback, Node, Point, Problem, make_problem
from spindle_cli.profile.types import MetaOpProfile, Profile


class KnownAllocations:
    """Allocations on one cluster, whatever its links to host memory, that have been worked out for some
    problem: MetaOps of others that are made of the same profile have the same curves and shares.
    """

    def __init__(self) -> None:
        # By identities, and with what these are of, so that nothing else gets them.
        self._known: dict[tuple[int, int, int, int], tuple[MetaOpProfile, tuple[Point, ...]]] = {}

    def of(self, metaop: MetaOpProfile, cluster: Cluster, least_tp: int) -> tuple[Point, ...]:
        """As `allocations` has them."""
        key = metaop.batch_size, id(metaop.curve), id(metaop.shares), least_tp
        if key not in self._known:
            found = self._alike(metaop, least_tp) or allocations(metaop, cluster, least_tp)
            self._known[key] = metaop, found
        return self._known[key][1]

    def _alike(self, metaop: MetaOpProfile, least_tp: int) -> tuple[Point, ...] | None:
        """Return the allocations known of a MetaOp with equal curves; None if there is none."""
        wanted = metaop.batch_size, metaop.curve, metaop.shares
        for (*_, known_tp), (other, points) in self._known.items():
            if known_tp == least_tp and wanted == (other.batch_size, other.curve, other.shares):
                return points
        return None


def make_mixed_problem(
    profile: Profile,
    cluster: Cluster,
    fallback: MemoryFallback | None = None,
    known: KnownAllocations | None = None,
) -> Problem:
    """The problem; each node's points are `allocations`, the fastest last.

    Args:
        profile: as the cluster's types see it (`profile/mixed/seen.py`).
        fallback: which ops are recomputed, and which MetaOps are split.
        known: from other problems on this cluster.

    Raises:
        NoPlanError: a MetaOp has no allocation, or none on all devices with which it shares out parameters.
    """
    fallback = fallback or MemoryFallback()
    known = known or KnownAllocations()
    on_all = {name: (point,) for name, point in chosen_on_all(profile, cluster, on_all_devices).items()}

    def points(node: Node) -> tuple[Point, ...]:
        metaop = node.metaop
        least_tp = fallback.least_tp if metaop.name in fallback.split else 1
        plain = on_all.get(metaop.name) or known.of(metaop, cluster, least_tp)
        return recomputed(plain, metaop, Again.of(node.points[0]))

    problem = make_problem(profile, cluster, fallback)
    nodes = tuple(replace(node, points=points(node)) for node in problem.nodes)
    return replace(problem, nodes=nodes)
