"""`spindle verify`: train a few steps by the plan and in one plain process, and compare.

The two runs have folders of their own, for which there has to be room.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.errors import RunFailedError, SpindleError, UsageError
from spindle_cli.launch.run import find_planned, require_room_for_all
from spindle_cli.plan.types import Plan
from spindle_cli.verify.compare import (
    compare_runs,
    has_values_of_noise,
    operators_may_explain,
    rounding_may_explain,
)
from spindle_cli.verify.runs import Runs, build_runs, train
from spindle_cli.verify.types import VerifyOptions, VerifyReport

if TYPE_CHECKING:
    from spindle_cli.analysis.memo import AnalysisMemo
    from spindle_cli.workload.graph import WorkloadGraph


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
    plan, planned = find_planned(plan_path, workload)
    with verify_folder(options.run_dir) as folder:
        runs = build_runs(plan, plan_path, planned.source, folder, options, planned.train.precision)
        runs = replace(runs, averages=planned.train.ema is not None)
        for line in require_room_for_all(
            plan,
            planned,
            runs.ours,
            folder,
            captured_bytes(plan, buffer_bytes(planned.graph), averages=runs.averages),
        ):
            say(line)
        say(f"training {options.steps} steps in one plain process")
        train(runs.plain, "plain PyTorch", planned.memo)
        say(f"training {options.steps} steps by the plan with {runs.ours.processes} workers")
        train(runs.ours, "the plan's run", planned.memo)
        report = compare_runs(runs, options)
        rounded = rounding_may_explain(report) or has_values_of_noise(report)
        if rounded:
            say(f"training {options.steps} steps in one plain process with rounding noise in its gradients")
            train(runs.rounded, "plain PyTorch with rounding noise", planned.memo)
            report = compare_runs(runs, options, with_rounding=True)
        if report.same or not operators_may_explain(report) or not _drawn(runs, options, planned.memo, say):
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


@contextmanager
def verify_folder(wanted: Path | None) -> Iterator[Path]:
    """`wanted`, which is kept, or a temporary folder, kept only when a run fails in it.

    Raises:
        UsageError: `wanted` holds something already.
    """
    if wanted is not None:
        if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
            raise UsageError(f"--run-dir {wanted}: it is not an empty folder", hint="Choose another one.")
        yield wanted
        return
    folder = Path(tempfile.mkdtemp(prefix="spindle-verify-"))
    try:
        yield folder
    except SpindleError:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise  # its message names the log that is in the folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def captured_bytes(plan: Plan, buffer_bytes: int, *, averages: bool = False) -> int:
    """At most this many bytes are captured, of the plain run and of every device: parameters in three stages,
    or with `averages` in four, and buffers (`buffer_bytes` in all) in two.

    A device is counted with every slice that it runs, although slices may share parameters, and with all
    buffers.
    """
    once = sum(_param_bytes(plan, metaop.name, (0, metaop.num_ops)) for metaop in plan.metaops)
    held = sum(_param_bytes(plan, slice_.metaop, slice_.ops) * len(slice_.devices) for slice_ in plan.slices)
    return (3 + averages) * (once + held) + 2 * buffer_bytes * (1 + plan.cluster.num_devices)


def buffer_bytes(graph: WorkloadGraph) -> int:
    """Return the bytes of all buffers that ops use."""
    from spindle_cli.workload.graph import ParameterTable

    return sum(buffer.numel() * buffer.itemsize for buffer in ParameterTable.of(graph).buffers.values())


def _param_bytes(plan: Plan, metaop: str, ops: tuple[int, int]) -> int:
    entry = plan.by_name[metaop]
    extra = sum(size for op, size in entry.extra_param_bytes.items() if ops[0] <= op < ops[1])
    return (ops[1] - ops[0]) * entry.param_bytes_per_op + extra
