"""What the whole cluster computes over a simulated step, in floating-point operations per second."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from spindle_cli.costs.shares.sizes import cuts_by_share
from spindle_cli.costs.work import flops_by_metaop, flops_by_pass
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.simulate.types import Activity, Simulation, Span

# Decimals of seconds: nanoseconds. What differs by less has been added up in another order.
_DECIMALS = 9


@dataclass(frozen=True, slots=True)
class FlopsStep:
    """From `at_s` on all devices together do `flops_per_s`."""

    at_s: float
    flops_per_s: int


def step_flops(plan: Plan) -> float | None:
    """Operations of a step, of all its batches; None where the profile has not counted them all."""
    flops = flops_by_metaop(plan.metaops)
    return None if flops is None else plan.accumulate * sum(flops.values())


def flops_over_time(simulation: Simulation) -> tuple[FlopsStep, ...] | None:
    """Each change of what the cluster does, ascending from 0 s on, the last one to nothing; None where the
    profile has not counted all operations.

    A device does its share of a pass evenly over the time that it computes it, whatever it waits for in
    between. What it does again, where activations are recomputed, takes time and counts for nothing.
    """
    work = flops_by_pass(simulation.plan.metaops)
    if work is None:
        return None
    lengths: dict[tuple[int, Activity, int, int], float] = defaultdict(float)
    for span in simulation.spans:
        lengths[_pass_of(span)] += span.end_s - span.start_s
    # In whole operations per second, so that what begins and ends leaves nothing behind.
    changes: dict[float, int] = defaultdict(int, {0.0: 0})
    for span in simulation.spans:
        piece = simulation.plan.slices[span.piece]
        of_op = work[piece.metaop][span.activity is Activity.BACKWARD]
        length_s = lengths[_pass_of(span)]
        if length_s > 0:
            rate = round(piece.num_ops * of_op * _part_of(piece, span.device) / length_s)
            changes[round(span.start_s, _DECIMALS)] += rate
            changes[round(span.end_s, _DECIMALS)] -= rate
    steps: list[FlopsStep] = []
    now = 0
    for at_s, change in sorted(changes.items()):
        now += change
        if not steps or change:
            steps.append(FlopsStep(at_s, now))
    return tuple(steps)


def _part_of(piece: Slice, device: int) -> float:
    """The part of an op's work on its task's whole batch that one device of a slice does."""
    if piece.rows is None:
        return 1 / (piece.shares_of_batch * piece.tp)
    return 1 / (cuts_by_share(piece)[piece.devices.index(device) // piece.tp] * piece.tp)


def _pass_of(span: Span) -> tuple[int, Activity, int, int]:
    """A device's pass of a slice, which may wait in between."""
    return span.device, span.activity, span.piece, span.batch
