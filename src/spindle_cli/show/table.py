"""The numbers of a plan as text and as a table for people."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from spindle_cli.files.sharding import describe_weights
from spindle_cli.plan.types import Plan
from spindle_cli.show.summary import Allocation, ShowReport
from spindle_cli.show.symbols import Symbols
from spindle_cli.units import counted, format_bytes, format_seconds


def headline(report: ShowReport) -> str:
    """Two lines: what the plan is, and what it predicts."""
    gap = ""
    if report.gap is not None:
        where = "above the lower bound" if report.gap >= 0 else "below the bound of version 1,"
        gap = f", {abs(report.gap):.1%} {where} {format_seconds(report.lower_bound_s)}"
    return (
        f"{report.workload} on {report.cluster}: {counted(report.num_devices, 'device')}, "
        f"strategy {report.strategy}, "
        f"{counted(report.num_slices, 'slice')} in {counted(report.num_waves, 'wave')}\n"
        f"iteration {format_seconds(report.iteration_s)} predicted; "
        f"compute {format_seconds(report.compute_s)}{gap}"
    )


def footer(report: ShowReport) -> str:
    """The use of the devices and of their memory, and the planner's notes."""
    use, memory = report.device_use, report.peak_memory_bytes
    lines = [
        f"devices busy {sum(use) / len(use):.0%} of the schedule (least {min(use):.0%} on device "
        f"{use.index(min(use))}, most {max(use):.0%} on device {use.index(max(use))})",
    ]
    if memory:
        lines.append(
            f"memory per device {format_bytes(min(memory))} to {format_bytes(max(memory))} "
            f"(most on device {memory.index(max(memory))})"
        )
    lines += _given_up(report)
    if report.sharding:
        levels = ", ".join(f"{level} of {key}" for key, level in report.sharding.items())
        lines.append(f"shared out {levels}")
    if report.shard_weights:
        lines.append(f"shared out {describe_weights(report.shard_weights)}")
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def _given_up(report: ShowReport) -> list[str]:
    """Where activations are that devices have no room for."""
    parts = []
    if report.num_offloaded:
        most = max(report.host_memory_bytes, default=0)
        at_most = f" (at most {format_bytes(most)} of a node)" if most else ""
        parts.append(f"of {counted(report.num_offloaded, 'op')} in host memory{at_most}")
    if report.num_recomputed:
        kept = f" ({report.num_selective} but for what takes longest)" if report.num_selective else ""
        parts.append(f"of {counted(report.num_recomputed, 'op')} recomputed{kept}")
    return [f"activations {', '.join(parts)}"] if parts else []


def allocation_table(plan: Plan, report: ShowReport) -> Table:
    """A row for each MetaOp: its letter in the picture, and how many of its ops run on how many devices."""
    symbols = Symbols.of(plan)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("MetaOp", no_wrap=True)
    for name in ("ops", "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ops on devices (dp x tp)")
    for name in ("start", "end", "device time"):
        table.add_column(name, justify="right", no_wrap=True)
    total_s = sum(metaop.device_s for metaop in report.metaops)
    for metaop in report.metaops:
        share = metaop.device_s / total_s if total_s > 0 else 0.0
        table.add_row(
            Text(symbols.letter[metaop.name], style=f"black on {symbols.colour[metaop.task]}"),
            metaop.name,
            str(metaop.num_ops),
            "-" if metaop.batch_size is None else str(metaop.batch_size),
            ", ".join(map(_allocation, metaop.allocations)),
            format_seconds(metaop.start_s),
            format_seconds(metaop.end_s),
            f"{share:.0%}",
        )
    return table


def _allocation(allocation: Allocation) -> str:
    devices = allocation.dp * allocation.tp
    mix = f" ({allocation.dp}x{allocation.tp})" if allocation.tp > 1 else ""
    uneven = "" if allocation.equal_shares else " unequal"
    return f"{allocation.num_ops} on {devices}{uneven}{mix}"
