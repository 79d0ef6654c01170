"""A simulation's numbers as text and tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from spindle_cli.simulate.simulation_report import DeviceUse, SimulationReport, Waiting
from spindle_cli.simulate.types import Cause
from spindle_cli.units import counted, format_bytes, format_seconds

MAX_DEVICES = 16
MAX_WAITS = 10


def headline(report: SimulationReport) -> str:
    """The iteration against the plan's own prediction, and the mean use of the devices."""
    planned_s = report.planned_iteration_s
    against = f", {report.iteration_s / planned_s - 1:+.1%} against the plan's" if planned_s > 0 else ""
    return (
        f"{report.plan} on {counted(report.num_devices, 'device')}, strategy {report.strategy}\n"
        f"iteration {format_seconds(report.iteration_s)} simulated{against} {format_seconds(planned_s)}; "
        f"devices compute {report.mean_utilisation:.0%} of it; "
        f"{format_bytes(report.transferred_bytes)} transferred, {format_bytes(report.summed_bytes)} summed"
        + _outer_step(report)
    )


def _outer_step(report: SimulationReport) -> str:
    """What islands add that average now and then alone."""
    if report.outer_every is None:
        return ""
    return (
        f"\nthe same on each of {report.islands} islands; with an outer step of "
        f"{format_seconds(report.outer_step_s)} after every {report.outer_every} steps, which is not "
        f"simulated, an iteration takes {format_seconds(report.mean_iteration_s)} in the mean"
    )


def device_table(report: SimulationReport) -> Table:
    """A row for each device; of many, those that compute least and most."""
    table = Table(title=_device_title(report), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("device", "computes", "waits", "done early", "use", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in _shown(report.devices):
        table.add_row(
            str(device.device),
            format_seconds(device.compute_s),
            format_seconds(device.waiting_s),
            format_seconds(device.done_early_s),
            f"{device.utilisation:.0%}",
            format_bytes(device.peak_memory_bytes),
        )
    return table


def _device_title(report: SimulationReport) -> str:
    if len(report.devices) <= MAX_DEVICES:
        return "devices"
    return f"the {MAX_DEVICES // 2} devices that compute least, and the {MAX_DEVICES // 2} that compute most"


def _shown(devices: Sequence[DeviceUse]) -> Sequence[DeviceUse]:
    if len(devices) <= MAX_DEVICES:
        return devices
    ranked = sorted(devices, key=lambda device: device.compute_s)
    return [*ranked[: MAX_DEVICES // 2], *ranked[-MAX_DEVICES // 2 :]]


def wait_table(report: SimulationReport) -> Table:
    """Where most time is spent waiting, and for whom."""
    table = Table(
        title="where devices wait, most first", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("waits")
    table.add_column("for")
    for name in ("times", "device time", "of it moving", "longest", "on", "behind"):
        table.add_column(name, justify="right", no_wrap=True)
    for waiting in report.waits[:MAX_WAITS]:
        moving = waiting.moving_device_s / waiting.device_s if waiting.device_s > 0 else 0.0
        table.add_row(
            waiting.metaop or "optimizer step",
            _source(waiting),
            str(waiting.num_waits),
            format_seconds(waiting.device_s),
            f"{moving:.0%}",
            format_seconds(waiting.longest_s),
            str(waiting.longest_device),
            str(waiting.longest_source),
        )
    return table


def _source(waiting: Waiting) -> str:
    if waiting.cause is Cause.SUM:
        return "gradient sums"
    if waiting.cause is Cause.GATHER:
        return "its new parameters"
    if waiting.cause is Cause.LEAVING:
        return f"what it sends to {waiting.source}"
    if waiting.cause is Cause.PARTNER:
        return "its partner to start"
    return f"the gradient from {waiting.source}" if waiting.cause is Cause.GRADIENT else f"{waiting.source}"
