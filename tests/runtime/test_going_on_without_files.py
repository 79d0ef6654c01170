"""A run that goes on has all its values in its checkpoint: the files that it began with may be gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from alone import ALONE, world_of_one
from case_runs import ADAMW, Case, prepare
from safetensors.torch import load_file, save_file

from spindle_cli.analysis.localise import load_local
from spindle_cli.checkpoint.files import find_checkpoint
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import newest_model
from spindle_cli.launch.checks import find_workload
from spindle_cli.plan.file import read_plan
from spindle_cli.runtime.worker import train_plan
from spindle_cli.workload.building.load import load, load_abstract

CASE = Case(
    "initial", (0,), args={"frozen_tower": True}, train=ADAMW, steps=1, checkpoint_every=1, dtype=None
)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with world_of_one():
        yield


def begun(folder: Path) -> RunRequest:
    """A request whose workload takes all of its values from a file, other ones than its build's."""
    request = prepare(CASE, 1, folder)
    source = folder / "workload.yaml"
    values: dict[str, torch.Tensor] = {}
    for task in load(str(source)).workload.tasks:
        values |= {f"{task.name}.{name}": value for name, value in task.module.state_dict().items()}
    distinct = {value.data_ptr(): name for name, value in reversed(values.items())}
    turned = {name: values[name].flip(0).contiguous() for name in distinct.values()}
    save_file(turned, folder / "base.safetensors")
    content = yaml.safe_load(source.read_text())
    source.write_text(yaml.safe_dump({**content, "init_from": "base.safetensors"}))
    return request.model_copy(update={"capture_dir": None})


def train(request: RunRequest, **changes: object) -> None:
    train_plan(request.model_copy(update=changes), ALONE, torch.device("cpu"))


def test_it_ends_as_without_the_break(tmp_path: Path) -> None:
    request = begun(tmp_path / "whole")
    train(request, steps=2)
    broken = begun(tmp_path / "broken")
    train(broken)
    (tmp_path / "broken" / "base.safetensors").unlink()
    with pytest.raises(InputError, match=r"base\.safetensors"):
        train(broken)
    train(broken, steps=2, resume=True)
    expected, found = (load_file(newest_model(tmp_path / name)) for name in ("whole", "broken"))
    assert expected and {name for name in expected if not torch.equal(expected[name], found[name])} == set()
    frozen = [load_file(tmp_path / name / "checkpoints/frozen.safetensors") for name in ("whole", "broken")]
    assert frozen[0] and all(torch.equal(value, frozen[1][name]) for name, value in frozen[0].items())
    assert find_checkpoint(tmp_path / "broken").checkpoint.step == 2


def test_the_launcher_asks_for_them_only_where_they_are_needed(tmp_path: Path) -> None:
    request = begun(tmp_path / "run")
    (tmp_path / "run" / "base.safetensors").unlink()
    plan = read_plan(request.plan)
    source = str(request.workload)
    with pytest.raises(InputError, match=r"base\.safetensors"):
        find_workload(plan, request.plan, source)
    assert find_workload(plan, request.plan, source, reads_initial=False).initial == ()


EVALUATED = """
from torch import nn
import torch
from spindle_cli import Task, Workload

class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x).square().mean()

def build(evaluates):
    items = [{"x": torch.ones(2)}] * 4
    held_out = Task("held_out", Square(), 2, eval_dataset=items, metrics={"loss": lambda out: out})
    tasks = [Task("trained", Square(), 2, items)]
    return Workload("w", tasks, operators=(nn.Linear,), evaluated=[held_out] if evaluates else [])
"""


def test_what_is_only_evaluated_is_in_no_checkpoint_and_needs_them_always(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(EVALUATED)
    source = tmp_path / "workload.yaml"
    content = {"schema": "spindle.workload/1", "model": "model.py:build", "init_from": "absent.safetensors"}
    for evaluates in (False, True):
        source.write_text(yaml.safe_dump({**content, "args": {"evaluates": evaluates}}))
        for loads in (load_abstract, lambda path, **how: load_local(path, {}, **how)):
            with pytest.raises(InputError, match="absent") if evaluates else nullcontext():
                loads(str(source), reads_initial=False)
