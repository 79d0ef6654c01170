"""The memory that workers take is what their plan says: never more, and at most 10 % less.

Under autocast it may be 20 % less: values between layers are counted as they are without it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from helpers.ready_python import ReadyPython

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_memory
from bench_memory import Row, rows

pytestmark = pytest.mark.processes

# Each word of the variants' names once or twice; scripts/bench_memory.py measures all of them.
NAMES = (
    "whole optimizer state, loss in chunks",
    "parameters shared out, tp 2, bf16, accumulate 2",
    "in two stages, in micro-batches",
    pytest.param("tp 2, recomputed", marks=pytest.mark.long),
    pytest.param("tasks in groups", marks=pytest.mark.long),
)


@pytest.fixture(scope="module")
def measured(
    request: pytest.FixtureRequest, forker: socket.socket, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Row]:
    """Of each variant that a test asks for, by its name; on two devices, in processes that have torch at
    once.
    """
    own = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in own if isinstance(item, pytest.Function)]
    folder, scripts = tmp_path_factory.mktemp("memory"), Path(bench_memory.__file__).parent

    def run_ready(command: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / "log").open("w+b") as log:
            python = ReadyPython(forker, command, env=environment, cwd=scripts, stdout=log, stderr=log)
            code = python.wait(280)
            log.seek(0)
            assert code == 0, log.read().decode(errors="replace")

    source = folder / "memory.yaml"
    model = f"{Path(__file__).parents[1] / 'runtime' / 'memory_toys.py'}:build"
    source.write_text(yaml.safe_dump({"schema": "spindle.workload/1", "model": model}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_memory, "run_command", run_ready)
        return {row.variant: row for row in rows(source, 2, ("spindle",), names, folder / "runs")}


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_takes_what_the_plan_says(name: str, measured: dict[str, Row]) -> None:
    most = 1.20 if "autocast" in name else 1.10
    assert all(1.0 <= ratio <= most for ratio in measured[name].ratios), measured[name].line()
