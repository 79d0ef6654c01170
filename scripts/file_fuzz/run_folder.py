"""A run's folder with all that a run leaves in it, of a tiny workload and its plan; nothing was trained."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import save_file

from file_fuzz.commands import run
from file_fuzz.names import (
    CHECKPOINT,
    ERROR,
    EXITS,
    JOURNAL,
    MEMO,
    OWNER,
    PREDICTED,
    REQUEST,
    RUN,
    RUN_PLAN,
    STEP,
    TIMELINE,
    TINY,
    TINY_PLAN,
    TINY_PROFILE,
    TRAINED_METRICS,
)
from spindle_cli.analysis.analyse import analyse_for_others
from spindle_cli.checkpoint.index import (
    INDEX_FILE,
    SUMS_FILE,
    Checkpoint,
    SavedTensor,
    Shard,
    TrainedTask,
    buffer_key,
    checksum,
    model_key,
    shard_name,
    state_key,
    sums_text,
)
from spindle_cli.files.artifact import Artifact, to_json, write_json
from spindle_cli.files.request import (
    CaptureStage,
    RunRequest,
    WorkerError,
    capture_path,
)
from spindle_cli.files.run_files import (
    Comparison,
    DeviceTimes,
    JournalWriter,
    MetaOpComparison,
    Note,
    PredictedVsMeasured,
    SliceTimes,
    StepMetrics,
)
from spindle_cli.files.runs.records import MeasuredSpan, MeasuredStep, MeasuredTimeline
from spindle_cli.launch.owner import Owner
from spindle_cli.launch.types import WorkerExit, WorkerExits
from spindle_cli.plan.file import read_plan, write_plan
from spindle_cli.plan.types import Plan
from spindle_cli.workload.building.load import load
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import ParameterTable

_WORKLOAD = """
import torch
from torch import nn
from spindle_cli import Task, Workload


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.linear(x) * self.scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


def build():
    items = [{"x": torch.full((4,), float(index))} for index in range(16)]
    return Workload("tiny", [Task("t", Model(), 4, items)], operators=(Block,))
"""


def write_run(folder: Path) -> None:
    """Put the workload, its profile and plan, and the run's folder into the current folder, `folder`."""
    Path(TINY).write_text(_WORKLOAD, encoding="utf-8")
    _spindle(f"profile {TINY}:build -o {TINY_PROFILE} --estimate --cluster cluster.yaml")
    _spindle(f"plan {TINY_PROFILE} --cluster cluster.yaml -o {TINY_PLAN}")
    plan = read_plan(Path(TINY_PLAN))
    (folder / CHECKPOINT).mkdir(parents=True)
    (folder / RUN / "workers").mkdir()
    source = f"{folder / TINY}:build"
    graph, memo = analyse_for_others(load(source).workload)
    _write_checkpoint(folder / CHECKPOINT, plan, ParameterTable.of(graph), source)
    lines = [StepMetrics(step=step, loss=1.0, task_losses={"t": 1.0}, iteration_s=0.1) for step in (1, 2)]
    (folder / TRAINED_METRICS).write_text("".join(line.to_line() for line in lines), encoding="utf-8")
    _write_times(folder, plan)
    request = RunRequest(plan=folder / TINY_PLAN, workload=source, run_dir=folder / RUN, memo=folder / MEMO)
    owner = Owner(run="0", node_rank=0, host="a", pid=1, space="b", started_s=1, since_s=1, ended=True)
    for name, artifact in (
        (REQUEST, request),
        (MEMO, memo),
        (OWNER, owner),
        (EXITS, WorkerExits(exits=(WorkerExit(rank=0, exit_code=-9, time_s=2.0),))),
        (ERROR, WorkerError(rank=0, type="ValueError", message="bad", place="a.py:1 in f", time_s=1.0)),
    ):  # fmt: skip
        _write(folder / name, artifact)
    writer = JournalWriter(folder / JOURNAL, ("forward a/b[0:1]", "the update"), 1)
    writer.begun(Note(1, 0, 1.0))
    for stage in get_args(CaptureStage):
        tensors = {"t.w": torch.ones(4, 4), "t.x[0:2]": torch.ones(2), "t.x[2:3]": torch.ones(1)}
        save_file(tensors, capture_path(folder / RUN, stage, 0))


def _spindle(words: str) -> None:
    ended = run(tuple(words.split()))
    assert ended.code == 0, ended.err


def _write(path: Path, artifact: Artifact) -> None:
    path.write_text(to_json(artifact), encoding="utf-8")


def _write_checkpoint(folder: Path, plan: Plan, table: ParameterTable, source: str) -> None:
    tensors = {model_key(name): value.detach() for name, value in table.parameters.items()}
    tensors |= {state_key(name, "step"): torch.zeros(()) for name in table.parameters}
    tensors |= {buffer_key(name, 0): value for name, value in table.buffers.items()}
    shards = []
    for rank in range(2):
        keys = sorted(tensors)[rank::2]
        save_file({key: tensors[key] for key in keys}, folder / shard_name(rank))
        shards.append(_shard(folder / shard_name(rank), tuple(keys)))
    index = Checkpoint(
        step=STEP,
        plan_sha256=plan.sha256(),
        workload=source,
        fingerprint=plan.workload.fingerprint,
        tasks={"t": TrainedTask(batch_size=4, weight=1.0)},
        train=TrainSettings(steps=4),
        tensors={
            key: SavedTensor(shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))
            for key, value in tensors.items()
        },
        shards=tuple(shards),
        hyperparameters={"lr": 0.001, "betas": [0.9, 0.999]},
        schedule={"last_epoch": STEP},
    )
    write_json(folder / INDEX_FILE, index)
    seal(folder)


def _shard(path: Path, keys: tuple[str, ...]) -> Shard:
    return Shard(file=path.name, num_bytes=path.stat().st_size, keys=keys, sha256=checksum(path))


def _write_times(folder: Path, plan: Plan) -> None:
    times = Comparison(predicted_s=0.1, measured_s=0.1)
    metaops = tuple(MetaOpComparison(metaop=name, predicted_s=0.1, measured_s=0.1) for name in plan.by_name)
    slices = tuple(SliceTimes(slice=n, forward_s=0.1, backward_s=0.2) for n in range(len(plan.slices)))
    devices = tuple(
        DeviceTimes(device=n, compute_s=0.3, wait_s=0.1, data_s=0.0, optimizer_s=0.1, other_s=0.01)
        for n in range(plan.cluster.num_devices)
    )
    compared = PredictedVsMeasured(
        steps=1,
        iteration=times,
        metaops=metaops,
        slices=slices,
        devices=devices,
        plan_sha256=plan.sha256(),
    )
    _write(folder / PREDICTED, compared)
    write_plan(folder / RUN_PLAN, plan)
    spans = (
        MeasuredSpan(kind="forward", start_s=0.0, end_s=0.1, slice=0),
        MeasuredSpan(kind="wait", start_s=0.1, end_s=0.2, cause="losses"),
        MeasuredSpan(kind="transfer", start_s=0.1, end_s=0.2, slice=0, source_slice=0, peer=1, num_bytes=8),
        MeasuredSpan(kind="sum", start_s=0.2, end_s=0.3, group=0, num_bytes=8),
    )
    of_devices = (spans,) * plan.cluster.num_devices
    steps = (MeasuredStep(step=1, start_s=0.0, end_s=0.3, devices=of_devices),)
    _write(folder / TIMELINE, MeasuredTimeline(plan_sha256=plan.sha256(), clock_error_s=0.0, steps=steps))


def seal(folder: Path) -> None:
    """Make a checkpoint's checksums right again, as far as its index can be read: what is wrong with it is
    then found by what it says.
    """
    path = folder / INDEX_FILE
    try:
        index = Checkpoint.read(path)
        shards = tuple(_shard(folder / shard.file, shard.keys) for shard in index.shards)
        write_json(path, index.model_copy(update={"shards": shards}))
    except Exception:
        shards = ()
    text = sums_text(hashlib.sha256(path.read_bytes()).hexdigest(), shards)
    (folder / SUMS_FILE).write_text(text, encoding="utf-8")
