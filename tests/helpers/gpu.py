"""Files for tests on a GPU."""

from __future__ import annotations

from pathlib import Path

import yaml

from spindle_cli.profile.machine.devices import cluster_device_name
from spindle_cli.profile.machine.machine import describe_device


def cluster_file(folder: Path, devices: int) -> Path:
    """A cluster of so many of this machine's GPUs."""
    device = cluster_device_name(describe_device("cuda", 1))
    link = {"latency_us": 10, "bandwidth_gb_per_s": 100}
    cluster = {
        "schema": "spindle.cluster/1",
        "name": "here",
        "nodes": [{"devices": devices, "device": device, "memory_gib": 8}],
        "links": {"intra_node": link, "inter_node": link},
    }
    path = folder / f"cluster-{devices}.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path
