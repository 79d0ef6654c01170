"""What the whole cluster computes over time and what its devices hold, of the plan and of `sequential`.

What the whole cluster computes over a simulated step, in floating-point operations per second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spindle_cli.costs.peaks import arithmetic_of, peak_flops_per_s
from spindle_cli.costs.shares.sizes import cuts_by_share
from spindle_cli.costs.work import flops_by_metaop, flops_by_pass
from spindle_cli.plan.types import Plan, Slice, StrategyName
from spindle_cli.profile.types import Profile
from spindle_cli.report.runs import equal_runs
from spindle_cli.report.types import ClusterWork, HeldRange
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Activity, Simulation, Span

BESIDE: StrategyName = "sequential"


def work_views(
    simulation: Simulation, profile: Profile | None, others: Mapping[StrategyName, Plan]
) -> Iterator[ClusterWork]:
    """View the work of the simulated plan, and behind it that of `sequential`'s where it is among the other
    strategies' plans.

    `profile`: says in which arithmetic the devices' peak is.
    """
    yield _view(simulation, profile, is_this=True)
    beside = others.get(BESIDE)
    if beside is not None:
        yield _view(simulate(beside), profile, is_this=False)


def _view(simulation: Simulation, profile: Profile | None, *, is_this: bool) -> ClusterWork:
    plan, steps, flops = simulation.plan, flops_over_time(simulation), step_flops(simulation.plan)
    mean = None if flops is None or not simulation.step_s else flops / simulation.step_s
    arithmetic = None if profile is None else arithmetic_of(profile.environment)
    peak = None if arithmetic is None else peak_flops_per_s(plan.cluster.device_type, arithmetic)
    held = [[step.num_bytes for step in own] for own in simulation.memory]
    return ClusterWork(
        strategy=plan.strategy,
        is_this=is_this,
        step_s=simulation.step_s,
        flops_per_s=None if steps is None else tuple((step.at_s, step.flops_per_s) for step in steps),
        mean_flops_per_s=mean,
        peak_share=None if mean is None or peak is None else mean / (peak * plan.cluster.num_devices),
        memory=tuple(
            HeldRange(run=run, least_bytes=least, most_bytes=most)
            for run, (least, most) in equal_runs([(min(own), max(own)) for own in held])
        ),
    )


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
