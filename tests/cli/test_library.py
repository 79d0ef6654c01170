"""`spindle_cli.profile(...)` and `spindle_cli.plan(...)` do what the commands do; scripts are launched."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import spindle_cli as spindle
from helpers import toy_workload
from helpers.cli import run_spindle
from helpers.plans import cluster_of
from helpers.toy_plan import write_toy
from spindle_cli.api import source_of
from spindle_cli.errors import InputError, UsageError
from spindle_cli.files.artifact import write_json
from spindle_cli.plan.file import read_plan


def test_importing_spindle_loads_no_torch_until_a_name_is_used() -> None:
    code = (
        "import sys, spindle_cli as spindle\n"
        "assert callable(spindle.plan) and callable(spindle.profile)\n"
        "assert spindle.Plan and spindle.Evaluation\n"
        "assert 'torch' not in sys.modules\n"
        "assert spindle.Trainer and spindle.Callback and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_plan_takes_paths_or_objects_and_gives_what_the_command_writes(tmp_path: Path) -> None:
    write_toy(tmp_path)
    write_json(tmp_path / "cluster.yaml", cluster_of(2))
    words = ("plan", tmp_path / "profile.json", "--cluster", tmp_path / "cluster.yaml")
    assert run_spindle(*words, "-o", tmp_path / "by-command.yaml").code == 0
    by_path = spindle.plan(tmp_path / "profile.json", tmp_path / "cluster.yaml", tmp_path / "by-path.yaml")
    by_object = spindle.plan(spindle.Profile.read(tmp_path / "profile.json"), cluster_of(2))
    assert (tmp_path / "by-path.yaml").read_bytes() == (tmp_path / "by-command.yaml").read_bytes()
    assert read_plan(tmp_path / "by-path.yaml") == by_path == by_object


def test_an_estimate_from_python_is_that_of_the_command(tmp_path: Path) -> None:
    write_toy(tmp_path)
    write_json(tmp_path / "cluster.yaml", cluster_of(2))
    source, cluster = str(tmp_path / "toy.yaml"), tmp_path / "cluster.yaml"
    words = ("profile", source, "--estimate", "--cluster", cluster, "-o", tmp_path / "profile.json")
    assert run_spindle(*words).code == 0
    made = spindle.profile(source, cluster=cluster, estimate=True)
    assert made.metaops == spindle.Profile.read(tmp_path / "profile.json").metaops


def test_a_workload_is_named_so_that_workers_find_it() -> None:
    assert source_of("toy.yaml") == "toy.yaml"
    assert source_of(toy_workload.build) == f"{toy_workload.__file__}:build"
    for unnamed in (partial(toy_workload.build), lambda: None, toy_workload.build()):
        with pytest.raises(UsageError, match=r"workload: found a .*, expected a workload file"):
            source_of(unnamed)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json"):
        spindle.plan(tmp_path / "nowhere.json", cluster_of(2))


def test_a_script_needs_a_plan_and_a_plan_takes_no_words(tmp_path: Path) -> None:
    plan = write_toy(tmp_path)
    script = tmp_path / "mine.py"
    script.write_text("")
    alone = run_spindle("launch", script)
    assert (alone.code, "a script, and no plan to run it by" in alone.err) == (2, True)
    words = run_spindle("launch", plan, "word")
    assert (words.code, "word: arguments are for a script" in words.err) == (2, True)
    missing = run_spindle("launch", tmp_path / "nowhere.py", "--plan", plan)
    assert (missing.code, "nowhere.py: no such file" in missing.err) == (3, True)


SCRIPT = """
import sys
import spindle_cli as spindle

if __name__ == "__main__":
    with spindle.Trainer() as trainer:
        for step in trainer:
            if sys.argv[1] == "raises" and step.number == 2:
                raise ValueError("mine")
            if sys.argv[1] == "leaves" and step.number == 3:
                break
"""


@pytest.mark.processes
@pytest.mark.usefixtures("ready_here")
def test_scripts_are_launched_as_plans_are(tmp_path: Path) -> None:
    """All that a script can do with the loop, one launch after another."""
    plan = write_toy(tmp_path)
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    endings = {}
    for way in ("leaves", "raises"):
        folder = tmp_path / way
        ended = run_spindle("launch", script, way, "--plan", plan, "--run-dir", folder, "--restarts", "0")
        endings[way] = ended.code, ended.err
    assert endings["leaves"][0] == 0, endings["leaves"][1]
    assert (tmp_path / "leaves" / "checkpoints" / "step-000003" / "model.safetensors").exists()
    code, err = endings["raises"]
    assert code == 1
    assert "ValueError: mine" in err
    assert "mine.py:9" in err
