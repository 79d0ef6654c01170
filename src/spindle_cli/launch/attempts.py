"""A run from its start to its end, over as many attempts as lost workers make necessary.

While it goes on, the launcher looks whether steps keep coming, and shows a live line of progress on a
terminal: step, losses, samples per second, time left, which it reads from metrics.jsonl while rank 0 writes
that.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from spindle_cli.checkpoint.files import StoredCheckpoint, find_checkpoint
from spindle_cli.errors import ExitCode, InputError, RunFailedError, WorkerLostError
from spindle_cli.files.run_files import (
    METRICS_FILE,
    StepMetrics,
    forget_metrics_after,
    has_checkpoints,
    last_step,
)
from spindle_cli.files.runs.records import Pace, note_ended, note_started
from spindle_cli.launch.build import build_again
from spindle_cli.launch.owner import Hold
from spindle_cli.launch.run_dir import forget_attempt
from spindle_cli.launch.starting.head_start import HeadStart
from spindle_cli.launch.starting.process import run_launch
from spindle_cli.launch.types import Launch
from spindle_cli.launch.watching.cause import describe_failure, failure_of, require_done, require_trained
from spindle_cli.launch.watching.signals import Signals
from spindle_cli.launch.watching.stuck import doing_of_all, find_stuck
from spindle_cli.units import format_seconds

if TYPE_CHECKING:
    pass

# Without a step for so long, and for so many times the usual step, it is said where the workers are.
SILENCE_S = 60.0
SILENT_STEPS = 20
# The workers give one up by themselves after the run's timeout; they are left this much longer to say so.
MARGIN_S = 5.0
RECENT_STEPS = 20


class MetricsFollower:
    """Hands out each new line of a run's metrics.jsonl once, from the file's present end on."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_FILE
        self._offset = self._path.stat().st_size if self._path.exists() else 0
        self._rest = b""

    def new(self) -> list[StepMetrics]:
        """The steps that have been written since the last call; a line without its end waits for the next.

        Raises:
            InputError: a line that is not one.
        """
        if not self._path.exists():
            return []
        if self._path.stat().st_size < self._offset:
            self._offset, self._rest = 0, b""  # begun anew
        with self._path.open("rb") as file:
            file.seek(self._offset)
            read = file.read()
        self._offset += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        return [StepMetrics.from_line(line, where=str(self._path)) for line in lines]


Say = Callable[[str], None]


class Attempts:
    """Tries a launch until it ends well, at most `launch.restarts` times more after lost workers.

    `steps`: what was trained, also in attempts that failed.
    """

    def __init__(
        self,
        launch: Launch,
        ranks: range,
        signals: Signals,
        console: Console,
        say: Say,
        progress: tuple[int, int],
        hold: Hold,
        head_start: HeadStart | None = None,
        begins_anew: Sequence[str] = (),
    ) -> None:
        """`ranks`: this node's workers. `progress`: the run's steps, and the samples of each. `hold`: on the
        run's folder.

        `head_start`: of the first attempt. `begins_anew`: what no checkpoint has, for people.
        """
        self._head_start = head_start
        self._launch = launch
        self._ranks = ranks
        self._signals = signals
        self._console = console
        self._say = say
        self._progress = progress
        self._hold = hold
        self._begins_anew = begins_anew
        self._failures = 0
        self.steps: list[StepMetrics] = []

    def run(self) -> None:
        """Raises RunFailedError: the attempt that was the last one failed, with its cause."""
        try:
            self._run()
        except RunFailedError as failure:
            was_asked = failure.exit_code == ExitCode.STOPPED
            self._note_end("stopped" if was_asked else "failed", failure.message)
            raise
        except (KeyboardInterrupt, SystemExit):
            self._note_end("stopped", "interrupted")
            raise
        self._note_end("done", None)

    def _note_end(self, event: Literal["done", "failed", "stopped"], message: str | None) -> None:
        """Note how the run has ended; what keeps that from being written is not what ended it."""
        if self._launch.node_rank == 0:
            try:
                note_ended(self._launch.run_dir, event, message)
            except InputError as error:
                self._say(f"warning: {error.message}")

    def _run(self) -> None:
        launch, furthest = self._launch, 0
        self._note_start(launch, None)
        while (failure := self._try(launch)) is not None:
            reached = self.steps[-1].step if self.steps else 0
            if not isinstance(failure, WorkerLostError) or self._signals.stop:
                raise self._final(failure)
            if self._failures == launch.restarts:
                raise self._final(failure)
            if self._failures and reached <= furthest and self._sees_steps():
                raise self._final(failure, f"it came no further than step {furthest} again")
            self._failures += 1
            furthest = max(furthest, reached)
            launch = self._again(failure)
            self._note_start(launch, failure.message)

    def _note_start(self, launch: Launch, cause: str | None) -> None:
        if launch.node_rank == 0:
            total_steps, _ = self._progress
            note_started(launch.run_dir, launch.request.resume_step or 0, total_steps, cause)

    def _try(self, launch: Launch) -> RunFailedError | None:
        total_steps, samples_per_step = self._progress
        follower = MetricsFollower(launch.run_dir)
        with live_progress(self._console, total_steps, samples_per_step) as show:
            watch = Watch(launch, follower, self._signals, show, self._say, self.steps)

            def poll() -> None:
                self._hold.require()
                watch.poll()

            try:
                ending = run_launch(launch, poll, self._head_start)
            except WorkerLostError as stuck:
                return stuck
        if ending.code != 0:
            return failure_of(launch, ending.stuck, code=ending.code, ranks=self._ranks)
        try:
            require_done(launch, self._ranks)
            if launch.node_rank == 0:
                require_trained(launch.run_dir, self._steps_asked(launch, total_steps))
        except RunFailedError as unfinished:
            return unfinished
        return None

    def _steps_asked(self, launch: Launch, total_steps: int) -> int:
        """At which step the run had to end: a script may end it earlier.

        Raises:
            RunFailedError: the script has trained nothing.
        """
        if launch.request.script is None:
            return total_steps
        last = last_step(launch.run_dir)
        if last is None:
            raise RunFailedError(
                f"{launch.request.script}: the script has come to its end and has trained nothing",
                hint="Iterate over a spindle.Trainer in it: `for step in trainer: ...`.",
            )
        return last

    def _again(self, failure: RunFailedError) -> Launch:
        launch = self._launch
        self._say(failure.message)
        forget_attempt(launch.run_dir, self._ranks, launch.node_rank)
        newest = self._newest_checkpoint()
        step = None if newest is None else newest.checkpoint.step
        if launch.node_rank == 0:
            for problem in forget_metrics_after(launch.run_dir, step or 0):
                self._say(f"warning: {problem}")
        start = self._start_of_all() if newest is None else newest.folder
        self._say(f"starting again from {start} ({self._failures} of {launch.restarts} restarts)")
        if newest is not None:
            for line in self._begins_anew:
                self._say(f"  {line}")
        return build_again(launch, step)

    def _start_of_all(self) -> str:
        """Where a run starts again that has no checkpoint yet."""
        begins_from = self._launch.request.begin_from
        where = "the beginning" if begins_from is None else f"{begins_from} once more"
        return f"{where}: there is no checkpoint"

    def _newest_checkpoint(self) -> StoredCheckpoint | None:
        run_dir = self._launch.run_dir
        if not has_checkpoints(run_dir):
            return None
        try:
            newest = find_checkpoint(run_dir, reads_all=True)
        except InputError as none:
            self._say(f"warning: {none.message}")
            return None
        for skipped in newest.skipped:
            self._say(f"warning: {skipped}")
        return newest

    def _sees_steps(self) -> bool:
        """Whether this node can tell that steps were made: only rank 0's, or with a shared folder."""
        return self._launch.num_nodes == 1 or bool(self.steps)

    def _final(self, failure: RunFailedError, reason: str | None = None) -> RunFailedError:
        """The failure that ends the run, with what was tried before."""
        if self._failures == 0:
            return failure
        times = "once" if self._failures == 1 else f"{self._failures} times"
        why = "" if reason is None else f", and {reason}"
        failure.message += f"\n  The run was started again {times}{why}."
        return failure


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
    """Show no progress, where the output is no terminal."""


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


@dataclass
class Watch:
    """The steps of one attempt at a run; `poll` is called all the time.

    `steps`: of all attempts so far; those that an attempt trains again replace what they were.
    """

    launch: Launch
    follower: MetricsFollower
    signals: Signals
    show: Callable[[StepMetrics], None]
    say: Callable[[str], None]
    steps: list[StepMetrics]
    _last_s: float | None = None
    _said_s: float = SILENCE_S
    _pace_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def poll(self) -> None:
        """Take in new steps; look for signals and for silence.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
            WorkerLostError: a worker hangs, and no other has said so.
        """
        for metrics in self.follower.new():
            while self.steps and self.steps[-1].step >= metrics.step:
                self.steps.pop()
            self._warn(metrics)
            self.steps.append(metrics)
            self.show(metrics)
            self._pace_s.append(metrics.iteration_s)
            self._last_s, self._said_s = time.monotonic(), SILENCE_S
        self.signals.look()
        if self._last_s is not None:
            self._listen(time.monotonic() - self._last_s)

    def _warn(self, metrics: StepMetrics) -> None:
        """Say of each task once that it counts nothing in a step, and once that a step is skipped."""
        if metrics.skipped and not any(earlier.skipped for earlier in self.steps):
            self.say(
                f"step {metrics.step} was skipped: a gradient overflowed at a loss scale of "
                f"{metrics.loss_scale:g}, and every rank left out the update; such steps are marked in "
                f"{METRICS_FILE}"
            )
        named_tasks = {task for earlier in self.steps for task in earlier.uncounted_tasks}
        for task in metrics.uncounted_tasks:
            if task not in named_tasks:
                self.say(
                    f"warning: step {metrics.step}: in the loss of task {task!r} a mean counts nothing (no "
                    "label, or nothing of its mask), so it is 0 and trains nothing; such steps are named in "
                    f"{METRICS_FILE}"
                )

    def _listen(self, silent_s: float) -> None:
        """The time until the first step is not looked at: building a large model may take long."""
        timeout_s = self.launch.request.timeout_s
        if silent_s > timeout_s + MARGIN_S:
            stuck = find_stuck(self.launch.run_dir)
            self._last_s = None
            if stuck:
                raise describe_failure(self.launch, (), (), stuck)
        elif silent_s > max(self._said_s, SILENT_STEPS * statistics.median(self._pace_s)):
            self._said_s *= 2
            stuck = find_stuck(self.launch.run_dir)
            places = "; ".join(f"worker {worker.rank} is at {worker}" for worker in stuck)
            waiting = "every worker waits for another" + "".join(
                f"; worker {rank} at {what}" for rank, what in doing_of_all(self.launch.run_dir).items()
            )
            after = format_seconds(timeout_s)
            self.say(
                f"no step for {format_seconds(silent_s)}; {places or waiting}; "
                f"the run ends after {after} (--timeout)"
            )
