"""Readers of files that no command reads by itself, by the names that cases call them by: `read NAME`.

Each does with what it has read what its callers do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from file_fuzz.names import MEMO, REQUEST, RUN, TINY_PLAN
from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.checkpoint.carry_over import carried_over
from spindle_cli.checkpoint.files import find_checkpoint
from spindle_cli.checkpoint.tensors import CheckpointReader, HeldTensors, load_parts
from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import forget_metrics_after, last_step
from spindle_cli.launch.build import build_launch
from spindle_cli.launch.owner import living_claims
from spindle_cli.launch.run_dir import forget_errors
from spindle_cli.launch.starting.network import whole_cluster_here
from spindle_cli.launch.types import LaunchOptions
from spindle_cli.launch.watching.cause import failure_of
from spindle_cli.launch.watching.run_report import write_run_trace
from spindle_cli.launch.watching.stuck import doing_of_all
from spindle_cli.plan.file import read_plan
from spindle_cli.verify.comparing.captured import open_run
from spindle_cli.workload.building.load import load


def _checkpoint() -> None:
    """All of a checkpoint's tensors, as a worker reads them."""
    found = find_checkpoint(Path(RUN), reads_all=True)
    wanted = HeldTensors()
    for name, saved in found.checkpoint.tensors.items():
        if sum(saved.shape) < 1000:
            wanted.add(name, torch.empty(saved.shape, dtype=getattr(torch, saved.dtype)))
    load_parts(CheckpointReader(found.folder, found.checkpoint), wanted.by_name(), found.folder)
    carried_over(found.checkpoint, analyse(load(RunRequest.read(Path(REQUEST)).workload).workload))


def _request() -> None:
    RunRequest.read(Path(REQUEST))


def _memo() -> None:
    memo = AnalysisMemo.read(Path(MEMO))
    analyse(load(RunRequest.read(Path(REQUEST)).workload).workload, memo=memo)


def _failure() -> None:
    """What is said of a run that has ended badly."""
    plan = read_plan(Path(TINY_PLAN))
    launch = build_launch(
        plan, Path(TINY_PLAN), "tiny.py:build", Path(RUN), whole_cluster_here(plan.cluster), LaunchOptions()
    )
    str(failure_of(launch, ranks=range(4)))


def _journal() -> None:
    doing_of_all(Path(RUN))


def _claims() -> None:
    [str(claim) for claim in living_claims(Path(RUN))]


def _metrics() -> None:
    last_step(Path(RUN))
    forget_metrics_after(Path(RUN), 1)
    forget_errors(Path(RUN))


def _trace() -> None:
    write_run_trace(Path("out.json"), read_plan(Path(TINY_PLAN)), Path(RUN))


def _capture() -> None:
    with open_run(Path(RUN), 1) as run:
        for name in run.final.holders:
            run.final.first(name)


READERS: Mapping[str, Callable[[], None]] = {
    "checkpoint": _checkpoint,
    "request": _request,
    "memo": _memo,
    "failure": _failure,
    "journal": _journal,
    "claims": _claims,
    "metrics": _metrics,
    "trace": _trace,
    "capture": _capture,
}
