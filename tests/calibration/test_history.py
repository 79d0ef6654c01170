"""`spindle plan --history`: which of a folder's runs and profiles is nearest, and what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from calibration.made_runs import made_run, slower
from helpers.cli import Ended, run_spindle
from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.calibrate.history import from_history
from spindle_cli.errors import ExitCode
from spindle_cli.files.artifact import write_json
from spindle_cli.files.run_files import PREDICTED_FILE
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.profile.types import Device, Profile

NAME = "a/layers"
PROFILE = profile_of(
    metaop_of(NAME, 6, {1: 0.4, 2: 0.2, 4: 0.1, 8: 0.05}), metaop_of("b/x", 2, {1: 0.3, 2: 0.2})
)


def run(
    folder: Path,
    num_devices: int,
    times: float,
    *,
    nodes: int = 1,
    steps: int = 10,
    strategy: StrategyName = "spindle",
) -> Path:
    """A run on so many devices that took so many times as long."""
    cluster = cluster_of(num_devices, devices_per_node=num_devices // nodes)
    plan = make_plan(PROFILE, cluster, strategy, effort=0)
    return made_run(folder, plan, slower(PROFILE, {NAME: (times, times)}), steps=steps)


def times_of(folder: Path, num_devices: int, *, nodes: int = 1) -> float:
    """How many times as long as in the profile what `from_history` gives takes."""
    goal = cluster_of(num_devices, devices_per_node=num_devices // nodes)
    found = from_history(folder, PROFILE, Path("profile.json"), goal)
    return found.profile.by_name[NAME].curve[0].op_s / 0.4


def test_the_run_on_the_nearest_number_of_devices_is_taken(tmp_path: Path) -> None:
    run(tmp_path / "one", 1, 2.0)
    run(tmp_path / "deep/er/two", 2, 3.0)
    run(tmp_path / "eight", 8, 5.0)
    assert times_of(tmp_path, 1) == pytest.approx(2.0)
    assert times_of(tmp_path, 2) == pytest.approx(3.0)
    assert times_of(tmp_path, 3) == pytest.approx(3.0)  # 3 / 2 is less than 8 / 3
    assert times_of(tmp_path, 8) == pytest.approx(5.0)
    assert times_of(tmp_path, 5) == pytest.approx(5.0)  # 8 / 5 is less than 5 / 2, though 3 more


def test_of_the_same_number_the_nearest_number_of_nodes(tmp_path: Path) -> None:
    run(tmp_path / "one", 4, 2.0)
    run(tmp_path / "four", 4, 3.0, nodes=4)
    assert times_of(tmp_path, 4) == pytest.approx(2.0)
    assert times_of(tmp_path, 4, nodes=4) == pytest.approx(3.0)


def test_runs_that_are_equally_near_count_together_by_their_steps(tmp_path: Path) -> None:
    run(tmp_path / "one", 2, 2.0, steps=10)
    run(tmp_path / "two", 2, 4.0, steps=30)
    assert times_of(tmp_path, 2) == pytest.approx(3.5)


def test_a_calibrated_profile_is_taken_where_it_is_nearer_or_has_more_steps(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    run(folder / "two", 2, 2.0, steps=10)
    made = run(tmp_path / "eight", 8, 5.0, steps=20)
    write_json(tmp_path / "profile.json", PROFILE)
    run_spindle("calibrate", made, tmp_path / "profile.json", "-o", folder / "calibrated.json")
    assert times_of(folder, 8) == pytest.approx(5.0)
    assert times_of(folder, 2) == pytest.approx(2.0)
    run(folder / "more", 8, 7.0, steps=19)
    assert times_of(folder, 8) == pytest.approx(5.0)
    run(folder / "many", 8, 7.0, steps=2)
    assert times_of(folder, 8) == pytest.approx(7.0)


def test_a_profile_is_as_near_as_the_nearest_of_its_runs(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    made = [run(tmp_path / "one", 1, 2.0, steps=5), run(tmp_path / "eight", 8, 2.0)]
    folder.mkdir()
    write_json(tmp_path / "profile.json", PROFILE)
    run_spindle("calibrate", *made, tmp_path / "profile.json", "-o", folder / "calibrated.json")
    run(folder / "two", 2, 3.0, steps=20)
    assert times_of(folder, 1) == pytest.approx(2.0)
    assert times_of(folder, 8) == pytest.approx(2.0)
    assert times_of(folder, 2) == pytest.approx(3.0)
    run(folder / "single", 1, 4.0, steps=6)  # more than the five on one device
    assert times_of(folder, 1) == pytest.approx(4.0)


def test_profiles_of_another_type_of_device_and_what_lies_too_deep_are_not_taken(tmp_path: Path) -> None:
    made = run(tmp_path / "run", 2, 2.0)
    write_json(tmp_path / "profile.json", PROFILE)
    folder = tmp_path / "history"
    folder.mkdir()
    run_spindle("calibrate", made, tmp_path / "profile.json", "-o", folder / "calibrated.json")
    assert times_of(folder, 2) == pytest.approx(2.0)
    calibrated = Profile.read(folder / "calibrated.json")
    gpu = Device(type="cuda", name="NVIDIA H200", memory_bytes=2**37)
    write_json(folder / "calibrated.json", calibrated.model_copy(update={"device": gpu}))
    assert times_of(folder, 2) == 1.0
    run(folder / "a/b/c/d", 2, 5.0)
    assert times_of(folder, 2) == 1.0
    run(folder / "a/b/c", 2, 5.0)
    assert times_of(folder, 2) == pytest.approx(5.0)


def test_what_is_of_others_is_left_alone_and_what_is_damaged_named(tmp_path: Path) -> None:
    write_json(tmp_path / "own.json", PROFILE)  # not calibrated
    (tmp_path / "notes.json").write_text("[]")
    other = PROFILE.workload.model_copy(update={"fingerprint": "sha256:" + "2" * 64})
    fields = {name: getattr(PROFILE, name) for name in Profile.model_fields}
    plan = make_plan(Profile(**{**fields, "workload": other}), cluster_of(2), effort=0)
    made_run(tmp_path / "other", plan, PROFILE)
    going_on = run(tmp_path / "going-on", 2, 2.0)
    (going_on / PREDICTED_FILE).unlink()
    damaged = run(tmp_path / "damaged", 2, 2.0)
    (damaged / "run-plan.yaml").unlink()
    found = from_history(tmp_path, PROFILE, Path("profile.json"), cluster_of(2))
    assert found.profile == PROFILE
    assert "No run or calibrated profile" in found.note
    (line,) = found.passed_over
    assert line.startswith(f"passed over: {damaged}: the plan of this run is not in it")


def plan_with(folder: Path) -> tuple[Ended, Path]:
    write_json(folder / "profile.json", PROFILE)
    cluster = cluster_of(2).model_dump(mode="json", by_alias=True, exclude_none=True)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    out = folder / "plan.yaml"
    arguments = (folder / "profile.json", "--cluster", folder / "cluster.yaml", "-o", out)
    return run_spindle("plan", *arguments, "--history", folder / "history"), out


def test_the_plan_says_whose_times_it_has_and_calibrate_makes_its_profile(tmp_path: Path) -> None:
    # Six ops of 0.2 s and two of 0.2: 1.6 s, of which 1.2 take twice as long.
    made = run(tmp_path / "history/first", 2, 2.0, strategy="sequential")
    ended, path = plan_with(tmp_path)
    assert ended.code == 0, ended.err
    plan = Plan.read(path)
    assert "calibrated by first (10 steps on 2 devices, iteration +75% off its plan)" in plan.notes[0]
    assert f"`spindle calibrate {made} PROFILE.json`" in plan.notes[0]
    truth = slower(PROFILE, {NAME: (2.0, 2.0)})
    assert plan.predicted.iteration_s == pytest.approx(make_plan(truth, cluster_of(2)).predicted.iteration_s)
    run_spindle("calibrate", made, tmp_path / "profile.json", "-o", tmp_path / "out.json")
    checked = run_spindle("check", path, "--profile", tmp_path / "out.json")
    assert checked.code == 0, checked.out


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    ended, path = plan_with(tmp_path)
    assert ended.code == ExitCode.BAD_INPUT
    assert "cannot be read" in ended.err
    assert not path.exists()
