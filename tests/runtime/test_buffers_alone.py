"""Buffers that training changes, on one worker in this process: as in plain PyTorch, and after a stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from alone import run_case, world_of_one
from case_runs import Case
from safetensors.torch import load_file

from spindle_cli.export.run import export_run
from spindle_cli.export.types import ExportOptions
from spindle_cli.files.request import capture_path
from spindle_cli.verify import plain
from spindle_cli.verify.comparing.captured import open_run
from spindle_cli.verify.comparing.parameters import compare_buffers, compare_final
from spindle_cli.workload.building.load import load

STEPS = 4
CASE = Case(
    "keeping",
    (0,),
    toys="buffer_toys",
    args={"counts": True},
    train={"optimizer": "SGD", "lr": 0.1},
    steps=STEPS,
)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.mark.parametrize("recompute", [(), ("t/first",)])
def test_buffers_are_those_of_plain_pytorch(recompute: tuple[str, ...], tmp_path: Path) -> None:
    request = run_case(replace(CASE, recompute=recompute), tmp_path / "plan")
    (tmp_path / "plain").mkdir()
    plain.train(request.model_copy(update={"run_dir": tmp_path / "plain", "capture_dir": tmp_path / "plain"}))
    with open_run(tmp_path / "plan", 1) as ours, open_run(tmp_path / "plain", 1) as theirs:
        check = compare_buffers(ours, theirs, 1e-12)
        final = compare_final(ours, theirs, (), 1e-12)[0]
        changed = {
            name
            for name in theirs.final_buffers.holders
            if not torch.equal(theirs.initial_buffers.first(name), theirs.final_buffers.first(name))
        }
        turned = theirs.final_buffers.first("t.first.turns")
    assert check.passed, check
    assert final.passed, final
    assert check.compared == 2 * 5
    assert turned.dtype == torch.float64 and bool(turned[1:, 1].all()), "an imaginary part is kept"
    assert {name.split(".")[-1] for name in changed} == {"average", "largest", "seen", "last"}


def test_a_run_goes_on_with_its_buffers(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    case = replace(CASE, args={"counts": False}, checkpoint_every=1)
    run_case(case, whole)
    run_case(replace(case, steps=2), parts, capture_dir=None)
    (whole / "again").mkdir()
    run_case(case, parts, resume=True, capture_dir=whole / "again")
    expected, found = (
        load_file(capture_path(folder, "final-buffers", 0)) for folder in (whole, whole / "again")
    )
    assert expected.keys() == found.keys() and len(expected) == 2 * 5
    assert {name for name in expected if not torch.equal(expected[name], found[name])} == set()
    (built,) = load(str(whole / "workload.yaml")).workload.tasks
    export_run(whole, tmp_path / "model.safetensors", ExportOptions(task="t"))
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == built.module.state_dict().keys(), "no export has what a state_dict has not"
