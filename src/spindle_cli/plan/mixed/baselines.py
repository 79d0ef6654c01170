"""What mixed devices are used for without planning: one MetaOp after another.

`sequential`    each on its fastest allocation, of any types
`dp-even`       each on all devices, equal shares: data parallelism that does not know of types (HAP's DP-EV)
`dp-flops`      each on all devices, shares by the types' published peaks (HAP's DP-CP)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

from spindle_cli.costs.peaks import arithmetic_of, peak_flops_per_s
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.cutting.allocations import groups_of_type, point_of_cut
from spindle_cli.plan.cutting.shares import share_times
from spindle_cli.plan.placing.calendar import first_devices
from spindle_cli.plan.problem import Node, Point, Problem
from spindle_cli.plan.schedule import Draft, UnplacedSlice, whole_slice
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile
from spindle_cli.units import TERA


def baseline(problem: Problem, strategy: StrategyName) -> Draft:
    """A strategy's schedule, in the order of the tasks as far as the edges allow.

    Raises:
        NoPlanError: the strategy has none on these types, or for this workload.
    """
    point_of = _STRATEGIES.get(strategy)
    if point_of is None:
        raise NoPlanError(
            f"{strategy} plans for devices of one type, and {problem.cluster.name!r} has "
            f"{', '.join(problem.cluster.types)}",
            hint=f"Take spindle, {', '.join(_STRATEGIES)}.",
        )
    draft = in_turn(problem, strategy, range(problem.num_devices), point_of)
    assert draft is not None, "an allocation has room on the cluster"
    return draft


def in_turn(
    problem: Problem,
    strategy: StrategyName,
    among: Sequence[int],
    point_of: Callable[[Problem, Node], Point | None],
) -> Draft | None:
    """One MetaOp after another on the first of some devices; None where one has no allocation there."""
    pieces: list[UnplacedSlice] = []
    placed: list[tuple[int, ...]] = []
    now_s = 0.0
    for number in problem.order:
        node = problem.nodes[number]
        point = point_of(problem, node)
        devices = None if point is None else first_devices(problem.cluster, point, among)
        if point is None or devices is None:
            return None
        end_s = now_s + node.num_ops * point.op_s
        pieces.append(whole_slice(node, point, now_s, end_s))
        placed.append(devices)
        now_s = end_s
    return Draft(strategy, tuple(pieces), tuple(placed), after=tuple(range(len(pieces))))


def _fastest(_: Problem, node: Node) -> Point:
    return node.points[-1]


def _even(problem: Problem, node: Node) -> Point:
    return _by_weight(problem, node, [Fraction(1)] * len(problem.cluster.types))


def _by_flops(problem: Problem, node: Node) -> Point:
    return _by_weight(problem, node, _peaks(problem.profile, problem.cluster))


_STRATEGIES: dict[StrategyName, Callable[[Problem, Node], Point]] = {
    "sequential": _fastest,
    "dp-even": _even,
    "dp-flops": _by_flops,
}


def _peaks(profile: Profile, cluster: Cluster) -> list[Fraction]:
    arithmetic = arithmetic_of(profile.environment) or "float32"
    found = [_own_peak(cluster, kind) or peak_flops_per_s(kind, arithmetic) for kind in cluster.types]
    peaks = [Fraction(peak) for peak in found if peak is not None]
    if len(peaks) < len(found):
        raise NoPlanError(
            f"no peak in {arithmetic}, by which dp-flops cuts batches, is known of "
            f"{', '.join(kind for kind, peak in zip(cluster.types, found, strict=True) if peak is None)}",
            hint="Say it in the cluster file (nodes: peak_tflops), or take dp-even, which does not need it.",
        )
    return peaks


def _own_peak(cluster: Cluster, kind: str) -> float | None:
    """Operations per second of a type's devices, as the first of its groups says that has it."""
    own = (group.peak_tflops for group in cluster.nodes if group.device == kind)
    return next((peak * TERA for peak in own if peak is not None), None)


def _by_weight(problem: Problem, node: Node, weights: Sequence[Fraction]) -> Point:
    """All devices, or as many as there are samples, with shares in proportion to their types' weights; an op
    that takes no such shares, such as a loss that is not split, on its fastest allocation.
    """
    cluster, metaop = problem.cluster, node.metaop
    counts = [groups_of_type(cluster, kind, 1) for kind in cluster.types]
    while sum(counts) > metaop.batch_size:
        counts[counts.index(max(counts))] -= 1
    each = [weight for weight, count in zip(weights, counts, strict=True) for _ in range(count)]
    samples = in_proportion(metaop.batch_size, each)
    (times,) = share_times(metaop, cluster, degrees=(1,))
    return point_of_cut(times, counts, samples) or node.points[-1]


def in_proportion(total: int, weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Whole shares of `total`, at least one each, as near to these weights as whole numbers come: the border
    between two shares is where the weights before it, of all, say, rounded down.
    """
    rest, whole = total - len(weights), sum(weights, Fraction(0))
    borders, before = [0], Fraction(0)
    for weight in weights:
        before += weight
        borders.append(int(rest * before / whole))
    return tuple(1 + last - first for first, last in pairwise(borders))
