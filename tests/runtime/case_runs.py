"""Run toy workloads by hand-made plans: several cases in one set of real torchrun processes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hand_plans import (
    Placement,
    gathering,
    in_micro_batches,
    on_types,
    passes_apart,
    place,
    shared_out,
    slow_between_nodes,
    weighted,
    whole,
    with_experts,
    with_sets,
)
from safetensors.torch import load_file
from torch import Tensor

import spindle_cli
from helpers.analysed import built_before, built_by
from helpers.analysed_once import analysed_for_requests
from helpers.island_plans import on_islands
from helpers.ready_python import ReadyPython
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import CaptureStage, DtypeName, RunRequest, capture_path
from spindle_cli.files.sharding import Sharding
from spindle_cli.launch.build import TORCHRUN
from spindle_cli.plan.file import write_plan
from spindle_cli.profile.types import LocalSgd
from spindle_cli.training.data.reading import find_lengths
from spindle_cli.workload.building.load import load, resolve
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.settings.types import Lengths, Looking

HERE = Path(__file__).parent
SOURCE = Path(spindle_cli.__file__).parent.parent
STEPS = 3
SGD = {"optimizer": "SGD", "lr": 0.1}
found_before: dict[str, tuple[WorkloadGraph, Path]] = {}
ADAMW = {"optimizer": "AdamW", "lr": 1e-2, "optimizer_args": {"weight_decay": 0.1}}


Drawn = Callable[[WorkloadGraph], Sequence[Placement]]


@dataclass(frozen=True)
class Case:
    """A workload, how it is trained, and where its parts run: placements, what gives them when it is given
    the workload's graph, or the devices of all of it.
    """

    name: str
    placements: Sequence[Placement] | tuple[int, ...] | Drawn
    toys: str = "runtime_toys"
    function: str = "build"
    args: Mapping[str, object] = field(default_factory=dict)
    train: Mapping[str, object] = field(default_factory=lambda: SGD)
    dtype: DtypeName | None = "float64"
    recompute: Sequence[str] = ()  # MetaOps
    selective: bool = False  # of these ops what takes longest is kept
    offload: bool = False  # what is not recomputed, and every other op of what is, in host memory
    apart: int | None = None  # passes in any order, drawn by this seed
    micro_batches: Mapping[str, int] = field(default_factory=dict)  # by task; with `apart`
    sharding: Sharding | None = None  # of what runs on the same devices; with `apart`
    shards_everywhere: bool = False  # whether that is a plan or not
    weights: tuple[int, ...] = ()  # of the devices' parts of what they share out; none: equal parts
    uneven: bool = False  # shares of any size, with `apart`
    by_parts: bool = False  # parameters are updated as their gradients are summed
    gathers: bool = False  # gradients of matrices, as rows and factors, wherever that can be
    # by its tasks, joined by '+', what steps of a set run; None: what is left for them
    sets: Mapping[str, Sequence[Placement] | None] = field(default_factory=dict)
    types: tuple[str, ...] = ()  # of CPUs: as many devices of each, one behind the other
    experts: int = 0  # of every op that is split
    islands: LocalSgd | None = None  # that each run the plan
    slow_between_nodes: bool = False  # of two nodes, so that tensor-parallel groups are sent parts
    steps: int = STEPS
    checkpoint_every: int | None = None
    goes_on_with: str | None = None  # an earlier case, in whose folder its checkpoints are
    begins_from: str | None = None  # an earlier case, of other tasks or settings
    has_lengths: bool = False  # batches of several; planned for a percentile of them
    percentile: float = 100.0
    long: bool = False  # shows of one more plan what other cases show: `make test-all` alone trains it


def marked(cases: Iterable[Case]) -> list[Any]:
    """Parameters of a test, with the mark of those that are long."""
    return [pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.long else []) for case in cases]


def asked_for(cases: Sequence[Case], config: pytest.Config) -> list[Case]:
    """Without those that are long, where these are left out."""
    leaves_out = "not long" in config.option.markexpr.split(" and ")
    return [case for case in cases if not (case.long and leaves_out)]


def prepare(case: Case, num_devices: int, folder: Path) -> RunRequest:
    """Write a case's workload, plan and request into a new folder."""
    folder.mkdir(parents=True)
    source = folder / "workload.yaml"
    content = {
        "schema": "spindle.workload/1",
        "model": f"{HERE / case.toys}.py:{case.function}",
        "args": dict(case.args),
        "train": dict(case.train),
    }
    source.write_text(yaml.safe_dump(content))
    graph, memo = graph_of(case, source)
    placed = case.placements(graph) if callable(case.placements) else case.placements
    devices = [item for item in placed if isinstance(item, int)]
    placements = [item for item in placed if not isinstance(item, int)]
    everything = placements or whole(graph, tuple(devices))
    plan = place(
        graph, num_devices, everything, case.recompute, selective=case.selective, offload=case.offload
    )
    if case.micro_batches or case.uneven:
        plan = in_micro_batches(plan, case.micro_batches, case.apart or 0, uneven=case.uneven)
    elif case.apart is not None:
        plan = passes_apart(plan, case.apart)
    if case.gathers:
        plan = gathering(plan, graph, TrainSettings(**case.train))
    if case.sharding is not None:
        plan = shared_out(plan, case.sharding, everywhere=case.shards_everywhere)
    if case.weights:
        plan = weighted(plan, case.weights)
    if case.experts:
        plan = with_experts(plan, case.experts)
    if case.types:
        plan = on_types(plan, case.types)
    if case.sets:
        made = {
            tuple(tasks.split("+")): None if placed is None else place(graph, num_devices, placed)
            for tasks, placed in case.sets.items()
        }
        plan = with_sets(plan, made)
    if case.by_parts:
        plan = plan.model_copy(update={"updates_by_parts": True})
    if case.islands is not None:
        plan = on_islands(plan, case.islands)
    if case.slow_between_nodes:
        plan = plan.model_copy(update={"cluster": slow_between_nodes(num_devices)})
    write_plan(folder / "plan.yaml", plan)
    request = RunRequest(
        plan=folder / "plan.yaml",
        workload=str(source),
        memo=memo,
        steps=case.steps,
        run_dir=folder.with_name(case.goes_on_with or folder.name),
        resume=case.goes_on_with is not None,
        begin_from=None if case.begins_from is None else folder.with_name(case.begins_from),
        checkpoint_every=case.checkpoint_every,
        timeout_s=60,
        dtype=case.dtype,
        capture_dir=folder,
    )
    write_json(folder / "request.json", request)
    return request


def graph_of(case: Case, source: Path) -> tuple[WorkloadGraph, Path]:
    """What is found of a case's workload, in the file `source`, and where it is written down for workers:
    once for all cases that train it.
    """
    looking = Looking(percentile=case.percentile) if case.has_lengths else None
    key = repr(
        (case.toys, case.function, case.args, looking, looking and case.train.get("seed"), case.islands)
    )
    if key not in found_before:
        lengths: Lengths = {}
        if looking is not None:
            loaded = load(str(source))
            lengths = find_lengths(loaded.workload, loaded.train.seed, looking)
        graph, memo = analysed_for_requests(resolve(str(source)), lengths)
        built_before(built_by(str(source)), graph)
        found_before[key] = graph, source.with_name("memo.json")
        write_json(found_before[key][1], memo)
    return found_before[key]


def run_cases(
    forker: socket.socket,
    cases: Sequence[Case],
    num_workers: int,
    folder: Path,
    *,
    fails: bool,
    backend: str | None = None,
    fine_sums: bool = False,
    limit_s: float = 280,
) -> None:
    """Run all cases, in their order, in one set of processes under torchrun, each in its own folder below
    `folder`.

    `forker`: of the processes. `fails`: the last one ends the workers with an error. `backend`: in gloo's
    place. `fine_sums`: little is summed at a time.
    """
    for number, case in enumerate(cases):
        prepare(case, num_workers, folder / case.name)
        (folder / f"{number:02d}").symlink_to(folder / case.name)
    words = [f"--nproc-per-node={num_workers}", "--nnodes=1", "--max-restarts=0", "--start-method=fork"]
    meeting = ["--rdzv-backend=spindle", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=rank=0"]
    launcher = ["-m", TORCHRUN, str(folder / "exits.json"), *words, *meeting]
    command = [sys.executable, *launcher, "-m", "many_worker", str(folder)]
    path = os.pathsep.join(str(each) for each in (HERE, HERE.parent, SOURCE))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if backend is not None:
        environment["SPINDLE_BACKEND"] = backend
    if fine_sums:
        environment["SPINDLE_TEST_FINE_SUMS"] = "1"
    torchrun_log = folder / "torchrun.log"
    with torchrun_log.open("wb") as log:
        torchrun = ReadyPython(forker, command, env=environment, stdout=log, stderr=log)
        try:
            code = torchrun.wait(limit_s)
        finally:
            torchrun.kill()
    logs = "\n".join(
        path.read_text()[-2000:] for path in (torchrun_log, *sorted(folder.glob("workers/*.log")))
    )
    assert (code != 0) == fails, logs


def captured(folder: Path, stage: CaptureStage, num_workers: int) -> list[dict[str, Tensor]]:
    """For each rank, every parameter or fragment of one that it holds (or its gradient), by key."""
    return [load_file(capture_path(folder, stage, rank)) for rank in range(num_workers)]


def dtype_of(case: Case) -> torch.dtype:
    """The case's dtype as torch's."""
    found: torch.dtype = getattr(torch, case.dtype)
    return found
