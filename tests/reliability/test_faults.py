"""Faults in real workers: the run goes on by itself or ends with one clear cause, and nothing is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from fault_scenarios import LOST_DEVICE, SCENARIOS, STEPS, Scenario
from safetensors.torch import load_file

from helpers.cli import Ended, run_spindle
from helpers.faulty_workload import Fault, write_faults
from helpers.toy_plan import write_toy
from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.files.run_files import newest_model, read_metrics
from spindle_cli.plan.file import read_plan

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]
PATH = str(Path(__file__).parent.parent)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which nothing goes wrong."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        assert launch(patch, folder, "--checkpoint-every", "2").code == 0
    return folder / "run"


def launch(patch: pytest.MonkeyPatch, folder: Path, *options: str, env: Mapping[str, str] = {}) -> Ended:
    """`spindle launch` of the toy workload in a folder; its workers import the helpers."""
    if not (folder / "plan.yaml").exists():
        write_toy(folder, module="faulty_workload.py", steps=STEPS, dropout=0.3)
    patch.chdir(folder)
    patch.setenv("PYTHONPATH", PATH, prepend=":")
    for name, value in env.items():
        patch.setenv(name, value)
    return run_spindle("launch", "plan.yaml", "--run-dir", "run", *options)


def require_same_model(run_dir: Path, expected: Path) -> None:
    found, wanted = load_file(newest_model(run_dir)), load_file(newest_model(expected))
    assert newest_model(run_dir).parent.name == f"step-{STEPS:06d}"
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert [line.step for line in read_metrics(run_dir)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_nothing_is_lost(
    scenario: Scenario, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = write_faults(tmp_path, *scenario.faults)
    ended = launch(monkeypatch, tmp_path, *scenario.options, env=faults)
    assert ended.code == scenario.code, ended.err
    for pattern in scenario.said:
        assert re.search(pattern, ended.err), f"{pattern!r} is not in:\n{ended.err}"
    assert ended.err.count("error: ") == (ended.code != 0)
    if scenario.ending == "with --resume":
        again = launch(monkeypatch, tmp_path, "--resume")
        assert again.code == 0, again.err
    require_same_model(tmp_path / "run", undisturbed)


def test_a_run_begun_from_another_one_begins_from_it_again(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it has a checkpoint of its own; it still trains what goes on from the other's."""
    begun = checkpoint_folder(undisturbed, STEPS - 2)
    faults = write_faults(tmp_path, Fault("kill"))
    ended = launch(monkeypatch, tmp_path, "--from", str(begun), env=faults)
    assert ended.code == 0, ended.err
    assert f"starting again from {undisturbed} once more: there is no checkpoint (1 of 3" in ended.err
    found, wanted = load_file(newest_model(tmp_path / "run")), load_file(newest_model(undisturbed))
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert [line.step for line in read_metrics(tmp_path / "run")] == [STEPS - 1, STEPS]


def test_after_a_loss_for_good_training_goes_on_with_fewer_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dropout: other devices draw other random numbers. By SGD: Adam makes steps of rounding."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        sgd = {"optimizer": "SGD", "lr": 0.1}
        write_toy(folder, module="faulty_workload.py", steps=STEPS, train=sgd, dropout=0.0)
    assert launch(monkeypatch, whole, "--elastic", "--nproc", "1").code == 0
    assert read_plan(whole / "plan-on-1.yaml").cluster.num_devices == 1
    faults = write_faults(cut, *LOST_DEVICE.faults)
    ended = launch(monkeypatch, cut, *LOST_DEVICE.options, "--trace", "trace.json", env=faults)
    assert ended.code == LOST_DEVICE.code, ended.err
    assert all(text in ended.err for text in LOST_DEVICE.said), ended.err
    events = json.loads((cut / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0}, "the trace is of the plan that the run ended by"
    found, wanted = load_file(newest_model(cut / "run")), load_file(newest_model(whole / "run"))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert [line.step for line in read_metrics(cut / "run")] == list(range(1, STEPS + 1))
