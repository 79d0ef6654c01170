"""What is left out where plans of replica groups are faster, or another kind of plan is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import pytest

from helpers.plans import cluster_of
from plan.test_replica_groups import NOTHING, net, sharing
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.find_as_requested import find_as_requested
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.replica_groups.find import REPLICA_GROUPS_FIRST, InReplicaGroups
from spindle_cli.plan.replica_groups.planner import ReplicaGroupsPlanner
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.units import MIB

PARAMETERS = Sharding.PARAMETERS
SHORT = cluster_of(4, memory_gib=2300 / 1024)


def two_nets() -> Profile:
    return sharing(net("a/net"), net("b/net"))


def keeping(name: str, activation_mib: int) -> MetaOpProfile:
    """10 ops that share small parameters, and keep so much each."""
    kept = (0, activation_mib * MIB)
    memory = NOTHING.model_copy(update={"kept_bytes": kept, "forward_bytes": kept})
    return net(name, memory=(memory,), param_bytes_per_op=MIB, activation_bytes_per_op=kept[1])


@cache
def without_replica_groups() -> PlanResult:
    """A plan that no replica group shares out."""
    found = find_as_requested(two_nets(), SHORT, PlanRequest())
    assert found is not None
    return found


def taking(seconds: float) -> PlanResult:
    """A plan that is predicted to take so long."""
    found = without_replica_groups()
    return replace(
        found, best=replace(found.best, prediction=replace(found.best.prediction, iteration_s=seconds))
    )


def in_replica_groups(
    monkeypatch: pytest.MonkeyPatch, simulated_s: dict[float, float], planned_s: list[float | None]
) -> tuple[InReplicaGroups, list[float]]:
    """Whose planners find plans that are predicted to take so long, one after another, and what they were
    asked to beat.

    Args:
        simulated_s: seconds of each plan by simulation, by those that are predicted.
    """
    plans = iter([None if seconds is None else taking(seconds) for seconds in planned_s])
    request: list[float] = []

    def planned(_: object, than_s: float) -> PlanResult | None:
        request.append(than_s)
        return next(plans)

    monkeypatch.setattr(ReplicaGroupsPlanner, "planned", planned)
    monkeypatch.setattr(ReplicaGroupsPlanner, "lower_bound_s", 1.0)
    monkeypatch.setattr(
        "spindle_cli.plan.replica_groups.find._planners",
        lambda *_: [object.__new__(ReplicaGroupsPlanner)] * 2,
    )

    def of(found: PlanResult) -> float:
        return simulated_s[found.best.prediction.iteration_s]

    return InReplicaGroups(two_nets(), SHORT, PlanRequest(), 5.0, of), request


def test_replica_groups_are_as_fast_as_the_later_of_prediction_and_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica_groups, request = in_replica_groups(monkeypatch, {10.0: 12.0, 11.0: 11.5}, [10.0, 11.0])
    assert replica_groups.or_less_s(inf) == 11.5
    assert request == [inf, 12.0]
    assert replica_groups.or_less_s(11.4) == 11.4
    found = replica_groups.or_better(None)
    assert found is not None and found.best.prediction.iteration_s == 11.0
    assert len(request) == 2  # made once


def test_of_replica_groups_no_more_is_asked_than_to_be_faster_than_what_was_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica_groups, request = in_replica_groups(monkeypatch, {}, [None, None])
    assert replica_groups.or_less_s(20.0) == 20.0
    assert request == [20.0, 20.0]
    assert replica_groups.or_better(None) is None


def test_replica_groups_whose_bound_is_no_less_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    replica_groups, request = in_replica_groups(monkeypatch, {}, [])
    monkeypatch.setattr(ReplicaGroupsPlanner, "lower_bound_s", 6.0)
    assert replica_groups.or_less_s(6.0) == 6.0
    assert request == []


@pytest.mark.parametrize(
    ("known_s", "replica_groups_s"),
    [
        (5.0 * REPLICA_GROUPS_FIRST, 5.0 * REPLICA_GROUPS_FIRST),
        (5.0 * REPLICA_GROUPS_FIRST + 0.01, 5.2),
        (inf, 5.2),
    ],
)
def test_replica_groups_are_planned_before_others_where_these_are_far_from_the_bound(
    monkeypatch: pytest.MonkeyPatch, known_s: float, replica_groups_s: float
) -> None:
    replica_groups, _ = in_replica_groups(monkeypatch, {5.2: 5.2, 5.3: 5.3}, [5.2, None])
    assert replica_groups.or_less_s(known_s) == replica_groups_s
    found = replica_groups.or_better(replace(taking(5.3), is_short=True))
    assert found is not None and found.best.prediction.iteration_s == 5.2


@pytest.mark.parametrize(
    ("predicted_s", "simulated_s", "is_taken"),
    [(10.0, 10.9, True), (10.0, 11.0, False), (12.0, 10.0, False), (10.9, 9.0, True)],
)
def test_replica_groups_are_taken_where_they_are_faster_by_prediction_and_by_simulation(
    monkeypatch: pytest.MonkeyPatch, predicted_s: float, simulated_s: float, *, is_taken: bool
) -> None:
    other = replace(taking(11.0), is_short=True)
    replica_groups, _ = in_replica_groups(
        monkeypatch, {predicted_s: simulated_s, 11.0: 11.0}, [predicted_s, None]
    )
    assert (replica_groups.or_better(other) is not other) is is_taken


def test_no_replica_groups_are_planned_where_memory_is_ample_or_something_else_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing asks for replica groups")

    monkeypatch.setattr(ReplicaGroupsPlanner, "planned", refuse)
    assert make_plan(two_nets(), cluster_of(4, memory_gib=64)).predicted.iteration_s > 0
    replica_groups = InReplicaGroups(
        two_nets(), SHORT, PlanRequest(sharding={"net": PARAMETERS}), 1.0, lambda _: 0.0
    )
    assert replica_groups.or_less_s(3.0) == 3.0
    assert replica_groups.or_better(None) is None


def test_where_memory_is_short_what_is_not_faster_than_another_kind_of_plan_is_left_out() -> None:
    """On one device 5,000 MiB of activations have to be recomputed."""
    profile, tight = sharing(keeping("a/net", 500)), cluster_of(1, memory_gib=3)
    found = find_as_requested(profile, tight, PlanRequest(effort=0))
    assert found is not None and found.is_short
    seconds = found.best.prediction.iteration_s
    request: list[float] = []

    def or_less_s(known_s: float) -> float:
        request.append(known_s)
        return min(known_s, 0.9 * seconds)

    assert find_as_requested(profile, tight, PlanRequest(effort=0), or_less_s) is None
    assert request == [pytest.approx(seconds)]
    assert (
        find_as_requested(profile, cluster_of(1, memory_gib=64), PlanRequest(effort=0), or_less_s) is not None
    )
    assert len(request) == 1  # with room nobody is asked


@pytest.mark.long
@pytest.mark.parametrize(
    ("activation_mib", "memory_gib", "is_of_replica_groups", "recomputes"),
    [(300, 1.5, True, False), (300, 1.0, True, True), (500, 0.5, False, True)],
)
def test_leaving_out_what_replica_groups_beat_changes_no_plan(
    monkeypatch: pytest.MonkeyPatch,
    activation_mib: int,
    memory_gib: float,
    *,
    is_of_replica_groups: bool,
    recomputes: bool,
) -> None:
    """Neither where replica groups win nor where another kind of plan does; something recomputes in
    either.
    """
    profile = sharing(*(keeping(f"{task}/net", activation_mib) for task in "ab"))
    cluster = cluster_of(4, memory_gib=memory_gib)
    plan = make_plan(profile, cluster)
    assert any("replica groups of 2" in note for note in plan.notes) is is_of_replica_groups
    assert any("recomputed" in note for note in plan.notes) is recomputes
    monkeypatch.setattr(InReplicaGroups, "or_less_s", lambda _, known_s: known_s)
    assert make_plan(profile, cluster).slices == plan.slices
