"""Simulated steps in which parts of the parameters are updated while other sums are under way, by hand."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.plan.types import Plan
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.simulation_report import report_of
from spindle_cli.simulate.types import Cause, Simulation

MIB = 2**20


def plan_with(op_bytes: int, step_s: float, **training: object) -> Plan:
    """Two ops on devices 0 and 1 for 3 s forward and 6 s backward, and one of 16 MiB on device 1 between them
    for 3 s in all, so that it is through after 12 s, the other one after 9; a step takes `step_s` for the two
    ops.
    """
    net = metaop_of("a/m", 2, {2: 4.5}, param_bytes_per_op=op_bytes)
    own = metaop_of("b/m", 1, {1: 3.0}, param_bytes_per_op=16 * MIB)
    training = {"optimizer_s_per_byte": step_s / (2 * op_bytes), "optimizer_state_per_param": 0.0, **training}
    profile = profile_of(net, own).model_copy(update=training)
    waves = [[slice_of(net, (0, 2), (0, 1), 0.0)], [slice_of(own, (0, 1), (1,), 9.0)]]
    return plan_of(profile, cluster_of(2), waves)


def steps_of(simulation: Simulation, device: int) -> list[tuple[float, float]]:
    return [
        (pytest.approx(step.start_s), pytest.approx(step.end_s))
        for step in simulation.steps
        if step.device == device
    ]


def test_a_part_is_updated_while_the_next_sum_is_under_way() -> None:
    """The sum of op 1 starts at 9 s, that of op 0 at 12 s, and both take 0.21 s."""
    simulation = simulate(plan_with(1024 * MIB, 0.2, updates_by_parts=True))
    first, last = sorted(simulation.sums, key=lambda each: each.end_s)
    assert (first.start_s, last.start_s) == (pytest.approx(9.0), pytest.approx(12.0))
    assert last.end_s == pytest.approx(12.21, abs=0.01)
    assert steps_of(simulation, 0) == [(first.end_s, first.end_s + 0.1), (last.end_s, last.end_s + 0.1)]
    # What device 1 has alone is less than an eighth of its 2 GiB and 16 MiB: it goes with op 1.
    both_s = 0.1 + 0.1 * 16 / 1024
    assert steps_of(simulation, 1) == [(12.0, 12.0 + both_s), (last.end_s, last.end_s + 0.1)]
    assert simulation.step_s == pytest.approx(last.end_s + 0.1)
    waits = [wait for wait in simulation.waits if wait.cause is Cause.SUM and wait.device == 0]
    assert [(wait.start_s, wait.end_s) for wait in waits] == [
        (pytest.approx(9.0), pytest.approx(first.end_s)),
        (pytest.approx(first.end_s + 0.1), pytest.approx(last.end_s)),
    ]


def test_what_is_summed_with_nobody_is_updated_first() -> None:
    """Of 48 MiB an eighth is 6: all three are parts by themselves, of device 1."""
    simulation = simulate(plan_with(16 * MIB, 2.0, updates_by_parts=True))
    begin_s = max(span.end_s for span in simulation.spans if span.device == 1)
    assert steps_of(simulation, 1) == [(begin_s + done, begin_s + done + 1.0) for done in (0.0, 1.0, 2.0)]
    assert len(steps_of(simulation, 0)) == 2
    assert not [wait for wait in simulation.waits if wait.cause is Cause.SUM and wait.device == 1]


def test_a_part_waits_for_the_losses() -> None:
    """Device 0 is through long before device 1 has run forward; its own 16 MiB wait for nothing else."""
    both = metaop_of("a/m", 1, {2: 3.0}, param_bytes_per_op=16 * MIB)
    own = metaop_of("b/m", 1, {1: 3.0}, param_bytes_per_op=16 * MIB)
    late = metaop_of("c/m", 1, {1: 30.0}, param_bytes_per_op=16 * MIB)
    training = {"optimizer_s_per_byte": 1.0 / (16 * MIB), "updates_by_parts": True}
    profile = profile_of(both, own, late).model_copy(update=training)
    waves = [
        [slice_of(both, (0, 1), (0, 1), 0.0)],
        [slice_of(own, (0, 1), (0,), 3.0), slice_of(late, (0, 1), (1,), 3.0)],
    ]
    simulation = simulate(plan_of(profile, cluster_of(2), waves))
    (losses,) = [each for each in simulation.collected if each.group is None]
    (summed,) = simulation.sums
    assert losses.start_s == pytest.approx(1.0 + 10.0)
    assert steps_of(simulation, 0) == [
        (losses.end_s, losses.end_s + 1.0),
        (summed.end_s, summed.end_s + 1.0),
    ]


@pytest.mark.parametrize("op_bytes", [16 * MIB, 1024 * MIB])
def test_parts_add_up_to_the_whole_step(op_bytes: int) -> None:
    apart = report_of("plan.yaml", simulate(plan_with(op_bytes, 2.0, updates_by_parts=True)))
    once = report_of("plan.yaml", simulate(plan_with(op_bytes, 2.0)))
    for one, other in zip(apart.devices, once.devices, strict=True):
        assert one.optimizer_s == pytest.approx(other.optimizer_s)
        assert one.compute_s == pytest.approx(other.compute_s)
        assert one.peak_memory_bytes == other.peak_memory_bytes
    assert apart.iteration_s < once.iteration_s


def test_a_step_of_several_batches_updates_at_its_end_alone() -> None:
    once, apart = (plan_with(1024 * MIB, 0.2, accumulate=3, updates_by_parts=each) for each in (False, True))
    assert len(simulate(apart).steps) == 4
    assert simulate(once).step_s - simulate(apart).step_s == pytest.approx(0.1, abs=0.01)
