"""Assemble a rank's training: from the request to its part of the model and all that steps it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from spindle_cli.check.run import check_plan
from spindle_cli.errors import InputError
from spindle_cli.files.journal import JournalWriter
from spindle_cli.files.request import RunRequest, journal_path
from spindle_cli.plan.types import Plan
from spindle_cli.process.allocator import keep_freed_memory
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.transfers import Exchange
from spindle_cli.runtime.evaluating.evaluator import Evaluator
from spindle_cli.runtime.following.callback import Callback
from spindle_cli.runtime.following.calls import Callbacks, require_callbacks
from spindle_cli.runtime.loading.start import Place, loads_apart, start_evaluation_loaders, start_loaders
from spindle_cli.runtime.measuring.diary import Chapter, Diary
from spindle_cli.runtime.measuring.metrics import MetricsLog
from spindle_cli.runtime.measuring.start_up import StartClock
from spindle_cli.runtime.measuring.timing import Stopwatch
from spindle_cli.runtime.measuring.work import StepWork
from spindle_cli.runtime.part.at_lengths import TasksAtLengths
from spindle_cli.runtime.part.localise import LocalModel, StepPart, dtype_of, is_stepped_whole, localise
from spindle_cli.runtime.part.replicas import check_replicas
from spindle_cli.runtime.part.warm_up import compile_layers
from spindle_cli.runtime.saving.checkpoints import Checkpoints
from spindle_cli.runtime.saving.going_on import resume
from spindle_cli.runtime.saving.stopping import StopRequest
from spindle_cli.runtime.saving.train_state import TrainState
from spindle_cli.runtime.step.capturing import capture
from spindle_cli.runtime.step.counting import Counting, Portion, counted_shares, labels_that_must_count
from spindle_cli.runtime.step.data import Feed, Share, portions
from spindle_cli.runtime.step.executor import Executor
from spindle_cli.runtime.step.host_copies import HostMemory
from spindle_cli.runtime.step.losses import LossBoard
from spindle_cli.runtime.training import Computing, Training
from spindle_cli.runtime.update.learning_rates import LearningRates
from spindle_cli.runtime.update.loss_scale import LossScale
from spindle_cli.runtime.update.masters import Masters
from spindle_cli.runtime.update.optimizers import Optimizers
from spindle_cli.runtime.update.update import Update
from spindle_cli.workload.data.lengths import known_shapes
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.optimizing.task_weights import TaskWeights
from spindle_cli.workload.training.batches import Batches
from spindle_cli.workload.training.callbacks import find_callbacks
from spindle_cli.workload.training.no_randomness import computing_as_asked
from spindle_cli.workload.training.precision import set_matmul_precision, widen_gradients


@dataclass(frozen=True)
class Seat:
    """A connected worker's place in a run: what is asked, which rank it is, on which device, and the first
    rank of its node.
    """

    request: RunRequest
    rank: int
    device: torch.device
    first_of_node: int = 0


def assemble(
    request: RunRequest,
    environment: WorkerEnvironment,
    device: torch.device,
    stop: StopRequest | None = None,
    clock: StartClock | None = None,
    callbacks: Sequence[Callback] = (),
) -> Training:
    """A connected worker's training, with the checkpoint to go on from in place; collective.

    `callbacks`: beside those that the train settings name.

    Raises:
        InputError: the plan is invalid, or does not belong to the workload or to this number of workers; or
            the checkpoint does not.
        WorkloadError: the workload cannot be built, traced or trained as its settings say.
    """
    clock = clock or StartClock(request)
    seat = Seat(request, environment.rank, device, environment.rank - environment.local_rank)
    plan = Plan.read(request.plan)
    require_runnable(plan, request, environment.world_size)
    model, computing = build_part(seat, plan)
    clock.ends("workload")
    # Building left every rank's generator in one state; shares of a batch must not draw the same dropout.
    torch.manual_seed(model.train.seed + seat.rank)
    check_replicas(model.cuts.keys, model.parameters, device, model.own)
    communicators = Communicators(model.program.communicators, request.timeout_s)
    communicators.meet([model.program, *(part.program for part in model.steps)], seat.rank, device)
    join_groups(model, seat.rank, communicators)
    pool = make_pool(model, seat.rank, communicators)
    state = make_state(model, pool, device)
    total_steps = request.steps or model.train.steps
    start = resume(request, state, seat.rank, total_steps)
    steps = range(start.step, total_steps)
    followers = (*require_callbacks(callbacks), *named_callbacks(seat, model.train))
    training = make_training(
        seat, state, pool, communicators, steps, computing, clock, followers, start.streams
    )
    training.stop = stop or StopRequest(request.run_dir)
    training.evaluator.prepare()
    if not any(level.is_fetched for level in plan.sharding.values()):
        keep_freed_memory()  # else memory is what is short: what is freed goes back
    clock.ends("set-up")
    return training


def named_callbacks(seat: Seat, train: TrainSettings) -> tuple[Callback, ...]:
    """Those that the train settings name."""
    return require_callbacks([make() for make in find_callbacks(train, seat.request.workload)])


def build_part(seat: Seat, plan: Plan) -> tuple[LocalModel, Computing]:
    """What this rank holds of the model, its layers compiled where that is asked for; and what its passes run
    in.
    """
    request = seat.request
    model = localise(request, plan, seat.rank, seat.device)
    set_matmul_precision(model.train)
    asked = None if request.dtype is None else dtype_of(request, model.train)
    computing = partial(computing_as_asked, asked, no_randomness=request.no_randomness)
    with computing():  # compiled code is for the constants' type
        compile_layers(model, seat.device)
    return model, computing


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


def make_pool(model: LocalModel, rank: int, communicators: Communicators) -> GradientPool:
    """Lay out a rank's parameters."""
    widen_gradients(model.trained.values(), model.train)
    cuts = model.cuts
    pool = GradientPool(
        cuts.of_leaves(model.sums),
        model.parameters,
        communicators,
        rank,
        stepped_whole=frozenset(stepped_whole(model)),
        parts=[cuts.of_leaves(part.program.groups) for part in model.steps],
        own=model.own,
        factors=None if model.train.autocast is None else getattr(torch, model.train.autocast),
    )
    capture(model.slices.values(), {id(each.parameter): each for each in pool.gathered})
    return pool


def stepped_whole(model: LocalModel) -> Iterator[str]:
    """The trained parameters, by key, whose optimizer state every rank that holds them keeps whole."""
    return (key for key in model.trained if is_stepped_whole(key, model.train, model.groups))


def make_state(model: LocalModel, pool: GradientPool, device: torch.device) -> TrainState:
    """What is trained and what steps it."""
    masters = Masters(pool.owned_ranges) if model.train.precision == "bf16" else None
    owned_ranges = pool.owned_ranges if masters is None else masters.owned_ranges
    optimizers = Optimizers.of(model.train, model.groups, owned_ranges)
    scale = LossScale.of(model.train, device)
    return TrainState(model, owned_ranges, masters, optimizers, device, pool.fetched, pool.whole, scale)


def join_groups(model: LocalModel, rank: int, communicators: Communicators) -> None:
    """Give the slices that sum inside of their passes the communicators for it."""
    for local in model.slices.values():
        for group in (local.group, local.shares):
            layout = local.wired.layout
            if group is not None and layout.partners(layout.share_of[rank]):
                group.join(communicators.inside(layout, layout.share_of[rank]))


def make_board(seat: Seat, model: LocalModel) -> LossBoard:
    """The board of all tasks' losses."""
    shares = {name: task.loss_shares for name, task in model.graph.tasks.items()}
    tasks, batches = model.graph.workload.tasks, model.train.accumulate
    weights = TaskWeights(model.train, tasks)
    return LossBoard(tasks, seat.device, batches, shares, seat.rank, dist.get_world_size(), weights)


def make_feed(
    seat: Seat,
    model: LocalModel,
    board: LossBoard,
    steps: range,
    streams: Mapping[str, Any],
    at_lengths: TasksAtLengths,
) -> Feed:
    """What loads this rank's part of the steps' batches; collective. `streams`: where they go on."""
    per_step, train, schedule = model.train.accumulate, model.train, model.schedule
    tasks = model.graph.workload.tasks
    wanted = {part.tasks: portions(part.slices.values()) for part in model.steps}
    taken = {portion.task for found in wanted.values() for portion in found}
    shapes = {name: known_shapes(task) for name, task in model.graph.tasks.items()}
    apart = [task for task in tasks if loads_apart(task, train)]
    loaders = start_loaders(
        apart,
        train,
        taken,
        schedule.own_numbers(steps),
        Place(seat.rank, seat.first_of_node),
        streams,
        shapes,
    )
    here = {task.name: Batches(task, train.seed, shapes[task.name]) for task in tasks if task not in apart}
    shares = {
        part.tasks: Share(
            (*wanted[part.tasks], *_asked_alone(part.tasks, wanted[part.tasks], taken & loaders.keys())),
            _counting(part, board, per_step),
        )
        for part in model.steps
    }
    return Feed(
        {**here, **loaders},
        shares,
        schedule,
        steps,
        seat.device,
        dtype_of(seat.request, model.train),
        labels_that_must_count(model.slices.values(), per_step),
        reads_ahead=seat.request.dtype is None,
        counters_of=at_lengths.counters,
        varying=at_lengths.names,
        states={name: state for name, state in streams.items() if name in taken},
    )


def _counting(part: StepPart, board: LossBoard, per_step: int) -> Counting | None:
    if board.layout.size == 0:
        return None
    return Counting(counted_shares(part.slices.values(), board.layout, per_step), board.layout)


def _asked_alone(
    tasks: Collection[str], wanted: Collection[Portion], loaded_apart: Collection[str]
) -> Iterator[Portion]:
    """No samples of the tasks that this rank takes samples of at other steps: who loads them for several
    ranks goes on when all have asked.
    """
    for task in tasks:
        if task in loaded_apart and all(portion.task != task for portion in wanted):
            yield Portion(task, (0, 0), ())


def make_executors(
    seat: Seat,
    model: LocalModel,
    pool: GradientPool,
    board: LossBoard,
    stopwatch: Stopwatch,
    communicators: Communicators,
    first_step: int,
    at_lengths: TasksAtLengths,
    scale: LossScale | None,
) -> dict[tuple[str, ...], Executor]:
    """What runs this rank's programs, by the tasks of the steps that they are for."""
    host = HostMemory(seat.device)
    made = [
        Executor(
            part.program,
            seat.rank,
            part.slices,
            Exchange(part.wiring, seat.rank, seat.device, communicators),
            pool,
            board,
            stopwatch,
            model.train,
            number,
            partial(at_lengths.of, number),
            host,
            scale,
        )
        for number, part in enumerate(model.steps)
    ]
    labels = [label for executor in made for label in executor.labels[:-1]]
    diary = open_diary(seat, [*labels, made[0].labels[-1]], first_step, model.train.accumulate)
    chapters = Chapter.all_of(diary, [len(executor.labels) for executor in made])
    for executor, chapter in zip(made, chapters, strict=True):
        executor.note_in(chapter)
    return {part.tasks: executor for part, executor in zip(model.steps, made, strict=True)}


def make_update(state: TrainState) -> Update:
    """What a rank's step ends with."""
    return Update(
        state.optimizers,
        state.owned_ranges,
        state.masters,
        state.loss_scale,
        state.model.train.clip_norm,
        state.device,
    )


def make_training(
    seat: Seat,
    state: TrainState,
    pool: GradientPool,
    communicators: Communicators,
    steps: range,
    computing: Computing,
    clock: StartClock,
    callbacks: Sequence[Callback],
    streams: Mapping[str, Any],
) -> Training:
    """Put a rank's parts together; collective. `streams`: where they go on."""
    request, device, model = seat.request, seat.device, state.model
    stopwatch = Stopwatch(device, request.timeline_steps, watches_collectives=request.traces)
    pool.watch_with(stopwatch.watch)
    board = make_board(seat, model)
    at_lengths = TasksAtLengths(model, request.workload)
    feed = make_feed(seat, model, board, steps, streams, at_lengths)
    place = Place(seat.rank, seat.first_of_node)
    passes = start_evaluation_loaders(model.graph.workload.all_tasks, model.train, place)
    return Training(
        rank=seat.rank,
        request=request,
        steps=steps,
        computing=computing,
        stop=StopRequest(request.run_dir),
        model=model,
        feed=feed,
        executors=make_executors(
            seat, model, pool, board, stopwatch, communicators, steps.start, at_lengths, state.loss_scale
        ),
        pool=pool,
        board=board,
        optimizers=state.optimizers,
        update=make_update(state),
        masters=state.masters,
        checkpoints=Checkpoints(request, state, seat.rank, steps.start, feed.states),
        stopwatch=stopwatch,
        log=MetricsLog(request.run_dir, steps.start) if seat.rank == 0 else None,
        clock=clock,
        followers=Callbacks(callbacks, seat.rank),
        evaluator=Evaluator(
            model,
            request.workload,
            seat.rank,
            device,
            communicators,
            request.timeout_s,
            computing,
            passes,
            pool,
        ),
        rates=LearningRates(model.train, model.groups, state.optimizers, steps.start),
        work={
            part.tasks: StepWork.of(model.program.plan, model.graph, model.train, part.tasks)
            for part in model.steps
        },
        at_lengths=at_lengths,
    )


def open_diary(seat: Seat, actions: Sequence[str], first_step: int, batches_per_step: int) -> Diary:
    """Begin the journal of a rank's actions, by their names."""
    path = journal_path(seat.request.run_dir, seat.rank)
    path.parent.mkdir(exist_ok=True)
    first_batch = first_step * batches_per_step
    return Diary(JournalWriter(path, actions, batches_per_step, first_batch), seat.device)
