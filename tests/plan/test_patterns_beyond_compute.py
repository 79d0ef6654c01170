"""What sums and moving activations add to a schedule, worked out by hand: over n devices that are a node
each, with 1 GB/s between them, the sum of a GB takes 2 (n - 1) / n seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from by_points import Has, point_on, problem_of

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.nodes import BetweenLink, Link
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.mixed.problem import make_mixed_problem
from spindle_cli.plan.patterns.beyond_compute import BACKWARD, MOVING_ADDS, SUM_BYTES, BeyondCompute
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.listing import Timed
from spindle_cli.profile.parameter_bytes import TiedParameters
from spindle_cli.units import MIB

GB = 10**9
SLOW = Link(latency_us=0, bandwidth_gb_per_s=1)


def apart(counts: Mapping[str, int], between: tuple[BetweenLink, ...] = (), per_node: int = 1) -> Cluster:
    """Each device a node, or so many; inside of a node a hundred times as fast."""
    cluster = cluster_of_types(counts, devices_per_node=per_node)
    fast = Link(latency_us=0, bandwidth_gb_per_s=100)
    links = cluster.links.model_copy(update={"inter_node": SLOW, "intra_node": fast, "between": between})
    return cluster.changed(links=links)


TWO_AND_TWO = apart({"fast": 2, "slow": 2})
POINTS = [((1, 0), 4.0), ((2, 0), 2.0), ((1, 1), 2.0), ((2, 1), 1.5), ((2, 2), 1.0)]
ONE, PAIR, MIXED, THREE, ALL = range(5)
# When jobs end behind which nothing is hidden.
NOW = 1e-9
WHOLE = {"optimizer_state_sharded": False}


def has(num_ops: int = 1, gb: float = 3.0, *, inputs: tuple[str, ...] = (), **more: Any) -> Has:
    """A MetaOp with so many GB of parameters an op."""
    return Has(num_ops, POINTS, inputs, {"param_bytes_per_op": round(gb * GB), **more})


def on(*spans: tuple[int, int, float, float], ops: int = 1) -> list[Timed]:
    """A job for each (node, point, start, end)."""
    return [((node, point, ops), start_s, end_s) for node, point, start_s, end_s in spans]


def added_s(problem: Problem, *spans: tuple[int, int, float, float]) -> float:
    return BeyondCompute(problem).added_s(on(*spans))


def test_what_the_parts_are() -> None:
    assert (BACKWARD, MOVING_ADDS, SUM_BYTES) == (2 / 3, 0.5, 64 * MIB)


@pytest.mark.parametrize(
    ("point", "start_s", "end_s", "expected", "of_shared_out"),
    [
        (ALL, 0.0, 4.0, 4.5, 4.5),  # 3 GB over four, complete when all is through
        (PAIR, 0.0, 8.0, 3.0, 3.0),
        (PAIR, 1.0, 9.0, 3.0 - 2 / 3, 1.5 - 2 / 3 + 1.5 - 1 / 3),  # a second later: behind two thirds of it
        (PAIR, 3.0, 9.0, 3.0 - 2.0, 1.5 - 1.0),  # and forward half of it behind a third
        (PAIR, 8.0, 9.0, 0.0, 0.0),  # more is hidden than it takes
        (ONE, 0.0, 4.0, 0.0, 0.0),
        (THREE, 0.0, 4.0, 4.0, 4.0),  # a device of each type: of the slow one's sums only half
        (MIXED, 0.0, 4.0, 1.5, 1.5),  # both types have two devices, which share what one does
    ],
)
def test_a_sum_takes_what_it_takes_less_what_it_hides_behind(
    point: int, start_s: float, end_s: float, expected: float, of_shared_out: float
) -> None:
    span = (0, point, start_s, end_s)
    assert added_s(problem_of(TWO_AND_TWO, a=has(), **WHOLE), span) == pytest.approx(expected)
    assert added_s(problem_of(TWO_AND_TWO, a=has()), span) == pytest.approx(of_shared_out)


@pytest.mark.parametrize(
    ("end_s", "expected", "of_shared_out"),
    [
        (6.0, 1.0, 0.5 + 0.5),  # what is left when all but the first op's are through, which takes a second
        (3.0, 1.0, 0.5 + 0.5),
        (2.0, 3.0 - 4 / 3, 0.5 + 1.5 - 2 / 3),  # ops run faster than they are summed
    ],
)
def test_the_ops_of_a_metaop_are_summed_while_others_run(
    end_s: float, expected: float, of_shared_out: float
) -> None:
    """Three of a GB."""
    span = (0, PAIR, 0.0, end_s)
    assert added_s(problem_of(TWO_AND_TWO, a=has(3, 1.0), **WHOLE), span) == pytest.approx(expected)
    assert added_s(problem_of(TWO_AND_TWO, a=has(3, 1.0)), span) == pytest.approx(of_shared_out)


def test_all_ops_are_summed_and_all_jobs_count_until_the_last_one_ends() -> None:
    """6 GB, of which the last ones come when the 3 s are over that lie between first start and last end."""
    problem = problem_of(TWO_AND_TWO, a=has(2), **WHOLE)
    assert added_s(problem, (0, PAIR, 0.0, 1.0), (0, PAIR, 2.0, 3.0)) == pytest.approx(6.0 - 2.0)


def test_sums_of_metaops_side_by_side_come_together() -> None:
    """Of each 3 GB in three ops within 6 s: 2 at once, and 3 s later half of the rest."""
    problem = problem_of(TWO_AND_TWO, a=has(3, 1.0), b=has(3, 1.0), **WHOLE)
    a, b = (0, PAIR, 0.0, 6.0), (1, PAIR, 0.0, 6.0)
    assert added_s(problem, a, b) == pytest.approx(2.0)
    assert added_s(problem, a, (1, PAIR, 3.0, 4.0)) == pytest.approx(1.0 + 4 / 3 + 3.0 - BACKWARD * 4)


@pytest.mark.parametrize(
    ("settings", "gb"),
    [
        ({"gradient_bytes_per_param": 2.0}, 6.0),
        ({"gradient_bytes_per_param": 0.5}, 1.5),
        ({}, 3.0),
    ],
)
def test_gradients_have_the_bytes_that_the_settings_say(settings: dict[str, float], gb: float) -> None:
    problem = problem_of(TWO_AND_TWO, a=has(), **settings)
    assert added_s(problem, (0, PAIR, 0.0, NOW)) == pytest.approx(gb)
    counted = BeyondCompute(problem).counted(0.5).nodes[0].points[PAIR]
    assert counted.op_s == pytest.approx(2.0 + 0.5 * gb)


def test_what_is_not_trained_is_not_summed() -> None:
    assert added_s(problem_of(TWO_AND_TWO, a=has(trainable_fraction=0.25)), (0, PAIR, 0.0, NOW)) == (
        pytest.approx(0.75)
    )
    frozen = problem_of(TWO_AND_TWO, a=has(trainable_fraction=0.0))
    assert added_s(frozen, (0, PAIR, 0.0, NOW)) == 0.0
    assert BeyondCompute(frozen).counted(1.0).nodes[0].points == frozen.nodes[0].points
    gathered = replace(frozen, profile=frozen.profile.sharded({"a": Sharding.PARAMETERS}))
    assert gathered.uses["a", 0]
    assert added_s(gathered, (0, PAIR, 0.0, NOW)) == 0.0
    assert BeyondCompute(gathered).counted(1.0).nodes[0].points == frozen.nodes[0].points


def test_a_part_of_a_metaop_has_the_parameters_of_its_own_ops() -> None:
    """Of three ops the first is recomputed; the last has a GB."""
    metaop = metaop_on_types(
        "t/a", 3, {"fast": 1.0, "slow": 1.0}, param_bytes_per_op=0, extra_param_bytes={2: GB}
    )
    fallback = MemoryFallback(recompute={"t/a": 1})
    problem = make_mixed_problem(profile_on_types(metaop), TWO_AND_TWO, fallback)
    assert [(node.first_op, node.num_ops) for node in problem.nodes] == [(0, 1), (1, 2)]
    own, more = ([point.counts for point in node.points].index((2, 0)) for node in problem.nodes)
    one = [point.counts for point in problem.nodes[0].points].index((1, 0))
    beyond = BeyondCompute(problem)
    assert beyond.added_s([((0, own, 1), 0.0, NOW), ((1, one, 2), 0.0, NOW)]) == 0.0
    assert beyond.added_s([((0, one, 1), 0.0, NOW), ((1, more, 2), 0.0, NOW)]) == pytest.approx(1.0)
    counted = beyond.counted(1.0)
    added = [
        counted.nodes[number].points[at].op_s - problem.nodes[number].points[at].op_s
        for number, at in enumerate((own, more))
    ]
    assert added == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize(
    ("gb_of_a", "gb_of_b", "expected"),
    [
        (3.0, 6.0, 9.0 - BACKWARD * 4),  # b's are complete first, and a's wait for them
        (6.0, 0.5, 6.0),  # b's are through when a's are complete
        (0.5, 6.0, 6.5 - BACKWARD * 4),
        (0.5, 0.5, 0.5),
    ],
)
def test_sums_go_one_after_another_of_what_starts_last_first(
    gb_of_a: float, gb_of_b: float, expected: float
) -> None:
    """Both on both fast devices, b 4 s from the start."""
    spans = (0, PAIR, 0.0, 2.0), (1, PAIR, 4.0, 8.0)
    a, b = has(gb=gb_of_a), has(gb=gb_of_b)
    assert added_s(problem_of(TWO_AND_TWO, a=a, b=b, **WHOLE), *spans) == pytest.approx(expected)
    turned = [(1 - node, *more) for node, *more in spans]
    assert added_s(problem_of(TWO_AND_TWO, b=b, a=a, **WHOLE), *turned) == pytest.approx(expected)


def test_each_type_waits_for_its_own_sums() -> None:
    """3 s on both fast devices, and 1 s on a device of each type, which is half of each type's."""
    problem = problem_of(TWO_AND_TWO, a=has(gb=3.0), b=has(gb=1.0))
    assert added_s(problem, (0, PAIR, 0.0, NOW), (1, MIXED, 0.0, NOW)) == pytest.approx(3.5)
    assert added_s(problem, (0, ONE, 0.0, NOW), (1, MIXED, 0.0, NOW)) == pytest.approx(0.5)


def test_parameters_of_two_metaops_are_summed_once_over_the_most_devices_of_each_type() -> None:
    """a on both fast devices, b on one of each: on three, from a's start on; apart, 3 and half of 3 s."""
    shared = problem_of(TWO_AND_TWO, a=has(parameters="net"), b=has(parameters="net"))
    spans = (0, PAIR, 1.0, 3.0), (1, MIXED, 4.0, 6.0)
    assert added_s(shared, *spans) == pytest.approx(4.0 - 1.0)
    assert added_s(shared, *reversed(spans)) == pytest.approx(4.0 - 1.0)
    alone = problem_of(TWO_AND_TWO, a=has(gb=3.0), b=has(gb=3.0))
    assert added_s(alone, (0, PAIR, 0.0, NOW), (1, MIXED, 0.0, NOW)) == pytest.approx(4.5)


def test_parameters_of_two_metaops_are_summed_as_the_first_one_starts_and_ends() -> None:
    """3 GB in three ops: one at a's start, the others until its end."""
    more = {"parameters": "net", "parameter_blocks": (0, 1, 2)}
    shared = problem_of(TWO_AND_TWO, a=has(3, 1.0, **more), b=has(3, 1.0, **more), **WHOLE)
    assert added_s(shared, (0, PAIR, 1.0, 2.0), (1, PAIR, 4.0, 9.0)) == pytest.approx(3.0 - BACKWARD * 2)
    assert added_s(shared, (0, PAIR, 4.0, 9.0), (1, PAIR, 1.0, 2.0)) == pytest.approx(3.0 - BACKWARD * 2)


def test_parameters_of_two_metaops_have_as_many_ops_as_the_one_with_fewer() -> None:
    """3 GB of one op of a, and of the first of three of b: all come at once, as a starts."""
    more = {"param_bytes_per_op": 0, "extra_param_bytes": {0: 3 * GB}, "parameters": "net"}
    a, b = Has(1, POINTS, (), dict(more)), Has(3, POINTS, (), dict(more))
    shared = problem_of(TWO_AND_TWO, a=a, b=b, **WHOLE)
    assert added_s(shared, (0, PAIR, 0.0, 9.0), (1, PAIR, 0.0, 9.0)) == pytest.approx(3.0)


def test_of_the_jobs_of_a_metaop_the_most_devices_of_each_type_are_summed_over() -> None:
    problem = problem_of(TWO_AND_TWO, a=has(3, 1.0, output_bytes=0))
    jobs = (0, PAIR, 0.0, NOW), (0, ONE, 0.0, NOW), (0, MIXED, 0.0, NOW)
    assert added_s(problem, *jobs) == pytest.approx(4.0)
    assert added_s(problem, *jobs[1:]) == pytest.approx(1.5)


def test_what_some_metaops_share_is_told_from_what_they_have_alone() -> None:
    """b has the first op's parameters of a and c's those of both: 1 GB of each kind."""
    problem = problem_of(
        TWO_AND_TWO,
        a=has(3, 1.0, parameters="net"),
        b=has(1, 1.0, parameters="net"),
        c=has(2, 1.0, parameters="net", parameter_blocks=(0, 1)),
    )
    # Alone (block 2), of a and c (block 1), of all: over both fast devices, both, and four.
    spans = (0, PAIR, 0.0, NOW), (1, ALL, 0.0, NOW), (2, ONE, 0.0, NOW)
    assert added_s(problem, *spans) == pytest.approx(1.0 + 1.0 + 1.5)


def test_what_is_tied_has_the_bytes_that_are_tied() -> None:
    """3 GB an op of which 2 are those of an embedding that both use."""
    tied = (TiedParameters(op=0, parameter="words", num_bytes=2 * GB, keys=("a", "b")),)
    problem = problem_of(
        TWO_AND_TWO, a=has(parameters="a", tied=tied), b=has(parameters="b", tied=tied, gb=2.0)
    )
    assert added_s(problem, (0, PAIR, 0.0, NOW), (1, ONE, 0.0, NOW)) == pytest.approx(3.0)
    assert added_s(problem, (0, ONE, 0.0, NOW), (1, PAIR, 0.0, NOW)) == pytest.approx(2.0)


def moving(**more: Any) -> Problem:
    """8 GB of activations, no parameters."""
    return problem_of(TWO_AND_TWO, a=has(9, 0.0, output_bytes=8 * GB, **more), b=has(9, 0.0))


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([ONE], 0.0),
        ([ONE, ONE], 0.0),
        ([PAIR, ALL], 2.0),  # half of 8 GB and their gradients at 1 GB/s, over the four devices
        ([ALL, PAIR], 2.0),
        ([ONE, PAIR], 4.0),
        ([PAIR, MIXED], 4.0),  # as many devices, but not the same
        ([ONE, ONE, PAIR, PAIR], 4.0),
        ([ONE, PAIR, ONE, ALL], 4.0 + 4.0 + 2.0),
    ],
)
def test_activations_move_with_every_change_of_allocation(points: list[int], expected: float) -> None:
    spans = [(0, point, 1.0 * place, 1.0 * place + 1) for place, point in enumerate(points)]
    assert added_s(moving(), *spans) == pytest.approx(expected)


def test_others_between_the_jobs_of_a_metaop_are_no_change_of_its_allocation() -> None:
    assert added_s(moving(), (0, ONE, 0.0, 1.0), (1, PAIR, 1.0, 2.0), (0, ONE, 2.0, 3.0)) == 0.0


def test_what_moves_inside_of_a_metaop_is_what_its_ops_hand_on_to_each_other() -> None:
    """And not what the last one hands on: of a model whose last op is its loss next to nothing."""
    spans = (0, ONE, 0.0, 1.0), (0, PAIR, 1.0, 2.0)
    assert added_s(moving(inner_output_bytes=2 * GB), *spans) == pytest.approx(1.0)


def test_activations_move_over_the_slowest_link() -> None:
    between = (
        BetweenLink(groups=("fast", "slow"), latency_us=0, bandwidth_gb_per_s=0.5),
        BetweenLink(groups=("fast", "third"), latency_us=0, bandwidth_gb_per_s=4),
    )
    cluster = apart({"fast": 2, "slow": 2, "third": 1}, between)
    points = [((1, 0, 0), 2.0), ((2, 0, 0), 1.0)]
    more = {"output_bytes": 8 * GB}
    spans = (0, 0, 0.0, 1.0), (0, 1, 1.0, 2.0)
    assert added_s(problem_of(cluster, a=Has(2, points, (), more)), *spans) == pytest.approx(8.0, rel=1e-3)
    far = cluster.changed(links=cluster.links.model_copy(update={"between": between[1:]}))
    assert added_s(problem_of(far, a=Has(2, points, (), more)), *spans) == pytest.approx(4.0, rel=1e-3)


def test_links_are_as_fast_as_for_the_bytes_of_a_sum() -> None:
    curve = ((SUM_BYTES - 1, 0.001), (SUM_BYTES, 2.0), (SUM_BYTES + 1, 0.001))
    link = Link(latency_us=0, bandwidth_gb_per_s=1, curve=curve)
    cluster = TWO_AND_TWO.changed(links=TWO_AND_TWO.links.model_copy(update={"inter_node": link}))
    problem = problem_of(cluster, a=has(2, 1.5, output_bytes=4 * GB))
    assert added_s(problem, (0, PAIR, 0.0, NOW)) == pytest.approx(1.5)
    assert added_s(problem, (0, ONE, 0.0, NOW), (0, PAIR, 0.0, NOW)) == pytest.approx(1.5 + 1.0)


def test_latency_counts_once_for_each_sum() -> None:
    link = Link(latency_us=50_000, bandwidth_gb_per_s=1)
    cluster = TWO_AND_TWO.changed(links=TWO_AND_TWO.links.model_copy(update={"inter_node": link}))
    problem = problem_of(cluster, a=Has(1, POINTS, (), {"param_bytes_per_op": 3 * SUM_BYTES}))
    sum_s = 3 * (SUM_BYTES / GB + 2 * 0.05)  # each half goes there and back
    assert added_s(problem, (0, PAIR, 0.0, NOW)) == pytest.approx(sum_s)


def test_devices_of_a_type_are_its_first_ones() -> None:
    """Two on a node sum at 100 GB/s; the third is on the next, and so is the first of the other type."""
    cluster = apart({"fast": 4, "slow": 4}, per_node=2)
    points = [((3, 0), 3.0), ((2, 0), 2.0), ((2, 1), 2.0), ((0, 2), 1.0)]
    problem = problem_of(cluster, a=Has(1, points, (), {"param_bytes_per_op": 3 * GB}))
    # Of two of four devices the type's sum is half; a ring over three crosses twice, by the slow link.
    found = [added_s(problem, (0, point, 0.0, NOW)) for point in range(4)]
    assert found == pytest.approx([4.0 * 3 / 4, 0.03 / 2, 4.0 / 2, 0.03 / 2])


def test_devices_of_a_type_are_on_its_own_nodes() -> None:
    """Both fast ones on one node, each slow one on its own."""
    cluster = apart({"fast": 2, "slow": 2})
    nodes = tuple(
        group.model_copy(update={"count": 1, "devices": 2}) if group.device == "fast" else group
        for group in cluster.nodes
    )
    problem = problem_of(
        cluster.changed(nodes=nodes),
        a=Has(1, [((2, 0), 1.0), ((0, 2), 1.0)], (), {"param_bytes_per_op": 3 * GB}),
    )
    assert [added_s(problem, (0, point, 0.0, NOW)) for point in (0, 1)] == pytest.approx([0.03, 3.0])


def test_counted_times_hold_the_share_of_the_sums_that_is_asked_for() -> None:
    """Of two ops of 3 GB, one with a GB more: 3.5 GB an op; of tensor parallelism half of what it splits."""
    more = {
        "param_bytes_per_op": 3 * GB,
        "whole_param_bytes_per_op": GB,
        "extra_param_bytes": {1: GB},
        "split_extra_param_bytes": {1: GB},
    }
    problem = problem_of(TWO_AND_TWO, a=Has(2, POINTS, (), more), b=has(gb=0.0))
    nodes = (
        replace(problem.nodes[0], points=(*problem.nodes[0].points, point_on((2, 2), 0.5, tp=2))),
        problem.nodes[1],
    )
    problem = replace(problem, nodes=nodes)
    beyond = BeyondCompute(problem)
    counted = beyond.counted(0.2)
    # Over one device no sum; over two 3.5 s, three 14/3 and four 5.25; with half of 2.5 GB 3.375 s.
    expected = [4.0, 2.0 + 0.7, 2.0 + 0.7, 1.5 + 0.2 * 14 / 3, 1.0 + 1.05, 0.5 + 0.2 * 1.5 * (1.25 + 1.0)]
    assert [point.op_s for point in counted.nodes[0].points] == pytest.approx(expected)
    assert [point.op_s for point in counted.nodes[1].points] == [op_s for _, op_s in POINTS]
    assert [point.counts for point in counted.nodes[0].points] == [p.counts for p in problem.nodes[0].points]
    assert beyond.counted(0.0) is problem
