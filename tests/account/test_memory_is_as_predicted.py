"""The memory that workers take is what their plan says: never more, and at most 10 % less.

Under autocast it may be 20 % less: values between layers are counted as they are without it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench_memory import Row, rows

# Each word of the variants' names once or twice; scripts/bench_memory.py measures all of them.
NAMES = (
    "whole optimizer state, loss in chunks",
    "parameters shared out, tp 2, bf16, accumulate 2",
    "tp 2, recomputed",
    "tasks in groups",
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """Of each variant, by its name; on two devices, in real processes."""
    folder = tmp_path_factory.mktemp("memory")
    source = folder / "memory.yaml"
    model = f"{Path(__file__).parents[1] / 'runtime' / 'memory_toys.py'}:build"
    source.write_text(yaml.safe_dump({"schema": "spindle.workload/1", "model": model}))
    return {row.variant: row for row in rows(source, 2, ("spindle",), NAMES, folder / "runs")}


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_takes_what_the_plan_says(name: str, measured: dict[str, Row]) -> None:
    most = 1.20 if "autocast" in name else 1.10
    assert all(1.0 <= ratio <= most for ratio in measured[name].ratios), measured[name].line()
