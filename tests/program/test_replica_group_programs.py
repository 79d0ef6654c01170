"""Parameters that several replica groups of devices share out: sums and gathers over all of them, and the
proof.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.types import ParameterGroup, Purpose
from spindle_cli.check.run import check_plan
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Plan, Slice, Wave
from spindle_cli.profile.types import MetaOpProfile
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Action, Kind, Program, StepSettings
from spindle_cli.show.text import format_action, parse_action
from spindle_cli.simulate.engine import AwaitedOps
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Activity

SETTINGS = StepSettings(sharded=True, clips=True)
TWO: dict[str, Sharding] = {"net": Sharding.PARAMETERS}


def timed(piece: Slice, backward_start_s: float, backward_s: float) -> Slice:
    times = {"backward_start_s": backward_start_s, "backward_end_s": backward_start_s + backward_s}
    return piece.model_copy(update={"end_s": piece.start_s + piece.num_ops, **times})


def two_replica_groups(
    other: tuple[int, ...] = (2, 3), backward_s: float = 10.0, level: Sharding = Sharding.PARAMETERS
) -> Plan:
    """Two ops that task a runs on devices 0 and 1, b on others, backward in 4 and in 10 s; behind its own
    devices 0 and 1 run four ops of c, with parameters of their own, backward from 10 to 14 s.
    """
    sizes = dict.fromkeys((1, 2, 3), 3.0)
    nets = [metaop_of(f"{task}/net", 2, sizes, parameters="net", batch_size=6) for task in "ab"]
    last = metaop_of("c/last", 4, sizes, batch_size=6)
    whole = (
        slice_of(nets[0], (0, 2), (0, 1), 0.0),
        slice_of(nets[1], (0, 2), other, 0.0),
        slice_of(last, (0, 4), (0, 1), 6.0),
    )
    apart = ((2.0, 4.0), (2.0, backward_s), (10.0, 4.0))
    return in_order([*nets, last], whole, apart, max(3, *other) + 1, level)


def in_order(
    metaops: Sequence[MetaOpProfile],
    whole: Sequence[Slice],
    apart: Sequence[tuple[float, float]],
    num_devices: int,
    level: Sharding = Sharding.PARAMETERS,
) -> Plan:
    """`apart`: when each slice runs backward, and how long."""
    plan = plan_of(profile_of(*metaops), cluster_of(num_devices), [(piece,) for piece in whole])
    pieces = [timed(piece, *times) for piece, times in zip(whole, apart, strict=True)]
    waves = tuple(
        Wave(index=index, start_s=piece.start_s, end_s=piece.end_s, slices=(piece,))
        for index, piece in enumerate(pieces)
    )
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    more = {"schema_": "spindle.plan/2", "waves": waves, "sharding": {"net": level}}
    return Plan(**{**fields, **more, "optimizer_state_sharded": True})


@pytest.fixture(scope="module")
def program() -> Program:
    found = link(two_replica_groups(), settings=SETTINGS)
    prove(found)
    return found


def group_of(program: Program, op: int) -> ParameterGroup:
    return next(group for group in program.groups if group.blocks == (("net", op),))


def sums(program: Program, device: int) -> list[str]:
    """Passes back, sums and gathers of a device."""
    kinds = (Kind.BACKWARD, Kind.SUM, Kind.GATHER)
    return [format_action(action) for action in program.actions[device] if action.kind in kinds]


def test_replica_groups_sum_behind_their_passes_and_hand_on_behind_the_step(program: Program) -> None:
    """Replica group b is through at 12 s, in the middle of the pass of c that devices 0 and 1 run then: there
    both sums start behind its op 2, half an op later; on devices 2 and 3 behind the pass that has summed it.
    """
    shards = {each.ranks: each.index for each in program.communicators if each.purpose is Purpose.SHARDS}
    assert set(shards) == {(0, 1), (2, 3)}
    everyone = next(each.index for each in program.communicators if each.ranks == (0, 1, 2, 3))
    late, early = group_of(program, 0).index, group_of(program, 1).index
    assert early < late
    assert sums(program, 2) == [
        f"B 1 by {shards[2, 3]}",
        f"SUM {early} on {everyone}",
        f"SUM {late} on {everyone}",
        f"GATHER {late} on {everyone}",
        f"GATHER {early} on {everyone}",
    ]
    own = next(each.index for each in program.communicators if each.purpose is Purpose.SUMS)
    found = sums(program, 0)
    assert found[:2] == [f"B 0 by {shards[0, 1]}", "B 2"]
    assert f"SUM {early} op 2 on {everyone}" in found and f"SUM {late} op 2 on {everyone}" in found
    last = [text for text in found if text.startswith("SUM") and text.endswith(f" on {own}")]
    assert [re.search(r"op \d", text)[0] for text in last] == ["op 3", "op 2", "op 1", "op 0"]


def test_sums_that_follow_one_over_replica_groups_are_behind_the_pass_too() -> None:
    """Devices 2 and 3 have added to the sum of another net, which device 4 completes at 13 s."""
    sizes = dict.fromkeys((1, 2, 3), 3.0)
    nets = [metaop_of(f"{task}/net", 2, sizes, parameters="net", batch_size=6) for task in "ab"]
    tails = [metaop_of(f"{task}/tail", 1, sizes, parameters="tail", batch_size=6) for task in "de"]
    whole = (
        slice_of(tails[0], (0, 1), (2, 3), 0.0),
        slice_of(tails[1], (0, 1), (4,), 0.0),
        slice_of(nets[0], (0, 2), (0, 1), 2.0),
        slice_of(nets[1], (0, 2), (2, 3), 2.0),
    )
    apart = ((1.0, 1.0), (1.0, 12.0), (4.0, 4.0), (4.0, 6.0))
    program = link(in_order([*nets, *tails], whole, apart, 6), settings=SETTINGS)
    prove(program)
    found = [text.partition(" on ")[0] for text in sums(program, 2) if text.startswith("SUM")]
    tail = next(group.index for group in program.groups if group.blocks == (("tail", 0),))
    assert found == [f"SUM {group_of(program, op).index}" for op in (1, 0)] + [f"SUM {tail}"]


def test_sums_over_replica_groups_begin_when_all_passes_are_through() -> None:
    """Replica group b is through at 6 s, too: before the pass of c on devices 0 and 1. A fifth device has no
    part.
    """
    plan = two_replica_groups(backward_s=4.0).model_copy(update={"cluster": cluster_of(5)})
    program = link(plan, settings=SETTINGS)
    prove(program)
    early = group_of(program, 1).index
    found = [format_action(action).partition(" on ")[0] for action in program.actions[0]]
    assert found.index(f"SUM {early}") < found.index("F 2")


def test_replica_groups_of_other_sizes_are_proved_and_simulated() -> None:
    plan = two_replica_groups((2, 3, 4))
    assert [violation.rule for violation in check_plan(plan) if violation.rule == "sharding"] == []
    prove(link(plan, settings=SETTINGS))
    simulation = simulate(plan)
    runs = {
        (span.device, span.slice_index) for span in simulation.spans if span.activity is Activity.BACKWARD
    }
    assert runs == {(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (0, 2), (1, 2)}


def test_ops_wait_for_what_other_replica_groups_hand_on_when_their_gathers_start(program: Program) -> None:
    """What op 1 uses is gathered while op 0 runs, which waits for it, too."""
    awaited = AwaitedOps(program)
    assert [awaited.next_op(device, piece, 0) for device, piece in ((0, 0), (3, 1))] == [0, 0]
    awaited.end(group_of(program, 0).index)
    assert [awaited.next_op(device, piece, 0) for device, piece in ((0, 0), (3, 1))] == [0, 0]
    awaited.end(group_of(program, 1).index)
    assert awaited.next_op(0, 0, 0) is None and awaited.next_op(3, 1, 0) is None
    assert awaited.next_op(0, 2, 0) == 0


@pytest.mark.parametrize(
    ("other", "level"),
    [
        ((1, 2), Sharding.PARAMETERS),
        ((2,), Sharding.PARAMETERS),
        ((2, 3), Sharding.GRADIENTS),
        ((0, 1, 2), Sharding.PARAMETERS),
    ],
    ids=["in-common", "one-device", "gradients", "some-more"],
)
def test_check_names_slices_that_are_of_no_replica_group(other: tuple[int, ...], level: Sharding) -> None:
    (found,) = [
        each for each in check_plan(two_replica_groups(other, level=level)) if each.rule == "sharding"
    ]
    assert found.devices == tuple(sorted({0, 1} ^ set(other)))
    assert ("replica groups" in found.expected) == (level is Sharding.PARAMETERS)


def test_check_takes_two_replica_groups_and_a_replica_group_twice() -> None:
    assert "sharding" not in {each.rule for each in check_plan(two_replica_groups())}
    assert "sharding" not in {each.rule for each in check_plan(two_replica_groups((0, 1)))}


def changed(program: Program, device: int, text: str, *by: str) -> Program:
    """One action of a device replaced by others."""
    found: list[Action] = []
    for action in program.actions[device]:
        found += map(parse_action, by) if format_action(action) == text else [action]
    assert tuple(found) != program.actions[device]
    return replace(program, actions={**program.actions, device: tuple(found)})


def the_sum(program: Program, device: int, op: int) -> str:
    group = group_of(program, op).index
    return next(text for text in sums(program, device) if text.startswith(f"SUM {group} "))


def test_the_proof_refuses_a_sum_over_replica_groups_inside_of_a_pass_that_makes_it(program: Program) -> None:
    text = the_sum(program, 2, 0)
    with pytest.raises(ProgramError, match="may start this sum inside of a pass"):
        prove(changed(program, 2, text, text.replace(" on ", " op 0 on ")))


def test_the_proof_refuses_a_sum_inside_of_a_pass_ahead_of_one_that_is_behind_it(program: Program) -> None:
    """Neither is it of the slice that runs: both would do, alone."""
    early = the_sum(program, 0, 1)
    behind = program
    of_all = [text for text in sums(program, 0) if text.startswith("SUM")]
    for text in of_all[of_all.index(early) :]:
        behind = changed(behind, 0, text, re.sub(r" op \d", "", text))
    prove(behind)
    with pytest.raises(ProgramError, match="may start this sum inside of a pass"):
        prove(changed(program, 0, early, early.replace(" op 2", "")))


def test_the_proof_refuses_the_first_sum_over_replica_groups_inside_of_a_pass_that_makes_it(
    program: Program,
) -> None:
    text = the_sum(program, 2, 1)
    with pytest.raises(ProgramError, match="may start this sum inside of a pass"):
        prove(changed(program, 2, text, text.replace(" on ", " op 0 on ")))


@pytest.mark.parametrize("op", [0, 1])
def test_the_proof_refuses_a_replica_group_that_does_not_sum(program: Program, op: int) -> None:
    with pytest.raises(ProgramError, match="starts SUM"):
        prove(changed(program, 3, the_sum(program, 3, op)))


def test_the_proof_refuses_a_replica_group_that_does_not_hand_on(program: Program) -> None:
    text = next(text for text in sums(program, 1) if text.startswith("GATHER"))
    with pytest.raises(ProgramError, match="does not gather each group"):
        prove(changed(program, 1, text))


@pytest.mark.parametrize(
    ("replica_groups", "message"),
    [
        (((0, 1), (2,)), "is not shared out by replica groups"),
        (((0, 1), (1, 2, 3)), "is not shared out by replica groups"),
        (((0, 1, 2, 3),), "starts SUM"),
        (((0, 2), (1, 3)), "does not run on all devices that share its parameters out"),
        ((), "expected an op of the slice before"),
    ],
)
def test_the_proof_refuses_replica_groups_that_are_none(
    program: Program, replica_groups: tuple[tuple[int, ...], ...], message: str
) -> None:
    groups = tuple(
        replace(group, replica_groups=replica_groups) if group.blocks == (("net", 1),) else group
        for group in program.groups
    )
    with pytest.raises(ProgramError, match=message):
        prove(replace(program, groups=groups))


def test_the_proof_refuses_replica_groups_of_what_is_not_gathered(program: Program) -> None:
    groups = tuple(
        replace(group, sharding=Sharding.GRADIENTS) if group.replica_groups else group
        for group in program.groups
    )
    with pytest.raises(ProgramError, match="is not shared out by replica groups"):
        prove(replace(program, groups=groups))
