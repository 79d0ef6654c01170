"""Assemble a rank's training: from the request to its part of the model and all that steps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from spindle_cli.account.groups import gathered_matrices
from spindle_cli.errors import WorkloadError
from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import JournalWriter
from spindle_cli.operators.factors import capture
from spindle_cli.process.devices import keep_freed_memory
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.averages import FollowingParameters
from spindle_cli.runtime.backends.host_group import join_host_group
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.transfers import Exchange
from spindle_cli.runtime.evaluating.evaluator import Evaluator
from spindle_cli.runtime.feeding import make_feed
from spindle_cli.runtime.following.callback import Callback
from spindle_cli.runtime.following.calls import Callbacks, SetValues, require_callbacks
from spindle_cli.runtime.following.changes import refusing_changes
from spindle_cli.runtime.islands.outer import OuterOptimizer
from spindle_cli.runtime.islands.outer_steps import OuterSteps
from spindle_cli.runtime.islands.peer_replicas import PeerReplicas
from spindle_cli.runtime.loading.start import Place, Readers, start_evaluation_loaders
from spindle_cli.runtime.measuring.action_log import ActionLog, ProgramLog
from spindle_cli.runtime.measuring.metrics import MetricsLog
from spindle_cli.runtime.measuring.start_up import StartClock
from spindle_cli.runtime.measuring.timing import Stopwatch
from spindle_cli.runtime.measuring.work import StepWork
from spindle_cli.runtime.part.at_lengths import TasksAtLengths
from spindle_cli.runtime.part.localise import LocalModel, dtype_of, is_stepped_whole, localise
from spindle_cli.runtime.part.replicas import check_replicas, require_like_devices
from spindle_cli.runtime.part.warm_up import compile_layers
from spindle_cli.runtime.ready import Ready, make_ready
from spindle_cli.runtime.saving.checkpoints import Checkpoints
from spindle_cli.runtime.saving.restore import Start, resume
from spindle_cli.runtime.saving.stopping import StopRequest
from spindle_cli.runtime.saving.train_state import TrainState
from spindle_cli.runtime.step.executor import Executor
from spindle_cli.runtime.step.host_copies import HostMemory
from spindle_cli.runtime.step.losses import LossAccumulator
from spindle_cli.runtime.training import Computing, Training
from spindle_cli.runtime.update.learning_rates import LearningRates
from spindle_cli.runtime.update.loss_scale import LossScale
from spindle_cli.runtime.update.masters import Masters
from spindle_cli.runtime.update.optimizers import Optimizers
from spindle_cli.runtime.update.update import Update
from spindle_cli.runtime.worker_context import WorkerContext
from spindle_cli.training.callbacks import find_callbacks
from spindle_cli.training.optimizing.schedules import TaskWeights
from spindle_cli.training.precision import (
    compute_convolutions_in_float32,
    computing_as_asked,
    set_matmul_precision,
    widen_gradients,
)
from spindle_cli.training.watch import Watch
from spindle_cli.workload.building.load import built_modules
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.step_values import StepValues


def assemble(
    request: RunRequest,
    environment: WorkerEnvironment,
    device: torch.device,
    stop: StopRequest | None = None,
    clock: StartClock | None = None,
    callbacks: Sequence[Callback] = (),
    peer_replicas: PeerReplicas | None = None,
    ready: Ready | None = None,
) -> Training:
    """A connected worker's training, with the checkpoint to go on from in place; collective.

    `callbacks`: beside those that the train settings name. `ready`: what was done before it was connected;
    None: that is done here.

    Raises:
        InputError: the plan is invalid, or does not belong to the workload or to this number of workers; or
            the checkpoint does not.
        WorkloadError: the workload cannot be built, traced or trained as its settings say.
    """
    clock = clock or StartClock(request)
    first_of_node = environment.rank - environment.local_rank
    context = WorkerContext(request, environment.rank, device, first_of_node, peer_replicas)
    ready = ready or make_ready(request, environment)
    plan = ready.plan
    join_host_group(request.timeout_s)
    model, computing = build_part(context, ready)
    watch = Watch.of(model.graph.workload, request.workload)
    clock.ends("workload")
    # Building left every rank's generator in one state; shares of a batch must not draw the same dropout.
    torch.manual_seed(model.train.seed + context.rank_among_all)
    check_replicas(model.cuts.keys, model.parameters, model.shards)
    gathered = gathered_matrices(plan.slices, plan.by_name, plan.accumulate)
    if gathered:
        require_like_devices({name: matrix.devices for name, matrix in gathered.items()}, device)
    communicators = Communicators(model.program.communicators, request.timeout_s)
    communicators.meet([model.program, *(part.program for part in model.steps)], context.rank, device)
    join_groups(model, context.rank, communicators)
    pool = make_pool(model, context.rank, communicators)
    state = make_state(context, model, pool)
    total_steps = request.steps or model.train.steps
    start = resume(request, state, context.rank, total_steps)
    if state.outer is not None:
        state.outer.begin()
    steps = range(start.step, total_steps)
    followers = (*require_callbacks(callbacks), *named_callbacks(context, model.train))
    training = make_training(
        context, state, pool, communicators, steps, computing, clock, followers, start, watch, ready.readers
    )
    training.stop = stop or StopRequest(request.run_dir)
    if peer_replicas is not None:
        training.checkpoints.possible = peer_replicas.all_say(training.checkpoints.possible)
    training.evaluator.prepare()
    if not any(level.is_fetched for level in plan.sharding.values()):
        keep_freed_memory()  # else memory is what is short: what is freed goes back
    clock.ends("set-up")
    return training


def named_callbacks(context: WorkerContext, train: TrainSettings) -> tuple[Callback, ...]:
    """Makes the callbacks that the train settings name."""
    source = context.request.workload
    makers = find_callbacks(train, source)
    with refusing_changes(built_modules(source), "a callback changes {} while it is made"):
        return require_callbacks([make() for make in makers])


def build_part(context: WorkerContext, ready: Ready) -> tuple[LocalModel, Computing]:
    """What this rank holds of the model, its layers compiled where that is asked for; and what its passes run
    in.
    """
    request = context.request
    model = localise(request, ready.plan, context.rank, context.device, ready.part)
    set_matmul_precision(model.train)
    if request.capture_dir is not None:
        compute_convolutions_in_float32()
    dtype = None if request.dtype is None else dtype_of(request, model.train)
    computing = partial(computing_as_asked, dtype, no_randomness=request.no_randomness)
    with computing():  # compiled code is for the constants' type
        compile_layers(model, context.device)
    return model, computing


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
        shards=model.shards,
        factors=None if model.train.autocast is None else getattr(torch, model.train.autocast),
        runs=frozenset(model.steps[0].slices) if len(model.steps) == 1 else None,
        steady=frozenset(reached_alike(model)),
    )
    modules = (module for local in model.slices.values() for module in local.runnable)
    capture(modules, {id(bucket.parameter): bucket for bucket in pool.gathered})
    return pool


def reached_alike(model: LocalModel) -> Iterator[str]:
    """The trained parameters, by key, that the same backward passes reach in every step: those of operators
    that could be run without values, on samples of one size.
    """
    tasks = model.graph.tasks
    for cut in model.cuts.by_name.values():
        users = [(tasks[task], tasks[task].ops[op]) for task, op in model.table.users[cut.name]]
        if all(op.sees_gradients and not task.varying for task, op in users):
            yield from (cut.key(index) for index in range(cut.count))


def stepped_whole(model: LocalModel) -> Iterator[str]:
    """The trained parameters, by key, whose optimizer state every rank that holds them keeps whole."""
    return (key for key in model.trained if is_stepped_whole(key, model.train, model.groups))


def make_state(context: WorkerContext, model: LocalModel, pool: GradientPool) -> TrainState:
    """Make what a rank trains: its parameters' masters, optimizers, loss scale and outer optimizer."""
    device = context.device
    masters = Masters(pool.owned_ranges) if model.train.precision == "bf16" else None
    owned_ranges = pool.owned_ranges if masters is None else masters.owned_ranges
    optimizers = Optimizers.of(model.train, model.groups, owned_ranges, model.graph.constraints)
    scale = LossScale.of(model.train, device)
    outer = None
    if context.peer_replicas is not None:
        assert model.train.local_sgd is not None, "the plan has islands where the train settings do"
        names = sorted(name for name in model.cuts.by_name if model.table.is_trainable(name))
        outer = OuterOptimizer(model.train.local_sgd, owned_ranges, names, context.peer_replicas)
    return TrainState(
        model, owned_ranges, masters, optimizers, device, pool.fetched, pool.whole, scale, outer
    )


def make_outer_steps(context: WorkerContext, state: TrainState) -> OuterSteps | None:
    """Makes what averages islands now and then; None where all ranks train one model."""
    if context.peer_replicas is None or state.outer is None or state.model.train.local_sgd is None:
        return None
    every = context.request.outer_every or state.model.train.local_sgd.every
    return OuterSteps(context.peer_replicas, state.outer, every)


def join_groups(model: LocalModel, rank: int, communicators: Communicators) -> None:
    """Give the slices that sum inside of their passes the communicators for it."""
    for local in model.slices.values():
        for group in (local.group, local.shares):
            layout = local.wired.layout
            if group is not None and layout.partners(layout.share_of[rank]):
                group.join(communicators.inside(layout, layout.share_of[rank]))


def make_accumulator(context: WorkerContext, model: LocalModel) -> LossAccumulator:
    """Make the accumulator in which a rank adds up the losses of all tasks."""
    shares = {name: task.loss_shares for name, task in model.graph.tasks.items()}
    tasks, batches = model.graph.workload.tasks, model.train.accumulate
    weights = TaskWeights(model.train, tasks)
    return LossAccumulator(
        tasks, context.device, batches, shares, context.rank, dist.get_world_size(), weights
    )


def make_executors(
    context: WorkerContext,
    model: LocalModel,
    pool: GradientPool,
    accumulator: LossAccumulator,
    stopwatch: Stopwatch,
    communicators: Communicators,
    first_step: int,
    at_lengths: TasksAtLengths,
    scale: LossScale | None,
) -> dict[tuple[str, ...], Executor]:
    """What runs this rank's programs, by the tasks of the steps that they are for."""
    host = HostMemory(context.device)
    # Islands draw for themselves what their own ranks draw alike.
    train = model.train.model_copy(update={"seed": model.train.seed + (context.request.island << 40)})
    made = [
        Executor(
            part.program,
            context.rank,
            part.slices,
            Exchange(part.wiring, context.rank, context.device, communicators),
            pool,
            accumulator,
            stopwatch,
            train,
            number,
            partial(at_lengths.of, number),
            host,
            scale,
        )
        for number, part in enumerate(model.steps)
    ]
    labels = [label for executor in made for label in executor.labels[:-1]]
    log = open_action_log(context, [*labels, made[0].labels[-1]], first_step, model.train.accumulate)
    logs = ProgramLog.all_of(log, [len(executor.labels) for executor in made])
    for executor, program_log in zip(made, logs, strict=True):
        executor.note_in(program_log)
    return {part.tasks: executor for part, executor in zip(model.steps, made, strict=True)}


def make_update(state: TrainState) -> Update:
    """Make the update that ends each step of a rank."""
    return Update(
        state.optimizers,
        state.owned_ranges,
        state.masters,
        state.loss_scale,
        state.model.train.clip_norm,
        state.model.train.clip_value,
        state.device,
    )


def make_training(
    context: WorkerContext,
    state: TrainState,
    pool: GradientPool,
    communicators: Communicators,
    steps: range,
    computing: Computing,
    clock: StartClock,
    callbacks: Sequence[Callback],
    start: Start,
    watch: Watch,
    readers: Readers,
) -> Training:
    """Put a rank's parts together; collective. `start`: where training goes on. `watch`: since the workload
    was traced.
    """
    request, model = context.request, state.model
    stopwatch = Stopwatch(context.device, request.timeline_steps, watches_collectives=request.traces)
    pool.watch_with(stopwatch.watch)
    accumulator = make_accumulator(context, model)
    at_lengths = TasksAtLengths(model, request.workload)
    feed = make_feed(context, model, accumulator, steps, start.streams, at_lengths, readers)
    values = StepValues.of(model.graph.workload)
    set_values = make_set_values(context, values, start)
    values.begin(max(0, steps.start - 1))  # as the step before the first one has left them
    evaluator = make_evaluator(context, model, pool, communicators, computing, readers)
    executors = make_executors(
        context, model, pool, accumulator, stopwatch, communicators, steps.start, at_lengths, state.loss_scale
    )
    return Training(
        rank=context.rank,
        request=request,
        steps=steps,
        computing=computing,
        stop=StopRequest(request.run_dir),
        model=model,
        feed=feed,
        executors=executors,
        pool=pool,
        accumulator=accumulator,
        optimizers=state.optimizers,
        update=make_update(state),
        masters=state.masters,
        checkpoints=Checkpoints(request, state, context.rank, steps.start, feed.states, set_values.saved),
        stopwatch=stopwatch,
        log=MetricsLog(request.run_dir, steps.start) if context.rank == 0 else None,
        clock=clock,
        followers=Callbacks(callbacks, context.rank_among_all, request.workload),
        evaluator=evaluator,
        rates=LearningRates(model.train, model.groups, state.optimizers, steps.start),
        work=_work_of_steps(context, model),
        at_lengths=at_lengths,
        following=FollowingParameters(model.graph.following, model, pool, steps.start),
        values=values,
        set_values=set_values,
        watch=watch,
        outer_steps=make_outer_steps(context, state),
    )


def make_evaluator(
    context: WorkerContext,
    model: LocalModel,
    pool: GradientPool,
    communicators: Communicators,
    computing: Computing,
    readers: Readers,
) -> Evaluator:
    """What evaluates the tasks between steps, with the processes started that load for it."""
    passes = start_evaluation_loaders(readers, model.train, Place(context.rank, context.first_of_node))
    return Evaluator(
        model,
        context.request.workload,
        context.rank,
        context.device,
        communicators,
        context.request.timeout_s,
        computing,
        passes,
        pool,
    )


def make_set_values(context: WorkerContext, values: StepValues, start: Start) -> SetValues:
    """What callbacks set.

    Raises:
        WorkloadError: there is such a number, and islands, which take no step together.
    """
    made = SetValues(values, context.rank, start.step_values)
    if context.peer_replicas is not None and made.saved():
        raise WorkloadError(
            f"step_values: {', '.join(made.saved())}: numbers that callbacks set do not go with "
            "train.local_sgd, as islands take no step together",
            hint="Give them a function of the step.",
        )
    return made


def _work_of_steps(context: WorkerContext, model: LocalModel) -> dict[tuple[str, ...], StepWork]:
    """By their tasks, of the steps that the run may take."""
    plan = model.program.plan
    return {
        part.tasks: StepWork.of(plan, model.graph, model.train, part.tasks).on_islands(
            context.request.islands
        )
        for part in model.steps
    }


def open_action_log(
    context: WorkerContext, actions: Sequence[str], first_step: int, batches_per_step: int
) -> ActionLog:
    """Begin the journal of a rank's actions, by their names."""
    path = context.journal
    path.parent.mkdir(exist_ok=True)
    first_batch = first_step * batches_per_step
    return ActionLog(JournalWriter(path, actions, batches_per_step, first_batch), context.device)
