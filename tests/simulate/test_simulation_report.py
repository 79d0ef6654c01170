"""What the report says of each device, slice and wait, on a step worked out by hand.

Device 0 makes 1 GB in a third of a second, device 1 takes it, T = 10 us + 0.2 s later, and sends as much
back; device 2 runs half a second of another task. The optimizer takes a second for each MiB: 1, 2 and 1 s.
"""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.costs.links import all_reduce_s
from spindle_cli.plan.types import Plan
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.simulation_report import SimulationReport, report_of

GB = 10**9
T = 10e-6 + 0.2
FORWARD, BACKWARD = 1 / 3, 2 / 3


def plan() -> Plan:
    maker = metaop_of("a/maker", 1, {1: 1.0}).model_copy(update={"output_bytes": GB})
    taker = metaop_of("a/taker", 1, {1: 1.0}, inputs=(maker.name,), param_bytes_per_op=2 * 2**20)
    other = metaop_of("b/other", 1, {1: 0.5})
    profile = profile_of(maker, taker, other).model_copy(update={"optimizer_s_per_byte": 2.0**-20})
    waves = [
        [slice_of(maker, (0, 1), (0,), 0.0), slice_of(other, (0, 1), (2,), 0.0)],
        [slice_of(taker, (0, 1), (1,), 1.0)],
    ]
    return plan_of(profile, cluster_of(3), waves)


def report(**numbers: object) -> SimulationReport:
    return report_of("plan.yaml", simulate(plan().model_copy(update=numbers)))


def losses_s() -> float:
    """What all devices sum once: a few bytes of each task."""
    return all_reduce_s(16 * 2, range(3), cluster_of(3))


def test_each_device_computes_waits_and_is_done_early() -> None:
    found = report()
    taken_s = FORWARD + T + 1.0 + 2.0  # device 1 is the last
    assert found.iteration_s == found.step_s == pytest.approx(taken_s)
    first, second, third = found.devices
    assert [use.compute_s for use in found.devices] == pytest.approx([2.0, 3.0, 1.5])
    assert [use.optimizer_s for use in found.devices] == pytest.approx([1.0, 2.0, 1.0])
    assert first.waiting_s == pytest.approx(T + 1.0 + T)
    assert second.waiting_s == pytest.approx(FORWARD + T)
    # For the losses, until device 1 has run forward.
    assert third.waiting_s == pytest.approx(2 * FORWARD + T - 0.5 + losses_s(), abs=1e-7)
    assert [use.done_early_s for use in found.devices] == pytest.approx(
        [taken_s - 3.0 - 2 * T, 0.0, taken_s - 1.5 - third.waiting_s]
    )
    assert [use.utilisation for use in found.devices] == pytest.approx(
        [2.0 / taken_s, 3.0 / taken_s, 1.5 / taken_s]
    )
    assert found.mean_utilisation == pytest.approx(6.5 / 3 / taken_s)
    assert (found.transferred_bytes, found.summed_bytes) == (2 * GB, 0)


def test_slices_have_the_times_of_the_first_batch() -> None:
    for batches in (1, 2):
        found = {each.metaop: each for each in report(accumulate=batches).slices}
        maker, taker = found["a/maker"], found["a/taker"]
        assert (maker.forward_start_s, maker.forward_end_s) == pytest.approx((0.0, FORWARD))
        assert taker.forward_start_s == pytest.approx(FORWARD + T)
        assert taker.backward_end_s == pytest.approx(FORWARD + T + 1.0)
        assert maker.backward_start_s == pytest.approx(FORWARD + T + 1.0 + T)
        assert maker.backward_end_s == pytest.approx(FORWARD + T + 1.0 + T + BACKWARD)


def test_waits_alike_are_added_up_and_the_longest_together_come_first() -> None:
    waits = report().waits
    assert [(wait.metaop, wait.cause.value, wait.source) for wait in waits] == [
        ("a/maker", "gradient", "a/taker"),
        ("a/taker", "activation", "a/maker"),
        (None, "sum", None),
    ]
    gradient, activation, losses = waits
    assert gradient.device_s == gradient.longest_s == pytest.approx(1.0 + 2 * T)
    assert (gradient.moving_device_s, activation.moving_device_s) == pytest.approx((T, T))
    assert (gradient.longest_device, gradient.longest_source, gradient.num_waits) == (0, 1, 1)
    assert (activation.longest_device, activation.longest_source) == (1, 0)
    assert losses.longest_device == 2


def test_in_a_step_of_two_batches_the_longer_of_two_waits_is_the_longest() -> None:
    """Device 1 waits a forward pass and T, then, until device 0 is through with the first batch, 1 + 2 T."""
    found = report(accumulate=2)
    (activation,) = [wait for wait in found.waits if wait.cause.value == "activation"]
    assert activation.num_waits == 2
    assert activation.device_s == pytest.approx((FORWARD + T) + (1.0 + 2 * T))
    assert activation.longest_s == pytest.approx(1.0 + 2 * T)
    assert activation.moving_device_s == pytest.approx(2 * T)
    assert found.step_s == pytest.approx(2 * (FORWARD + T + 1.0) + T + BACKWARD + 2.0)
    assert found.iteration_s == pytest.approx(found.step_s / 2)
    assert found.transferred_bytes == 4 * GB
    assert [use.compute_s for use in found.devices] == pytest.approx([3.0, 4.0, 2.0])
