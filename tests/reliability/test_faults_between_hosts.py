"""Faults on one of two hosts, and of the network between them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fault_scenarios import BETWEEN_HOSTS, STEPS, Scenario
from test_faults import PATH, require_same_model

from helpers.faulty_workload import write_faults
from helpers.toy_plan import write_toy
from helpers.two_hosts import HOSTS, ip, launch_on, two_hosts

pytestmark = pytest.mark.processes


def train(forker: socket.socket, patch: pytest.MonkeyPatch, folder: Path, *options: str) -> list[str]:
    """Train on both hosts; what each said, with its exit code in front."""
    if not (folder / "plan.yaml").exists():
        write_toy(folder, devices_per_node=1, module="faulty_workload.py", steps=STEPS, dropout=0.3)
    patch.setenv("PYTHONPATH", PATH, prepend=":")
    return [
        f"exit code {ended.code}\n{ended.err}"
        for ended in launch_on(HOSTS, folder, "--run-dir", "run", *options, forker=forker)
    ]


@pytest.fixture(scope="module")
def undisturbed(forker: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on both hosts in which nothing goes wrong."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with two_hosts(), pytest.MonkeyPatch.context() as patch:
        assert all(said.startswith("exit code 0\n") for said in train(forker, patch, folder))
    return folder / "run"


@pytest.mark.parametrize("scenario", BETWEEN_HOSTS, ids=lambda scenario: scenario.name)
def test_nothing_is_lost_between_two_hosts(
    scenario: Scenario,
    forker: socket.socket,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in write_faults(tmp_path, *scenario.faults).items():
        monkeypatch.setenv(name, value)
    with two_hosts():
        for said in train(forker, monkeypatch, tmp_path, *scenario.options):
            assert said.startswith(f"exit code {scenario.code}\n"), said
            assert [text for text in scenario.said if text not in said] == [], said
        if scenario.ending == "with --resume":
            for host, end in zip(HOSTS, ("spl-a", "spl-b"), strict=True):
                ip("-n", host, "link", "set", end, "up")
            again = train(forker, monkeypatch, tmp_path, "--resume")
            assert all(said.startswith("exit code 0\n") for said in again), "\n".join(again)
    require_same_model(tmp_path / "run", undisturbed)
