"""Which tests go to the same of several test processes, one after another, and in what order they begin."""

from __future__ import annotations

import pytest

# They wait for timeouts and signals, and look at how long that takes: never two of them at a time.
WAITING = ("tests/launch/", "tests/reliability/")
# Runs of processes that several files look at.
SHARED_RUNS = {"four_workers", "two_workers", "four_split_workers"}
# Files that take long go first, so that no process is left with one of them when all others have ended.
LONG = ("tests/zoo/test_calibration.py", "tests/plan/test_plan_properties.py")


def group_of(item: pytest.Item) -> str:
    """The tests that wait, those that look at the same run, or those of a file."""
    file = item.nodeid.partition("::")[0]
    if item.get_closest_marker("processes") and file.startswith(WAITING):
        return "waiting"
    shared = SHARED_RUNS.intersection(getattr(item, "fixturenames", ()))
    return min(shared, default=file)


def place_in_order(item: pytest.Item) -> int:
    """Among the groups: smaller is sooner."""
    group = group_of(item)
    if group == "waiting":
        return 0
    return 1 if group in SHARED_RUNS else 2 if item.get_closest_marker("processes") or group in LONG else 3
