"""`spindle verify`: train a few steps by the plan and in one plain process, and compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.errors import RunFailedError
from spindle_cli.launch.checks import find_workload, kept_by_device, require_valid
from spindle_cli.launch.devices import missing_devices, require_disk, require_open_files
from spindle_cli.plan.file import read_plan
from spindle_cli.verify.compare import (
    compare_runs,
    has_values_of_noise,
    operators_may_explain,
    rounding_may_explain,
)
from spindle_cli.verify.folder import buffer_bytes, captured_bytes, verify_folder
from spindle_cli.verify.runs import Runs, VerifyOptions, build_runs, train
from spindle_cli.verify.types import VerifyReport

if TYPE_CHECKING:
    from spindle_cli.workload.memo import AnalysisMemo


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
        for line in missing_devices(plan, runs.ours.processes, node_rank=None):
            say(line)
        for line in kept_by_device(found):
            say(f"warning: {line}")
        require_open_files(runs.ours.processes, plan.whole_cluster.num_devices)
        require_disk(
            folder, needed_bytes=captured_bytes(plan, buffer_bytes(found.graph), averages=runs.averages)
        )
        say(f"training {options.steps} steps in one plain process")
        train(runs.plain, "plain PyTorch", found.memo)
        say(f"training {options.steps} steps by the plan with {runs.ours.processes} workers")
        train(runs.ours, "the plan's run", found.memo)
        report = compare_runs(runs, options)
        rounded = rounding_may_explain(report) or has_values_of_noise(report)
        if rounded:
            say(f"training {options.steps} steps in one plain process with rounding noise in its gradients")
            train(runs.rounded, "plain PyTorch with rounding noise", found.memo)
            report = compare_runs(runs, options, with_rounding=True)
        if report.same or not operators_may_explain(report) or not _drawn(runs, options, found.memo, say):
            return report
        return compare_runs(runs, options, with_rounding=rounded, with_draws=True)


def _drawn(runs: Runs, options: VerifyOptions, memo: AnalysisMemo | None, say: Callable[[str], None]) -> bool:
    """Train the runs that show what rounding does; False, with a line why, where one fails: the comparison
    stands without.
    """
    for number, draw in enumerate(runs.drawn, start=1):
        of_all = f"({number} of {len(runs.drawn)})"
        say(f"training {options.steps} steps in one plain process that rounds once more {of_all}")
        try:
            train(draw, "plain PyTorch that rounds once more", memo)
        except RunFailedError as error:
            say(f"warning: what rounding alone moves is not known: {error}")
            return False
    return True
