"""Programs that update parts of the parameters before STEP: what they say, and what the proof refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.hanging_programs import changed
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from helpers.small_parts import parts_from
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.proof.proof_moves import Moves
from spindle_cli.program.types import Action, Kind, Program, StepSettings
from spindle_cli.show.text import format_action, format_rank, parse_action

MIB = 2**20
BY_PARTS = StepSettings(by_parts=True)


def linked(op_mib: int = 4, own_mib: int = 4, settings: StepSettings = BY_PARTS) -> Program:
    """Three ops on devices 0 and 1, then one on device 1 alone."""
    net = metaop_of("a/net", 3, {2: 1.0}, param_bytes_per_op=op_mib * MIB)
    own = metaop_of("b/own", 1, {1: 1.0}, param_bytes_per_op=own_mib * MIB)
    waves = [[slice_of(net, (0, 3), (0, 1), 0.0)], [slice_of(own, (0, 1), (1,), 3.0)]]
    return link(plan_of(profile_of(net, own), cluster_of(2), waves), settings=settings)


def texts(program: Program, device: int) -> list[str]:
    return list(map(format_action, program.actions[device]))


def test_each_device_updates_what_is_complete_before_it_waits_for_more() -> None:
    """Groups 0 to 2 are those of ops 2, 1 and 0; number 3 is the other device's own, or the first."""
    program = linked()
    prove(program)
    sums = [action.group for action in program.actions[0] if action.kind is Kind.SUM]
    first, second, _ = sums
    assert texts(program, 0)[-3:] == [f"UPDATE {first}", f"UPDATE {second}", "STEP"]
    assert texts(program, 1)[-4:] == ["UPDATE", f"UPDATE {first}", f"UPDATE {second}", "STEP"]
    assert [part.groups for part in program.updates[1]] == [(), *((each,) for each in sums)]
    assert [part.share for part in program.updates[1]] == [0.25] * 4


def test_what_is_small_is_updated_with_its_neighbours() -> None:
    """Beside 5 MiB there are 3 MiB of sums, too few to be a part; or 6, which are one."""
    program = linked(op_mib=1, own_mib=5)
    prove(program)
    for device in (0, 1):
        assert not any(text.startswith("UPDATE") for text in texts(program, device))
    program = linked(op_mib=2, own_mib=4)
    prove(program)
    assert [text for text in texts(program, 1) if text.startswith("UPDATE")] == ["UPDATE"]


@pytest.mark.parametrize(
    "settings",
    [
        StepSettings(),
        StepSettings(by_parts=True, clips=True),
        StepSettings(by_parts=True, scales=True),
        StepSettings(by_parts=True, sharded=True),
    ],
)
def test_there_is_one_update_where_all_gradients_are_awaited(settings: StepSettings) -> None:
    program = linked(settings=settings)
    prove(program)
    kinds = [action.kind for actions in program.actions.values() for action in actions]
    assert Kind.UPDATE not in kinds
    assert [len(parts) for parts in program.updates.values()] == [1, 1]


def test_a_plan_says_whether_its_program_updates_parts() -> None:
    plan = linked().plan
    assert "UPDATE" not in format_rank(link(plan), 1)
    page = format_rank(link(plan.model_copy(update={"updates_by_parts": True})), 1)
    assert "UPDATE 2         wait for 1 sum, then the optimizer for 25% of what the device updates" in page
    lines = [line.split(maxsplit=1)[1] for line in page.splitlines() if "the optimizer" in line]
    assert [line.split("  ")[-1].strip() for line in lines] == [
        "the optimizer for 25% of what the device updates",
        "wait for 1 sum, then the optimizer for 25% of what the device updates",
        "wait for 1 sum, then the optimizer for 25% of what the device updates",
        "wait for everything, then the optimizer for the rest",
    ]


def test_the_docs_show_such_a_program() -> None:
    shown = "\n".join(format_rank(linked(), 1).splitlines()[6:12])
    assert shown.splitlines()[-1].startswith("11  STEP")
    assert shown in (Path(__file__).parents[2] / "docs" / "program.md").read_text(encoding="utf-8")


def test_text_and_back() -> None:
    for text in ("UPDATE", "UPDATE 12", "STEP"):
        assert format_action(parse_action(text)) == text
    assert parse_action("UPDATE 12") == Action(Kind.UPDATE, group=12)
    for wrong in ("UPDATE 1 on 2", "UPDATE on 0", "UPDATE x", "UPDATE 1 op 2"):
        with pytest.raises(ValueError, match="expected an action"):
            parse_action(wrong)


def at(position: int, action: Action) -> Callable[[list[Action]], None]:
    return lambda actions: actions.insert(position, action)


def without(position: int) -> Callable[[list[Action]], None]:
    def change(actions: list[Action]) -> None:
        del actions[position]

    return change


def instead(position: int, action: Action) -> Callable[[list[Action]], None]:
    return lambda actions: actions.__setitem__(position, action)


def moved(position: int, to: int) -> Callable[[list[Action]], None]:
    return lambda actions: actions.insert(to, actions.pop(position))


NOTHING = Action(Kind.UPDATE)


def update(program: Program, number: int) -> Action:
    """Of device 1: the UPDATE of its own, and those of its first two sums."""
    return program.actions[1][number - 4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: without(-4), "updates too little at once, or too much"),
        (lambda p: without(-3), "updates too little at once, or too much"),
        (lambda p: without(-2), "should update a part before STEP"),
        (lambda p: at(-1, update(p, 2)), "updates a part twice, or out of order"),
        (lambda p: at(-4, NOTHING), "updates a part twice, or out of order"),
        (lambda p: at(-1, NOTHING), "updates a part twice, or out of order"),
        (lambda p: moved(-3, -1), "updates a part twice, or out of order"),
        (lambda p: at(-1, Action(Kind.UPDATE, group=last_sum(p))), "leaves too little to STEP"),
        (lambda p: at(-1, Action(Kind.UPDATE, group=own_group(p))), "has not started the sum of group"),
        (lambda p: instead(-2, Action(Kind.UPDATE, group=last_sum(p))), "updates too little at once, or too"),
        (lambda p: moved(-2, -6), "has not started the sum|updates a part before this"),
        (lambda p: moved(-4, 0), "updates a part before this"),
        (lambda p: moved(-4, -5), "updates a part before this"),
        (lambda p: moved(-2, 99), "expected one STEP"),
    ],
)
def test_updates_out_of_place_are_refused(
    change: Callable[[Program], Callable[[list[Action]], None]], said: str
) -> None:
    program = linked()
    wrong = changed(program, 1, change(program))
    assert wrong.actions[1] != program.actions[1]
    with pytest.raises(ProgramError, match=said):
        prove(wrong)


def last_sum(program: Program) -> int:
    found = [action.group for action in program.actions[1] if action.kind is Kind.SUM]
    assert found[-1] is not None
    return found[-1]


def own_group(program: Program) -> int:
    return next(group.index for group in program.groups if group.devices == (1,))


def test_an_update_that_may_not_be_is_refused() -> None:
    program = linked(settings=StepSettings(by_parts=True, clips=True))
    with pytest.raises(ProgramError, match="which may not be yet"):
        prove(changed(program, 0, at(-2, NOTHING)))


def test_parts_are_those_of_what_is_worth_an_update() -> None:
    program = linked()
    with parts_from(4 * MIB + 1), pytest.raises(ProgramError, match="too little at once"):
        prove(program)
    with parts_from(4 * MIB, most=3), pytest.raises(ProgramError, match="too little at once"):
        prove(program)


def test_an_update_waits_for_the_losses_and_its_own_sums_alone() -> None:
    """All over communicator 0: the losses, then a sum for each op."""
    program = linked()
    step = len(program.actions[1]) - 1
    waits = {move.step - step: move.waits_for for move in Moves(program).of(1) if move.posts is None}
    assert [waits[number] for number in range(-3, 1)] == [
        ((0, 0),),
        ((0, 0), (0, 1)),
        ((0, 0), (0, 1), (0, 2)),
        ((0, 0), (0, 1), (0, 2), (0, 3)),
    ]
