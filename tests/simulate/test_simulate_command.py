"""`spindle simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.plans import two_towers
from spindle_cli.cli.app import app
from spindle_cli.plan.file import write_plan
from spindle_cli.simulate.simulation_report import SimulationReport


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    write_plan(path, two_towers()[1])
    return path


def test_it_tells_use_memory_and_waits(plan_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", str(plan_path)])
    assert result.exit_code == 0, result.output
    for text in ("iteration 3.8 s simulated", "peak memory", "gradient sums", "pairs/loss"):
        assert text in result.stdout


def test_json_is_one_document_and_the_trace_a_file(plan_path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = CliRunner().invoke(app, ["simulate", str(plan_path), "--json", "--trace", str(trace)])
    assert result.exit_code == 0, result.output
    report = SimulationReport.from_data(json.loads(result.stdout), where="stdout")
    assert report.num_devices == 4
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_trace_that_cannot_be_written_is_an_input_error(plan_path: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", str(plan_path), "--trace", str(tmp_path / "no" / "t.json")])
    assert result.exit_code == 3
