"""The search over everything at once on devices and links of several kinds, and of ops that sum over the
shares of their batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from estimates import estimated

from helpers.several_types import metaop_on_types, profile_on_types
from spindle_cli.files.cluster import BetweenLink, Cluster, GroupLinks, Link, Links, NodeGroup
from spindle_cli.plan.best.in_memory import recomputed_share
from spindle_cli.plan.ordering.orders import mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.refine import search
from spindle_cli.plan.refine.evaluate import SLICE_COST
from spindle_cli.plan.refine.search import CHAINS, MARKS, PATIENCE, SEED, Search, refined
from spindle_cli.plan.refine.tables import options_of
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, measure_as_they_are
from spindle_cli.plan.slices import Slice
from spindle_cli.profile.types import MetaOpProfile
from spindle_cli.units import GIB, MIB

FAST, SLOW = "h800-80gb", "h20-96gb"
TIMES = {FAST: 1.0, SLOW: 2.0}
# The sum that tells which parameters have gradients is not estimated.
FLAGS_S = 3e-4


def cluster(
    fast: int = 2, slow: int = 2, *, per_node: int = 2, memory_gib: float = 80.0, between: float | None = None
) -> Cluster:
    """Nodes of two types; `between`: GB/s of the links between these."""
    links: dict[str, Any] = {}
    if between is not None:
        groups = (FAST, SLOW)
        links["between"] = (BetweenLink(groups=groups, latency_us=50, bandwidth_gb_per_s=between),)
    nodes = [
        NodeGroup(count=count // per_node, devices=per_node, device=kind, memory_gib=memory_gib)
        for kind, count in ((FAST, fast), (SLOW, slow))
    ]
    if between is not None:
        own = GroupLinks(intra_node=Link(latency_us=5, bandwidth_gb_per_s=80))
        nodes[1] = nodes[1].model_copy(update={"links": own})
    return Cluster(
        name="two types",
        nodes=tuple(nodes),
        links=Links(
            intra_node=Link(latency_us=3, bandwidth_gb_per_s=160),
            inter_node=Link(latency_us=14, bandwidth_gb_per_s=46),
            **links,
        ),
    )


def problem_of(on: Cluster, *metaops: MetaOpProfile) -> Problem:
    return make_problem(profile_on_types(*metaops), on)


def piece_of(
    metaop: MetaOpProfile, devices: Sequence[int], rows: tuple[int, ...] | None = None, **more: Any
) -> Slice:
    settings = {"dp": len(devices), "ops": (0, metaop.num_ops), "rows": rows, **more}
    return Slice.model_validate(
        {"metaop": metaop.name, "devices": tuple(devices), "start_s": 0.0, "end_s": 0.0, **settings}
    )


def evaluated(problem: Problem, slices: list[Slice]) -> EvaluatedCandidate:
    found = measure_as_they_are(problem, "by hand", timed(problem, slices, mirrored(range(len(slices)))))
    assert found is not None, "it fits"
    return found


def test_each_task_goes_to_the_type_that_is_fast_for_it() -> None:
    """Side by side on the type that is slow for each they take 9 s; one of them alone has nowhere to go."""
    a = metaop_on_types("a/net", 1, {FAST: 1.0, SLOW: 9.0}, batch_size=1)
    b = metaop_on_types("b/net", 1, {FAST: 9.0, SLOW: 1.0}, batch_size=1)
    problem = problem_of(cluster(1, 1, per_node=1), a, b)
    begun = evaluated(problem, [piece_of(a, (1,)), piece_of(b, (0,))])
    assert begun.prediction.compute_s == pytest.approx(9.0)
    found = refined(problem, [begun], 0)
    assert found is not None
    assert found.prediction.compute_s == pytest.approx(1.0)
    assert {piece.metaop: piece.devices for piece in found.slices} == {"a/net": (0,), "b/net": (1,)}


@pytest.mark.parametrize("between", [None, 5.0])
def test_unequal_shares_over_unequal_links_are_estimated_as_predicted(between: float | None) -> None:
    """Six samples go from shares of 2, 2, 1 and 1 to shares of three on two devices of a node each: what
    crosses between the types goes at their own link's speed.
    """
    made = metaop_on_types("a/one", 1, TIMES, batch_size=6, output_bytes=6 * GIB)
    sizes = {"param_bytes_per_op": 64 * MIB, "inputs": ("a/one",), "output_bytes": 0}
    taking = metaop_on_types("a/two", 1, TIMES, batch_size=6, **sizes)
    problem = problem_of(cluster(between=between), made, taking)
    slices = [piece_of(made, (0, 1, 2, 3), (0, 2, 4, 5, 6)), piece_of(taking, (0, 2), (0, 4, 6))]
    begun = evaluated(problem, slices)
    seconds, _ = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, abs=FLAGS_S)
    # The last share of each type is sent to its first device: 2 and 1 GiB inside of the nodes, both ways.
    near_s = max(2 * GIB / 160e9, GIB / (80e9 if between else 160e9))
    assert begun.prediction.transfer_s == pytest.approx(2 * near_s, rel=1e-3)


@pytest.mark.parametrize(("between", "gb_per_s"), [(None, 46e9), (5.0, 5e9)])
def test_what_goes_between_types_takes_their_link(between: float | None, gb_per_s: float) -> None:
    made = metaop_on_types("a/one", 1, TIMES, batch_size=1, output_bytes=GIB)
    taking = metaop_on_types("a/two", 1, TIMES, batch_size=1, inputs=("a/one",))
    problem = problem_of(cluster(between=between), made, taking)
    begun = evaluated(problem, [piece_of(made, (0,)), piece_of(taking, (2,))])
    seconds, _ = estimated(problem, begun)
    assert begun.prediction.transfer_s == pytest.approx(2 * GIB / gb_per_s, rel=1e-2)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-6)


@pytest.mark.parametrize("kind", ["sum", "gather"])
@pytest.mark.parametrize("devices", [(0, 1), (0, 2), (0, 1, 2, 3)])
def test_sums_over_shares_are_estimated_as_predicted(kind: str, devices: tuple[int, ...]) -> None:
    """Inside of a node or between two, beyond what the curve has of them; they also take a communicator."""
    sums = {"kind": kind, "num_bytes": GIB, "forward": 1.0, "backward": 2.0}
    task = metaop_on_types("a/net", 2, {FAST: 0.1, SLOW: 0.1}, batch_size=4, batch_sums=(sums,))
    problem = problem_of(cluster(), task)
    begun = evaluated(problem, [piece_of(task, devices)])
    alone_s = 2 * 4 * 0.1 / len(devices)
    assert begun.prediction.iteration_s > alone_s + 0.015
    seconds, filled = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-6, abs=FLAGS_S)
    assert [filled[device] for device in devices] == pytest.approx([1.0] * len(devices), rel=0.02)


def test_memory_is_estimated_by_the_largest_share_of_a_type() -> None:
    """Seven samples in shares of 3 and 2, 1 and 1."""
    keeps = {"activation_bytes_per_op": 7 * GIB, "param_bytes_per_op": 64 * MIB}
    task = metaop_on_types("a/net", 4, TIMES, batch_size=7, **keeps)
    problem = problem_of(cluster(), task)
    filled = estimated(problem, evaluated(problem, [piece_of(task, (0, 1, 2, 3), (0, 3, 5, 6, 7))]))[1]
    assert [filled[device] for device in (0, 2, 3)] == pytest.approx([1.0] * 3, rel=0.02)
    assert filled[1] > 1.2  # no less than it has


@pytest.mark.parametrize("kind", ["sum", "gather"])
def test_sums_of_one_device_of_each_node_are_estimated_as_predicted(kind: str) -> None:
    """Each of a hundred small gathers over eight nodes takes three hops, as distances double, not seven."""
    sums = {"kind": kind, "num_bytes": MIB, "forward": 100.0, "backward": 100.0}
    task = metaop_on_types("a/net", 2, {FAST: 0.1, SLOW: 0.1}, batch_size=8, batch_sums=(sums,))
    problem = problem_of(cluster(4, 4, per_node=1), task)
    begun = evaluated(problem, [piece_of(task, range(8))])
    seconds, _ = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-6, abs=FLAGS_S)
    if kind == "gather":
        hops_s = 2 * 200 * (3 * 14e-6 + 7 / 8 * MIB / 46e9)
        assert begun.prediction.transfer_s == pytest.approx(hops_s, rel=1e-6)


def test_memory_is_estimated_by_the_share_that_a_type_has() -> None:
    """Of six samples the fast type's devices have two each, and keep twice as much."""
    keeps = {"activation_bytes_per_op": 6 * GIB, "param_bytes_per_op": 64 * MIB}
    task = metaop_on_types("a/net", 4, TIMES, batch_size=6, **keeps)
    problem = problem_of(cluster(), task)
    begun = evaluated(problem, [piece_of(task, (0, 1, 2, 3), (0, 2, 4, 5, 6))])
    needed = [need.total_bytes for need in begun.memory]
    assert needed[0] - needed[2] == pytest.approx(4 * GIB, rel=0.25)
    assert estimated(problem, begun)[1] == pytest.approx([1.0] * 4, rel=0.02)


def test_sums_over_the_same_network_card_wait_for_each_other() -> None:
    """Two tasks on a device of each node, where both devices of a node have one card."""
    op_s = {FAST: 1e-3, SLOW: 1e-3}
    tasks = [
        metaop_on_types(f"{name}/net", 1, op_s, batch_size=2, param_bytes_per_op=256 * MIB) for name in "ab"
    ]
    on = cluster()
    with_one = [group.model_copy(update={"nics": 1}) for group in on.nodes]
    seconds = {}
    for cards, nodes in (("own", on.nodes), ("shared", tuple(with_one))):
        problem = problem_of(on.changed(nodes=nodes), *tasks)
        begun = evaluated(problem, [piece_of(task, (at, at + 2)) for at, task in enumerate(tasks)])
        seconds[cards], _ = estimated(problem, begun)
        assert seconds[cards] == pytest.approx(begun.prediction.iteration_s, rel=0.02, abs=FLAGS_S)
    assert seconds["shared"] > 1.5 * seconds["own"]


@dataclass
class _OnTypes:
    """Three tasks that share a component on 4 + 4 devices in nodes of two."""

    problem: Problem
    begun: EvaluatedCandidate


def in_turn(memory_gib: float) -> Cluster:
    """A node of each type in turn, so that devices of one type do not follow each other."""
    on = cluster(4, 4, memory_gib=memory_gib)
    fast, slow = (group.model_copy(update={"count": 1}) for group in on.nodes)
    named = [
        group.model_copy(update={"name": f"n{number}"})
        for number, group in enumerate((slow, fast, slow, fast))
    ]
    return on.changed(nodes=tuple(named))


def on_types(on: Cluster) -> _OnTypes:
    metaops = []
    for number in range(3):
        sizes = {"param_bytes_per_op": 64 * MIB, "output_bytes": 128 * MIB}
        keeps = {"activation_bytes_per_op": (2 + number) * GIB, **sizes}
        own = metaop_on_types(f"t{number}/own", 4, {FAST: 0.01, SLOW: 0.01 + 0.01 * number}, **keeps)
        shared = metaop_on_types(
            f"t{number}/shared", 6, TIMES, parameters="shared", inputs=(f"t{number}/own",), **keeps
        )
        metaops += [own, shared]
    problem = problem_of(on, *metaops)
    fast = [device for device, kind in enumerate(on.type_of) if kind == FAST]
    slices = [piece_of(metaop, fast, recompute=True) for metaop in metaops]
    return _OnTypes(problem, evaluated(problem, slices))


@pytest.mark.parametrize("on", [cluster(4, 4, memory_gib=40.0), in_turn(40.0)])
def test_every_schedule_that_is_come_to_has_devices_of_its_types_in_turn(on: Cluster) -> None:
    """Also such as do not fit; and the options that it has are those of the tables."""
    case = on_types(on)
    under_way = Search.of(case.problem, case.begun)
    assert under_way is not None
    kinds, types_seen = case.problem.cluster.type_of, set()
    for _ in range(20):
        under_way._run(under_way.current, 10_000)
        for piece in under_way.translation.slices_of(under_way.current):
            own = [kinds[device] for device in piece.devices]
            assert own == sorted(own, key=case.problem.cluster.types.index)
            assert len(set(piece.devices)) == len(piece.devices)
            # An allocation says how many of each type: its times are of these.
            point = case.problem.point_of(piece)
            assert point.counts == tuple(own.count(kind) for kind in case.problem.cluster.types)
            types_seen.add(tuple(bool(count) for count in point.counts))
    assert len(types_seen) == 3  # either alone, and both


def test_what_is_kept_from_schedule_to_schedule_changes_no_cost() -> None:
    """Loads of links, what sums are worth, and how long they take, are worked out once: the same as in a
    search that has seen nothing else, to the last bit.
    """
    case = on_types(cluster(4, 4, memory_gib=40.0))
    under_way = Search.of(case.problem, case.begun)
    assert under_way is not None
    for _ in range(5):
        under_way.go_on(50_000)
        anew = under_way.begun_anew(SEED)
        anew.work.states["correction"] = under_way.work.states["correction"]
        for each in (under_way, anew):
            each._run(search._copy(under_way.current), 0)
        assert anew.costs[0] == under_way.costs[0]
    slices = under_way.translation.slices_of(under_way.kept)
    found = measure_as_they_are(case.problem, "by hand", slices)
    assert found is not None, "what was kept has been evaluated to fit"
    fresh = Search.of(case.problem, found)
    assert fresh is not None
    under_way.costs[:] = np.inf
    under_way._run(search._copy(under_way.kept), 0)
    assert under_way.costs[0] == pytest.approx(fresh.costs[0], rel=1e-9)
    assert under_way.costs[0] / (1 + SLICE_COST * len(slices)) == pytest.approx(
        found.prediction.iteration_s, rel=0.02
    )


def test_a_plan_whose_devices_are_not_of_one_type_after_the_other_is_left_to_others() -> None:
    task = metaop_on_types("a/net", 2, TIMES, batch_size=2)
    problem = problem_of(cluster(), task)
    assert Search.of(problem, evaluated(problem, [piece_of(task, (0, 2))])) is not None
    assert Search.of(problem, evaluated(problem, [piece_of(task, (2, 0))])) is None


def test_of_allocations_on_several_types_those_that_cost_much_more_are_left_out_unless_used() -> None:
    """A slow device beside the fast one takes 1.9 s for a sample, where two fast ones take 1 s."""
    task = metaop_on_types("a/net", 1, {FAST: 1.0, SLOW: 1.9}, batch_size=2)
    problem = problem_of(cluster(2, 1, per_node=1), task)
    known = {option.point.of_types for option in options_of(problem, ())[0]}
    assert known == {(1, 0), (2, 0), (0, 1)}
    used = piece_of(task, (0, 2))
    assert (1, 1) in {option.point.of_types for option in options_of(problem, [used])[0]}


def test_a_search_goes_on_while_what_it_is_at_becomes_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its plan does not yet; then so many marks more. Others with other random numbers have what
    is left, as far as there is something left.
    """
    case, falling = on_types(cluster(4, 4)), [True, True, False, True]
    marks: list[int] = []

    def go_on(under_way: Search, num_passes: int) -> bool:
        marks.append(int(under_way.work.random[0]))
        return falling.pop(0) if falling else False

    monkeypatch.setattr(Search, "go_on", go_on)
    assert refined(case.problem, [case.begun], 1) is None
    others = [SEED + number for number in range(1, CHAINS) for _ in range(PATIENCE)]
    assert marks == [SEED] * (4 + PATIENCE) + others
    marks, falling = [], [True] * 2 * MARKS
    assert refined(case.problem, [case.begun], 1) is None
    assert marks == [SEED] * 2 * MARKS


@pytest.mark.parametrize("stuck", [SEED, SEED + 1])
def test_the_best_plan_of_several_searches_is_found(stuck: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of two finds nothing, the first or the second."""
    monkeypatch.setattr("spindle_cli.plan.refine.search.CHAINS", 2)
    case = on_types(cluster(4, 4, memory_gib=40.0))
    alone = Search.of(case.problem, case.begun)
    assert alone is not None
    alone = alone.begun_anew(SEED + (stuck == SEED))
    for _ in range(PATIENCE):
        alone.go_on(10_000)
    assert alone.best.rank() < case.begun.rank()
    go_on = Search.go_on

    def one_is_stuck(under_way: Search, num_passes: int) -> bool:
        if under_way.work.random[0] != stuck:
            go_on(under_way, 10_000)
        return False

    monkeypatch.setattr(Search, "go_on", one_is_stuck)
    found = refined(case.problem, [case.begun], 1)
    assert found is not None
    assert found.rank() <= alone.best.rank()


def test_the_share_of_forward_passes_that_is_recomputed_is_by_device_seconds() -> None:
    """An op of 1 s on one device recomputes, three of 2 s on two do not: 1 of 13 s."""
    one = metaop_on_types("a/one", 1, {FAST: 3.0, SLOW: 3.0}, batch_size=1)
    other = metaop_on_types("a/two", 3, {FAST: 6.0, SLOW: 6.0}, batch_size=2)
    problem = problem_of(cluster(), one, other)
    slices = [piece_of(one, (0,), recompute=True), piece_of(other, (0, 1))]
    share = recomputed_share(slices, problem.profile.by_name, problem.cluster)
    assert share == pytest.approx(1 / 13)
    assert recomputed_share(slices[1:], problem.profile.by_name, problem.cluster) == 0.0


def test_a_search_is_on_its_way_down_until_it_gains_no_more_and_then_goes_on_near_its_shortest() -> None:
    """It begins as if its plan had been a tenth longer; what it is compared with later is 0.5 % longer."""
    case = on_types(cluster(4, 4, memory_gib=40.0))
    under_way = Search.of(case.problem, case.begun)
    assert under_way is not None
    levels_s = [under_way.history.mean()]
    assert levels_s[0] == pytest.approx((1 + search.MELT) * under_way.costs[0])
    while under_way.go_on(20_000):
        levels_s.append(under_way.history.mean())
        assert len(levels_s) < 200, "it comes down in the end"
    assert len(levels_s) > 2
    assert levels_s == sorted(levels_s, reverse=True)
    for _ in range(20):
        if not under_way.go_on(20_000) and (under_way.history == under_way.history[0]).all():
            break
    assert under_way.history[0] == pytest.approx((1 + search.HEAT) * under_way.costs[1])
