"""The linear program: hand-solved cases, the paper's bisection on one level, what its duals say."""

from __future__ import annotations

import pytest
from random_profiles import random_profile

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.plan.bound.bound import Bound, lower_bound
from spindle_cli.plan.bound.pricing import hull
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.profile.types import MetaOpProfile

LINEAR = {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}


def bound_of(num_devices: int, *metaops: MetaOpProfile) -> Bound:
    return lower_bound(make_problem(profile_of(*metaops), cluster_of(num_devices)))


def test_one_metaop_takes_all_devices() -> None:
    bound = bound_of(8, metaop_of("a/m", 5, LINEAR))
    assert bound.lower_bound_s == pytest.approx(5.0)
    assert bound.ops == ((((1.0, (8.0,)), pytest.approx(5.0)),),)


def test_the_solver_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """What plans are printed beside, as JSON too, is nobody else's."""
    bound_of(2, metaop_of("a/m", 5, LINEAR))
    assert tuple(capfd.readouterr()) == ("", "")


def test_work_is_what_binds_side_by_side() -> None:
    """Two MetaOps of 8 device-seconds an op and 5 ops each: 80 device-seconds on 8 devices."""
    bound = bound_of(8, metaop_of("a/m", 5, LINEAR), metaop_of("b/m", 5, LINEAR))
    assert bound.lower_bound_s == pytest.approx(10.0)
    assert tuple(bound.device_value_s.values()) == pytest.approx((10.0 / 8,))


def test_a_chain_is_what_binds_where_nothing_scales() -> None:
    flat = {1: 1.0, 2: 0.9}
    first, second = metaop_of("a/m", 5, flat), metaop_of("a/n", 10, flat, inputs=("a/m",))
    bound = bound_of(8, first, second)
    assert bound.lower_bound_s == pytest.approx(13.5)
    assert tuple(bound.device_value_s.values()) == pytest.approx((0.0,))
    assert bound.critical == pytest.approx((1.0, 1.0))
    assert bound.start_s[1] == pytest.approx(4.5)


def test_an_allocation_mixes_two_neighbours() -> None:
    """3 devices for two equal MetaOps: 1.5 each on average, so half of the time on 1 and half on 2."""
    curve = {1: 4.0, 2: 2.0}
    bound = bound_of(3, metaop_of("a/m", 6, curve), metaop_of("b/m", 6, curve))
    assert bound.lower_bound_s == pytest.approx(16.0)
    for allocation in bound.ops:
        assert sum(ops for _, ops in allocation) == pytest.approx(6.0)
        assert sum(column.op_s * ops for column, ops in allocation) <= 16.0 + 1e-6


def test_what_mixes_of_others_equal_is_no_corner() -> None:
    """Slower one after another: 2 costs what half of 1 and half of 3 do, 4 no less than 3."""
    assert hull([1.0, 2.0, 3.0, 4.0, 6.0], [9.0, 7.0, 5.0, 5.0, 4.9]) == [0, 2, 4]
    assert hull([1.0, 2.0, 3.0], [9.0, 6.9, 5.0]) == [0, 1, 2]
    assert hull([], []) == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_devices", [4, 16])
def test_on_one_level_it_is_the_papers_bisection(seed: int, num_devices: int) -> None:
    problem = make_problem(random_profile(seed, "wide"), cluster_of(num_devices))
    assert lower_bound(problem).lower_bound_s == pytest.approx(bisected_s(problem), rel=1e-6)


def bisected_s(problem: Problem) -> float:
    """The smallest time in which every MetaOp can end on its own, and all of them fit the device-seconds."""
    low, high = 0.0, problem.serial_s
    for _ in range(60):
        middle = (low + high) / 2
        work = sum(
            cheapest_within(node.num_ops, [(p.num_devices, p.op_s) for p in node.points], middle)
            for node in problem.nodes
        )
        low, high = (low, middle) if work <= problem.num_devices * middle else (middle, high)
    return high


def cheapest_within(num_ops: int, points: list[tuple[int, float]], limit_s: float) -> float:
    """Fewest device-seconds of so many ops in sequence within a time: the best of all mixes of two points."""
    best = float("inf")
    for n, op_s in points:
        for other, other_s in points:
            if num_ops * op_s > limit_s:
                continue
            # As many ops on the slower, cheaper point as the time allows.
            share = 1.0 if other_s <= op_s else min(1.0, (limit_s / num_ops - op_s) / (other_s - op_s))
            work = num_ops * ((1 - share) * n * op_s + share * other * other_s)
            best = min(best, work)
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", ["deep", "levels", "merging"])
def test_one_more_device_is_worth_at_most_its_dual_value(seed: int, shape: str) -> None:
    profile = random_profile(seed, shape)  # type: ignore[arg-type]
    now, more = (lower_bound(make_problem(profile, cluster_of(n))) for n in (11, 12))
    gain_s = now.lower_bound_s - more.lower_bound_s
    assert -1e-9 <= gain_s <= sum(now.device_value_s.values()) * (1 + 1e-6)
    # ... and the next one no more than this one, up to newly valid allocations of 12 devices.
    fewer = lower_bound(make_problem(profile, cluster_of(10))).lower_bound_s
    assert fewer >= now.lower_bound_s
