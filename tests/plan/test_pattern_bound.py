"""The bound of patterns: cases by hand, and the pattern that is worth most, against all patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pattern_bound import Worth, best_of_parts, pattern_bound_s, sets_by_part, with_every_number
from random_profiles import SHAPES, Shape, random_profile

from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.cutting.allocations import allocations
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Point, Problem
from spindle_cli.plan.search.improve import search
from spindle_cli.plan.search.listing import time_jobs

Allocations = Sequence[tuple[tuple[int, ...], float]]  # devices of each type, seconds of an op


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


def on_points(types: Mapping[str, int], *metaops: tuple[int, Allocations]) -> Problem:
    """MetaOps that wait for none, of so many ops on these allocations each."""
    made = [
        metaop_on_types(f"{task}/m", num_ops, dict.fromkeys(types, 1.0), batch_size=1)
        for task, (num_ops, _) in zip("abc", metaops, strict=False)
    ]
    problem = make_problem(profile_on_types(*made), cluster_of_types(types))
    nodes = [
        replace(
            node,
            points=tuple(
                Point(sum(counts), sum(counts), 1, op_s / 3, op_s * 2 / 3, op_s, counts=counts)
                for counts, op_s in points
            ),
        )
        for node, (_, points) in zip(problem.nodes, metaops, strict=True)
    ]
    return replace(problem, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("types", "metaops", "seconds"),
    [
        ({"fast": 2}, [(3, [((1,), 1.0)]), (5, [((1,), 1.0)])], 5.0),
        # The first and the second do not fit side by side, the third does beside either.
        (
            {"fast": 4, "slow": 4},
            [(3, [((3, 0), 1.0)]), (2, [((2, 1), 2.0)]), (7, [((0, 2), 1.0)])],
            3.0 + 4.0,
        ),
        # The first takes 1 s for an op on two devices, beside the second, and then 0.75 s on all four.
        ({"fast": 4}, [(4, [((2,), 1.0), ((4,), 0.75)]), (2, [((2,), 1.0)])], 2.0 + 2 * 0.75),
    ],
)
def test_a_sequence_of_patterns_is_as_short_as_by_hand(
    types: Mapping[str, int], metaops: Sequence[tuple[int, Allocations]], seconds: float
) -> None:
    assert pattern_bound_s(on_points(types, *metaops)) == pytest.approx(seconds, rel=1e-3)


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
def test_no_schedule_ends_earlier(shape: Shape) -> None:
    problem = make_problem(random_profile(3, shape), cluster_of(8))
    timed = time_jobs(problem, search(problem, lower_bound(problem), 2000, seed=0)[0])
    assert pattern_bound_s(problem, max_patterns=40) <= max(end_s for _, _, end_s in timed) * (1 + 1e-9)


def test_every_number_of_devices_of_each_type_may_be_listed() -> None:
    """9 and 11 of 12 devices of a type are in no list of sizes, but do as many samples sooner than fewer."""
    cluster = cluster_of_types({"cpu-a": 12, "cpu-b": 1})
    net = metaop_on_types("t/net", 1, {"cpu-a": 1.0, "cpu-b": 999.0}, batch_size=132)
    some = {point.counts for point in allocations(net, cluster)}
    problem = with_every_number(make_problem(profile_on_types(net), cluster))
    (every,) = ({point.counts for point in node.points} for node in problem.nodes)
    assert some < every
    assert every >= {(count, 0) for count in range(1, 13)}
    assert {(9, 0), (11, 0)} <= every - some


def by_all_patterns(nodes: Sequence[int], worth: Mapping[int, Sequence[Worth]], room: Sequence[int]) -> float:
    best = 0.0
    for chosen in product(*([None, *worth[node]] for node in nodes)):
        own = [each for each in chosen if each is not None]
        taken = [sum(each.devices[kind] for each in own) for kind in range(len(room))]
        if all(count <= most for count, most in zip(taken, room, strict=True)):
            best = max(best, sum(each.value for each in own))
    return best


@given(seed=st.integers(0, 10**6), num_types=st.integers(1, 3))
@examples(300)
def test_no_pattern_is_worth_more_than_the_best_one(seed: int, num_types: int) -> None:
    random = Random(seed)
    room = [random.randint(0, 4) for _ in range(num_types)]
    nodes = random.sample(range(10), random.randint(0, 4))
    worth = {
        node: [
            Worth(100 + place, tuple(random.randint(0, 3) for _ in room), random.randint(1, 12) / 4)
            for place in range(random.randint(0, 4))
        ]
        for node in nodes
    }
    value, pattern = best_of_parts([[nodes]], worth, room)
    assert value == by_all_patterns(nodes, worth, room)
    chosen = [worth[node][point - 100] for node, point in pattern.items()]
    assert sum(each.value for each in chosen) == value
    assert all(sum(each.devices[kind] for each in chosen) <= most for kind, most in enumerate(room))


@given(seed=st.integers(0, 10**6))
@examples(100)
def test_of_each_part_a_pattern_has_nodes_of_one_set(seed: int) -> None:
    random = Random(seed)
    room = [random.randint(1, 4), random.randint(0, 3)]
    worth = {
        node: [
            Worth(place, (random.randint(0, 3), random.randint(0, 2)), random.randint(1, 12) / 4)
            for place in range(random.randint(0, 3))
        ]
        for node in range(6)
    }
    parts = [
        [random.sample(own, random.randint(1, 3)) for _ in range(random.randint(1, 3))]
        for own in ([0, 1, 2], [3, 4, 5])
    ]
    value, pattern = best_of_parts(parts, worth, room)
    assert value == max(by_all_patterns([*one, *other], worth, room) for one, other in product(*parts))
    chosen = [worth[node][point] for node, point in pattern.items()]
    assert sum(each.value for each in chosen) == value
    assert all(sum(each.devices[kind] for each in chosen) <= most for kind, most in enumerate(room))
    for sets in parts:
        own = pattern.keys() & {node for nodes in sets for node in nodes}
        assert any(own <= set(nodes) for nodes in sets)


def test_of_each_node_a_pattern_has_one_allocation_or_none() -> None:
    worth = {0: [Worth(3, (1,), 1.0), Worth(4, (2,), 1.5)], 1: [Worth(7, (1,), 0.75)], 2: []}
    for room, best in ((1, (1.0, {0: 3})), (2, (1.75, {0: 3, 1: 7})), (3, (2.25, {0: 4, 1: 7}))):
        assert best_of_parts([[[0, 1, 2]]], worth, [room]) == best
    assert best_of_parts([[[2]]], worth, [3]) == (0.0, {})
