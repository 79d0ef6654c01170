"""The machine at hand as a cluster file: its devices, and a link that is measured."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from spindle_cli.errors import RunFailedError, UsageError
from spindle_cli.files.cluster import Link
from spindle_cli.process.gpus import gpu_of, places_on_gpus
from spindle_cli.profile.machine.cluster_file import cluster_text, one_node
from spindle_cli.profile.machine.link_speed import as_link, measure_link
from spindle_cli.profile.machine.machine import DeviceType, describe_device, device_of_type, own_cores
from spindle_cli.profile.types import MeasuredLink

_MOST_PROCESSES = 8  # of a host with many cores, if nobody says how many
# Of a single GPU, which sends nothing to anybody: the file has to state a link, and no plan uses it.
_NO_LINK = Link(latency_us=0, bandwidth_gb_per_s=1)


def machine_text(num_devices: int | None) -> str:
    """A cluster file of this machine: its GPUs, or as many processes as it has cores.

    Raises:
        UsageError: there are fewer GPUs than `num_devices`.
        RunFailedError: the link between two devices cannot be measured.
    """
    kind = device_of_type(None)
    count = _count(kind, num_devices)
    device = describe_device(kind, count)
    if kind == "cuda" and count == 1:
        return cluster_text(one_node(device, 1, _NO_LINK), f"{device.name}. One device: no link is used.")
    link = as_link(_measured(kind))
    what = f"{device.name}, {count} {'processes' if kind == 'cpu' else 'devices'}"
    return cluster_text(one_node(device, count, link), f"{what}; the link is measured between two.")


def _count(kind: DeviceType, asked: int | None) -> int:
    if kind == "cpu":
        return asked or min(len(own_cores()), _MOST_PROCESSES)
    there = places_on_gpus()
    if asked is not None and asked > there:
        raise UsageError(f"--nproc {asked}: this machine has {there} GPUs")
    return asked or there


def _measured(kind: DeviceType) -> MeasuredLink:
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(2, mp_context=context) as processes:
        ends = [processes.submit(_end, rank, Path(folder) / "store", kind) for rank in range(2)]
        try:
            links = [end.result() for end in ends]
        except Exception as error:
            raise RunFailedError(
                f"the link between two devices cannot be measured: {type(error).__name__}: {error}"
            ) from error
    return links[0]


def _end(rank: int, store: Path, kind: DeviceType) -> MeasuredLink:
    torch.set_num_threads(1)
    device = torch.device(kind, gpu_of(rank)) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    return measure_link(rank, store, device)
