"""The pattern that is worth most, against all patterns; and sequences of patterns solved by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from random import Random

import pytest
from by_points import Has, problem_of, random_jobs, random_problem
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from spindle_cli.plan.bound.knapsack import Worth, best_of_parts, best_pattern
from spindle_cli.plan.bound.patterns import Pattern, patterns_of
from spindle_cli.plan.patterns.backfill import Backfill
from spindle_cli.plan.patterns.program import (
    MOST_GROUPS,
    MOST_LOOKED_AT,
    PATTERNS_CLOSE,
    KnownPatterns,
    PatternProgram,
    groups_of,
)
from spindle_cli.plan.patterns.side_by_side import Set, sets_in_order
from spindle_cli.plan.problem import Problem


@pytest.mark.parametrize(
    ("counts", "capacities", "expected"),
    [
        ((5,), (256,), (5,)),
        ((5,), (257,), (3,)),
        ((256,), (257,), (128,)),
        ((257,), (257,), (129,)),
        ((0,), (600,), (0,)),
        ((1,), (600,), (1,)),
        ((7, 7), (64, 65), (7, 4)),
        ((7, 6), (129, 128), (3, 3)),
        ((4, 0, 33), (32, 8, 33), (4, 0, 17)),
        ((33, 1, 1, 1), (33, 1, 1, 1), (17, 1, 1, 1)),
    ],
)
def test_devices_are_counted_in_as_many_groups_as_there_is_room_for(
    counts: tuple[int, ...], capacities: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Rounded up: what fits by groups fits by devices."""
    assert MOST_GROUPS == (256, 64, 32)
    assert groups_of(counts, capacities) == expected


def by_all_patterns(nodes: Sequence[int], worth: Mapping[int, Sequence[Worth]], room: Sequence[int]) -> float:
    best = 0.0
    for chosen in product(*([None, *worth[node]] for node in nodes)):
        own = [each for each in chosen if each is not None]
        taken = [sum(each.groups[kind] for each in own) for kind in range(len(room))]
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
    value, pattern = best_pattern(nodes, worth, room)
    assert value == by_all_patterns(nodes, worth, room)
    chosen = [worth[node][point - 100] for node, point in pattern.items()]
    assert sum(each.value for each in chosen) == value
    assert all(sum(each.groups[kind] for each in chosen) <= most for kind, most in enumerate(room))


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
    assert all(sum(each.groups[kind] for each in chosen) <= most for kind, most in enumerate(room))
    for sets in parts:
        own = pattern.keys() & {node for nodes in sets for node in nodes}
        assert any(own <= set(nodes) for nodes in sets)


def test_of_each_node_a_pattern_has_one_allocation_or_none() -> None:
    worth = {0: [Worth(3, (1,), 1.0), Worth(4, (2,), 1.5)], 1: [Worth(7, (1,), 0.75)], 2: []}
    assert best_pattern([0, 1, 2], worth, [1]) == (1.0, {0: 3})
    assert best_pattern([0, 1, 2], worth, [2]) == (1.75, {0: 3, 1: 7})
    assert best_pattern([0, 1, 2], worth, [3]) == (2.25, {0: 4, 1: 7})
    assert best_pattern([2], worth, [3]) == (0.0, {})


def sequence(
    problem: Problem, *sets: set[int], known: KnownPatterns | None = None, rounds: int = 30
) -> dict[frozenset[tuple[int, int]], float]:
    """The patterns of the shortest sequence and their seconds, a second of all devices worth one."""
    kinds = problem.devices_of_types
    program = PatternProgram(problem, [1 / sum(kinds)] * len(kinds), known or KnownPatterns())
    found = program.shortest([frozenset(own) for own in sets], rounds)
    seconds = {frozenset(pattern.items()): seconds for pattern, seconds in found}
    assert len(seconds) == len(found)
    return seconds


def near(expected: Mapping[tuple[tuple[int, int], ...], float]) -> dict[frozenset[tuple[int, int]], object]:
    return {frozenset(pattern): pytest.approx(seconds) for pattern, seconds in expected.items()}


PAIR = problem_of({"fast": 2}, a=Has(3, [((1,), 1.0)]), b=Has(5, [((1,), 1.0)]))


def test_what_fits_side_by_side_runs_side_by_side() -> None:
    """No pattern that is known to begin with has both."""
    assert sequence(PAIR, {0, 1}) == near({((0, 0), (1, 0)): 3.0, ((1, 0),): 2.0})


def test_what_no_set_has_together_runs_one_after_another() -> None:
    assert sequence(PAIR, {0}, {1}) == near({((0, 0),): 3.0, ((1, 0),): 5.0})


def test_what_does_not_fit_beside_another_runs_by_itself() -> None:
    problem = problem_of(
        {"fast": 4, "slow": 4},
        a=Has(3, [((3, 0), 1.0)]),
        b=Has(2, [((2, 1), 2.0)]),
        c=Has(7, [((0, 2), 1.0)]),
    )
    found = sequence(problem, {0, 1, 2})
    assert found == near({((0, 0), (2, 0)): 3.0, ((1, 0), (2, 0)): 4.0})


def test_ops_are_mixed_from_allocations_as_patterns_have_room() -> None:
    """a takes 1 s for an op on two devices, beside b, and then 0.75 s on all four."""
    problem = problem_of({"fast": 4}, a=Has(4, [((2,), 1.0), ((4,), 0.75)]), b=Has(2, [((2,), 1.0)]))
    assert sequence(problem, {0, 1}) == near({((0, 0), (1, 0)): 2.0, ((0, 1),): 1.5})
    assert sequence(problem, {0}, {1}) == near({((0, 1),): 3.0, ((1, 0),): 2.0})


def test_sets_of_a_sequence_share_their_nodes() -> None:
    """b beside a, and then beside c."""
    ones = [((1,), 1.0)]
    problem = problem_of({"fast": 2}, a=Has(2, ones), b=Has(6, ones), c=Has(3, ones, ("a",)))
    found = sequence(problem, {0}, {0, 1}, {1, 2}, {2})
    assert found == near({((0, 0), (1, 0)): 2.0, ((1, 0), (2, 0)): 3.0, ((1, 0),): 1.0})


def test_patterns_are_generated_in_so_many_rounds_and_kept() -> None:
    known = KnownPatterns()
    alone = near({((0, 0),): 3.0, ((1, 0),): 5.0})
    assert sequence(PAIR, {0, 1}, known=known, rounds=1) == alone
    assert known.of([frozenset({0, 1})]) == [{0: 0}, {1: 0}, {0: 0, 1: 0}]
    assert sum(sequence(PAIR, {0, 1}, known=known, rounds=1).values()) == pytest.approx(5.0)
    assert sum(sequence(PAIR, {0, 1}, rounds=2).values()) == pytest.approx(5.0)


def test_what_shortens_a_sequence_by_less_than_a_little_is_not_generated() -> None:
    """On both devices each takes half of what it takes on one, but for a little: twice that is what running
    side by side would save.
    """
    for loss, is_generated in ((0.5 * PATTERNS_CLOSE, False), (2 * PATTERNS_CLOSE, True)):
        points = [((1,), 2.0), ((2,), 1.0 + loss)]
        known = KnownPatterns()
        sequence(problem_of({"fast": 2}, a=Has(1, points), b=Has(1, points)), {0, 1}, known=known)
        assert ({0: 0, 1: 0} in known.of([frozenset({0, 1})])) is is_generated


def test_many_devices_fit_side_by_side_by_groups() -> None:
    """Of 128 in pairs 64 beside 64, and, as halves of pairs are counted whole, not 65 beside 63."""
    for count, length_s in ((64, 1.0), (65, 2.0)):
        points = ([((count, 0), 1.0)], [((128 - count, 0), 1.0)])
        problem = problem_of({"fast": 128, "slow": 1}, a=Has(1, points[0]), b=Has(1, points[1]))
        assert sum(sequence(problem, {0, 1}).values()) == pytest.approx(length_s)


def test_known_patterns_are_those_whose_nodes_a_set_has_each_once() -> None:
    known = KnownPatterns()
    assert known.add([{0: 1, 1: 0}, {1: 0, 0: 1}])
    assert not known.add([{1: 0, 0: 1}])
    assert not known.add([])
    assert known.add([{0: 1, 1: 0}, {1: 0}])
    assert known.add([{2: 0, 1: 0}])
    assert known.of([frozenset({0, 1})]) == [{0: 1, 1: 0}, {1: 0}]
    assert known.of([frozenset({1}), frozenset({1, 2, 3})]) == [{1: 0}, {1: 0, 2: 0}]
    assert known.of([]) == []


def test_allocations_are_looked_at_that_are_worth_most_beyond_their_devices() -> None:
    """Twelve nodes on a device each take 1 s; of each only some of the twelve allocations are looked at, of
    which the largest are fastest.
    """
    points = [((count,), count**-0.9) for count in range(1, 13)]
    assert len(points) > MOST_LOOKED_AT
    problem = problem_of({"fast": 12}, **{f"m{number}": Has(1, points) for number in range(12)})
    found = sequence(problem, set(range(12)))
    assert found == near({tuple((node, 0) for node in range(12)): 1.0})


def least_s(problem: Problem, sets: Sequence[Set]) -> float:
    """The length of the shortest sequence, of all patterns that there are."""
    known = KnownPatterns()
    room = problem.devices_of_types
    for own in sets:
        options = [
            [None, *range(len(node.points))] if node.index in own else [None] for node in problem.nodes
        ]
        for chosen in product(*options):
            pattern: Pattern = {node: point for node, point in enumerate(chosen) if point is not None}
            taken = [problem.nodes[node].points[point].of_types for node, point in pattern.items()]
            if pattern and all(sum(each[kind] for each in taken) <= most for kind, most in enumerate(room)):
                known.add([pattern])
    program = PatternProgram(problem, [1 / sum(room)] * len(room), known)
    return sum(seconds for _, seconds in program.shortest(sets, 1))


@given(seed=st.integers(0, 10**6))
@examples(100)
def test_a_sequence_is_nearly_as_short_as_one_of_all_patterns_and_no_longer_than_its_schedule(
    seed: int,
) -> None:
    random = Random(seed)
    problem = random_problem(random)
    timed, end_s = Backfill(problem).timed(random_jobs(problem, random))
    sets = sets_in_order(problem, timed)
    shortest_s = least_s(problem, sets)
    assert shortest_s <= end_s * (1 + 1e-6)
    spans = [(job[0], job[1], start_s, stop_s) for job, start_s, stop_s in timed]
    for patterns in ([], patterns_of(spans)):
        known = KnownPatterns()
        known.add(patterns)
        room = problem.devices_of_types
        found = PatternProgram(problem, [1 / sum(room)] * len(room), known).shortest(sets)
        assert shortest_s * (1 - 1e-6) <= sum(seconds for _, seconds in found)
        assert sum(seconds for _, seconds in found) <= shortest_s * (1 + PATTERNS_CLOSE + 1e-6)
        ops = [0.0] * len(problem.nodes)
        for pattern, seconds in found:
            assert any(pattern.keys() <= own for own in sets)
            for node, point in pattern.items():
                ops[node] += seconds / problem.nodes[node].points[point].op_s
        assert ops == pytest.approx([node.num_ops for node in problem.nodes], rel=1e-4)
