"""`Trainer`: the training loop as scripts and the command line's worker use it, in each worker of a plan.

What a script asks of it under plain torchrun becomes the request that `launch` would make. At its end a run
leaves the last checkpoint, the trained parameters, and what was measured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.errors import InputError, UsageError
from spindle_cli.files.artifact import to_compact_json, write_json
from spindle_cli.files.request import RunRequest, workers_dir
from spindle_cli.files.run_files import METRICS_FILE, PLAN_FILE, PREDICTED_FILE
from spindle_cli.files.runs.records import TIMELINE_FILE, Evaluation
from spindle_cli.files.writing import write_text
from spindle_cli.plan.file import read_plan, write_plan
from spindle_cli.plan.types import Plan
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.process.worker_session import is_lost_peer, show_errors_plainly
from spindle_cli.runtime.assembling import assemble
from spindle_cli.runtime.connecting import connected, select_device, settle_process
from spindle_cli.runtime.following.callback import Callback
from spindle_cli.runtime.following.changes import LeftAlone
from spindle_cli.runtime.islands.island import Island
from spindle_cli.runtime.islands.peer_replicas import PeerReplicas
from spindle_cli.runtime.measuring.comparison import Measured, RankReport, compare, gather_reports
from spindle_cli.runtime.measuring.start_up import StartClock
from spindle_cli.runtime.measuring.timeline import Ran, StepProgram, gather_timeline
from spindle_cli.runtime.ready import Ready, make_ready
from spindle_cli.runtime.results import Step
from spindle_cli.runtime.saving.save import save_model
from spindle_cli.runtime.saving.stopping import StopRequest
from spindle_cli.runtime.training import Training
from spindle_cli.workload.building.load import locate


class Trainer:
    """One worker's side of a run: iterating over it trains, a step at a time.

        with spindle.Trainer("plan.yaml", run_dir="runs/mine") as trainer:
            for step in trainer:
                print(step.number, step.loss)

    Every rank has to do the same with it, in the same order: to train, to save and to end are done together.
    The run ends with the last step (then its model and its times are written), or where the block does.
    """

    def __init__(
        self,
        plan: str | Path | Plan | None = None,
        *,
        run_dir: str | Path | None = None,
        workload: str | None = None,
        steps: int | None = None,
        resume: bool = False,
        checkpoint_every: int | None = None,
        keep: int = 3,
        timeout_s: float = 600.0,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Join the other workers, and build this one's part of the model; collective.

        In a script that `spindle launch SCRIPT --plan PLAN` runs, what was said there holds, and the
        arguments are for torchrun alone.

        Args:
            plan: its file, or as `spindle.plan` gives it.
            run_dir: folder of the run; made if missing.
            workload: where it is now, if not where the plan says.
            steps: at which the run ends; as the workload's train settings say if None.
            resume: go on from the newest checkpoint in `run_dir`.
            checkpoint_every: steps from one checkpoint to the next; None: at the end alone. `keep`: so many
                are kept.
            timeout_s: seconds without an answer of another worker after which the run fails.
            callbacks: beside those that the workload's train settings name.

        Raises:
            UsageError: no plan or no folder is named, or there is a run in the folder; the process was
                started by neither `spindle launch` nor torchrun.
            InputError: the plan, the workload or the checkpoint is missing, malformed or belongs to another.
            WorkloadError: the workload cannot be built, traced or trained as its settings say.
        """
        environment = WorkerEnvironment.read()
        if environment.request is not None:
            request = RunRequest.read(environment.request)
            if plan is not None:
                _require_same_plan(plan, request.plan)
        else:
            show_errors_plainly()
            arguments = RunArguments(
                plan, run_dir, workload, steps, resume, checkpoint_every, keep, timeout_s
            )
            request = request_by_hand(arguments)
        self._connect(request, environment, callbacks)

    @classmethod
    def of_request(cls, request: RunRequest, environment: WorkerEnvironment) -> Trainer:
        """The trainer of a request; raises what the constructor raises."""
        trainer = cls.__new__(cls)
        trainer._connect(request, environment)
        return trainer

    @classmethod
    def of_connected(
        cls,
        request: RunRequest,
        environment: WorkerEnvironment,
        device: torch.device,
        stop: StopRequest | None = None,
        clock: StartClock | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Trainer:
        """Make the trainer of a worker that has joined the others already."""
        trainer = cls.__new__(cls)
        trainer._assemble(request, environment, device, ExitStack(), stop, clock, callbacks)
        return trainer

    def _connect(
        self, request: RunRequest, environment: WorkerEnvironment, callbacks: Sequence[Callback] = ()
    ) -> None:
        clock = StartClock(request)
        settle_process(request, environment)
        stop = StopRequest(request.run_dir)
        stop.heed_sigterm()
        island = Island.of(request, environment)
        own_request = request if island is None else island.request_of(request)
        island_environment = environment if island is None else island.environment_of(environment)
        ready = make_ready(
            own_request, island_environment
        )  # forks processes: ahead of the device, and of threads
        clock.ends("workload")
        device = select_device(request, environment)
        stack = ExitStack()
        peer_replicas = stack.enter_context(connected(request, environment, device, island))
        clock.ends("connect")
        self._assemble(
            own_request, island_environment, device, stack, stop, clock, callbacks, peer_replicas, ready
        )

    def _assemble(
        self,
        request: RunRequest,
        environment: WorkerEnvironment,
        device: torch.device,
        stack: ExitStack,
        stop: StopRequest | None,
        clock: StartClock | None,
        callbacks: Sequence[Callback] = (),
        peer_replicas: PeerReplicas | None = None,
        ready: Ready | None = None,
    ) -> None:
        self._stack = stack
        self._training: Training = assemble(
            request, environment, device, stop, clock, callbacks, peer_replicas, ready
        )
        self._has_ended = False
        self._left_alone = LeftAlone(self._training.model, self._training.pool, request.workload)
        stack.callback(self._training.evaluator.close)
        self._left_alone.begin()

    def _called(self, *, waits: bool = True) -> AbstractContextManager[None]:
        """Inside runs what a script has called, and no code of its own."""
        return self._left_alone.called(self._training.done, waits=waits)

    @contextmanager
    def _ends_if_failed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise

    def __iter__(self) -> Iterator[Step]:
        """Train what is left of the steps, and hand each one out.

        Raises:
            RunFailedError: a loss is not finite, or another worker is lost.
            StoppedError: the run was asked to stop; a checkpoint is saved.
            InputError: the run's folder cannot be written.
            Exception: what the user's modules or datasets raised, with a note of where.
        """
        steps = self._steps()
        while True:
            with self._ends_if_failed(), self._called(waits=False):
                step = next(steps, None)
            if step is None:
                return
            yield step

    def _steps(self) -> Iterator[Step]:
        with not_searched_again():
            yield from self._training.run()
        self._end()

    def train(self) -> None:
        """Train what is left of the steps; raises what iterating raises."""
        with self._ends_if_failed(), self._called():
            for _ in self._steps():
                pass

    @property
    def rank(self) -> int:
        """This worker's rank among all."""
        return self._training.rank_among_all

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        outer = self._training.outer_steps
        return self._training.request.run_dir if outer is None else outer.peer_replicas.island.run_dir

    @property
    def total_steps(self) -> int:
        """The step at which the run ends."""
        return self._training.steps.stop

    @property
    def steps_done(self) -> int:
        """Steps that are trained, with those before the checkpoint that the run went on from."""
        return self._training.done

    @property
    def last(self) -> Step | None:
        """The newest step whose results are there, so that nobody waits for it: while a step of the loop
        runs, the one before. None: there is none yet.
        """
        return self._training.last

    @property
    def losses(self) -> dict[str, float]:
        """Each task's loss in `last`, before weighting; empty where there is none."""
        return {} if self.last is None else dict(self.last.task_losses)

    def save(self) -> Path:
        """Save a checkpoint of all steps that are done, unless there is one; collective.

        Returns:
            Its folder.

        Raises:
            RunFailedError: a loss is not finite.
            InputError: it cannot be written.
        """
        if not self._training.checkpoints.possible:
            raise InputError(
                f"{self.run_dir}: the nodes do not share this folder, so no checkpoint can be written",
                hint="Choose a folder on a shared disk as the run's.",
            )
        with self._called():
            self._training.save()
        return checkpoint_folder(self.run_dir, self.steps_done)

    def evaluate(self, task: str, dataset: Any = None) -> Evaluation:
        """Evaluate a task as it is after all steps that are done, by forward passes of the same placement;
        collective. What is trained afterwards is what it would be without.

        Args:
            task: its name.
            dataset: map-style or a stream, items as the task is trained on; its `eval_dataset` if None.

        Raises:
            UsageError: there is no such task, or no dataset to evaluate it on.
            WorkloadError: the task takes another way in eval mode, or the dataset does not fit it.
            RunFailedError: a metric fails, or a loss before was not finite.
            InputError: the run's folder cannot be written.
        """
        with self._called():
            return self._training.evaluate(task, dataset)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, Exception):
            self._fail(error)
        self._stack.__exit__(kind, error, trace)

    def close(self) -> None:
        """End the run where it is, with its last checkpoint, and leave the other workers; collective."""
        if not self._has_ended:
            with self._called():
                self._training.settle()
                self._end()
        self._stack.close()

    def _end(self) -> None:
        self._has_ended = True
        self._left_alone.end()
        self._training.feed.close()
        end(self._training)

    def _fail(self, error: Exception) -> None:
        self._left_alone.end()
        if self._has_ended:
            return
        self._has_ended = True
        self._training.feed.close()
        if not is_lost_peer(error):  # the others can still write their parts
            self._training.checkpoints.finish_after(error)


def _require_same_plan(plan: str | Path | Plan, launched: Path) -> None:
    """Refuse to train by another plan than the launch's.

    Raises:
        UsageError: it is another.
    """
    given = plan if isinstance(plan, Plan) else Plan.read(Path(plan))
    if given != Plan.read(launched):
        name = "the plan given" if isinstance(plan, Plan) else str(plan)
        raise UsageError(
            f"spindle.Trainer: {name} is another plan than {launched}, which this run was launched with",
            hint="Leave it out of the script, or launch it with `--plan` of the same plan.",
        )


_PLAN_FILE = "plan.yaml"


@dataclass(frozen=True)
class RunArguments:
    """The arguments of a `Trainer`."""

    plan: str | Path | Plan | None
    run_dir: str | Path | None
    workload: str | None
    steps: int | None
    resume: bool
    checkpoint_every: int | None
    keep: int
    timeout_s: float


def request_by_hand(arguments: RunArguments) -> RunRequest:
    """The run's folder, made, and the request; to be called by every rank before they meet.

    Raises:
        UsageError: no plan or no folder is named, there is a run in the folder, or a number is too small.
        InputError: the plan or the workload is missing, or the folder cannot be made.
    """
    if arguments.plan is None or arguments.run_dir is None:
        missing = "plan" if arguments.plan is None else "run_dir"
        raise UsageError(
            f"spindle.Trainer: no {missing} is given, and no `spindle launch` has started this process",
            hint='Write spindle.Trainer("plan.yaml", run_dir="runs/mine"), or start the script with '
            "`spindle launch SCRIPT.py --plan PLAN.yaml`.",
        )
    for name in ("steps", "checkpoint_every", "keep", "timeout_s"):
        number = getattr(arguments, name)
        if number is not None and number <= 0:
            raise UsageError(f"spindle.Trainer: {name}={number}: expected a number above 0")
    run_dir = Path(arguments.run_dir).absolute()
    if not arguments.resume and (run_dir / METRICS_FILE).exists():
        raise UsageError(
            f"{run_dir}: there is a run in this folder already",
            hint="Choose another run_dir, or go on with that run with resume=True.",
        )
    try:
        workers_dir(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{run_dir}: cannot be made: {error.strerror}") from error
    path = _plan_file(arguments.plan, run_dir)
    plan = read_plan(path)
    folders = () if arguments.workload else (path.parent,)
    return RunRequest(
        plan=path,
        workload=locate(arguments.workload or plan.workload.source, folders),
        steps=arguments.steps,
        run_dir=run_dir,
        resume=arguments.resume,
        checkpoint_every=arguments.checkpoint_every,
        keep=arguments.keep,
        device_type="cpu" if plan.cluster.is_cpu else "cuda",
        backend=plan.cluster.talks_by,
        threads=torch.get_num_threads(),
        timeout_s=arguments.timeout_s,
        islands=1 if plan.local_sgd is None else plan.local_sgd.islands,
    )


def _plan_file(plan: str | Path | Plan, run_dir: Path) -> Path:
    """Where the plan is; one that is in no file is written into the run's folder."""
    if not isinstance(plan, Plan):
        return Path(plan).absolute()
    path = run_dir / _PLAN_FILE
    write_plan(path, plan)
    return path


def end(training: Training) -> None:
    """Save what was trained, and hand in what was measured; collective.

    Raises:
        InputError: it cannot be written.
    """
    model, run_dir = training.model, training.request.run_dir
    # A run that is captured is there to be compared, and nobody goes on with it.
    is_captured = training.request.capture_dir is not None
    if not is_captured:
        training.save_in_order()
    training.checkpoints.finish()
    training.tell_checkpoints()
    # Files have no name for complex numbers as wide as float64, in which such a run may compute.
    has_complex = any(parameter.is_complex() for parameter in model.table.parameters.values())
    if not (is_captured and has_complex):
        names = tuple(name for name in model.cuts.by_name if model.table.is_trainable(name))
        save_model(run_dir, training.done, names, model.trained, training.pool.whole)
    hand_in(training)
    training.followers.at_end()


def hand_in(training: Training) -> None:
    """Gather what all ranks measured; rank 0 writes it against the plan's predictions, and the plan beside it
    (its own file may be gone, or another plan's, when somebody reads them). Collective.
    """
    training.stopwatch.close()
    program, run_dir = training.model.program, training.request.run_dir
    timeline = gather_timeline(training.stopwatch, _ran(training))
    reports = gather_reports(RankReport.of(training.stopwatch))
    if training.log is not None:
        assert reports is not None, "rank 0 has them"
        training.log.close()
        assert timeline is not None, "rank 0 has it"
        write_plan(run_dir / PLAN_FILE, program.plan)
        write_text(run_dir / TIMELINE_FILE, to_compact_json(timeline))
        compared = compare(program.plan, _measured(training), reports, training.clock.start_up())
        write_json(run_dir / PREDICTED_FILE, compared)


def _ran(training: Training) -> Ran:
    model = training.model
    parts = {part.tasks: StepProgram(part.program, part.places) for part in model.steps}
    return Ran(model.program.plan, lambda step: parts[model.schedule.of_step(step)], model.sums)


def _measured(training: Training) -> list[Measured]:
    """What each step of this process took, for an iteration of one batch: on average over those of the
    step.
    """
    plans = {part.tasks: part.program.plan for part in training.model.steps}
    batches, first = training.model.train.accumulate, training.steps.start
    steps = [
        (seconds, training.model.schedule.of_step(step))
        for step, seconds in enumerate(training.iterations_s, first)
    ]
    return [
        Measured(seconds / batches, plans[tasks].predicted.iteration_s, tasks) for seconds, tasks in steps
    ]


@contextmanager
def not_searched_again() -> Iterator[None]:
    """Inside the block the collector looks only at objects made in it.

    A worker's modules, traces and program are some hundred thousand objects that live to its end; a full
    collection, which comes every few steps, takes 0.1 to 0.2 s to find that out.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
