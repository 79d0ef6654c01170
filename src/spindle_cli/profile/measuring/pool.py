"""The workers of `spindle profile`: started, asked, and ended together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from spindle_cli.errors import RunFailedError, WorkloadError
from spindle_cli.process.devices import may_fork
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
from spindle_cli.profile.measuring.worker import Lockstep, run_worker
from spindle_cli.profile.op.jobs import Job
from spindle_cli.profile.op.split_runs import SplitSums
from spindle_cli.profile.op.stand_ins import Analysed
from spindle_cli.profile.op.timings import Limits, Sample, runs_per_repeat
from spindle_cli.profile.types import MeasuredLink, ShareMemory

R = TypeVar("R", bound=Reply)
_GOODBYE_S = 2.0


@dataclass(frozen=True)
class JobSamples:
    """What the workers saw of one job: a sample per repeat, by worker; bytes that one share keeps; what one
    part of a split op has to sum with the others; in how many chunks a loss is computed.
    """

    per_process: tuple[tuple[Sample, ...], ...]
    activation_bytes: int
    memory: ShareMemory
    sums: SplitSums
    loss_chunks: int = 1


class DoesNotFitError(Exception):
    """A share does not fit the device's memory."""


class WorkerPool:
    """As many worker processes as a node has devices; a context that ends them.

    All of them run every job at the same moments, so that each is measured with the node's other devices busy
    as in training.
    """

    def __init__(self, processes: int, settings: WorkerSettings, analysed: Analysed) -> None:
        forks = settings.device == "cpu" and settings.threads == 1 and may_fork()
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        handed_over = analysed if forks else None
        # Held here as well: a semaphore goes with the process's last reference, perhaps before the workers
        # have it.
        self._lockstep = Lockstep(context.Barrier(processes), context.Value("b", 0, lock=False))
        self._workers: list[BaseProcess] = []
        self._pipes: list[connection.Connection] = []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            # What is forked has these as well; it would wait for them to be closed, too.
            inherited = tuple(self._pipes) if forks else ()
            worker = context.Process(
                target=run_worker,
                args=(rank, settings, handed_over, self._lockstep, theirs, inherited),
                name=f"profile-{rank}",
                daemon=True,
            )
            worker.start()
            theirs.close()
            self._workers.append(worker)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        # A worker ends by itself when its pipe is closed, unless it is in the middle of a job; where all have
        # answered, none is. One that is killed leaves semaphores of libraries' behind.
        if kind is None or issubclass(kind, WorkloadError):
            for worker in self._workers:
                worker.join(_GOODBYE_S)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()

    @property
    def processes(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    def wait_until_started(self) -> None:
        """Return when every worker has loaded the workload.

        Raises:
            WorkloadError: it cannot be loaded.
            RunFailedError: a worker died.
        """
        self._replies(range(len(self._pipes)), Started)

    def run(self, job: Job, limits: Limits) -> JobSamples:
        """Time one job on all workers at once.

        Raises:
            DoesNotFitError: the share does not fit the device's memory.
            RunFailedError: a worker died or failed.
        """
        prepared = self._ask(Prepare(job, limits), Prepared)
        runs = runs_per_repeat(max(reply.run_s for reply in prepared), limits)
        self._lockstep.num_repeats.value = 0
        measured = self._ask(Measure(runs, limits), Measured)
        samples = tuple(reply.samples for reply in measured)
        first = prepared[0]
        return JobSamples(samples, first.activation_bytes, first.memory, first.sums, first.loss_chunks)

    def measure_link(self, limits: Limits) -> MeasuredLink:
        """Time messages between neighbours (0 and 1, 2 and 3, ...), all at once as in training; of those that
        were stopped least, so that the smallest messages took them least.

        There have to be at least two workers.
        """
        paired = range(len(self._pipes) // 2 * 2)
        with TemporaryDirectory() as folder:
            for rank in paired:
                self._pipes[rank].send(MeasureLink(Path(folder) / f"pair-{rank // 2}", rank % 2, limits))
            replies = self._replies(paired, LinkMeasured)
            return min((reply.link for reply in replies), key=lambda link: link.latency_s)

    def measure_optimizer(self, limits: Limits) -> float:
        """Seconds of the optimizer's step for each byte that a worker updates; of the slowest worker."""
        self._lockstep.num_repeats.value = 0
        replies = self._ask(MeasureOptimizer(limits), OptimizerMeasured)
        return max(reply.s_per_byte for reply in replies)

    def _ask(self, request: Request, reply: type[R]) -> list[R]:
        for pipe in self._pipes:
            pipe.send(request)
        return self._replies(range(len(self._pipes)), reply)

    def _replies(self, ranks: Sequence[int], expected: type[R]) -> list[R]:
        """One reply of each of `ranks`. A failure counts once all have answered, a death at once."""
        replies: dict[int, Reply] = {}
        while len(replies) < len(ranks):
            waiting = [rank for rank in ranks if rank not in replies]
            ready = connection.wait([self._pipes[rank] for rank in waiting])
            for rank in waiting:
                if self._pipes[rank] in ready:
                    replies[rank] = self._receive(rank)
        failures = [reply for reply in replies.values() if isinstance(reply, Failed)]
        if failures:
            _raise(failures)
        return [reply for rank in ranks if isinstance(reply := replies[rank], expected)]

    def _receive(self, rank: int) -> Reply:
        try:
            reply: Reply = self._pipes[rank].recv()
        except EOFError as error:
            self._workers[rank].join()
            code = self._workers[rank].exitcode
            raise RunFailedError(
                f"profiling process {rank} ended with exit code {code} while it was measuring",
                hint="It may have run out of memory: use fewer processes (--nproc) or a smaller batch. "
                "What was measured so far is kept; the same command goes on from there.",
            ) from error
        return reply


def _raise(failures: Sequence[Failed]) -> None:
    # A worker that waits for a failed one fails too, with a broken barrier; the cause is the other's.
    first = next((f for f in failures if "BrokenBarrier" not in f.message), failures[0])
    if any(failure.out_of_memory for failure in failures):
        raise DoesNotFitError(first.message)
    if first.is_users:
        raise WorkloadError(first.message, hint=first.hint)
    raise RunFailedError(
        f"a profiling process failed: {first.message}\n{first.traceback or ''}".rstrip(), hint=first.hint
    )
