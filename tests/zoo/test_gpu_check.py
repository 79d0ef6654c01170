"""`make gpu-check` without a GPU: what it says of what it finds, inside its time."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_bench.commands import CommandFailedError, Commands, NotReachedError
from gpu_bench.record import Line, document, memory_line, passed, share_of_peak, table, time_line

from helpers.plans import metaop_of

H200 = "h200-141gb"


def ended(out: str = "", code: int = 0, err: str = "") -> Any:
    return lambda command, **_: subprocess.CompletedProcess(command, code, out, err)


def test_without_a_gpu_it_says_so_and_ends_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["-o", str(tmp_path / "found.json")]) == 3
    assert "there is no GPU here" in capsys.readouterr().out
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize(
    ("predicted_s", "status"), [(1.25, "ok"), (1.26, "off"), (0.75, "ok"), (0.74, "off")]
)
def test_a_time_that_is_a_quarter_off_is_off(predicted_s: float, status: str) -> None:
    assert time_line("w", predicted_s, 1.0).status == status


@pytest.mark.parametrize(("measured", "status"), [(1019, "ok"), (1021, "failed"), (701, "ok"), (699, "off")])
def test_memory_beyond_the_prediction_fails_and_far_below_is_off(measured: int, status: str) -> None:
    assert memory_line("w", 1000, measured).status == status


def test_the_share_of_the_peak_counts_three_passes_of_each_device() -> None:
    """989 TFLOP/s in bfloat16: 3 x 989e12 operations over 2 devices in 3 s are half of it."""
    metaop = metaop_of("a/m", 1, {1: 3.0}, flops_per_op=989 * 10**12)
    assert share_of_peak(H200, "bfloat16", metaop, 2, 3.0) == pytest.approx(0.5, rel=0.01)
    assert share_of_peak("own", "bfloat16", metaop, 2, 3.0) is None
    assert share_of_peak(H200, "bfloat16", metaop_of("a/m", 1, {1: 3.0}), 1, 3.0) is None


def test_commands_end_with_the_budget() -> None:
    now = [0.0]
    commands = Commands(100.0, run=ended("said"), clock=lambda: now[0])
    assert commands.spindle("plan") == "said"
    now[0] = 86.0
    with pytest.raises(NotReachedError):
        commands.spindle("plan")

    def too_slow(command: list[str], *, timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    with pytest.raises(NotReachedError):
        Commands(100.0, run=too_slow).spindle("plan")


def test_a_failed_command_is_a_failed_line_and_what_is_not_reached_is_none() -> None:
    commands = Commands(100.0, run=ended(code=4, err="\nno plan\nhint\n"))
    with pytest.raises(CommandFailedError, match="exit code 4: no plan / hint"):
        commands.spindle("plan")
    (line,) = gpu_check.guarded("tests", "tests/gpu", lambda: gpu_check.gpu_tests(commands))
    assert (line.status, passed([line])) == ("failed", False)
    late = Commands(0.0, run=ended())
    (line,) = gpu_check.guarded("tests", "tests/gpu", lambda: gpu_check.gpu_tests(late))
    assert (line.status, passed([line])) == ("not reached", True)


@pytest.mark.parametrize(("out", "status"), [("5 skipped in 1s", "skipped"), ("4 passed in 9s", "ok")])
def test_tests_that_are_skipped_show_nothing(out: str, status: str) -> None:
    (line,) = gpu_check.gpu_tests(Commands(100.0, run=ended(out)))
    assert line.status == status


def test_what_follows_a_plan_is_not_reached_without_one(tmp_path: Path) -> None:
    commands = Commands(100.0, run=ended())
    for find in (gpu_check.timed, gpu_check.memory):
        with pytest.raises(NotReachedError):
            list(find(commands, tmp_path, "digits"))


def test_table_and_document_have_every_line() -> None:
    lines = [
        time_line("one", 1.0, 1.0),
        memory_line("two", 100, 200),
        Line("verify", "three", "not reached", "no time was left", {}),
    ]
    text = table("a device", lines)
    assert [word in text for word in ("a device", "one", "two", "three")] == [True] * 4
    assert text.endswith("1 ok, 0 off, 1 failed, 1 not looked at")
    written = json.loads(json.dumps(document("a device", 2**30, 1.5, lines)))
    assert (written["passed"], written["memory_gib"], len(written["lines"])) == (False, 1.0, 3)
    assert written["lines"][1]["values"] == {"predicted_bytes": 100, "measured_bytes": 200}
