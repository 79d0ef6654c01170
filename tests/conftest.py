"""What holds for every test."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from functools import partial

import pytest

from helpers import ready_python
from helpers.groups import group_of, place_in_order
from spindle_cli.launch.starting import apart


def pytest_configure() -> None:
    """Let an interrupt interrupt, here and in the processes that tests start.

    A shell starts what runs in its background with SIGINT ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `-n 2 --dist loadgroup --no-loadscope-reorder`."""
    if hasattr(config, "workerinput"):
        items.sort(key=place_in_order)
        for item in items:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))


@pytest.fixture(scope="session")
def forker() -> Iterator[socket.socket]:
    """Where to ask for Pythons that have torch at once."""
    with ready_python.forker() as asking:
        yield asking


@pytest.fixture(scope="module")
def ready_pythons(forker: socket.socket) -> Iterator[None]:
    """What launches and verifications start in this process has torch at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart, "Popen", partial(ready_python.ReadyPython, forker))
        yield
