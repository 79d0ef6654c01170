"""Pythons that tests fork are as those that are started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from helpers.ready_python import ReadyPython


@pytest.mark.processes
def test_a_forked_python_is_as_one_of_its_own(forker: socket.socket, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": "/some/where", "PYTHONUSERBASE": "/some/one"}
    said = []
    for start in (partial(ReadyPython, forker), subprocess.Popen):
        with tempfile.TemporaryFile("w+") as out:
            process = start([sys.executable, "-m", "site"], env=environment, cwd=tmp_path, stdout=out)
            assert process.wait(120) == 0
            out.seek(0)
            said.append([line for line in out if "/some/" in line or str(tmp_path) in line])
    assert said[0] == said[1]
    assert len(said[0]) == 4, said[0]


@pytest.mark.processes
def test_how_a_forked_python_ends_is_told(forker: socket.socket, tmp_path: Path) -> None:
    failing = [sys.executable, "-m", "json.tool", str(tmp_path / "missing.json")]
    with tempfile.TemporaryFile() as errors:
        assert ReadyPython(forker, failing, stdout=errors, stderr=subprocess.STDOUT).wait(120) != 0
    waiting = ReadyPython(forker, [sys.executable, "-m", "json.tool"], stdin=subprocess.PIPE)
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.1)
    waiting.kill()
    assert waiting.wait(120) == -9
    assert waiting.stdin is not None
    waiting.stdin.close()
