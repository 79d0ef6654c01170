"""A real run of two sets of tasks: calibrated by it, the plans of both predict what it took."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.cli import run_spindle
from helpers.plans import cluster_of
from spindle_cli.files.artifact import write_json
from spindle_cli.files.run_files import PREDICTED_FILE, PredictedVsMeasured
from spindle_cli.plan.file import read_plan
from spindle_cli.profile.types import Profile

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]

TOYS = Path(__file__).parent / "heavy_toys.py"
# An iteration of one set may be so many times as long as predicted, or as short: the machine does other work.
NEAR = 2.0


@dataclass(frozen=True)
class Made:
    """What came of a run: `report` of a calibration by it, `again` by it once more."""

    folder: Path
    report: dict[str, Any]
    again: dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Every step runs a, every second one b as well; of times that are far off."""
    folder = tmp_path_factory.mktemp("sets")
    train = {"steps": 17, "lr": 1e-3, "sampling": {"every": {"b": 2}}}
    content = {"schema": "spindle.workload/1", "model": f"{TOYS}:build", "train": train}
    (folder / "heavy.yaml").write_text(yaml.safe_dump(content))
    cluster, run = folder / "cluster.yaml", folder / "run"
    write_json(cluster, cluster_of(2))
    for command in (
        ("profile", folder / "heavy.yaml", "-o", folder / "p.json", "--estimate", "--cluster", cluster),
        ("plan", folder / "p.json", "--cluster", cluster, "-o", folder / "plan.yaml"),
        ("launch", folder / "plan.yaml", "--run-dir", run, "--trace", folder / "trace.json"),
    ):
        ended = run_spindle(*command)
        assert ended.code == 0, ended.err
    reports = []
    for before, after in (("p.json", "once.json"), ("once.json", "twice.json")):
        ended = run_spindle("calibrate", run, folder / before, "-o", folder / after, "--json")
        assert ended.code == 0, ended.err
        reports.append(json.loads(ended.out))
    return Made(folder, *reports)


def test_the_run_tells_its_sets_apart(made: Made) -> None:
    """Nine steps of both, eight of a; the first of each is left out."""
    found = PredictedVsMeasured.read(made.folder / "run" / PREDICTED_FILE)
    plan = read_plan(made.folder / "plan.yaml")
    assert {each.tasks: each.steps for each in found.task_sets} == {("a", "b"): 8, ("a",): 7}
    for each in found.task_sets:
        assert len(each.slices) == len(plan.set_plans[each.tasks].slices)
        assert all(piece.forward_s > 0 and piece.backward_s > 0 for piece in each.slices)
        assert max(device.compute_s for device in each.devices) < each.iteration.measured_s * NEAR
    longest = {each.tasks: each.iteration.measured_s for each in found.task_sets}
    assert longest["a", "b"] > longest["a",]


def test_iterations_of_both_sets_are_predicted_as_measured(made: Made) -> None:
    (run,) = made.report["iterations"]
    assert {tuple(each["tasks"]): each["share"] for each in run["task_sets"]} == {
        ("a",): 0.5,
        ("a", "b"): 0.5,
    }
    for each in run["task_sets"]:
        assert 1 / NEAR < each["after_s"] / each["measured_s"] < NEAR
    by_steps = [
        sum(each["steps"] * each[name] for each in run["task_sets"]) for name in ("after_s", "measured_s")
    ]
    assert by_steps[0] >= by_steps[1] * (1 - 1e-9)
    held_up = Profile.read(made.folder / "once.json").calibration
    assert held_up is not None
    if held_up.held_up:
        assert by_steps[0] == pytest.approx(by_steps[1], rel=1e-9)


def test_a_plan_by_it_is_one_of_such_steps(made: Made) -> None:
    ended = run_spindle(
        *("plan", made.folder / "p.json", "--cluster", made.folder / "cluster.yaml"),
        *("-o", made.folder / "next.yaml", "--history", made.folder),
    )
    assert ended.code == 0, ended.err
    plan = read_plan(made.folder / "next.yaml")
    assert "16 steps" in " ".join(plan.notes)
    (run,) = made.report["iterations"]
    assert plan.task_sets and 1 / NEAR < plan.mean_iteration_s / run["measured_s"] < NEAR


def test_once_more_changes_nothing(made: Made) -> None:
    (once,), (twice,) = made.report["iterations"], made.again["iterations"]
    for name in ("after_s", "before_s"):
        assert twice[name] == pytest.approx(once["after_s"], rel=1e-6)
    profiles = [Profile.read(made.folder / name) for name in ("once.json", "twice.json")]
    for old, new in zip(profiles[0].metaops, profiles[1].metaops, strict=True):
        for before, after in zip(old.curve, new.curve, strict=True):
            assert (after.forward_s, after.backward_s) == pytest.approx((before.forward_s, before.backward_s))
