"""Part of the proof: each device runs its own slices once forward and once backward, in the plan's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from spindle_cli.program.proof.faults import fault
from spindle_cli.program.proof.proof_rows import needed_edges
from spindle_cli.program.types import COMPUTES, Action, Kind, Program

_Step = tuple[int, Action]


def check_passes(program: Program) -> None:
    """Where the plan has one length for both passes, all forward and then all backward in reverse; else each
    forward before it is backward, in the order in which they are planned, and of two slices of one device the
    one that gives to the other first forward and last backward.

    Raises:
        ProgramError: naming the first device that does not.
    """
    own: dict[int, set[int]] = {device: set() for device in program.actions}
    for index, piece in enumerate(program.slices):
        for device in piece.devices:
            own[device].add(index)
    is_mirrored = all(piece.backward_s is None for piece in program.slices)
    takes: dict[int, list[int]] = {}
    for producer, consumer in needed_edges(program):
        takes.setdefault(consumer, []).append(producer)
    for device, actions in program.actions.items():
        computes = [(step, action) for step, action in enumerate(actions) if action.kind in COMPUTES]
        if is_mirrored:
            _check_mirrored(program, device, own[device], computes)
        else:
            _check_in_order(program, device, own[device], computes, takes)


def _check_mirrored(program: Program, device: int, own: set[int], computes: Sequence[_Step]) -> None:
    expected = [Kind.FORWARD] * len(own) + [Kind.BACKWARD] * len(own)
    for (step, action), kind in zip(computes, expected, strict=False):
        if action.kind is not kind:
            raise fault(program, f"device {device}: expected {kind} here", (device, step))
    ran = [action.piece for _, action in computes]
    forward, backward = ran[: len(own)], ran[len(own) :]
    if Counter(forward) != Counter(own):
        raise fault(program, f"device {device} does not run each of its slices forward once", (device, 0))
    if backward != forward[::-1]:
        raise fault(program, f"device {device}: backward does not mirror forward", (device, 0))


def _check_in_order(
    program: Program,
    device: int,
    own: set[int],
    computes: Sequence[_Step],
    takes: Mapping[int, Sequence[int]],
) -> None:
    at: dict[tuple[Kind, int], int] = {}
    for step, action in computes:
        assert action.piece is not None, "an F or B has a slice"
        if action.piece not in own or (action.kind, action.piece) in at:
            message = f"device {device}: expected each of its own slices once forward, once backward"
            raise fault(program, message, (device, step))
        at[action.kind, action.piece] = step
    for kind in COMPUTES:
        lost = [piece for piece in sorted(own) if (kind, piece) not in at]
        if lost:
            raise fault(program, f"device {device} does not run {kind} {lost[0]}", (device, 0))
    first = [((Kind.FORWARD, piece), (Kind.BACKWARD, piece)) for piece in sorted(own)]
    for piece in sorted(own):
        for producer in own.intersection(takes.get(piece, ())):
            first.append(((Kind.FORWARD, producer), (Kind.FORWARD, piece)))
            first.append(((Kind.BACKWARD, piece), (Kind.BACKWARD, producer)))
    for (kind, piece), then in first:
        if at[kind, piece] > at[then]:
            raise fault(program, f"device {device} needs {kind} {piece} before this", (device, at[then]))
    for (_, earlier), (step, later) in pairwise(computes):
        start_s, end_s = _times_s(program, later)
        planned_s, _ = _times_s(program, earlier)
        if start_s < planned_s and end_s <= planned_s:
            before = f"{earlier.kind} {earlier.piece}"
            message = f"device {device} runs this behind {before}, which is planned behind it"
            raise fault(program, message, (device, step))


def _times_s(program: Program, action: Action) -> tuple[float, float]:
    assert action.piece is not None, "an F or B has a slice"
    piece = program.slices[action.piece]
    if action.kind is Kind.BACKWARD and piece.backward_s is not None:
        return piece.backward_s
    return piece.start_s, piece.end_s
