"""A folder of earlier runs and calibrated profiles: which of them is nearest to what is planned now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import log2
from pathlib import Path

from spindle_cli.calibrate.reading import Run, is_run, read_run, require_belongs, require_same_settings
from spindle_cli.calibrate.run import calibrated_by
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import read_data
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.run_files import PREDICTED_FILE
from spindle_cli.profile.mixed.seen import is_of_devices, type_in
from spindle_cli.profile.types import CalibratedRun, Profile
from spindle_cli.units import counted

# Folders inside of folders that are looked into; a run's own folder is not.
DEPTH = 3
_Distance = tuple[float, float]


@dataclass(frozen=True)
class History:
    """What a folder says of a profile's times.

    Attributes:
        profile: to plan with: the nearest calibration, or the profile as it was where there is none.
        note: for the plan, of which that is.
        passed_over: what could not be read, for people.
    """

    profile: Profile
    note: str
    passed_over: tuple[str, ...]


def from_history(folder: Path, profile: Profile, profile_path: Path, goal: Cluster) -> History:
    """Return the profile with the times of the nearest runs of its workload on its type of device: those on
    the number of devices, then of nodes, that is nearest to the goal's (by ratio), and then of the most
    steps. Runs that are equally near count together.

    Raises:
        InputError: the folder is missing or cannot be read.
    """
    nearby = _NearbyRuns(profile, profile_path, goal)
    nearby.look(folder)
    chosen = _nearest(nearby)
    passed_over = tuple(nearby.passed_over)
    if chosen is None:
        note = f"No run or calibrated profile in {folder} is of this workload on {goal.device_type}."
        return History(profile, f"{note} Times are the profile's own.", passed_over)
    return History(chosen.profile, chosen.note, passed_over)


@dataclass
class _NearbyRuns:
    """What in a folder belongs to a profile: runs by their distance, and calibrated profiles."""

    profile: Profile
    profile_path: Path
    goal: Cluster
    runs: dict[_Distance, list[Run]] = field(default_factory=dict)
    profiles: list[tuple[Path, Profile]] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)

    def look(self, folder: Path) -> None:
        """Take in all that a folder has."""
        for path in _entries(folder, DEPTH):
            try:
                if path.is_dir():
                    self._take_run(path)
                else:
                    self._take_profile(path)
            except InputError as error:
                self.passed_over.append(f"passed over: {error.message}")

    def _take_run(self, path: Path) -> None:
        run = read_run(path)
        if not _is_of(run.plan.workload.fingerprint, self.profile):
            return
        if not is_of_devices(self.profile, run.plan.cluster) or not self._has_goals_types(run.plan.cluster):
            return
        require_belongs(run, self.profile, self.profile_path)
        cluster = run.plan.cluster
        distance = _distance(cluster.num_devices, len(cluster.node_sizes), self.goal)
        self.runs.setdefault(distance, []).append(run)

    def _has_goals_types(self, cluster: Cluster) -> bool:
        """Whether a run was on all types of device that are planned for, and no others; where the profile is
        taken for those of another type, on its own.
        """
        if not is_of_devices(self.profile, self.goal):
            return True
        types = [
            {type_in(self.profile, name) for name in of_cluster.types} for of_cluster in (cluster, self.goal)
        ]
        return types[0] == types[1]

    def _take_profile(self, path: Path) -> None:
        data = read_data(path)
        if (
            not isinstance(data, dict)
            or data.get("schema") != "spindle.profile/1"
            or not data.get("calibration")
        ):
            return
        calibrated = Profile.from_data(data, where=str(path))
        if _is_of(calibrated.workload.fingerprint, self.profile) and is_of_devices(calibrated, self.goal):
            require_same_settings(calibrated, self.profile, str(path), self.profile_path)
            self.profiles.append((path, calibrated))


def _entries(folder: Path, depth: int) -> Iterator[Path]:
    """Folders of runs that have ended, and JSON files, by name; those inside of a run are its own.

    Raises:
        InputError: the folder cannot be read.
    """
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be read: {error.strerror}",
            hint="Give a folder of runs (`spindle launch --run-dir`) and calibrated profiles.",
        ) from error
    if is_run(folder):
        if (folder / PREDICTED_FILE).is_file():
            yield folder
        return
    for path in inside:
        if path.is_dir() and depth:
            yield from _entries(path, depth - 1)
        elif path.suffix == ".json" and path.is_file():
            yield path


def _is_of(fingerprint: str, profile: Profile) -> bool:
    return fingerprint == profile.workload.fingerprint


def _distance(num_devices: int, num_nodes: int, goal: Cluster) -> _Distance:
    return abs(log2(num_devices / goal.num_devices)), abs(log2(num_nodes / len(goal.node_sizes)))


@dataclass(frozen=True)
class _Candidate:
    distance: _Distance
    steps: int
    profile: Profile
    note: str


def _nearest(nearby: _NearbyRuns) -> _Candidate | None:
    candidates = [_of_profile(path, profile, nearby.goal) for path, profile in nearby.profiles]
    if nearby.runs:
        nearest = min(nearby.runs)
        candidates.append(_of_runs(nearest, nearby.runs[nearest], nearby.profile))
    return min(candidates, key=lambda candidate: (candidate.distance, -candidate.steps), default=None)


def _of_profile(path: Path, profile: Profile, goal: Cluster) -> _Candidate:
    assert profile.calibration is not None, "only calibrated ones are taken"
    by_distance: dict[_Distance, int] = {}
    for run in profile.calibration.runs:
        distance = _distance(run.num_devices, run.num_nodes, goal)
        by_distance[distance] = by_distance.get(distance, 0) + run.steps
    nearest = min(by_distance)
    note = f"Times are those of {path}: {_said(profile.calibration.runs)}."
    return _Candidate(nearest, by_distance[nearest], profile, note)


def _of_runs(distance: _Distance, runs: Sequence[Run], profile: Profile) -> _Candidate:
    made = calibrated_by(tuple(runs), profile).profile
    assert made.calibration is not None, "it was just calibrated"
    records = made.calibration.runs[-len(runs) :]
    folders = " ".join(str(run.folder) for run in runs)
    note = f"Times are {_said(records)} (`spindle calibrate {folders} PROFILE.json` makes that profile)."
    return _Candidate(distance, sum(run.measured.steps for run in runs), made, note)


def _said(runs: Iterable[CalibratedRun]) -> str:
    descriptions = [
        f"{run.name} ({counted(run.steps, 'step')} on {counted(run.num_devices, 'device')}"
        + (")" if run.error is None else f", iteration {run.error:+.0%} off its plan)")
        for run in runs
    ]
    return "calibrated by " + ", ".join(descriptions)
