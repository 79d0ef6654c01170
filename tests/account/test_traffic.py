"""What a plan moves and sums: the same in account, program and simulation, and as counted by hand."""

from __future__ import annotations

from collections import Counter
from math import lcm

from hypothesis import HealthCheck, given, settings

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from helpers.random_plans import plans
from spindle_cli.account.traffic import traffic_of
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint
from spindle_cli.program.link import link
from spindle_cli.program.types import Kind
from spindle_cli.simulate.run import simulate

SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SOME
@given(plans())
def test_account_program_and_simulation_move_and_sum_the_same_bytes(plan: Plan) -> None:
    account, program, simulation = traffic_of(plan), link(plan), simulate(plan)
    sent: Counter[tuple[int, int]] = Counter()
    summing: dict[int, set[int]] = {}
    for device, actions in program.actions.items():
        for action in actions:
            if action.transfer is not None and action.transfer.source == device:
                sent[device, action.transfer.destination] += action.transfer.num_bytes
            if action.kind is Kind.SUM and action.group is not None:
                summing.setdefault(action.group, set()).add(device)
    passed: Counter[tuple[int, int]] = Counter()
    for passage in simulation.passages:
        passed[passage.source, passage.destination] += passage.num_bytes
    assert account.bytes_by_pair() == sent == passed
    in_account = Counter((group.devices, group.num_bytes) for group in account.sums)
    in_program = Counter(
        (tuple(sorted(devices)), program.groups[index].num_bytes) for index, devices in summing.items()
    )
    in_simulation = Counter((done.devices, done.num_bytes) for done in simulation.sums)
    assert in_account == in_program == in_simulation


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
    share = plan.by_name[piece.metaop].batch_size // piece.dp
    return {
        device: set(range(place // piece.tp * share, (place // piece.tp + 1) * share))
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
        for op in range(*piece.ops) if metaop.param_bytes_per_op else ():
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
