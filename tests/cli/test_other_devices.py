"""A profile of one type of device and a cluster of another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cli import Ended, run_spindle
from helpers.readers import assert_one_message, edit_json, write_files
from spindle_cli.plan.file import read_plan


def ask(command: str, files: Path, *more: str) -> Ended:
    out = ("-o", files / "new.yaml") if command == "plan" else ()
    return run_spindle(command, files / "profile.json", "--cluster", files / "cluster.yaml", *out, *more)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A profile of a CPU and a cluster of H100s."""
    write_files(tmp_path)
    edit_json(tmp_path / "cluster.yaml", lambda data: data["nodes"][0].update(device="h100-80gb"))
    return tmp_path


@pytest.mark.parametrize("command", ["plan", "compare", "sweep"])
def test_they_are_refused_unless_the_user_says_to_assume_the_same(command: str, files: Path) -> None:
    ended = ask(command, files)
    assert_one_message(
        ended, 3, "the profile is of 'cpu', and the devices of the cluster 'test' are 'h100-80gb'", "--assume"
    )
    assert not (files / "new.yaml").exists()
    assert ask(command, files, "--assume-same-device").code == 0


def test_a_plan_says_what_was_assumed(files: Path) -> None:
    assert ask("plan", files, "--assume-same-device").code == 0
    assert "Times of 'cpu' are taken for those of h100-80gb." in read_plan(files / "new.yaml").notes
    edit_json(files / "cluster.yaml", lambda data: data["nodes"][0].update(device="cpu"))
    assert ask("plan", files).code == 0
    assert not any("taken for" in note for note in read_plan(files / "new.yaml").notes)


def test_nccl_between_cpus_is_refused(files: Path) -> None:
    def edit(data: dict[str, object]) -> None:
        data["nodes"][0]["device"] = "cpu"  # type: ignore[index]
        data["backend"] = "nccl"

    edit_json(files / "cluster.yaml", edit)
    assert_one_message(ask("plan", files), 3, "nccl moves data between GPUs only")


def test_a_backend_stays_with_the_plan_and_with_fewer_devices(files: Path) -> None:
    edit_json(files / "cluster.yaml", lambda data: data.update(backend="gloo"))
    assert ask("plan", files, "--assume-same-device").code == 0
    assert read_plan(files / "new.yaml").cluster.talks_by == "gloo"
    swept = json.loads(ask("sweep", files, "--assume-same-device", "--json").out)
    assert swept["points"]
