"""Pipelines on devices of several types: lanes, their speed, what runs in them, by hand; whole plans."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.mixed import candidates as on_types
from spindle_cli.plan.pipelines.candidates import may_gain
from spindle_cli.plan.pipelines.cuts import Cutter
from spindle_cli.plan.pipelines.lanes import Lanes, ways_to_cut
from spindle_cli.plan.pipelines.search import Search
from spindle_cli.plan.pipelines.sections import sections_of
from spindle_cli.plan.pipelines.timetable import seconds_of, timetable
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOpProfile
from spindle_cli.simulate.run import simulate
from spindle_cli.units import MIB

FAST_TWICE = {"fast": 1.0, "slow": 2.0}


def cluster(
    counts: Mapping[str, int], gb_per_s: float = 10.0, devices_per_node: int | None = None
) -> Cluster:
    """Links without latency; `gb_per_s` between nodes."""
    found = cluster_of_types(counts, devices_per_node=devices_per_node)
    ways = {
        name: link.model_copy(update={"latency_us": 0.0, "bandwidth_gb_per_s": speed})
        for name, link, speed in (
            ("intra_node", found.links.intra_node, 50.0),
            ("inter_node", found.links.inter_node, gb_per_s),
        )
    }
    return found.changed(links=found.links.model_copy(update=ways))


def problem_of(*metaops: MetaOpProfile, on: Cluster) -> Problem:
    return make_problem(profile_on_types(*metaops), on)


def net(
    name: str, num_ops: int, sample_s: Mapping[str, float] | None = None, **more: object
) -> MetaOpProfile:
    return metaop_on_types(name, num_ops, sample_s or FAST_TWICE, **more)


def test_clusters_are_cut_into_nodes_into_equal_parts_of_all_types_and_into_lanes_of_each_type() -> None:
    on = cluster({"fast": 2, "slow": 4}, devices_per_node=2)
    assert ways_to_cut(problem_of(net("t/m", 1), on=on)) == (
        ((0, 1), (2, 3), (4, 5)),
        ((0, 2, 3), (1, 4, 5)),
        ((0, 1), (2, 3, 4, 5)),
        ((0, 1), (2,), (3,), (4,), (5,)),
        ((0,), (1,), (2, 3, 4, 5)),
        ((0,), (1,), (2, 3), (4, 5)),
        ((0,), (1,), (2,), (3,), (4,), (5,)),
    )


def test_a_lane_runs_what_its_types_have_room_for_and_cuts_batches_by_their_speed() -> None:
    """Eight samples of a second and of two: 8 s on the fast device, 8 on two slow ones of four each; on a
    fast one and two slow ones four, two and two.
    """
    on = cluster({"fast": 2, "slow": 4}, devices_per_node=2)
    lanes = Lanes(problem_of(net("t/m", 1), on=on), ((0,), (2, 3), (1, 4, 5)))
    found = [each for each in lanes.of_node[0] if each is not None]
    assert [each.devices for each in found] == [(0,), (2, 3), (1, 4, 5)]
    assert [each.point.op_s for each in found] == pytest.approx([8.0, 8.0, 4.0])
    assert [each.point.rows for each in found][2] == (0, 4, 6, 8)


def test_no_lanes_are_through_before_the_mean_of_their_work_weighed_by_their_speed() -> None:
    """Three ops of 8 and 16 s, two of 16 and 8 s: in lanes of one device each the fast one takes 24 + 32 s
    where the faster ones would take 24 + 16, the slow one 48 + 16 s. Weighed by 40/56 and 40/64, ops add
    least to the mean of both where they are faster: 3 x 8 x 40/56 + 2 x 8 x 40/64 over 40/56 + 40/64.
    """
    on = cluster({"fast": 1, "slow": 1})
    other = net("t/n", 2, {"fast": 2.0, "slow": 1.0})
    lanes = Lanes(problem_of(net("t/m", 3), other, on=on), ((0,), (1,)))
    assert lanes.speed == pytest.approx((40 / 56, 40 / 64))
    weights = 40 / 56, 40 / 64
    assert lanes.least_s == pytest.approx((24 * weights[0] + 16 * weights[1]) / sum(weights))


def test_no_timetable_ends_before_that() -> None:
    on = cluster({"fast": 1, "slow": 1})
    problem = problem_of(net("a/m", 3), net("b/n", 2, {"fast": 2.0, "slow": 1.0}), on=on)
    lanes, sections = Lanes(problem, ((0,), (1,))), sections_of(problem)
    cutter = Cutter(problem, sections)
    for first in ((3, 0),), ((2, 0), (3, 1)), ((1, 1), (3, 0)), ((3, 1),):
        for second in ((2, 0),), ((1, 0), (2, 1)), ((2, 1),):
            pieces = cutter.pieces((first, second))
            seconds = seconds_of(lanes, pieces)
            assert seconds is not None
            assert max(timetable(lanes, pieces, seconds, [1.0, 1.0]).end_s) >= lanes.least_s * (1 - 1e-9)


def test_lanes_without_an_allocation_of_some_node_take_for_ever() -> None:
    """A tensor-parallel pair has no room in lanes of one device each."""
    pair = net("t/m", 1)
    shares = tuple(share.model_copy(update={"tp": 2}) for share in pair.shares)
    curve = tuple(
        point.model_copy(update={"tp": 2, "dp": point.dp, "num_devices": 2 * point.dp})
        for point in pair.curve
    )
    pair = pair.model_copy(update={"shares": shares, "curve": curve})
    on = cluster({"fast": 2, "slow": 2})
    lanes = Lanes(problem_of(pair, on=on), ((0,), (1,), (2,), (3,)))
    assert lanes.least_s == float("inf")
    assert lanes.speed == (0.0, 0.0, 0.0, 0.0)
    assert Lanes(problem_of(pair, on=on), ((0, 1), (2, 3))).least_s < float("inf")


def test_searches_begin_with_sections_where_they_are_through_first_and_in_a_row_either_way() -> None:
    """A section of 24 s on the fast device, and one of 16 s on the slow one; in a row each device has as much
    as its speed: of six ops the fast one four, whichever comes first.
    """
    on = cluster({"fast": 1, "slow": 1})
    apart = problem_of(net("a/m", 3), net("b/n", 2, {"fast": 2.0, "slow": 1.0}), on=on)
    lanes = Lanes(apart, ((0,), (1,)))
    best = Search(lanes, sections_of(apart)).best(200)
    assert min(pipeline.end_s for pipeline in best) == pytest.approx(24.0)
    row = problem_of(net("t/m", 6, output_bytes=0, param_bytes_per_op=0), on=on)
    found = Search(Lanes(row, ((0,), (1,))), sections_of(row)).best(3 * 24)
    assert {pipeline.state.assignment for pipeline in found} >= {
        (((4, 0), (6, 1)),),
        (((2, 1), (6, 0)),),
    }


def test_the_longest_sections_go_first_each_to_the_lane_that_is_through_with_it_first() -> None:
    """24, 16 and 8 s on the fast device, twice as long on the slow one: the first is through at 24 or 48 s,
    the second then at 40 or 32, the last at 32 or 48.
    """
    metaops = [net(f"{name}/m", num_ops) for name, num_ops in (("c", 1), ("a", 3), ("b", 2))]
    problem = problem_of(*metaops, on=cluster({"fast": 1, "slow": 1}))
    lanes = Lanes(problem, ((1,), (0,)))  # the slow one first
    assert Search(lanes, sections_of(problem))._balanced() == (((1, 1),), ((3, 1),), ((2, 0),))


def test_pipelines_are_tried_further_from_the_bound_on_several_types() -> None:
    best = Prediction(124.0, 124.0, 0.0, 0.0, 0.0, 0.0)
    assert may_gain(best, 100.0)
    assert not may_gain(best, 100.0, far=0.25)
    assert may_gain(best, 99.0, far=0.25)


def tasks_with_a_trunk() -> tuple[MetaOpProfile, ...]:
    """Three tasks with two ops of their own each; of eight more, which all share, each 64 MiB."""
    shared = tuple(range(100, 108))
    return tuple(
        net(
            f"{task}/net",
            10,
            {"fast": 0.1, "slow": 0.2},
            parameters="net",
            parameter_blocks=(10 * number, 10 * number + 1, *shared),
            param_bytes_per_op=64 * MIB,
        )
        for number, task in enumerate("abc")
    )


def held_by(plan: Plan) -> dict[tuple[str, int], set[int]]:
    """By block of the trunk or of a task, the devices that hold it."""
    held: dict[tuple[str, int], set[int]] = {}
    for piece in plan.slices:
        task = piece.metaop[0]
        for op in range(*piece.ops):
            held.setdefault(("", op) if op > 1 else (task, op), set()).update(piece.devices)
    return held


def test_a_shared_trunk_is_cut_by_the_speed_of_two_hosts_behind_a_slow_link() -> None:
    """30 ops of 0.8 s on the fast host, 1.6 s on the slow one: 16 s on both, where a trunk's sum alone takes
    54 s, and all on the fast host 24 s.
    """
    profile = profile_on_types(*tasks_with_a_trunk())
    on = cluster({"fast": 1, "slow": 1}, gb_per_s=0.01)
    plan = make_plan(profile, on)
    assert all(len(devices) == 1 for devices in held_by(plan).values())
    assert plan.predicted.gradient_sum_s == 0
    assert 16.0 <= plan.predicted.iteration_s < 18.5
    assert check_plan(plan, profile) == ()
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.03)


def test_a_chain_behind_a_slow_link_becomes_a_pipeline_of_micro_batches() -> None:
    """24 layers of 64 MiB, 1.6 or 2.4 s each: all on the fast host takes 38.4 s, both together in rows 23 s,
    and 80 s of sums. In a pipeline one host is busy for at least 24 s, with 10 layers slow or 15 fast. With
    stages of 4, 7, 8 and 3 layers in turn, of four micro-batches, the other never keeps it waiting. Of a
    whole batch only sums of the last layers, in rows, hide behind the backward passes of those before them.
    """
    chain = net(
        "t/net", 24, {"fast": 0.1, "slow": 0.15}, batch_size=16, param_bytes_per_op=64 * MIB, output_bytes=MIB
    )
    profile = profile_on_types(chain)
    plan = make_plan(profile, cluster({"fast": 1, "slow": 1}, gb_per_s=0.02))
    assert plan.micro_batches["t"] > 1
    assert plan.predicted.gradient_sum_s == 0
    assert plan.predicted.iteration_s == pytest.approx(24.0, rel=0.02)
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.03)
    assert check_plan(plan, profile) == ()
    whole = make_plan(profile, cluster({"fast": 1, "slow": 1}, gb_per_s=0.02), micro_batches={"t": 1})
    assert 34.0 < whole.predicted.iteration_s < 38.4
    assert simulate(whole).iteration_s == pytest.approx(whole.predicted.iteration_s, rel=0.03)


@pytest.mark.parametrize(
    ("effort", "fallback", "tried_efforts"),
    [
        (1, MemoryFallback(), [1]),
        (NO_SEARCH, MemoryFallback(), []),
        (1, MemoryFallback(recompute={"a/net": 1}), []),
        (1, MemoryFallback(least_tp=2, split=frozenset({"a/net"})), []),
    ],
)
def test_problems_that_give_up_something_or_get_a_quick_look_are_asked_for_no_pipeline(
    monkeypatch: pytest.MonkeyPatch, effort: int, fallback: MemoryFallback, tried_efforts: list[int]
) -> None:
    efforts: list[int] = []
    monkeypatch.setattr(on_types, "pipelines", lambda _, effort, __: efforts.append(effort) or ())
    profile = profile_on_types(*tasks_with_a_trunk())
    found = ProblemPoser().posed(profile, cluster({"fast": 1, "slow": 1}, gb_per_s=0.01), fallback)
    best, _ = found.best("spindle", effort)
    assert best is not None
    assert efforts == tried_efforts


def test_problems_of_several_types_are_kept_by_what_splits_layers() -> None:
    profile, posing = profile_on_types(*tasks_with_a_trunk()), ProblemPoser()
    fallbacks = [MemoryFallback(least_tp=2, split=frozenset({name})) for name in ("a/net", "b/net")]
    on = cluster({"fast": 2, "slow": 2}, gb_per_s=0.01)
    assert [posing.posed(profile, on, fallback).problem.fallback for fallback in fallbacks] == fallbacks
    assert posing.posed(profile, on, fallbacks[0]) is posing.posed(profile, on, fallbacks[0])


def test_where_nothing_else_fits_the_shortest_search_for_pipelines_is_made() -> None:
    """All on the fast host does not fit it, nor any other whole trunk, but half of it does."""
    profile = profile_on_types(*tasks_with_a_trunk())
    roomy = make_plan(profile, cluster({"fast": 1, "slow": 1}, gb_per_s=0.01))
    most = max(roomy.predicted.peak_memory_bytes)
    tight = cluster({"fast": 1, "slow": 1}, gb_per_s=0.01)
    nodes = tuple(group.model_copy(update={"memory_gib": 1.2 * most / 2**30}) for group in tight.nodes)
    plan = make_plan(profile, tight.changed(nodes=nodes))
    assert plan.predicted.gradient_sum_s == 0
    assert all(len(devices) == 1 for devices in held_by(plan).values())


def test_a_pipeline_with_an_idle_node_is_not_taken() -> None:
    """Whether nodes stay idle is for plans of parts of the cluster, which say so: all on the fast host takes
    4 s, on both 2.4 s, with a sum of 26 s.
    """
    profile = profile_on_types(net("t/net", 1, {"fast": 0.5, "slow": 0.75}, param_bytes_per_op=256 * MIB))
    plan = make_plan(profile, cluster({"fast": 1, "slow": 1}, gb_per_s=0.01))
    assert [piece.devices for piece in plan.slices] == [(0,)]
    assert any("idle" in note for note in plan.notes)
