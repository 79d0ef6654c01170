"""Simulated iterations, solved by hand, and what holds for each."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given

from helpers.examples import examples
from helpers.plans import SELECTIVE, cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.random_plans import plans
from spindle_cli.account.compute import compute_of_devices
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.traffic import communicator_bytes, traffic_of
from spindle_cli.account.types import Collective
from spindle_cli.costs.links import all_gather_s, all_reduce_s, transfer_s
from spindle_cli.errors import InputError
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint
from spindle_cli.program.clock import _durations_ns
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.simulation_report import report_of
from spindle_cli.simulate.types import Activity, Cause

MIB = 2**20


def test_one_slice_takes_its_curve_point() -> None:
    net = metaop_of("task/net", 3, {1: 1.0})
    simulation = simulate(plan_of(profile_of(net), cluster_of(1), [[slice_of(net, (0, 3), (0,), 0.0)]]))
    assert simulation.iteration_s == pytest.approx(3.0)
    assert simulation.utilisation == (pytest.approx(1.0),)
    assert simulation.waits == ()


def test_a_handover_takes_the_transfer_there_and_back() -> None:
    """Forward 1/3 s each, backward 2/3 s each, and the 64 KiB that the first op hands on, twice."""
    net = metaop_of("task/net", 2, {1: 1.0})
    waves = [[slice_of(net, (0, 1), (0,), 0.0)], [slice_of(net, (1, 2), (1,), 1.0)]]
    cluster = cluster_of(2)
    simulation = simulate(plan_of(profile_of(net), cluster, waves))
    moved_s = transfer_s(2**16, cluster.links.intra_node)
    assert simulation.iteration_s == pytest.approx(2.0 + 2 * moved_s)
    there, back = simulation.waits
    assert (there.device, there.cause, there.source) == (1, Cause.ACTIVATION, 0)
    assert there.length_s == pytest.approx(1 / 3 + moved_s)
    assert there.moving_s == pytest.approx(moved_s)
    assert (back.device, back.cause, back.source) == (0, Cause.GRADIENT, 1)
    assert back.length_s == pytest.approx(1.0 + 2 * moved_s)


def test_a_sum_hides_behind_the_backward_pass_that_follows_it() -> None:
    """The second MetaOp's sum runs while the first one's backward does; only the first one's is waited
    for.
    """
    big = 256 * MIB
    first = metaop_of("task/first", 1, {2: 1.0}, param_bytes_per_op=big)
    second = metaop_of("task/second", 1, {2: 1.0}, param_bytes_per_op=big, inputs=(first.name,))
    waves = [[slice_of(first, (0, 1), (0, 1), 0.0)], [slice_of(second, (0, 1), (0, 1), 1.0)]]
    cluster = cluster_of(2)
    simulation = simulate(plan_of(profile_of(first, second), cluster, waves))
    sum_s = all_reduce_s(big, (0, 1), cluster)
    assert sum_s < 2 / 3
    assert simulation.iteration_s == pytest.approx(2.0 + sum_s)
    assert {wait.cause for wait in simulation.waits} == {Cause.SUM}


def test_a_sum_begins_before_its_slice_is_through() -> None:
    """Two ops, 2/3 s backward each: the second op's sum runs while the first one's backward does."""
    big = 256 * MIB
    net = metaop_of("task/net", 2, {2: 1.0}, param_bytes_per_op=big)
    cluster = cluster_of(2)
    simulation = simulate(plan_of(profile_of(net), cluster, [[slice_of(net, (0, 2), (0, 1), 0.0)]]))
    sum_s = all_reduce_s(big, (0, 1), cluster)
    assert [done.start_s for done in simulation.sums] == pytest.approx([4 / 3, 2.0])
    assert simulation.iteration_s == pytest.approx(2.0 + sum_s)


def starts_s(plan: Plan, backend: str) -> list[tuple[int, float]]:
    """Forward transfers of a plan on links of a backend: where each goes, and when it starts."""
    cluster = plan.cluster.model_copy(update={"backend": backend})
    simulation = simulate(plan.model_copy(update={"cluster": cluster}))
    return [(each.destination, each.start_s) for each in simulation.passages if not each.is_gradient]


def test_over_nccl_a_device_carries_what_it_posts_on_a_communicator_one_after_another() -> None:
    """Device 0 hands 10 GB to device 1, then, a pass later, 64 KiB to device 2: 2 s behind the first, at 5
    GB/s, where gloo lets it by.
    """
    big, small = (metaop_of(f"{task}/maker", 1, {1: 0.3}) for task in "ab")
    big = big.model_copy(update={"output_bytes": 10**10})
    takers = [metaop_of(f"{m.task}/taker", 1, {1: 0.3}, inputs=(m.name,)) for m in (big, small)]
    waves = [
        [slice_of(big, (0, 1), (0,), 0.0)],
        [slice_of(small, (0, 1), (0,), 0.3)],
        [slice_of(taker, (0, 1), (1 + i,), 0.6) for i, taker in enumerate(takers)],
    ]
    plan = plan_of(profile_of(big, small, *takers), cluster_of(3), waves)
    assert starts_s(plan, "gloo") == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2))]
    assert starts_s(plan, "nccl") == [(1, pytest.approx(0.1)), (2, pytest.approx(2.1, rel=1e-4))]


def test_over_nccl_neighbours_start_together() -> None:
    """The halves of an activation leave at once, as they are posted as one batch."""
    maker = metaop_of("a/maker", 1, {1: 0.3}).model_copy(update={"output_bytes": 10**10})
    taker = metaop_of("a/taker", 1, {2: 0.3}, inputs=(maker.name,))
    waves = [[slice_of(maker, (0, 1), (0,), 0.0)], [slice_of(taker, (0, 1), (1, 2), 0.3)]]
    plan = plan_of(profile_of(maker, taker), cluster_of(3), waves)
    assert starts_s(plan, "nccl") == [(1, pytest.approx(0.1)), (2, pytest.approx(0.1))]


def test_sums_of_one_communicator_go_one_after_another() -> None:
    """Three ops, 0.02 s backward each, whose sums take 0.2 s each: the first starts behind its op."""
    net = metaop_of("task/net", 3, {2: 0.03}, param_bytes_per_op=1024 * MIB)
    cluster = cluster_of(2)
    simulation = simulate(plan_of(profile_of(net), cluster, [[slice_of(net, (0, 3), (0, 1), 0.0)]]))
    sum_s = all_reduce_s(1024 * MIB, (0, 1), cluster)
    starts = [0.05 + place * sum_s for place in range(3)]
    assert [done.start_s for done in simulation.sums] == pytest.approx(starts, rel=1e-6)
    assert simulation.step_s == pytest.approx(0.05 + 3 * sum_s, rel=1e-6)


def test_a_forward_pass_waits_for_the_parameters_that_it_uses_first() -> None:
    """Two ops of 256 MiB whose state two devices share: the first op's gather is waited for, the second's
    hides behind its forward pass; of the scatters the first op's is waited for, and two flags.
    """
    net = metaop_of("task/net", 2, {2: 1.0}, param_bytes_per_op=256 * MIB)
    cluster = cluster_of(2)
    profile = profile_of(net).model_copy(update={"optimizer_state_sharded": True})
    simulation = simulate(plan_of(profile, cluster, [[slice_of(net, (0, 2), (0, 1), 0.0)]]))
    once_s = all_gather_s(256 * MIB, (0, 1), cluster)
    waits = {(wait.cause, wait.slice_index, round(wait.length_s, 6)) for wait in simulation.waits}
    flags_s = all_reduce_s(2, (0, 1), cluster)
    assert waits == {
        (Cause.GATHER, 0, round(once_s, 6)),
        (Cause.SUM, None, round(once_s + flags_s, 6)),
    }
    assert simulation.step_s == pytest.approx(2.0 + 2 * once_s + flags_s, abs=1e-8)


def test_a_forward_pass_stops_at_the_op_whose_parameters_are_still_on_their_way() -> None:
    """The second op's gather takes ten times as long as the first op runs forward."""
    small, big = 1 * MIB, 1024 * MIB
    first = metaop_of("task/net", 2, {2: 0.03}, param_bytes_per_op=small, extra_param_bytes={1: big})
    cluster = cluster_of(2)
    profile = profile_of(first).model_copy(update={"optimizer_state_sharded": True})
    simulation = simulate(plan_of(profile, cluster, [[slice_of(first, (0, 2), (0, 1), 0.0)]]))
    gathered_s = max(done.end_s for done in simulation.collected if done.kind is Collective.GATHER)
    begun = [span for span in simulation.spans if span.activity is Activity.FORWARD and span.device == 0]
    assert [span.end_s - span.start_s for span in begun] == pytest.approx([0.01, 0.01])
    assert begun[1].start_s == pytest.approx(gathered_s)
    assert gathered_s > 0.1


@pytest.mark.parametrize(("backend", "starts_s"), [("gloo", [0.0, 0.0, 3.0]), ("nccl", [0.0, 1.5, 3.0])])
def test_over_nccl_a_device_gathers_for_one_op_after_another_whatever_the_communicator(
    backend: str, starts_s: list[float]
) -> None:
    """Device 1 gathers for two ops with device 0, and for one that comes later with device 2, 1.5 s each:
    over gloo the first and the last share its link, 3 s, and the second comes behind them.
    """
    size = {"param_bytes_per_op": 15 * 10**9}
    soon, later = metaop_of("a/net", 2, {2: 3.0}, **size), metaop_of("b/net", 1, {2: 3.0}, **size)
    cluster = cluster_of(3)
    profile = profile_of(soon, later).model_copy(update={"optimizer_state_sharded": True})
    waves = [[slice_of(soon, (0, 2), (0, 1), 0.0)], [slice_of(later, (0, 1), (1, 2), 6.0)]]
    plan = plan_of(profile, cluster, waves)
    links = cluster.model_copy(update={"backend": backend})
    simulation = simulate(plan.model_copy(update={"cluster": links}))
    gathers = [done for done in simulation.collected if done.kind is Collective.GATHER]
    assert sorted(done.start_s for done in gathers) == pytest.approx(starts_s, abs=1e-3)
    assert [done.devices for done in sorted(gathers, key=lambda done: done.end_s)][-1] == (
        (1, 2) if backend == "nccl" else (0, 1)
    )


@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_sums_of_tasks_in_turn_do_not_go_beside_gathers_of_those_to_come(tasks: int) -> None:
    """Each task's GiB is gathered, and summed, at 1 GB/s, three quarters of it; of one task, an op's forward
    and backward passes are between both, and of several gathers and sums follow each other without a gap.
    """
    nets = [
        metaop_of(f"t{task}/net", 4, {4: 0.1}, param_bytes_per_op=256 * MIB, parameters=f"p{task}")
        for task in range(tasks)
    ]
    profile = profile_of(*nets).model_copy(update={"optimizer_state_sharded": True})
    plan = make_plan(profile, cluster_of(4, devices_per_node=1, memory_gib=64.0), "sequential")
    moved_s = 2 * tasks * 3 / 4 * 2**30 / 1e9
    assert plan.predicted.iteration_s == pytest.approx(moved_s + (0.1 if tasks == 1 else 0.0), rel=1e-3)
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-3)


def test_sums_behind_the_last_of_several_batches_wait_for_no_gathers() -> None:
    """Each task's GiB is gathered, and summed, at 1 GB/s, three quarters of it: less long than its passes of
    1.2 s. So of a batch's 4.8 s the first waits for the first gather alone, and the last for the last sum.
    """
    nets = [
        metaop_of(f"t{task}/net", 1, {4: 1.2}, param_bytes_per_op=2**30, parameters=f"p{task}")
        for task in range(4)
    ]
    profile = profile_of(*nets).model_copy(update={"optimizer_state_sharded": True, "accumulate": 2})
    plan = make_plan(profile, cluster_of(4, devices_per_node=1, memory_gib=64.0), "sequential")
    assert plan.predicted.iteration_s == pytest.approx(4.8 + 3 / 4 * 2**30 / 1e9, rel=1e-3)
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-3)


@pytest.mark.parametrize(("selective", "again_s"), [(False, 1.0), (True, 0.25)])
def test_recomputing_runs_forward_twice_or_in_part(selective: bool, again_s: float) -> None:
    """All that counts passes agrees: the simulation, the devices' own seconds, and the clock of programs."""
    net = metaop_of("task/net", 1, {1: 3.0}, **SELECTIVE)
    piece = slice_of(net, (0, 1), (0,), 0.0, recompute=True, selective=selective)
    plan = plan_of(profile_of(net), cluster_of(1), [[piece]])
    assert simulate(plan).iteration_s == pytest.approx(3.0 + again_s)
    assert compute_of_devices(plan, traffic_of(plan)) == pytest.approx((3.0 + again_s,))
    assert _durations_ns(plan, piece) == pytest.approx((10**9, (2 + again_s) * 10**9))


def test_tensor_parallel_partners_start_together() -> None:
    """Device 1 is busy with something else first; device 0 waits for it."""
    other = metaop_of("a/other", 1, {1: 3.0})
    net = metaop_of("b/net", 1, {1: 1.0})
    point = CurvePoint(num_devices=2, dp=1, tp=2, forward_s=0.5, backward_s=0.5, source="composed")
    net = net.model_copy(update={"curve": (*net.curve, point)})
    split = slice_of(net, (0, 1), (0,), 3.0).model_copy(update={"devices": (0, 1), "tp": 2})
    waves = [[slice_of(other, (0, 1), (1,), 0.0)], [split]]
    simulation = simulate(plan_of(profile_of(other, net), cluster_of(2), waves))
    wait = simulation.waits[0]
    assert (wait.device, wait.cause, wait.source, wait.length_s) == (0, Cause.PARTNER, 1, pytest.approx(1.0))
    starts = [
        span.start_s
        for span in simulation.spans
        if span.slice_index == 1 and span.activity is Activity.FORWARD
    ]
    assert starts == pytest.approx([1.0, 1.0])


def test_a_plan_without_the_curve_point_of_a_slice_is_refused() -> None:
    net = metaop_of("task/net", 1, {1: 1.0, 2: 0.5})
    plan = plan_of(profile_of(net), cluster_of(2), [[slice_of(net, (0, 1), (0, 1), 0.0)]])
    bare = plan.metaops[0].model_copy(update={"curve": plan.metaops[0].curve[:1]})
    with pytest.raises(InputError, match="no curve point, or share, for dp 2"):
        simulate(plan.model_copy(update={"metaops": (bare,)}))


@examples(80)
@given(plans())
def test_every_second_of_a_device_is_compute_or_wait_or_after_its_end(plan: Plan) -> None:
    simulation = simulate(plan)
    happened = (*simulation.spans, *simulation.steps, *simulation.passages, *simulation.collected)
    assert simulation.step_s == max(each.end_s for each in happened)
    for use in report_of("", simulation).devices:
        total_s = use.compute_s + use.waiting_s + use.done_early_s
        assert total_s == pytest.approx(simulation.step_s)
        parts = sorted(
            (part.start_s, part.end_s)
            for part in (*simulation.spans, *simulation.waits)
            if part.device == use.device
        )
        assert all(end_s <= start_s + 1e-9 for (_, end_s), (start_s, _) in pairwise(parts))


@examples(60)
@given(plans())
def test_no_slice_starts_before_its_inputs_have_arrived(plan: Plan) -> None:
    simulation = simulate(plan)
    started_s: dict[tuple[int, Activity, int, int], float] = {}
    for span in simulation.spans:
        started_s.setdefault((span.device, span.activity, span.slice_index, span.batch), span.start_s)
    for passage in simulation.passages:
        activity = Activity.BACKWARD if passage.is_gradient else Activity.FORWARD
        taker = passage.producer if passage.is_gradient else passage.consumer
        assert passage.posted_s <= passage.start_s <= passage.end_s
        assert started_s[passage.destination, activity, taker, passage.batch] >= passage.end_s
    assert simulation.step_s >= max(simulation.busy_s)


@examples(60)
@given(plans())
def test_memory_returns_to_what_it_was_and_peaks_as_the_plan_says(plan: Plan) -> None:
    simulation = simulate(plan)
    said = device_memory(plan.metaops, plan.slices, plan.cluster, plan, communicator_bytes(plan))
    assert simulation.peak_memory_bytes == tuple(device.total_bytes for device in said)
    for steps in simulation.memory:
        assert steps[0].num_bytes == steps[-1].num_bytes
        assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(steps))


def test_two_towers_lose_only_what_moves() -> None:
    _, plan = two_towers()
    simulation = simulate(plan)
    assert plan.predicted.compute_s < simulation.iteration_s < plan.predicted.compute_s * 1.001
    report = report_of("plan.yaml", simulation)
    assert report.waits[0].source == "pairs/vision"
    assert report.slices[3].forward_start_s == pytest.approx(1.2, rel=1e-3)


def test_a_thousand_devices_are_simulated_in_seconds() -> None:
    sizes = (32, 64)
    metaops, waves = [], []
    for chain in range(24):
        for place in range(3):
            inputs = (metaops[-1].name,) if place else ()
            metaop = metaop_of(
                f"task{chain}/part{place}", 2, dict.fromkeys(sizes, 1.0), batch_size=192, inputs=inputs
            )
            metaops.append(metaop)
            size = sizes[(chain + place) % 2]
            first = (chain * 41 + place * 331) % (1024 - size)
            waves.append([slice_of(metaop, (0, 2), range(first, first + size), 10.0 * chain + 2.0 * place)])
    plan = plan_of(profile_of(*metaops), cluster_of(1024, devices_per_node=8), waves)
    started = time.process_time()
    simulate(plan)
    assert time.process_time() - started < 30  # 3 s by itself
