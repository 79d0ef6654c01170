"""How long slices compute and parameters are updated on a device, from the plan's curves and sizes."""

from __future__ import annotations

from dataclasses import dataclass

from spindle_cli.account.device_memory import device_memory, optimizer_steps_s
from spindle_cli.account.processor import slice_stretches
from spindle_cli.costs.beyond_curve import BeyondCurve
from spindle_cli.costs.offload import stalls
from spindle_cli.costs.recomputing import forwards_again
from spindle_cli.costs.shares.times import times_of, times_of_shares
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.program.transfers import gathering_s
from spindle_cli.program.types import Kind, Program


@dataclass(frozen=True)
class Duration:
    """Seconds of a slice's forward and backward pass."""

    forward_s: float
    backward_s: float


def slice_durations(program: Program) -> tuple[Duration, ...]:
    """The durations of each of the plan's slices, with what its devices do beside it. Ops that are recomputed
    run forward once more in the backward pass; passes wait for what is copied to host memory and back, and
    begin with what they gather of what is sent in parts.

    Raises:
        InputError: the plan holds no curve point for a slice's dp and tp.
    """
    plan = program.plan
    beyond = BeyondCurve(plan.by_name, plan.cluster, plan)
    durations = [_duration(plan, piece, beyond) for piece in plan.slices]
    gathers_s = gathering_s(plan, program.layouts, program.edges)
    for index, (forward_s, backward_s) in gathers_s.items():
        alone = durations[index]
        durations[index] = Duration(alone.forward_s + forward_s, alone.backward_s + backward_s)
    stretches = slice_stretches(
        plan.processor,
        plan.cluster.num_devices,
        plan.slices,
        [duration.forward_s + duration.backward_s for duration in durations],
        plan.by_name,
        (
            (transfer.source, transfer.destination, transfer.num_bytes)
            for actions in program.actions.values()
            for action in actions
            if (transfer := action.transfer) is not None and action.kind in (Kind.SEND, Kind.SEND_GRAD)
        ),
        program.collectives,
        plan.accumulate,
    )
    return tuple(
        Duration(duration.forward_s * stretch, duration.backward_s * stretch)
        for duration, stretch in zip(durations, stretches, strict=True)
    )


def step_durations(plan: Plan) -> tuple[float, ...]:
    """Seconds of the optimizer's step on each device."""
    held = device_memory(plan.metaops, plan.slices, plan.cluster, plan, turn=plan.turn)
    return optimizer_steps_s(held, plan.optimizer_s_per_byte)


def _duration(plan: Plan, piece: Slice, beyond: BeyondCurve) -> Duration:
    metaop = plan.by_name[piece.metaop]
    op = times_of(metaop, piece, plan.cluster)
    if op is None:
        raise InputError(
            f"metaops: {piece.metaop!r}: no curve point, or share, for dp {piece.dp}, tp {piece.tp}, used by "
            f"{piece.label}",
            hint="Make the plan again with this version; `spindle check` lists everything that is wrong with "
            "it.",
        )
    again_s = op.forward_s * forwards_again(piece, metaop) / piece.num_ops
    forward_more_s, backward_more_s = beyond.op_s(piece, metaop, op.forward_s, op.backward_s + again_s)
    forward_s = piece.num_ops * (op.forward_s + forward_more_s)
    backward_s = piece.num_ops * (op.backward_s + backward_more_s + again_s)
    waits = stalls(piece, metaop, plan.cluster, op, times_of_shares(metaop, piece, plan.cluster))
    return Duration(forward_s + waits.forward_s, backward_s + waits.backward_s)
