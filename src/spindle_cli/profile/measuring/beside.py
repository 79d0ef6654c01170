"""What takes a processor's time in training beside the ops: communication and reading samples."""

from __future__ import annotations

import time
from contextlib import suppress
from statistics import median

from spindle_cli.profile.machine.machine import DeviceType
from spindle_cli.profile.types import MeasuredLink, ProcessorCosts
from spindle_cli.workload.data.kind import is_stream
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.training.batches import Batches
from spindle_cli.workload.training.item_draws import DrawsError

# Samples of a task that are read at least, and about as many seconds of reading its batch again and again.
_FEW_SAMPLES = 16
_LOAD_S = 0.1
_MOST_READS = 8


def turns_beside(device: DeviceType, processes: int, threads: int, cores: float) -> float:
    """Seconds of a device for each second of such work: none where cores are left that do it.

    Where processes outnumber cores, or the cores' worth of time that they are granted, each takes turns with
    the others, as with its ops.
    """
    if device != "cpu" or processes * threads < cores:
        return 0.0
    return max(1.0, processes / cores)


def processor_costs(turns: float, link: MeasuredLink | None, load_s: dict[str, float]) -> ProcessorCosts:
    """`load_s`: processor time of each task's samples."""
    return ProcessorCosts(
        message_s=0.0 if link is None else turns * link.message_processor_s,
        s_per_byte=0.0 if link is None else turns * link.processor_s_per_byte,
        load_s={task: turns * seconds for task, seconds in load_s.items()} if turns else {},
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
    for number in range(min(_MOST_READS, batches.steps_per_epoch)):
        if sum(seconds) * batch_size > _LOAD_S:
            break
        seconds.append(_timed_read(batches, batch_size, number))
    return median(seconds[2:] or seconds)


def _load_s(batches: Batches) -> float:
    batch_size = batches.task.batch_size
    few = min(_FEW_SAMPLES, batch_size)
    batches.rows(0, 0, few)
    seconds = [_timed_read(batches, few)]
    count = batch_size if seconds[0] * batch_size <= _LOAD_S else few
    # The first reading of a batch fills what datasets and allocators keep.
    while len(seconds) <= _MOST_READS and sum(seconds) * count <= _LOAD_S:
        seconds.append(_timed_read(batches, count))
    return median(seconds[2:] or seconds)


def _timed_read(batches: Batches, count: int, number: int = 0) -> float:
    """Seconds for each of so many samples of a batch."""
    begin_s = time.thread_time()
    _read(batches, count, number)
    return (time.thread_time() - begin_s) / count


def _read(batches: Batches, count: int, number: int) -> None:
    """As training does: beside its main thread, but for what draws random numbers."""
    if not batches.draws:
        with suppress(DrawsError):
            batches.rows_without_draws(number, 0, count)
            return
    batches.rows(number, 0, count)
