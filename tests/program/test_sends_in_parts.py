"""Groups on another node are sent parts: in programs, their proof, their text and their simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.clocks import clock_of
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.activations import WHOLE
from spindle_cli.account.traffic import traffic_of
from spindle_cli.files.cluster import Link, Links
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Action, Kind, Program, Transfer
from spindle_cli.show.text import format_action, parse_action
from spindle_cli.simulate.engine import Engine, slice_durations

GB = 10**9


def between_nodes(*, per_node: int = 2) -> Plan:
    """A slice on devices 0 and 1 that hands 4 GB to a tensor-parallel one on 2 and 3; passes take 1 and 2 s.
    A GB takes a second between nodes, and a tenth inside.
    """
    curve = tuple(
        CurvePoint(num_devices=dp * tp, dp=dp, tp=tp, forward_s=1, backward_s=2, source="measured")
        for dp, tp in ((2, 1), (1, 2))
    )
    first = metaop_of("t/a", 1, {1: 1.0}).model_copy(update={"output_bytes": 4 * GB, "curve": curve})
    second = metaop_of("t/b", 1, {1: 1.0}, inputs=("t/a",)).model_copy(update={"curve": curve})
    slices = slice_of(first, (0, 1), (0, 1), 0.0), slice_of(second, (0, 1), (2, 3), 3.0, tp=2)
    inside, between = (Link(latency_us=0, bandwidth_gb_per_s=speed) for speed in (10, 1))
    cluster = cluster_of(4, devices_per_node=per_node, memory_gib=64)
    cluster = cluster.changed(links=Links(intra_node=inside, inter_node=between))
    return plan_of(profile_of(first, second), cluster, [(piece,) for piece in slices])


def transfers_of(program: Program, kind: Kind) -> list[Transfer]:
    actions = (action for own in program.actions.values() for action in own)
    return [action.transfer for action in actions if action.kind is kind and action.transfer is not None]


def test_activations_go_in_parts_and_gradients_whole_to_who_needs_no_more() -> None:
    program = link(between_nodes())
    prove(program)
    sends = {
        (each.source, each.destination, each.part, each.num_bytes)
        for each in transfers_of(program, Kind.SEND)
    }
    assert sends == {(0, 2, (0, 2), GB), (1, 2, (0, 2), GB), (0, 3, (1, 2), GB), (1, 3, (1, 2), GB)}
    assert {each.part for each in transfers_of(program, Kind.SEND_GRAD)} == {WHOLE}
    assert {each.part for each in transfers_of(link(between_nodes(per_node=4)), Kind.SEND)} == {WHOLE}


def test_the_account_moves_what_the_program_does() -> None:
    plan = between_nodes()
    program = link(plan)
    sent: dict[tuple[int, int], int] = {}
    for each in (*transfers_of(program, Kind.SEND), *transfers_of(program, Kind.SEND_GRAD)):
        sent[each.source, each.destination] = sent.get((each.source, each.destination), 0) + each.num_bytes
    assert traffic_of(plan).bytes_by_pair() == sent
    assert [each.gather_s for each in traffic_of(plan).activations] == [pytest.approx(0.2)]
    assert [each.gather_s for each in traffic_of(plan).gradients] == [0.0]


def test_a_pass_takes_longer_by_what_it_gathers() -> None:
    """4 GB over a card, in 4 s; then 2 GB at 10 GB/s."""
    program = link(between_nodes())
    assert [each.forward_s for each in slice_durations(program)] == [1.0, pytest.approx(1.2)]
    assert [each.backward_s for each in slice_durations(program)] == [2.0, 2.0]
    ends = {(span.slice_index, span.activity): span.end_s for span in Engine(program).run().spans}
    assert ends[1, "forward"] == pytest.approx(1 + 4 + 1.2)


def test_so_it_does_by_the_clock() -> None:
    """Forward in 1 and 1.2 s, with 4 s of messages between; backward in 2 and 2 s."""
    clock = clock_of(between_nodes())
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    times = {kind: [clock.when[kind, index] for index in (0, 1)] for kind in kinds}
    lengths = {kind: [(end - start) / 4e9 for start, end in times[kind]] for kind in kinds}
    assert lengths[Kind.FORWARD] == pytest.approx([1.0, 1.2], abs=1e-8)
    assert lengths[Kind.BACKWARD] == pytest.approx([2.0, 2.0], abs=1e-8)
    assert times[Kind.FORWARD][1][0] / 4e9 == pytest.approx(5.0, abs=1e-8)


def test_parts_have_a_text() -> None:
    program = link(between_nodes())
    texts = [format_action(action) for action in program.actions[3] if action.kind is Kind.RECV]
    assert [text.split(" rows ")[1] for text in texts] == [
        "0:4 part 1/2 1000000000 B on 1",
        "4:8 part 1/2 1000000000 B on 1",
    ]
    assert [parse_action(text) for text in texts] == [a for a in program.actions[3] if a.kind is Kind.RECV]


def changed(program: Program, source: int, destination: int, part: tuple[int, int]) -> Program:
    """With both ends of the first activation between two devices of another part."""

    def of(action: Action) -> Action:
        transfer = action.transfer
        if (
            transfer is None
            or transfer.is_gradient
            or (transfer.source, transfer.destination) != (source, destination)
        ):
            return action
        return replace(action, transfer=replace(transfer, part=part))

    actions = {device: tuple(map(of, own)) for device, own in program.actions.items()}
    return replace(program, actions=actions)


@pytest.mark.parametrize(
    ("ends", "part"),
    [
        pytest.param((0, 2), (1, 2), id="the other device's"),
        pytest.param((0, 2), (0, 4), id="of more than there are devices"),
        pytest.param((0, 2), WHOLE, id="all of it, which the others take for a part"),
    ],
)
def test_the_proof_refuses_parts_that_do_not_make_up_a_whole(
    ends: tuple[int, int], part: tuple[int, int]
) -> None:
    with pytest.raises(
        ProgramError, match=r"devices \[2, 3\] do not get all parts of what they gather for F 1"
    ):
        prove(changed(link(between_nodes()), *ends, part))
