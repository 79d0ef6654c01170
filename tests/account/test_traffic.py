"""What a plan moves and sums: the same in account, program and simulation, and as counted by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import assume, given

from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from helpers.random_plans import plans
from spindle_cli.account.device_memory import device_memory, optimizer_steps_s
from spindle_cli.account.joint import joint_of, plans_in_turn
from spindle_cli.account.traffic import traffic_of
from spindle_cli.account.types import Collective
from spindle_cli.files.cluster import Link, Links
from spindle_cli.plan.placing.predict import Prediction, predict
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.schedule import placed_slices
from spindle_cli.plan.types import Plan, PlanMetaOp
from spindle_cli.profile.types import CurvePoint, MetaOpProfile
from spindle_cli.program.link import link
from spindle_cli.program.types import ONCE_A_STEP, Kind
from spindle_cli.simulate.run import simulate

SOME = examples(60)


@SOME
@given(plans())
def test_account_program_and_simulation_move_and_sum_the_same_bytes(plan: Plan) -> None:
    """Over a step: each batch's messages, and once the sums, flags, norm and gathers."""
    account, program, simulation = traffic_of(plan), link(plan), simulate(plan)
    sent: Counter[tuple[int, int]] = Counter()
    taking_part: dict[tuple[Kind, int | None, int], set[int]] = {}
    for device, actions in program.actions.items():
        for action in actions:
            if action.transfer is not None and action.transfer.source == device:
                sent[device, action.transfer.destination] += plan.accumulate * action.transfer.num_bytes
            elif action.kind in ONCE_A_STEP and action.communicator is not None:
                key = (action.kind, action.group, action.communicator)
                taking_part.setdefault(key, set()).add(device)
    passed: Counter[tuple[int, int]] = Counter()
    for passage in simulation.passages:
        passed[passage.source, passage.destination] += passage.num_bytes
    assert account.bytes_by_pair() == sent == passed
    in_account = Counter((each.kind.name, each.devices, each.num_bytes) for each in account.collectives)
    in_simulation = Counter((done.kind.name, done.devices, done.num_bytes) for done in simulation.collected)
    assert in_account == in_simulation
    of_program = Counter((kind.name, tuple(sorted(devices))) for (kind, *_), devices in taking_part.items())
    assert of_program == Counter((name, devices) for name, devices, _ in in_account.elements())


@SOME
@given(plans())
def test_no_step_takes_longer_than_predicted_where_links_cost_nothing(plan: Plan) -> None:
    """It may take less: predicted slices start on all devices at once, and batches do not overlap."""
    assume(not plan.micro_batches)  # which the planner has as tasks of their own
    free = Link(latency_us=0, bandwidth_gb_per_s=1e9)
    links = Links(intra_node=free, inter_node=free)
    plan = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"links": links})})
    prediction, simulation = prediction_of(plan), simulate(plan)
    assert (
        max(simulation.busy_s) <= simulation.step_s <= plan.accumulate * prediction.iteration_s * (1 + 1e-6)
    )


def prediction_of(plan: Plan) -> Prediction:
    """What the planner predicts for a plan's slices."""
    metaops = [
        MetaOpProfile(**{name: getattr(metaop, name) for name in PlanMetaOp.model_fields})
        for metaop in plan.metaops
    ]
    profile = profile_of(*metaops).model_copy(update=plan.training)
    problem = make_problem(profile, plan.cluster)
    memory = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    steps_s = optimizer_steps_s(memory, plan.optimizer_s_per_byte)
    return predict(problem, plan.slices, traffic_of(plan), plan.predicted.compute_s, steps_s)


def test_all_wait_for_the_sum_of_the_losses_where_backward_passes_do_not_hide_it() -> None:
    """1 s forward, 1 us backward, nothing trained: six numbers of 8 bytes go around twice."""
    point = CurvePoint(num_devices=2, dp=2, forward_s=1.0, backward_s=1e-6, source="measured")
    net = metaop_of("a/m", 1, {2: 1.0}, trainable_fraction=0.0).model_copy(update={"curve": (point,)})
    piece = slice_of(net, (0, 1), (0, 1), 0.0).model_copy(update={"end_s": 1.000001})
    plan = plan_of(profile_of(net), cluster_of(2), [[piece]])
    losses_s = 2 * (10e-6 + 24 / 5e9)
    prediction = prediction_of(plan)
    assert prediction.iteration_s == pytest.approx(1.0 + losses_s, abs=1e-9)
    assert prediction.gradient_sum_s == pytest.approx(losses_s - 1e-6, abs=1e-9)
    assert simulate(plan).step_s == pytest.approx(1.0 + losses_s, abs=1e-8)


@pytest.mark.parametrize(("clips", "scales"), [(True, False), (False, True)])
def test_candidates_and_plans_in_turn_sum_what_the_plan_does_before_the_update(
    clips: bool, scales: bool
) -> None:
    net = metaop_of("a/m", 1, {2: 1.0})
    training = {"clips_gradients": clips, "scales_losses": scales}
    profile = profile_of(net).model_copy(update=training)
    plan = plan_of(profile, cluster_of(2), [[slice_of(net, (0, 1), (0, 1), 0.0)]])
    candidate = placed_slices(make_problem(profile, plan.cluster), plan.slices)
    jointly = replace(candidate, joint=joint_of([plan.slices, plan.slices], plan.by_name))
    for each in (plan, candidate, *plans_in_turn(jointly)):
        assert (each.clips_gradients, each.scales_losses) == (clips, scales)
        norms = [found for found in traffic_of(each).collectives if found.kind is Collective.NORM]
        assert [(norm.devices, norm.num_bytes) for norm in norms] == [((0, 1), 8)]


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("clips", "scales"), [(False, False), (True, False), (False, True), (True, True)])
def test_prediction_and_simulation_of_a_step_agree_to_the_last_sum(
    batches: int, sharded: bool, clips: bool, scales: bool
) -> None:
    """Two ops of 1 MiB in bfloat16, summed in float32 by two devices that also hand on an activation to a
    third.
    """
    net = metaop_of("a/m", 2, {2: 3.0})
    head = metaop_of("a/n", 1, {1: 3.0}, inputs=("a/m",))
    profile = profile_of(net, head).model_copy(
        update={
            "accumulate": batches,
            "optimizer_state_sharded": sharded,
            "clips_gradients": clips,
            "scales_losses": scales,
            "gradient_bytes_per_param": 2.0,
            "optimizer_s_per_byte": 2.0**-22,
        }
    )
    waves = [[slice_of(net, (0, 2), (0, 1), 0.0)], [slice_of(head, (0, 1), (2,), 6.0)]]
    plan = plan_of(profile, cluster_of(3), waves)
    prediction = prediction_of(plan)
    latency_s, byte_s = 10e-6, 1 / 5e9
    moved_s = 2 * (latency_s + 2**15 * byte_s)  # both halves of the activation over one port of device 2
    # A reduce-scatter of 2 MiB and a gather of 1 MiB behind two flags, or an all-reduce of 2 MiB.
    around_s = latency_s + 2**20 * byte_s
    sums_s = around_s + latency_s + 2**19 * byte_s + 2 * (latency_s + byte_s) if sharded else 2 * around_s
    if clips or scales:  # one number of 8 bytes for each
        sums_s += 4 * (latency_s + 8 * (clips + scales) / 3 * byte_s)
    step_s = 2**21 / (2 if sharded else 1) * 2.0**-22
    assert prediction.transfer_s == pytest.approx(2 * moved_s)
    assert prediction.gradient_sum_s == pytest.approx(sums_s / batches)
    assert prediction.optimizer_s == pytest.approx(step_s / batches)
    assert simulate(plan).iteration_s == pytest.approx(prediction.iteration_s, rel=2e-5)


@SOME
@given(plans())
def test_a_device_is_sent_just_the_samples_that_it_does_not_hold(plan: Plan) -> None:
    """Counted sample by sample; all sizes of these plans are whole numbers of bytes a sample."""
    account = traffic_of(plan)
    for number, edge in enumerate(account.edges):
        metaop = plan.by_name[plan.slices[edge.producer].metaop]
        inner = metaop.inner_output_bytes
        whole = inner if edge.inner and inner is not None else metaop.output_bytes
        for exchange in (account.activations[number], account.gradients[number]):
            had, wanted = (samples_by_device(plan, index) for index in (exchange.sender, exchange.taker))
            received: Counter[int] = Counter()
            for source, destination, num_bytes in exchange.messages:
                assert source in had
                received[destination] += num_bytes
            for device, samples in wanted.items():
                missing = len(samples - had.get(device, set()))
                assert received[device] == missing * whole // metaop.batch_size


def samples_by_device(plan: Plan, index: int) -> dict[int, set[int]]:
    """Which samples each device of a slice has, from the words of the contract."""
    piece = plan.slices[index]
    size = plan.by_name[piece.metaop].batch_size // plan.micro_batches.get(piece.metaop.partition("/")[0], 1)
    begin, rows = piece.micro_batch * size, piece.rows or [size * n // piece.dp for n in range(piece.dp + 1)]
    return {
        device: set(range(begin + rows[place // piece.tp], begin + rows[place // piece.tp + 1]))
        for place, device in enumerate(piece.devices)
    }


@SOME
@given(plans())
def test_every_part_of_a_parameter_is_summed_once_over_all_who_hold_it(plan: Plan) -> None:
    """Counted part by part, in the finest parts that any slice of the plan has."""
    finest = lcm(*(piece.tp for piece in plan.slices))
    holders: dict[tuple[str, int, int], set[int]] = {}
    for piece in plan.slices:
        metaop = plan.by_name[piece.metaop]
        for op in range(*piece.ops) if metaop.param_bytes_per_op * metaop.trainable_fraction else ():
            name = (metaop.parameters or metaop.name, op)
            for place, device in enumerate(piece.devices):
                width = finest // piece.tp
                for part in range(place % piece.tp * width, (place % piece.tp + 1) * width):
                    holders.setdefault((*name, part), set()).add(device)
    summed: Counter[tuple[str, int, int]] = Counter()
    for group in traffic_of(plan).groups:
        index, count = group.fragment
        for name in group.blocks:
            for part in range(index * finest // count, (index + 1) * finest // count):
                assert set(group.devices) == holders[*name, part]
                summed[*name, part] += 1
    assert set(summed) == set(holders)
    assert set(summed.values()) <= {1}


def test_shares_of_unequal_layouts_exchange_what_overlaps() -> None:
    """6 samples of 100 bytes from two shares on devices 0, 1 to three on 1, 2, 3: device 1 has sample 3
    only of its new share 0-1, so all of that comes from 0; device 2 takes one sample of each; device 3 two
    of device 1.
    """
    maker = metaop_of("a/m", 1, {2: 1.0}, batch_size=6).model_copy(update={"output_bytes": 600})
    taker = metaop_of("a/n", 1, {3: 1.0}, batch_size=6, inputs=("a/m",))
    plan = plan_of(
        profile_of(maker, taker),
        cluster_of(4),
        [[slice_of(maker, (0, 1), (0, 1), 0.0)], [slice_of(taker, (0, 1), (1, 2, 3), 1.0)]],
    )
    (forward,), (back,) = traffic_of(plan).activations, traffic_of(plan).gradients
    assert sorted(forward.messages) == [(0, 1, 200), (0, 2, 100), (1, 2, 100), (1, 3, 200)]
    assert sorted(back.messages) == [(1, 0, 200), (2, 0, 100), (2, 1, 100), (3, 1, 200)]


def test_the_parts_of_an_odd_number_of_bytes_are_rounded_up() -> None:
    """dp 2 x tp 2 over 7 bytes of parameters that are split and 3 that are not."""
    point = CurvePoint(num_devices=4, dp=2, tp=2, forward_s=0.5, backward_s=0.5, source="composed")
    net = metaop_of("a/m", 1, {1: 1.0}, param_bytes_per_op=10, whole_param_bytes_per_op=3).model_copy(
        update={"curve": (point,)}
    )
    plan = plan_of(profile_of(net), cluster_of(4), [[slice_of(net, (0, 1), (0, 1, 2, 3), 0.0, tp=2)]])
    sums = {(group.devices, group.num_bytes, group.fragment) for group in traffic_of(plan).sums}
    assert sums == {((0, 2), 4, (0, 2)), ((1, 3), 4, (1, 2)), ((0, 1, 2, 3), 3, (0, 1))}
