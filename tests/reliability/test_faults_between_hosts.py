"""The same command on two hosts, made of network namespaces with a link between them, trains as one run;
faults on one of them, and of the network between.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_scenarios import BETWEEN_HOSTS, STEPS, Scenario
from test_faults import PATH, require_same_model

from helpers.cli import Ended
from helpers.faulty_workload import write_faults
from helpers.toy_plan import write_toy
from helpers.two_hosts import HOSTS, ip, launch_on, two_hosts
from spindle_cli.files.run_files import read_metrics

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Trained:
    """A run on both hosts in which nothing goes wrong: its folder, and how each host's command ended."""

    run_dir: Path
    ended: list[Ended]


def train(
    forker: socket.socket | None, patch: pytest.MonkeyPatch, folder: Path, *options: str
) -> list[Ended]:
    """Train on both hosts; `forker`: of the Pythons, see `launch_on`."""
    if not (folder / "plan.yaml").exists():
        write_toy(folder, devices_per_node=1, module="faulty_workload.py", steps=STEPS, dropout=0.3)
    patch.setenv("PYTHONPATH", PATH, prepend=":")
    return launch_on(HOSTS, folder, "--run-dir", "run", *options, forker=forker)


@pytest.fixture(scope="module")
def undisturbed(forker: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """By Pythons that have torch at once."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with two_hosts(), pytest.MonkeyPatch.context() as patch:
        return Trained(folder / "run", train(forker, patch, folder))


def test_two_hosts_train_as_one_run(undisturbed: Trained) -> None:
    require_one_run(undisturbed)


@pytest.mark.long
def test_pythons_of_their_own_train_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user starts them."""
    with two_hosts():
        require_one_run(Trained(tmp_path / "run", train(None, monkeypatch, tmp_path)))


def require_one_run(trained: Trained) -> None:
    assert [ended.code for ended in trained.ended] == [0, 0], trained.ended
    assert [metrics.step for metrics in read_metrics(trained.run_dir)] == list(range(1, STEPS + 1))
    reports = [json.loads(ended.out) for ended in trained.ended]
    assert [(report["workers"], report["node_rank"]) for report in reports] == [(1, 0), (1, 1)]
    assert reports[0]["steps"] == STEPS
    request = trained.run_dir / "workers" / "node-1.request.json"
    assert json.loads(request.read_text())["backend"] == "gloo"


@pytest.mark.parametrize("scenario", BETWEEN_HOSTS, ids=lambda scenario: scenario.name)
def test_nothing_is_lost_between_two_hosts(
    scenario: Scenario,
    forker: socket.socket,
    undisturbed: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in write_faults(tmp_path, *scenario.faults).items():
        monkeypatch.setenv(name, value)
    with two_hosts():
        for ended in train(forker, monkeypatch, tmp_path, *scenario.options):
            assert ended.code == scenario.code, ended.err
            assert [text for text in scenario.said if text not in ended.err] == [], ended.err
        if scenario.ending == "with --resume":
            for host, end in zip(HOSTS, ("spl-a", "spl-b"), strict=True):
                ip("-n", host, "link", "set", end, "up")
            again = train(forker, monkeypatch, tmp_path, "--resume")
            assert [ended.code for ended in again] == [0, 0], again
    require_same_model(tmp_path / "run", undisturbed.run_dir)
