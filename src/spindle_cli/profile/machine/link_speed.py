"""How long a message between two processes takes, by its size."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from spindle_cli.files.cluster import Link
from spindle_cli.profile.curves.isotonic import non_decreasing
from spindle_cli.profile.types import MeasuredLink
from spindle_cli.units import GB, US

# float32 elements: 4 B is all latency; 16 MiB is past the knee of loopback, PCIe and NVLink alike.
LATENCY_ELEMENTS = 1
CURVE_ELEMENTS = tuple(2**power for power in range(10, 23, 2))
_SECONDS_PER_SIZE = 0.12
_MIN_ROUNDS, _MAX_ROUNDS = 5, 200
_TIMEOUT = timedelta(seconds=60)


def measure_link(rank: int, store_path: Path, device: torch.device) -> MeasuredLink:
    """Bounce messages of growing size between this process and its partner; rank 0 of the two sets the pace.

    gloo between CPUs, NCCL between GPUs. Half a round trip is one message. As `costs.links` reads it, a
    message takes the latency plus bytes over bandwidth, so the latency is taken off before the bandwidth is
    computed. Both return what they saw.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(store_path), 2)  # type: ignore[attr-defined]  # documented, not listed in __all__
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    try:
        trips = [_one_way(rank, elements, device) for elements in (LATENCY_ELEMENTS, *CURVE_ELEMENTS)]
    finally:
        dist.destroy_process_group()
    larger = dict(zip(CURVE_ELEMENTS, trips[1:], strict=True))
    return as_measured(trips[0], larger)


@dataclass(frozen=True)
class OneWay:
    """A message's seconds from one end to the other, and of each end's processor, all threads together."""

    seconds: float
    processor_s: float = 0.0


def as_measured(smallest: OneWay, larger: Mapping[int, OneWay]) -> MeasuredLink:
    """A link from the times of an empty message and, by float32 elements, of larger ones (ascending).

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


def _one_way(rank: int, elements: int, device: torch.device) -> OneWay:
    """Median of messages of `elements` float32; seconds are the same on both, processor time is their own."""
    message = torch.ones(elements, device=device)
    rounds = torch.zeros(1, device=device)
    one_s = min(_round_trip(rank, message).seconds for _ in range(2))
    if rank == 0:
        rounds.fill_(min(max(_SECONDS_PER_SIZE / one_s, _MIN_ROUNDS), _MAX_ROUNDS))
    dist.broadcast(rounds, 0)
    trips = [_round_trip(rank, message) for _ in range(int(rounds.item()))]
    # A round trip is one message sent and one received, and has two ends here. Waiting takes some of the
    # processor, too, so that a trip in which one of the two was stopped says little of a message.
    processor_s = median(trip.processor_s for trip in trips) / 2
    result = torch.tensor([median(trip.seconds for trip in trips) / 2], device=device)
    dist.broadcast(result, 0)
    return OneWay(float(result.item()), processor_s)


def _round_trip(rank: int, message: torch.Tensor) -> OneWay:
    """There and back: seconds, and those of this process's threads."""
    started, processor_s = time.perf_counter(), time.process_time()
    if rank == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)
    if message.is_cuda:
        torch.cuda.synchronize()
    return OneWay(time.perf_counter() - started, time.process_time() - processor_s)


def as_link(measured: MeasuredLink) -> Link:
    """A measured link as a cluster file states it, in four digits."""
    return Link(
        latency_us=_four_digits(measured.latency_s / US),
        bandwidth_gb_per_s=_four_digits(measured.points[-1][1] / GB),
        curve=tuple((size, _four_digits(speed / GB)) for size, speed in measured.points),
    )


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
