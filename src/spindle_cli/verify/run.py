"""`spindle verify`: train a few steps by the plan and in one plain process, and compare."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.errors import RunFailedError
from spindle_cli.files.request import DtypeName
from spindle_cli.files.run_files import read_metrics
from spindle_cli.launch.build import build_launch
from spindle_cli.launch.checks import find_workload, kept_by_device, require_valid
from spindle_cli.launch.devices import missing_devices, require_disk, require_open_files, threads_per_worker
from spindle_cli.launch.run_dir import hand_on, prepare_run_dir
from spindle_cli.launch.starting.network import whole_cluster_here
from spindle_cli.launch.starting.process import run_launch
from spindle_cli.launch.types import RUNTIME_WORKER, Launch, LaunchOptions
from spindle_cli.launch.watching.cause import failure_of
from spindle_cli.launch.watching.finished import require_done
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan
from spindle_cli.process.cores import usable_cores
from spindle_cli.verify.captured import CapturedRun, open_run
from spindle_cli.verify.folder import buffer_bytes, captured_bytes, verify_folder
from spindle_cli.verify.losses import compare_losses
from spindle_cli.verify.parameters import (
    AVERAGE,
    FINAL,
    compare_average,
    compare_buffers,
    compare_final,
    compare_gradients,
    compare_initial,
    compare_noise,
    find_noise,
    find_unused,
    largest_change,
)
from spindle_cli.verify.rounding import LARGEST_TOLERANCE, ROUNDING_FLAG, widened
from spindle_cli.verify.types import (
    NOISE_FLOOR,
    SPLIT_GRADIENT_TOLERANCE,
    TOLERANCE,
    ArithmeticName,
    VerifyReport,
)
from spindle_cli.workload.file import Precision

if TYPE_CHECKING:
    from spindle_cli.workload.memo import AnalysisMemo

DEFAULT_STEPS = 3


@dataclass(frozen=True)
class VerifyOptions:
    """What the user asks of a verification; `worker_module` is the runtime under test."""

    steps: int = DEFAULT_STEPS
    dtype: DtypeName | None = None
    no_randomness: bool = False
    run_dir: Path | None = None
    worker_module: str = RUNTIME_WORKER


@dataclass(frozen=True)
class Runs:
    """The two runs of a verification, ready to start: by the plan, and the plain one. `averages`: they keep
    an average of the weights.
    """

    plan: Plan
    ours: Launch
    plain: Launch
    rounded: Launch  # plain PyTorch with rounding noise; run only where it decides
    arithmetic: ArithmeticName
    averages: bool = False


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
    with verify_folder(options.run_dir) as folder:
        runs = build_runs(plan, plan_path, found.source, folder, options, found.train.precision)
        runs = replace(runs, averages=found.train.ema is not None)
        for line in missing_devices(plan, runs.ours.processes):
            say(line)
        for line in kept_by_device(found):
            say(f"warning: {line}")
        require_open_files(runs.ours.processes, plan.cluster.num_devices)
        require_disk(
            folder, needed_bytes=captured_bytes(plan, buffer_bytes(found.graph), averages=runs.averages)
        )
        say(f"training {options.steps} steps in one plain process")
        train(runs.plain, "plain PyTorch", found.memo)
        say(f"training {options.steps} steps by the plan with {runs.ours.processes} workers")
        train(runs.ours, "the plan's run", found.memo)
        report = compare_runs(runs, options)
        if not _rounding_may_explain(report):
            return report
        say(f"training {options.steps} steps in one plain process with rounding noise in its gradients")
        train(runs.rounded, "plain PyTorch with rounding noise", found.memo)
        return compare_runs(runs, options, with_rounding=True)


def _rounding_may_explain(report: VerifyReport) -> bool:
    """Whether nothing but the size of differences in the final parameters speaks against the plan."""
    failed = [check for check in report.checks if not check.passed]
    return {check.what for check in failed} - {AVERAGE} == {FINAL} and all(
        difference.relative is not None and difference.relative <= LARGEST_TOLERANCE
        for check in failed
        for difference in check.failures
    )


def build_runs(
    plan: Plan,
    plan_path: Path,
    source: str,
    folder: Path,
    options: VerifyOptions,
    precision: Precision = "full",
) -> Runs:
    """Both launches below `folder`; the plain process is a launch of one worker without torchrun."""
    share = whole_cluster_here(plan.cluster)

    def launch(name: str, threads: int) -> Launch:
        run_dir = folder / name
        asked = LaunchOptions(
            steps=options.steps,
            threads=threads,
            dtype=options.dtype,
            no_randomness=options.no_randomness,
            capture_dir=run_dir.absolute() / "captured",
            worker_module=options.worker_module,
        )
        return build_launch(plan, plan_path, source, run_dir, share, asked)

    ours = launch("plan", threads_per_worker(plan, share.processes))
    plain = launch("plain", usable_cores())
    rounded = launch("rounded", usable_cores())
    arithmetic: ArithmeticName = options.dtype or ("float32" if precision == "full" else precision)
    return Runs(plan, ours, _plain_process(plain), _plain_process(rounded, ROUNDING_FLAG), arithmetic)


def _plain_process(launch: Launch, *flags: str) -> Launch:
    argv = (sys.executable, "-m", "spindle_cli.verify.plain", str(launch.request_file), *flags)
    return launch.model_copy(update={"argv": argv, "processes": 1})


def train(launch: Launch, name: str, memo: AnalysisMemo | None = None) -> None:
    """Run one of them to its end; `name` tells them apart in messages. `memo`: what it need not find again.

    Raises:
        RunFailedError: a process failed.
    """
    prepare_run_dir(launch.run_dir)
    capture_dir_of(launch).mkdir()
    if memo is not None:
        launch = hand_on(launch, memo)
    ending = run_launch(launch, lambda: None)
    if ending.code != 0:
        failure = failure_of(launch, ending.stuck, code=ending.code, ranks=range(launch.processes))
        said = failure.message.removeprefix("worker 0: ") if launch.processes == 1 else failure.message
        failed = RunFailedError(f"{name} failed: {said}", hint=failure.hint)
        failed.exit_code = failure.exit_code
        raise failed
    require_done(launch, range(launch.processes))


def capture_dir_of(launch: Launch) -> Path:
    """Where a run of a verification leaves what is compared."""
    assert launch.request.capture_dir is not None
    return launch.request.capture_dir


def _gradient_tolerance(runs: Runs, tolerance: float) -> float:
    """Tensor parallelism rounds once more, which bfloat16 shows."""
    in_bfloat16 = runs.arithmetic in ("bf16", "bf16-autocast")
    if in_bfloat16 and any(piece.tp > 1 for piece in runs.plan.slices):
        return SPLIT_GRADIENT_TOLERANCE
    return tolerance


def compare_runs(runs: Runs, options: VerifyOptions, *, with_rounding: bool = False) -> VerifyReport:
    """Compare what two finished runs have left; `with_rounding`: so has a third, of plain PyTorch with noise.

    Raises:
        RunFailedError: one of them has not left everything.
    """
    dtype = runs.arithmetic
    tolerance, floor = TOLERANCE[dtype], NOISE_FLOOR[dtype]
    our_steps = list(read_metrics(runs.ours.run_dir))
    plain_steps = list(read_metrics(runs.plain.run_dir))
    with (
        open_run(capture_dir_of(runs.ours), runs.ours.processes, averages=runs.averages) as ours,
        open_run(capture_dir_of(runs.plain), 1, averages=runs.averages) as plain,
    ):
        noise = find_noise(ours, plain, floor)
        names = [entry.name for entry in noise]
        unused = find_unused(ours, plain)
        rounding = _rounding(runs, plain, [*names, *unused]) if with_rounding else None
        final_tolerance = tolerance if rounding is None else widened(tolerance, rounding)
        final, elements = compare_final(ours, plain, [*names, *unused], final_tolerance)
        buffers = compare_buffers(ours, plain, final_tolerance)
        checks = (
            compare_initial(ours, plain, unused),
            compare_losses(our_steps, plain_steps, tolerance),
            compare_gradients(ours, plain, names, _gradient_tolerance(runs, tolerance)),
            *((compare_noise(ours, plain, names, floor),) if names else ()),
            final,
            *compare_average(ours, plain, [*names, *unused], final_tolerance),
            *((buffers,) if buffers.compared else ()),
        )
    return VerifyReport(
        same=all(check.passed for check in checks),
        workload=runs.plan.workload.name,
        strategy=runs.plan.strategy,
        workers=runs.ours.processes,
        steps=options.steps,
        dtype=dtype,
        no_randomness=options.no_randomness,
        checks=checks,
        rounding=rounding,
        noise_floor=floor,
        noise=(*noise, *elements),
        unused=unused,
    )


def _rounding(runs: Runs, plain: CapturedRun, left_out: Sequence[str]) -> float:
    """How far rounding noise has moved the final parameters of plain PyTorch's training."""
    with open_run(capture_dir_of(runs.rounded), 1) as rounded:
        return largest_change(rounded, plain, left_out)
