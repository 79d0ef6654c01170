"""Damage to a run's files and disk: what is whole is gone on from, and what is wrong is said."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_scenarios import DAMAGED, EVERY_STEP, FULL_DISK, PORT_TAKEN, Scenario
from test_faults import launch, require_same_model, undisturbed  # noqa: F401

from helpers.cli import run_spindle
from helpers.faulty_workload import write_faults
from helpers.toy_plan import write_toy
from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.checkpoint.index import INDEX_FILE
from spindle_cli.launch.starting.network import LOOPBACK, listen

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]
DISK_BYTES = 80 * 2**20


def require_said(scenario: Scenario, err: str) -> None:
    missing = [text for text in scenario.said if text not in err]
    assert not missing, err


def test_of_damaged_checkpoints_the_newest_whole_one_is_used(
    undisturbed: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launch(monkeypatch, tmp_path, *EVERY_STEP, "--keep", "9", "--steps", "5").code == 0
    steps = [checkpoint_folder(tmp_path / "run", step) for step in range(6)]
    os.truncate(steps[5] / "rank-00001.safetensors", 100)
    (steps[4] / "rank-00000.safetensors").unlink()
    flip_last_bit(steps[3] / "rank-00001.safetensors")
    (steps[2] / INDEX_FILE).unlink()
    ended = launch(monkeypatch, tmp_path, "--resume")
    assert ended.code == DAMAGED.code, ended.err
    require_said(DAMAGED, ended.err)
    require_same_model(tmp_path / "run", undisturbed)


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, of `DISK_BYTES`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("a disk of its own needs root and the `mount` command")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "spindle-test", folder],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        pytest.skip(f"no tmpfs here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(
    undisturbed: Path,  # noqa: F811
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = write_faults(small_disk, *FULL_DISK.faults)
    ended = launch(monkeypatch, small_disk, *FULL_DISK.options, env=faults)
    assert ended.code == FULL_DISK.code, ended.err
    require_said(FULL_DISK, ended.err)
    (small_disk / "filler").unlink()
    again = launch(monkeypatch, small_disk, "--resume")
    assert again.code == 0, again.err
    require_same_model(small_disk / "run", undisturbed)


def test_a_port_that_is_taken_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_toy(tmp_path, devices_per_node=1)
    with listen(LOOPBACK, 0) as taken:
        master = f"{LOOPBACK}:{taken.getsockname()[1]}"
        ended = run_spindle("launch", "plan.yaml", "--node-rank", 0, "--master", master)
    assert ended.code == PORT_TAKEN.code
    require_said(PORT_TAKEN, ended.err)
    assert not (tmp_path / "runs").exists()
