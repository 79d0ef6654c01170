"""Plans for sets of tasks by any strategy."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, two_towers
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.sets.choose import by_best_strategy
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.workload.settings.types import TaskShare


def test_no_strategy_is_faster_than_spindle_in_the_mean_of_the_steps() -> None:
    """Both tasks use q, whose sum is long: the fastest plan of each set by itself has both sum it."""
    shared = {"parameters": "q", "param_bytes_per_op": 64 * 2**20}
    profile = profile_of(
        metaop_of("a/q", 1, {1: 0.01, 2: 0.007, 4: 0.0045}, **shared),
        metaop_of("b/p", 2, {1: 0.102, 2: 0.05, 4: 0.027}),
        metaop_of("b/q", 1, {1: 0.01, 2: 0.005, 4: 0.0045}, **shared),
    )
    sets = tuple(TaskShare(tasks=(task,), share=0.5) for task in "ab")
    profile = profile.model_copy(update={"task_sets": sets})
    cluster = cluster_of(4, memory_gib=400)
    plan = make_plan(profile, cluster, effort=0)
    others = [make_plan(profile, cluster, name) for name in ("sequential", "distmm", "optimus")]
    assert plan.mean_iteration_s <= min(other.mean_iteration_s for other in others)
    assert plan.strategy == "spindle" and plan.notes == (
        "No better plan was found than sequential's, so this is it.",
    )
    assert check_plan(plan, profile) == ()


def test_a_strategy_without_a_plan_is_passed_over_unless_all_are() -> None:
    _, plan = two_towers()
    tried: list[StrategyName] = []

    def make(strategy: StrategyName) -> Plan:
        tried.append(strategy)
        if strategy != "distmm":
            raise NoPlanError(f"none by {strategy}")
        return plan.model_copy(update={"strategy": strategy})

    found = by_best_strategy("spindle", cluster_of(4), make)
    assert (found.strategy, found.waves) == ("spindle", plan.waves)
    assert tried == ["spindle", "sequential", "distmm", "optimus"]
    with pytest.raises(NoPlanError, match="none by optimus"):
        by_best_strategy("optimus", cluster_of(4), make)


def test_where_no_strategy_has_a_plan_what_spindle_says_is_told() -> None:
    def make(strategy: StrategyName) -> Plan:
        raise NoPlanError(f"none by {strategy}")

    with pytest.raises(NoPlanError, match="none by spindle"):
        by_best_strategy("spindle", cluster_of(4), make)
