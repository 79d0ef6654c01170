"""One worker, started by torchrun once per device: `python -m spindle_cli.runtime.worker REQUEST.json`.

1. connect to the other workers; 2. read and check the plan; 3. localise: link, prove, build this rank's part
of the model; 4. train; 5. save the parameters and hand in
what was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from spindle_cli.check.run import check_plan
from spindle_cli.checkpoint.carried import carried_over, require_same_optimizer
from spindle_cli.checkpoint.files import find_checkpoint, require_steps_left
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import to_compact_json, write_json
from spindle_cli.files.journal import JournalWriter
from spindle_cli.files.request import RunRequest, journal_path
from spindle_cli.files.run_files import PREDICTED_FILE
from spindle_cli.files.run_timeline import TIMELINE_FILE
from spindle_cli.files.writing import write_text
from spindle_cli.plan.types import Plan
from spindle_cli.process.allocator import keep_freed_memory
from spindle_cli.process.environment import WorkerEnvironment, set_unless_chosen
from spindle_cli.process.worker_session import is_lost_peer, worker_session
from spindle_cli.runtime.collector import not_searched_again
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.nccl import nccl_settings
from spindle_cli.runtime.communication.strict_backend import STRICT_BACKENDS, register_strict_backends
from spindle_cli.runtime.communication.transfers import Exchange
from spindle_cli.runtime.measuring.comparison import compare, gather_times
from spindle_cli.runtime.measuring.diary import Diary
from spindle_cli.runtime.measuring.metrics import MetricsLog
from spindle_cli.runtime.measuring.start_up import StartClock
from spindle_cli.runtime.measuring.timeline import gather_timeline
from spindle_cli.runtime.measuring.timing import Stopwatch
from spindle_cli.runtime.part.localise import LocalModel, dtype_of, localise
from spindle_cli.runtime.part.replicas import check_replicas
from spindle_cli.runtime.part.warm_up import compile_layers
from spindle_cli.runtime.saving.checkpoints import Checkpoints
from spindle_cli.runtime.saving.restore import restore
from spindle_cli.runtime.saving.save import save_model
from spindle_cli.runtime.saving.stopping import StopRequest
from spindle_cli.runtime.saving.train_state import TrainState, require_same_run
from spindle_cli.runtime.step.counting import Counting, counted_shares, labels_that_must_count
from spindle_cli.runtime.step.data import Feed, portions
from spindle_cli.runtime.step.executor import Executor
from spindle_cli.runtime.step.losses import LossBoard
from spindle_cli.runtime.training import Computing, Trainer
from spindle_cli.runtime.update.clip import GradientClip
from spindle_cli.runtime.update.guard import UpdateGuard
from spindle_cli.runtime.update.masters import Masters
from spindle_cli.workload.training.batches import Batches
from spindle_cli.workload.training.learning_rate import make_schedule
from spindle_cli.workload.training.no_randomness import computing_as_asked
from spindle_cli.workload.training.optimizer import make_optimizer
from spindle_cli.workload.training.precision import set_matmul_precision, widen_gradients


def main(argv: list[str]) -> None:
    """Run one worker; its errors end in its `WorkerError` file and its exit code."""
    request = RunRequest.read(Path(argv[1]))
    environment = WorkerEnvironment.read()
    with worker_session(request.run_dir, environment.rank):
        run(request, environment)


def run(request: RunRequest, environment: WorkerEnvironment) -> None:
    """Train this rank's part of the plan.

    Raises:
        InputError: the plan is invalid, or does not belong to the workload or to this number of workers.
        WorkloadError: the workload cannot be built, traced or trained as its settings say.
        RunFailedError: training failed: a loss that is not finite, a lost worker.
    """
    clock = StartClock(request)
    torch.set_num_threads(request.threads)
    keep_freed_memory()
    stop = StopRequest(request.run_dir)
    stop.heed_sigterm()
    if request.backend == "nccl":
        set_unless_chosen(nccl_settings(request.run_dir))
    device = select_device(request, environment)
    with connected(request, environment, device):
        clock.ends("connect")
        train_plan(request, environment, device, stop, clock)


def train_plan(
    request: RunRequest,
    environment: WorkerEnvironment,
    device: torch.device,
    stop: StopRequest | None = None,
    clock: StartClock | None = None,
) -> None:
    """Train as one of the connected workers; raises what `run` raises."""
    clock = clock or StartClock(request)
    plan = Plan.read(request.plan)
    require_runnable(plan, request, environment.world_size)
    model = localise(request, plan, environment.rank, device)
    set_matmul_precision(model.train)
    asked = None if request.dtype is None else dtype_of(request, model.train)
    computing = partial(computing_as_asked, asked, no_randomness=request.no_randomness)
    with computing():  # compiled code is for the constants' type
        compile_layers(model, device)
    clock.ends("workload")
    # Building left every rank's generator in one state; shares of a batch must not draw the same dropout.
    torch.manual_seed(model.train.seed + environment.rank)
    check_replicas(model.cuts.keys, model.parameters, device)
    communicators = Communicators(model.program.communicators, request.timeout_s)
    communicators.meet(model.program, environment.rank, device)
    pool = make_pool(model, environment.rank, communicators)
    masters = Masters(pool.owned_ranges) if model.train.precision == "bf16" else None
    owned_ranges = pool.owned_ranges if masters is None else masters.owned_ranges
    optimizer = make_optimizer(model.train, (piece.tensor for piece in owned_ranges))
    state = TrainState(model, owned_ranges, masters, optimizer, make_schedule(model.train, optimizer), device)
    total_steps = request.steps or model.train.steps
    steps = range(resume(request, state, environment.rank, total_steps), total_steps)
    stop = stop or StopRequest(request.run_dir)
    trainer = make_trainer(
        request, state, pool, communicators, environment.rank, steps, stop, clock, computing
    )
    clock.ends("set-up")
    try:
        with not_searched_again():
            trainer.train(steps)
    except Exception as error:
        if not is_lost_peer(error):  # the others can still write their parts
            trainer.checkpoints.finish_after(error)
        raise
    finally:
        trainer.feed.close()
    # A run that is captured is there to be compared, and nobody goes on with it.
    if request.capture_dir is None:
        trainer.checkpoints.save(steps.stop)
    trainer.checkpoints.finish()
    save_model(request.run_dir, steps.stop, tuple(model.cuts.by_name), model.parameters, device)
    finish(trainer, device)


def require_runnable(plan: Plan, request: RunRequest, world_size: int) -> None:
    """Refuse a plan that breaks its rules, is for other devices, or needs what workers cannot do.

    Raises:
        InputError: with the place in the plan.
    """
    violations = check_plan(plan)
    if violations:
        raise InputError(f"{request.plan}: the plan is not valid: {violations[0]}", hint="Make it again.")
    if plan.cluster.num_devices != world_size:
        raise InputError(
            f"{request.plan}: the plan is for {plan.cluster.num_devices} devices, "
            f"but {world_size} workers were started",
            hint="Start it with `spindle launch`, which starts one worker per device.",
        )


def select_device(request: RunRequest, environment: WorkerEnvironment) -> torch.device:
    """This worker's device; of a node's CUDA devices, the one of its local rank.

    Raises:
        InputError: there is no such CUDA device.
    """
    if request.device_type != "cuda":
        return torch.device(request.device_type)
    found = torch.cuda.device_count()
    if environment.local_rank >= found:
        raise InputError(
            f"the plan's cluster has {environment.local_world_size} devices on this node, "
            f"but torch finds {found}",
            hint="Plan for a cluster with as many devices per node as there are.",
        )
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def connected(request: RunRequest, environment: WorkerEnvironment, device: torch.device) -> Iterator[None]:
    """Membership in the world of all workers."""
    backend = environment.backend or request.backend
    if backend in STRICT_BACKENDS:
        register_strict_backends()
    dist.init_process_group(
        backend,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=request.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield
    dist.destroy_process_group()  # not after an error: it would wait for peers that may be gone


def resume(request: RunRequest, state: TrainState, rank: int, total_steps: int) -> int:
    """Put the run's newest whole checkpoint in place, or one of another run, where the request says so;
    collective.

    Returns:
        Steps that are done.

    Raises:
        InputError: there is no checkpoint, or it does not belong to this workload and its train settings.
    """
    run_dir, step = request.run_dir, request.resume_step
    if not request.resume:
        if request.begin_from is None:
            return 0
        run_dir, step = request.begin_from, request.begin_step
    # Rank 0 chooses, so that all ranks take the same one whatever happens to the files meanwhile.
    chosen = [find_checkpoint(run_dir, step=step) if rank == 0 else None]
    dist.broadcast_object_list(chosen)
    (found,) = chosen
    assert found is not None
    require_steps_left(found, total_steps)
    carried = None
    if request.resume:
        require_same_run(found.checkpoint, state, request.dtype, found.folder)
    else:
        carried = carried_over(found.checkpoint, state.model.graph)
        require_same_optimizer(found.checkpoint, state.model.train, found.folder)
    restore(found.folder, found.checkpoint, state, rank, carried)
    check_replicas(state.model.cuts.keys, state.model.parameters, state.device)
    return found.checkpoint.step


def make_pool(model: LocalModel, rank: int, communicators: Communicators) -> GradientPool:
    """Lay out a rank's trained parameters."""
    widen_gradients(model.trained.values(), model.train)
    groups = model.cuts.of_leaves(model.program.groups)
    sharded = model.train.shards_optimizer_state
    return GradientPool(groups, model.trained, communicators, rank, sharded=sharded)


def make_trainer(
    request: RunRequest,
    state: TrainState,
    pool: GradientPool,
    communicators: Communicators,
    rank: int,
    steps: range,
    stop: StopRequest,
    clock: StartClock,
    computing: Computing,
) -> Trainer:
    """Put a rank's parts together."""
    model, device = state.model, state.device
    program = model.program
    for local in model.slices.values():
        for group in (local.group, local.shares):
            layout = local.wired.layout
            if group is not None and layout.partners(layout.share_of[rank]):
                group.join(communicators.inside(layout, layout.share_of[rank]))
    stopwatch = Stopwatch(device, request.timeline_steps, watches_collectives=request.traces)
    pool.watch_with(stopwatch.watch)
    exchange = Exchange(model.wiring, rank, device, communicators)
    batches_per_step = model.train.accumulate
    shares = {name: task.loss_shares for name, task in model.graph.tasks.items()}
    board = LossBoard(model.graph.workload.tasks, device, batches_per_step, shares)
    counting = None
    if board.layout.size > 0:
        counted = counted_shares(model.slices.values(), board.layout, batches_per_step)
        counting = Counting(counted, board.layout)
    batches = {task.name: Batches(task, model.train.seed) for task in model.graph.workload.tasks}
    return Trainer(
        rank=rank,
        request=request,
        computing=computing,
        stop=stop,
        model=model,
        feed=Feed(
            batches,
            portions(model.slices.values()),
            steps,
            device,
            dtype_of(request, model.train),
            batches_per_step,
            counting,
            labels_that_must_count(model.slices.values(), batches_per_step),
            reads_ahead=request.dtype is None,
        ),
        executor=Executor(
            program,
            rank,
            model.slices,
            exchange,
            pool,
            board,
            stopwatch,
            model.train,
            open_diary(request, rank, device, steps.start * batches_per_step, batches_per_step),
        ),
        pool=pool,
        board=board,
        optimizer=state.optimizer,
        guard=UpdateGuard(state.optimizer, device),
        masters=state.masters,
        schedule=state.schedule,
        clip=None
        if model.train.clip_norm is None
        else GradientClip(model.train.clip_norm, state.owned_ranges),
        checkpoints=Checkpoints(request, state, rank, steps.start),
        stopwatch=stopwatch,
        log=MetricsLog(request.run_dir, steps.start) if rank == 0 else None,
        clock=clock,
    )


def open_diary(
    request: RunRequest, rank: int, device: torch.device, first_batch: int, batches_per_step: int
) -> Callable[[Sequence[str]], Diary]:
    """What begins the journal of a rank's actions, once they have their names."""

    def begin(actions: Sequence[str]) -> Diary:
        path = journal_path(request.run_dir, rank)
        path.parent.mkdir(exist_ok=True)
        return Diary(JournalWriter(path, actions, batches_per_step, first_batch), device)

    return begin


def finish(trainer: Trainer, device: torch.device) -> None:
    """Gather what all ranks measured; rank 0 writes it against the plan's predictions. Collective."""
    trainer.stopwatch.close()
    program, run_dir = trainer.model.program, trainer.request.run_dir
    timeline = gather_timeline(trainer.stopwatch, program, device)
    times = gather_times(trainer.stopwatch.medians(), device)
    if trainer.log is not None:
        assert times is not None and timeline is not None, "rank 0 has both"
        trainer.log.close()
        iterations_s = [seconds / trainer.model.train.accumulate for seconds in trainer.iterations_s]
        write_text(run_dir / TIMELINE_FILE, to_compact_json(timeline))
        compared = compare(program.plan, iterations_s, times, trainer.clock.start_up())
        write_json(run_dir / PREDICTED_FILE, compared)


if __name__ == "__main__":
    main(sys.argv)
