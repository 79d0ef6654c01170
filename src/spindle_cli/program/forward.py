"""The forward passes of a program alone, of one task: what an evaluation runs.

What it posts is what the program posts of it, in the same order: the order that all devices share stays one
when all leave out the same. Nothing is made that a device does not post, as a pass that makes a message is
left in with it. So the reasons why the whole cannot hang (docs/design/program.md) hold for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from spindle_cli.program.types import Action, Kind, Program


def forward_only(program: Program, task: str, gathering: Collection[int] = ()) -> Program:
    """Leave of a program nothing but the task's forward passes and what they hand to each other, which they
    keep to their end.

    Batch norms take their running statistics, so that passes sum nothing over shares inside; but those of the
    slices `gathering` gather what a loss compares.
    """
    pieces = {
        index for index, piece in enumerate(program.slices) if program.plan.by_name[piece.metaop].task == task
    }
    actions = {
        device: tuple(
            replace(action if action.piece in gathering else _without_statistics(program, action), left=())
            for action in own
            if _is_of(action, pieces)
        )
        for device, own in program.actions.items()
    }
    return replace(program, actions=actions)


def _is_of(action: Action, pieces: set[int]) -> bool:
    if action.kind is Kind.FORWARD:
        return action.piece in pieces
    if action.kind in (Kind.SEND, Kind.RECV):
        return action.transfer is not None and action.transfer.producer in pieces
    return False


def _without_statistics(program: Program, action: Action) -> Action:
    if action.kind is Kind.FORWARD and action.piece is not None and program.layouts[action.piece].sums_shares:
        return replace(action, communicator=None)
    return action
