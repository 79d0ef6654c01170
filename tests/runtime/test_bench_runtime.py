"""The runtime's benchmark: what it makes of its runs, and what it says where it cannot run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from runtime_bench.contestants import WARM_UP, Run, as_run
from runtime_bench.errors import BenchError
from runtime_bench.hosts import require_tools
from runtime_bench.page import BEGIN, END, Outcome, Trial, read_outcome, write_outcome
from runtime_bench.plain_training import Step


def test_losses_of_two_halves_are_averaged_and_the_warm_up_is_left_out() -> None:
    first = [Step(float(n), {"a": 1.0 + n}) for n in range(WARM_UP + 2)]
    second = [Step(9.0, {"a": 3.0 + n}) for n in range(WARM_UP + 2)]
    run = as_run([first, second])
    assert run.iterations_s == [float(WARM_UP), float(WARM_UP + 1)]
    assert [losses["a"] for losses in run.losses] == [2.0 + n for n in range(WARM_UP + 2)]


def trial(name: str) -> Trial:
    runs = {
        "ddp": [Run([1.0, 1.0, 1.0], [{"a": 2.0}]), Run([3.0], [{"a": 2.0}])],
        "spindle": [Run([0.5], [{"a": 2.002}], outside=0.01)],
    }
    return Trial.of(name, "here", runs, {"spindle": 0.4})


def test_a_table_has_shares_of_ddps_time_and_errors_of_predictions() -> None:
    *_, ddp, spindle, _ = trial("all").lines()
    assert ddp == "| DDP, task after task | 1000 ms | 1.000 | 1000, 3000 |  |  |  | 0e+00 |"
    assert spindle == "| `spindle` plan | 500 ms | 0.500 | 500 | 400 ms | +25.0% | 1.0% | 1e-03 |"


def test_new_results_take_the_places_of_old_ones_and_leave_the_others(tmp_path: Path) -> None:
    page = tmp_path / "two-hosts.md"
    page.write_text(f"# Before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_outcome(tmp_path, Outcome(trials={"slow": trial("slow")}))
    write_outcome(tmp_path, read_outcome(tmp_path).updated(Outcome(trials={"fast": trial("fast")})))
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert text.index("**slow**") < text.index("**fast**")
    assert list(read_outcome(tmp_path).trials) == ["slow", "fast"]


def test_missing_tools_and_rights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    with pytest.raises(BenchError, match=r"^tc not found; install iproute2"):
        require_tools()
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BenchError, match="root"):
        require_tools()
