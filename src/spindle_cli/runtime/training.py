"""The training loop of one rank: take a batch, run the program, check the losses, step the optimizer, write
it down.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from spindle_cli.errors import StoppedError
from spindle_cli.files.request import CaptureStage, RunRequest
from spindle_cli.files.run_files import StepMetrics
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.measuring.metrics import MetricsLog
from spindle_cli.runtime.measuring.start_up import StartClock
from spindle_cli.runtime.measuring.timing import Activity, Stopwatch
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.saving.capture import capture
from spindle_cli.runtime.saving.checkpoints import Checkpoints
from spindle_cli.runtime.saving.stopping import StopRequest
from spindle_cli.runtime.step.data import Feed
from spindle_cli.runtime.step.executor import Executor
from spindle_cli.runtime.step.losses import LossBoard, loss_failure
from spindle_cli.runtime.update.clip import GradientClip
from spindle_cli.runtime.update.masters import Masters


@dataclass
class Trainer:
    """One rank's parts of a run. `log`: on rank 0. `optimizer`: None where this rank trains nothing, and
    `schedule` with it; `schedule` and `clip` also where the train settings ask for none.

    `iterations_s`: of the steps done so far.
    """

    rank: int
    request: RunRequest
    stop: StopRequest
    model: LocalModel
    feed: Feed
    executor: Executor
    pool: GradientPool
    board: LossBoard
    optimizer: torch.optim.Optimizer | None
    masters: Masters | None
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    clip: GradientClip | None
    checkpoints: Checkpoints
    stopwatch: Stopwatch
    log: MetricsLog | None
    clock: StartClock
    iterations_s: list[float] = field(default_factory=list)

    def train(self, steps: range) -> None:
        """Train the steps (counted from 0).

        Raises:
            RunFailedError: a loss is not finite, or another worker is lost.
            StoppedError: the launcher was asked to stop; a checkpoint is saved.
            InputError: a checkpoint cannot be written.
            Exception: what the user's modules or datasets raised, with a note of where.
        """
        self._capture("initial")
        begin = time.perf_counter()
        for step in steps:
            self._step(step, begin, is_first=step == steps.start)
            self.checkpoints.check()
            self.clock.ends("first step")
            if self.checkpoints.is_due(step + 1):
                self._save(step + 1)
            if self.board.stops and step + 1 < steps.stop:
                self._stop(step + 1)
            begin = time.perf_counter()
        self.pool.await_all_parameters()
        self._capture("final")

    def _save(self, step: int) -> None:
        self.pool.await_all_parameters()
        self.checkpoints.save(step)

    def _stop(self, step: int) -> None:
        self._save(step)
        self.checkpoints.finish()
        if not self.checkpoints.possible:
            raise StoppedError(f"stopped by SIGTERM after step {step}; the nodes share no folder to save in")
        raise StoppedError(
            f"stopped by SIGTERM after step {step}; a checkpoint is saved",
            hint="Go on with the same command and --resume.",
        )

    def _step(self, step: int, begin: float, *, is_first: bool) -> None:
        if self.stop.asked():
            self.board.ask_to_stop()
        batches = self.model.train.accumulate
        for number in range(step * batches, (step + 1) * batches):
            self.stopwatch.begin_step()
            with self.stopwatch.timed(Activity.DATA):
                batch = self.feed.take()
            ends_step = number + 1 == (step + 1) * batches
            self.executor.run(batch, number, ends_step=ends_step)
            if not ends_step:
                self.stopwatch.end_step(step)
        with self.stopwatch.timed(Activity.WAIT, cause="losses"):
            losses = self.board.take()
        failure = loss_failure(losses, step + 1)
        if failure is not None:
            self._write_down(step, losses, time.perf_counter() - begin)
            raise failure
        if is_first and self.request.capture_dir is not None:
            self.pool.gather_gradients()
            self._capture("gradients")
        self._update()
        self.stopwatch.end_step(step)
        self._write_down(step, losses, time.perf_counter() - begin)

    def _update(self) -> None:
        if self.masters is not None:
            with self.stopwatch.timed(Activity.OPTIMIZER):
                self.masters.take_gradients()
        if self.clip is not None:
            with self.stopwatch.timed(Activity.WAIT, cause="norm"):
                self.clip.clip(self.board.device)
        with self.stopwatch.timed(Activity.OPTIMIZER):
            if self.optimizer is not None:
                self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            if self.masters is not None:
                self.masters.hand_back()
            self.pool.start_gather()
            self.pool.reset()

    def _capture(self, stage: CaptureStage) -> None:
        if self.request.capture_dir is not None:
            capture(self.request.capture_dir, stage, self.rank, self.model.parameters)

    def _write_down(self, step: int, losses: dict[str, float], iteration_s: float) -> None:
        self.iterations_s.append(iteration_s)
        if self.log is None:
            return
        batches = self.model.train.accumulate
        samples = batches * sum(task.batch_size for task in self.model.graph.workload.tasks)
        metrics = StepMetrics(
            step=step + 1,
            loss=self.board.total(losses),
            task_losses=losses,
            iteration_s=iteration_s,
            samples_per_s=samples / iteration_s,
        )
        self.log.write(metrics)
