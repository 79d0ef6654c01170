"""Profiles of the paper's workloads for the planner's benchmarks: estimated for A800s, kept under build/.

On 256 and 1,024 devices every batch is as many times larger as the cluster is larger than 64: work for so
    many.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import Profile
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.workload.file import WorkloadFile

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "profiles"
WORKLOADS = ("clip-4", "clip-7", "clip-10", "ofasys-4", "ofasys-7", "qwen-val")
FIXED_UP_TO = 64
NOBODY = Audience(Console(file=io.StringIO()), lambda _: None)


def cluster_path(num_devices: int) -> Path:
    """A800s, 8 a node."""
    return ROOT / "configs" / "clusters" / f"a800-{num_devices // 8}x8.yaml"


def profile_path(workload: str, num_devices: int) -> Path:
    """The profile of a workload for a cluster of so many A800s, estimated unless it has been before."""
    scale = max(1, num_devices // FIXED_UP_TO)
    reach = max(num_devices, FIXED_UP_TO)
    path = FOLDER / f"{workload}-x{scale}.json"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        source = ROOT / "configs" / "workloads" / f"{workload}.yaml"
        if scale > 1:
            source = _scaled(source, workload, scale)
        # What the check by numbers finds changes no time.
        estimate_profile(str(source), path, NOBODY, cluster=Cluster.read(cluster_path(reach)), check=False)
    return path


def read_profile(workload: str, num_devices: int) -> Profile:
    """The same, read."""
    return Profile.read(profile_path(workload, num_devices))


def _scaled(source: Path, workload: str, scale: int) -> Path:
    """The workload file with every batch so many times larger."""
    file = WorkloadFile.read(source)
    tasks = load_abstract(str(source), relative_to=ROOT).workload.tasks
    args: dict[str, Any] = dict(file.args) | {
        "batch_sizes": {task.name: task.batch_size * scale for task in tasks}
    }
    path = FOLDER / f"{workload}-x{scale}.yaml"
    data = {"schema": file.schema_, "model": file.model, "args": args, "train": file.train.model_dump()}
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path
