"""What a device has sent is given up when the slice that has made the value has run backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.files.cluster import Link, Links
from spindle_cli.plan.types import Plan, Wave
from spindle_cli.program.link import link
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Kind
from spindle_cli.show.text import format_action
from spindle_cli.simulate.engine import Engine
from spindle_cli.simulate.types import Cause


def two_stages(count: int, gb_per_s: float = 1000.0) -> Plan:
    """A MetaOp on device 0 and one that takes 1 GB of it on device 1, in so many micro-batches of which two
    are open at a time; passes take a second each.
    """
    shares = {
        "shares": [{"samples": 8 // count, "tp": 1, "forward_s": 1, "backward_s": 1, "source": "fitted"}]
    }
    first = metaop_of("t/a", 1, {1: 1.0}).model_copy(update={"output_bytes": 10**9})
    second = metaop_of("t/b", 1, {1: 1.0}, inputs=("t/a",))
    metaops = [type(each).model_validate({**each.model_dump(), **shares}) for each in (first, second)]
    slices = []
    for number in range(count):
        for device, (metaop, at) in enumerate(zip(metaops, ((0, 5), (2, 3)), strict=True)):
            starts = [2.0 * number + start for start in at]
            times = {"start_s": starts[0], "end_s": starts[0] + 1}
            times |= {"backward_start_s": starts[1], "backward_end_s": starts[1] + 1}
            update = {**times, "micro_batch": number, "micro_batches": count}
            slices.append(slice_of(metaop, (0, 1), (device,), 0.0).model_copy(update=update))
    slices.sort(key=lambda piece: piece.start_s)
    fast = Link(latency_us=0, bandwidth_gb_per_s=gb_per_s)
    cluster = cluster_of(2).changed(links=Links(intra_node=fast, inter_node=fast))
    waves = tuple(
        Wave(index=index, start_s=piece.start_s, end_s=piece.end_s, slices=(piece,))
        for index, piece in enumerate(slices)
    )
    whole = [(slice_of(metaop, (0, 1), (device,), 0.0),) for device, metaop in enumerate(metaops)]
    plan = plan_of(profile_of(*metaops), cluster, whole)
    update = {"schema_": "spindle.plan/2", "micro_batches": {"t": count}, "waves": waves}
    return plan.model_copy(update=update)


def test_each_stage_gives_up_what_it_has_sent_while_others_are_under_way() -> None:
    program = link(two_stages(4))
    prove(program)
    labels = {index: f"{piece.metaop[-1]}{piece.micro_batch}" for index, piece in enumerate(program.slices)}
    sent = {}
    for action in (action for actions in program.actions.values() for action in actions):
        if action.transfer is not None:
            back = " back" if action.transfer.is_gradient else ""
            sent[action.transfer.key] = labels[action.transfer.producer] + back
    found = {
        device: {
            f"{action.kind} {labels[action.slice_index]}": [sent[key] for key in action.left]
            for action in program.actions[device]
            if action.slice_index is not None and action.left
        }
        for device in (0, 1)
    }
    assert found == {
        0: {"F a3": ["a0"], "B a2": ["a1"], "B a3": ["a2"]},
        1: {"B b2": ["a0 back"], "B b3": ["a1 back"]},
    }
    assert any(" behind " in format_action(action) for action in program.actions[1])


def test_a_pass_waits_until_what_it_gives_up_has_left() -> None:
    """A quarter of a GB takes 3.5 s one way, longer than the program reckons with: the gradient of the first
    micro-batch leaves from 5.5 s on.
    """
    slow = two_stages(4, gb_per_s=0.25 / 3.5)
    simulation = Engine(replace(link(two_stages(4)), plan=slow)).run()
    waits = [wait for wait in simulation.waits if wait.cause is Cause.LEAVING]
    assert {wait.device for wait in waits} == {1}
    assert {wait.source for wait in waits} == {0}
    ends = {passage.end_s for passage in simulation.passages if passage.is_gradient}
    assert all(wait.end_s in ends for wait in waits)


def test_nothing_waits_for_what_has_left() -> None:
    simulation = Engine(link(two_stages(4))).run()
    assert not [wait for wait in simulation.waits if wait.cause is Cause.LEAVING]
    assert simulation.step_s == pytest.approx(10.0, rel=0.01)
    assert Kind.BACKWARD in {action.kind for action in link(two_stages(2)).actions[0]}
