"""`spindle verify`: train a few steps by the plan and in one plain process, and compare."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.errors import RunFailedError
from spindle_cli.launch.build import build_launch
from spindle_cli.launch.cause import failure_of
from spindle_cli.launch.checks import FoundWorkload, find_workload, require_valid
from spindle_cli.launch.devices import missing_devices, require_disk, threads_per_worker, usable_cores
from spindle_cli.launch.network import whole_cluster_here
from spindle_cli.launch.process import run_launch
from spindle_cli.launch.run_dir import prepare_run_dir
from spindle_cli.launch.types import RUNTIME_WORKER, Launch, LaunchOptions
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan
from spindle_cli.request import DtypeName
from spindle_cli.run_files import read_metrics
from spindle_cli.verify.captured import open_run
from spindle_cli.verify.folder import captured_bytes, verify_folder
from spindle_cli.verify.losses import compare_losses
from spindle_cli.verify.parameters import (
    compare_final,
    compare_gradients,
    compare_initial,
    compare_noise,
    find_noise,
    find_unused,
)
from spindle_cli.verify.types import NOISE_FLOOR, TOLERANCE, VerifyReport

DEFAULT_STEPS = 3


@dataclass(frozen=True)
class VerifyOptions:
    """What the user asks of a verification; `worker_module` is the runtime under test."""

    steps: int = DEFAULT_STEPS
    dtype: DtypeName | None = None
    run_dir: Path | None = None
    worker_module: str = RUNTIME_WORKER


def verify_plan(
    plan_path: Path, workload: str | None, options: VerifyOptions, say: Callable[[str], None]
) -> VerifyReport:
    """Train `options.steps` steps both ways and compare; every device is a process of this machine.

    Args:
        plan_path: the plan.
        workload: where its workload is, if not where the plan says.
        options: see `VerifyOptions`.
        say: takes lines about what is going on.

    Raises:
        InputError: the plan is not valid, its workload is missing or another, or this machine cannot run it.
        RunFailedError: a process failed, so that there is nothing to compare.
    """
    plan = read_plan(plan_path)
    require_valid(plan, plan_path)
    found = find_workload(plan, plan_path, workload)
    share = whole_cluster_here(plan.cluster)
    for line in missing_devices(plan, share.processes):
        say(line)
    with verify_folder(options.run_dir) as folder:
        require_disk(folder, needed_bytes=captured_bytes(plan))
        plain = _plain_launch(plan, plan_path, found, folder / "plain", options)
        ours = build_launch(
            plan,
            plan_path,
            found.source,
            folder / "plan",
            share,
            _launch_options(folder / "plan", threads_per_worker(plan, share.processes), options),
        )
        say(f"training {options.steps} steps in one plain process")
        _run(plain, "plain PyTorch")
        say(f"training {options.steps} steps by the plan with {share.processes} workers")
        _run(ours, "the plan's run")
        return _compare(plan, ours, plain, options)


def _launch_options(run_dir: Path, threads: int, options: VerifyOptions) -> LaunchOptions:
    return LaunchOptions(
        steps=options.steps,
        threads=threads,
        dtype=options.dtype,
        capture_dir=run_dir.absolute() / "captured",
        worker_module=options.worker_module,
    )


def _plain_launch(
    plan: Plan, plan_path: Path, found: FoundWorkload, run_dir: Path, options: VerifyOptions
) -> Launch:
    """The plain process as a launch of one worker, started without torchrun."""
    share = whole_cluster_here(plan.cluster)
    launch = build_launch(
        plan,
        plan_path,
        found.source,
        run_dir,
        share,
        _launch_options(run_dir, usable_cores(), options),
    )
    argv = (sys.executable, "-m", "spindle_cli.verify.plain", str(launch.request_file))
    return launch.model_copy(update={"argv": argv, "processes": 1})


def _run(launch: Launch, name: str) -> None:
    prepare_run_dir(launch.run_dir)
    assert launch.request.capture_dir is not None
    launch.request.capture_dir.mkdir()
    if run_launch(launch, lambda: None) != 0:
        failure = failure_of(launch)
        failed = RunFailedError(f"{name} failed: {failure.message}", hint=failure.hint)
        failed.exit_code = failure.exit_code
        raise failed


def _compare(plan: Plan, ours: Launch, plain: Launch, options: VerifyOptions) -> VerifyReport:
    dtype = options.dtype or "float32"
    tolerance = TOLERANCE[dtype]
    assert ours.request.capture_dir is not None and plain.request.capture_dir is not None
    losses = compare_losses(list(read_metrics(ours.run_dir)), list(read_metrics(plain.run_dir)), tolerance)
    with (
        open_run(ours.request.capture_dir, ours.processes) as run,
        open_run(plain.request.capture_dir, 1) as reference,
    ):
        noise = find_noise(reference, NOISE_FLOOR[dtype])
        names = [entry.name for entry in noise]
        unused = find_unused(run, reference)
        final, elements = compare_final(run, reference, [*names, *unused], tolerance)
        checks = (
            compare_initial(run, reference, unused),
            losses,
            compare_gradients(run, reference, names, tolerance),
            *((compare_noise(run, reference, names, NOISE_FLOOR[dtype]),) if names else ()),
            final,
        )
    return VerifyReport(
        same=all(check.passed for check in checks),
        workload=plan.workload.name,
        strategy=plan.strategy,
        workers=ours.processes,
        steps=options.steps,
        dtype=dtype,
        checks=checks,
        noise_floor=NOISE_FLOOR[dtype],
        noise=(*noise, *elements),
        unused=unused,
    )
