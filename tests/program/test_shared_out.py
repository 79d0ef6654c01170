"""Parameters that devices share out: their groups, the passes that gather and sum them, and the proof."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.types import Purpose
from spindle_cli.check.run import check_plan
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Plan, PlanMetaOp, Slice, Wave
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.proof.proof_moves import Moves
from spindle_cli.program.types import Action, Kind, Program, StepSettings
from spindle_cli.show.text import format_action, parse_action
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Activity
from spindle_cli.units import MIB

SETTINGS = StepSettings(sharded=True, clips=True)


def timed(piece: Slice, backward_start_s: float) -> Slice:
    """A slice whose passes have times of their own: 1 s and 2 s an op."""
    last_s = backward_start_s + 2.0 * piece.num_ops
    end_s = piece.start_s + piece.num_ops
    update = {"end_s": end_s, "backward_start_s": backward_start_s, "backward_end_s": last_s}
    return piece.model_copy(update=update)


def two_nets(sharding: Mapping[str, Sharding]) -> Plan:
    """Task a's two ops on devices 0 and 1, and behind them its head; task b's head, with parameters of its
    own, on 1 and 2. Every op takes 3 s.
    """
    net = metaop_of("a/net", 2, {2: 3.0}, parameters="net")
    head = metaop_of("a/head", 1, {2: 3.0}, parameters="head", inputs=(net.name,))
    other = metaop_of("b/head", 1, {2: 3.0}, parameters="other")
    pieces = (
        slice_of(net, (0, 2), (0, 1), 0.0),
        slice_of(head, (0, 1), (0, 1), 2.0),
        slice_of(other, (0, 1), (1, 2), 9.0),
    )
    profile = profile_of(net, head, other)
    plan = plan_of(profile, cluster_of(3), [(piece,) for piece in pieces])
    slices = [timed(piece, at_s) for piece, at_s in zip(pieces, (5.0, 3.0, 10.0), strict=True)]
    waves = tuple(
        Wave(index=index, start_s=piece.start_s, end_s=piece.end_s, slices=(piece,))
        for index, piece in enumerate(slices)
    )
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    more = {"schema_": "spindle.plan/2", "waves": waves, "sharding": dict(sharding)}
    return Plan(**{**fields, **more, "optimizer_state_sharded": True})


ALL = {"net": Sharding.PARAMETERS, "head": Sharding.GRADIENTS}


@pytest.fixture(scope="module")
def program() -> Program:
    found = link(two_nets(ALL), settings=SETTINGS)
    prove(found)
    return found


def texts(program: Program, device: int) -> list[str]:
    return [format_action(action) for action in program.actions[device]]


def test_each_op_that_is_shared_out_has_a_group_of_its_own(program: Program) -> None:
    found = {group.blocks: group for group in program.groups}
    assert found.keys() == {(("net", 0),), (("net", 1),), (("head", 0),), (("other", 0),)}
    first, second, head, other = (
        found[((key, block),)] for key, block in (("net", 0), ("net", 1), ("head", 0), ("other", 0))
    )
    assert (first.first_ops, first.last_ops, first.sharding) == ((0,), (0,), Sharding.PARAMETERS)
    assert (second.first_ops, second.last_ops, second.sharding) == ((1,), (1,), Sharding.PARAMETERS)
    assert (head.first_ops, head.last_ops, head.sharding) == ((0,), (0,), Sharding.GRADIENTS)
    assert (other.last_ops, other.sharding) == ((), Sharding.OPTIMIZER)


def with_frozen(plan: Plan, share: float, *names: str) -> Plan:
    """Of these MetaOps only a share of the parameters is trained."""
    metaops = tuple(
        each.model_copy(update={"trainable_fraction": share}) if each.name in names else each
        for each in plan.metaops
    )
    return Plan(**{**{name: getattr(plan, name) for name in plan.model_fields_set}, "metaops": metaops})


def test_what_is_not_trained_has_groups_of_its_own_where_it_is_shared_out() -> None:
    """Of 1 MiB a quarter is trained."""
    plan = with_frozen(two_nets({**ALL, "head": Sharding.GRADIENTS}), 0.25, "a/net", "a/head")
    groups = {group.blocks[0]: group for group in link(plan, settings=SETTINGS).groups}
    assert groups.keys() == {*(("net", op) for op in (0, 1)), *(("net (frozen)", op) for op in (0, 1))} | {
        ("head", 0),
        ("other", 0),
    }
    trained, frozen = groups["net", 1], groups["net (frozen)", 1]
    assert (trained.parameter_bytes, trained.is_trained) == (MIB // 4, True)
    assert (frozen.parameter_bytes, frozen.num_bytes, frozen.is_trained) == (3 * MIB // 4, 0, False)
    assert (frozen.devices, frozen.first_ops, frozen.last_ops) == ((0, 1), (1,), (1,))
    assert frozen.sharding is Sharding.PARAMETERS


def test_a_pass_back_to_which_no_gradients_come_gathers_nothing() -> None:
    """The net is frozen: nothing before or in it trains. With a head of it frozen, too, its task trains
    nothing, and neither flags nor gathers are behind the step.
    """
    plan = with_frozen(two_nets({"net": Sharding.PARAMETERS}), 0.0, "a/net")
    program = link(plan, settings=SETTINGS)
    prove(program)
    assert program.reached == (False, True, True)
    (shards,) = [each for each in program.communicators if each.purpose is Purpose.SHARDS]
    assert texts(program, 0)[:2] == [f"F 0 by {shards.index}", "F 1"]
    assert "B 0" in texts(program, 0)
    nothing = link(with_frozen(plan, 0.0, "a/net", "a/head"), settings=SETTINGS)
    prove(nothing)
    assert nothing.reached == (False, False, True)
    assert [text for text in texts(nothing, 0) if not text.startswith(("F ", "B "))] == [
        "LOSSES on 0",
        "NORM on 0",
        "STEP",
    ]
    assert [each.ranks for each in nothing.communicators if each.purpose is Purpose.SUMS] == [(1, 2)]


def test_a_frozen_net_behind_one_that_trains_is_gathered_for_both_passes() -> None:
    plan = with_frozen(two_nets({"net": Sharding.PARAMETERS, "head": Sharding.PARAMETERS}), 0.0, "a/head")
    program = link(plan, settings=SETTINGS)
    prove(program)
    assert program.reached == (True, True, True)
    (shards,) = [each for each in program.communicators if each.purpose is Purpose.SHARDS]
    assert {f"F 1 by {shards.index}", f"B 1 by {shards.index}"} <= set(texts(program, 0))


@pytest.mark.parametrize("is_there", [True, False])
def test_the_proof_finds_gathers_in_a_pass_back_without_gradients_and_their_lack_in_one_with(
    is_there: bool,
) -> None:
    share = 0.0 if is_there else 1.0
    program = link(with_frozen(two_nets({"net": Sharding.PARAMETERS}), share, "a/net"), settings=SETTINGS)
    (shards,) = [each for each in program.communicators if each.purpose is Purpose.SHARDS]
    changed = {
        device: tuple(
            replace(action, shards=(shards.index,) if is_there else ())
            if (action.kind, action.slice_index) == (Kind.BACKWARD, 0)
            else action
            for action in actions
        )
        for device, actions in program.actions.items()
    }
    with pytest.raises(ProgramError, match="expected what its parameters are gathered over"):
        prove(replace(program, actions=changed))


def test_a_block_that_several_ops_use_is_there_from_the_first_to_the_last() -> None:
    plan = two_nets({"net": Sharding.PARAMETERS})
    net = plan.metaops[0].model_copy(update={"parameter_blocks": (7, 7)})
    groups = link(plan.model_copy(update={"metaops": (net, *plan.metaops[1:])})).groups
    (group,) = [group for group in groups if group.blocks == (("net", 7),)]
    assert (group.first_ops, group.last_ops) == ((0,), (1,))


def test_passes_gather_and_sum_what_is_shared_out(program: Program) -> None:
    """Device 1: parameters in both passes of net, gradients alone in the backward pass of head; only what is
    not shared out has a sum, and what is gathered in passes no gather behind the step.
    """
    (shards,) = [each for each in program.communicators if each.purpose is Purpose.SHARDS]
    sums = {each.ranks: each.index for each in program.communicators if each.purpose is Purpose.SUMS}
    assert shards.ranks == (0, 1)
    by, first, second = f" by {shards.index}", sums[0, 1], sums[1, 2]
    assert texts(program, 0) == [
        f"F 0{by}",
        "F 1",
        f"B 1{by}",
        f"B 0{by}",
        "LOSSES on 0",
        f"FLAGS on {first}",
        "NORM on 0",
        "STEP",
        f"GATHER 0 on {first}",
    ]
    own = texts(program, 1)
    assert [text for text in own if text.startswith(("SUM", "GATHER"))] == [
        f"SUM 3 op 0 on {second}",
        f"GATHER 0 on {first}",
        f"GATHER 3 on {second}",
    ]
    assert [text for text in own if text.startswith(("F ", "B "))][-2:] == ["F 2", "B 2"]


def test_what_not_all_of_its_devices_run_stays_whole() -> None:
    """Both tasks train the same parameters, on devices of which one is the same."""
    plan = two_nets({"net": Sharding.PARAMETERS})
    other = plan.metaops[2].model_copy(update={"parameters": "head"})
    shared = plan.model_copy(
        update={"metaops": (*plan.metaops[:2], other), "sharding": {"head": Sharding.PARAMETERS}}
    )
    (group,) = [group for group in link(shared).groups if group.blocks == (("head", 0),)]
    assert (group.devices, group.sharding) == ((0, 1, 2), Sharding.OPTIMIZER)
    violations = {violation.rule: violation for violation in check_plan(shared)}
    assert violations["sharding"].devices == (0, 2)
    assert "'head' are shared out (parameters)" in violations["sharding"].value


def test_a_plan_whose_devices_run_all_of_it_breaks_no_rule_of_sharding() -> None:
    assert "sharding" not in {violation.rule for violation in check_plan(two_nets(ALL))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_": "spindle.plan/1"}, "expected"),
        ({"optimizer_state_sharded": False}, "expected none where the train settings do not let devices"),
        ({"sharding": {"nat": "parameters"}}, "no MetaOp has parameters 'nat'; expected one of head, net"),
        ({"sharding": {"net": "all"}}, "'optimizer', 'gradients' or 'parameters'"),
    ],
)
def test_sharding_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    plan = two_nets(ALL)
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan(**{**fields, **changes})


def broken(program: Program, device: int, text: str, by: str) -> Program:
    """The program with one action of a device in another way."""
    actions = tuple(
        parse_action(by) if format_action(action) == text else action for action in program.actions[device]
    )
    assert actions != program.actions[device]
    return replace(program, actions={**program.actions, device: actions})


def test_every_action_comes_back_from_its_text(program: Program) -> None:
    for actions in program.actions.values():
        assert [parse_action(format_action(action)) for action in actions] == list(actions)
    assert parse_action("B 4 on 6 by 7,8") == Action(Kind.BACKWARD, 4, communicator=6, shards=(7, 8))


@pytest.mark.parametrize("text", ["STEP by 1", "F 1 by", "F 1 by x", "LOSSES on 0 by 1"])
def test_only_passes_gather(text: str) -> None:
    with pytest.raises(ValueError, match="expected an action such as"):
        parse_action(text)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_proof_refuses_passes_without_what_they_gather_over(program: Program, number: int) -> None:
    """Left out of each pass that gathers or sums, and put into one that does not."""
    shards = next(each.index for each in program.communicators if each.purpose is Purpose.SHARDS)
    text = ["F 0", "F 1", "B 1", "B 0"][number]
    whole = f"{text} by {shards}"
    changed = broken(program, 1, text, whole) if number == 1 else broken(program, 1, whole, text)
    with pytest.raises(ProgramError, match="expected what its parameters are gathered over"):
        prove(changed)


def test_the_proof_refuses_another_communicator_for_it(program: Program) -> None:
    shards = next(each.index for each in program.communicators if each.purpose is Purpose.SHARDS)
    with pytest.raises(ProgramError, match="expected what its parameters are gathered over"):
        prove(broken(program, 1, f"F 0 by {shards}", "F 0 by 0"))


def test_the_proof_refuses_flags_before_the_last_pass_that_sums(program: Program) -> None:
    actions = list(program.actions[0])
    flags = next(step for step, action in enumerate(actions) if action.kind is Kind.FLAGS)
    backward = next(step for step, action in enumerate(actions) if action.kind is Kind.BACKWARD)
    actions.insert(backward, actions.pop(flags))
    with pytest.raises(ProgramError, match="exchanges flags before its last sum"):
        prove(replace(program, actions={**program.actions, 0: tuple(actions)}))


def test_the_proof_refuses_a_step_that_does_not_hand_on_what_stays_whole(program: Program) -> None:
    actions = tuple(action for action in program.actions[0] if action.kind is not Kind.GATHER)
    with pytest.raises(ProgramError, match="does not gather each group"):
        prove(replace(program, actions={**program.actions, 0: actions}))


def test_the_proof_refuses_a_group_whose_devices_do_not_all_run_its_slice(program: Program) -> None:
    groups = tuple(
        replace(group, devices=(0, 1, 2)) if group.blocks == (("net", 0),) else group
        for group in program.groups
    )
    with pytest.raises(ProgramError, match="does not run on all devices that share its parameters out"):
        prove(replace(program, groups=groups))


def test_a_step_is_simulated_to_its_end_with_what_passes_gather(program: Program) -> None:
    """Nobody waits for parameters that no step hands on; both devices start a pass that gathers together."""
    simulation = simulate(program.plan)
    assert {(span.device, span.activity, span.slice_index) for span in simulation.spans} == {
        (device, activity, piece)
        for piece, devices in enumerate([(0, 1), (0, 1), (1, 2)])
        for device in devices
        for activity in (Activity.FORWARD, Activity.BACKWARD)
    }
    starts = {
        span.start_s for span in simulation.spans if (span.slice_index, span.activity) == (0, "forward")
    }
    assert len(starts) == 1


def test_one_slice_on_fewer_devices_keeps_parameters_whole() -> None:
    """One slice runs on all that hold the parameters, another one on some of them."""
    plan = two_nets({})
    head = metaop_of("b/head", 1, {1: 3.0, 2: 3.0}, parameters="head")
    narrow = plan.waves[2].slices[0].model_copy(update={"devices": (1,), "dp": 1})
    waves = (*plan.waves[:2], plan.waves[2].model_copy(update={"slices": (narrow,)}))
    metaops = (*plan.metaops[:2], PlanMetaOp.model_validate(head.model_dump(exclude={"fit"})))
    shared = plan.model_copy(
        update={"metaops": metaops, "waves": waves, "sharding": {"head": Sharding.PARAMETERS}}
    )
    (group,) = [group for group in link(shared).groups if group.blocks == (("head", 0),)]
    assert (group.devices, group.sharding) == ((0, 1), Sharding.OPTIMIZER)


def test_a_pass_is_proved_with_what_it_gathers_over(program: Program) -> None:
    """Each pass of net takes part once over the shards' communicator, and waits for it."""
    shards = next(each.index for each in program.communicators if each.purpose is Purpose.SHARDS)
    moves = Moves(program).of(0)
    steps = [move.step for move in moves if move.posts is not None and move.communicator == shards]
    assert [format_action(program.actions[0][step]) for step in steps] == [
        f"F 0 by {shards}",
        f"B 1 by {shards}",
        f"B 0 by {shards}",
    ]
    posts = [move.posts for move in moves if move.posts is not None and move.communicator == shards]
    assert all(any(move.waits_for == (post,) for move in moves) for post in posts)


def test_devices_of_a_pass_that_gathers_start_it_together() -> None:
    """Device 1 comes from a slice of its own; without what it gathers, device 0 would begin without it."""
    plan = two_nets({"net": Sharding.PARAMETERS})
    alone = metaop_of("c/alone", 1, {1: 30.0}, parameters="alone")
    first = timed(slice_of(alone, (0, 1), (1,), 0.0), 40.0).model_copy(
        update={"end_s": 10.0, "backward_end_s": 60.0}
    )
    later = [
        piece.model_copy(
            update={
                name: getattr(piece, name) + 10.0
                for name in ("start_s", "end_s", "backward_start_s", "backward_end_s")
            }
        )
        for piece in plan.slices
    ]
    waves = tuple(
        Wave(index=index, start_s=piece.start_s, end_s=piece.end_s, slices=(piece,))
        for index, piece in enumerate([first, *later])
    )
    metaops = (*plan.metaops, PlanMetaOp.model_validate(alone.model_dump(exclude={"fit"})))
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    spans = simulate(Plan(**{**fields, "waves": waves, "metaops": metaops})).spans
    begun = {
        (span.device, span.slice_index): span.start_s for span in spans if span.activity is Activity.FORWARD
    }
    assert begun[0, 1] == begun[1, 1] == pytest.approx(10.0)
