"""Each thing that the proof refuses, broken by hand in one place of one program: the proof says just that,
and shows the place.

The program is `two_towers` with shared optimizer state and clipped gradients. Device 2 runs:
0 F 1, 1 SEND, 2 RECV, 3 F 2, 4 SEND, 5 LOSSES, 6-7 RECV_GRAD, 8 B 2, 9 SUM 0, 10 SEND_GRAD, 11 B 1,
12-14 SUM 1, 2 and 4 (of ops 2, 1, 0), 15-16 FLAGS, 17 NORM, 18 STEP, 19-21 GATHER 4, 2 and 1, 22 GATHER 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from helpers.cut import cuttable
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.uneven import uneven_plan
from spindle_cli.account.types import Purpose
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError, format_grid
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Action, Communicator, Kind, Program, StepSettings

DEVICE = 2
Change = Callable[[list[Action]], object]


@pytest.fixture(scope="module")
def program() -> Program:
    whole = link(two_towers()[1], settings=StepSettings(sharded=True, clips=True))
    prove(whole)
    return whole


def move(source: int, target: int) -> Change:
    return lambda actions: actions.insert(target, actions.pop(source))


def swap(first: int, second: int) -> Change:
    def change(actions: list[Action]) -> None:
        actions[first], actions[second] = actions[second], actions[first]

    return change


def lose(step: int) -> Change:
    return lambda actions: actions.pop(step)


def repeat(step: int) -> Change:
    return lambda actions: actions.insert(step, actions[step])


def turn(step: int, **values: Any) -> Change:
    return lambda actions: actions.__setitem__(step, replace(actions[step], **values))


FAULTS: dict[str, tuple[Change, str, str]] = {
    "backward before the last forward": (move(3, 8), "expected F here", ">>B 2<<"),
    "a slice twice forward": (
        turn(3, slice_index=1),
        "does not run each of its slices forward once",
        ">>F 1<<",
    ),
    "a slice that is not its own": (turn(3, slice_index=0), "does not run each of its slices", ">>F 1<<"),
    "a slice not forward": (lose(3), "expected F here", ">>B 2<<"),
    "backward in the order of forward": (swap(8, 11), "backward does not mirror forward", ">>F 1<<"),
    "a slice not backward": (lose(11), "backward does not mirror forward", ">>F 1<<"),
    "no step": (lose(18), "expected one STEP, and only GATHERs behind it", ">>NORM<<"),
    "two steps": (repeat(18), "expected one STEP", ">>STEP<<"),
    "a sum behind the step": (move(14, 18), "expected one STEP", ">>SUM 4<<"),
    "the norm one early": (swap(16, 17), "expected NORM just before STEP", ">>NORM<<"),
    "sums in another order": (swap(12, 13), "may start this sum before op 1", ">>SUM 2<<"),
    "a sum twice": (repeat(12), "starts its sums out of order", ">>SUM 1<<"),
    "a sum lost": (lose(12), "device 2 starts SUM 1, or should and does not", ">>GATHER 0<<"),
    "a sum of others": (turn(12, group=6), "starts its sums out of order", ">>SUM 2<<"),
    "a sum one op early": (turn(13, op=2), "may start this sum before op 1, which adds to it", ">>SUM 2<<"),
    "a sum from behind that takes it along": (turn(14, op=1), "before op 0, which adds", ">>SUM 4<<"),
    "a sum of an op behind the slice": (turn(12, op=3), "expected an op of the slice before", ">>SUM 1<<"),
    "a sum of no op": (turn(12, op=None), "expected an op of the slice before", ">>SUM 1<<"),
    "a sum before any backward pass": (move(9, 8), "expected an op of the slice before", ">>SUM 0<<"),
    "the losses before the last forward": (move(5, 3), "needs F 2 before this", ">>LOSSES<<"),
    "an activation before its pass": (move(4, 3), "needs F 2 before this", ">>SEND#"),
    "a gradient before its pass": (move(10, 8), "needs B 2 before this", ">>SEND_GRAD#"),
    "a communicator lost": (turn(5, communicator=None), "has no communicator for this", ">>LOSSES<<"),
    "one that is not there": (turn(5, communicator=5), "there is no communicator 5 for this", ">>LOSSES<<"),
    "one of the other half": (turn(10, communicator=1), "1, messages, is not for this", ">>SEND_GRAD#"),
    "one of fewer devices": (turn(9, communicator=4), "4, sums, is not for this", ">>SUM 0<<"),
    "one of more devices": (turn(12, communicator=0), "0, everyone, is not for this", ">>SUM 1<<"),
    "a step with a communicator": (turn(18, communicator=0), "no communicator 0 for this", ">>STEP<<"),
    "a gradient taken as an activation": (
        turn(6, kind=Kind.RECV, communicator=1),
        "device 2 posts what is not its own",
        ">>RECV#9<0<<",
    ),
    "no losses": (lose(5), "device 2 has 0 LOSSES, expected 1", ">>GATHER 0<<"),
    "two losses": (repeat(5), "device 2 has 2 LOSSES, expected 1", ">>GATHER 0<<"),
    "no norm": (lose(17), "device 2 has 0 NORM, expected 1", ">>GATHER 0<<"),
    "a group not gathered": (lose(20), "does not gather each group that it has summed once", ">>GATHER 0<<"),
    "a group gathered twice": (repeat(20), "does not gather each group", ">>GATHER 0<<"),
    "no flags over one communicator": (lose(16), "does not exchange flags once over each", ">>GATHER 0<<"),
    "flags before the last sum": (swap(14, 16), "exchanges flags before its last sum", ">>FLAGS<<"),
    "the losses behind a sum of everyone": (move(5, 9), "2 post in different orders over one", ">>SUM 0<<"),
    "an end of a transfer lost": (lose(4), "device 0 posts what its peer does not", ">>RECV#6<2<<"),
    "what is not sent yet given up": (turn(8, left=(14,)), "gives up before this what it has not", ">>B 2<<"),
    "what is sent given up twice": (turn(8, left=(6,)), "gives up before this what it has not", ">>B 1<<"),
    "gathers in another order": (swap(19, 20), "devices 2 and 3 post in different orders", ">>GATHER 2<<"),
    "a receive behind what takes it": (swap(1, 3), "4 of 4 devices wait for ever", ">>F 2<<"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_proof_says_what_is_wrong_and_shows_where(name: str, program: Program) -> None:
    change, message, place = FAULTS[name]
    actions = list(program.actions[DEVICE])
    change(actions)
    broken = replace(program, actions={**program.actions, DEVICE: tuple(actions)})
    with pytest.raises(ProgramError, match=re.escape(message)) as raised:
        prove(broken)
    assert place in str(raised.value)


def renumbered(program: Program, **values: Any) -> Program:
    second = replace(program.communicators[1], **values)
    return replace(program, communicators=(program.communicators[0], second, *program.communicators[2:]))


@pytest.mark.parametrize("values", [{"index": 2}, {"ranks": (1, 0, 2, 3)}, {"ranks": (0, 1, 2, 2, 3)}])
def test_communicators_that_devices_would_make_differently_are_refused(
    values: dict[str, Any], program: Program
) -> None:
    with pytest.raises(ProgramError, match="communicator 1 is numbered"):
        prove(renumbered(program, **values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"senders": ()}, "communicator 1, messages, is of senders ()"),
        ({"purpose": Purpose.SUMS}, "communicator 1, sums, is of senders (0,)"),
        ({"senders": (0, 1)}, "device 1 does not send over one communicator that it is in"),
        ({"ranks": (1, 2, 3)}, "device 0 does not send over one communicator that it is in"),
        ({"senders": (3,)}, "device 3 does not send over one communicator that it is in"),
        ({"senders": (4,), "ranks": (0, 1, 2, 3, 4)}, "communicator 1, messages, is not for this"),
    ],
)
def test_senders_that_send_over_none_or_several_communicators_are_refused(
    values: dict[str, Any], message: str, program: Program
) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)):
        prove(renumbered(program, **values))


def test_a_third_communicator_of_messages_is_refused(program: Program) -> None:
    third = Communicator(5, (2, 3), Purpose.MESSAGES, (4,))
    with pytest.raises(ProgramError, match="communicator 1, messages, is of senders"):
        prove(replace(program, communicators=(*program.communicators, third)))


def handed_on(num_devices: int, *, around: bool) -> Program:
    """Ops of a net on devices in a row, the last ones on the first device again if `around`."""
    net = metaop_of("task/net", num_devices + around, {1: 1.0})
    waves = [
        [slice_of(net, (number, number + 1), (number % num_devices,), float(number))]
        for number in range(net.num_ops)
    ]
    return link(plan_of(profile_of(net), cluster_of(num_devices), waves))


def all_in_one_half(program: Program) -> Program:
    """Every device sends over communicator 1."""
    everyone = tuple(sorted(program.actions))
    first = Communicator(1, everyone, Purpose.MESSAGES, everyone)
    actions = {
        device: tuple(each if each.transfer is None else replace(each, communicator=1) for each in own)
        for device, own in program.actions.items()
    }
    return replace(program, communicators=(program.communicators[0], first), actions=actions)


def test_devices_that_exchange_messages_are_in_different_halves_wherever_that_can_be() -> None:
    for program in (handed_on(3, around=False), handed_on(4, around=True)):
        prove(program)
        with pytest.raises(ProgramError, match=r"devices \d and 0 both send over communicator 1") as raised:
            prove(all_in_one_half(program))
        assert ">>RECV" in str(raised.value)
    odd = handed_on(3, around=True)
    prove(odd)
    prove(all_in_one_half(odd))


def transferred(program: Program, step: int, **values: Any) -> Program:
    """A transfer that device 2 posts at a step, as both of its ends now have it."""
    honest = program.actions[DEVICE][step].transfer
    assert honest is not None
    lie = replace(honest, **values)
    actions = {
        device: tuple(replace(each, transfer=lie) if each.transfer == honest else each for each in own)
        for device, own in program.actions.items()
    }
    return replace(program, actions=actions)


@pytest.mark.parametrize(
    ("step", "values", "message"),
    [
        (4, {"last": 5}, "device 0 needs samples 0:8 once for F 3, gets [(0, 2), (2, 4), (4, 5), (6, 8)]"),
        (4, {"last": 7}, "device 2 sends samples that it does not hold"),
        (4, {"first": 3}, "device 2 sends samples that it does not hold"),
        (4, {"first": 6}, "device 2 sends samples that it does not hold"),
        (7, {"first": 1}, "device 2 needs samples 0:4 once for B 1, gets [(1, 4)]"),
        (7, {"last": 5}, "device 2 needs samples 0:4 once for B 1, gets [(0, 5)]"),
        (4, {"producer": 1}, "device 2 sends samples that it does not hold"),
    ],
)
def test_samples_that_are_missing_or_come_twice_are_named(
    step: int, values: dict[str, int], message: str, program: Program
) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)):
        prove(transferred(program, step, **values))


def test_a_layout_that_is_not_the_plans_is_named() -> None:
    """8 samples in 5 + 3; by equal shares, in another order, and of another size."""
    metaop = cuttable("t/net", 1, {8: 2.0, 4: 1.2})
    linked = link(uneven_plan(metaop, (0, 5, 8)))
    prove(linked)
    (layout,) = linked.layouts
    for offsets, said in ((None, (0, 4)), ((0, 3, 8), (0, 3)), ((0, 4, 8), (0, 4))):
        broken = replace(linked, layouts=(replace(layout, offsets=offsets),))
        with pytest.raises(ProgramError, match=re.escape(f"device 0 has samples {said} of t/net[0:1]")):
            prove(broken)
    with pytest.raises(ProgramError, match=re.escape("device 1 has samples (5, 7)")):
        prove(replace(linked, layouts=(replace(layout, offsets=(0, 5, 7)),)))


@pytest.mark.parametrize("rows", [(0, 5, 7), (0, 5, 5, 8), (1, 5, 8), (0, 8)])
def test_shares_that_do_not_make_up_a_batch_are_named(rows: tuple[int, ...]) -> None:
    linked = link(uneven_plan(cuttable("t/net", 1, {8: 2.0, 4: 1.2}), (0, 5, 8)))
    slices = (linked.slices[0].model_copy(update={"rows": rows}),)
    with pytest.raises(ProgramError, match=re.escape(f"{list(rows)}, do not make up its 8 samples")):
        prove(replace(linked, slices=slices))


def test_what_one_device_sends_may_not_come_from_another_phase_or_end(program: Program) -> None:
    """A send that is posted as a receive, and one whose other end is the device itself."""
    for values in ({"kind": Kind.RECV}, {"transfer": replace(sent(program), destination=DEVICE)}):
        actions = list(program.actions[DEVICE])
        actions[4] = replace(actions[4], **values)
        broken = replace(program, actions={**program.actions, DEVICE: tuple(actions)})
        with pytest.raises(ProgramError, match="device 2 posts what is not its own"):
            prove(broken)


def sent(program: Program) -> Any:
    return program.actions[DEVICE][4].transfer


def test_an_activation_or_a_gradient_that_nobody_moves_is_missed() -> None:
    """Neither end of the one transfer of a chain over two devices, one way and the other."""
    net = metaop_of("task/net", 2, {1: 1.0})
    waves = [[slice_of(net, (0, 1), (0,), 0.0)], [slice_of(net, (1, 2), (1,), 1.0)]]
    chain = link(plan_of(profile_of(net), cluster_of(2), waves))
    for is_gradient, message in (
        (False, "device 1 needs samples 0:8 once for F 1, gets []"),
        (True, "device 0 needs samples 0:8 once for B 0, gets []"),
    ):
        actions = {
            device: tuple(a for a in own if a.transfer is None or a.transfer.is_gradient != is_gradient)
            for device, own in chain.actions.items()
        }
        with pytest.raises(ProgramError, match=re.escape(message)):
            prove(replace(chain, actions=actions))


def test_the_grid_shows_four_steps_on_either_side_and_says_where_there_are_more(program: Program) -> None:
    assert format_grid(program, [(2, 0), (2, 4), (2, 5), (2, 18), (2, 22)]).splitlines() == [
        "  device 2, from step 0: >>F 1<<  SEND#0>0  RECV#3<1  F 2  SEND#6>0 ...",
        "  device 2, from step 0: F 1  SEND#0>0  RECV#3<1  F 2  >>SEND#6>0<<  LOSSES  RECV_GRAD#9<0"
        "  RECV_GRAD#11<0  B 2 ...",
        "  device 2, from step 1: ... SEND#0>0  RECV#3<1  F 2  SEND#6>0  >>LOSSES<<  RECV_GRAD#9<0"
        "  RECV_GRAD#11<0  B 2  SUM 0 ...",
        "  device 2, from step 14: ... SUM 4  FLAGS  FLAGS  NORM  >>STEP<<  GATHER 4  GATHER 2"
        "  GATHER 1  GATHER 0",
        "  device 2, from step 18: ... STEP  GATHER 4  GATHER 2  GATHER 1  >>GATHER 0<<",
    ]
    ten = format_grid(program, [(2, 0)] * 10).splitlines()
    assert len(ten) == 9
    assert ten[-1] == "  and 2 more devices"
    assert len(format_grid(program, [(2, 0)] * 8).splitlines()) == 8
