"""On large clusters schedules of whole groups of devices are searched for, too."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, curve_of, metaop_of, profile_of
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search import improve
from spindle_cli.plan.search.climb import Trial
from spindle_cli.plan.search.improve import group_sizes, in_groups, search
from spindle_cli.plan.search.listing import time_jobs, to_pieces
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies import spindle as strategy
from spindle_cli.plan.strategies.spindle import spindle


@pytest.mark.parametrize(
    ("num_devices", "sizes"),
    [
        (8, (1,)),
        (64, (1,)),
        (65, (1, 2)),
        (96, (1, 2)),
        (128, (1, 2, 4)),
        (255, (1, 2, 4)),
        (256, (1, 2, 4, 8)),
        (1024, (1, 8, 16, 32)),
    ],
)
def test_groups_are_powers_of_two_of_which_there_are_at_least_32_to_128(
    num_devices: int, sizes: tuple[int, ...]
) -> None:
    assert group_sizes(num_devices) == sizes


def test_a_metaop_takes_whole_groups_or_where_it_has_none_what_it_has() -> None:
    wide = metaop_of("a/wide", 4, {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0})
    narrow = metaop_of("b/narrow", 4, {1: 2.0, 2: 1.0})
    grouped = in_groups(make_problem(profile_of(wide, narrow), cluster_of(8)), 4)
    assert [[point.num_devices for point in node.points] for node in grouped.nodes] == [[4, 8], [1, 2]]


def large() -> Problem:
    """Three chains on 128 devices, each MetaOp on up to 128."""
    metaops = []
    for task, op_s in (("a", 96.0), ("b", 64.0), ("c", 150.0)):
        curve = {1 << k: op_s / (1 << k) + 0.05 for k in range(8)}
        sizes = {"batch_size": 128, "curve": curve_of(curve)}
        metaops.append(metaop_of(f"{task}/in", 6, {1: 1.0}).model_copy(update=sizes))
        metaops.append(metaop_of(f"{task}/out", 3, {1: 1.0}, inputs=(f"{task}/in",)).model_copy(update=sizes))
    return make_problem(profile_of(*metaops), cluster_of(128))


def test_what_is_found_in_groups_is_a_schedule_of_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial ends by the problem's own times when it did by those of its groups."""
    problem = large()
    bound = lower_bound(problem)
    ends: list[float] = []
    forwards = improve._forwards

    def noted(of: Problem, trial: Trial) -> tuple[tuple[int, int, int], ...]:
        ends.append(trial.end_s)
        return forwards(of, trial)

    monkeypatch.setattr(improve, "_forwards", noted)
    found = search(problem, bound, effort=2000, seed=0)
    assert len(found) == 2 * len(group_sizes(128)) * -(-improve.KEPT_PER_DIRECTION // len(group_sizes(128)))
    for jobs, end_s in zip(found, ends, strict=True):
        assert [sum(ops for node, _, ops in jobs if node == own.index) for own in problem.nodes] == [
            own.num_ops for own in problem.nodes
        ]
        by_problem_s = max(piece.end_s for piece in to_pieces(problem, time_jobs(problem, jobs)))
        assert bound.lower_bound_s <= by_problem_s <= end_s * (1 + 1e-9)
    assert ends == sorted(ends)


def test_of_the_shortest_search_the_best_four_are_candidates_and_of_longer_ones_all() -> None:
    problem = large()
    bound = lower_bound(problem)
    of_baselines, shortest, longer = spindle(problem, bound, 0)
    assert len(of_baselines) == 2
    found = search(problem, bound, strategy.SHORTEST, seed=0)
    ends = [max(piece.end_s for piece in to_pieces(problem, time_jobs(problem, jobs))) for jobs in found]
    assert [candidate.end_s for candidate in shortest] == ends[:4]
    assert len(longer) == len(found)
    _, quick = spindle(problem, bound, NO_SEARCH)
    assert len(quick) == len(found)
