"""One run of a contestant on both hosts, and what it took: plain torch, or a plan under `spindle launch`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from runtime_bench.hosts import ADDRESSES, PORT, Host, python, run_on_both
from runtime_bench.plain_training import Step, begun_path
from spindle_cli.files.run_files import PREDICTED_FILE, PredictedVsMeasured, read_metrics

# Steps at the start of each run that are not counted: allocators, buckets and links warm up.
WARM_UP = 2
_TIMEOUT_S = 300.0
_SCRIPTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """What is trained, for how long, and where files go."""

    hosts: tuple[Host, Host]
    workload: Path
    num_steps: int
    folder: Path


@dataclass(frozen=True)
class Run:
    """One run. `iterations_s`: of the steps after the warm-up. `losses`: of every step, by task.

    `outside`: of a run by a plan, the share of the iteration that its slowest device spends neither computing
    nor communicating; None otherwise. `speeds`: of a run by a plan, that of each type of device, as a share
    of its profile's.
    """

    iterations_s: list[float]
    losses: list[dict[str, float]]
    outside: float | None = None
    speeds: dict[str, float] = field(default_factory=dict)


Contestant = Callable[[Job], Run]


def plain(how: str) -> Contestant:
    """Plain torch; `how`: a wrapper's name in plain_training.py."""

    def run(job: Job) -> Run:
        outs = [job.folder / f"{how}-{host.rank}.json" for host in job.hosts]
        module = ("-m", "runtime_bench.plain_training")
        commands = [python(*module, job.workload, how, str(job.num_steps), out) for out in outs]
        started = begun_path(outs[0])
        started.unlink(missing_ok=True)
        run_on_both(job.hosts, commands, timeout_s=_TIMEOUT_S, folder=_SCRIPTS, started=started.exists)
        return as_run([read_steps(out) for out in outs])

    return run


def by_hand(job: Job) -> Run:
    """The pipeline of hand_pipeline.py, whose losses are all host 0's."""
    outs = [job.folder / f"hand-{host.rank}.json" for host in job.hosts]
    module = ("-m", "runtime_bench.hand_pipeline")
    commands = [python(*module, job.workload, str(job.num_steps), out) for out in outs]
    run_on_both(job.hosts, commands, timeout_s=_TIMEOUT_S, folder=_SCRIPTS)
    return as_run([read_steps(outs[0])])


def read_steps(path: Path) -> list[Step]:
    """What a rank of plain training has written."""
    return [Step(**step) for step in json.loads(path.read_text(encoding="utf-8"))]


def as_run(ranks: Sequence[Sequence[Step]]) -> Run:
    """The ranks' steps as one run: rank 0's times, and the mean of the losses, each over a rank's share."""
    losses = [
        {task: mean(step.task_losses[task] for step in steps) for task in steps[0].task_losses}
        for steps in zip(*ranks, strict=True)
    ]
    return Run([step.iteration_s for step in ranks[0]][WARM_UP:], losses)


def planned(plan: Path) -> Contestant:
    """A plan, by `spindle launch` on each host."""

    def run(job: Job) -> Run:
        run_dir = job.folder / f"{plan.stem}-run-{_count(job.folder)}"
        launch: list[str | Path] = ["launch", plan, "--steps", str(job.num_steps), "--run-dir", run_dir]
        meet = ["--master", f"{ADDRESSES[0]}:{PORT}", "--node-rank"]
        commands = [python("-m", "spindle_cli", *launch, *meet, str(host.rank)) for host in job.hosts]
        run_on_both(
            job.hosts,
            commands,
            timeout_s=_TIMEOUT_S,
            folder=_SCRIPTS,
            started=lambda: next(read_metrics(run_dir), None) is not None,
        )
        steps = list(read_metrics(run_dir))
        devices = PredictedVsMeasured.read(run_dir / PREDICTED_FILE)
        return Run(
            [step.iteration_s for step in steps][WARM_UP:],
            [step.task_losses for step in steps],
            outside_share(devices),
            {each.type: each.speed for each in devices.types if each.speed is not None},
        )

    return run


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*-run-*"))


def outside_share(measured: PredictedVsMeasured) -> float:
    """Of the iteration, what the slowest device spends neither computing (the update included) nor
    communicating: waits for data, and all that its stopwatch counts as nothing.
    """
    outside_s = max(each.data_s + (each.other_s or 0.0) for each in measured.devices)
    return outside_s / measured.iteration.measured_s
