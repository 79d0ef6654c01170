"""The program of an evaluation: one task's forward passes of the step's program, proved by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_proof import changed, steps_of, swap

from helpers.examples import examples
from helpers.plans import two_towers
from helpers.random_plans import plans
from spindle_cli.plan.types import Plan
from spindle_cli.program.evaluated import forward_only
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove_forward
from spindle_cli.program.types import Kind, Program


def tasks_of(plan: Plan) -> list[str]:
    return sorted({metaop.task for metaop in plan.metaops})


@examples(60)
@given(plans())
def test_every_task_s_forward_passes_alone_come_to_their_end(plan: Plan) -> None:
    whole = link(plan)
    counted = 0
    for task in tasks_of(plan):
        forward = forward_only(whole, task)
        prove_forward(forward, whole, task)
        counted += sum(len(actions) for actions in forward.actions.values())
    kinds = (Kind.FORWARD, Kind.SEND, Kind.RECV)
    assert counted == sum(action.kind in kinds for own in whole.actions.values() for action in own)


@examples(60)
@given(plans(), st.data())
def test_any_action_removed_is_caught(plan: Plan, data: st.DataObject) -> None:
    whole, task = link(plan), data.draw(st.sampled_from(tasks_of(plan)))
    forward = forward_only(whole, task)
    device = data.draw(st.sampled_from([device for device, own in forward.actions.items() if own]))
    step = data.draw(st.sampled_from(range(len(forward.actions[device]))))
    with pytest.raises(ProgramError):
        prove_forward(changed(forward, device, lambda actions: actions.pop(step)), whole, task)


@examples(60)
@given(plans(), st.data())
def test_a_message_on_the_wrong_side_of_its_pass_is_caught(plan: Plan, data: st.DataObject) -> None:
    whole, task = link(plan), data.draw(st.sampled_from(tasks_of(plan)))
    forward = forward_only(whole, task)
    places = [
        (device, message, passing)
        for device, actions in forward.actions.items()
        for message in steps_of(forward, device, Kind.SEND, Kind.RECV)
        for passing in steps_of(forward, device, Kind.FORWARD)
        if is_its_pass(forward, device, message, passing)
        and actions[message].kind is (Kind.SEND if passing < message else Kind.RECV)
    ]
    assume(places)
    device, message, passing = data.draw(st.sampled_from(places))
    with pytest.raises(ProgramError, match=r"before it is computed|after it is needed|wait for ever"):
        prove_forward(changed(forward, device, swap(*sorted((message, passing)))), whole, task)


def is_its_pass(forward: Program, device: int, message: int, passing: int) -> bool:
    transfer, piece = forward.actions[device][message].transfer, forward.actions[device][passing].slice_index
    assert transfer is not None
    return piece == (transfer.producer if transfer.source == device else transfer.consumer)


def test_what_is_no_forward_pass_is_caught() -> None:
    _, plan = two_towers()
    whole = link(plan)
    (task,) = tasks_of(plan)
    with pytest.raises(ProgramError, match=r"run each of its slices once|forward passes alone|hand on"):
        prove_forward(whole, whole, task)
    actions = whole.actions[0]
    losses = next(action for action in actions if action.kind is Kind.LOSSES)
    forward = forward_only(whole, task)
    more = replace(forward, actions={**forward.actions, 0: (*forward.actions[0], losses)})
    with pytest.raises(ProgramError, match="forward passes alone"):
        prove_forward(more, whole, task)
