"""The host is ahead of its device: times and the journal wait for what the device has done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spindle_cli.files.run_files import Journal, JournalWriter
from spindle_cli.runtime.measuring import action_log, timing
from spindle_cli.runtime.measuring.timing import Activity, Stopwatch

CPU = torch.device("cpu")


class LateMark:
    """A device's mark at a time of its own, which it comes to when the test says so."""

    passed_ms = 0.0

    def __init__(self, at_ms: float) -> None:
        self._at_ms = at_ms

    def query(self) -> bool:
        return self._at_ms <= LateMark.passed_ms

    def elapsed_time(self, end_event: LateMark) -> float:
        assert self.query() and end_event.query(), "read before the device has come to it"
        return end_event._at_ms - self._at_ms


def test_times_are_read_only_when_the_device_has_come_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches of a step: the host has ended all of them before the device has ended the first."""
    stopwatch = Stopwatch(CPU)
    at_ms = iter(range(1, 100))
    monkeypatch.setattr(timing, "take_mark", lambda device: LateMark(next(at_ms)))
    for _ in range(3):  # each takes four marks: its begin, its forward pass's, and its end
        stopwatch.begin_step(("a",))
        with stopwatch.timed(Activity.FORWARD, 0):
            pass
        stopwatch.end_step(0)
    assert stopwatch.seconds == {}
    monkeypatch.setattr(LateMark, "passed_ms", 8.0)  # the end of the second
    stopwatch.begin_step(("b",))
    stopwatch.end_step(1)
    assert stopwatch.seconds[Activity.FORWARD, 0] == pytest.approx([0.001, 0.001])
    assert stopwatch.seconds_of == {("a",): stopwatch.seconds}
    assert stopwatch.seconds[Activity.OTHER, None] == pytest.approx([0.002, 0.002])


def test_a_journal_notes_what_the_device_has_done_not_what_the_host_has_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_ms = iter(range(1, 100))
    monkeypatch.setattr(action_log, "take_mark", lambda device: LateMark(next(at_ms)))
    monkeypatch.setattr(LateMark, "passed_ms", 0.0)
    kept = action_log.ActionLog(JournalWriter(tmp_path / "journal", ("F", "B", "STEP"), 1), CPU)
    found = []
    for passed_ms in (0.0, 1.0, 2.5, 3.0):
        LateMark.passed_ms = passed_ms
        kept.look()
        if passed_ms == 0.0:
            for action in range(3):
                kept.begins(0, action)
                kept.ends(0, action)
        journal = Journal.read(tmp_path / "journal")
        assert journal is not None
        found.append(journal.place())
    assert found == ["step 1, in F", "step 1, in B", "step 1, in STEP", None]
