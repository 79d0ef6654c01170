"""In a fork of the warm process: run all tests of a file, and note which lines each executes.

Lines that run while the file is loaded, or in what its tests share, belong to all of its tests (`""`). So do
those that other processes run which a test starts: coverage is started in these too, by the environment, and
told the test's name; a process that is killed says nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import coverage
import pytest

from mutants.running import OPTIONS, Timed

_CONFIG = """[run]
source =
    {root}/src/spindle_cli
    {root}/tests
data_file = {folder}/coverage
parallel = true
sigterm = true
patch = _exit
context = ${{SPINDLE_TEST_NAME}}
"""


def record(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the tests of one file run: `{"seconds": {test: s}, "load_s": s, "processes": [test, ...],
    "not_passed": [test, ...], "lines": {file: {test: [line, ...]}}}`.
    """
    root = Path.cwd()
    config = folder / "coverage.ini"
    config.write_text(_CONFIG.format(root=root, folder=folder))
    os.environ["SPINDLE_TEST_NAME"] = ""
    measured = coverage.Coverage(config_file=str(config), data_suffix=True)
    timed = Timed()
    measured.start()
    os.environ["COVERAGE_PROCESS_START"] = str(config)
    try:
        ((file, _),) = job["groups"]
        pytest.main([*OPTIONS, file], plugins=[timed, _Named(measured)])
    finally:
        measured.stop()
        measured.save()
    return {
        "seconds": timed.seconds,
        "load_s": timed.load_s,
        "processes": sorted(timed.with_processes),
        "not_passed": sorted(timed.not_passed),
        "lines": _lines(folder, root),
    }


class _Named:
    """Tells coverage, here and in processes to come, which test runs."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._name(item.nodeid)
        try:
            return (yield)
        finally:
            self._name("")

    def _name(self, test: str) -> None:
        os.environ["SPINDLE_TEST_NAME"] = test
        self._measured.switch_context(test)


def _lines(folder: Path, root: Path) -> dict[str, dict[str, list[int]]]:
    combined = coverage.Coverage(config_file=str(folder / "coverage.ini"))
    combined.combine([str(folder)], keep=True)
    data = combined.get_data()
    lines: dict[str, dict[str, list[int]]] = {}
    for file in data.measured_files():
        if Path(file).is_relative_to(root):
            of_test: dict[str, list[int]] = {}
            for line, tests in sorted(data.contexts_by_lineno(file).items()):
                for test in tests:
                    of_test.setdefault(test, []).append(line)
            if of_test:
                lines[str(Path(file).relative_to(root))] = of_test
    return lines
