"""The process runs that several tests look at: one set of 4 workers and one of 2, each with many cases; and
analyses that many runs in this process have in common.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from case_runs import asked_for, run_cases
from runtime_cases import ON_FOUR, ON_TWO
from split_cases import ON_FOUR as SPLIT_ON_FOUR


@pytest.fixture(scope="module", autouse=True)
def always_analysed_once(analysed_once: None) -> None:
    """Runs in this process analyse the toys that many of them train once, as the workers do."""


@pytest.fixture(scope="session")
def four_workers(
    forker: socket.socket, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    """A folder with a folder for each case of `ON_FOUR`."""
    folder = tmp_path_factory.mktemp("four")
    run_cases(forker, asked_for(ON_FOUR, pytestconfig), 4, folder, fails=False)
    return folder


@pytest.fixture(scope="session")
def two_workers(forker: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each case of `ON_TWO`; the last one ends the workers."""
    folder = tmp_path_factory.mktemp("two")
    run_cases(forker, ON_TWO, 2, folder, fails=True)
    return folder


@pytest.fixture(scope="session")
def four_split_workers(
    forker: socket.socket, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    """A folder with a folder for each case of `split_cases.ON_FOUR`."""
    folder = tmp_path_factory.mktemp("split")
    run_cases(forker, asked_for(SPLIT_ON_FOUR, pytestconfig), 4, folder, fails=False)
    return folder
