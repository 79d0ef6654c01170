"""The strategies that give each task its devices once: how devices are shared out, and who runs in turn."""

from __future__ import annotations

from math import inf

import pytest
from candidates import problem_of

from helpers.plans import cluster_of, metaop_of
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.strategies.baselines import distmm, optimus, split_evenly_in_time
from spindle_cli.profile.types import MetaOpProfile


def times(**seconds: float) -> object:
    """Seconds by number of devices (`d2=3.0`), as of the largest number that there are enough for."""
    known = {int(name[1:]): value for name, value in seconds.items()}
    return lambda n: next((known[k] for k in sorted(known, reverse=True) if k <= n), inf)


@pytest.mark.parametrize(
    ("num_devices", "shares"), [(2, None), (3, [1, 2]), (4, [2, 2]), (5, [3, 2]), (6, [3, 2]), (7, [3, 4])]
)
def test_the_slowest_gets_the_fewest_devices_that_make_it_faster(
    num_devices: int, shares: list[int] | None
) -> None:
    """The second needs two at least; with three it is no faster. What makes nothing faster stays idle."""
    both = [times(d1=9.0, d2=5.0, d3=3.0), times(d2=4.0, d4=2.0)]
    assert split_evenly_in_time(both, num_devices) == shares  # type: ignore[arg-type]


def test_of_equally_slow_ones_the_first_gets_the_next_device() -> None:
    assert split_evenly_in_time([times(d1=4.0, d2=2.0)] * 2, 3) == [2, 1]  # type: ignore[list-item]


def runs(problem: Problem, candidate: Candidate) -> list[tuple[str, float, float, tuple[int, ...]]]:
    """(MetaOp, start, end, devices) in the candidate's order."""
    assert candidate.devices is not None
    return [
        (problem.nodes[piece.node].metaop.name, piece.start_s, piece.end_s, devices)
        for piece, devices in zip(candidate.pieces, candidate.devices, strict=True)
    ]


def tower(name: str, num_ops: int, one_s: float, two_s: float, *inputs: str) -> MetaOpProfile:
    return metaop_of(name, num_ops, {1: one_s, 2: two_s}, inputs=inputs)


def test_distmm_runs_the_towers_of_a_task_side_by_side_unless_in_turn_is_faster() -> None:
    """Towers of 2 x 3 s and 4 s on a device each, or 2 x 2.5 and 3 s on both: 6 against 8 s. The second
    task's scale well: 5 and 4 s against 2.6 + 2.2.
    """
    problem = problem_of(
        cluster_of(2),
        tower("a/v", 2, 3.0, 2.5),
        tower("a/t", 1, 4.0, 3.0),
        tower("a/loss", 1, 1.0, 0.75, "a/v", "a/t"),
        tower("b/v", 1, 5.0, 2.6),
        tower("b/t", 1, 4.0, 2.2),
    )
    candidate = distmm(problem)
    assert runs(problem, candidate) == [
        ("a/v", 0.0, 6.0, (0,)),
        ("a/t", 0.0, 4.0, (1,)),
        ("a/loss", 6.0, 6.75, (0, 1)),
        ("b/v", 6.75, pytest.approx(9.35), (0, 1)),
        ("b/t", pytest.approx(9.35), pytest.approx(11.55), (0, 1)),
    ]
    assert candidate.after == (0, 0, 2, 3, 4)


def test_distmm_runs_in_turn_what_takes_as_long_side_by_side() -> None:
    problem = problem_of(cluster_of(2), tower("a/v", 1, 4.0, 2.0), tower("a/t", 1, 4.0, 2.0))
    assert [run[1:] for run in runs(problem, distmm(problem))] == [(0.0, 2.0, (0, 1)), (2.0, 4.0, (0, 1))]


def test_distmm_takes_tasks_after_those_whose_outputs_they_take() -> None:
    """The second task of the file hands on to the first; their MetaOps are of different groups."""
    problem = problem_of(cluster_of(2), tower("a/v", 1, 2.0, 1.0, "b/v"), tower("b/v", 1, 2.0, 1.0))
    assert [run[0] for run in runs(problem, distmm(problem))] == ["b/v", "a/v"]


def test_optimus_deals_the_longest_task_first_and_lets_the_rest_take_turns() -> None:
    """Tasks of 5, 3, 3 and 1 s on two devices: 5 + 1 beside 3 + 3."""
    problem = problem_of(
        cluster_of(2),
        *(metaop_of(f"{task}/m", 1, {1: s}) for task, s in zip("abcd", (3, 1, 5, 3), strict=True)),
    )
    found = {name: (start, end, devices) for name, start, end, devices in runs(problem, optimus(problem))}
    assert found == {
        "b/m": (0.0, 1.0, (0,)),
        "c/m": (1.0, 6.0, (0,)),
        "a/m": (0.0, 3.0, (1,)),
        "d/m": (3.0, 6.0, (1,)),
    }


def test_optimus_counts_work_as_seconds_times_the_fewest_devices() -> None:
    """2 x 2 s on two devices is more than 3 s on one: it is dealt out first, and 3 + 1 go together."""
    problem = problem_of(
        cluster_of(3),
        metaop_of("a/m", 1, {1: 3.0}),
        metaop_of("b/m", 2, {2: 2.0}),
        metaop_of("c/m", 1, {1: 1.0}),
    )
    found = runs(problem, optimus(problem))
    assert {name: end - start for name, start, end, _ in found} == {"a/m": 3.0, "b/m": 4.0, "c/m": 1.0}
    assert max(end for _, _, end, _ in found) == 4.0


def test_optimus_makes_what_takes_from_another_task_s_lane_wait_for_it() -> None:
    problem = problem_of(
        cluster_of(2),
        metaop_of("a/m", 1, {1: 2.0}),
        metaop_of("b/m", 1, {1: 1.0}),
        metaop_of("b/n", 1, {1: 1.0}, inputs=("b/m", "a/m")),
    )
    assert sorted(runs(problem, optimus(problem))) == [
        ("a/m", 0.0, 2.0, (0,)),
        ("b/m", 0.0, 1.0, (1,)),
        ("b/n", 2.0, 3.0, (1,)),
    ]
