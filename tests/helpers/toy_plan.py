"""The toy workload's file, and a plan by hand whose two tasks share blocks over two devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from helpers.analysed import analysed
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.files.artifact import write_json
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, WorkloadRef
from spindle_cli.workload.building.load import load

HERE = Path(__file__).parent
DEVICES = {"large": (0, 1), "small": (1,)}


def write_toy(
    folder: Path,
    *,
    devices_per_node: int = 2,
    module: str = "toy_workload.py",
    steps: int = 4,
    train: Mapping[str, object] | None = None,
    **args: float | str,
) -> Path:
    """Write toy.yaml, profile.json and plan.yaml: the large task over both devices, then the small one on 1.

    `train`: settings besides the number of steps.
    """
    source = folder / "toy.yaml"
    model = f"{HERE / module}:build"
    content = {
        "schema": "spindle.workload/1",
        "model": model,
        "args": args,
        "train": {"steps": steps, **(train or {})},
    }
    source.write_text(yaml.safe_dump(content))
    graph = analysed(load(str(source)).workload)
    metaops: list[MetaOpProfile] = []
    slices: list[Slice] = []
    for metaop in graph.metaops:
        profiled = metaop_of(
            metaop.name,
            len(metaop.ops),
            {1: 1.0, 2: 0.5},
            batch_size=graph.tasks[metaop.task].task.batch_size,
            inputs=metaop.inputs,
            parameters=metaop.parameters,
            parameter_blocks=metaop.parameter_blocks,
        )
        start_s = slices[-1].end_s if slices else 0.0
        slices.append(slice_of(profiled, (0, profiled.num_ops), DEVICES[metaop.task], start_s))
        metaops.append(profiled)
    cluster = cluster_of(2, devices_per_node=devices_per_node)
    made_for = WorkloadRef(name="toy", fingerprint=graph.fingerprint, source=source.name)
    profile = profile_of(*metaops).model_copy(update={"workload": made_for})
    write_json(folder / "profile.json", profile)
    plan = plan_of(profile, cluster, [(piece,) for piece in slices])
    path = folder / "plan.yaml"
    write_plan(path, plan.model_copy(update={"workload": made_for}))
    return path
