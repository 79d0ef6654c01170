"""FLOP/s of the whole cluster over a simulated step: solved by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cut import cuttable, shares_of
from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from helpers.random_plans import plans
from helpers.uneven import uneven_plan
from spindle_cli.costs.flops import flops_by_metaop
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint, MetaOpProfile
from spindle_cli.report.build import flops_over_time, step_flops
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Activity, Span

GIGA = 10**9


def two_slices(**of_short: object) -> Plan:
    """Two tasks that share nothing, an op's forward pass 1 s and backward pass 2 s, on devices 0-1 and 2 of
    three: `a/long` has 2 ops of 4 GFLOP forward, `b/short` one of 3 GFLOP.
    """
    long = metaop_of("a/long", 2, {2: 3.0}, flops_per_op=4.0 * GIGA)
    short = metaop_of("b/short", 1, {1: 3.0}, flops_per_op=3.0 * GIGA).model_copy(update=of_short)
    wave = (slice_of(long, (0, 2), (0, 1), 0.0), slice_of(short, (0, 1), (2,), 0.0))
    return plan_of(profile_of(long, short), cluster_of(3), [wave])


def steps_of(plan: Plan) -> list[tuple[float, float]]:
    """Seconds, to the tenth of a millisecond, and GFLOP/s from then on."""
    steps = flops_over_time(simulate(plan))
    assert steps is not None
    return [(round(step.at_s, 4), step.flops_per_s / GIGA) for step in steps]


def test_two_slices_of_different_lengths_add_up_while_both_run() -> None:
    """Forward 2 s and 1 s, backward 4 s and 2 s, twice the operations in twice the time: `a` does 4 GFLOP/s,
    `b` 3. `b` begins its backward pass at 1 s and is through at 3.
    """
    assert steps_of(two_slices()) == [(0.0, 7.0), (3.0, 4.0), (6.0, 0.0)]
    assert step_flops(two_slices()) == 3 * (2 * 4 + 3) * GIGA


def test_backward_passes_of_what_trains_nothing_do_nothing_but_take_their_time() -> None:
    """`b` is frozen: its backward pass from 1 to 3 s has no operations."""
    assert steps_of(two_slices(trainable_fraction=0.0)) == [(0.0, 7.0), (1.0, 4.0), (6.0, 0.0)]
    # A third of the parameters trained: 1 + 1/3 products backward for each forward, over 2 s.
    thirds = steps_of(two_slices(trainable_fraction=1 / 3))
    assert thirds == [(0.0, 7.0), (1.0, pytest.approx(4 + 3 * (4 / 3) / 2)), (3.0, 4.0), (6.0, 0.0)]


def test_a_pass_that_takes_no_time_is_left_out() -> None:
    """`b`'s forward pass: its backward pass from 0 to 2 s."""
    point = CurvePoint(num_devices=1, dp=1, forward_s=0.0, backward_s=2.0, source="measured")
    data = two_slices(curve=(point,)).model_dump(mode="json", by_alias=True)
    data["waves"][0]["slices"][1]["end_s"] = 2.0
    assert steps_of(Plan.from_data(data, where="test")) == [(0.0, 7.0), (2.0, 4.0), (6.0, 0.0)]


def test_what_is_computed_again_takes_time_and_counts_for_nothing() -> None:
    """`a` recomputes: 6 s backward for the same 16 GFLOP."""
    plan = two_slices()
    data = plan.model_dump(mode="json", by_alias=True)
    data["waves"][0]["slices"][0].update(recompute=True, end_s=8.0)
    data["waves"][0]["end_s"] = 8.0
    again = Plan.from_data(data, where="test")
    slower = pytest.approx(16 / 6)
    assert steps_of(again) == [(0.0, 7.0), (2.0, pytest.approx(3 + 16 / 6)), (3.0, slower), (8.0, 0.0)]
    assert step_flops(again) == step_flops(plan)


def apart(first: MetaOpProfile, second: MetaOpProfile, cluster: Cluster) -> Plan:
    """Version 2: two tasks on device 0, the first forward and backward, then the second."""
    plan = plan_of(
        profile_of(first, second),
        cluster,
        [[slice_of(first, (0, 1), (0,), 0.0)], [slice_of(second, (0, 1), (0,), 3.0)]],
    )
    data = plan.model_dump(mode="json", by_alias=True)
    data["schema"] = "spindle.plan/2"
    for wave, at_s in zip(data["waves"], (0.0, 3.0), strict=True):
        wave.update(start_s=at_s, end_s=at_s + 1)
        wave["slices"][0].update(
            start_s=at_s, end_s=at_s + 1, backward_start_s=at_s + 1, backward_end_s=at_s + 3
        )
    return Plan.from_data(data, where="test")


def test_a_plan_of_version_2_is_shown_in_its_own_order() -> None:
    """Forward and backward of 2 GFLOP/s, then of 5; all forward first it would be 2, 5, 5, 2."""
    first, second = (
        metaop_of(f"{task}/net", 1, {1: 3.0}, flops_per_op=flops * GIGA)
        for task, flops in (("a", 2.0), ("b", 5.0))
    )
    plan = apart(first, second, cluster_of(1))
    assert steps_of(plan) == [(0.0, 2.0), (3.0, 5.0), (6.0, 0.0)]
    mirrored = plan_of(
        profile_of(first, second),
        cluster_of(1),
        [[slice_of(first, (0, 1), (0,), 0.0)], [slice_of(second, (0, 1), (0,), 3.0)]],
    )
    assert steps_of(mirrored) == [(0.0, 2.0), (1.0, 5.0), (4.0, 2.0), (6.0, 0.0)]


def test_while_all_wait_for_what_is_on_its_way_there_is_nothing() -> None:
    """100 MB over 0.1 GB/s from one host to the other, there and back: 1 s of nothing each."""
    links = Links(
        intra_node=Link(latency_us=0, bandwidth_gb_per_s=5),
        inter_node=Link(latency_us=0, bandwidth_gb_per_s=0.1),
    )
    group = NodeGroup(count=2, devices=1, device="cpu", memory_gib=8)
    cluster = Cluster(name="slow", nodes=(group,), links=links)
    nothing = {"parameters": None, "param_bytes_per_op": 0}
    maker = metaop_of("a/maker", 1, {1: 3.0}, flops_per_op=2.0 * GIGA)
    maker = maker.model_copy(update={"output_bytes": 10**8})
    taker = metaop_of("a/taker", 1, {1: 1.5}, inputs=("a/maker",), flops_per_op=4.0 * GIGA, **nothing)
    waves = [[slice_of(maker, (0, 1), (0,), 0.0)], [slice_of(taker, (0, 1), (1,), 3.0)]]
    plan = plan_of(profile_of(maker, taker), cluster, waves)
    found = steps_of(plan)
    assert [rate for _, rate in found] == [2.0, 0.0, 8.0, 0.0, 2.0, 0.0]
    assert [at_s for at_s, _ in found] == pytest.approx([0, 1, 2, 3.5, 4.5, 6.5], abs=2e-3)


def test_a_pass_that_stops_for_parameters_does_its_work_in_what_is_left_of_its_time() -> None:
    """3 GFLOP forward in 1 s and 2 s, with a second in between; 6 GFLOP backward in 6 s."""
    net = metaop_of("a/net", 1, {1: 9.0}, flops_per_op=3.0 * GIGA)
    plan = plan_of(profile_of(net), cluster_of(1), [[slice_of(net, (0, 1), (0,), 0.0)]])
    times = ((Activity.FORWARD, 0.0, 1.0), (Activity.FORWARD, 2.0, 4.0), (Activity.BACKWARD, 4.0, 10.0))
    spans = tuple(Span(0, activity, 0, start_s, end_s) for activity, start_s, end_s in times)
    steps = flops_over_time(replace(simulate(plan), step_s=10.0, spans=spans))
    assert steps is not None
    assert [(step.at_s, step.flops_per_s) for step in steps] == [
        (0.0, GIGA),
        (1.0, 0),
        (2.0, GIGA),
        (10.0, 0),
    ]


def test_each_batch_of_a_step_counts() -> None:
    plan = two_slices().model_copy(update={"accumulate": 2})
    assert steps_of(plan)[0] == (0.0, 7.0)
    assert steps_of(plan)[-1] == (12.0, 0.0)
    assert step_flops(plan) == 2 * 3 * (2 * 4 + 3) * GIGA


def test_where_one_metaop_is_not_counted_nothing_is_said() -> None:
    plan = two_slices(flops_per_op=None)
    assert flops_over_time(simulate(plan)) is None
    assert step_flops(plan) is None


@examples(20)
@given(plans(), st.integers(1, 1000))
def test_what_is_shown_is_all_that_is_done_and_ends_with_nothing(plan: Plan, giga: int) -> None:
    """Seconds times FLOP/s are the operations of the step."""
    metaops = tuple(
        each.model_copy(update={"flops_per_op": float(giga * GIGA * number)})
        for number, each in enumerate(plan.metaops, 1)
    )
    counted = plan.model_copy(update={"metaops": metaops})
    simulation = simulate(counted)
    steps = flops_over_time(simulation)
    assert steps is not None
    assert steps[0].at_s == 0.0
    assert steps[-1].flops_per_s == 0
    assert steps[-1].at_s <= round(simulation.step_s, 9)
    assert all(step.flops_per_s >= 0 for step in steps)
    done = sum(step.flops_per_s * (after.at_s - step.at_s) for step, after in pairwise(steps))
    flops = flops_by_metaop(counted.metaops)
    assert flops is not None
    assert done == pytest.approx(plan.accumulate * sum(flops.values()), rel=1e-6)


def test_a_micro_batch_does_its_part_of_the_operations() -> None:
    """12e9 operations forward for 8 samples: each micro-batch does 6e9 in 0.2 s, and twice as much back."""
    metaop = cuttable("t/net", 1, {8: 1.0, 4: 0.6}).model_copy(update={"flops_per_op": 12.0 * GIGA})
    plan = make_plan(profile_of(metaop), cluster_of(1), micro_batches={"t": 2})
    steps = flops_over_time(simulate(plan))
    assert steps is not None
    assert max(step.flops_per_s for step in steps) == pytest.approx(30 * GIGA, rel=1e-4)
    done = sum(step.flops_per_s * (after.at_s - step.at_s) for step, after in pairwise(steps))
    assert done == pytest.approx(3 * 12 * GIGA, rel=1e-6)


def test_a_share_does_its_part_of_the_operations() -> None:
    """12e9 operations forward for 8 samples in 5, 1 and 2, as long as 5 take: all of them in 1.4 s / 3."""
    metaop = cuttable("t/net", 1, {8: 2.0, 4: 1.2}).model_copy(update={"flops_per_op": 12.0 * GIGA})
    simulation = simulate(uneven_plan(metaop, (0, 5, 6, 8)))
    steps = flops_over_time(simulation)
    assert steps is not None
    assert steps[0].flops_per_s == pytest.approx(12 * GIGA / (1.4 / 3), rel=1e-6)
    done = sum(step.flops_per_s * (after.at_s - step.at_s) for step, after in pairwise(steps))
    assert done == pytest.approx(3 * 12 * GIGA, rel=1e-6)
    alone = replace(simulation, spans=[span for span in simulation.spans if span.device == 1])
    of_one = flops_over_time(alone)
    assert of_one is not None
    assert of_one[0].flops_per_s == pytest.approx(12 * GIGA / 8 / (1.4 / 3), rel=1e-6)
    split = metaop.model_copy(update={"shares": shares_of({5: 1.4}, tp=2)})
    both = flops_over_time(simulate(uneven_plan(split, (0, 5, 8), tp=2)))
    assert both is not None
    assert both[0].flops_per_s == pytest.approx(12 * GIGA / (1.4 / 3), rel=1e-6)
