"""In a fork of the warm process: run chosen tests until one fails."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest

# The same examples each time; no plugin that leaves something in the tree, or starts processes of its own.
OPTIONS = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--hypothesis-seed=0",
    "--tb=line",
    "-W",
    "ignore",
)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job's groups; `{"by": test, "why": ...}` of the first failure, `{}` if all pass."""
    for file, tests in job["groups"]:
        chosen = _Chosen(tests, job["limits"])
        code = pytest.main([*OPTIONS, "-x", file], plugins=[chosen])
        if chosen.failed is not None:
            by, why = chosen.failed
            return {"by": by, "why": why}
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return {"by": file, "why": f"pytest ended with {code!r}"}
    return {}


class _Chosen:
    """A plugin that runs some of a file's tests in a given order, each no longer than its limit."""

    def __init__(self, tests: Sequence[str], limits: dict[str, float]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}
        self._limits = limits
        self.failed: tuple[str, str] | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid]
        )
        for item in items:
            item.add_marker(pytest.mark.timeout(self._limits[item.nodeid]), append=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            lines = report.longreprtext.strip().splitlines()
            self.failed = (report.nodeid, lines[-1][:300] if lines else "")


class Timed:
    """A plugin that notes how long each test takes, and what does not pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.not_passed: set[str] = set()
        self.with_processes: set[str] = set()
        self._began = time.monotonic()

    def pytest_collection_finish(self) -> None:
        self.load_s = time.monotonic() - self._began

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.with_processes = {item.nodeid for item in items if item.get_closest_marker("processes")}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        began, used = time.monotonic(), sum(os.times()[:4])
        try:
            return (yield)
        finally:
            # A busy machine makes a test wait; several processes use more than what passes.
            self.seconds[item.nodeid] = min(time.monotonic() - began, sum(os.times()[:4]) - used)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.not_passed.add(report.nodeid)
