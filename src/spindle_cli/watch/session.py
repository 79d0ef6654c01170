"""A run that is watched: what has been read of it, and what the page shows of that.

Its files are read again only when they have changed; its plan is found through what its launcher has
handed to the workers; whether it goes on, or has ended and how, is told from what the launcher has noted,
and whether it lives.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest, workers_dir
from spindle_cli.files.run_files import METRICS_FILE, PREDICTED_FILE, PredictedVsMeasured
from spindle_cli.files.runs.records import TIMELINE_FILE, AttemptEvent, attempts_path, read_attempts
from spindle_cli.launch.owner import living_claims
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan
from spindle_cli.report.build import build_report
from spindle_cli.report.run import Follower, compared_of, flops_by_task, measured_iteration, step_s, view_of
from spindle_cli.report.types import MeasuredIteration, ReportData
from spindle_cli.watch.types import State, WatchData

# One look reads for so long at most: the page asks again, and meanwhile shows what there is.
LOOK_S = 0.3
MAX_PROBLEMS = 3


class WatchSession:
    """What is kept of a run between two looks at it. Several threads may look.

    Where a file of the run is damaged, or of another plan, the rest is shown and that is said.
    """

    def __init__(self, run_dir: Path, plan_path: Path | None = None) -> None:
        """`plan_path`: where the plan is now, if not where its launcher has noted.

        Raises:
            InputError: no such folder, not one of a run, or the plan that was named cannot be read.
        """
        _require_run(run_dir)
        if plan_path is not None:
            read_planned(plan_path)
        self.run_dir = run_dir
        self._plan_path = plan_path
        self._lock = threading.Lock()
        self._request = Kept[RunRequest | None](lambda: read_request(run_dir), None)
        self._planned = Kept[Planned | None](lambda: read_planned(self._plan_of_run()), None)
        self._compared = Kept[PredictedVsMeasured | None](self._read_compared, None)
        self._timeline = Kept[MeasuredIteration | None](self._read_timeline, None)
        self._events = Kept[tuple[AttemptEvent, ...]](lambda: tuple(read_attempts(run_dir)), ())
        self._follow_anew()

    def look(self, budget_s: float | None = LOOK_S) -> WatchData:
        """Read what is new, for about `budget_s` (None: until there is no more), and say how the run is."""
        with self._lock:
            return self._look(budget_s)

    def page(self) -> tuple[WatchData, ReportData | None, MeasuredIteration | None]:
        """Return what a page begins with: the run as it is, the plan as it is drawn, and the run's measured
        step.
        """
        with self._lock:
            data = self._look(LOOK_S)
            planned = self._planned.value
            return data, None if planned is None else planned.report, self._timeline.value

    def _look(self, budget_s: float | None) -> WatchData:
        if self.run_dir.is_dir():  # of what is gone the page goes on to show what has been read
            self._refresh()
            self._read(budget_s)
        return self._data()

    def _refresh(self) -> None:
        run_dir = self.run_dir
        self._request.refresh(request_path(run_dir))
        plan = self._plan_of_run()
        replanned = self._planned.refresh(*([] if plan is None else [plan]))
        if replanned:
            self._follow_anew()
        self._events.refresh(attempts_path(run_dir))
        for kept, name in ((self._compared, PREDICTED_FILE), (self._timeline, TIMELINE_FILE)):
            kept.refresh(run_dir / name, *([] if plan is None else [plan]))

    def _follow_anew(self) -> None:
        planned = self._planned.value
        self._damage: list[str] = []
        flops_of = None if planned is None else planned.flops_of
        self._follower = Follower(self.run_dir, flops_of, lambda error: self._damage.append(error.message))

    def _read(self, budget_s: float | None) -> None:
        deadline_s = None if budget_s is None else time.monotonic() + budget_s
        while self._follower.look():
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return

    def _plan_of_run(self) -> Path | None:
        request = self._request.value
        return self._plan_path or (None if request is None else request.plan)

    def _read_compared(self) -> PredictedVsMeasured | None:
        planned = self._planned.value
        return None if planned is None else compared_of(planned.plan, self.run_dir)

    def _read_timeline(self) -> MeasuredIteration | None:
        planned = self._planned.value
        return None if planned is None else measured_iteration(planned.plan, self.run_dir)

    def _data(self) -> WatchData:
        follower, planned, events = self._follower, self._planned.value, self._events.value
        last = None if follower.steps.last is None else follower.steps.last.step
        total = None if self._request.value is None else self._request.value.steps
        standing = standing_of(self.run_dir, events, last, total)
        report = None if planned is None else planned.report
        return WatchData(
            workload=None if report is None else report.workload,
            strategy=None if report is None else report.strategy,
            num_devices=None if report is None else report.cluster.num_devices,
            memory_bytes=None if report is None else report.cluster.memory_bytes,
            state=standing.state,
            message=standing.message,
            total_steps=total,
            step_s=follower.pace.step_s,
            left_s=self._left_s(total, last) if standing.state == "running" else None,
            last_s=_written_s(self.run_dir / METRICS_FILE) if last is not None else None,
            now_s=time.time(),
            read_share=follower.read_share,
            problems=self._problems(),
            page=self._page_name(),
            run=view_of(
                follower, None if planned is None else planned.step_s, self._compared.value, None, events
            ),
        )

    def _left_s(self, total: int | None, last: int | None) -> float | None:
        if total is None or last is None:
            return None
        between_s = self._follower.evaluations.seconds / last
        return self._follower.pace.left_s(total - last, between_s)

    def _problems(self) -> tuple[str, ...]:
        kept = (self._request, self._planned, self._compared, self._timeline, self._events)
        problems = [read.problem for read in kept if read.problem is not None]
        more = len(self._damage) - MAX_PROBLEMS
        lines = [*self._damage[:MAX_PROBLEMS], *([f"and {more} more lines"] if more > 0 else [])]
        return (*problems, *lines)

    def _page_name(self) -> str:
        planned = self._planned.value
        timeline = self._timeline.value
        words = [
            "" if planned is None else planned.report.plan_sha256,
            "" if timeline is None else hashlib.sha256(timeline.model_dump_json().encode()).hexdigest(),
        ]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _require_run(run_dir: Path) -> None:
    """Refuse what is not the folder of a run, begun or not.

    Raises:
        InputError: it is not one.
    """
    hint = "Give the folder of a run (`spindle launch --run-dir`)."
    if not run_dir.exists():
        raise InputError(f"{run_dir}: no such folder", hint=hint)
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: not a folder", hint=hint)
    expected = (run_dir / METRICS_FILE, run_dir / PREDICTED_FILE, workers_dir(run_dir))
    if not any(path.exists() for path in expected):
        names = f"{METRICS_FILE}, {PREDICTED_FILE} nor workers/"
        raise InputError(f"{run_dir}: not the folder of a run: neither {names} is in it", hint=hint)


T = TypeVar("T")
Stamp = tuple[int, int, int] | None


def stamp_of(path: Path) -> Stamp:
    """Return what is another as soon as a file is; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class Kept(Generic[T]):
    """What is made of some files, and made again when one of them is another.

    Attributes:
        value: as of the last `refresh`.
        problem: why nothing could be made of the files; `value` is then what stands for nothing.
        version: how often it was made.
    """

    def __init__(self, make: Callable[[], T], nothing: T) -> None:
        self._make = make
        self._nothing = nothing
        self._stamps: tuple[Stamp, ...] | None = None
        self.value = nothing
        self.problem: str | None = None
        self.version = 0

    def refresh(self, *paths: Path) -> bool:
        """Look whether one of the files is another, and make it again then; whether that was so."""
        stamps = tuple(map(stamp_of, paths))
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        self.version += 1
        try:
            self.value, self.problem = self._make(), None
        except InputError as error:
            self.value, self.problem = self._nothing, error.message
        return True


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
    """Return what the launcher of node 0 hands to its workers."""
    return workers_dir(run_dir) / "node-0.request.json"


def read_request(run_dir: Path) -> RunRequest | None:
    """Return the newest launch's request; None where nobody has launched yet.

    Raises:
        InputError: it is malformed.
    """
    path = request_path(run_dir)
    return RunRequest.read(path) if path.exists() else None


def read_planned(path: Path | None) -> Planned | None:
    """Return a plan as the page shows it; None where it is not known which.

    Raises:
        InputError: it cannot be read, or not be drawn.
    """
    if path is None:
        return None
    plan = read_plan(path)
    return Planned(plan, build_report(plan, where=path))


_ENDINGS: dict[str, State] = {"done": "ended", "failed": "failed", "stopped": "stopped"}


@dataclass(frozen=True)
class Standing:
    """See `WatchData`."""

    state: State
    message: str | None = None


def standing_of(
    run_dir: Path, events: Sequence[AttemptEvent], last_step: int | None, total_steps: int | None
) -> Standing:
    """Say how a run stands.

    Args:
        events: all that its launcher has noted; none of runs of older versions.
        last_step: that it has done.
        total_steps: at which it ends, if that is known.
    """
    if not run_dir.is_dir():
        return Standing("gone")
    claimed_s = _claimed_s(run_dir)
    newest = events[-1] if events else None
    if newest is not None and newest.event in _ENDINGS:
        if claimed_s is not None and claimed_s > newest.time_s:  # launched once more
            return Standing("starting")
        return Standing(_ENDINGS[newest.event], newest.message)
    if claimed_s is not None:
        began_at = 0 if newest is None else newest.step
        return Standing("running" if (last_step or 0) > began_at else "starting")
    if (run_dir / PREDICTED_FILE).exists() and (total_steps is None or (last_step or 0) >= total_steps):
        return Standing("ended")
    return Standing("not begun" if newest is None and last_step is None else "lost")


def _claimed_s(run_dir: Path) -> float | None:
    """When the newest of the processes that still run a folder has begun; None where there is none."""
    claims = living_claims(run_dir)
    return max((0.0 if claim.owner is None else claim.owner.since_s for claim in claims), default=None)
