"""How long a message between two processes takes, by its size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from spindle_cli.files.cluster import Link
from spindle_cli.process.devices import sharing_settings
from spindle_cli.process.environment import join_environment
from spindle_cli.profile.fit import non_decreasing
from spindle_cli.profile.types import MeasuredLink
from spindle_cli.units import GB, US

# float32 elements: 4 B is all latency; 16 MiB is past the knee of loopback, PCIe and NVLink alike.
LATENCY_ELEMENTS = 1
CURVE_ELEMENTS = tuple(2**power for power in range(10, 23, 2))
_SECONDS_PER_SIZE = 0.12
_MIN_ROUNDS, _MAX_ROUNDS = 5, 200
# Processor time that a process computes for while a message is under way: at least, and times what it takes.
_LEAST_BESIDE_S, _BESIDE_TIMES = 1e-3, 2.0
# What is worked on then: rows few enough for torch to do it in one thread, and more of them than are in the
# caches of a core, from which passes drive what messages need, too.
_BESIDE_ROWS, _BESIDE_ELEMENTS = 2**10, 2**10
_TIMEOUT = timedelta(seconds=60)


def measure_link(
    rank: int, store_path: Path, device: torch.device, limit_s: float = _SECONDS_PER_SIZE
) -> MeasuredLink:
    """Bounce messages of growing size between this process and its partner; rank 0 of the two sets the pace.

    gloo between CPUs, NCCL between GPUs. Half a round trip is one message. As `costs.links` reads it, a
    message takes the latency plus bytes over bandwidth, so the latency is taken off before the bandwidth is
    computed. Both return what they saw.

    Args:
        limit_s: at most so long for round trips of one size, and as long again for exchanges.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    join_environment(sharing_settings(rank))
    store = dist.FileStore(str(store_path), 2)  # type: ignore[attr-defined]  # documented, not listed in __all__
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    try:
        size_s = min(limit_s, _SECONDS_PER_SIZE)
        trips = [_one_way(rank, elements, device, size_s) for elements in (LATENCY_ELEMENTS, *CURVE_ELEMENTS)]
    finally:
        dist.destroy_process_group()
    larger = dict(zip(CURVE_ELEMENTS, trips[1:], strict=True))
    return as_measured(trips[0], larger)


@dataclass(frozen=True)
class OneWay:
    """Seconds of a message from one end to the other, and of one end's processor, all threads together."""

    seconds: float
    processor_s: float = 0.0


def as_measured(smallest: OneWay, larger: Mapping[int, OneWay]) -> MeasuredLink:
    """Return a link from the times of an empty message and, by float32 elements, of larger ones (ascending).

    Where noise makes a larger message faster than a smaller one, both get their mean. The processor's time
    of a byte is that of the largest message, less what the smallest takes.
    """
    seconds = {elements: way.seconds for elements, way in larger.items()}
    latency_s, *smooth = non_decreasing([smallest.seconds, *seconds.values()])
    points = []
    for elements, message_s in zip(seconds, smooth, strict=True):
        # A small message's time is nearly all latency, the rest noise: count at least a tenth to its bytes.
        bytes_s = max(message_s - latency_s, 0.1 * message_s)
        points.append((elements * 4, elements * 4 / bytes_s))
    most = max(larger)
    return MeasuredLink(
        kind="intra_node",
        latency_s=latency_s,
        points=tuple(points),
        message_processor_s=smallest.processor_s,
        processor_s_per_byte=max(larger[most].processor_s - smallest.processor_s, 0.0) / (most * 4),
    )


def _one_way(rank: int, elements: int, device: torch.device, size_s: float = _SECONDS_PER_SIZE) -> OneWay:
    """Time a message of `elements` float32: the median of its seconds, and the processor time of one end of
    it (of CPUs, where that is a device's own time); both are the same on both ends. Each takes about
    `size_s`.
    """
    message = torch.ones(elements, device=device)
    rounds = torch.zeros(1, device=device)
    one_s = min(_round_trip(rank, message) for _ in range(2))
    if rank == 0:
        rounds.fill_(_rounds(size_s, one_s))
    dist.broadcast(rounds, 0)
    count = int(rounds.item())
    result = torch.tensor(
        [median(_round_trip(rank, message) for _ in range(count)) / 2], device=device, dtype=torch.float64
    )
    dist.broadcast(result, 0)
    seconds = float(result.item())
    if device.type != "cpu":
        return OneWay(seconds)
    beside_s = max(_LEAST_BESIDE_S, _BESIDE_TIMES * seconds)
    # One of these takes at least as long as what is computed beside it; both ends know how long that is.
    operands = torch.ones(_BESIDE_ROWS, _BESIDE_ELEMENTS).unbind()
    exchanges = [
        _exchange(rank, message, operands, beside_s) for _ in range(min(count, _rounds(size_s, beside_s)))
    ]
    return OneWay(seconds, _of_one_end(exchanges, seconds))


def _rounds(size_s: float, one_s: float) -> int:
    """Return how many rounds of so many seconds each are made in `size_s`."""
    return int(min(max(size_s / one_s, _MIN_ROUNDS), _MAX_ROUNDS))


def _of_one_end(exchanges: Sequence[float], one_way_s: float) -> float:
    """Processor seconds of one end of a message, from those that this end's exchanges took, which are of two
    messages each.

    gloo's thread spins while the thread that it shares a connection with has been stopped; an end that this
    often happens to says nothing of messages, so the end counts that took less. And what an end does of a
    message is part of the way, so it takes no longer than that.
    """
    result = torch.tensor([median(exchanges) / 2], dtype=torch.float64)
    dist.all_reduce(result, dist.ReduceOp.MIN)
    return min(float(result.item()), one_way_s)


def _round_trip(rank: int, message: torch.Tensor) -> float:
    """Seconds of a message there and back."""
    started = time.perf_counter()
    if rank == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _exchange(rank: int, message: torch.Tensor, operands: Sequence[torch.Tensor], beside_s: float) -> float:
    """Processor seconds that a message each way takes of this end beside its own work, as in training: it
    computes for so many seconds while they are under way.

    It is the time of the calls, and all of what other threads of the process take meanwhile. `operands`: what
    it computes on.
    """
    received = torch.empty_like(message)
    operations = [dist.P2POp(dist.irecv, received, 1 - rank), dist.P2POp(dist.isend, message, 1 - rank)]
    process_s, thread_s = time.process_time(), time.thread_time()
    works = dist.batch_isend_irecv(operations)
    calls_s = time.thread_time() - thread_s
    computed_s = time.thread_time() + beside_s
    compute_beside(operands, lambda: time.thread_time() >= computed_s)
    waiting_s = time.thread_time()
    for work in works:
        work.wait()
    ended_s = time.thread_time()
    others_s = (time.process_time() - process_s) - (ended_s - thread_s)
    return calls_s + (ended_s - waiting_s) + max(others_s, 0.0)


def values_beside() -> Sequence[torch.Tensor]:
    """Make the operands that `compute_beside` works on."""
    return torch.ones(_BESIDE_ROWS, _BESIDE_ELEMENTS).unbind()


def compute_beside(values: Sequence[torch.Tensor], is_over: Callable[[], bool]) -> None:
    """Compute in this thread alone until `is_over` says so, which is asked every few microseconds."""
    for row in cycle(values):
        if is_over():
            return
        row.tanh_()


def as_link(measured: MeasuredLink) -> Link:
    """Return a measured link as a cluster file states it, in four digits."""
    return Link(
        latency_us=_four_digits(measured.latency_s / US),
        bandwidth_gb_per_s=_four_digits(measured.points[-1][1] / GB),
        curve=tuple((size, _four_digits(speed / GB)) for size, speed in measured.points),
    )


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
