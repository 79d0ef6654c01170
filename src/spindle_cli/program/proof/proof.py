"""Prove that a program does what its plan says and always comes to its end, before anything starts.

Shares with `link` the types and the layouts only: edges, rows and orders are worked out here a second time.

1. computes: every slice forward and backward once on each of its devices  (proof_passes.py), then the step
2. sums: each has all its devices, in one order everywhere
3. sources: nothing is sent or summed before it is computed
4. communicators: everything goes over one that is made for it, in one order on all of its devices, and
   nothing is left out                                                      (proof_communicators.py)
5. rows: shares lie where the plan says, and each device gets every sample of every input, and of every
   gradient, once                                                           (proof_rows.py)
6. updates: what is updated before STEP may be, and is complete             (proof_updates.py)
7. what is given up has been sent before, and not been given up
8. a run to the end: nothing waits for ever, whatever the library     (proof_moves.py, proof_run.py)
"""

from __future__ import annotations

from itertools import pairwise

from spindle_cli.program.proof.faults import fault
from spindle_cli.program.proof.proof_communicators import check_communicators
from spindle_cli.program.proof.proof_moves import early_ops
from spindle_cli.program.proof.proof_passes import check_passes
from spindle_cli.program.proof.proof_rows import check_rows
from spindle_cli.program.proof.proof_run import check_run
from spindle_cli.program.proof.proof_updates import check_updates
from spindle_cli.program.types import COMPUTES, SENDS, Action, Kind, Program


def prove(program: Program) -> None:
    """Check a whole program; takes time in proportion to its actions.

    Raises:
        ProgramError: what is wrong, with the actions around it as a grid of devices by steps, the place
            marked.
    """
    check_computes(program)
    check_sums(program)
    check_sources(program)
    check_communicators(program)
    check_rows(program)
    check_updates(program)
    check_given_up(program)
    check_run(program)


def check_computes(program: Program) -> None:
    """Each device runs its own slices once forward and once backward, and ends with its one STEP, just before
    it NORM if there is one, and behind it GATHERs alone.

    Raises:
        ProgramError: naming the first device that does not.
    """
    check_passes(program)
    for device, actions in program.actions.items():
        steps = [step for step, action in enumerate(actions) if action.kind is Kind.STEP]
        last = max((step for step, action in enumerate(actions) if action.kind is not Kind.GATHER), default=0)
        if steps != [last]:
            raise fault(
                program, f"device {device}: expected one STEP, and only GATHERs behind it", (device, last)
            )
        for step in (step for step, action in enumerate(actions) if action.kind is Kind.NORM):
            if step != last - 1:
                raise fault(program, f"device {device}: expected NORM just before STEP", (device, step))


def check_sums(program: Program) -> None:
    """All devices of a group, and no others, start its sum once, in the order of groups, and no earlier than
    with the op that completes it.

    Raises:
        ProgramError: naming the first device that does not.
    """
    members: dict[int, list[int]] = {group.index: [] for group in program.groups}
    for device, actions in program.actions.items():
        sums = [(step, action) for step, action in enumerate(actions) if action.kind is Kind.SUM]
        _check_ops(program, device)
        for (_, earlier), (step, later) in pairwise(sums):
            if _group(earlier) >= _group(later):
                raise fault(program, f"device {device} starts its sums out of order", (device, step))
        for _, action in sums:
            members[_group(action)].append(device)
    for group in program.groups:
        is_summed = len(group.devices) > 1 and not group.sharding.is_by_pass
        is_summed = is_summed or (len(group.teams) > 1 and group.is_trained)
        wanted = sorted(group.devices) if is_summed else []
        if sorted(members[group.index]) != wanted:
            device = min(set(wanted) ^ set(members[group.index]))
            message = f"device {device} starts SUM {group.index}, or should and does not"
            raise fault(program, message, (device, len(program.actions[device]) - 1))


def _check_ops(program: Program, device: int) -> None:
    """A sum's op is of the backward slice before it. Neither with it, nor with a sum behind it, which would
    take it along, may it start before the last op that adds to it there. What teams sum that the pass itself
    has summed starts behind that pass, and so do all sums that follow.
    """
    piece: int | None = None
    is_behind = False
    early = early_ops(program, device)
    for step, action in enumerate(program.actions[device]):
        if action.kind is Kind.BACKWARD:
            piece, is_behind = action.piece, False
        elif action.kind is Kind.SUM:
            group = program.groups[_group(action)]
            is_behind = is_behind or (bool(group.teams) and action.op is None)
            if action.op is None and (piece is None or is_behind):
                continue  # the device has run nothing that adds to it, or the pass is through
            if is_behind or (group.teams and piece in group.slices):
                raise fault(program, f"device {device} may start this sum inside of a pass", (device, step))
            if piece is None or action.op is None or action.op not in range(*program.slices[piece].ops):
                raise fault(program, f"device {device}: expected an op of the slice before", (device, step))
            first_op = dict(zip(group.slices, group.first_ops, strict=True)).get(piece, action.op)
            if early[step] > first_op:
                message = f"device {device} may start this sum before op {first_op}, which adds to it"
                raise fault(program, message, (device, step))


def check_given_up(program: Program) -> None:
    """What a device gives up before a pass is what it has sent and has not given up.

    Raises:
        ProgramError: naming the first device that does not.
    """
    for device, actions in program.actions.items():
        sent: set[int] = set()
        for step, action in enumerate(actions):
            if action.kind in SENDS and action.transfer is not None:
                sent.add(action.transfer.key)
            if not sent.issuperset(action.left):
                message = f"device {device} gives up before this what it has not sent"
                raise fault(program, message, (device, step))
            sent.difference_update(action.left)


def _group(action: Action) -> int:
    assert action.group is not None, "a SUM has a group"
    return action.group


def check_sources(program: Program) -> None:
    """Each send comes after the compute that makes its data, each sum after all that the device adds to it,
    that of the losses after all forward passes.

    Raises:
        ProgramError: naming the first that does not.
    """
    for device, actions in program.actions.items():
        own = {action.piece for action in actions if action.kind is Kind.BACKWARD}
        done: set[tuple[Kind, int | None]] = set()
        for step, action in enumerate(actions):
            needed: list[tuple[Kind, int | None]] = []
            if action.kind in COMPUTES:
                done.add((action.kind, action.piece))
            elif action.kind is Kind.SEND and action.transfer is not None:
                needed = [(Kind.FORWARD, action.transfer.producer)]
            elif action.kind is Kind.SEND_GRAD and action.transfer is not None:
                needed = [(Kind.BACKWARD, action.transfer.consumer)]
            elif action.kind is Kind.LOSSES:
                needed = [(Kind.FORWARD, piece) for piece in own]
            elif action.kind is Kind.SUM:
                slices = program.groups[_group(action)].slices
                needed = [(Kind.BACKWARD, piece) for piece in slices if piece in own]
            missing = [item for item in needed if item not in done]
            if missing:
                kind, piece = missing[0]
                raise fault(program, f"device {device} needs {kind} {piece} before this", (device, step))
