"""What devices are used for without searching.

`sequential`    one MetaOp after another, each on its fastest allocation, of any types: how DeepSpeed and
                Megatron run such models, every MetaOp with the parallelism that suits it best

On devices of one type:

`distmm`        tasks one after another, after DistMM (NSDI 2024), which runs the towers of one multi-modal
                task side by side: each group of a task's MetaOps that do not depend on each other is split so
                that the slowest is as fast as can be, or run in turn on all devices where that is faster
`optimus`       devices split among the tasks by marginal gain, each task inside its own devices, after
                Optimus (EuroSys 2018), which gives devices to the job that gains most from one more: as an
                iteration lasts until its last task, that is always the slowest; where it is faster, or where
                tasks do not fit side by side, they share devices in turn, the longest dealt out first

On devices of several types, one MetaOp after another:

`dp-even`       each on all devices, equal shares: data parallelism that does not know of types (HAP's DP-EV)
`dp-flops`      each on all devices, shares by the types' published peaks (HAP's DP-CP)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from math import inf
from typing import TypeAlias

from spindle_cli.costs.flops import arithmetic_of, peak_flops_per_s
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.cutting.allocations import groups_of_type, point_of_cut
from spindle_cli.plan.cutting.shares import share_times
from spindle_cli.plan.placing.calendar import first_devices
from spindle_cli.plan.problem import Node, Point, Problem
from spindle_cli.plan.schedule import Candidate, UnplacedSlice, whole_slice
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.metagraph import CycleError, producers_first
from spindle_cli.profile.types import Profile
from spindle_cli.units import TERA

# Seconds that something takes when it has so many devices; never more with more devices.
Seconds = Callable[[int], float]


def best_point(node: Node, num_devices: int) -> Point | None:
    """The fastest allocation on at most so many devices."""
    best = None
    for point in node.points:
        if point.num_devices > num_devices:
            break
        best = point
    return best


Devices = tuple[int, ...]


def all_or_none(devices: Sequence[Devices | None]) -> tuple[Devices, ...] | None:
    """The devices of a candidate's pieces; None, which leaves all of them to the placement, if one has
    none.
    """
    said = tuple(of_slice for of_slice in devices if of_slice is not None)
    return said if len(said) == len(devices) else None


def split_evenly_in_time(seconds: Sequence[Seconds], num_devices: int) -> list[int] | None:
    """Devices for each of several things that run side by side, so that the slowest is as fast as can be.

    One at a time, the slowest gets the fewest more that make it faster. Returns None if they do not fit side
    by side at all.
    """
    shares = [_fewest(of, num_devices) for of in seconds]
    left = num_devices - sum(shares)
    if left < 0:
        return None
    while True:
        slowest = max(range(len(shares)), key=lambda i: (seconds[i](shares[i]), -i))
        more = _next_faster(seconds[slowest], shares[slowest], left)
        if more is None:
            return shares
        shares[slowest] += more
        left -= more


def _fewest(seconds: Seconds, num_devices: int) -> int:
    return next((n for n in range(1, num_devices + 1) if seconds(n) < float("inf")), num_devices + 1)


def _next_faster(seconds: Seconds, share: int, left: int) -> int | None:
    now_s = seconds(share)
    return next((more for more in range(1, left + 1) if seconds(share + more) < now_s), None)


def sequential(problem: Problem) -> Candidate:
    """The schedule, in the order of the tasks as far as the edges allow, always from device 0 on."""
    candidate = in_turn(problem, "sequential", range(problem.num_devices), lambda _, node: node.points[-1])
    assert candidate is not None, "an allocation has room on the cluster"
    return candidate


def in_turn(
    problem: Problem,
    strategy: StrategyName,
    among: Sequence[int],
    point_of: Callable[[Problem, Node], Point | None],
) -> Candidate | None:
    """One MetaOp after another on the first of some devices; None where one has no allocation there."""
    slices: list[UnplacedSlice] = []
    placed: list[tuple[int, ...]] = []
    now_s = 0.0
    for number in problem.order:
        node = problem.nodes[number]
        point = point_of(problem, node)
        devices = None if point is None else first_devices(problem.cluster, point, among)
        if point is None or devices is None:
            return None
        end_s = now_s + node.num_ops * point.op_s
        slices.append(whole_slice(node, point, now_s, end_s))
        placed.append(devices)
        now_s = end_s
    return Candidate(strategy, tuple(slices), tuple(placed), after=tuple(range(len(slices))))


def distmm(problem: Problem) -> Candidate:
    """The schedule; shares are consecutive devices."""
    everywhere = range(problem.num_devices)
    slices: list[UnplacedSlice] = []
    devices: list[Devices | None] = []
    after: list[int] = []
    now_s = 0.0
    for group in _groups(problem):
        shares = split_evenly_in_time([partial(_node_seconds, node) for node in group], problem.num_devices)
        in_turn_s = sum(node.shortest_s for node in group)
        if shares is not None and len(group) > 1:
            side_by_side_s = max(_node_seconds(node, n) for node, n in zip(group, shares, strict=True))
        else:
            side_by_side_s = inf
        if shares is None or in_turn_s <= side_by_side_s:
            for node in group:
                after.append(len(slices))
                slices.append(whole_slice(node, node.points[-1], now_s, now_s + node.shortest_s))
                devices.append(first_devices(problem.cluster, node.points[-1], everywhere))
                now_s += node.shortest_s
            continue
        first = 0
        after += [len(slices)] * len(group)
        for node, share in zip(group, shares, strict=True):
            point = best_point(node, share)
            assert point is not None, "a share is at least the smallest allocation"
            slices.append(whole_slice(node, point, now_s, now_s + node.num_ops * point.op_s))
            devices.append(first_devices(problem.cluster, point, everywhere[first : first + share]))
            first += share
        now_s += side_by_side_s
    return Candidate("distmm", tuple(slices), all_or_none(devices), tuple(after))


def _node_seconds(node: Node, num_devices: int) -> float:
    point = best_point(node, num_devices)
    return inf if point is None else node.num_ops * point.op_s


def _groups(problem: Problem) -> list[list[Node]]:
    """Task by task, the MetaOps of each of its levels. Tasks that consume each other count as one."""
    inputs: dict[str, dict[str, None]] = {node.metaop.task: {} for node in problem.nodes}
    for node in problem.nodes:
        others = (problem.nodes[j].metaop.task for j in node.inputs)
        inputs[node.metaop.task].update((task, None) for task in others if task != node.metaop.task)
    try:
        unit_of = {task: place for place, task in enumerate(producers_first(inputs))}
    except CycleError:
        unit_of = dict.fromkeys(inputs, 0)
    groups: dict[tuple[int, int], list[Node]] = {}
    for node in problem.nodes:
        groups.setdefault((unit_of[node.metaop.task], node.level), []).append(node)
    return [groups[key] for key in sorted(groups)]


def optimus(problem: Problem) -> Candidate:
    """The schedule; the devices of a task are consecutive."""
    tasks: dict[str, list[Node]] = {}
    for i in problem.order:
        tasks.setdefault(problem.nodes[i].metaop.task, []).append(problem.nodes[i])
    candidates: list[Candidate] = []
    for num_lanes in range(min(len(tasks), problem.num_devices), 0, -1):
        lanes = _deal(list(tasks.values()), num_lanes)
        shares = split_evenly_in_time([_seconds_of(lane) for lane in lanes], problem.num_devices)
        if shares is not None:
            candidates.append(_lanes_candidate(problem, lanes, shares))
    return min(candidates, key=lambda candidate: candidate.end_s)  # of equals the one with most lanes


def _deal(tasks: Sequence[list[Node]], num_lanes: int) -> list[list[Node]]:
    """Tasks to lanes: the longest first, each to the lane with least to do; work counted on the least
    devices.
    """
    work = [
        sum(node.num_ops * node.points[0].op_s * node.points[0].num_devices for node in task)
        for task in tasks
    ]
    lanes: list[list[Node]] = [[] for _ in range(num_lanes)]
    load = [0.0] * num_lanes
    for i in sorted(range(len(tasks)), key=lambda i: -work[i]):
        lane = min(range(num_lanes), key=lambda lane: load[lane])
        lanes[lane] += tasks[i]
        load[lane] += work[i]
    return lanes


def _seconds_of(lane: Sequence[Node]) -> Seconds:
    @cache
    def seconds(num_devices: int) -> float:
        total_s = 0.0
        for node in lane:
            point = best_point(node, num_devices)
            total_s += inf if point is None else node.num_ops * point.op_s
        return total_s

    return seconds


def _lanes_candidate(problem: Problem, lanes: Sequence[Sequence[Node]], shares: Sequence[int]) -> Candidate:
    """Run each lane's MetaOps in turn; one that takes input from another lane waits for it."""
    lane_of: dict[int, tuple[int, int, int]] = {}  # node -> (lane, first device, number of devices)
    first = 0
    for number, (lane, share) in enumerate(zip(lanes, shares, strict=True)):
        lane_of |= {node.index: (number, first, share) for node in lane}
        first += share
    free_s = [0.0] * len(lanes)
    end_s = [0.0] * len(problem.nodes)
    placed: list[tuple[UnplacedSlice, Devices | None]] = []
    for i in problem.order:
        node = problem.nodes[i]
        number, first, share = lane_of[i]
        point = best_point(node, share)
        assert point is not None, "a lane's share is at least the smallest allocation of each of its MetaOps"
        start_s = max([free_s[number], *(end_s[j] for j in node.inputs)])
        end_s[i] = free_s[number] = start_s + node.num_ops * point.op_s
        slice_ = whole_slice(node, point, start_s, end_s[i])
        placed.append((slice_, first_devices(problem.cluster, point, range(first, first + share))))
    placed.sort(key=lambda item: item[0].start_s)
    slices, devices = zip(*placed, strict=True)
    return Candidate("optimus", slices, all_or_none(devices))


def baselines_on(cluster: Cluster) -> tuple[StrategyName, ...]:
    """The strategies that search nothing, on a cluster's types."""
    return tuple(_ON_TYPES if cluster.is_mixed else _ON_ONE_TYPE)


def baseline(problem: Problem, strategy: StrategyName) -> Candidate:
    """A strategy's schedule.

    Raises:
        NoPlanError: the strategy has none on these types, or for this workload.
    """
    candidate_of = (_ON_TYPES if problem.cluster.is_mixed else _ON_ONE_TYPE).get(strategy)
    if candidate_of is None:
        raise NoPlanError(
            f"{strategy} plans for devices of one type, and {problem.cluster.name!r} has "
            f"{', '.join(problem.cluster.types)}",
            hint=f"Take spindle, {', '.join(_ON_TYPES)}.",
        )
    return candidate_of(problem)


def _in_turn_on_all(problem: Problem, strategy: StrategyName, weights: Sequence[Fraction]) -> Candidate:
    """One MetaOp after another, each on all devices with shares by the weights of their types."""

    def point_of(_: Problem, node: Node) -> Point:
        return _by_weight(problem, node, weights)

    candidate = in_turn(problem, strategy, range(problem.num_devices), point_of)
    assert candidate is not None, "an allocation has room on the cluster"
    return candidate


def _dp_even(problem: Problem) -> Candidate:
    return _in_turn_on_all(problem, "dp-even", [Fraction(1)] * len(problem.cluster.types))


def _dp_flops(problem: Problem) -> Candidate:
    return _in_turn_on_all(problem, "dp-flops", _peaks(problem.profile, problem.cluster))


_Candidates: TypeAlias = dict[StrategyName, Callable[[Problem], Candidate]]
_ON_ONE_TYPE: _Candidates = {"sequential": sequential, "distmm": distmm, "optimus": optimus}
_ON_TYPES: _Candidates = {"sequential": sequential, "dp-even": _dp_even, "dp-flops": _dp_flops}


def _peaks(profile: Profile, cluster: Cluster) -> list[Fraction]:
    arithmetic = arithmetic_of(profile.environment) or "float32"
    known_peaks = [_own_peak(cluster, kind) or peak_flops_per_s(kind, arithmetic) for kind in cluster.types]
    peaks = [Fraction(peak) for peak in known_peaks if peak is not None]
    if len(peaks) < len(known_peaks):
        by_type = zip(cluster.types, known_peaks, strict=True)
        raise NoPlanError(
            f"no peak in {arithmetic}, by which dp-flops cuts batches, is known of "
            f"{', '.join(kind for kind, peak in by_type if peak is None)}",
            hint="Say it in the cluster file (nodes: peak_tflops), or take dp-even, which does not need it.",
        )
    return peaks


def _own_peak(cluster: Cluster, kind: str) -> float | None:
    """Operations per second of a type's devices, as the first of its groups says that has it."""
    peaks = (group.peak_tflops for group in cluster.nodes if group.device == kind)
    return next((peak * TERA for peak in peaks if peak is not None), None)


def _by_weight(problem: Problem, node: Node, weights: Sequence[Fraction]) -> Point:
    """All devices, or as many as there are samples, with shares in proportion to their types' weights; an op
    that takes no such shares, such as a loss that is not split, on its fastest allocation.
    """
    cluster, metaop = problem.cluster, node.metaop
    counts = [groups_of_type(cluster, kind, 1) for kind in cluster.types]
    while sum(counts) > metaop.batch_size:
        counts[counts.index(max(counts))] -= 1
    share_weights = [weight for weight, count in zip(weights, counts, strict=True) for _ in range(count)]
    samples = in_proportion(metaop.batch_size, share_weights)
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
