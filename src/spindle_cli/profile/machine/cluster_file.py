"""A cluster file for this machine, from what was measured on it."""

from __future__ import annotations

from pathlib import Path

import yaml

from spindle_cli.files.cluster import Cluster, Links, NodeGroup
from spindle_cli.files.writing import write_text
from spindle_cli.profile.machine.devices import cluster_device_name
from spindle_cli.profile.machine.link_speed import as_link
from spindle_cli.profile.types import Profile
from spindle_cli.units import GIB


def this_machine(profile: Profile) -> Cluster:
    """The node that a profile was measured on as a cluster of one node, with the link that was measured.

    Two processes or more have to have been measured: one has no link.
    """
    link = as_link(profile.links[0])
    devices = int(profile.environment["processes"])
    device = cluster_device_name(profile.device)
    node = NodeGroup(devices=devices, device=device, memory_gib=round(profile.device.memory_bytes / GIB, 2))
    return Cluster(name=f"{device}-{devices}", nodes=(node,), links=Links(intra_node=link, inter_node=link))


def write_cluster(path: Path, profile: Profile) -> None:
    """Write `this_machine` as YAML.

    Raises:
        InputError: the file cannot be written.
    """
    data = this_machine(profile).model_dump(mode="json", by_alias=True)
    count = data["nodes"][0]["devices"]
    head = f"# Measured: {profile.device.name}, {count} processes. There is one node only.\n"
    write_text(path, head + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110))
