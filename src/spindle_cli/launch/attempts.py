"""A run from its start to its end, over as many attempts as lost workers make necessary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rich.console import Console

from spindle_cli.checkpoint.files import FoundCheckpoint, find_checkpoint
from spindle_cli.errors import ExitCode, InputError, RunFailedError, WorkerLostError
from spindle_cli.files.run_files import StepMetrics, forget_metrics_after, has_checkpoints, last_step
from spindle_cli.files.runs.attempts import note_ended, note_started
from spindle_cli.launch.build import build_again
from spindle_cli.launch.owner import Hold
from spindle_cli.launch.run_dir import forget_attempt
from spindle_cli.launch.starting.head_start import HeadStart
from spindle_cli.launch.starting.process import run_launch
from spindle_cli.launch.types import Launch
from spindle_cli.launch.watching.cause import failure_of
from spindle_cli.launch.watching.finished import require_done, require_trained
from spindle_cli.launch.watching.follow import MetricsFollower
from spindle_cli.launch.watching.progress import live_progress
from spindle_cli.launch.watching.signals import Signals
from spindle_cli.launch.watching.watch import Watch

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
    ) -> None:
        """`ranks`: this node's workers. `progress`: the run's steps, and the samples of each. `hold`: on the
        run's folder.

        `head_start`: of the first attempt.
        """
        self._head_start = head_start
        self._launch = launch
        self._ranks = ranks
        self._signals = signals
        self._console = console
        self._say = say
        self._progress = progress
        self._hold = hold
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
        found = self._newest_checkpoint()
        step = None if found is None else found.checkpoint.step
        if launch.node_rank == 0:
            for problem in forget_metrics_after(launch.run_dir, step or 0):
                self._say(f"warning: {problem}")
        start = self._start_of_all() if found is None else found.folder
        self._say(f"starting again from {start} ({self._failures} of {launch.restarts} restarts)")
        return build_again(launch, step)

    def _start_of_all(self) -> str:
        """Where a run starts again that has no checkpoint yet."""
        other = self._launch.request.begin_from
        where = "the beginning" if other is None else f"{other} once more"
        return f"{where}: there is no checkpoint"

    def _newest_checkpoint(self) -> FoundCheckpoint | None:
        run_dir = self._launch.run_dir
        if not has_checkpoints(run_dir):
            return None
        try:
            found = find_checkpoint(run_dir, reads_all=True)
        except InputError as none:
            self._say(f"warning: {none.message}")
            return None
        for skipped in found.skipped:
            self._say(f"warning: {skipped}")
        return found

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
