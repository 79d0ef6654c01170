"""The training loop of one rank: take a batch, run the program, step the optimizer; then look at the losses
of the step before and write them down.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.errors import InputError, RunFailedError, StoppedError
from spindle_cli.files.request import CaptureStage, RunRequest
from spindle_cli.files.run_files import StepMetrics
from spindle_cli.files.runs.records import Evaluation, append_evaluation, forget_evaluations_after
from spindle_cli.process.worker_session import is_lost_peer
from spindle_cli.runtime.averages import FollowingParameters
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.evaluating.evaluator import Evaluator
from spindle_cli.runtime.following.callback import RunInfo
from spindle_cli.runtime.following.calls import Callbacks, SetValues
from spindle_cli.runtime.following.changes import written_in
from spindle_cli.runtime.islands.outer_steps import OuterSteps
from spindle_cli.runtime.measuring.metrics import MetricsLog
from spindle_cli.runtime.measuring.outcome import StepOutcome
from spindle_cli.runtime.measuring.start_up import StartClock
from spindle_cli.runtime.measuring.timing import Activity, Stopwatch, take_mark
from spindle_cli.runtime.measuring.work import StepWork, highest_memory
from spindle_cli.runtime.part.at_lengths import TasksAtLengths
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.results import Step, metrics_of
from spindle_cli.runtime.saving.capture import FirstGradients, capture
from spindle_cli.runtime.saving.checkpoints import Checkpoints
from spindle_cli.runtime.saving.stopping import StopRequest
from spindle_cli.runtime.step.data import Feed
from spindle_cli.runtime.step.executor import Executor
from spindle_cli.runtime.step.losses import LossAccumulator, step_failure
from spindle_cli.runtime.step.step_end import StepEnd
from spindle_cli.runtime.update.average import WeightAverage
from spindle_cli.runtime.update.gradient_check import GradientCheck
from spindle_cli.runtime.update.learning_rates import LearningRates
from spindle_cli.runtime.update.masters import Masters
from spindle_cli.runtime.update.optimizers import Optimizers
from spindle_cli.runtime.update.update import Update
from spindle_cli.training.watch import Watch
from spindle_cli.workload.step_values import StepValues

if TYPE_CHECKING:
    from torch import Tensor

# Steps that the device may still be at when the host begins another one.
_STEPS_BEHIND = 1


Computing = Callable[[], AbstractContextManager[None]]


@dataclass
class Training:
    """One rank's parts of a run. `log`: on rank 0. `executors`, `work`: by the tasks that a step runs.

    `steps`: to train, counted from 0; `done`: so many are trained, those before this process among them.
    `outer_steps`: of islands; None: there are none, and else `rank` is that in this one's own.
    `computing`: what passes run in, forward and backward. `iterations_s`: of the steps that were looked at.
    """

    rank: int
    request: RunRequest
    steps: range
    computing: Computing
    stop: StopRequest
    model: LocalModel
    feed: Feed
    executors: Mapping[tuple[str, ...], Executor]
    pool: GradientPool
    accumulator: LossAccumulator
    optimizers: Optimizers
    update: Update
    masters: Masters | None
    checkpoints: Checkpoints
    stopwatch: Stopwatch
    log: MetricsLog | None
    clock: StartClock
    followers: Callbacks
    evaluator: Evaluator
    rates: LearningRates
    work: Mapping[tuple[str, ...], StepWork]
    at_lengths: TasksAtLengths
    following: FollowingParameters
    values: StepValues
    set_values: SetValues
    watch: Watch
    outer_steps: OuterSteps | None = None
    iterations_s: list[float] = field(default_factory=list)
    last: Step | None = None  # the newest that was looked at
    done: int = field(init=False)
    _unread: deque[StepOutcome] = field(default_factory=deque)
    _stops: bool = False
    _first_gradients: FirstGradients = field(default_factory=FirstGradients)  # where they are captured
    _evaluated: int | None = None  # after so many steps
    _uncounted: tuple[str, ...] = ()  # tasks of which something counts nothing, in the next step to be read
    _skipped: int = 0  # steps in a row that left everything as it was, as gradients overflowed

    def __post_init__(self) -> None:
        self.done = self.steps.start

    @property
    def rank_among_all(self) -> int:
        """The worker's rank among those of all islands."""
        return self.rank if self.outer_steps is None else self.outer_steps.peer_replicas.island.rank_among_all

    def run(self) -> Iterator[Step]:
        """Train the steps, and hand each one out when all of its orders are given: its results can then be
        waited for. What is due after a step (a checkpoint, to stop) comes before it is handed out.

        Raises:
            RunFailedError: a loss is not finite, or another worker is lost.
            StoppedError: the launcher was asked to stop; a checkpoint is saved.
            InputError: a checkpoint cannot be written.
            Exception: what the user's modules or datasets raised, with a note of where.
        """
        if self.done == self.steps.start:
            self._begin()
        try:
            for step in range(self.done, self.steps.stop):
                self.set_values.share()
                self.step(step, is_first=step == self.steps.start)
                yield self._after(step + 1)
            self._look_back(0)
            self._evaluate_at_end()
        except Exception as error:
            self._look_back_after(error)
            if (refusal := written_in(error, self.done + 1)) is not None:
                raise refusal from error
            raise
        self._capture_end()

    def _begin(self) -> None:
        if self.rank == 0:
            forget_evaluations_after(self.request.run_dir, self.steps.start)
        self.watch.record_buffers()
        self.followers.at_start(
            RunInfo(
                workload=self.model.graph.workload.name,
                run_dir=self.request.run_dir,
                rank=self.rank_among_all,
                first_step=self.steps.start + 1,
                total_steps=self.steps.stop,
                train=self.model.train,
                set_value=self.set_values.ask,
            )
        )
        self._capture_parameters("initial")
        self._capture("initial-buffers", self.model.all_buffers)
        if self.feed.counts_losses:
            self._uncounted = self._due(
                self.accumulator.begin(self.feed.counts(self.steps.start)), self.steps.start
            )

    def _after(self, done: int) -> Step:
        """What is due once so many steps have been ordered; gives the last of them."""
        self.done = done
        newest = self._unread[-1]
        self._look_back(_STEPS_BEHIND)
        step = Step(done, partial(self._metrics, newest, self._uncounted))
        self.checkpoints.check()
        if self.checkpoints.is_due(done):
            self.save()
        every = self.model.train.eval_every
        if every is not None and done % every == 0:
            self.evaluate_all()
        if self._stops and done < self.steps.stop:
            self._stop()
        return step

    def _evaluate_at_end(self) -> None:
        """Behind the last checkpoint: a metric that fails costs nothing of what was trained."""
        if self.evaluator.tasks and self.request.capture_dir is None and self.checkpoints.possible:
            self.save()
        self.evaluate_all()

    def evaluate_all(self) -> None:
        """Evaluate every task that has a dataset for it, unless that is done after this step; collective."""
        if self._evaluated != self.done:
            self._evaluated = self.done
            for name in self.evaluator.tasks:
                self.evaluate(name)

    def evaluate(self, name: str, dataset: Any = None) -> Evaluation:
        """Evaluate a task as it is trained so far, write the result down and tell who follows the run;
        collective. `dataset`: the task's own if None.

        Raises:
            UsageError: no such task, or no dataset.
            WorkloadError: the task or the dataset cannot be evaluated.
            RunFailedError: a metric fails, or a loss before was not finite.
            InputError: the disk is full.
        """
        self.settle()
        evaluation = self.evaluator.evaluate(name, dataset, self.done)
        self.watch.record_buffers()
        if self.rank == 0:
            append_evaluation(self.request.run_dir, evaluation)
        self.followers.at_evaluation(evaluation)
        return evaluation

    def _capture_end(self) -> None:
        self.settle()
        self._capture_parameters("final")
        self._capture("final-buffers", self.model.all_buffers)
        if self.request.capture_dir is not None and self.optimizers.average is not None:
            with self.averaged(self.optimizers.average):
                self._capture_parameters("average")

    def _capture_parameters(self, stage: CaptureStage) -> None:
        if self.request.capture_dir is not None:
            with self.pool.whole():
                self._capture(stage, self.model.parameters)

    @contextmanager
    def averaged(self, average: WeightAverage) -> Iterator[None]:
        """Inside, the parameters are the averages; collective, at its beginning and at its end."""
        self._exchange(average)
        yield
        self._exchange(average)

    def _exchange(self, average: WeightAverage) -> None:
        average.exchange()
        if self.masters is not None:
            self.masters.hand_back()
        self.pool.hand_on_parameters()

    def settle(self) -> None:
        """Look at all steps that are done, and wait until their parameters are in place, averages that follow
        them among them; collective.

        Raises:
            RunFailedError: one has a loss that is not finite.
        """
        self._look_back(0)
        self.pool.await_all_parameters()
        self.watch.check(self.done)
        self.following.settle(self.done)
        self.watch.record_buffers()

    def save(self) -> None:
        """Save a checkpoint of what is trained, unless there is one; collective.

        Raises:
            RunFailedError: as `settle` and `save_in_order`.
            InputError: it cannot be written.
        """
        self.settle()
        self.save_in_order()
        self.tell_checkpoints()

    def save_in_order(self) -> None:
        """The checkpoint itself.

        Raises:
            RunFailedError: the last step was given up when it had updated some of the parameters.
            InputError: it cannot be written.
        """
        if self.update.is_begun:
            raise RunFailedError(
                f"step {self.done + 1} has updated some parameters and not the others, so none can be saved",
                hint="Go on from the last checkpoint with --resume.",
            )
        save = partial(self.checkpoints.save, self.done)
        if self.outer_steps is None:
            save()
        else:
            self.outer_steps.save(save)

    def tell_checkpoints(self) -> None:
        """Tell who follows the run which checkpoints are there since this was called last."""
        for step in self.checkpoints.take_whole():
            self.followers.at_checkpoint(step, checkpoint_folder(self.request.run_dir, step))

    def step(self, step: int, *, is_first: bool) -> None:
        """Train one step (counted from 0); the host waits for the device nowhere in it.

        `is_first`: of this process; its gradients are captured where the request asks for that.
        """
        begin = take_mark(self.stopwatch.device)
        if self.stop.is_requested():
            self.accumulator.ask_to_stop()
        self.accumulator.weigh_for(step)
        self.watch.check_between(step)
        numbers = self.values.begin(step)
        tasks = self.model.schedule.of_step(step)
        executor, apart = self.executors[tasks], tasks if self.model.program.plan.task_sets else None
        batches, data_wait_s = self.model.train.accumulate, 0.0
        for number in range(step * batches, (step + 1) * batches):
            self.stopwatch.begin_step(apart)
            if not self.following.is_empty:
                with self.stopwatch.timed(Activity.OPTIMIZER):
                    self.following.begin_batch(step, tasks, begins_step=number == step * batches)
            self.watch.record_buffers()
            asked_s, traced_s = time.perf_counter(), self.at_lengths.seconds
            with self.stopwatch.timed(Activity.DATA):
                batch = self.feed.take()
            data_wait_s += time.perf_counter() - asked_s - (self.at_lengths.seconds - traced_s)
            executor.fit(batch)
            ends_step = number + 1 == (step + 1) * batches
            if ends_step:
                self.accumulator.tell(highest_memory(self.accumulator.device), data_wait_s)
                self._count_next(step)
            self.watch.check(step)
            with self.computing():
                executor.run(batch, number, ends_step=ends_step)
            self.watch.record()
            del batch  # its memory, for one that is copied ahead
            if not ends_step:
                self.stopwatch.end_step(step)
        with self.stopwatch.timed(Activity.WAIT, cause="losses"):
            losses = self.accumulator.take()
        if self.request.capture_dir is not None and (is_first or self._has_new_gradients(step)):
            executor.finish()
            self.pool.gather_gradients()
            self._first_gradients.add(step, self.model.parameters, self.update.unscaled)
        rates = self.rates.now()
        gradient_check = self._update(executor, losses)
        if self.outer_steps is not None and self.outer_steps.is_due(step):
            with self.stopwatch.timed(Activity.WAIT, cause="islands"):
                self.outer_steps.step(self.pool)
        self.rates.step()
        self.watch.record_buffers()
        self.stopwatch.end_step(step)
        tell = None if self.outer_steps is None else self.outer_steps.teller(self.accumulator.of_islands)
        self._unread.append(StepOutcome.of(step, losses, gradient_check, rates, numbers, begin, tell))
        if self._unread[-1].has_arrived():
            self.clock.ends("first step")

    def _count_next(self, step: int) -> None:
        """Have what the losses of the step behind `step` count summed with the losses of this one."""
        if self.feed.counts_losses:
            with self.stopwatch.timed(Activity.DATA):
                counts = self.feed.counts(step + 1)
            self.accumulator.count_next(counts)

    def _has_new_gradients(self, step: int) -> bool:
        """Whether some may be captured for the first time: those of the steps before may have overflowed."""
        schedule = self.model.schedule
        return self.update.scale is not None or any(
            schedule.turns.before(task, step) == 0 for task in schedule.of_step(step)
        )

    def _due(self, names: Sequence[str], step: int) -> tuple[str, ...]:
        """Picks the tasks that a step runs from some."""
        due = self.model.schedule.of_step(step)
        return tuple(name for name in names if name in due)

    def _update(self, executor: Executor, losses: Tensor) -> GradientCheck:
        """Step the optimizer as `Update` does; what all ranks have found of the gradients."""
        with self.stopwatch.timed(Activity.OPTIMIZER):
            gradient_check = executor.end_step(StepEnd(self.update, losses, self.stopwatch))
            self.pool.reset()
        return gradient_check

    def _look_back(self, behind: int) -> None:
        """Write down all steps but the last `behind`, waiting for the device where it is not so far; all
        ranks look back at the same steps at the same time.

        Raises:
            RunFailedError: one has a loss that is not finite.
        """
        while len(self._unread) > behind:
            outcome = self._unread.popleft()
            metrics = self._metrics(outcome, self._uncounted)
            self.clock.ends("first step")
            read = self.accumulator.read(outcome.losses, self.model.schedule.of_step(outcome.step))
            self._stops = self._stops or read.stops
            self._write_down(metrics)
            self._uncounted = self._due(read.uncounted_next, outcome.step + 1)
            self._skipped = self._skipped + 1 if outcome.is_skipped else 0
            if self._first_gradients.keep(outcome.step, skipped=bool(outcome.is_skipped)):
                self._capture("gradients", self._first_gradients.kept)
            failure = step_failure(read.losses, outcome.norm_value, outcome.step + 1, self._skipped)
            if failure is not None:
                self._unread.clear()  # steps after it train nothing that will be kept
                raise failure
            assert self.last is not None, "it was just looked at"
            self.followers.after_step(self.last)

    def _look_back_after(self, error: Exception) -> None:
        """Write down what is known of the steps before an error.

        Raises:
            RunFailedError: one of them has a loss that is not finite, which the error follows from.
        """
        may_hang = is_lost_peer(error) or self.outer_steps is not None
        if may_hang and not all(outcome.has_arrived() for outcome in self._unread):
            return  # their sums, or what other islands tell, may never end
        try:
            self._look_back(0)
        except RunFailedError as failure:
            raise failure from error
        except InputError as second:  # the disk is full
            error.add_note(str(second))

    def _stop(self) -> None:
        step = self.done
        self.save()
        self.checkpoints.finish()
        if not self.checkpoints.possible:
            raise StoppedError(f"stopped by SIGTERM after step {step}; the nodes share no folder to save in")
        raise StoppedError(
            f"stopped by SIGTERM after step {step}; a checkpoint is saved",
            hint="Go on with the same command and --resume.",
        )

    def _capture(self, stage: CaptureStage, tensors: Mapping[str, Tensor]) -> None:
        if self.request.capture_dir is not None:
            capture(self.request.capture_dir, stage, self.rank, tensors)

    def _metrics(self, outcome: StepOutcome, uncounted: tuple[str, ...]) -> StepMetrics:
        """What a step came to; waits until the device has done it."""
        outcome.wait()
        due = self.model.schedule.of_step(outcome.step)
        return metrics_of(outcome, self.accumulator, due, self.work[due], uncounted)

    def _write_down(self, metrics: StepMetrics) -> None:
        self.iterations_s.append(metrics.iteration_s)
        self.last = Step(metrics.step, lambda: metrics)
        if self.log is not None:
            self.log.write(metrics)
