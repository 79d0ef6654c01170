"""What holds for every test."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from _pytest.unraisableexception import gc_collect_iterations_key
from hypothesis import settings

from helpers import examples, ready_python
from spindle_cli.launch.starting import head_start

PROCESSES = "processes"  # the mark of tests that start workers
LONG_MARK = "long"  # the mark of tests that `make test` leaves out
ALONE = "alone"  # the mark of those of them that are below this folder
RUNTIME = Path(__file__).parent / "runtime"
LONG = (
    "tests/zoo/test_calibration.py",
    "tests/plan/test_plan_properties.py",
    "tests/reliability/test_faults.py",
    "tests/test_docs.py",
)

settings.load_profile(examples.SOME)  # --hypothesis-profile has another loaded


def pytest_configure(config: pytest.Config) -> None:
    """Let an interrupt interrupt, and threads wait asleep, here and in the processes that tests start.

    A shell starts what runs in its background with SIGINT ignored, and children inherit that. OpenMP's
    threads wait for each other by looking again and again: nine tenths of the time of a plain run of toys
    with a thread for each core, once others want the cores too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # At its end pytest looks for garbage whose finalizers fail, five times over: once finds it, in a second.
    config.stash[gc_collect_iterations_key] = 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: searching again and again for what can go took a sixth of the
    time meanwhile, and later a tenth of the time of all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 5, 20)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first, so that of two processes none is left with one when all others have
    ended (`--no-loadscope-reorder` keeps the order). The workers of `tests/runtime` send each other more
    messages than all others do.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if item.get_closest_marker(PROCESSES) and RUNTIME in item.path.parents:
            item.add_marker(ALONE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the tests that start workers, only files that have some are imported: a fifth of all. Those of them
    that run alone, and the others, are imported without each other. Files all of whose tests have a mark
    (`pytestmark`) are not imported where that is not asked for.
    """
    asked = config.option.markexpr.split(" and ")
    if collection_path.suffix == ".py" and any(
        f"not {mark}" in asked and _all_have(mark, collection_path) for mark in (PROCESSES, LONG_MARK)
    ):
        return True
    if PROCESSES not in asked:
        return None
    if collection_path == RUNTIME:
        return True if f"not {ALONE}" in asked else None
    if collection_path.suffix != ".py":
        return None
    if ALONE in asked and RUNTIME not in collection_path.parents:
        return True
    return True if f"mark.{PROCESSES}" not in collection_path.read_text(encoding="utf-8") else None


def _all_have(mark: str, path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return re.search(rf"^pytestmark = .*\bpytest\.mark\.{mark}\b", text, re.MULTILINE) is not None


@pytest.fixture(scope="session")
def forker() -> Iterator[socket.socket]:
    """Where to ask for Pythons that have torch at once."""
    with ready_python.forker() as asking:
        yield asking


@pytest.fixture(scope="module")
def ready_pythons(forker: socket.socket) -> Iterator[None]:
    """What launches and verifications start in this process has torch at once, and what they have found of a
    workload they find no more.
    """
    with _starting_ready_ones(forker):
        yield


@pytest.fixture
def ready_here(forker: socket.socket) -> Iterator[None]:
    """As `ready_pythons`, in one test of a module whose others start Pythons of their own."""
    with _starting_ready_ones(forker):
        yield


@pytest.fixture(scope="module")
def analysed_once() -> Iterator[None]:
    """What is built in part is analysed once for all tests of a module that build it."""
    from helpers.analysed_once import in_the_abstract  # not above: it imports torch
    from spindle_cli.analysis import localise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(localise, "in_the_abstract", in_the_abstract)
        yield


@contextmanager
def _starting_ready_ones(forker: socket.socket) -> Iterator[None]:
    from helpers.analysed import analysed_again  # not above: it imports torch
    from spindle_cli.analysis import analyse

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analyse, "analyse_for_others", analysed_again)
        patch.setattr(head_start, "Popen", partial(ready_python.ReadyPython, forker))
        yield
