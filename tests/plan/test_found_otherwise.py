"""Plans where nothing fits that was looked for: another strategy's, or on fewer nodes."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan import make as planner
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.find_as_requested import find_as_requested
from spindle_cli.plan.best.otherwise import found_otherwise
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import MetaOpProfile, ShareTime
from spindle_cli.simulate.run import simulate


def net_of(name: str, num_ops: int, sample_s: float) -> MetaOpProfile:
    """A batch of 8, whose shares take so long for each sample."""
    shares = tuple(
        ShareTime(
            samples=samples,
            forward_s=samples * sample_s / 3,
            backward_s=samples * sample_s * 2 / 3,
            source="measured",
        )
        for samples in (1, 2, 4, 8)
    )
    return metaop_of(name, num_ops, {1: 8 * sample_s, 2: 4 * sample_s}, shares=shares)


PROFILE = profile_of(net_of("t/net", 4, 0.25), net_of("t/head", 1, 0.125))


def odd() -> Cluster:
    """A node of one device, and one of two."""
    (group,) = cluster_of(1).nodes
    return cluster_of(1).changed(nodes=(group, group.model_copy(update={"devices": 2, "name": "pair"})))


@pytest.mark.parametrize("counts", [None, {"t": 2}])
def test_a_node_stays_idle_where_no_plan_fits_with_it(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, int] | None
) -> None:
    """The plan is that of the others by themselves, whole or in micro-batches."""

    def on_fewer(profile: object, cluster: Cluster, *request: object) -> PlanResult | None:
        return None if cluster.num_devices == 3 else find_as_requested(profile, cluster, *request)  # type: ignore[arg-type]

    alone = make_plan(PROFILE, cluster_of(2), effort=0, micro_batches=counts)
    monkeypatch.setattr(planner, "find_as_requested", on_fewer)
    plan = make_plan(PROFILE, odd(), effort=0, micro_batches=counts)
    assert {device for piece in plan.slices for device in piece.devices} == {1, 2}
    assert plan.notes[0] == "1 device stays idle: no plan that was looked for fits with all of them."
    assert (plan.micro_batches, plan.predicted.compute_s) == (counts or {}, alone.predicted.compute_s)
    assert check_plan(plan, PROFILE) == ()
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.03)


def test_another_strategy_is_asked_where_spindle_finds_nothing() -> None:
    tried: list[StrategyName] = []

    def find(cluster: Cluster, request: PlanRequest) -> PlanResult | None:
        tried.append(request.strategy)
        if request.strategy == "distmm":
            raise NoPlanError("none by distmm")
        return find_as_requested(PROFILE, cluster, request) if request.strategy == "sequential" else None

    found = found_otherwise(PROFILE, cluster_of(2), PlanRequest(), find)
    assert found is not None and found.best.strategy == "sequential"
    assert tried == ["sequential", "distmm", "optimus"]
    assert found_otherwise(PROFILE, cluster_of(2), PlanRequest("optimus"), find) is None


def test_where_a_user_has_parameters_shared_out_by_all_no_node_stays_idle() -> None:
    def find(cluster: Cluster, request: PlanRequest) -> PlanResult | None:
        return None if cluster.num_devices == 3 else find_as_requested(PROFILE, cluster, request)

    request = PlanRequest(sharding={"t/net": Sharding.PARAMETERS})
    assert found_otherwise(PROFILE, odd(), request, find) is None
