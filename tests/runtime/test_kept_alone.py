"""What layers keep in training, on one worker in this process: as in plain PyTorch, and after a stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import kept_toys
import pytest
import torch
from alone import run_case, world_of_one
from case_runs import Case
from plain_loop import train_plainly
from safetensors.torch import load_file

from helpers.analysed import analysed
from spindle_cli.export.run import export_run
from spindle_cli.export.types import ExportOptions
from spindle_cli.files.request import capture_path
from spindle_cli.files.run_files import read_metrics

STEPS = 4
CASE = Case("kept", (0,), toys="kept_toys", train={"optimizer": "SGD", "lr": 0.1}, steps=STEPS)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def test_its_layers_may_be_split() -> None:
    (task,) = analysed(kept_toys.build()).tasks.values()
    assert [op.target for op in task.ops if op.coupled] == []


@pytest.mark.parametrize("recompute", [(), ("t/student",)])
@pytest.mark.parametrize("saved", [False, True])
def test_losses_are_those_of_plain_pytorch(saved: bool, recompute: tuple[str, ...], tmp_path: Path) -> None:
    """Evaluations among the steps leave no trace."""
    case = replace(CASE, args={"saved": saved}, recompute=recompute, train={**CASE.train, "eval_every": 1})
    run_case(case, tmp_path / "run")
    plain = train_plainly(str(tmp_path / "run" / "workload.yaml"), STEPS, torch.float64)
    found = [line.task_losses["t"] for line in read_metrics(tmp_path / "run")]
    assert found == pytest.approx([losses["t"] for losses in plain.losses], rel=1e-10)


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_goes_on_with_tables_that_have_grown(saved: bool, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    case = replace(CASE, args={"saved": saved}, checkpoint_every=1)
    run_case(case, whole)
    run_case(replace(case, steps=2), parts, capture_dir=None)
    (whole / "again").mkdir()
    run_case(case, parts, resume=True, capture_dir=whole / "again")
    for stage in ("final", "final-buffers"):
        expected, found = (load_file(capture_path(folder, stage, 0)) for folder in (whole, whole / "again"))
        assert expected.keys() == found.keys() and expected
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_an_export_has_the_table_as_it_has_grown(tmp_path: Path) -> None:
    run_case(replace(CASE, args={"saved": True}, checkpoint_every=STEPS), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "model.safetensors", ExportOptions(task="t"))
    exported = load_file(tmp_path / "model.safetensors")
    built = kept_toys.build(saved=True).tasks[0].module
    grown = kept_toys.angles(kept_toys.LENGTH).square() / 4 - 1
    for name, before in built.state_dict().items():
        value = exported.get(name, exported.get(f"t.{name}"))
        assert value is not None, name
        if name.endswith("table"):
            assert len(before) == 2
            torch.testing.assert_close(value.to(grown.dtype), grown)
