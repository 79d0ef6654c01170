"""The simulated step for the report: what happens at the same moment to several devices is told once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from spindle_cli.account.types import Collective
from spindle_cli.report.types import DeviceUse, Happening, Timeline, WaitTotal, equal_runs, runs_of
from spindle_cli.simulate.simulation_report import SimulationReport, report_of
from spindle_cli.simulate.types import (
    Activity,
    Cause,
    Collected,
    OptimizerStep,
    Passage,
    Simulation,
    Span,
    Wait,
)

MAX_WAITS = 12
# Decimals of seconds: nanoseconds. What differs by less has been added up in another order.
DECIMALS = 9

_CauseName = Literal["activation", "gradient", "partner", "sum", "leaving", "gather"]
_CAUSES: dict[Cause, _CauseName] = {
    Cause.ACTIVATION: "activation",
    Cause.GRADIENT: "gradient",
    Cause.PARTNER: "partner",
    Cause.SUM: "sum",
    Cause.LEAVING: "leaving",
    Cause.GATHER: "gather",
}


@dataclass
class _Merged:
    """Devices, bytes and number of what is told once."""

    devices: set[int] = field(default_factory=set)
    num_bytes: int = 0
    count: int = 0


def timeline_of(simulation: Simulation) -> Timeline:
    """Everything that happens in a simulated step, in the order in which it is drawn."""
    report = report_of("", simulation)
    return Timeline(
        iteration_s=simulation.step_s,
        batches=simulation.plan.accumulate,
        mean_use=report.mean_utilisation,
        transferred_bytes=report.transferred_bytes,
        happenings=(
            *_waits(simulation),
            *_sums(simulation),
            *_transfers(simulation),
            *_computes(simulation),
            *_steps(simulation),
        ),
        use=_use(report),
        waits=_wait_totals(report),
    )


def _moments(lasting: Span | Passage | Collected | Wait | OptimizerStep) -> tuple[float, float]:
    return round(lasting.start_s, DECIMALS), round(lasting.end_s, DECIMALS)


def _computes(simulation: Simulation) -> Iterator[Happening]:
    merged: dict[tuple[Activity, int, float, float], list[int]] = defaultdict(list)
    for span in simulation.spans:
        merged[span.activity, span.slice_index, *_moments(span)].append(span.device)
    for (activity, slice_index, start_s, end_s), devices in merged.items():
        yield Happening(
            kind="forward" if activity is Activity.FORWARD else "backward",
            start_s=start_s,
            end_s=end_s,
            runs=runs_of(devices),
            slice=slice_index,
        )


def _steps(simulation: Simulation) -> Iterator[Happening]:
    merged: dict[tuple[float, float], list[int]] = defaultdict(list)
    for step in simulation.steps:
        if step.end_s > step.start_s:
            merged[_moments(step)].append(step.device)
    for (start_s, end_s), devices in merged.items():
        yield Happening(kind="optimizer", start_s=start_s, end_s=end_s, runs=runs_of(devices))


def _transfers(simulation: Simulation) -> Iterator[Happening]:
    merged: dict[tuple[int, int, bool, float, float], _Merged] = defaultdict(_Merged)
    for passage in simulation.passages:
        route = (passage.producer, passage.consumer, passage.is_gradient)
        one = merged[*route, *_moments(passage)]
        one.devices.update((passage.source, passage.destination))
        one.num_bytes += passage.num_bytes
        one.count += 1
    for (producer, consumer, is_gradient, start_s, end_s), one in merged.items():
        yield Happening(
            kind="transfer",
            start_s=start_s,
            end_s=end_s,
            runs=runs_of(one.devices),
            slice=producer if is_gradient else consumer,
            source_slice=consumer if is_gradient else producer,
            is_gradient=is_gradient,
            num_bytes=one.num_bytes,
            count=one.count,
        )


def _sums(simulation: Simulation) -> Iterator[Happening]:
    for done in simulation.collected:
        if done.kind not in (Collective.SUM, Collective.GATHER):
            continue
        start_s, end_s = _moments(done)
        yield Happening(
            kind="sum" if done.kind is Collective.SUM else "gather",
            start_s=start_s,
            end_s=end_s,
            runs=runs_of(done.devices),
            num_bytes=done.num_bytes,
        )


def _waits(simulation: Simulation) -> Iterator[Happening]:
    merged: dict[tuple[int | None, Cause, int | None, float, float], list[int]] = defaultdict(list)
    for wait in simulation.waits:
        merged[wait.slice_index, wait.cause, wait.source_slice_index, *_moments(wait)].append(wait.device)
    for (slice_index, cause, source, start_s, end_s), devices in merged.items():
        yield Happening(
            kind="wait",
            start_s=start_s,
            end_s=end_s,
            runs=runs_of(devices),
            slice=slice_index,
            source_slice=source,
            cause=_CAUSES[cause],
        )


def _use(report: SimulationReport) -> tuple[DeviceUse, ...]:
    times = [
        tuple(round(part_s, DECIMALS) for part_s in (device.compute_s, device.waiting_s, device.done_early_s))
        for device in report.devices
    ]
    return tuple(
        DeviceUse(run=run, compute_s=compute_s, waiting_s=waiting_s, done_early_s=max(done_early_s, 0.0))
        for run, (compute_s, waiting_s, done_early_s) in equal_runs(times)
    )


def _wait_totals(report: SimulationReport) -> tuple[WaitTotal, ...]:
    return tuple(
        WaitTotal(
            waiter=waiting.metaop,
            source=waiting.source,
            cause=_CAUSES[waiting.cause],
            device_s=waiting.device_s,
            moving_share=waiting.moving_device_s / waiting.device_s if waiting.device_s > 0 else 0.0,
        )
        for waiting in report.waits[:MAX_WAITS]
    )
