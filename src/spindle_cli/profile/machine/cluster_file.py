"""A cluster file for this machine: from what a profile has measured on it, or from its devices and a link
that is measured now.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from spindle_cli.errors import RunFailedError, UsageError
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.writing import write_text
from spindle_cli.process.devices import gpu_of, may_fork, places_on_gpus
from spindle_cli.profile.machine.devices import cluster_device_name
from spindle_cli.profile.machine.link_speed import as_link, measure_link
from spindle_cli.profile.machine.machine import (
    DeviceType,
    describe_device,
    device_of_type,
    own_cores,
)
from spindle_cli.profile.types import Device, MeasuredLink, Profile
from spindle_cli.units import GIB

_MOST_PROCESSES = 8  # of a host with many cores, if nobody says how many
# Of a single GPU, which sends nothing to anybody: the file has to state a link, and no plan uses it.
_NO_LINK = Link(latency_us=0, bandwidth_gb_per_s=1)


def this_machine(profile: Profile) -> Cluster:
    """Return the node that a profile was measured on as a cluster of one node, with the link that was
    measured.

    Two processes or more have to have been measured: one has no link.
    """
    devices = int(profile.environment["processes"])
    return one_node(profile.device, devices, as_link(profile.links[0]))


def one_node(device: Device, devices: int, link: Link) -> Cluster:
    """Return a cluster of one node of `devices` devices like `device`, and the link between two of them."""
    name = cluster_device_name(device)
    node = NodeGroup(devices=devices, device=name, memory_gib=round(device.memory_bytes / GIB, 2))
    return Cluster(name=f"{name}-{devices}", nodes=(node,), links=Links(intra_node=link, inter_node=link))


def write_cluster(path: Path, profile: Profile) -> None:
    """Write `this_machine` as YAML.

    Raises:
        InputError: the file cannot be written.
    """
    cluster = this_machine(profile)
    head = f"Measured: {profile.device.name}, {cluster.num_devices} processes. There is one node only."
    write_text(path, cluster_text(cluster, head))


def cluster_text(cluster: Cluster, head: str) -> str:
    """Return a cluster file's text, with a line of comment before."""
    data = cluster.model_dump(mode="json", by_alias=True, exclude_none=True)
    return f"# {head}\n{yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)}"


def machine_text(num_devices: int | None) -> str:
    """Return a cluster file of this machine: its GPUs, or as many processes as it has cores.

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


def _count(kind: DeviceType, requested: int | None) -> int:
    if kind == "cpu":
        return requested or min(len(own_cores()), _MOST_PROCESSES)
    there = places_on_gpus()
    if requested is not None and requested > there:
        raise UsageError(f"--nproc {requested}: this machine has {there} GPUs")
    return requested or there


def _measured(kind: DeviceType) -> MeasuredLink:
    forks = kind == "cpu" and may_fork()
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
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
