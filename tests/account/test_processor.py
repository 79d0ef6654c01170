"""What communication and loading take of devices that are processors, added up by hand."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.compute import ProcessorTime, costs_nothing, processor_overhead, slice_stretches
from spindle_cli.account.types import Collective, Together
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import ProcessorCosts
from spindle_cli.simulate.run import simulate


def summed(devices: tuple[int, ...], num_bytes: int) -> Together:
    return Together(Collective.SUM, devices, num_bytes, 2)


COSTS = ProcessorCosts(message_s=0.001, s_per_byte=1e-9, load_s={"a": 0.01})
MB = 10**6


def test_a_message_takes_both_ends_for_itself_and_for_its_bytes() -> None:
    time = ProcessorTime(COSTS, (0,) * 3)
    time.message(0, 2, 2 * MB)
    assert time.seconds == pytest.approx((0.003, 0.0, 0.003))


def test_a_sum_scatters_and_gathers_between_all_pairs() -> None:
    """Of 3 devices each sends a third of 3 MB to 2 others and takes as much, twice, in two messages each."""
    time = ProcessorTime(COSTS, (0,) * 4)
    time.together(summed((0, 1, 3), 3 * MB))
    summed_s = 2 * 2 * 2 * (2 * 0.001 + 1e-9 * MB)
    assert time.seconds == pytest.approx((summed_s, summed_s, 0.0, summed_s))


def test_a_byte_to_another_node_takes_two_and_a_half_times_as_much() -> None:
    time = ProcessorTime(COSTS, (0, 0, 1))
    time.message(0, 1, 2 * MB)
    time.message(0, 2, 2 * MB)
    assert time.seconds == pytest.approx((0.003 + 0.006, 0.003, 0.006))


def test_of_a_sum_over_two_nodes_the_part_that_goes_between_them_takes_more() -> None:
    """Of 3 devices, device 2 alone on its node, each hands both others a third of 3 MB, and takes as much."""
    time = ProcessorTime(ProcessorCosts(s_per_byte=1e-9), (0, 0, 1))
    time.together(summed((0, 1, 2), 3 * MB))
    assert time.seconds == pytest.approx((4 * (1 + 2.5) * 0.001,) * 2 + (4 * 2 * 2.5 * 0.001,))


@pytest.mark.parametrize(("mebibytes", "messages"), [(4, 2), (4.5, 3), (6, 3), (6.5, 4)])
def test_a_large_sum_goes_in_messages_of_a_mebibyte_at_most(mebibytes: float, messages: int) -> None:
    """Of 2 devices each hands the other its half, and then the other's back."""
    time = ProcessorTime(ProcessorCosts(message_s=0.001), (0,) * 2)
    time.together(summed((0, 1), int(mebibytes * 2**20)))
    assert time.seconds == pytest.approx((2 * 2 * messages * 0.001,) * 2)


def test_a_scatter_or_a_gather_is_half_of_a_sum_and_one_device_does_nothing() -> None:
    time = ProcessorTime(COSTS, (0,) * 2)
    time.together(Together(Collective.GATHER, (0, 1), 2 * MB, 1))
    time.together(summed((0,), MB))
    assert time.seconds == pytest.approx((2 * 0.002, 2 * 0.002))


def test_of_several_readings_of_a_task_the_largest_counts() -> None:
    time = ProcessorTime(COSTS, (0,) * 1)
    for samples in (4, 8, 2):
        time.read(0, "a", samples)
    time.read(0, "b", 100)
    assert time.seconds == (0.08,)


def test_a_device_reads_all_of_its_micro_batches() -> None:
    """8 samples in two micro-batches: 4 and 4 on device 0, of the second 2 on device 1 as well; at 10 ms."""
    net = metaop_of("a/net", 1, {1: 1.0, 2: 1.0}, field_bytes={0: 1})
    whole = slice_of(net, (0, 1), (0,), 0.0)
    halves = [whole.model_copy(update={"micro_batch": n, "micro_batches": 2}) for n in (0, 1)]
    shared = halves[1].model_copy(update={"devices": (1, 0), "dp": 2})
    by_name = {"a/net": net}

    def read_s(*slices: Slice) -> tuple[float, ...]:
        return processor_overhead(COSTS, (0,) * 2, slices, by_name, [], []).seconds

    assert read_s(whole) == (0.08, 0.0)
    assert read_s(*halves) == (0.08, 0.0)
    assert read_s(halves[0], shared) == pytest.approx((0.06, 0.02))


def test_the_runtime_takes_time_of_a_step_and_of_each_slice() -> None:
    """Of 2 batches in a step half a second each; 0.25 s for each slice; device 2 runs nothing."""
    net = metaop_of("t/net", 3, {1: 1.0, 2: 1.0})
    slices = [slice_of(net, (0, 1), (0,), 0.0), slice_of(net, (1, 3), (0, 1), 1.0)]
    costs = ProcessorCosts(step_s=1.0, pass_s=0.25)
    overhead = processor_overhead(costs, (0,) * 3, slices, {"t/net": net}, [], [], batches=2)
    assert overhead.seconds == (1.0, 0.75, 0.0)
    stretched = slice_stretches(costs, (0,) * 3, slices, [1.0, 2.0], {"t/net": net}, [], [], 2)
    assert stretched == pytest.approx((1 + 1.0 / 3, 1 + 0.75 / 2))


@pytest.mark.parametrize("name", ["message_s", "s_per_byte", "step_s", "pass_s"])
def test_whatever_a_processor_does_costs_something(name: str) -> None:
    assert not costs_nothing(ProcessorCosts(**{name: 1e-9}))
    assert costs_nothing(ProcessorCosts(load_s={"a": 0.0}))


def test_a_slice_is_as_slow_as_its_slowest_device() -> None:
    """Device 0 computes 2 s and device 1 computes 4 s in two slices; a message takes 1 s of both."""
    a, b = metaop_of("t/a", 1, {2: 2.0}), metaop_of("t/b", 1, {1: 2.0})
    slices = [slice_of(a, (0, 1), (0, 1), 0.0), slice_of(b, (0, 1), (1,), 2.0)]
    by_name = {"t/a": a, "t/b": b}
    costs = ProcessorCosts(s_per_byte=1e-6)
    found = slice_stretches(costs, (0,) * 2, slices, [2.0, 2.0], by_name, [(0, 1, 1e6)], [])
    assert found == pytest.approx((1.5, 1.25))
    assert slice_stretches(ProcessorCosts(), (0,) * 2, slices, [2.0, 2.0], by_name, [(0, 1, 1e6)], []) == (
        1.0,
        1.0,
    )


def test_a_slice_reads_its_share_where_one_of_its_ops_has_fields() -> None:
    a = metaop_of("a/m", 2, {1: 1.0, 2: 0.5}, field_bytes={0: 100})
    slices = [slice_of(a, (0, 1), (0, 1), 0.0), slice_of(a, (1, 2), (2,), 0.5)]
    costs = ProcessorCosts(load_s={"a": 0.01})
    found = slice_stretches(costs, (0,) * 3, slices, [0.5, 1.0], {"a/m": a}, [], [])
    assert found == pytest.approx((1 + 4 * 0.01 / 0.5, 1.0)), "half of 8 samples, and none"


def test_sums_of_a_step_count_once_for_all_of_its_batches() -> None:
    """A sum of 2 MB over 2 devices takes 4 ends of 1 MB: 4 s of a step, 1 s of each of 4 batches of 10 s."""
    a = metaop_of("t/a", 1, {2: 10.0})
    slices = [slice_of(a, (0, 1), (0, 1), 0.0)]
    costs = ProcessorCosts(s_per_byte=1e-6)
    found = slice_stretches(costs, (0,) * 2, slices, [10.0], {"t/a": a}, [], [summed((0, 1), 2 * MB)], 4)
    assert found == pytest.approx((1.1,))


def test_planner_and_simulator_add_the_same_to_a_chain_over_two_devices() -> None:
    """Each device runs 3 s and takes part in an activation, its gradient, and the losses' sum."""
    metaops = (
        metaop_of("a/m", 1, {1: 3.0}),
        metaop_of("a/n", 1, {1: 3.0}, inputs=("a/m",), parameters="a/n"),
    )
    profile = profile_of(*(metaop.model_copy(update={"output_bytes": MB}) for metaop in metaops))
    profile = profile.model_copy(update={"processor": COSTS})
    cluster = cluster_of(2)
    first, second = profile.metaops
    waves = [[slice_of(first, (0, 1), (0,), 0.0)], [slice_of(second, (0, 1), (1,), 3.0)]]
    plan = plan_of(profile, cluster, waves).model_copy(update={"processor": COSTS})
    beside_s = 4 * (2 * 0.001 + 1e-9 * 16 / 2) + 2 * (0.001 + 1e-9 * MB)
    transfers_s = 2 * (10e-6 + MB / 5e9)
    assert simulate(plan).iteration_s == pytest.approx(6.0 + 2 * beside_s + transfers_s)


def test_a_plan_carries_the_costs_and_is_the_longer_for_them() -> None:
    profile = profile_of(metaop_of("a/m", 4, {1: 1.0, 2: 0.5}, field_bytes={0: 100}))
    quick = make_plan(profile, cluster_of(1))
    slow = make_plan(profile.model_copy(update={"processor": COSTS}), cluster_of(1))
    assert slow.processor == COSTS
    assert slow.predicted.iteration_s == pytest.approx(quick.predicted.iteration_s + 8 * 0.01)
    assert (slow.predicted.transfer_s, slow.predicted.processor_s) == pytest.approx((0.0, 8 * 0.01))
    assert simulate(slow).iteration_s == pytest.approx(slow.predicted.iteration_s)
