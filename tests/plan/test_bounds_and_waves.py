"""The tighter bound, the paper's waves, and the arrangement of devices over nodes."""

from __future__ import annotations

import pytest
from random_profiles import SHAPES, Shape, random_profile

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.costs.links import Spread, per_node
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.plan.assemble import exact_slices
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.bound.patterns import pattern_bound_s, patterns_of, sets_by_part
from spindle_cli.plan.placing.arrange import arrange
from spindle_cli.plan.problem import Problem, make_problem
from spindle_cli.plan.schedule import Draft, Placed, UnplacedSlice
from spindle_cli.plan.search.improve import search
from spindle_cli.plan.search.listing import Timed, time_jobs
from spindle_cli.plan.search.wavefront import level_after_level, overlapping, wave_after_wave, wavefront


def end_s(timed: list[Timed]) -> float:
    return max(end for _, _, end in timed)


def test_whole_allocations_bound_tighter_than_device_seconds() -> None:
    """Two MetaOps that only run on 3 of 4 devices: 4.5 s of all of them, but one has to follow the other."""
    metaops = [metaop_of(f"{name}/m", 1, {3: 3.0}, batch_size=6) for name in "ab"]
    problem = make_problem(profile_of(*metaops), cluster_of(4))
    assert lower_bound(problem).lower_bound_s == pytest.approx(4.5)
    assert pattern_bound_s(problem) == pytest.approx(6.0, rel=1e-3)


def test_what_runs_side_by_side_is_found_pattern_by_pattern() -> None:
    """11 device-seconds on 3 devices, where b takes two and the others one: patterns leave none idle."""
    metaops = [
        metaop_of("a/m", 1, {1: 3.0, 2: 1.6}),
        metaop_of("b/m", 1, {2: 3.0}),
        metaop_of("c/m", 1, {1: 1.0}),
        metaop_of("d/m", 1, {1: 1.0}),
    ]
    problem = make_problem(profile_of(*metaops), cluster_of(3))
    assert pattern_bound_s(problem) == pytest.approx(11 / 3, rel=1e-3)


def test_what_waits_for_each_other_never_shares_a_pattern() -> None:
    """One device each of two, in a chain: the second device is of no use."""
    first = metaop_of("a/m", 2, {1: 1.0})
    problem = make_problem(profile_of(first, metaop_of("a/n", 2, {1: 1.0}, inputs=("a/m",))), cluster_of(2))
    assert pattern_bound_s(problem) == pytest.approx(4.0, rel=1e-3)


def test_the_largest_sets_that_do_not_wait_are_told_by_parts() -> None:
    """a before b, c beside both, d by itself; of the first part one of a and b, with c or without."""
    metaops = [
        metaop_of("t/a", 1, {1: 1.0}),
        metaop_of("t/b", 1, {1: 1.0}, inputs=("t/a",)),
        metaop_of("t/c", 1, {1: 1.0}),
        metaop_of("t/e", 1, {1: 1.0}, inputs=("t/b", "t/c")),
        metaop_of("u/d", 1, {1: 1.0}),
    ]
    problem = make_problem(profile_of(*metaops), cluster_of(2))
    assert sets_by_part(problem) == [[[0, 2], [1, 2], [3]], [[4]]]
    last_first = make_problem(profile_of(*reversed(metaops)), cluster_of(2))
    assert sets_by_part(last_first) == [[[0]], [[1], [2, 3], [2, 4]]]


@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_are_in_order_and_below_every_schedule(shape: Shape) -> None:
    problem = make_problem(random_profile(3, shape), cluster_of(8))
    bound = lower_bound(problem)
    jobs = search(problem, bound, 2000, seed=0)[0]
    timed = time_jobs(problem, jobs)
    patterns = patterns_of([(node, point, start, end) for (node, point, _), start, end in timed])
    tighter_s = pattern_bound_s(problem, patterns, max_patterns=40)
    assert tighter_s <= end_s(timed) * (1 + 1e-9)
    assert bound.lower_bound_s <= end_s(timed)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_papers_waves_fit_and_cover_every_op(shape: Shape) -> None:
    problem = make_problem(random_profile(1, shape), cluster_of(8))
    levels = wavefront(problem)
    done = [0] * len(problem.nodes)
    for level in levels:
        for wave in level:
            assert sum(problem.rates[node][point][0] for node, point, _ in wave) <= 8
            assert len({node for node, _, _ in wave}) == len(wave)
            for node, _, ops in wave:
                done[node] += ops
    assert done == [node.num_ops for node in problem.nodes]


@pytest.mark.parametrize("shape", SHAPES)
def test_fewer_barriers_are_never_slower(shape: Shape) -> None:
    for seed in range(3):
        problem = make_problem(random_profile(seed, shape), cluster_of(8))
        levels = wavefront(problem)
        with_barriers = end_s(wave_after_wave(problem, levels))
        in_levels = end_s(level_after_level(problem, levels))
        assert in_levels <= with_barriers * (1 + 1e-9)
        assert end_s(overlapping(problem, levels)) <= in_levels * (1 + 1e-9)


def gpus() -> Cluster:
    return Cluster(
        name="2x4",
        nodes=(NodeGroup(count=2, devices=4, device="a800-80gb", memory_gib=80),),
        links=Links(
            intra_node=Link(latency_us=3, bandwidth_gb_per_s=160),
            inter_node=Link(latency_us=14, bandwidth_gb_per_s=46),
        ),
    )


def side_by_side(problem: Problem) -> Draft:
    pieces = tuple(
        UnplacedSlice(node.index, 0, 1, node.points[-1], 0.0, node.points[-1].op_s) for node in problem.nodes
    )
    return Draft("by hand", pieces)


def test_devices_that_sum_together_end_up_on_one_node() -> None:
    """Two MetaOps of four devices each, placed two and two on both nodes."""
    metaops = [metaop_of(f"{name}/m", 1, {4: 1.0}, param_bytes_per_op=2**28) for name in "ab"]
    problem = make_problem(profile_of(*metaops), gpus())
    scattered = exact_slices(problem, Placed(side_by_side(problem), ((0, 1, 4, 5), (2, 3, 6, 7))))
    arranged, _ = arrange(problem, scattered, 200)
    assert [per_node(piece.devices, gpus()) for piece in arranged] == [Spread((4,)), Spread((4,))]
    assert sorted(device for piece in arranged for device in piece.devices) == list(range(8))


def test_one_node_is_left_as_it_is() -> None:
    problem = make_problem(profile_of(metaop_of("a/m", 1, {4: 1.0})), cluster_of(4))
    slices = exact_slices(problem, Placed(side_by_side(problem), ((3, 2, 1, 0),)))
    assert arrange(problem, slices, 100)[0] is slices


def test_random_profiles_are_the_same_everywhere() -> None:
    assert random_profile(7, "levels") == random_profile(7, "levels")
    assert random_profile(7, "levels").sha256() != random_profile(8, "levels").sha256()
