"""What the suite runs by: groups of tests, and Pythons that are forked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from helpers.groups import group_of, place_in_order
from helpers.ready_python import ReadyPython


@dataclass(frozen=True)
class Item:
    """As much of a `pytest.Item` as groups are made by."""

    nodeid: str
    fixturenames: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


PROCESSES = ("processes",)
KILLED = Item("tests/reliability/test_faults.py::test_nothing[killed]", marks=PROCESSES)
SIGNAL = Item("tests/launch/test_process.py::test_signal", marks=PROCESSES)
EXACT = Item("tests/runtime/test_exact.py::test_a", ("four_workers",), PROCESSES)
RESUMED = Item("tests/runtime/test_resume.py::test_b", ("tmp_path", "four_workers"), PROCESSES)
OF_TWO = Item("tests/runtime/test_exact.py::test_c", ("two_workers",), PROCESSES)
VERIFIED = Item("tests/verify/test_precision.py::test_d", marks=PROCESSES)
REQUEST = Item("tests/launch/test_request.py::test_e")


def test_tests_that_wait_are_one_group_and_those_of_a_run_another() -> None:
    groups = [group_of(test) for test in (KILLED, SIGNAL, EXACT, RESUMED, OF_TWO, VERIFIED, REQUEST)]  # type: ignore[arg-type]
    assert groups == [
        *("waiting", "waiting", "four_workers", "four_workers", "two_workers"),
        *("tests/verify/test_precision.py", "tests/launch/test_request.py"),
    ]


def test_what_takes_long_begins_first() -> None:
    begun = sorted((REQUEST, VERIFIED, EXACT, KILLED), key=place_in_order)  # type: ignore[arg-type]
    assert begun == [KILLED, EXACT, VERIFIED, REQUEST]


@pytest.mark.processes
def test_a_forked_python_is_as_one_of_its_own(forker: socket.socket, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": "/some/where", "PYTHONUSERBASE": "/some/one"}
    said = []
    for start in (partial(ReadyPython, forker), subprocess.Popen):
        with tempfile.TemporaryFile("w+") as out:
            process = start([sys.executable, "-m", "site"], env=environment, cwd=tmp_path, stdout=out)
            assert process.wait(60) == 0
            out.seek(0)
            said.append([line for line in out if "/some/" in line or str(tmp_path) in line])
    assert said[0] == said[1]
    assert len(said[0]) == 4, said[0]


@pytest.mark.processes
def test_how_a_forked_python_ends_is_told(forker: socket.socket, tmp_path: Path) -> None:
    failing = [sys.executable, "-m", "json.tool", str(tmp_path / "missing.json")]
    with tempfile.TemporaryFile() as errors:
        assert ReadyPython(forker, failing, stdout=errors, stderr=subprocess.STDOUT).wait(60) != 0
    waiting = ReadyPython(forker, [sys.executable, "-m", "json.tool"], stdin=subprocess.PIPE)
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.1)
    waiting.kill()
    assert waiting.wait(60) == -9
    assert waiting.stdin is not None
    waiting.stdin.close()
