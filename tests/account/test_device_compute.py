"""What each device computes by the times of its plan: hand-solved."""

from __future__ import annotations

import pytest

from helpers.cut import cuttable
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.several_types import cluster_of_types, metaop_on_types, plan_in_rows
from helpers.uneven import uneven_plan
from spindle_cli.account.device.compute import compute_of_devices
from spindle_cli.account.traffic import traffic_of
from spindle_cli.costs.share_times import times_of_share
from spindle_cli.files.cluster import GroupLinks, Link
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import OpMemory, ProcessorCosts
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Activity

FAST, SLOW = "a100-80gb", "v100-32gb"
KEEPING_8_GB = OpMemory(
    kept_bytes=(0, 8 * 10**9), forward_bytes=(0, 0), backward_bytes=(0, 0), first_backward_bytes=(0, 0)
)


def seconds(plan: Plan) -> tuple[float, ...]:
    return compute_of_devices(plan, traffic_of(plan))


def test_a_device_computes_its_own_share_on_its_own_type() -> None:
    net = metaop_on_types("t/net", 3, {FAST: 1.0, SLOW: 3.0})
    assert seconds(plan_in_rows(net, (0, 6, 8))) == pytest.approx((3 * 6 * 1.0, 3 * 2 * 3.0))
    assert seconds(plan_in_rows(net, (0, 7, 8))) == pytest.approx((21.0, 9.0))


def test_what_is_computed_again_is_a_third_more() -> None:
    net = metaop_on_types("t/net", 3, {FAST: 1.0, SLOW: 3.0})
    assert seconds(plan_in_rows(net, (0, 6, 8), recompute=True)) == pytest.approx((24.0, 24.0))


def test_of_one_type_devices_compute_what_their_slices_last() -> None:
    _, plan = two_towers()
    expected = [0.0] * 4
    for piece in plan.slices:
        for device in piece.devices:
            expected[device] += piece.end_s - piece.start_s
    assert seconds(plan) == pytest.approx(expected)


def test_a_processor_does_its_other_work_too_each_by_its_own_samples() -> None:
    """It reads 6 and 2 samples; beside that a sum and its losses go over both alike."""
    net = metaop_on_types("t/net", 3, {FAST: 1.0, SLOW: 3.0}, field_bytes={0: 8}, parameters=None)
    plan = plan_in_rows(net, (0, 6, 8)).model_copy(update={"processor": ProcessorCosts(load_s={"t": 0.5})})
    assert seconds(plan) == pytest.approx((18 + 3.0, 18 + 1.0))


def test_of_one_type_a_share_that_is_not_known_counts_as_the_largest() -> None:
    net = cuttable("t/net", 2, {8: 9.0, 6: 6.0, 2: 2.5})
    assert seconds(uneven_plan(net, (0, 6, 8))) == pytest.approx((12.0, 5.0))
    assert seconds(uneven_plan(net, (0, 7, 8))) == pytest.approx((15.0, 15.0))


def test_a_share_of_several_devices_is_of_the_type_of_all_of_them() -> None:
    """Of two pairs, the first fast."""
    net = metaop_on_types("t/net", 1, {FAST: 1.0, SLOW: 3.0})
    net = net.model_copy(update={"shares": tuple(each.model_copy(update={"tp": 2}) for each in net.shares)})
    piece = slice_of(metaop_of("t/net", 1, {4: 1.0}), (0, 1), (0, 1, 2, 3), 0.0)
    pair = piece.model_copy(update={"dp": 2, "tp": 2})
    cluster = cluster_of_types({FAST: 2, SLOW: 2})
    found = [times_of_share(net, pair, share, cluster) for share in range(2)]
    assert [each and each.forward_s + each.backward_s for each in found] == pytest.approx([4.0, 12.0])


def test_devices_without_a_slice_compute_nothing() -> None:
    net = metaop_of("t/net", 2, {1: 3.0})
    plan = plan_of(profile_of(net), cluster_of(2), [(slice_of(net, (0, 2), (1,), 0.0),)])
    assert seconds(plan) == (0.0, 6.0)


def test_a_device_waits_for_its_own_copies_and_the_slice_for_the_last_ones() -> None:
    """Three ops of 2 s and 4 s on both types, of which the first is moved. The fast device copies 6 of 8 GB
    at 1 GB/s: out until 2 + 6, 2 s behind the last op; back in 6 s of the other ops' 8. The slow one copies 2
    at 0.2: out until 2 + 10, and back 2 s longer than these take.
    """
    net = metaop_on_types("t/net", 3, {FAST: 1.0, SLOW: 3.0}, memory=(KEEPING_8_GB,))
    plan = plan_in_rows(net, (0, 6, 8))
    (wave,) = plan.waves
    moved = wave.slices[0].model_copy(update={"offload": ((0, 1),)})
    links = [GroupLinks(host=Link(latency_us=0, bandwidth_gb_per_s=speed)) for speed in (1.0, 0.2)]
    nodes = tuple(
        group.model_copy(update={"links": own}) for group, own in zip(plan.cluster.nodes, links, strict=True)
    )
    changes = {
        "cluster": plan.cluster.changed(nodes=nodes),
        "waves": (wave.model_copy(update={"slices": (moved,)}),),
    }
    made = plan.model_copy(update=changes)
    assert seconds(made) == pytest.approx((18 + 2.0, 18 + 6.0 + 2.0))
    lasts = {
        activity: [span.end_s - span.start_s for span in simulate(made).spans if span.activity is activity]
        for activity in (Activity.FORWARD, Activity.BACKWARD)
    }
    assert lasts[Activity.FORWARD] == pytest.approx([6 + 6] * 2)
    assert lasts[Activity.BACKWARD] == pytest.approx([12 + 2] * 2)
