"""How a plan is drawn in the terminal: its picture, its letters and symbols, and the table of its
allocations.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.table import Table
from rich.text import Text

from spindle_cli.files.sharding import describe_weights
from spindle_cli.plan.types import Plan, describe_bounds, format_devices
from spindle_cli.show.grid import Grid, Row, make_grid
from spindle_cli.show.summary import Allocation, ShowReport
from spindle_cli.units import counted, format_bytes, format_seconds

LETTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits

# Background colours of the 256-colour palette that black text is readable on, neighbours far apart.
COLOURS = (
    "sky_blue1",
    "light_salmon1",
    "pale_green1",
    "plum1",
    "khaki1",
    "turquoise2",
    "light_coral",
    "dark_olive_green2",
    "medium_purple1",
    "orange1",
    "grey70",
    "aquamarine1",
)


@dataclass(frozen=True)
class Symbols:
    """Letter of each MetaOp, short name of each MetaOp, colour of each task.

    Where there are more MetaOps than letters, or tasks than colours, they are used again in the same order.
    """

    letter: dict[str, str]
    short_name: dict[str, str]
    colour: dict[str, str]

    @classmethod
    def of(cls, plan: Plan) -> Symbols:
        """Symbols in the order of the plan's MetaOps."""
        tasks = dict.fromkeys(metaop.task for metaop in plan.metaops)
        return cls(
            letter={metaop.name: LETTERS[i % len(LETTERS)] for i, metaop in enumerate(plan.metaops)},
            short_name={metaop.name: metaop.name.removeprefix(f"{metaop.task}/") for metaop in plan.metaops},
            colour={task: COLOURS[i % len(COLOURS)] for i, task in enumerate(tasks)},
        )


IDLE = "·"
BAR = "─"
BACKWARD = "‹"  # ahead of the name of a slice's backward pass, where the plan tells passes apart
USE_WIDTH = len(" 100%")
MAX_LABEL = 24
TICK_EVERY = 15  # columns, at least


def draw(plan: Plan, width: int, max_rows: int) -> Text:
    """Devices x time in at most `width` characters and `max_rows` rows of devices."""
    symbols = Symbols.of(plan)
    label_width = MAX_LABEL if plan.cluster.num_devices > 99 else 12
    grid = make_grid(plan, max(width - label_width - 1 - USE_WIDTH, 20), max_rows)
    labels = [_device_label(row) for row in grid.rows]
    label_width = max(len("device"), *map(len, labels))
    lines = [
        Text(f"{'time':<{label_width}} {_time_axis(grid)}"),
        Text(f"{'wave':<{label_width}} {_wave_axis(plan, grid)}  use"),
    ]
    for label, row in zip(labels, grid.rows, strict=True):
        line = Text(f"{label:<{label_width}} ")
        for part in _bars(plan, row, symbols):
            line.append(part)
        lines.append(line.append(f" {row.used:4.0%}"))
    if not all(row.exact for row in grid.rows):
        lines.append(Text("~ devices that differ: what most run"))
    return Text("\n").join(lines)


def legend(plan: Plan) -> Text:
    """Return the tasks in their colours."""
    text = Text("tasks ")
    for task, colour in Symbols.of(plan).colour.items():
        text.append(f" {task} ", style=f"black on {colour}").append(" ")
    return text


def _device_label(row: Row) -> str:
    text = ",".join(str(item) for item in format_devices(row.devices))
    text = text if row.exact else "~" + text
    if len(text) > MAX_LABEL:
        text = f"{text[: MAX_LABEL - 8].rsplit(',', 1)[0]},.. ({len(row.devices)})"
    return text


def _time_axis(grid: Grid) -> str:
    """Round times at about every `TICK_EVERY` columns."""
    tick_s = _round_up(TICK_EVERY * grid.column_s)
    axis = ""
    for tick in range(int(grid.columns * grid.column_s / tick_s) + 1):
        column = round(tick * tick_s / grid.column_s)
        text = f"|{format_seconds(tick * tick_s)}"
        if column + len(text) <= grid.columns:
            axis = f"{axis:<{column}}{text}"
    return f"{axis:<{grid.columns}}"


def _round_up(seconds: float) -> float:
    """Return the next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= seconds * (1 - 1e-9))


def _wave_axis(plan: Plan, grid: Grid) -> str:
    """Write each wave's index where it starts, as far as there is room."""
    axis = ""
    for wave in plan.waves:
        column = min(int(wave.start_s / grid.column_s), grid.columns - 1)
        if (not axis or column > len(axis)) and column + len(str(wave.index)) <= grid.columns:
            axis = f"{axis:<{column}}{wave.index}"
    return f"{axis:<{grid.columns}}"


def _bars(plan: Plan, row: Row, symbols: Symbols) -> Iterator[Text]:
    """Runs of equal cells: a bar that says its slice as far as it has room, or dots."""
    told_apart = enumerate(row.cells)
    for (index, is_backward), cells in groupby((cell, at in row.backward) for at, cell in told_apart):
        length = sum(1 for _ in cells)
        if index is None:
            yield Text(IDLE * length, style="dim")
            continue
        slice_ = plan.slices[index]
        letter = symbols.letter[slice_.metaop]
        ops = f"[{slice_.ops[0]}:{slice_.ops[1]}]{slice_.part}"
        letter = BACKWARD + letter if is_backward and length > 1 else letter
        texts = (f"{letter} {symbols.short_name[slice_.metaop]}{ops} ", f"{letter} {ops} ", letter)
        text = next((text for text in texts if len(text) <= length), letter)
        colour = symbols.colour[plan.by_name[slice_.metaop].task]
        yield Text(text.ljust(length, BAR), style=f"black on {colour}")


def headline(report: ShowReport) -> str:
    """Return what the plan is, what it predicts, and, where that is known, what is possible: a line each."""
    gap, least = "", describe_bounds(report)
    if report.gap is not None:
        where = "above the lower bound" if report.gap >= 0 else "below the bound of version 1,"
        gap = f", {abs(report.gap):.1%} {where} {format_seconds(report.lower_bound_s)}"
    return (
        f"{report.workload} on {report.cluster}: {counted(report.num_devices, 'device')}, "
        f"strategy {report.strategy}, "
        f"{counted(report.num_slices, 'slice')} in {counted(report.num_waves, 'wave')}\n"
        f"iteration {format_seconds(report.iteration_s)} predicted; "
        f"compute {format_seconds(report.compute_s)}{gap}" + ("" if least is None else f"\nat least {least}")
    )


def footer(report: ShowReport) -> str:
    """Return the use of the devices and of their memory, and the planner's notes."""
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
    """Say where activations are that devices have no memory for."""
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
    """Return a row for each MetaOp: its letter in the picture, and how many of its ops run on how many
    devices.
    """
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
