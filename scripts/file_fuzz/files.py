"""Whole files that belong together, for every command to read."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from random_profiles import random_profile

from file_fuzz.names import CLUSTER_FILE, METRICS, PLAN, PROFILE, WORKLOAD_FILE
from file_fuzz.run_folder import write_run
from spindle_cli.files.artifact import write_json
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.run_files import METRICS_FILE, StepMetrics
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.types import MetaOpProfile

ROOT = Path(__file__).parents[2]
WORKLOAD = ROOT / "configs/workloads/senses-1.yaml"
CLUSTER = ROOT / "configs/clusters/a800-1x8.yaml"


def write_files(folder: Path) -> None:
    """Put one whole file of every kind into a folder."""
    four = CLUSTER.read_text(encoding="utf-8").replace("devices: 8", "devices: 4")
    (folder / CLUSTER_FILE).write_text(four, encoding="utf-8")
    cluster = Cluster.read(folder / CLUSTER_FILE)
    assert cluster.num_devices == 4, "few, so that what can be planned is planned soon"
    towers = random_profile(3, "towers", most_tp=2)
    profile = towers.model_copy(update={"metaops": _of_one_batch(towers.metaops[:6])})  # two tasks
    write_json(folder / PROFILE, profile)
    shutil.copy(WORKLOAD, folder / WORKLOAD_FILE)
    write_plan(folder / PLAN, make_plan(profile, cluster))
    with contextlib.chdir(folder):
        write_run(folder)
    (folder / METRICS).parent.mkdir()
    lines = [
        StepMetrics(step=step, loss=2.0 / step, task_losses={"a": 1.5}, iteration_s=0.1, samples_per_s=80.0)
        for step in (1, 2, 3)
    ]
    (folder / "run" / METRICS_FILE).write_text("".join(line.to_line() for line in lines), encoding="utf-8")


def _of_one_batch(metaops: Sequence[MetaOpProfile]) -> tuple[MetaOpProfile, ...]:
    """The same, without the inputs whose batch is another, which no workload has."""
    sizes = {metaop.name: metaop.batch_size for metaop in metaops}
    return tuple(
        metaop.model_copy(
            update={"inputs": tuple(name for name in metaop.inputs if sizes[name] == metaop.batch_size)}
        )
        for metaop in metaops
    )
