"""Slices that run forward and backward in one go, by which sets of tasks are chosen, and with times for each
pass, as plans for several types of device say them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spindle_cli.plan.ordering.orders import mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.sets.restrict import as_early_as_possible
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOp


def both_at_once(slices: Sequence[Slice], by_name: Mapping[str, MetaOp]) -> tuple[Slice, ...]:
    """The same slices in the same order, in one go each, for as long as both passes take."""
    if all(piece.backward_s is None for piece in slices):
        return tuple(slices)
    in_one_go = [
        piece.model_copy(
            update={
                "end_s": piece.start_s + piece.busy_s,
                "backward_start_s": None,
                "backward_end_s": None,
            }
        )
        for piece in slices
    ]
    return as_early_as_possible(in_one_go, by_name)


def each_by_itself(problem: Problem, slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """The same with times for each pass: all forward, then all backward in reverse."""
    return timed(problem, slices, mirrored(range(len(slices))))
