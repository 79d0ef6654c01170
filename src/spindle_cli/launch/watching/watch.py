"""What the launcher sees of a run while it goes on: its steps, and that they keep coming."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from spindle_cli.files.run_files import METRICS_FILE, StepMetrics
from spindle_cli.launch.types import Launch
from spindle_cli.launch.watching.cause import describe_failure
from spindle_cli.launch.watching.follow import MetricsFollower
from spindle_cli.launch.watching.signals import Signals
from spindle_cli.launch.watching.stuck import doing_of_all, find_stuck
from spindle_cli.units import format_seconds

# Without a step for so long, and for so many times the usual step, it is said where the workers are.
SILENCE_S = 60.0
SILENT_STEPS = 20
# The workers give one up by themselves after the run's timeout; they are left this much longer to say so.
MARGIN_S = 5.0
RECENT_STEPS = 20


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
        known = {task for earlier in self.steps for task in earlier.uncounted_tasks}
        for task in metrics.uncounted_tasks:
            if task not in known:
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
