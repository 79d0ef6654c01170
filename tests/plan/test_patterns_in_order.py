"""What may run side by side in the order of a schedule, and jobs of whole ops in such an order, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from by_points import Has, problem_of, random_jobs, random_problem, what_is_wrong
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from spindle_cli.plan.bound.patterns import Pattern
from spindle_cli.plan.patterns.backfill import Backfill
from spindle_cli.plan.patterns.program import KnownPatterns, PatternProgram
from spindle_cli.plan.patterns.shorten import CHANCE, in_turn, jobs_of
from spindle_cli.plan.patterns.side_by_side import Set, sets_in_order
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Timed

ONE = [((1,), 1.0)]


def graph(**inputs: str) -> Problem:
    """MetaOps of an op by their inputs, of a letter each, on eight devices."""
    return problem_of({"fast": 8}, **{name: Has(1, ONE, tuple(own)) for name, own in inputs.items()})


def sets_of(problem: Problem, *spans: tuple[float, float]) -> list[str]:
    """The sets of a schedule of one job a node, from and until when, as letters."""
    timed: list[Timed] = [((node, 0, 1), *span) for node, span in enumerate(spans)]
    found = sets_in_order(problem, timed)
    names = [node.metaop.name for node in problem.nodes]
    return ["".join(sorted(names[node] for node in own)) for own in found]


def test_a_chain_runs_one_after_another() -> None:
    assert sets_of(graph(a="", b="a", c="b"), (0, 2), (2, 3), (3, 7)) == ["a", "b", "c"]


def test_the_sides_of_a_diamond_run_side_by_side_as_long_as_one_of_them_does() -> None:
    problem = graph(a="", b="a", c="a", d="bc")
    assert sets_of(problem, (0, 1), (1, 2), (1, 3), (3, 4)) == ["a", "bc", "bc", "d"]


def test_what_waits_for_nothing_may_run_at_any_time() -> None:
    assert sets_of(graph(a="", b="a", c="b", s=""), (0, 1), (1, 2), (2, 3), (2, 3)) == ["as", "bs", "cs"]


def test_of_a_gap_in_a_chain_producer_and_consumer_have_a_part_each() -> None:
    """By turns: of two of the schedule's times each gets one, of one the producer, of three it gets two."""
    chain = graph(a="", b="a", c="", d="", e="")
    spans = (0, 1), (3, 4), (0, 2), (2, 4), (0, 4)
    assert sets_of(chain, *spans) == ["acde", "acde", "bcde", "bcde"]
    spans = (0, 1), (3, 4), (0, 4), (0, 4), (0, 4)
    assert sets_of(chain, *spans) == ["acde", "acde", "bcde"]
    spans = (0, 1), (4, 5), (0, 2), (2, 3), (3, 5)
    assert sets_of(chain, *spans) == ["acde", "acde", "acde", "bcde", "bcde"]


def test_a_node_grows_no_further_than_the_next_one_on_each_side() -> None:
    """b has slack behind it until c, and before it down to a, which has none."""
    problem = graph(a="", b="a", c="b", l="")
    assert sets_of(problem, (0, 2), (3, 4), (6, 8), (0, 8)) == ["al", "al", "bl", "bl", "cl"]


def test_jobs_of_a_node_count_from_the_start_of_the_first_to_the_end_of_the_last() -> None:
    problem = problem_of({"fast": 8}, a=Has(3, ONE), b=Has(1, ONE, ("a",)), c=Has(1, ONE, ("b",)))
    timed: list[Timed] = [
        ((0, 0, 1), 2.0, 3.0),
        ((0, 0, 2), 0.0, 2.0),
        ((2, 0, 1), 5.0, 6.0),
        ((1, 0, 1), 4.0, 5.0),
    ]
    assert sets_in_order(problem, timed) == [{0}, {0}, {1}, {2}]


@pytest.mark.parametrize(("off", "expected"), [(0.0, 2), (1e-10, 2), (1e-8, 3)])
def test_times_that_hardly_differ_are_one(off: float, expected: int) -> None:
    problem = graph(a="", b="", c="ab")
    assert len(sets_of(problem, (0, 0.5), (0, 0.5 + off), (0.5 + off, 1))) == expected


@given(seed=st.integers(0, 10**6))
@examples(150)
def test_sets_hold_what_runs_and_keep_producers_before_consumers(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random)
    timed, end_s = Backfill(problem).timed(random_jobs(problem, random))
    sets = sets_in_order(problem, timed)
    nodes = range(len(problem.nodes))
    starts = [min(start_s for job, start_s, _ in timed if job[0] == node) for node in nodes]
    ends = [max(stop_s for job, _, stop_s in timed if job[0] == node) for node in nodes]
    times = sorted({*starts, *ends})
    assert times[-1] == end_s
    for own, (from_s, until_s) in zip(sets, pairwise(times), strict=True):
        assert {node for node in nodes if starts[node] <= from_s and until_s <= ends[node]} <= own
    for node in problem.nodes:
        within = [number for number, own in enumerate(sets) if node.index in own]
        assert within == list(range(within[0], within[-1] + 1))
        for producer in node.inputs:
            before = [number for number, own in enumerate(sets) if producer in own]
            assert before[-1] < within[0]


def several(*patterns: tuple[Pattern, float]) -> list[tuple[Pattern, float]]:
    """Patterns and their seconds."""
    return list(patterns)


FIVE_OPS = problem_of(
    {"fast": 4},
    a=Has(5, [((1,), 1.0), ((2,), 0.5)]),
    b=Has(1, ONE),
)


@pytest.mark.parametrize(
    ("slow_s", "ops"),
    [
        (2.4, {0: 2, 1: 3}),
        (2.6, {0: 3, 1: 2}),
        (0.4, {1: 5}),
        (0.6, {0: 1, 1: 4}),
        (4.4, {0: 4, 1: 1}),
        (4.6, {0: 5}),
    ],
)
def test_a_job_has_the_ops_that_come_nearest_to_its_part(slow_s: float, ops: dict[int, int]) -> None:
    """Of five ops some at 1 s each, the others at half a second; none is left for what has less than half."""
    patterns = several(({0: 0}, slow_s), ({0: 1, 1: 0}, (5 - slow_s) / 2))
    jobs = jobs_of(FIVE_OPS, patterns, over_gaps=False)
    assert {point: num_ops for node, point, num_ops in jobs if node == 0} == ops
    assert len(jobs) == len(ops) + 1


def test_what_is_rounded_off_is_made_up_for_by_later_jobs() -> None:
    """1.4, 2.8, 4.2 and 5 ops are done: 1, 3, 4 and 5."""
    patterns = several(({0: 0}, 1.4), ({0: 1}, 0.7), ({0: 0}, 1.4), ({0: 1}, 0.4))
    assert jobs_of(FIVE_OPS, patterns, over_gaps=True) == [(0, 0, 1), (0, 1, 2), (0, 0, 1), (0, 1, 1)]


def test_the_last_job_has_all_ops_that_are_left_and_no_job_more() -> None:
    patterns = several(({0: 0}, 2.0), ({0: 1}, 1.0))
    assert jobs_of(FIVE_OPS, patterns, over_gaps=False) == [(0, 0, 2), (0, 1, 3)]
    patterns = several(({0: 0}, 5.8), ({0: 1}, 1.0))
    assert jobs_of(FIVE_OPS, patterns, over_gaps=False) == [(0, 0, 5)]


def test_a_node_goes_on_with_its_allocation_as_one_job() -> None:
    patterns = several(({0: 0, 1: 0}, 1.0), ({0: 0}, 2.0), ({0: 0}, 1.0), ({0: 0}, 1.0))
    assert jobs_of(FIVE_OPS, patterns, over_gaps=False) == [(0, 0, 5), (1, 0, 1)]


def test_over_gaps_a_node_goes_on_behind_others_but_not_behind_jobs_of_its_own() -> None:
    patterns = several(({0: 0}, 1.0), ({1: 0}, 1.0), ({0: 0}, 4.0))
    assert jobs_of(FIVE_OPS, patterns, over_gaps=True) == [(0, 0, 5), (1, 0, 1)]
    assert jobs_of(FIVE_OPS, patterns, over_gaps=False) == [(0, 0, 1), (1, 0, 1), (0, 0, 4)]
    patterns = several(({0: 0}, 1.0), ({1: 0, 0: 1}, 1.0), ({0: 0}, 2.0))
    assert jobs_of(FIVE_OPS, patterns, over_gaps=True) == [(0, 0, 1), (1, 0, 1), (0, 1, 2), (0, 0, 2)]


def test_jobs_come_in_order_of_start() -> None:
    """b is in the second pattern and the third, a in the first and the third."""
    patterns = several(({0: 0}, 1.0), ({1: 0}, 0.5), ({1: 0, 0: 1}, 2.0))
    assert jobs_of(FIVE_OPS, patterns, over_gaps=False) == [(0, 0, 1), (1, 0, 1), (0, 1, 4)]


def sets(*names: str) -> list[Set]:
    """By letters: a is node 0."""
    return [frozenset(ord(name) - ord("a") for name in own) for own in names]


def orders(patterns: Sequence[tuple[Pattern, float]], of_sets: Sequence[Set]) -> list[list[float]]:
    """The seconds of patterns in the order that forty seeds give, each order once."""
    found = [[seconds for _, seconds in in_turn(patterns, of_sets, Random(seed))] for seed in range(40)]
    return sorted(map(list, set(map(tuple, found))))


def test_patterns_take_turns_in_the_order_of_the_sets_that_have_them() -> None:
    patterns = several(({2: 0}, 3.0), ({0: 0}, 1.0), ({1: 0, 3: 0}, 2.0))
    assert orders(patterns, sets("ad", "bd", "c")) == [[1.0, 2.0, 3.0]]


def test_a_pattern_of_several_sets_may_have_its_turn_in_each() -> None:
    patterns = several(({3: 0}, 9.0), ({0: 0}, 1.0), ({1: 0}, 2.0), ({2: 0}, 3.0))
    found = orders(patterns, sets("ad", "bd", "c"))
    assert {tuple(each) for each in found} == {
        (9.0, 1.0, 2.0, 3.0),
        (1.0, 9.0, 2.0, 3.0),
        (1.0, 2.0, 9.0, 3.0),
    }


def test_a_pattern_that_goes_on_with_more_allocations_has_its_turn_first() -> None:
    """By two more: beyond chance. By one: mostly."""
    assert 1 < CHANCE < 2
    start = ({0: 0, 1: 0, 2: 0}, 1.0)  # d is not there yet, c no more
    goes_on, half, new = ({0: 0, 1: 0, 3: 0}, 2.0), ({0: 0, 1: 1, 3: 0}, 3.0), ({0: 1, 1: 1, 3: 0}, 4.0)
    of_sets = sets("abc", "abd")
    assert orders([new, goes_on, start], of_sets) == [[1.0, 2.0, 4.0]]
    found = [[s for _, s in in_turn([half, goes_on, start], of_sets, Random(seed))] for seed in range(200)]
    assert 0 < found.count([1.0, 3.0, 2.0]) < found.count([1.0, 2.0, 3.0])


def test_a_pattern_goes_on_with_the_one_before_it() -> None:
    """The third has less of the first than the fourth, and more of the second."""
    alike = dict.fromkeys(range(4), 0)
    first, second = ({**alike, 9: 0}, 1.0), ({**alike, 5: 0, 6: 0, 7: 0, 8: 0}, 2.0)
    third = {0: 1, 1: 1, 2: 1, 3: 1, 5: 0, 6: 0, 7: 0, 8: 0}, 3.0
    fourth = {0: 0, 1: 0, 2: 1, 3: 1, 5: 1, 6: 1, 7: 1, 8: 1}, 4.0
    of_sets = sets("abcdj", "abcdfghi")
    assert orders([fourth, third, second, first], of_sets) == [[1.0, 2.0, 3.0, 4.0]]


@given(seed=st.integers(0, 10**6))
@examples(60)
def test_patterns_of_a_program_become_a_valid_schedule(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random)
    backfill = Backfill(problem)
    timed, _ = backfill.timed(random_jobs(problem, random))
    of_sets = sets_in_order(problem, timed)
    room = sum(problem.cluster.num_of_type.values())
    program = PatternProgram(problem, [1 / room] * len(problem.cluster.types), KnownPatterns())
    patterns = program.shortest(of_sets)
    turned = in_turn(patterns, of_sets, random)
    assert sorted(map(repr, turned)) == sorted(map(repr, patterns))
    jobs = jobs_of(problem, turned, over_gaps=random.random() < 0.5)
    assert what_is_wrong(problem, backfill.timed(jobs)[0]) == []
