"""Scaling curves from published peaks: no device, no parameters, nothing run.

An op's work on a number of samples is taken from that on fewer and on more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from rich.console import Console

from spindle_cli.costs.flops import Arithmetic
from spindle_cli.costs.links import all_gather_s, all_reduce_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.operators.tensor_parallel import LayerSplit, layer_split
from spindle_cli.profile.assemble import Extent, Times, assemble
from spindle_cli.profile.estimating.fake_memory import fake_memory
from spindle_cli.profile.machine.devices import DevicePeak
from spindle_cli.profile.machine.roofline import Kernel, kernels_s, update_s_per_byte
from spindle_cli.profile.measuring.progress import steps_bar
from spindle_cli.profile.op.counting import Work, count_work, value_bytes
from spindle_cli.profile.op.jobs import Job, JobTable, OpRef, make_jobs
from spindle_cli.profile.op.op_memory import may_select
from spindle_cli.profile.op.stand_ins import Analysed
from spindle_cli.profile.types import Device, OpTiming, PhaseTimes, Profile, ShareMemory
from spindle_cli.training.optimizing.groups import kept_per_param
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import Op, TaskGraph, WorkloadGraph

# Every valid number of devices gets its own point: an estimate costs next to nothing.
_ALL_POINTS = 10**6


@dataclass(frozen=True)
class EstimateSettings:
    """What to estimate for: the device as the cluster file names it, up to how many, and the arithmetic.

    `cluster`: whose links tensor parallelism and the statistics of batch norms use; without one tensor
    parallelism is not estimated. `degrees`: of tensor parallelism.
    """

    device_name: str
    device: DevicePeak
    max_devices: int
    precision: Arithmetic
    cluster: Cluster | None = None
    degrees: tuple[int, ...] = ()

    def environment(self) -> dict[str, Any]:
        """Return what the times rest on, for the profile."""
        return {"model": "roofline", "precision": self.precision}


def estimate(analysed: Analysed, settings: EstimateSettings, console: Console) -> Profile:
    """Return the profile of a workload for a listed device, every point 'estimated'.

    The work of each op comes from running it on tensors without data, its time from a roofline
    (`roofline.py`). With data parallelism alone an op communicates nothing but statistics of batch norms, so
    one device's share is the whole op's time; under tensor parallelism (`tensor_parallel.py`) it sums
    activations inside a node.

    Raises:
        WorkloadError: the workload's `tp_plans` do not fit its layers.
    """
    graph = analysed.graph
    table = make_jobs(graph, settings.max_devices, _ALL_POINTS)
    timings: dict[str, OpTiming] = {}
    by_tp: dict[int, dict[str, OpTiming]] = {}
    flops: dict[str, float] = {}
    with steps_bar(len(table.jobs), console) as steps:
        for job, work, memory in _count_all(analysed, table, settings, 1):
            steps.start(job.label)
            timings[job.key] = _timing(work, memory, settings)
            flops[job.key] = _forward_flops(graph, job, work, settings.precision)
            steps.done()
        for degree in settings.degrees:
            works = _count_all(analysed, table, settings, degree)
            by_tp[degree] = {job.key: _timing(work, memory, settings, degree) for job, work, memory in works}
    times = Times(
        by_key=timings,
        by_tp=by_tp,
        flops=_whole_batch(graph, table, flops),
        source_of=lambda _, __: "estimated",
        value_bytes=partial(value_bytes, precision=_between_devices(analysed.loaded.train, settings)),
        cluster=settings.cluster,
    )
    return assemble(
        graph,
        table,
        times,
        Extent(settings.max_devices, _ALL_POINTS),
        source=analysed.loaded.source,
        train=analysed.loaded.train,
        device=Device(
            type=settings.device_name, name=settings.device.name, memory_bytes=settings.device.memory_bytes
        ),
        environment=settings.environment(),
        optimizer_s_per_byte=update_s_per_byte(kept_per_param(analysed.loaded.train, graph), settings.device),
        numeric_check=analysed.check,
    )


def _count_all(
    analysed: Analysed, table: JobTable, settings: EstimateSettings, degree: int
) -> Iterator[tuple[Job, Work, ShareMemory | None]]:
    """Yield the work of every job, of those that it can be done for under tensor parallelism of this degree.

    Of an op's shares the smallest and largest are counted, those between follow; memory is looked at for
    these two alone.
    """
    graph, train, precision = analysed.graph, analysed.loaded.train, settings.precision
    for ref, group in groupby(table.jobs, key=lambda job: job.op):
        task = graph.tasks[ref.task]
        op = task.ops[ref.op]
        split = layer_split(graph.workload, task, op, degree) if degree > 1 else None
        if degree > 1 and split is None:
            continue

        def count(job: Job, task: TaskGraph = task, op: Op = op, split: LayerSplit | None = split) -> Work:
            return count_work(
                task,
                op,
                job.rows,
                precision,
                split,
                sums_shares=job.sums_shares,
                loss_chunks=train.loss_chunks,
            )

        for sums_shares, alike in groupby(sorted(group, key=_sums_shares), _sums_shares):
            jobs = list(alike)
            most, fewest = jobs[0], jobs[-1]
            many = count(most)
            few = many if fewest is most else count(fewest)
            for job in jobs:
                if job is most or job is fewest:
                    work = many if job is most else few
                    selects = may_select(
                        op, is_split=degree > 1, sums_shares=sums_shares, loss_chunks=work.loss_chunks
                    )
                    again = _share_again(work, settings) if selects and train.compile is None else None
                    yield (
                        job,
                        work,
                        fake_memory(
                            task, op, job.rows, precision, train, split, sums_shares=sums_shares, again=again
                        ),
                    )
                else:
                    yield job, between(few, many, fewest.rows, most.rows, job.rows) or count(job), None


def _share_again(work: Work, settings: EstimateSettings) -> float:
    """Return the share of an op's forward pass that runs again where all but what takes longest is
    recomputed.
    """
    again_s, forward_s = (
        kernels_s(kernels, settings.device, settings.precision) for kernels in (work.again, work.forward)
    )
    return min(again_s / forward_s, 1.0) if forward_s > 0 else 1.0


def _forward_flops(graph: WorkloadGraph, job: Job, work: Work, precision: Arithmetic) -> float:
    """Count the work of the forward pass alone; that of a loss in chunks makes gradients too."""
    if work.loss_chunks == 1:
        return work.forward_flops
    task = graph.tasks[job.op.task]
    return count_work(task, task.ops[job.op.op], job.rows, precision).forward_flops


def _sums_shares(job: Job) -> bool:
    return job.sums_shares


def _timing(work: Work, memory: ShareMemory | None, settings: EstimateSettings, degree: int = 1) -> OpTiming:
    seconds = partial(kernels_s, device=settings.device, precision=settings.precision)
    forward_s, backward_s = (
        0.0
        if settings.cluster is None
        else sum(all_reduce_s(size, range(degree), settings.cluster) for size in (*work.summed_bytes, *more))
        + sum(all_gather_s(size, range(degree), settings.cluster) for size in along)
        for more, along in zip(work.word_sums, work.along, strict=True)
    )
    times = PhaseTimes(
        forward_s=seconds(work.forward) + forward_s,
        backward_s=seconds(work.backward) + backward_s,
        communication_s=forward_s + backward_s,
    )
    return OpTiming(
        slowest=(times,),
        activation_bytes=round(work.activation_bytes),
        memory=memory,
        batch_sums=work.batch_sums.as_batch_sums(),
        loss_chunks=work.loss_chunks,
    )


def _between_devices(train: TrainSettings, settings: EstimateSettings) -> Arithmetic:
    """Return what values are sent in: under autocast as they are without it."""
    return "float32" if train.autocast is not None else settings.precision


def _whole_batch(graph: WorkloadGraph, table: JobTable, flops: dict[str, float]) -> dict[OpRef, float]:
    return {op: flops[table.key(op, graph.tasks[op.task].task.batch_size)] for op in table.class_of}


# Bytes of some tensors, in each direction.
_Both = tuple[tuple[float, ...], tuple[float, ...]]


def between(few: Work, many: Work, few_rows: int, many_rows: int, rows: int) -> Work | None:
    """Work on `rows` samples from that on fewer and on more, linear in the samples kernel by kernel.

    None where the two do not run the same kernels, so that nothing can be said of what lies between.
    """
    if any(
        len(getattr(few, kernels)) != len(getattr(many, kernels))
        for kernels in ("forward", "backward", "again")
    ):
        return None
    if _lengths(few) != _lengths(many):
        return None
    share = (rows - few_rows) / (many_rows - few_rows)

    def mix(a: float, b: float) -> float:
        return a + share * (b - a)

    def mix_kernels(a: tuple[Kernel, ...], b: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        return tuple(
            Kernel(
                mix(x.flops, y.flops),
                mix(x.num_bytes, y.num_bytes),
                mix(x.output_elements, y.output_elements),
            )
            for x, y in zip(a, b, strict=True)
        )

    def mix_both(a: _Both, b: _Both) -> _Both:
        first, second = (
            tuple(mix(x, y) for x, y in zip(*pair, strict=True)) for pair in zip(a, b, strict=True)
        )
        return first, second

    return Work(
        mix_kernels(few.forward, many.forward),
        mix_kernels(few.backward, many.backward),
        mix(few.activation_bytes, many.activation_bytes),
        tuple(mix(a, b) for a, b in zip(few.summed_bytes, many.summed_bytes, strict=True)),
        mix_both(few.word_sums, many.word_sums),
        few.batch_sums,
        along=mix_both(few.along, many.along),
        again=mix_kernels(few.again, many.again),
    )


def _lengths(work: Work) -> list[int]:
    return [len(sums) for sums in (*work.word_sums, *work.along)]
