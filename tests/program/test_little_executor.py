"""The proof accepts what runs to its end under the rules of NCCL and of gloo, and nothing else: against an
independent little executor, on programs as they are linked and on programs with one action out of place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.little_executor import FailsError, Rules, execute
from helpers.random_plans import plans
from helpers.small_parts import parts_from
from spindle_cli.plan.types import Plan
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import COMPUTES, Action, Kind, Program, StepSettings


def refusal(program: Program) -> str:
    """Of the proof; empty where it accepts."""
    try:
        prove(program)
    except ProgramError as error:
        return str(error)
    return ""


def failure(program: Program, *rules: Rules) -> str:
    """Of the executor, under any of some rules (under any that there are, unless told); empty where the
    program finishes.
    """
    for each in rules or Rules:
        try:
            execute(program, each)
        except FailsError as error:
            return f"{each.name}: {error}"
    return ""


def with_actions(program: Program, device: int, actions: Sequence[Action]) -> Program:
    return replace(program, actions={**program.actions, device: tuple(actions)})


@examples(75)
@given(plans(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_linked_programs_finish(plan: Plan, sharded: bool, clips: bool, scales: bool, by_parts: bool) -> None:
    program = link(plan, settings=StepSettings(sharded, clips, scales, by_parts))
    assert refusal(program) == failure(program) == ""


@examples(75)
@given(plans(), st.sampled_from([1, 2**20, 3 * 2**20]), st.integers(2, 9))
def test_linked_programs_that_update_parts_finish(plan: Plan, least: int, most: int) -> None:
    with parts_from(least, most):
        program = link(plan, settings=StepSettings(by_parts=True))
        assert refusal(program) == failure(program) == ""


@examples(25)
@given(plans(), st.booleans(), st.integers(2, 3))
def test_one_batch_proves_a_step_of_several(plan: Plan, sharded: bool, batches: int) -> None:
    """What a step does once is left out of its other batches on all devices alike: what has waited for it
    waits for less, and two batches follow each other on every device in the same order.
    """
    program = link(plan, settings=StepSettings(sharded=sharded))
    prove(program)
    for rules in Rules:
        execute(program, rules, batches)


def in_form(program: Program, device: int) -> bool:
    """Whether a device's program has what the runtime takes for granted: its passes as they were, sums in the
    order of their groups, NORM, STEP and GATHERs at the end.
    """
    actions = [action for action in program.actions[device] if action.kind is not Kind.UPDATE]
    sums = [action.group for action in actions if action.kind is Kind.SUM and action.group is not None]
    ends = [action.kind in (Kind.NORM, Kind.STEP, Kind.GATHER) for action in actions]
    steps = [action.kind for action in actions if action.kind in (Kind.NORM, Kind.STEP)]
    order = [Kind.NORM, Kind.STEP] if program.settings.checks_gradients else [Kind.STEP]
    behind = [action.kind for action in actions[-sum(ends) :]]
    in_order = behind[: len(order)] == order and all(kind is Kind.GATHER for kind in behind[len(order) :])
    return sums == sorted(sums) and ends == sorted(ends) and steps == order and in_order


def with_possible_op(program: Program, actions: Sequence[Action], moved: Action) -> list[Action]:
    """A sum that was moved starts when the pass before it is through."""
    found: list[Action] = []
    first_op = 0
    for action in actions:
        if action.kind is Kind.BACKWARD and action.slice_index is not None:
            first_op = program.slices[action.slice_index].ops[0]
        is_it = action == moved and action.kind is Kind.SUM
        found.append(replace(action, op=first_op) if is_it else action)
    return found


@st.composite
def disturbed_programs(draw: st.DrawFn) -> Program:
    """A program of a random plan of which one device has two posts swapped, one moved, or one left out."""
    sharded, clips = draw(st.booleans()), draw(st.booleans())
    return draw(disturbed(StepSettings(sharded=sharded, clips=clips)))


@st.composite
def disturbed(draw: st.DrawFn, settings: StepSettings) -> Program:
    """The same, of these settings."""
    program = link(draw(plans()), settings=settings)
    device = draw(st.sampled_from(sorted(program.actions)))
    actions = list(program.actions[device])
    posts = [step for step, action in enumerate(actions) if action.kind not in (*COMPUTES, Kind.STEP)]
    step = draw(st.sampled_from(posts))
    match draw(st.sampled_from(("swap", "move", "drop"))):
        case "swap":
            other = draw(st.sampled_from(posts))
            first, second = actions[step], actions[other]
            actions[step], actions[other] = second, first
            actions = with_possible_op(program, with_possible_op(program, actions, first), second)
        case "move":
            moved = actions.pop(step)
            near = st.integers(max(0, step - 3), min(len(actions), step + 3))
            actions.insert(draw(near | st.integers(0, len(actions))), moved)
            actions = with_possible_op(program, actions, moved)
        case _:
            actions.pop(step)
    changed = with_actions(program, device, actions)
    assume(in_form(changed, device))
    return changed


@examples(200)
@given(disturbed_programs())
def test_the_proof_accepts_what_finishes_and_nothing_else(program: Program) -> None:
    refused, failed = refusal(program), failure(program)
    assert bool(refused) == bool(failed), refused or failed


@examples(200)
@given(st.data())
def test_nor_does_it_accept_other_updates_of_parts(data: st.DataObject) -> None:
    with parts_from(1):
        program = data.draw(disturbed(StepSettings(by_parts=True)))
        refused, failed = refusal(program), failure(program)
        assert bool(refused) == bool(failed), refused or failed
