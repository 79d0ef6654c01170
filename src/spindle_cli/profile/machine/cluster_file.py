"""A cluster file for this machine, from what was measured on it."""

from __future__ import annotations

from pathlib import Path

import yaml

from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.writing import write_text
from spindle_cli.profile.machine.devices import cluster_device_name
from spindle_cli.profile.machine.link_speed import as_link
from spindle_cli.profile.types import Device, Profile
from spindle_cli.units import GIB


def this_machine(profile: Profile) -> Cluster:
    """The node that a profile was measured on as a cluster of one node, with the link that was measured.

    Two processes or more have to have been measured: one has no link.
    """
    devices = int(profile.environment["processes"])
    return one_node(profile.device, devices, as_link(profile.links[0]))


def one_node(device: Device, devices: int, link: Link) -> Cluster:
    """A cluster of one node of `devices` devices like `device`, and the link between two of them."""
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
    """A cluster file's text, with a line of comment before."""
    data = cluster.model_dump(mode="json", by_alias=True, exclude_none=True)
    return f"# {head}\n{yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)}"
