"""Files that belong together, every command that reads them, and how a user's mistake must end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from helpers.cli import Ended, run_spindle
from helpers.plans import cluster_of, two_towers
from spindle_cli.files.artifact import to_json
from spindle_cli.plan.file import write_plan

Edit = Callable[[dict[str, Any]], object]


def write_files(folder: Path) -> Path:
    """Put a profile, a cluster, and a plan that belong together into a folder; the folder."""
    profile, plan = two_towers()
    (folder / "profile.json").write_text(to_json(profile))
    (folder / "cluster.yaml").write_text(to_json(cluster_of(4)))  # JSON is YAML
    write_plan(folder / "plan.yaml", plan)
    return folder


def plan_command(files: Path) -> Ended:
    return run_spindle(
        "plan", files / "profile.json", "--cluster", files / "cluster.yaml", "-o", files / "new.yaml"
    )


def check_command(files: Path) -> Ended:
    return run_spindle("check", files / "plan.yaml", "--profile", files / "profile.json")


def show_command(files: Path) -> Ended:
    return run_spindle("show", files / "plan.yaml")


def launch_command(files: Path) -> Ended:
    return run_spindle("launch", files / "plan.yaml", "--dry-run")


def simulate_command(files: Path) -> Ended:
    return run_spindle("simulate", files / "plan.yaml")


def explain_command(files: Path) -> Ended:
    return run_spindle("explain", files / "plan.yaml", "--profile", files / "profile.json")


def report_command(files: Path) -> Ended:
    return run_spindle("report", files / "plan.yaml", "-o", files / "report.html")


def diff_command(files: Path) -> Ended:
    return run_spindle("diff", files / "plan.yaml", files / "plan.yaml")


def sweep_command(files: Path) -> Ended:
    return run_spindle("sweep", files / "profile.json", "--cluster", files / "cluster.yaml")


def compare_command(files: Path) -> Ended:
    return run_spindle("compare", files / "profile.json", "--cluster", files / "cluster.yaml")


def verify_command(files: Path) -> Ended:
    return run_spindle("verify", files / "plan.yaml")


def assert_one_message(ended: Ended, code: int, *named: str) -> None:
    """One message on standard error, nothing on standard output, no traceback."""
    assert ended.code == code, ended
    assert ended.out == ""
    assert len(re.findall(r"^error: ", ended.err, re.M)) == 1, ended.err
    assert "Traceback" not in ended.err
    for text in named:
        assert text in ended.err


def edit_json(path: Path, edit: Edit) -> None:
    """Change a JSON (or YAML) file's data."""
    data = yaml.safe_load(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def set_in_profile(*path: Any, value: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        place: Any = data["metaops"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return edit
