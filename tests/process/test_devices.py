"""Cores that a process may use: those that its container grants, by control groups written by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spindle_cli.process import devices
from spindle_cli.process.devices import cores_of_time, granted_cores, usable_cores


def groups(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """A tree of control groups, and what /proc says of the process; '__' stands for '/' in names of files."""
    for name, text in files.items():
        path = folder / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return folder / "cgroup", folder / "own"


def test_version_2_grants_a_quota_of_each_period(tmp_path: Path) -> None:
    assert granted_cores(*groups(tmp_path, "0::/\n", cpu_dot_max="250000 100000\n")) == 2.5


def test_max_is_no_limit(tmp_path: Path) -> None:
    assert granted_cores(*groups(tmp_path, "0::/\n", cpu_dot_max="max 100000\n")) is None


def test_of_a_group_and_those_around_it_the_least_counts(tmp_path: Path) -> None:
    limits = {"a__cpu_dot_max": "300000 100000", "a__b__cpu_dot_max": "800000 100000"}
    assert granted_cores(*groups(tmp_path, "0::/a/b\n", **limits)) == 3.0


def test_a_group_that_is_called_otherwise_inside_is_read_at_the_root(tmp_path: Path) -> None:
    given = groups(tmp_path, "0::/docker/123\n", cpu_dot_max="100000 50000")
    assert granted_cores(*given) == 2.0


def test_version_1_has_quota_and_period_in_two_files(tmp_path: Path) -> None:
    own = "5:memory:/x\n4:cpu,cpuacct:/docker/1\n"
    limits = {"cpu,cpuacct__cpu_dot_cfs_quota_us": "150000", "cpu,cpuacct__cpu_dot_cfs_period_us": "100000"}
    assert granted_cores(*groups(tmp_path, own, **limits)) == 1.5
    limits["cpu,cpuacct__cpu_dot_cfs_quota_us"] = "-1"
    assert granted_cores(*groups(tmp_path, own, **limits)) is None


@pytest.mark.parametrize("text", ["", "many few", "100000", "1 0"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, text: str) -> None:
    assert granted_cores(*groups(tmp_path, "0::/\nnonsense\n", cpu_dot_max=text)) is None
    assert granted_cores(tmp_path / "none", tmp_path / "nothing") is None


@pytest.mark.parametrize(("granted", "usable"), [(None, 4), (2.9, 2), (0.5, 1), (64.0, 4)])
def test_the_quota_limits_what_affinity_allows_to_whole_cores(
    monkeypatch: pytest.MonkeyPatch, granted: float | None, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(devices, "granted_cores", lambda: granted)
    assert usable_cores() == usable


@pytest.mark.parametrize(("granted", "time"), [(None, 4), (2.9, 2.9), (0.5, 0.5), (64.0, 4)])
def test_time_is_granted_in_parts_of_cores(
    monkeypatch: pytest.MonkeyPatch, granted: float | None, time: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(devices, "granted_cores", lambda: granted)
    assert cores_of_time() == time
