"""Scaling curves measured on this machine's devices, and what takes a processor's time in training beside the
ops: communication and reading samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console

from spindle_cli.errors import RunFailedError
from spindle_cli.files.artifact import sha256_of, write_json
from spindle_cli.files.cluster import Cluster, Links, NodeGroup
from spindle_cli.process.devices import cores_of_time
from spindle_cli.profile.assemble import Extent, Times, assemble
from spindle_cli.profile.machine.link_speed import as_link, compute_beside, values_beside
from spindle_cli.profile.machine.machine import (
    DeviceType,
    describe_device,
    own_cores,
)
from spindle_cli.profile.measuring.messages import WorkerSettings
from spindle_cli.profile.measuring.noise import (
    ONE_AGAIN_IN,
    is_unsteady,
    noise_of,
    require_quiet,
    steadier,
    taken_by_others,
    warning,
    work_so_far,
)
from spindle_cli.profile.measuring.partial import ResumeFile
from spindle_cli.profile.measuring.pool import DoesNotFitError, JobSamples, WorkerPool
from spindle_cli.profile.measuring.progress import steps_bar
from spindle_cli.profile.measuring.settings import MeasureSettings, Reused
from spindle_cli.profile.op.counting import count_work
from spindle_cli.profile.op.jobs import Job, JobTable, OpRef, make_jobs
from spindle_cli.profile.op.stand_ins import Analysed
from spindle_cli.profile.op.timings import slowest_of, summarise
from spindle_cli.profile.types import (
    Device,
    MeasuredLink,
    Measurements,
    Noise,
    OpTiming,
    ProcessorCosts,
    Profile,
    RuntimeOverhead,
)
from spindle_cli.training.batches import Batches
from spindle_cli.training.data.streams import is_stream
from spindle_cli.training.items import DrawsError
from spindle_cli.workload.graph import WorkloadGraph

# Samples of a task that are read at least, and about as many seconds of reading its batch again and again.
_FEW_SAMPLES = 16
_LOAD_S = 0.1
_MOST_READS = 8


def measure(
    analysed: Analysed,
    settings: MeasureSettings,
    *,
    folder: Path,
    out: Path,
    console: Console,
    note: Callable[[str], None],
    reused: Reused | None = None,
) -> Profile:
    """Measure a workload in worker processes and write its profile to `out`.

    Results so far are kept beside `out` until it is written; those of an interrupted run are used.

    Args:
        analysed: the workload; the workers make what parameters they need.
        folder: that the workload's source is relative to.
        note: says something to the user.
        reused: another profile, of which what it has measured alike is taken.

    Raises:
        InputError: the other profile was not measured under the same conditions.
        RunFailedError: a process died, an op fits the memory on no share, or the machine was too busy.
    """
    graph = analysed.graph
    table = make_jobs(graph, settings.max_devices, settings.max_points, settings.degrees)
    device = describe_device(settings.device, settings.processes, settings.called)
    kept = ResumeFile(out, _conditions(graph, settings, device), accepts_noise=settings.accepts_noise)
    if reused is not None:
        reused.require_same(settings, device)
        note(reused.hand_over(kept, [job.key for job in table.jobs]))
    if kept.resumed:
        note(f"going on from {kept.path}: {kept.resumed} measurements were already made")
    workers = WorkerSettings(
        source=analysed.loaded.source,
        folder=folder,
        device=settings.device,
        threads=settings.threads,
        processes_per_core=settings.processes / cores_of_time(),
        stand_ins=table.stand_ins,
        lengths=graph.lengths,
    )
    measuring = _Measuring(table, settings, kept, console)
    measuring.run(workers, analysed)
    if settings.overhead is not None and kept.overhead is None and turns_of(settings):
        kept.add_overhead(settings.overhead(settings.processes, settings.threads))
    noise = measuring.noise()
    _judge(noise, kept, settings, note)
    for job in table.jobs:
        if job.key in kept.failed:
            note(f"{job.label} does not fit the device's memory; allocations that need it are left out")
    profile = _assembled(analysed, settings, table, kept, noise, device)
    write_json(out, profile)
    kept.remove()
    return profile


def _assembled(
    analysed: Analysed,
    settings: MeasureSettings,
    table: JobTable,
    kept: ResumeFile,
    noise: Noise,
    device: Device,
) -> Profile:
    """Return the profile of what was measured."""
    graph, loaded = analysed.graph, analysed.loaded
    times = Times(
        by_key=kept.timings,
        by_tp={tp: _split(table, kept.timings, tp) for tp in settings.degrees},
        flops=_count_flops(graph, table),
        source_of=settings.source_of,
        value_bytes=lambda value: value.num_bytes,
        cluster=settings.planned_for or _own_cluster(settings, kept),
    )
    measurements = Measurements(
        nproc=settings.nproc,
        links=settings.links,
        timings=kept.timings,
        failed=tuple(sorted(kept.failed)),
    )
    return assemble(
        graph,
        table,
        times,
        Extent(settings.max_devices, settings.max_points),
        source=loaded.source,
        train=loaded.train,
        device=device,
        environment=settings.environment(),
        optimizer_s_per_byte=kept.optimizer_s_per_byte or 0.0,
        processor=_beside(analysed, settings, kept),
        noise=noise,
        links=kept.links or (),
        measurements=measurements,
        numeric_check=analysed.check,
    )


def _own_cluster(settings: MeasureSettings, kept: ResumeFile) -> Cluster | None:
    """Make a cluster of as many devices as curves reach to, linked as measured; None where no link was."""
    if not kept.links:
        return None
    link = as_link(kept.links[0])
    node = NodeGroup(devices=settings.max_devices, device=settings.device, memory_gib=1)
    return Cluster(name="measured", nodes=(node,), links=Links(intra_node=link, inter_node=link))


def _judge(noise: Noise, kept: ResumeFile, settings: MeasureSettings, note: Callable[[str], None]) -> None:
    if not settings.accepts_noise:
        try:
            require_quiet(noise)
        except RunFailedError:
            kept.add_noise(noise)
            raise
    said = warning(noise)
    if said is not None:
        note(said)


def _beside(analysed: Analysed, settings: MeasureSettings, kept: ResumeFile) -> ProcessorCosts:
    turns = turns_of(settings)
    link = kept.links[0] if kept.links else None
    load_s = load_times(analysed.graph, analysed.loaded.train.seed) if turns else {}
    return processor_costs(turns, link, load_s, kept.overhead)


def turns_of(settings: MeasureSettings) -> float:
    """Seconds of a device for each second of what its processor does beside the ops (`turns_beside`)."""
    return turns_beside(settings.device, settings.processes, settings.threads, cores_of_time())


class _Measuring:
    def __init__(
        self, table: JobTable, settings: MeasureSettings, kept: ResumeFile, console: Console
    ) -> None:
        self._settings = settings
        self._kept = kept
        self._console = console
        self._todo = [job for job in table.jobs if job.key not in kept.timings and job.key not in kept.failed]
        self._measures_links = settings.processes > 1 and kept.links is None
        self._measures_optimizer = kept.optimizer_s_per_byte is None
        self._others_share = 0.0 if kept.noise is None else kept.noise.others_share
        self._measured_again = 0

    def noise(self) -> Noise:
        """Return how noisy all measurements were that there are now."""
        return noise_of(self._others_share, self._kept.timings.values(), self._measured_again)

    def run(self, workers: WorkerSettings, analysed: Analysed) -> None:
        """Do what is not done yet."""
        total = len(self._todo) + self._measures_links + self._measures_optimizer
        if not total:
            return
        # The workers first: they may be forked, which is no good once the bar's thread runs.
        with (
            WorkerPool(self._settings.processes, workers, analysed) as pool,
            steps_bar(total, self._console) as steps,
        ):
            steps.start(f"starting {self._settings.processes} processes")
            pool.wait_until_started()
            before = work_so_far(time.perf_counter(), pool.processes)
            if self._measures_links:
                steps.start("link between two processes")
                self._kept.add_links((pool.measure_link(self._settings.limits),))
                steps.done()
            if self._measures_optimizer:
                steps.start("optimizer step")
                self._kept.add_optimizer(pool.measure_optimizer(self._settings.limits))
                steps.done()
            for job in self._todo:
                steps.start(job.label)
                try:
                    self._kept.add_timing(job.key, self._steady(pool, job))
                except DoesNotFitError:
                    self._kept.add_failed(job.key)
                steps.done()
            after = work_so_far(time.perf_counter(), pool.processes)
        if self._settings.device == "cpu":
            now = taken_by_others(before, after, len(own_cores()))
            self._others_share = max(self._others_share, now)

    def _steady(self, pool: WorkerPool, job: Job) -> OpTiming:
        """One job's times; where they vary, the steadier of two tries."""
        timing = self._timing(pool.run(job, self._settings.limits), job)
        if is_unsteady(timing) and self._measured_again * ONE_AGAIN_IN < len(self._todo):
            self._measured_again += 1
            timing = steadier(timing, self._timing(pool.run(job, self._settings.limits), job))
        return timing

    def _timing(self, seen: JobSamples, job: Job) -> OpTiming:
        if self._settings.nproc > 1:
            slowest = slowest_of(seen.per_process[: self._settings.nproc])
        else:
            slowest = (summarise(seen.per_process[0]),)
        if job.tp > 1 and self._settings.cluster is not None:
            slowest = tuple(seen.sums.added_to(times, job.tp, self._settings.cluster) for times in slowest)
        return OpTiming(
            slowest=slowest,
            activation_bytes=seen.activation_bytes,
            memory=seen.memory,
            batch_sums=seen.sums.as_batch_sums() if job.sums_shares else (),
            loss_chunks=seen.loss_chunks,
        )


def _split(table: JobTable, timings: Mapping[str, OpTiming], tp: int) -> dict[str, OpTiming]:
    """Return the timings of the ops that are split so many ways, by the key of the whole op."""
    return {
        table.key(job.op, job.rows): timings[job.key]
        for job in table.jobs
        if job.tp == tp and job.key in timings
    }


def _conditions(graph: WorkloadGraph, settings: MeasureSettings, device: Device) -> str:
    """Hash of all that measurements depend on: under other conditions they are made anew."""
    return sha256_of(
        {
            "fingerprint": graph.fingerprint,
            "device": device.model_dump(),
            "environment": settings.environment(),
            "nproc": settings.nproc,
            "links": settings.links,
        }
    )


def _count_flops(graph: WorkloadGraph, table: JobTable) -> Mapping[OpRef, float]:
    """Count each op's forward operations for the whole batch, of equal ops once."""
    counted: dict[str, float] = {}
    flops: dict[OpRef, float] = {}
    for op in table.class_of:
        task = graph.tasks[op.task]
        key = table.key(op, task.task.batch_size)
        if key not in counted:
            counted[key] = count_work(task, task.ops[op.op], task.task.batch_size, "float32").forward_flops
        flops[op] = counted[key]
    return flops


def turns_beside(device: DeviceType, processes: int, threads: int, cores: float) -> float:
    """Seconds of a device for each second of such work: none where cores are left that do it.

    Where processes outnumber cores, or the cores' worth of time that they are granted, each takes turns with
    the others, as with its ops.
    """
    if device != "cpu" or processes * threads < cores:
        return 0.0
    return max(1.0, processes / cores)


def processor_costs(
    turns: float,
    link: MeasuredLink | None,
    load_s: dict[str, float],
    overhead: RuntimeOverhead | None = None,
) -> ProcessorCosts:
    """What a device's processor does beside the ops.

    `load_s`: processor time of each task's samples. `overhead`: of the runtime.
    """
    return ProcessorCosts(
        message_s=0.0 if link is None else turns * link.message_processor_s,
        s_per_byte=0.0 if link is None else turns * link.processor_s_per_byte,
        load_s={task: turns * seconds for task, seconds in load_s.items()} if turns else {},
        step_s=0.0 if overhead is None else turns * overhead.step_s,
        pass_s=0.0 if overhead is None else turns * overhead.pass_s,
    )


def load_times(graph: WorkloadGraph, seed: int) -> dict[str, float]:
    """Processor seconds of reading and collating one sample, by task, of those that training reads beside the
    ops: streams are read by processes of their own.

    Raises:
        WorkloadError: a dataset has fewer samples than a batch, or they cannot be collated.
    """
    return {
        name: (_load_whole_s if traced.varying else _load_s)(
            Batches(traced.task, seed, one_shape=not traced.varying)
        )
        for name, traced in graph.tasks.items()
        if not is_stream(traced.task)
    }


def _load_whole_s(batches: Batches) -> float:
    """Time the loading of whole batches of several lengths, which are only collated whole, each once."""
    batch_size = batches.task.batch_size
    seconds: list[float] = []
    with _Reading(batches) as reading:
        for number in range(min(_MOST_READS, batches.steps_per_epoch)):
            if sum(seconds) * batch_size > _LOAD_S:
                break
            seconds.append(reading.sample_s(batch_size, number))
    return median(seconds[2:] or seconds)


def _load_s(batches: Batches) -> float:
    batch_size = batches.task.batch_size
    few = min(_FEW_SAMPLES, batch_size)
    batches.rows(0, 0, few)
    with _Reading(batches) as reading:
        seconds = [reading.sample_s(few)]
        count = batch_size if seconds[0] * batch_size <= _LOAD_S else few
        # The first reading of a batch fills what datasets and allocators keep.
        while len(seconds) <= _MOST_READS and sum(seconds) * count <= _LOAD_S:
            seconds.append(reading.sample_s(count))
    return median(seconds[2:] or seconds)


class _Reading(AbstractContextManager["_Reading"]):
    """Reads batches as training does: in one thread beside the main one, which computes and which it shares
    the interpreter with; what draws random numbers is read by the main one.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._thread = ThreadPoolExecutor(1)
        self._beside = values_beside()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def sample_s(self, count: int, number: int = 0) -> float:
        """Processor seconds for each of the first `count` samples of a batch."""
        if not self._batches.draws:
            with suppress(DrawsError):
                taken = self._thread.submit(
                    _thread_s, partial(self._batches.rows_without_draws, number, 0, count)
                )
                compute_beside(self._beside, taken.done)
                return taken.result() / count
        return _thread_s(partial(self._batches.rows, number, 0, count)) / count


def _thread_s(call: Callable[[], object]) -> float:
    """Return the processor seconds that a call takes of this thread."""
    begin_s = time.thread_time()
    call()
    return time.thread_time() - begin_s
