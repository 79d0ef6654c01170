"""`spindle profile --reuse`: equal ops are not measured again when the tasks have changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_profile_command import TINY

from helpers.cli import run_spindle
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import write_json
from spindle_cli.profile.machine.machine import describe_device
from spindle_cli.profile.measuring.settings import MeasureSettings, Reused
from spindle_cli.profile.op.timings import Limits
from spindle_cli.profile.types import Profile

pytestmark = pytest.mark.processes
FAST = ("--nproc", 1, "--threads", 1, "--time-limit", 0.02, "--accept-noise")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reuse") / "before.json"
    ended = run_spindle("profile", TINY, "-o", path, *FAST)
    assert ended.code == 0, ended.err
    return path


def test_points_of_equal_ops_are_those_of_the_other_profile(before: Path, tmp_path: Path) -> None:
    out = tmp_path / "after.json"
    ended = run_spindle("profile", f"{TINY}_changed", "-o", out, *FAST, "--reuse", before)
    assert ended.code == 0, ended.err
    old, new = Profile.read(before), Profile.read(out)
    assert old.measurements is not None and new.measurements is not None
    equal = old.measurements.timings.keys() & new.measurements.timings.keys()
    fresh = new.measurements.timings.keys() - old.measurements.timings.keys()
    assert all(new.measurements.timings[key] == old.measurements.timings[key] for key in equal)
    assert f"{len(equal)} of {len(equal | fresh)} measurements are those of {before}" in ended.err
    assert new.by_name["classify/layers"].curve == old.by_name["classify/layers"].curve
    # The new task has a batch of its own.
    assert {key.split("/")[1] for key in fresh} == {"32", "8"}  # of the whole batch, and for micro-batches


def test_times_taken_in_another_way_are_refused(before: Path, tmp_path: Path) -> None:
    out = tmp_path / "after.json"
    ended = run_spindle("profile", TINY, "-o", out, *FAST, "--threads", 2, "--reuse", before)
    assert (ended.code, out.exists()) == (3, False)
    assert "measured with threads_per_process = 1, now it is 2" in ended.err


def test_of_more_processes_their_number_is_named_and_not_the_memory_of_each(before: Path) -> None:
    """On 2 cores 4 processes take at least twice as long as 2, and have half of the memory each."""
    reused = Reused.read(before)
    settings = MeasureSettings(
        device="cpu", processes=2, nproc=1, threads=1, max_devices=1, max_points=1, limits=Limits(max_s=0.02)
    )
    with pytest.raises(InputError, match="measured with processes = 1, now it is 2") as refused:
        reused.require_same(settings, describe_device("cpu", 2))
    assert refused.value.hint is not None and "slow each other down" in refused.value.hint


def test_a_profile_without_measurements_is_refused(before: Path, tmp_path: Path) -> None:
    path = tmp_path / "estimated.json"
    write_json(path, Profile.read(before).model_copy(update={"measurements": None}))
    ended = run_spindle("profile", TINY, "-o", tmp_path / "x.json", "--reuse", path)
    assert ended.code == 3 and "keeps no measurements" in ended.err
    assert run_spindle("profile", TINY, "-o", tmp_path / "x.json", "--reuse", path, "--estimate").code == 2
