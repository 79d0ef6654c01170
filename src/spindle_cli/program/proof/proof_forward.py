"""Prove a program of forward passes alone: each runs once, takes what was computed, and all end.

Edges and rows are those of the whole program, which is proved by itself.
"""

from __future__ import annotations

from spindle_cli.program.proof.faults import fault
from spindle_cli.program.proof.proof_run import check_run
from spindle_cli.program.types import Action, Kind, Program, Transfer


def prove_forward(forward: Program, whole: Program, task: str) -> None:
    """Check `forward` against the whole program that it is a part of.

    Raises:
        ProgramError: a slice of the task does not run once where it has to, a chunk that the whole program
            sends for it is not sent and received once, something is sent before it is computed or received
            after it is needed, or devices wait for ever.
    """
    for device, actions in forward.actions.items():
        wanted = {
            index
            for index, piece in enumerate(forward.slices)
            if device in piece.devices and _task(forward, index) == task
        }
        _check_passes(forward, device, wanted)
        sent = {key for key in map(_key, actions) if key is not None}
        expected = {
            key
            for action in whole.actions[device]
            if (key := _key(action)) is not None and _is_handed_on(action, whole, task)
        }
        if sent != expected or len(sent) != sum(_key(action) is not None for action in actions):
            raise fault(forward, f"device {device} does not hand on what it has to", (device, 0))
        _check_order(forward, device)
    check_run(forward)


def _check_passes(forward: Program, device: int, wanted: set[int]) -> None:
    passes = [action.piece for action in forward.actions[device] if action.kind is Kind.FORWARD]
    if sorted(piece for piece in passes if piece is not None) != sorted(wanted):
        raise fault(forward, f"device {device} does not run each of its slices once", (device, 0))
    for step, action in enumerate(forward.actions[device]):
        if action.kind not in (Kind.FORWARD, Kind.SEND, Kind.RECV):
            raise fault(forward, f"device {device}: expected forward passes alone", (device, step))


def _check_order(forward: Program, device: int) -> None:
    """What is sent was computed before, and what a pass takes is received before it."""
    ran: set[int] = set()
    for step, action in enumerate(forward.actions[device]):
        if action.kind is Kind.FORWARD and action.piece is not None:
            ran.add(action.piece)
            continue
        transfer = _transfer(action)
        if action.kind is Kind.SEND and transfer.producer not in ran:
            raise fault(forward, f"device {device} sends this before it is computed", (device, step))
        if action.kind is Kind.RECV and transfer.consumer in ran:
            raise fault(forward, f"device {device} receives this after it is needed", (device, step))


def _task(program: Program, piece: int) -> str:
    return program.plan.by_name[program.slices[piece].metaop].task


def _key(action: Action) -> tuple[Kind, int] | None:
    return None if action.transfer is None else (action.kind, action.transfer.key)


def _transfer(action: Action) -> Transfer:
    assert action.transfer is not None, "a message has a transfer"
    return action.transfer


def _is_handed_on(action: Action, program: Program, task: str) -> bool:
    transfer = _transfer(action)
    return not transfer.is_gradient and _task(program, transfer.producer) == task
