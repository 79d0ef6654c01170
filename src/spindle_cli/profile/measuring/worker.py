"""A worker of `spindle profile`: one process per device, which runs ops as the process that profiles asks.

It also measures what an op saves, and what it computes again, where it is recomputed but for what takes
longest.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, parent_process
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spindle_cli.errors import SpindleError
from spindle_cli.operators.batch_dependent import over_shares, pairs_over_shares
from spindle_cli.operators.heads.chunked import timed_op
from spindle_cli.operators.tensor_parallel import layer_split
from spindle_cli.operators.whole import LayerCompiler, selective_checkpoint
from spindle_cli.process.devices import gpu_of, keep_freed_memory
from spindle_cli.profile.machine.link_speed import measure_link
from spindle_cli.profile.measuring.messages import (
    Failed,
    LinkMeasured,
    Measure,
    Measured,
    MeasureLink,
    MeasureOptimizer,
    OptimizerMeasured,
    Prepare,
    Prepared,
    Reply,
    Request,
    Started,
    WorkerSettings,
)
from spindle_cli.profile.op.failing import failures_told, is_out_of_memory, split_failures_told
from spindle_cli.profile.op.inputs import ChainInputs
from spindle_cli.profile.op.op_memory import LEAST_SELECTED_BYTES, may_select, with_selective
from spindle_cli.profile.op.op_run import Clock, CudaClock, OpRun, TurnsClock, WallClock
from spindle_cli.profile.op.optimizer_run import OptimizerRun, trained_shapes
from spindle_cli.profile.op.split_runs import SumCounter, equal_cuts, one_part
from spindle_cli.profile.op.stand_ins import Analysed, give_parameters, load_analysed
from spindle_cli.profile.op.tensor_parallel import OwnPositions
from spindle_cli.profile.op.timings import Limits, Sample, is_enough
from spindle_cli.profile.types import SelectiveMemory, ShareMemory
from spindle_cli.training.precision import Computing, set_matmul_precision, widen_gradients
from spindle_cli.units import MIB

if TYPE_CHECKING:
    from torch import Tensor


# Copies of an op run one after the other until they touch so many bytes, by kind of device: more than caches
# hold (a server's core has a few MiB of its own and of the last level; an H200 has 50 MB).
WORKING_SET_BYTES = {"cpu": 32 * MIB, "cuda": 128 * MIB}
MOST_COPIES = 16


@dataclass(frozen=True)
class Lockstep:
    """What the workers share: a barrier before every repeat, and the number of repeats to make.

    The first worker sets the number once it has seen enough; 0 until then. A number and not a flag: a slow
    worker may look at it only when the first has already made the next repeat.
    """

    barrier: Any  # multiprocessing's Barrier
    num_repeats: Any  # multiprocessing's Value


def run_worker(
    rank: int,
    settings: WorkerSettings,
    analysed: Analysed | None,
    lockstep: Lockstep,
    pipe: connection.Connection,
    inherited: Sequence[connection.Connection] = (),
) -> None:
    """Answer requests from `pipe` until it is closed or the parent process ends.

    Args:
        analysed: the workload, if the parent could hand it over; else it is loaded here.
        inherited: the parent's ends of pipes that this process has as well: it closes its own of them.
    """
    for end in inherited:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    _end_with_parent()
    try:
        worker = _Worker(rank, settings, analysed, lockstep)
    except Exception as error:
        pipe.send(_failure(error))
        return
    pipe.send(Started())
    while True:
        try:
            request: Request = pipe.recv()
        except EOFError:
            return
        pipe.send(worker.answer(request))


class _Worker:
    def __init__(
        self, rank: int, settings: WorkerSettings, analysed: Analysed | None, lockstep: Lockstep
    ) -> None:
        torch.set_num_threads(settings.threads)
        keep_freed_memory()  # as the workers that train do
        self._lockstep = lockstep
        self._is_first = rank == 0
        self._device = torch.device("cpu")
        if settings.device == "cuda":
            self._device = torch.device("cuda", gpu_of(rank))
            torch.cuda.set_device(self._device)
        workload = analysed or load_analysed(settings.source, settings.folder, settings.lengths)
        self._graph = workload.graph
        wanted = set(settings.stand_ins.values())
        give_parameters(self._graph, sorted(wanted))
        self._train = workload.loaded.train
        set_matmul_precision(self._train)
        self._compiler = LayerCompiler.of(self._train)
        self._inputs = ChainInputs(self._graph, settings.stand_ins, wanted, self._train, self._device)
        self._clock = _clock(settings)
        self._run: OpRun | None = None

    def answer(self, request: Request) -> Reply:
        try:
            match request:
                case Prepare():
                    return self._prepare(request)
                case Measure():
                    return Measured(tuple(self._measure(request)))
                case MeasureOptimizer():
                    return self._measure_optimizer(request)
                case MeasureLink():
                    limit_s = request.limits.max_s
                    return LinkMeasured(measure_link(request.rank, request.store, self._device, limit_s))
        except (
            Exception
        ) as error:  # the parent decides; a worker that just ends would only be seen to be gone
            self._run = None
            return _failure(error)

    def _prepare(self, request: Prepare) -> Prepared:
        self._run = None  # frees the one before
        ref = request.job.op
        task = self._graph.tasks[ref.task]
        op = task.ops[ref.op]
        sums = SumCounter((0,), 0, self._device)
        split = None
        if request.job.tp > 1:
            split = layer_split(self._graph.workload, task, op, request.job.tp)
            assert split is not None, "a job is made only where the op can be split"
        vocabulary = None if split is None else split.vocabulary_shard(sums)
        timed = timed_op(task, op, request.job.rows, self._train.loss_chunks, vocabulary)
        whole = timed.module.to(self._device)
        module: nn.Module = whole
        positions = OwnPositions(split, sums, self._inputs.take(ref, request.job.rows))
        if split is not None:
            module = positions.called(one_part(module, split, sums))
        elif request.job.sums_shares:
            module = over_shares(whole, whole, sums)
            module = pairs_over_shares(module, task, op, sums, equal_cuts(task, request.job.rows))
        elif self._compiler is not None and not (op.asks_gradients or op.draws_own):
            module = self._compiler.compile_layer(whole, op.target)
        if not request.job.sums_shares:
            module = over_shares(module, whole, None)
        module = timed.called(module)
        widen_gradients(module.parameters(), self._train)
        module = Computing(module, self._train, self._device.type)
        self._run = OpRun(module, positions.inputs, len(op.fields), self._clock)
        rows, tp = request.job.rows, request.job.tp
        with failures_told(task, op, rows) if split is None else split_failures_told(task, op, tp):
            self._run.repeat(1)
        counted = sums.take()
        once_s = self._run.repeat(1).total_s
        # After a first run, which may have allocated what the libraries then keep.
        kept_bytes = self._run.kept_bytes()
        memory = self._run.memory()
        job = request.job
        if self._compiler is None and may_select(
            op, is_split=job.tp > 1, sums_shares=job.sums_shares, loss_chunks=timed.loss_chunks
        ):
            memory = measure_selective(self._run, memory)
        most = min(MOST_COPIES, int(request.limits.copies_s / max(once_s, 1e-9)))
        self._run.spread(WORKING_SET_BYTES[self._device.type], most)
        return Prepared(self._run.warm_up(request.limits), kept_bytes, memory, counted, timed.loss_chunks)

    def _measure_optimizer(self, request: MeasureOptimizer) -> OptimizerMeasured:
        """A device's part of the model is not known yet, so as much of it as fits a limit stands for it."""
        self._run = None
        step = OptimizerRun(self._train, trained_shapes(self._graph, self._train), self._device, self._clock)
        if step.num_bytes == 0:
            return OptimizerMeasured(0.0)
        samples = self._repeat(partial(step.repeat, step.warm_up(request.limits)), request.limits)
        return OptimizerMeasured(median(sample.total_s for sample in samples) / step.num_bytes)

    def _measure(self, request: Measure) -> list[Sample]:
        assert self._run is not None, "asked to measure before prepare"
        return self._repeat(partial(self._run.repeat, request.runs), request.limits)

    def _repeat(self, repeat: Callable[[], Sample], limits: Limits) -> list[Sample]:
        """Repeats in lockstep with the other workers, until the first of them has enough."""
        samples: list[Sample] = []
        started = time.perf_counter()
        gc.disable()
        try:
            while True:
                self._lockstep.barrier.wait()
                if 0 < self._lockstep.num_repeats.value <= len(samples):
                    return samples
                samples.append(repeat())
                if self._is_first and is_enough(samples, time.perf_counter() - started, limits):
                    self._lockstep.num_repeats.value = len(samples)
        except BaseException:
            self._lockstep.barrier.abort()
            raise
        finally:
            gc.enable()


def _clock(settings: WorkerSettings) -> Clock:
    if settings.device == "cuda":
        return CudaClock()
    return TurnsClock(settings.processes_per_core) if settings.threads == 1 else WallClock()


def _failure(error: Exception) -> Failed:
    if isinstance(error, SpindleError):
        return Failed(error.message, error.hint, None, is_users=True)
    text = f"{type(error).__name__}: {error}"
    full = "".join(traceback.format_exception(error))
    return Failed(text, None, full, out_of_memory=is_out_of_memory(error))


def _end_with_parent() -> None:
    """End this process when its parent has ended, even if that was killed."""
    parent = parent_process()
    assert parent is not None

    def watch(sentinel: int) -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()


# How often both ways are timed, by turns.
_REPEATS = 5
# Relative, by the type that is computed in: the same kernels run on the same numbers.
_TOLERANCE, _NARROW_TOLERANCE = 1e-3, 2e-2


def measure_selective(run: OpRun, memory: ShareMemory) -> ShareMemory:
    """Run an op both ways; `memory` as it is where that saves too little, where gradients are others, or
    where torch refuses it, as it does where an op changes in place what would be kept.

    Args:
        run: the op, warm.
        memory: what it takes where nothing is recomputed.
    """
    is_trained = any(source.requires_grad for source in (*run.module.parameters(), *run.inputs))
    if memory.kept_bytes < LEAST_SELECTED_BYTES or not is_trained:
        return memory
    selecting = OpRun(Selecting(run.module), run.inputs, run.num_fields, run.clock)
    try:
        if not _same_gradients(run, selecting):
            return memory
        kept_bytes = selecting.memory().kept_bytes
    except RuntimeError:  # torch's, or of `selective_checkpoint`: the op itself has run before
        return memory
    pairs = [(run.repeat(1), selecting.repeat(1)) for _ in range(_REPEATS)]
    # The shortest of each: what other programs take only adds to a time, and much to a difference of two.
    again_s = min(chosen.total_s for _, chosen in pairs) - min(plain.total_s for plain, _ in pairs)
    forward_s = min(plain.forward_s for plain, _ in pairs)
    share = min(max(again_s, 0.0) / forward_s, 1.0) if forward_s > 0 else 1.0
    return with_selective(memory, SelectiveMemory(kept_bytes=kept_bytes, share=share))


class Selecting(nn.Module):
    """An op that is recomputed but for what takes longest."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        """Run the op."""
        return selective_checkpoint(self.module, arguments)


def _same_gradients(first: OpRun, second: OpRun) -> bool:
    """Whether both give the same gradients, for the same random numbers."""
    for ours, theirs in zip(_gradients(first), _gradients(second), strict=True):
        is_narrow = ours.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(
            ours.device.type
        )
        tolerance = _NARROW_TOLERANCE if is_narrow else _TOLERANCE
        if not bool((ours - theirs).norm() <= tolerance * ours.norm()):
            return False
    return True


def _gradients(run: OpRun) -> Sequence[Tensor]:
    """Return the gradients of a run's parameters and inputs, and what it gives."""
    devices = [tensor.device for tensor in run.inputs if tensor.is_cuda][:1]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        outputs = run.module(*run.inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        ends = [output for output in outputs if output.requires_grad]
        sources = [*run.module.parameters(), *run.inputs]
        wanted = [source for source in sources if source.requires_grad]
        gradients = torch.autograd.grad(
            ends, wanted, [torch.randn_like(end) for end in ends], allow_unused=True
        )
    return [tensor.detach() for tensor in (*outputs, *gradients) if tensor is not None]
