"""What each device computes by the times of its plan: hand-solved."""

from __future__ import annotations

import pytest

from helpers.cut import cuttable
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.several_types import cluster_of_types, metaop_on_types, plan_in_rows, profile_on_types
from helpers.uneven import uneven_plan
from spindle_cli.account.compute import compute_of_devices
from spindle_cli.account.traffic import traffic_of
from spindle_cli.costs.shares import times_of_share
from spindle_cli.files.cluster import GroupLinks, Link
from spindle_cli.plan.placing import passes
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import OpMemory, ProcessorCosts
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Activity

FAST, SLOW = "a100-80gb", "v100-32gb"
KEEPING_8_GB = OpMemory(
    kept_bytes=(0, 8 * 10**9), forward_bytes=(0, 0), backward_bytes=(0, 0), first_backward_bytes=(0, 0)
)

NET = metaop_on_types("t/net", 3, {FAST: 1.0, SLOW: 3.0}, memory=(KEEPING_8_GB,))


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
    made = moving_the_first((0, 6, 8), 1.0, 0.2)
    assert seconds(made) == pytest.approx((18 + 2.0, 18 + 6.0 + 2.0))
    assert lasts(made) == [pytest.approx([6 + 6] * 2), pytest.approx([12 + 2] * 2)]


def test_a_share_that_is_through_early_has_longer_for_its_copies_in_all_accounts() -> None:
    """The fast device takes 7/3 s and 14/3 s for each op's 7 samples, the slow one 1 s and 2 s for one, which
    keeps 1 GB: its copy is out after 1 + 6.5 s, half a second behind the fast one's ops, and back in time.
    """
    made = moving_the_first((0, 7, 8), 1000.0, 1 / 6.5)
    assert seconds(made) == pytest.approx((21, 9 + 4.5 + 2.5))
    assert lasts(made) == [pytest.approx([7.5] * 2), pytest.approx([14] * 2)]
    problem = make_problem(profile_on_types(NET), made.cluster)
    (piece,) = made.slices
    waits = passes._stalls(problem, piece)
    assert (waits.forward_s, waits.backward_s) == (pytest.approx(0.5), 0)


def moving_the_first(rows: tuple[int, ...], fast_gb_per_s: float, slow_gb_per_s: float) -> Plan:
    """Three ops that keep 8 GB, on a device of each type; the first one's are moved."""
    plan = plan_in_rows(NET, rows)
    (wave,) = plan.waves
    moved = wave.slices[0].model_copy(update={"offload": ((0, 1),)})
    links = [
        GroupLinks(host=Link(latency_us=0, bandwidth_gb_per_s=speed))
        for speed in (fast_gb_per_s, slow_gb_per_s)
    ]
    nodes = tuple(
        group.model_copy(update={"links": own}) for group, own in zip(plan.cluster.nodes, links, strict=True)
    )
    waves = (wave.model_copy(update={"slices": (moved,)}),)
    return plan.model_copy(update={"cluster": plan.cluster.changed(nodes=nodes), "waves": waves})


def lasts(plan: Plan) -> list[list[float]]:
    """Seconds of the simulated forward pass on each device, and of the backward pass."""
    spans = simulate(plan).spans
    return [
        [span.end_s - span.start_s for span in spans if span.activity is activity]
        for activity in (Activity.FORWARD, Activity.BACKWARD)
    ]
