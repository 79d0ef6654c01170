"""Programs that hang, or might, solved by hand: the proof and the little executor agree on each, and on what
takes its place.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.hanging_programs import (
    chain,
    changed,
    cycle,
    move,
    over_one_communicator,
    step_of,
    with_early_receive,
    with_receives_ahead,
)
from helpers.little_executor import FailsError, Rules, execute
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.profile.types import CurvePoint
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.proof.proof_run import check_run
from spindle_cli.program.types import Kind, Program, StepSettings


def runs(program: Program, rules: Rules) -> bool:
    try:
        execute(program, rules)
    except FailsError:
        return False
    return True


def assert_accepted(program: Program) -> None:
    prove(program)
    assert all(runs(program, rules) for rules in Rules)


def test_a_chain_whose_transfers_share_the_communicator_of_the_losses_is_refused() -> None:
    """Device 0 waits for the gradient before it sums the losses, device 1 for the sum before it sends the
    gradient: where all goes one after another, for ever. gloo lets messages by.
    """
    assert_accepted(chain())
    once = over_one_communicator(with_early_receive(chain()))
    assert not runs(once, Rules.NCCL)
    assert runs(once, Rules.GLOO)
    with pytest.raises(ProgramError, match="communicator 0, everyone, is not for this"):
        prove(once)
    with pytest.raises(ProgramError, match="2 of 2 devices wait for ever") as raised:
        check_run(once)
    assert ">>B 0<<" in str(raised.value)


def test_a_chain_that_posts_a_receive_before_the_losses_is_refused_whatever_it_goes_over() -> None:
    """With communicators of their own both could run at once, if the device has room for both."""
    early = with_early_receive(chain())
    assert runs(early, Rules.NCCL)
    assert not runs(early, Rules.ONE_ROOM)
    with pytest.raises(ProgramError, match="over different communicators in different orders") as raised:
        prove(early)
    assert ">>B 0<<" in str(raised.value)


def test_a_cycle_of_three_devices_that_receive_before_they_send_is_refused() -> None:
    """Whoever sends in the other half breaks the cycle, if the devices have room for two operations."""
    assert_accepted(cycle())
    ahead = with_receives_ahead(cycle())
    assert not runs(over_one_communicator(ahead), Rules.NCCL)
    assert runs(over_one_communicator(ahead), Rules.GLOO)
    with pytest.raises(ProgramError, match="3 of 3 devices wait for ever"):
        check_run(over_one_communicator(ahead))
    assert runs(ahead, Rules.NCCL)
    assert not runs(ahead, Rules.ONE_ROOM)
    with pytest.raises(ProgramError, match="over different communicators in different orders"):
        prove(ahead)


def two_sums(settings: StepSettings) -> Program:
    """`wide` on devices 0 to 2, then `narrow` on 0 and 1, two ops each: its sums go over two devices, those
    of `wide` over three.
    """
    wide, narrow = metaop_of("a/wide", 2, {3: 1.0}, batch_size=6), metaop_of("b/narrow", 2, {2: 1.0})
    waves = [[slice_of(wide, (0, 2), (0, 1, 2), 0.0)], [slice_of(narrow, (0, 2), (0, 1), 2.0)]]
    program = link(plan_of(profile_of(wide, narrow), cluster_of(3), waves), settings=settings)
    assert_accepted(program)
    return program


def test_gathers_that_are_left_behind_at_the_end_are_refused() -> None:
    """Nothing in the step waits for them; the next one would, for ever."""
    program = two_sums(StepSettings(sharded=True))
    gathers = [step for step, action in enumerate(program.actions[1]) if action.kind is Kind.GATHER]
    crossed = program
    for _ in range(2):  # those over two devices ahead of those over three
        crossed = changed(crossed, 1, move(gathers[-1], gathers[0]))
    assert runs(crossed, Rules.NCCL)
    assert not runs(crossed, Rules.ONE_ROOM)
    with pytest.raises(ProgramError, match="over different communicators in different orders"):
        prove(crossed)


def test_flags_before_the_last_sum_of_their_communicator_are_refused() -> None:
    """Even where all devices agree on it: the sum may wait for its last op, and the flags know no more."""
    program = two_sums(StepSettings(sharded=True))
    for device in (0, 1):
        flags = next(
            step
            for step, action in enumerate(program.actions[device])
            if action.kind is Kind.FLAGS and action.communicator != 0
        )
        last_sum = max(
            step
            for step, action in enumerate(program.actions[device][:flags])
            if action.kind is Kind.SUM and action.communicator != 0
        )
        program = changed(program, device, move(flags, last_sum))
    with pytest.raises(ProgramError, match="exchanges flags before its last sum"):
        prove(program)


def test_a_sum_over_everyone_is_on_the_same_side_of_the_losses_on_all_devices() -> None:
    net = metaop_of("task/net", 1, {2: 1.0})
    program = link(plan_of(profile_of(net), cluster_of(2), [[slice_of(net, (0, 1), (0, 1), 0.0)]]))
    assert_accepted(program)
    first, second = (move(step_of(program, device, Kind.LOSSES), 3) for device in (0, 1))
    behind = changed(program, 0, first)
    with pytest.raises(ProgramError, match="in different orders over one communicator"):
        prove(behind)
    behind = changed(behind, 1, second)
    kinds = [action.kind for action in behind.actions[1]]
    assert kinds == [Kind.FORWARD, Kind.BACKWARD, Kind.SUM, Kind.LOSSES, Kind.STEP]
    assert_accepted(behind)


def with_op(program: Program, device: int, group: int, op: int) -> Program:
    """A sum of a device starts with another op."""
    actions = tuple(
        replace(action, op=op) if (action.kind, action.group) == (Kind.SUM, group) else action
        for action in program.actions[device]
    )
    return replace(program, actions={**program.actions, device: actions})


def test_a_sum_that_starts_inside_a_pass_is_ahead_of_what_is_posted_behind_the_pass() -> None:
    """`second` on device 0 hands its gradient to `first` on device 1, and both have the same parameters. On
    device 0 the sum of op 1's stands behind the send. With op 1 it would start before it, while device 1
    posts the receive before the sum.
    """
    first = metaop_of("task/first", 2, {1: 1.0}, parameters="shared")
    second = metaop_of("task/second", 2, {1: 1.0}, parameters="shared", inputs=(first.name,))
    waves = [[slice_of(first, (0, 2), (1,), 0.0)], [slice_of(second, (0, 2), (0,), 2.0)]]
    program = link(plan_of(profile_of(first, second), cluster_of(2), waves))
    assert_accepted(program)
    kinds = [action.kind for action in program.actions[0]]
    assert kinds[-5:] == [Kind.BACKWARD, Kind.SEND_GRAD, Kind.SUM, Kind.SUM, Kind.STEP]
    early = with_op(program, 0, 0, 1)
    assert runs(early, Rules.NCCL)
    assert not runs(early, Rules.ONE_ROOM)
    with pytest.raises(ProgramError, match="over different communicators in different orders"):
        prove(early)


def test_sums_inside_split_passes_that_wait_for_each_others_end_are_refused() -> None:
    """Devices 0 and 1 share a slice, and 2 and 3; 0 and 2 share parameters, and 1 and 3. Device 0 starts its
    sum inside its pass, device 2 behind its own; where 3 starts its sum inside and 1 behind, each pass waits
    for the other. So one of two passes has to be the first to end, by a clock without ties.
    """
    halves = CurvePoint(num_devices=2, dp=1, tp=2, forward_s=0.2, backward_s=0.4, source="measured")
    nets = [metaop_of(f"{task}/net", 2, {1: 1.0}, parameters="shared") for task in "ab"]
    nets = [net.model_copy(update={"curve": (*net.curve, halves)}) for net in nets]
    waves = [
        [
            slice_of(net, (0, 2), devices, 0.0, tp=2)
            for net, devices in zip(nets, ((0, 1), (2, 3)), strict=True)
        ]
    ]
    program = link(plan_of(profile_of(*nets), cluster_of(4), waves))
    assert_accepted(program)
    ops = [{a.group: a.op for a in program.actions[device] if a.kind is Kind.SUM} for device in range(4)]
    assert ops == [{0: 1, 2: 0}, {1: 1, 3: 0}, {0: 0, 2: 0}, {1: 0, 3: 0}]
    crossed = with_op(with_op(program, 1, 1, 0), 3, 1, 1)
    assert runs(crossed, Rules.NCCL)
    assert not runs(crossed, Rules.ONE_ROOM)
    with pytest.raises(ProgramError, match="over different communicators in different orders"):
        prove(crossed)


def test_a_sum_starts_inside_of_every_pass_that_is_under_way_when_it_is_complete() -> None:
    """The first slice runs its ops backward until 6, 8, 10 and 12 s, the second until 4.2, 5.6, 7 and 8.4 s:
    the sum of op 3 is complete at 6 s, which is nearest to the second one's op 2; that of op 2 at 8 s.
    """
    slow, fast = (
        metaop_of(f"{task}/net", 4, {1: op_s}, parameters="shared", param_bytes_per_op=2**26)
        for task, op_s in (("a", 3.0), ("b", 2.1))
    )
    waves = [[slice_of(slow, (0, 4), (0,), 0.0), slice_of(fast, (0, 4), (1,), 0.0)]]
    program = link(plan_of(profile_of(slow, fast), cluster_of(2), waves))
    assert_accepted(program)
    ops = [[a.op for a in program.actions[device] if a.kind is Kind.SUM] for device in range(2)]
    assert ops == [[3, 2, 1, 0], [2, 0, 0, 0]]


def test_a_sum_over_all_devices_that_is_complete_early_starts_before_all_losses_are_there() -> None:
    """Of the first task, whose backward pass is ahead of the second one's forward pass: inside the pass that
    completes it, ahead of the losses.
    """
    first, second = (metaop_of(f"{name}/net", 2, {2: 0.75}, parameters=name) for name in "ab")
    slices = [slice_of(each, (0, 2), (0, 1), 0.0) for each in (first, second)]
    times = ((0.0, 0.5, 0.5, 1.5), (1.5, 2.0, 2.0, 3.0))
    keys = ("start_s", "end_s", "backward_start_s", "backward_end_s")
    apart = [
        piece.model_copy(update=dict(zip(keys, own, strict=True)))
        for piece, own in zip(slices, times, strict=True)
    ]
    plan = plan_of(profile_of(first, second), cluster_of(2), [(piece,) for piece in slices])
    waves = tuple(
        wave.model_copy(update={"slices": (piece,)}) for wave, piece in zip(plan.waves, apart, strict=True)
    )
    own_order = plan.model_copy(update={"schema_": "spindle.plan/2", "waves": waves})
    # With the optimizer's state shared out, flags come behind the last of these sums, wherever that is.
    prove(link(own_order, settings=StepSettings(sharded=True)))
    program = link(own_order)
    prove(program)
    written = [(action.kind, action.slice_index, action.op) for action in program.actions[0]]
    kinds = [kind for kind, _, _ in written]
    first_sum, losses = kinds.index(Kind.SUM), kinds.index(Kind.LOSSES)
    assert kinds[:first_sum] == [Kind.FORWARD, Kind.BACKWARD]
    assert kinds[losses - 1 : losses + 2] == [Kind.FORWARD, Kind.LOSSES, Kind.BACKWARD]
    sums = [op for kind, _, op in written[first_sum : losses - 1] if kind is Kind.SUM]
    assert len(sums) == losses - 1 - first_sum and set(sums) <= {0, 1}
