"""The same command on two hosts, made of network namespaces with a link between them, trains as one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.toy_plan import write_toy
from helpers.two_hosts import HOSTS, launch_on, two_hosts
from spindle_cli.files.run_files import read_metrics


@pytest.mark.processes
def test_two_hosts_train_as_one_run(tmp_path: Path) -> None:
    write_toy(tmp_path, devices_per_node=1)
    with two_hosts():
        first, second = launch_on(HOSTS, tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert [metrics.step for metrics in read_metrics(tmp_path / "runs" / "toy-1")] == [1, 2, 3, 4]
    report = json.loads(first.out)
    assert (report["workers"], report["node_rank"], report["steps"]) == (1, 0, 4)
    assert json.loads(second.out)["node_rank"] == 1
    request = tmp_path / "runs" / "toy-1" / "workers" / "node-1.request.json"
    assert json.loads(request.read_text())["backend"] == "gloo"
