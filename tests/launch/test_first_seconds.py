"""A launch that is ended in its first seconds ends with one line and 128 + n, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from helpers.cli import run_spindle, spindle_process
from helpers.sleepy_workload import VARIABLE
from helpers.toy_plan import write_toy

pytestmark = pytest.mark.processes
ENDINGS = {signal.SIGINT: (130, "interrupted\n"), signal.SIGTERM: (143, "ended by SIGTERM\n")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)
    write_toy(tmp_path, module="sleepy_workload.py")
    return tmp_path


def end_while_building(folder: Path, number: signal.Signals) -> tuple[int, str]:
    """Send a signal to a launch once it builds: exit code and standard error; all its processes are gone."""
    process = spindle_process("launch", "plan.yaml", "--run-dir", "run")
    give_up_at = time.monotonic() + 120
    while not (folder / "building").exists() and time.monotonic() < give_up_at:
        time.sleep(0.02)
    started = psutil.Process(process.pid).children(recursive=True)
    assert started, "the workers are being prepared meanwhile"
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        _, left = psutil.wait_procs(started, timeout=120)
    assert left == []
    return process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_while_the_workload_is_checked_ends_it_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv(VARIABLE, "launcher")
    assert end_while_building(folder, number) == ENDINGS[number]
    assert not (folder / "run").exists()


@pytest.mark.usefixtures("ready_here")
def test_ctrl_c_before_the_first_step_leaves_the_folder_to_the_next_try(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try by Pythons of its own."""
    monkeypatch.setenv(VARIABLE, "workers")
    code, err = end_while_building(folder, signal.SIGINT)
    assert (code, err.splitlines()[-1]) == (130, "interrupted")
    assert not (folder / "run").exists()
    monkeypatch.delenv(VARIABLE)
    assert run_spindle("launch", "plan.yaml", "--run-dir", "run").code == 0


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.8])
def test_ctrl_c_is_never_lost_in_an_import(folder: Path, after_s: float) -> None:
    process = spindle_process("launch", "plan.yaml", "--run-dir", "run", "--steps", "1000000")
    give_up_at = time.monotonic() + 120
    while not _imports(process.pid) and time.monotonic() < give_up_at:
        time.sleep(0.002)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.splitlines()[-1]) == (130, "interrupted")
    assert not (folder / "run").exists()


def _imports(pid: int) -> bool:
    """Whether Python is up and imports what the command needs: before, no program can say how it ends."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("_pydantic_core" in entry.path for entry in psutil.Process(pid).memory_maps())
    return False
