"""A live line of progress on a terminal: step, losses, samples per second, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from spindle_cli.files.run_files import StepMetrics
from spindle_cli.files.runs.pace import Pace
from spindle_cli.units import format_seconds


@contextmanager
def live_progress(
    console: Console, total_steps: int, samples_per_step: int
) -> Iterator[Callable[[StepMetrics], None]]:
    """Shows every step given to the yielded function; nothing at all where `console` is not a terminal."""
    if not console.is_terminal:
        yield _show_nothing
        return
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),
    )
    with Progress(*columns, console=console, expand=True, transient=True, refresh_per_second=5) as bar:
        line = bar.add_task("starting the workers", total=total_steps)
        pace = Pace()

        def show(metrics: StepMetrics) -> None:
            pace.add(metrics.iteration_s, time.monotonic())
            text = progress_text(metrics, pace, total_steps, samples_per_step)
            bar.update(line, completed=metrics.step, description=text)

        yield show


def _show_nothing(_metrics: StepMetrics) -> None:
    """Not a terminal."""


def progress_text(metrics: StepMetrics, pace: Pace, total_steps: int, samples_per_step: int) -> str:
    """What stands beside the bar; `pace`: with this step."""
    parts = [f"loss {metrics.loss:.4g}"]
    if pace.step_s:
        parts.append(f"{samples_per_step / pace.step_s:.4g} samples/s")
    left_s = pace.left_s(total_steps - metrics.step, pace.between_s)
    if left_s is not None:
        parts.append(f"{format_seconds(left_s)} left")
    if len(metrics.task_losses) > 1:  # last: a narrow terminal cuts them off
        parts.append(" ".join(f"{name} {loss:.3g}" for name, loss in metrics.task_losses.items()))
    return Text(", ".join(parts)).markup
