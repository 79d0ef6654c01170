"""Prove that a program does what its plan says and always comes to its end, before anything starts.

Shares with `link` the types and the layouts only: edges, rows and orders are worked out here a second time.

1. computes: every slice forward and backward once on each of its devices, the step last
2. sums: each has all its devices, in one order everywhere
3. sources: nothing is sent or summed before it is computed
4. channels: each send has its receive; both ends of every pair of devices post in one order
5. rows: each device gets every sample of every input, and of every gradient, once   (proof_rows.py)
6. a run to the end: nothing waits for ever                                          (proof_run.py)
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from spindle_cli.program.proof.faults import fault
from spindle_cli.program.proof.proof_rows import check_rows
from spindle_cli.program.proof.proof_run import check_run
from spindle_cli.program.types import Action, Kind, Program, Transfer

_COMPUTES = (Kind.FORWARD, Kind.BACKWARD)


def prove(program: Program) -> None:
    """Check a whole program; takes time in proportion to its actions.

    Raises:
        ProgramError: what is wrong, with the actions around it as a grid of devices by steps, the place
            marked.
    """
    check_computes(program)
    check_sums(program)
    check_sources(program)
    check_channels(program)
    check_rows(program)
    check_run(program)


def check_computes(program: Program) -> None:
    """Each device runs its own slices once forward, then once backward in reverse, and ends with its one
    STEP.

    Raises:
        ProgramError: naming the first device that does not.
    """
    own: dict[int, set[int]] = {device: set() for device in program.actions}
    for index, piece in enumerate(program.slices):
        for device in piece.devices:
            own[device].add(index)
    for device, actions in program.actions.items():
        computes = [(step, action) for step, action in enumerate(actions) if action.kind in _COMPUTES]
        expected = [Kind.FORWARD] * len(own[device]) + [Kind.BACKWARD] * len(own[device])
        for (step, action), kind in zip(computes, expected, strict=False):
            if action.kind is not kind:
                raise fault(program, f"device {device}: expected {kind} here", (device, step))
        ran = [action.piece for _, action in computes]
        forward, backward = ran[: len(own[device])], ran[len(own[device]) :]
        if Counter(forward) != Counter(own[device]):
            raise fault(program, f"device {device} does not run each of its slices forward once", (device, 0))
        if backward != forward[::-1]:
            raise fault(program, f"device {device}: backward does not mirror forward", (device, 0))
        if [step for step, action in enumerate(actions) if action.kind is Kind.STEP] != [len(actions) - 1]:
            place = (device, max(0, len(actions) - 1))
            raise fault(program, f"device {device} does not end with its one STEP", place)


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
        wanted = sorted(group.devices) if len(group.devices) > 1 else []
        if sorted(members[group.index]) != wanted:
            device = min(set(wanted) ^ set(members[group.index]))
            message = f"device {device} starts SUM {group.index}, or should and does not"
            raise fault(program, message, (device, len(program.actions[device]) - 1))


def _check_ops(program: Program, device: int) -> None:
    """A sum's op is of the backward slice before it, and not before the last that adds to it there."""
    piece: int | None = None
    for step, action in enumerate(program.actions[device]):
        if action.kind is Kind.BACKWARD:
            piece = action.piece
        elif action.kind is Kind.SUM:
            if piece is None or action.op is None or action.op not in range(*program.slices[piece].ops):
                raise fault(program, f"device {device}: expected an op of the slice before", (device, step))
            group = program.groups[_group(action)]
            first_op = dict(zip(group.slices, group.first_ops, strict=True)).get(piece, action.op)
            if action.op > first_op:
                message = f"device {device} may start this sum before op {first_op}, which adds to it"
                raise fault(program, message, (device, step))


def _group(action: Action) -> int:
    assert action.group is not None, "a SUM has a group"
    return action.group


def check_sources(program: Program) -> None:
    """Each send comes after the compute that makes its data, each sum after all that the device adds to it.

    Raises:
        ProgramError: naming the first that does not.
    """
    for device, actions in program.actions.items():
        own = {action.piece for action in actions if action.kind is Kind.BACKWARD}
        done: set[tuple[Kind, int | None]] = set()
        for step, action in enumerate(actions):
            needed: list[tuple[Kind, int | None]] = []
            if action.kind in _COMPUTES:
                done.add((action.kind, action.piece))
            elif action.kind is Kind.SEND and action.transfer is not None:
                needed = [(Kind.FORWARD, action.transfer.producer)]
            elif action.kind is Kind.SEND_GRAD and action.transfer is not None:
                needed = [(Kind.BACKWARD, action.transfer.consumer)]
            elif action.kind is Kind.SUM:
                slices = program.groups[_group(action)].slices
                needed = [(Kind.BACKWARD, piece) for piece in slices if piece in own]
            missing = [item for item in needed if item not in done]
            if missing:
                kind, piece = missing[0]
                raise fault(program, f"device {device} needs {kind} {piece} before this", (device, step))


def check_channels(program: Program) -> None:
    """Both ends of each pair of devices post the same transfers, sends against receives, in the same order.

    Raises:
        ProgramError: naming the first transfer that does not fit.
    """
    posts: dict[tuple[int, int], dict[int, list[tuple[int, Transfer]]]] = {}
    for device, actions in program.actions.items():
        for step, action in enumerate(actions):
            if action.transfer is None:
                continue
            if not _own_end(device, action, action.transfer):
                raise fault(program, f"device {device} posts what is not its own", (device, step))
            low, high = sorted((action.transfer.source, action.transfer.destination))
            posts.setdefault((low, high), {low: [], high: []})[device].append((step, action.transfer))
    for (low, high), ends in posts.items():
        for (step, one), (other_step, other) in zip(ends[low], ends[high], strict=False):
            if one is not other and one != other:
                message = f"devices {low} and {high} post their transfers in different orders"
                raise fault(program, message, (low, step), (high, other_step))
        matched = min(len(ends[low]), len(ends[high]))
        for device in (low, high):
            if len(ends[device]) > matched:
                message = f"device {device} posts a transfer that its peer does not"
                raise fault(program, message, (device, ends[device][matched][0]))


def _own_end(device: int, action: Action, transfer: Transfer) -> bool:
    """Whether a post is the device's own end of a transfer of that phase, to another device."""
    sends = action.kind in (Kind.SEND, Kind.SEND_GRAD)
    gradient = action.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD)
    end, other = (transfer.source, transfer.destination) if sends else (transfer.destination, transfer.source)
    return end == device != other and transfer.is_gradient == gradient
