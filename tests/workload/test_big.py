"""A workload of nine billion parameters is analysed without allocating it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import json, re, sys, time
from pathlib import Path
started = time.process_time()
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.analysis.analyse import analyse
from spindle_cli.workload.graph import ParameterTable
graph = analyse(load_abstract("workload.big:build").workload)
json.dump({
    "seconds": time.process_time() - started,
    # This process's own peak: getrusage would count that of the one that started it, too.
    "bytes": int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024,
    "parameters": sum(p.numel() for p in ParameterTable.of(graph).parameters.values()),
    "metaops": {m.name: len(m.ops) for m in graph.metaops},
    "shared": sorted({m.parameters for m in graph.metaops}),
}, sys.stdout)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its peak memory from /proc")
def test_nine_billion_parameters_take_seconds_and_less_than_a_gigabyte() -> None:
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=tests, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["parameters"] > 9e9
    assert found["metaops"] == {
        "vl/encoders": 12,
        "vl/language": 8,
        "al/encoders": 8,
        "al/language": 8,
        "val/encoders.0": 12,
        "val/encoders.1": 8,
        "val/language": 8,
    }
    assert len(found["shared"]) == 3
    assert found["seconds"] < 20  # 3 by itself
    assert found["bytes"] < 1e9
