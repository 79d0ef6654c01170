"""When sums have their place in the order of what devices post, and behind which passes these post them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from helpers.clocks import clock_of
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.activations import slice_layouts
from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.links import all_gather_s, per_node, spread_collective_s
from spindle_cli.files.sharding import Sharding
from spindle_cli.profile.types import MetaOpProfile
from spindle_cli.program.clock import PassClock
from spindle_cli.program.lanes import Lane, LanePass, lane_passes, other_posts
from spindle_cli.program.link import link
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.sum_times import last_update_s, needed_at, parameters_there, sum_time
from spindle_cli.program.transfers import Directory, TimedTransfer
from spindle_cli.program.types import COMPUTES, Kind, StepSettings, Transfer
from spindle_cli.simulate.run import simulate

NET = metaop_of("t/net", 4, {1: 3.0})
SLICES = [slice_of(NET, (0, 4), (0,), 0.0), slice_of(NET, (0, 4), (1,), 0.0)]
FORWARD, ROOM, NO_ROOM = LanePass(0, 10, None, False), LanePass(10, 30, 0, True), LanePass(40, 60, 1, False)


def lane(*posts: int) -> Lane:
    """A forward pass until 10, slice 0 backward from there to 30, slice 1 from 40 to 60."""
    return Lane.of([FORWARD, ROOM, NO_ROOM], posts)


@pytest.mark.parametrize(
    ("time", "adding", "posts", "before"),
    [
        (5, (0,), (), 0),  # a forward pass has no room
        (10, (0,), (), 1),  # slice 0 begins
        (11, (0,), (), 2),  # and is under way
        (11, (0,), (25,), 2),  # it adds to the sum, which has to be behind it
        (11, (7,), (), 2),  # it does not, but has room
        (11, (7,), (10,), 2),
        (11, (7,), (11,), 1),  # what has its place behind the sum is posted ahead of the pass
        (11, (7,), (29,), 1),
        (11, (7,), (30,), 2),
        (30, (0,), (), 2),
        (41, (7,), (), 2),  # slice 1 waits for others inside
        (41, (1,), (), 3),
        (60, (1,), (), 3),
    ],
)
def test_passes_before_a_sum(time: int, adding: Collection[int], posts: Collection[int], before: int) -> None:
    assert lane(*posts).before_sum(time, adding) == before


@pytest.mark.parametrize(("time", "before"), [(9, 0), (10, 1), (29, 1), (30, 2), (59, 2), (60, 3)])
def test_another_post_is_ahead_of_all_passes_that_end_later(time: int, before: int) -> None:
    assert lane().before(time) == before


@pytest.mark.parametrize(
    ("time", "adding", "posts", "later"),
    [
        (11, (0,), (), 11),
        (11, (0,), (10,), 11),
        (11, (0,), (11,), 12),
        (11, (0,), (15, 29, 30), 30),
        (11, (7,), (15,), 11),  # slice 0 does not add to it
        (10, (0,), (15,), 10),  # nor has it begun
        (41, (1,), (), 61),
        (60, (1,), (), 60),
    ],
)
def test_a_sum_comes_behind_what_is_posted_ahead_of_a_pass_that_adds_to_it(
    time: int, adding: Collection[int], posts: Collection[int], later: int
) -> None:
    assert lane(*posts).no_earlier(time, adding) == later


def group(first_ops: tuple[int, int]) -> ParameterGroup:
    """Parameters that both slices use from these ops on."""
    return ParameterGroup(0, (0, 1), (("net", 0),), 1, 1, (0, 1), first_ops, (0, 1))


def lanes_of(first: LanePass, second: LanePass, *posts: int) -> list[Lane]:
    """Of the slices' devices, the first of which posts something, and of a third device."""
    return [Lane.of([first], posts), Lane.of([second], ()), Lane.of([], ())]


def test_a_sum_s_time_is_when_the_last_op_that_adds_to_it_has_run() -> None:
    """Slice 0 runs its 4 ops backward from 0 to 40, slice 1 from 20 to 100."""
    first, second = LanePass(0, 40, 0, True), LanePass(20, 100, 1, True)
    times = {(Kind.BACKWARD, 0): (0, 40), (Kind.BACKWARD, 1): (20, 100)}
    clock = PassClock(times, forward_ended=90)

    def of(first_ops: tuple[int, int], *lanes: Lane) -> int:
        return sum_time(group(first_ops), clock, SLICES, lanes)

    assert of((3, 3), *lanes_of(first, second)) == 40  # slice 0's first op ends at 10, slice 1's at 40
    assert of((1, 3), *lanes_of(first, second)) == 40
    assert of((0, 2), *lanes_of(first, second)) == 60
    assert of((3, 0), *lanes_of(first, second)) == 100
    # The other slice's pass is over, or posts nothing behind it.
    assert of((3, 3), *lanes_of(first, second, 39)) == 40
    # It posts at 50, ahead of its pass.
    longer = PassClock({**times, (Kind.BACKWARD, 0): (0, 80)}, forward_ended=0)
    lanes = lanes_of(LanePass(0, 80, 0, True), second, 50)
    assert sum_time(group((3, 3)), longer, SLICES, lanes) == 51
    # It waits for others until 80; or the second does, whose pass is the last.
    assert sum_time(group((3, 3)), longer, SLICES, lanes_of(LanePass(0, 80, 0, False), second)) == 81
    lanes = lanes_of(LanePass(0, 80, 0, True), second._replace(has_room=False))
    assert sum_time(group((3, 3)), longer, SLICES, lanes) == 100


def test_passes_have_room_where_they_wait_for_nobody_inside() -> None:
    """Of two slices on a device each, of which the second one's parameters are shared out."""
    plan = plan_of(profile_of(NET), cluster_of(2), [[SLICES[0]]])
    layouts = (*slice_layouts(plan), *slice_layouts(plan))
    times = {(kind, piece): (10 * piece, 10 * piece + 5) for kind in COMPUTES for piece in (0, 1)}
    shared_out = replace(group((0, 0)), slices=(1,), first_ops=(0,), sharding=Sharding.PARAMETERS)
    computes = [(Kind.FORWARD, 0), (Kind.BACKWARD, 0), (Kind.BACKWARD, 1)]
    passes = lane_passes(0, computes, PassClock(times, 0), layouts, Directory(()), [shared_out])
    assert passes == [(0, 5, None, False), (0, 5, 0, True), (10, 15, 1, False)]


def test_devices_post_the_losses_and_their_messages_at_both_ends() -> None:
    transfer = Transfer(0, 0, 1, source=1, destination=2, first=0, last=4, is_gradient=False, num_bytes=1)
    posts = other_posts(5, [TimedTransfer(7, transfer)], 4)
    assert posts == [{5}, {5, 7}, {5, 7}, {5}]


@pytest.mark.parametrize(
    ("first_ops", "tick"), [((0, 4), 0), ((1, 4), 1), ((2, 5), 3), ((1, 6), 2), ((3, 6), 5)]
)
def test_parameters_are_needed_when_the_first_device_comes_to_an_op_that_uses_them(
    first_ops: tuple[int, int], tick: int
) -> None:
    """Ops 0 to 3 run forward from 0, 2, 4 and 6 on, ops 4 to 6 of the other slice from 1, 3 and 5 on."""
    net = metaop_of("a/net", 7, {1: 1.0})
    slices = (slice_of(net, (0, 4), (0,), 0.0), slice_of(net, (4, 7), (1,), 0.0))
    clock = PassClock({(Kind.FORWARD, 0): (0, 8), (Kind.FORWARD, 1): (1, 7)}, forward_ended=8)
    assert needed_at(group(first_ops), clock, slices) == tick


@pytest.mark.parametrize(("pass_gathers", "later_gathers"), [(1, 1.5), (4, 1), (0, 2)])
def test_parameters_are_there_when_their_gathers_have_gone_one_after_another(
    pass_gathers: float, later_gathers: float
) -> None:
    """Two nets of 2 ops that share them, op by op, on a device each, and two others' that share theirs alone:
    what a pass runs before an op it runs while that is gathered.
    """
    size = {"param_bytes_per_op": 2**26}
    nets = [
        metaop_of(f"{task}/net", 2, {1: 3.0}, parameters=key, **size)
        for task, key in zip("abcd", "ppqq", strict=True)
    ]
    waves = [[slice_of(net, (0, 2), (device,), 0.0) for device, net in enumerate(nets)]]
    plan = plan_of(profile_of(*nets), cluster_of(4), waves)
    groups = link(plan, settings=StepSettings(sharded=True)).groups
    gather = 8e9 * all_gather_s(2**26, (0, 1), plan.cluster)  # in ticks
    times = {(kind, piece): (0, 7) for kind in COMPUTES for piece in range(4)}
    long = (100, 100 + round(pass_gathers * gather))
    clock = PassClock({**times, (Kind.FORWARD, 0): long, (Kind.FORWARD, 1): long}, forward_ended=0)
    there = parameters_there(groups, clock, plan)
    assert {round(there[piece] / gather, 3) for piece in (0, 1)} == {later_gathers}
    assert {round(there[piece] / gather, 3) for piece in (2, 3)} == {2}
    assert parameters_there([replace(each, sharding=Sharding.NONE) for each in groups], clock, plan) == {}


@pytest.mark.parametrize(("accumulate", "first"), [(1, "q"), (2, "p")])
def test_sums_have_the_order_of_passes_that_waited_for_their_parameters(accumulate: int, first: str) -> None:
    """Devices 0 and 1 run a net of 1 GiB for 0.1 s, devices 2 and 3 a small one for 0.2 s. In a step's only
    batch the large one is gathered for 0.2 s first; of several the last begins with nothing to wait for.
    """
    large, small = (
        {"parameters": key, "param_bytes_per_op": size} for key, size in (("p", 2**30), ("q", 2**26))
    )
    pair = [metaop_of(f"{task}/net", 1, {1: 0.1}, **large) for task in "ab"]
    other = [metaop_of(f"{task}/net", 1, {1: 0.2}, **small) for task in "cd"]
    pieces = [slice_of(net, (0, 1), (device,), 0.0) for device, net in enumerate((*pair, *other))]
    profile = profile_of(*pair, *other).model_copy(update={"accumulate": accumulate})
    program = link(plan_of(profile, cluster_of(4), [pieces]), settings=StepSettings(sharded=True))
    prove(program)
    assert program.groups[0].blocks == ((first, 0),)


def test_gathers_go_by_when_parameters_would_be_needed_if_nothing_were_waited_for() -> None:
    """Device 0 runs r, whose 4 GiB it waits for, until 0.1 s, and then p; device 1 q from 0.3 s on; device 2
    has p and q for later. As predictions have it, p goes first, though q is used before it.
    """
    size = {"r": 2**32, "p": 2**26, "q": 2**26}

    def net(name: str, op_s: float) -> MetaOpProfile:
        key = name[-1]
        own = {"parameters": key if key in size else name, "param_bytes_per_op": size.get(key, 2**10)}
        return metaop_of(name, 1, {1: op_s}, **own)

    large, then, before, other = net("a/r", 0.3), net("b/p", 0.3), net("c/x", 0.9), net("d/q", 0.3)
    long, late, later, beside = net("e/y", 9.0), net("f/p", 0.3), net("g/q", 0.3), net("h/r", 0.3)
    waves = [
        [slice_of(each, (0, 1), (device,), 0.0) for device, each in enumerate((large, before, long, beside))],
        [
            slice_of(then, (0, 1), (0,), 0.3),
            slice_of(other, (0, 1), (1,), 0.9),
            slice_of(late, (0, 1), (2,), 9.0),
        ],
        [slice_of(later, (0, 1), (2,), 9.3)],
    ]
    metaops = large, then, before, other, long, late, later, beside
    program = link(plan_of(profile_of(*metaops), cluster_of(4), waves), settings=StepSettings(sharded=True))
    prove(program)
    keys = {group.index: group.blocks[0][0] for group in program.groups}
    gathered = [keys[action.group or 0] for action in program.actions[2] if action.kind is Kind.GATHER]
    assert gathered == ["p", "q"]


@pytest.mark.parametrize(
    ("other_s", "by_parts", "expected"),
    [(51.0, False, "FLBSSSS"), (60.0, False, "FBSSSSL"), (60.0, True, "FLBSSSSUUU")],
)
def test_losses_that_would_hold_up_sums_come_behind_all_passes(
    other_s: float, by_parts: bool, expected: str
) -> None:
    """Devices 0 and 1 train a net together, the former backward from 12 s on, an op in 6 s; device 2 runs
    something else forward for 17 or 20 s. Device 0 has posted the losses ahead of its pass, and waits with
    what follows until device 2 has them, too: the first sum would start 2 s late. Updates of parts wait for
    the losses.
    """
    shared = {"parameters": "net", "param_bytes_per_op": 2**26}
    slow, fast = metaop_of("a/net", 4, {1: 9.0}, **shared), metaop_of("b/net", 4, {1: 0.3}, **shared)
    other = metaop_of("c/net", 1, {1: other_s})
    pieces = [
        slice_of(net, (0, net.num_ops), (device,), 0.0) for device, net in enumerate((slow, fast, other))
    ]
    plan = plan_of(profile_of(slow, fast, other), cluster_of(3), [pieces])
    program = link(plan, settings=StepSettings(by_parts=by_parts))
    prove(program)
    letters = "".join(str(action.kind)[0] for action in program.actions[0])
    assert letters == expected + "S"
    starts = [action.op for action in program.actions[0] if action.kind is Kind.SUM]
    assert starts == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("own_bytes", "clips", "comes_early"),
    [(2**29 + 2**24, False, True), (2**29, False, False), (2**30, True, False)],
)
def test_losses_that_would_hold_up_sums_come_first_where_the_last_update_is_sooner_for_it(
    own_bytes: int, clips: bool, comes_early: bool
) -> None:
    """As above; device 3 ends after 3 s, and updates what it alone has as soon as it has the losses: after 20
    s, or behind all passes after 60, when device 2 updates 512 MiB. A norm is known behind all sums alone.
    """
    shared = {"parameters": "net", "param_bytes_per_op": 2**26}
    slow, fast = metaop_of("a/net", 4, {1: 9.0}, **shared), metaop_of("b/net", 4, {1: 0.3}, **shared)
    other = metaop_of("c/net", 1, {1: 60.0}, param_bytes_per_op=2**29)
    own = metaop_of("d/net", 1, {1: 3.0}, param_bytes_per_op=own_bytes)
    metaops = slow, fast, other, own
    pieces = [slice_of(net, (0, net.num_ops), (device,), 0.0) for device, net in enumerate(metaops)]
    profile = profile_of(*metaops).model_copy(update={"optimizer_s_per_byte": 1e-8})
    program = link(plan_of(profile, cluster_of(4), [pieces]), settings=StepSettings(clips=clips))
    prove(program)
    letters = "".join(str(action.kind)[0] for action in program.actions[0])
    assert letters.startswith("FLBSSSS" if comes_early else "FBSSSSL")


def test_the_last_update_is_behind_passes_losses_and_sums_one_after_another() -> None:
    """Devices 0 and 1 sum four ops of 64 MiB, in 12.4 ms each and more, the last of them with the place of
    their last pass, at 36 s; device 2 ends at 60 s, and updates in 1 s.
    """
    shared = {"parameters": "net", "param_bytes_per_op": 2**26}
    slow, fast = metaop_of("a/net", 4, {1: 9.0}, **shared), metaop_of("b/net", 4, {1: 0.3}, **shared)
    other = metaop_of("c/net", 1, {1: 60.0})
    pieces = [
        slice_of(net, (0, net.num_ops), (device,), 0.0) for device, net in enumerate((slow, fast, other))
    ]
    plan = plan_of(profile_of(slow, fast, other), cluster_of(3), [pieces])
    program = link(plan)
    clock = clock_of(plan)
    ticks = len(clock.when) * 10**9
    sum_s = spread_collective_s(2**26, per_node((0, 1), plan.cluster), 2, plan.cluster)

    def last_s(updates_s: tuple[float, float, float], at_s: float, losses_s: float = 0.0) -> float:
        times = {group.index: round(at_s * ticks) for group in program.groups}
        return last_update_s(program.groups, times, round(losses_s * ticks), clock, plan, updates_s)

    assert last_s((0.0, 0.0, 1.0), 36.0) == pytest.approx(61.0)
    assert last_s((0.0, 30.0, 1.0), 36.0) == pytest.approx(36.0 + 4 * sum_s + 30.0)
    assert last_s((30.0, 0.0, 1.0), 34.0) == pytest.approx(36.0 + 30.0)
    assert last_s((30.0, 0.0, 1.0), 34.0, losses_s=50.0) == pytest.approx(80.0)
    assert last_s((30.0, 0.0, 1.0), 34.0, losses_s=70.0) == pytest.approx(90.0)


def test_what_is_needed_first_is_gathered_first() -> None:
    """Devices 0 and 1 run a net forward from 0 on; then device 0 what device 2 has run from 0 on: it is
    summed before all of the net, and needed before the net's second op.
    """
    size = {"param_bytes_per_op": 2**26}
    late, early = (metaop_of(f"{task}/net", 1, {1: 15.0}, parameters="q", **size) for task in "ab")
    nets = [metaop_of(f"{task}/net", 3, {1: 3.0}, parameters="p", **size) for task in "cd"]
    pieces = [slice_of(net, (0, 3), (device,), 0.0) for device, net in enumerate(nets)]
    waves = [[*pieces, slice_of(early, (0, 1), (2,), 0.0)], [slice_of(late, (0, 1), (0,), 9.0)]]
    plan = plan_of(profile_of(late, early, *nets), cluster_of(4), waves)
    program = link(plan, settings=StepSettings(sharded=True))
    prove(program)
    keys = {group.index: group.blocks for group in program.groups}
    gathered = [keys[action.group or 0] for action in program.actions[0] if action.kind is Kind.GATHER]
    assert gathered == [(("p", 0),), (("q", 0),), (("p", 1),), (("p", 2),)]


def test_what_follows_the_last_sum_over_some_devices_holds_up_no_sum_over_others() -> None:
    """Devices 0 and 1 train a net together, backward until about 9 and 13 s; each shares something else with
    a device that is through in between. Only the end waits for the flags of these: the first sum of the net
    starts inside the pass of device 0, when device 1 has run its last op backward.
    """

    def net_of(name: str, key: str, ops: int, op_s: float) -> MetaOpProfile:
        return metaop_of(name, ops, {1: op_s}, parameters=key, param_bytes_per_op=2**26)

    slow, fast = net_of("a/net", "net", 4, 3.0), net_of("b/net", "net", 4, 2.0)
    after_slow, beside_slow = net_of("c/net", "second", 1, 1.0), net_of("d/net", "second", 1, 10.0)
    after_fast, beside_fast = net_of("e/net", "third", 1, 1.0), net_of("f/net", "third", 1, 9.5)
    waves = [
        [slice_of(slow, (0, 4), (1,), 3.0)],
        [slice_of(beside_slow, (0, 1), (2,), 6.0)],
        [slice_of(beside_fast, (0, 1), (3,), 6.5)],
        [slice_of(fast, (0, 4), (0,), 7.0)],
        [slice_of(after_slow, (0, 1), (1,), 15.0), slice_of(after_fast, (0, 1), (0,), 15.0)],
    ]
    metaops = slow, fast, after_slow, beside_slow, after_fast, beside_fast
    program = link(plan_of(profile_of(*metaops), cluster_of(5), waves), settings=StepSettings(sharded=True))
    prove(program)
    (first,) = (group.index for group in program.groups if ("net", 3) in group.blocks)
    ops = {action.op for action in program.actions[0] if action.group == first} - {None}
    assert ops == {2}
    ending = [action.kind for action in program.actions[0] if action.kind is not Kind.GATHER][-3:]
    assert ending == [Kind.FLAGS, Kind.FLAGS, Kind.STEP]


def test_sums_are_not_held_up_by_later_passes_of_their_devices() -> None:
    """Device 0 runs the ops of a net backward until 6, 8, 10 and 12 s, device 1 all of them until 4.2 s, and
    then two other passes until 8.2 and 10.2 s: the first two sums start inside of the former, as its ops are
    through, the third behind the latter.
    """
    shared = {"parameters": "net", "param_bytes_per_op": 2**26}
    slow, fast = metaop_of("a/net", 4, {1: 3.0}, **shared), metaop_of("b/net", 4, {1: 0.3}, **shared)
    two, one = metaop_of("c/net", 2, {1: 3.0}), metaop_of("d/net", 1, {1: 3.0})
    pieces = [
        slice_of(slow, (0, 4), (0,), 0.0),
        slice_of(one, (0, 1), (1,), 0.0),
        slice_of(two, (0, 2), (1,), 3.0),
        slice_of(fast, (0, 4), (1,), 9.0),
    ]
    plan = plan_of(profile_of(slow, one, two, fast), cluster_of(3), [[piece] for piece in pieces])
    program = link(plan, settings=StepSettings(sharded=True))
    prove(program)
    fourth = [(Kind.SUM, None, 0), (Kind.FLAGS, None, None), (Kind.STEP, None, None)]
    passes = [(Kind.BACKWARD, piece, None) for piece in (3, 2, 1)]
    first, second, third = (Kind.SUM, None, 1), (Kind.SUM, None, 0), (Kind.SUM, None, 0)
    expected = [passes[0], passes[1], first, second, passes[2], third, *fourth]
    written = [(action.kind, action.slice_index, action.op) for action in program.actions[1]]
    assert written[written.index(passes[0]) : -4] == expected


@pytest.mark.parametrize(
    ("sum_s", "made_at_s", "message_s", "is_behind", "iteration_s"),
    [
        # Ahead of the pass the first sum would start at 29.4 s, and the last end at 49.4.
        (5.0, 30.1, 0.0, True, 41.1),
        # It would start at 24.5 s, and the last end at 44.5.
        (5.0, 24.5, 0.0, True, 41.1),
        # Behind it the message would take from 36.1 to 46.1 s; now all that moves takes from 29.4 to 43.4.
        (1.0, 30.1, 10.0, False, 43.6),
    ],
)
def test_a_message_that_comes_in_a_backward_pass_is_posted_behind_it_where_sums_gain_more(
    sum_s: float, made_at_s: float, message_s: float, is_behind: bool, iteration_s: float
) -> None:
    """Devices 0 and 1 train a net together, the former backward from 12.1 s on, an op in 6 s, the latter
    before others that take it until 29.2 and 31.2 s. The gradient for what device 0 runs backward behind the
    net is made at 24.5 or 30.1 s: posted ahead of that pass, it holds up the sums of the first ops until
    device 1 is in the pass of that time.
    """
    shared = {"parameters": "net", "param_bytes_per_op": round(sum_s * 5e9)}
    slow, fast = metaop_of("a/net", 4, {1: 9.0}, **shared), metaop_of("b/net", 4, {1: 0.3}, **shared)
    head = metaop_of("c/head", 1, {1: 0.3}).model_copy(update={"output_bytes": round(message_s * 5e9)})
    tail = metaop_of("c/tail", 1, {1: made_at_s - 0.1 - message_s}, inputs=(head.name,))
    other, last = metaop_of("d/other", 90, {1: 0.3}), metaop_of("e/last", 10, {1: 0.3})
    waves = [
        [slice_of(head, (0, 1), (0,), 0.0), slice_of(last, (0, 10), (1,), 0.0)],
        [slice_of(slow, (0, 4), (0,), 0.3), slice_of(tail, (0, 1), (2,), 0.3 + message_s)],
        [slice_of(other, (0, 90), (1,), 3.0)],
        [slice_of(fast, (0, 4), (1,), 30.0)],
    ]
    plan = plan_of(profile_of(slow, fast, head, tail, other, last), cluster_of(3), waves)
    program = link(plan)
    prove(program)
    kinds = [action.kind for action in program.actions[0]]
    assert (kinds.index(Kind.RECV_GRAD) > kinds.index(Kind.BACKWARD)) is is_behind
    assert simulate(plan).iteration_s == pytest.approx(iteration_s, abs=0.01)
