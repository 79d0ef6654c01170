"""Programs solved by hand, and what holds for every program."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.clocks import clock_of
from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.random_plans import plans
from spindle_cli.account.activations import pass_order, slice_edges
from spindle_cli.account.types import Edge
from spindle_cli.plan.types import Plan
from spindle_cli.program.link import link
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Kind, Program, StepSettings
from spindle_cli.show.text import format_action
from spindle_cli.units import KIB


def texts(program: Program, device: int) -> list[str]:
    return [format_action(action) for action in program.actions[device]]


def test_one_slice_on_one_device_is_forward_backward_step() -> None:
    whole = metaop_of("task/net", 2, {1: 1.0})
    program = link(plan_of(profile_of(whole), cluster_of(1), [[slice_of(whole, (0, 2), (0,), 0.0)]]))
    assert texts(program, 0) == ["F 0", "LOSSES on 0", "B 0", "STEP"]


def test_two_slices_on_two_devices_hand_over_and_back() -> None:
    net = metaop_of("task/net", 2, {1: 1.0})
    waves = [[slice_of(net, (0, 1), (0,), 0.0)], [slice_of(net, (1, 2), (1,), 1.0)]]
    program = link(plan_of(profile_of(net), cluster_of(2), waves))
    there = "#0 0->1 slice 0>1 rows 0:8 65536 B on 1"
    back = "#1 1->0 slice 0>1 rows 0:8 65536 B on 2"
    assert texts(program, 0) == ["F 0", f"SEND {there}", "LOSSES on 0", f"RECV_GRAD {back}", "B 0", "STEP"]
    assert texts(program, 1) == [f"RECV {there}", "F 1", "LOSSES on 0", "B 1", f"SEND_GRAD {back}", "STEP"]


def test_data_parallel_slices_sum_their_shared_parameters_once() -> None:
    net = metaop_of("task/net", 1, {2: 1.0})
    program = link(plan_of(profile_of(net), cluster_of(2), [[slice_of(net, (0, 1), (0, 1), 0.0)]]))
    assert texts(program, 0) == texts(program, 1) == ["F 0", "LOSSES on 0", "B 0", "SUM 0 op 0 on 0", "STEP"]
    assert program.groups[0].num_bytes == 2**20


def test_an_idle_device_takes_part_in_what_all_sum() -> None:
    net = metaop_of("task/net", 1, {1: 1.0})
    program = link(plan_of(profile_of(net), cluster_of(2), [[slice_of(net, (0, 1), (0,), 0.0)]]))
    assert texts(program, 1) == ["LOSSES on 0", "STEP"]


def test_two_towers_have_the_edges_that_the_metagraph_asks_for() -> None:
    _, plan = two_towers()
    # slices: 0 vision[0:3], 1 text[0:3], 2 vision[3:4], 3 loss
    edges = slice_edges(plan)
    assert edges == (Edge(0, 2, inner=True), Edge(1, 3, inner=False), Edge(2, 3, inner=False))
    assert [piece for piece, _ in pass_order(plan, edges)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_an_input_of_every_op_goes_to_every_slice() -> None:
    encoder = metaop_of("task/encoder", 1, {1: 1.0})
    decoder = metaop_of(
        "task/decoder", 2, {1: 1.0}, inputs=(encoder.name,), inputs_of_every_op=(encoder.name,)
    )
    waves = [
        [slice_of(encoder, (0, 1), (0,), 0.0)],
        [slice_of(decoder, (0, 1), (0,), 1.0)],
        [slice_of(decoder, (1, 2), (1,), 2.0)],
    ]
    edges = slice_edges(plan_of(profile_of(encoder, decoder), cluster_of(2), waves))
    assert edges == (Edge(0, 1, inner=False), Edge(0, 2, inner=False), Edge(1, 2, inner=True))


def test_slices_that_start_together_run_producers_first() -> None:
    """A slice of no length starts with its consumer; whatever wave it is in, it runs first."""
    net = metaop_of("task/net", 2, {1: 1.0})
    late, early = slice_of(net, (1, 2), (0,), 0.0), slice_of(net, (0, 1), (1,), 0.0)
    plan = plan_of(profile_of(net), cluster_of(2), [[late], [early]])
    assert [piece for piece, _ in pass_order(plan, slice_edges(plan))] == [1, 0, 0, 1]


def test_a_receive_is_posted_one_compute_ahead() -> None:
    """Device 0 posts what its second slice takes before it runs its first, in which time it is made, so that
    the data comes meanwhile.
    """
    own = metaop_of("a/own", 1, {1: 1.5})
    net = metaop_of("b/net", 2, {1: 1.0})
    waves = [
        [slice_of(own, (0, 1), (0,), 0.0), slice_of(net, (0, 1), (1,), 0.0)],
        [slice_of(net, (1, 2), (0,), 1.5)],
    ]
    program = link(plan_of(profile_of(own, net), cluster_of(2), waves))
    assert [text.split(" ")[0] for text in texts(program, 0)] == [
        "RECV",
        "F",
        "F",
        "LOSSES",
        "B",
        "SEND_GRAD",
        "B",
        "STEP",
    ]


def posted_ahead(sizes: Sequence[int]) -> list[str]:
    """What device 0 does up to its last forward pass: three slices of its own, then some that take what
    device 1 has made while the first of them ran, so many bytes each.
    """
    own = metaop_of("a/own", 3, {1: 1.0})
    makers = [metaop_of(f"b{i}/maker", 1, {1: 0.1}) for i in range(len(sizes))]
    makers = [
        maker.model_copy(update={"output_bytes": size}) for maker, size in zip(makers, sizes, strict=True)
    ]
    takers = [metaop_of(f"b{i}/taker", 1, {1: 1.0}, inputs=(makers[i].name,)) for i in range(len(sizes))]
    waves = [
        [
            slice_of(own, (0, 1), (0,), 0.0),
            *(slice_of(maker, (0, 1), (1,), 0.1 * i) for i, maker in enumerate(makers)),
        ],
        *([slice_of(own, (op, op + 1), (0,), float(op))] for op in (1, 2)),
        *([slice_of(taker, (0, 1), (0,), 3.0 + i)] for i, taker in enumerate(takers)),
    ]
    program = link(plan_of(profile_of(own, *makers, *takers), cluster_of(2), waves))
    kinds = [action.kind for action in program.actions[0]]
    return [str(kind) for kind in kinds[: kinds.index(Kind.LOSSES)]]


def test_small_receives_are_posted_as_early_as_they_are_made() -> None:
    """Up to 64 KiB of what passes to come take, in the order of those passes; others two passes ahead."""
    half, all_of_it = 32 * KIB, 64 * KIB
    assert posted_ahead([all_of_it]) == ["RECV", "F", "F", "F", "F"]
    assert posted_ahead([all_of_it + 8]) == ["F", "RECV", "F", "F", "F"]
    assert posted_ahead([half, half]) == ["RECV", "RECV", "F", "F", "F", "F", "F"]
    assert posted_ahead([half, half + 8]) == ["RECV", "F", "F", "RECV", "F", "F", "F"]
    last_two = ["RECV", "RECV", "F", "F", "F", "F"]  # together: what an earlier pass took is out of the way
    assert posted_ahead([all_of_it, 0, half, half]) == ["RECV", "RECV", "F", "F", "F", *last_two]


@examples(100)
@given(plans())
def test_no_two_passes_end_at_the_same_time(plan: Plan) -> None:
    clock = clock_of(plan)
    ends = [end for _, end in clock.when.values()]
    assert len(set(ends)) == len(ends)


@examples(150)
@given(plans(), st.booleans(), st.booleans(), st.booleans())
def test_every_linked_program_is_proved(plan: Plan, sharded: bool, clips: bool, scales: bool) -> None:
    program = link(plan, settings=StepSettings(sharded=sharded, clips=clips, scales=scales))
    prove(program)
    keys = [
        action.transfer.key
        for actions in program.actions.values()
        for action in actions
        if action.kind in (Kind.SEND, Kind.SEND_GRAD)
    ]
    assert sorted(keys) == list(range(len(keys)))


@examples(50)
@given(plans())
def test_all_ranks_agree_on_the_order_of_sums(plan: Plan) -> None:
    program = link(plan)
    for group in program.groups:
        for device in group.devices if len(group.devices) > 1 else ():
            sums = [action.group for action in program.actions[device] if action.kind is Kind.SUM]
            assert sums == sorted(set(sums))
            assert group.index in sums


@pytest.mark.long
def test_a_thousand_devices_link_and_prove_in_seconds() -> None:
    """30 chains of 4 MetaOps whose slices change devices and degrees all the time."""
    sizes = (16, 32, 48, 64)
    metaops, slices = [], []
    for chain in range(30):
        for link_index in range(4):
            inputs = (metaops[-1].name,) if link_index else ()
            metaop = metaop_of(
                f"task{chain}/part{link_index}", 4, dict.fromkeys(sizes, 1.0), batch_size=192, inputs=inputs
            )
            metaops.append(metaop)
            for cut in range(2):
                size = sizes[(chain + link_index + cut) % 4]
                first = (chain * 37 + link_index * 331 + cut * 61) % (1024 - size)
                start_s = 2.0 * (link_index * 2 + cut) + 100.0 * chain
                slices.append([slice_of(metaop, (2 * cut, 2 * cut + 2), range(first, first + size), start_s)])
    plan = plan_of(profile_of(*metaops), cluster_of(1024, devices_per_node=8), slices)
    started = time.process_time()
    prove(link(plan))
    assert time.process_time() - started < 30  # 4.4 s by itself


@pytest.mark.parametrize(("num_makers", "num_others"), [(1, 6), (6, 1)])
def test_behind_a_pass_its_sum_goes_first_then_what_it_sends_and_the_flags_come_last(
    num_makers: int, num_others: int
) -> None:
    """Of the last pass on devices 0 and 1, whose gradients go to device 2; other tasks' sums come before, and
    more or fewer transfers. Device 3 is idle.
    """
    makers = [metaop_of(f"a/maker{number}", 1, {1: 1.0}) for number in range(num_makers)]
    taker = metaop_of("a/taker", 1, {2: 1.0}, inputs=tuple(maker.name for maker in makers))
    others = [metaop_of(f"{task}/net", 1, {2: 1.0}) for task in "bcdefg"[:num_others]]
    waves = [
        *([slice_of(maker, (0, 1), (2,), float(at_s))] for at_s, maker in enumerate(makers)),
        *([slice_of(each, (0, 1), (0, 1), 9.0 + at_s)] for at_s, each in enumerate((taker, *others))),
    ]
    plan = plan_of(profile_of(*makers, taker, *others), cluster_of(4), waves)
    actions = link(plan, settings=StepSettings(sharded=True)).actions[0]
    kinds = [action.kind for action in actions]
    behind = kinds[kinds.index(Kind.SEND_GRAD) - 2 :]
    # Device 2 has room for what its next two passes take, for more when these are through.
    sent = [Kind.SEND_GRAD] * min(num_makers, 2)
    assert behind[: 2 + len(sent)] == [Kind.BACKWARD, Kind.SUM, *sent]
    assert kinds[kinds.index(Kind.STEP) - 2 : kinds.index(Kind.STEP)] == [behind[1 + len(sent)], Kind.FLAGS]
    assert [action.group for action in actions if action.kind is Kind.SUM] == list(range(num_others + 1))
