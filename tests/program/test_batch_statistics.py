"""Slices whose shares sum statistics of batch norms: communicators, program, proof, simulation by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.traffic import traffic_of
from spindle_cli.account.types import Purpose
from spindle_cli.costs.beyond_curve import batch_sums_s, sums_beyond_curve_s
from spindle_cli.costs.links import all_reduce_s
from spindle_cli.plan.types import Plan
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import COMPUTES, Program
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Cause

SUMS = (BatchSum(num_bytes=1000, forward=0, backward=2), BatchSum(num_bytes=1008, forward=2, backward=0.5))
NODES = cluster_of(4, devices_per_node=2)


def plan(devices_per_node: int = 4, **more: object) -> Plan:
    """`net` on devices 2 and 0, then on 0, 3 and 1 and then on 1 alone; `head` without sums on 0 and 1."""
    net = metaop_of("task/net", 3, {1: 3.0, 2: 2.0, 3: 1.0}, batch_size=6, batch_sums=SUMS)
    head = metaop_of("task/head", 1, {2: 1.0}, batch_size=6, inputs=(net.name,))
    waves = [
        [slice_of(net, (0, 1), (2, 0), 0.0)],
        [slice_of(net, (1, 2), (0, 3, 1), 2.0)],
        [slice_of(net, (2, 3), (1,), 3.0)],
        [slice_of(head, (0, 1), (0, 1), 6.0)],
    ]
    cluster = cluster_of(4, devices_per_node=devices_per_node)
    return plan_of(profile_of(net, head), cluster, waves)


def test_every_set_of_shares_has_a_communicator_and_its_passes_name_it() -> None:
    program = link(plan())
    inside = [each for each in program.communicators if each.purpose is Purpose.STATISTICS]
    assert [each.ranks for each in inside] == [(0, 1, 3), (0, 2)]
    said = [(each.ranks, each.purpose, each.senders) for each in program.communicators]
    assert said == list(traffic_of(plan()).communicators)
    over = {(0, 1, 3): inside[0].index, (0, 2): inside[1].index}
    expected = {0: over[0, 2], 1: over[0, 1, 3], 2: None, 3: None}
    for actions in program.actions.values():
        for action in actions:
            if action.kind in COMPUTES:
                assert action.communicator == expected[action.slice_index]
    prove(program)


def without_communicator(program: Program, device: int) -> Program:
    actions = tuple(
        replace(action, communicator=None) if action.kind in COMPUTES else action
        for action in program.actions[device]
    )
    return replace(program, actions={**program.actions, device: actions})


def test_a_pass_without_its_communicator_is_no_program() -> None:
    with pytest.raises(ProgramError, match="device 2 has no communicator for this"):
        prove(without_communicator(link(plan()), 2))


def test_the_proof_asks_the_plan_who_sums_and_not_the_layouts() -> None:
    program = link(plan())
    layouts = tuple(replace(layout, sums_shares=False) for layout in program.layouts)
    for device in program.actions:
        program = without_communicator(program, device)
    with pytest.raises(ProgramError, match="has no communicator for this"):
        prove(replace(program, layouts=layouts))


def test_a_pass_over_the_communicator_of_others_is_no_program() -> None:
    program = link(plan())
    inside = [each for each in program.communicators if each.purpose is Purpose.STATISTICS]
    other = next(each.index for each in inside if each.ranks == (0, 1, 3))
    actions = tuple(
        replace(action, communicator=other) if action.kind in COMPUTES and action.slice_index == 0 else action
        for action in program.actions[0]
    )
    with pytest.raises(ProgramError, match="batch statistics, is not for this"):
        prove(replace(program, actions={**program.actions, 0: actions}))


def test_shares_start_together_in_the_simulation() -> None:
    """Device 1 has a slice of 1 s before it, device 0 has none: without sums 0 would be through first."""
    early = metaop_of("other/early", 1, {1: 3.0})
    alone = metaop_of("task/net", 1, {2: 3.0})
    net = metaop_of("task/net", 1, {2: 3.0}, batch_sums=(BatchSum(num_bytes=8, forward=1, backward=1),))
    for each, waits in ((alone, []), (net, [(0, Cause.PARTNER, 1, 1.0)])):
        cluster = cluster_of(2)
        waves = [[slice_of(early, (0, 1), (1,), 0.0)], [slice_of(each, (0, 1), (0, 1), 3.0)]]
        simulation = simulate(plan_of(profile_of(early, each), cluster, waves))
        forward = [wait for wait in simulation.waits if wait.cause is Cause.PARTNER and wait.start_s < 1]
        found = [(wait.device, wait.cause, wait.source, wait.length_s) for wait in forward]
        assert found == [(*rest, pytest.approx(length)) for *rest, length in waits]


def test_what_sums_take_by_hand() -> None:
    forward_s, backward_s = batch_sums_s(SUMS, (0, 1), NODES)
    small, large = (all_reduce_s(count, (0, 1), NODES) for count in (1000, 1008))
    assert forward_s == pytest.approx(2 * large)
    assert backward_s == pytest.approx(2 * small + 0.5 * large)
    assert batch_sums_s((), (0, 1), NODES) == (0.0, 0.0)


def test_devices_further_apart_than_the_curve_has_them_take_longer() -> None:
    """The curve was drawn for neighbours on one node, or knows of no links: then all of it comes on top."""
    near_s, far_s = (sum(batch_sums_s(SUMS, devices, NODES)) for devices in ((0, 1), (1, 2)))
    assert far_s > near_s
    net = metaop_of("task/net", 1, {1: 2.0, 2: 1.0}, batch_sums=SUMS)
    known = tuple(
        point.model_copy(update={"communication_s": near_s * (point.dp > 1)}) for point in net.curve
    )
    drawn = net.model_copy(update={"curve": known})
    for metaop, devices, beyond_s in (
        (drawn, (0, 1), 0.0),
        (drawn, (1, 2), far_s - near_s),
        (drawn, (1,), 0.0),
        (net, (1, 2), far_s),
    ):
        more = sums_beyond_curve_s(slice_of(metaop, (0, 1), devices, 0.0), metaop, NODES)
        assert sum(more) == pytest.approx(beyond_s)
    forward_s, backward_s = sums_beyond_curve_s(slice_of(net, (0, 1), (1, 2), 0.0), net, NODES)
    assert (forward_s, backward_s) == pytest.approx(batch_sums_s(SUMS, (1, 2), NODES))


def test_a_simulated_slice_takes_what_its_devices_take() -> None:
    """Twice as long as on one node, for one op forward and backward: the sums' own part of it."""
    net = metaop_of("task/net", 2, {2: 1.0}, batch_sums=SUMS, param_bytes_per_op=0)
    spread = plan_of(profile_of(net), NODES, [[slice_of(net, (0, 2), (1, 2), 0.0)]])
    more_s = 2 * sum(batch_sums_s(SUMS, (1, 2), NODES))
    assert simulate(spread).iteration_s == pytest.approx(2.0 + more_s, rel=1e-4)
    assert simulate(spread).iteration_s > 2.0 + 0.99 * more_s
