"""A plan's slices predicted again by the profile that they were planned by: what the plan says."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from helpers.cut import cuttable
from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.types import Matrix, MetaOpProfile, Profile

NET = cuttable("t/net", 3, {12: 3.0, 6: 1.6, 4: 1.2, 3: 0.9, 2: 0.65, 1: 0.4})
OTHER = cuttable("u/net", 2, {8: 2.0, 4: 1.1, 2: 0.6, 1: 0.35})


def shared(*metaops: MetaOpProfile) -> Profile:
    """Whose devices share out optimizer state."""
    return profile_of(*metaops).model_copy(update={"optimizer_state_sharded": True})


@pytest.mark.parametrize("num_devices", [2, 3, 5])
@pytest.mark.parametrize("counts", [{}, {"t": 2}, {"t": 3, "u": 2}])
def test_micro_batches_take_what_their_shares_do(num_devices: int, counts: Mapping[str, int]) -> None:
    """Of 12 samples in two micro-batches on one device each has a share of 6, not the curve's 12."""
    profile = profile_of(NET, OTHER)
    plan = make_plan(profile, cluster_of(num_devices), micro_batches=counts)
    again = predicted_again(plan, profile)
    assert again.iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-8)
    assert again.compute_s == pytest.approx(plan.predicted.compute_s, rel=1e-8)


@pytest.mark.parametrize("level", [Sharding.GRADIENTS, Sharding.PARAMETERS, Sharding.KEPT])
@pytest.mark.parametrize(("num_devices", "counts"), [(2, {"t": 2}), (5, None)])
def test_shared_out_parameters_are_gathered_as_the_plan_says(
    level: Sharding, num_devices: int, counts: Mapping[str, int] | None
) -> None:
    profile = shared(NET, OTHER)
    cluster = cluster_of(num_devices, memory_gib=16)
    plan = make_plan(profile, cluster, effort=0, sharding={"t/net": level}, micro_batches=counts)
    again = predicted_again(plan, profile)
    assert again.iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-8)
    assert again.transfer_s == pytest.approx(plan.predicted.transfer_s, rel=1e-6)


def test_gradients_that_are_gathered_as_rows_are_summed_so() -> None:
    """A matrix of 4096 x 1024 of which 80 tokens have gradients, over a slow link."""
    matrix = Matrix(
        op=0,
        parameter="a.m.weight",
        way="rows",
        outputs=4096,
        inputs=1024,
        num_bytes=4096 * 1024 * 4,
        tokens=80,
    )
    metaop = metaop_of("a/m", 1, {1: 1.0, 2: 0.02}, param_bytes_per_op=matrix.num_bytes)
    profile = profile_of(metaop.model_copy(update={"matrices": (matrix,)}))
    plan = make_plan(profile, cluster_of(2, devices_per_node=1))
    assert plan.metaops[0].gathered
    again = predicted_again(plan, profile)
    assert again.gradient_sum_s == pytest.approx(plan.predicted.gradient_sum_s, rel=1e-6)
