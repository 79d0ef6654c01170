"""How long slices compute and parameters are updated on a device, from the plan's curves and sizes."""

from __future__ import annotations

from dataclasses import dataclass

from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.update import optimizer_steps_s
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan, Slice


@dataclass(frozen=True)
class Duration:
    """Seconds of a slice's forward and backward pass."""

    forward_s: float
    backward_s: float


def slice_durations(plan: Plan) -> tuple[Duration, ...]:
    """Of each of `plan.slices`. A slice that recomputes runs forward once more in its backward pass.

    Raises:
        InputError: the plan holds no curve point for a slice's dp and tp.
    """
    return tuple(_duration(plan, piece) for piece in plan.slices)


def step_durations(plan: Plan) -> tuple[float, ...]:
    """Seconds of the optimizer's step on each device."""
    held = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    return optimizer_steps_s(held, plan.optimizer_s_per_byte)


def _duration(plan: Plan, piece: Slice) -> Duration:
    for point in plan.by_name[piece.metaop].curve:
        if (point.dp, point.tp) == (piece.dp, piece.tp):
            forward_s = piece.num_ops * point.forward_s
            backward_s = piece.num_ops * point.backward_s
            return Duration(forward_s, backward_s + forward_s if piece.recompute else backward_s)
    raise InputError(
        f"metaops: {piece.metaop!r}: no curve point for dp {piece.dp}, tp {piece.tp}, used by {piece.label}",
        hint="Make the plan again with this version; `spindle check` lists everything that is wrong with it.",
    )
