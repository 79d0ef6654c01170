"""The grid as lines of text for a terminal: bars of slices, coloured by task and readable without colour."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

from rich.text import Text

from spindle_cli.plan.types import Plan, format_devices
from spindle_cli.show.grid import Grid, Row, make_grid
from spindle_cli.show.symbols import Symbols
from spindle_cli.units import format_seconds

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
    """The tasks in their colours."""
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
    """The next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= seconds * (1 - 1e-9))


def _wave_axis(plan: Plan, grid: Grid) -> str:
    """Each wave's index where it starts, as far as there is room."""
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
        piece = plan.slices[index]
        letter = symbols.letter[piece.metaop]
        ops = f"[{piece.ops[0]}:{piece.ops[1]}]{piece.part}"
        letter = BACKWARD + letter if is_backward and length > 1 else letter
        texts = (f"{letter} {symbols.short_name[piece.metaop]}{ops} ", f"{letter} {ops} ", letter)
        text = next((text for text in texts if len(text) <= length), letter)
        colour = symbols.colour[plan.by_name[piece.metaop].task]
        yield Text(text.ljust(length, BAR), style=f"black on {colour}")
