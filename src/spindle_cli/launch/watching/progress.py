"""A live line of progress on a terminal: step, losses, samples per second, time left."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from spindle_cli.files.run_files import StepMetrics
from spindle_cli.units import format_seconds

# Steps over which the pace is taken: enough to be calm, few enough to follow a change.
RECENT_STEPS = 20


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
        recent: deque[float] = deque(maxlen=RECENT_STEPS)

        def show(metrics: StepMetrics) -> None:
            recent.append(metrics.iteration_s)
            pace_s = statistics.median(recent)
            text = progress_text(metrics, pace_s, total_steps, samples_per_step)
            bar.update(line, completed=metrics.step, description=text)

        yield show


def _show_nothing(_metrics: StepMetrics) -> None:
    """Not a terminal."""


def progress_text(metrics: StepMetrics, pace_s: float, total_steps: int, samples_per_step: int) -> str:
    """What stands beside the bar; `pace_s` is seconds per step."""
    parts = [f"loss {metrics.loss:.4g}"]
    if pace_s > 0:
        parts.append(f"{samples_per_step / pace_s:.4g} samples/s")
    parts.append(f"{format_seconds(pace_s * max(total_steps - metrics.step, 0))} left")
    if len(metrics.task_losses) > 1:  # last: a narrow terminal cuts them off
        parts.append(" ".join(f"{name} {loss:.3g}" for name, loss in metrics.task_losses.items()))
    return Text(", ".join(parts)).markup
