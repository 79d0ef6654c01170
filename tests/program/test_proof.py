"""Whatever is broken in a program, the proof finds it and shows the place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.random_plans import plans
from spindle_cli.errors import ExitCode
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Action, Kind, Program, StepSettings

# What the proof says of a device whose program lacks one action of a kind.
_ONE_END = "posts what its peer does not|post in different orders over one communicator"
MISSED = {
    Kind.RECV: _ONE_END,
    Kind.SEND: _ONE_END,
    Kind.RECV_GRAD: _ONE_END,
    Kind.SEND_GRAD: _ONE_END,
    Kind.FORWARD: r"expected F here|does not run F \d",
    Kind.BACKWARD: r"backward does not mirror forward|does not run B \d",
    Kind.LOSSES: "has 0 LOSSES, expected 1",
    Kind.SUM: r"starts SUM \d+, or should and does not",
    Kind.FLAGS: "does not exchange flags once",
    Kind.NORM: "has 0 NORM, expected 1",
    Kind.STEP: "expected one STEP",
    Kind.GATHER: "does not gather each group",
}


def changed(program: Program, device: int, change: Callable[[list[Action]], object]) -> Program:
    actions = list(program.actions[device])
    change(actions)
    return replace(program, actions={**program.actions, device: tuple(actions)})


def steps_of(program: Program, device: int, *kinds: Kind) -> list[int]:
    return [step for step, action in enumerate(program.actions[device]) if action.kind in kinds]


def last_before_step(step: int) -> Callable[[list[Action]], None]:
    def change(actions: list[Action]) -> None:
        action = actions.pop(step)
        end = min(step for step, other in enumerate(actions) if other.kind in (Kind.NORM, Kind.STEP))
        actions.insert(end, action)

    return change


def swap(first: int, second: int) -> Callable[[list[Action]], None]:
    def change(actions: list[Action]) -> None:
        actions[first], actions[second] = actions[second], actions[first]

    return change


@examples(100)
@given(plans(), st.data())
def test_any_action_removed_is_caught(plan: Plan, data: st.DataObject) -> None:
    program = link(plan, settings=StepSettings(sharded=data.draw(st.booleans()), clips=True))
    device = data.draw(
        st.sampled_from([device for device, actions in program.actions.items() if len(actions) > 1])
    )
    step = data.draw(st.integers(0, len(program.actions[device]) - 1))
    with pytest.raises(ProgramError, match=MISSED[program.actions[device][step].kind]):
        prove(changed(program, device, lambda actions: actions.pop(step)))


@examples(100)
@given(plans(), st.data())
def test_both_ends_of_a_transfer_removed_is_caught(plan: Plan, data: st.DataObject) -> None:
    program = link(plan)
    transfers = [
        action.transfer
        for actions in program.actions.values()
        for action in actions
        if action.kind in (Kind.SEND, Kind.SEND_GRAD)
    ]
    assume(transfers)
    lost = data.draw(st.sampled_from(transfers))
    actions = {
        device: tuple(action for action in own if action.transfer != lost)
        for device, own in program.actions.items()
    }
    with pytest.raises(ProgramError, match="once for"):
        prove(replace(program, actions=actions))


@examples(100)
@given(plans(), st.data())
def test_two_posts_of_a_pair_in_another_order_on_one_side_are_caught(plan: Plan, data: st.DataObject) -> None:
    program = link(plan)
    pairs = [
        (device, first, second)
        for device, actions in program.actions.items()
        for first in range(len(actions))
        for second in range(first + 1, len(actions))
        if (one := actions[first].transfer) is not None
        and (other := actions[second].transfer) is not None
        and {one.source, one.destination} == {other.source, other.destination}
    ]
    assume(pairs)
    device, first, second = data.draw(st.sampled_from(pairs))
    with pytest.raises(ProgramError, match=r"in different orders|needs [FB] \d+ before this|wait for ever"):
        prove(changed(program, device, swap(first, second)))


@examples(100)
@given(plans(), st.data())
def test_a_receive_posted_after_its_compute_is_caught(plan: Plan, data: st.DataObject) -> None:
    program = link(plan)
    places = [
        (device, step)
        for device in program.actions
        for step in steps_of(program, device, Kind.RECV, Kind.RECV_GRAD)
    ]
    assume(places)
    device, step = data.draw(st.sampled_from(places))
    with pytest.raises(ProgramError, match=r"in different orders|wait for ever"):
        prove(changed(program, device, last_before_step(step)))


@examples(50)
@given(plans(), st.data())
def test_two_sums_in_another_order_on_one_device_are_caught(plan: Plan, data: st.DataObject) -> None:
    program = link(plan)
    devices = [device for device in program.actions if len(steps_of(program, device, Kind.SUM)) > 1]
    assume(devices)
    device = data.draw(st.sampled_from(devices))
    first, second = steps_of(program, device, Kind.SUM)[:2]
    with pytest.raises(
        ProgramError,
        match=r"starts its sums out of order|may start this sum before|an op of the slice before",
    ):
        prove(changed(program, device, swap(first, second)))


def test_a_sum_that_may_begin_too_early_is_caught() -> None:
    program = link(two_towers()[1])
    step = steps_of(program, 0, Kind.SUM)[-1]
    early = replace(program.actions[0][step], op=2)
    with pytest.raises(ProgramError, match="before op 1, which adds"):
        prove(changed(program, 0, lambda actions: actions.__setitem__(step, early)))


def test_a_send_before_its_compute_is_caught() -> None:
    program = link(two_towers()[1])
    send = steps_of(program, 0, Kind.SEND)[0]
    with pytest.raises(ProgramError, match="needs F 0 before this"):
        prove(changed(program, 0, lambda actions: actions.insert(0, actions.pop(send))))


def test_samples_sent_by_who_does_not_hold_them_are_caught() -> None:
    """Device 1 claims to send rows of the other half of the batch, and the receiver believes it."""
    program = link(two_towers()[1])
    send = steps_of(program, 1, Kind.SEND)[0]
    honest = program.actions[1][send].transfer
    assert honest is not None
    lie = replace(honest, first=honest.first - 4, last=honest.last - 4)
    actions = {
        device: tuple(
            replace(action, transfer=lie) if action.transfer == honest else action for action in own
        )
        for device, own in program.actions.items()
    }
    with pytest.raises(ProgramError, match="does not hold"):
        prove(replace(program, actions=actions))


def test_devices_that_wait_for_ever_are_shown_where_they_stand() -> None:
    """Device 1 posts its receive after the compute that needs it; device 0 then waits for its gradient."""
    net = metaop_of("task/net", 2, {1: 1.0})
    waves = [[slice_of(net, (0, 1), (0,), 0.0)], [slice_of(net, (1, 2), (1,), 1.0)]]
    program = link(plan_of(profile_of(net), cluster_of(2), waves))
    with pytest.raises(ProgramError, match="2 of 2 devices wait for ever") as raised:
        prove(changed(program, 1, swap(0, 1)))
    assert raised.value.exit_code == ExitCode.FAILED
    assert "device 0, from step 0: F 0  SEND#0>1  LOSSES  RECV_GRAD#1<1  >>B 0<<  STEP" in str(raised.value)
    assert "device 1, from step 0: >>F 1<<  RECV#0<0  LOSSES  B 1" in str(raised.value)


def test_devices_that_run_split_slices_in_different_orders_are_caught() -> None:
    """Two MetaOps, both split over devices 0 and 1, which begin with different ones."""
    halves = CurvePoint(num_devices=2, dp=1, tp=2, forward_s=0.2, backward_s=0.4, source="measured")
    nets = [metaop_of(f"task/{name}", 1, {1: 1.0}) for name in ("left", "right")]
    nets = [net.model_copy(update={"curve": (*net.curve, halves)}) for net in nets]
    waves = [
        [slice_of(net, (0, 1), (0, 1), start_s, tp=2)] for net, start_s in zip(nets, (0.0, 0.6), strict=True)
    ]
    program = link(plan_of(profile_of(*nets), cluster_of(2), waves))
    prove(program)
    forward, backward = (steps_of(program, 1, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
    turned = changed(changed(program, 1, swap(*forward)), 1, swap(*backward))
    with pytest.raises(ProgramError, match="devices 0 and 1 post in different orders"):
        prove(turned)
