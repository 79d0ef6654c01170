"""A workload whose layers are compiled is measured compiled, and its profile and plan say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from test_profile_command import TINY

from helpers.cli import run_spindle
from helpers.plans import cluster_of
from spindle_cli.plan.file import read_plan, write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.types import Profile

pytestmark = pytest.mark.processes

FAST = ("--nproc", 1, "--threads", 1, "--time-limit", 0.02, "--accept-noise")


def test_profile_and_plan_say_by_what_layers_were_compiled(tmp_path: Path) -> None:
    content = {"schema": "spindle.workload/1", "model": TINY, "train": {"compile": "aot_eager"}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    out, plan = tmp_path / "profile.json", tmp_path / "plan.yaml"
    ended = run_spindle("profile", tmp_path / "tiny.yaml", "-o", out, *FAST)
    assert ended.code == 0, ended.err
    profile = Profile.read(out)
    assert profile.compiled_by == "aot_eager"
    write_plan(plan, make_plan(profile, cluster_of(1), "sequential"))
    assert "compile: aot_eager" in plan.read_text()
    assert read_plan(plan).compile == "aot_eager"
    again = run_spindle("profile", TINY, "-o", tmp_path / "plain.json", *FAST, "--reuse", out)
    assert again.code == 3
    assert "measured with compile = 'aot_eager', now it is None" in again.err
