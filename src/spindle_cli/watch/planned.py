"""The plan of a run that is watched: found through what its launcher has handed to the workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spindle_cli.files.request import RunRequest, workers_dir
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan
from spindle_cli.report.build import build_report
from spindle_cli.report.run import flops_by_task, step_s
from spindle_cli.report.types import ReportData


@dataclass(frozen=True)
class Planned:
    """A plan, and what is shown of it without a run.

    Attributes:
        step_s: of a step, as predicted. `flops_of`: see `flops_by_task`.
    """

    plan: Plan
    report: ReportData

    @property
    def step_s(self) -> float:
        return step_s(self.plan)

    @property
    def flops_of(self) -> dict[str, float] | None:
        return flops_by_task(self.plan)


def request_path(run_dir: Path) -> Path:
    """What the launcher of node 0 hands to its workers."""
    return workers_dir(run_dir) / "node-0.request.json"


def read_request(run_dir: Path) -> RunRequest | None:
    """The newest launch's request; None where nobody has launched yet.

    Raises:
        InputError: it is malformed.
    """
    path = request_path(run_dir)
    return RunRequest.read(path) if path.exists() else None


def read_planned(path: Path | None) -> Planned | None:
    """A plan as the page shows it; None where it is not known which.

    Raises:
        InputError: it cannot be read, or not be drawn.
    """
    if path is None:
        return None
    plan = read_plan(path)
    return Planned(plan, build_report(plan, where=path))
