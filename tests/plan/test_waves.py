"""The paper's waves, and the arrangement of devices over nodes."""

from __future__ import annotations

import pytest
from random_profiles import SHAPES, Shape, random_profile
from wavefront import level_after_level, overlapping, wave_after_wave, wavefront

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.costs.links import Spread, per_node
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.plan.assemble import exact_slices
from spindle_cli.plan.placing.arrange import arrange
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Candidate, Placed, UnplacedSlice
from spindle_cli.plan.search.listing import Timed


def end_s(timed: list[Timed]) -> float:
    return max(end for _, _, end in timed)


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


def side_by_side(problem: Problem) -> Candidate:
    pieces = tuple(
        UnplacedSlice(node.index, 0, 1, node.points[-1], 0.0, node.points[-1].op_s) for node in problem.nodes
    )
    return Candidate("by hand", pieces)


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
