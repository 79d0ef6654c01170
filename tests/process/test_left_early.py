"""Code of the user's that ends the process is an error that is said, not an end of the work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cli import run_spindle
from spindle_cli.files.request import WorkerError, error_path


@pytest.mark.parametrize(("call", "shown"), [("sys.exit(0)", "sys.exit(0)"), ("exit()", "sys.exit()")])
def test_a_worker_that_its_workload_ends_has_failed(call: str, shown: str, tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from spindle_cli.process.worker_session import worker_session\n"
        f"with worker_session(Path(sys.argv[1]), 3):\n    {call}\n"
    )
    ended = subprocess.run([sys.executable, script, tmp_path / "run"], check=False, timeout=120)
    error = WorkerError.read(error_path(tmp_path / "run", 3))
    assert (ended.returncode, error.exit_code, error.rank) == (1, 1, 3)
    assert error.message.startswith(f"{shown} was called before the work was done, at {script}:5")
    assert not error.lost_peer and not error.may_pass


@pytest.mark.parametrize("where", ["import", "build"])
def test_a_workload_that_ends_the_command_is_said(where: str, tmp_path: Path) -> None:
    path = tmp_path / "work.py"
    path.write_text(
        "import sys\ndef build():\n    sys.exit(0)\n" + ("build()\n" if where == "import" else "")
    )
    out = tmp_path / "p.json"
    ended = run_spindle("profile", f"{path}:build", "-o", out, "--estimate", "--device", "h100", "--nproc", 1)
    assert ended.code == 1
    assert f"sys.exit(0) was called before the work was done, at {path}:3 in build" in ended.err
    assert not out.exists()
