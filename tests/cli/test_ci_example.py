"""The CI example does what its page says: passes as committed, fails when the plan gets slower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ci"


def run_job(out: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OUT": str(out),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [str(EXAMPLE / "check_plan.sh"), *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120, cwd=out
    )


def test_the_committed_plan_holds(tmp_path: Path) -> None:
    ended = run_job(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert abs(json.loads((tmp_path / "diff.json").read_text())["figures"][0]["growth"]) <= 0.03


@pytest.mark.parametrize(("slower", "code"), [pytest.param(1.02, 0, marks=pytest.mark.long), (1.1, 1)])
def test_slower_ops_fail_the_job_beyond_three_percent(tmp_path: Path, slower: float, code: int) -> None:
    profile = json.loads((EXAMPLE / "profile.json").read_text())
    for metaop in profile["metaops"]:
        for point in metaop["curve"]:
            point["forward_s"] *= slower
            point["backward_s"] *= slower
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(profile))
    ended = run_job(tmp_path, changed)
    assert ended.returncode == code, ended.stderr
    assert ("grew by" in ended.stderr) == (code == 1)


def test_a_broken_profile_ends_with_its_own_code(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert run_job(tmp_path, broken).returncode == 3
