"""What is said of ops that fail on real samples."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from helpers.ready_commands import ReadyCommand
from spindle_cli.errors import UsageError, WorkloadError
from spindle_cli.profile.op.failing import failures_told, split_failures_told
from spindle_cli.profile.op.inputs import ChainInputs
from spindle_cli.profile.op.jobs import OpRef
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Task, Workload


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.table = nn.Embedding(5, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.linear(x) + self.table(ids)  # the line that is named


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), nn.Linear(3, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.second(self.first(x, ids)).square().mean()


def graph_of(dtype: torch.dtype = torch.float32, number: int = 4) -> WorkloadGraph:
    items = [{"x": torch.randn(3, dtype=dtype), "ids": torch.tensor(number)} for _ in range(4)]
    return analysed(Workload("w", [Task("t", Net(), 2, items)], operators=(Layer, nn.Linear)))


def run_through(graph: WorkloadGraph) -> tuple[Tensor, ...]:
    """The inputs of the task's last op."""
    refs = [OpRef("t", op.index) for op in graph.tasks["t"].ops]
    same = dict(zip(refs, refs, strict=True))
    settings = TrainSettings.model_validate({"steps": 1})
    return ChainInputs(graph, same, {refs[-1]}, settings, torch.device("cpu")).take(refs[-1], 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_fields_in_other_numbers_than_parameters_are_named(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(WorkloadError) as raised:
        run_through(graph_of(dtype))
    error = raised.value
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith("# the line that is named"))
    assert f"test_failing_ops.py:{number}: task 't': first fails on 2 samples: RuntimeError" in error.message
    assert "same dtype" in error.message
    assert error.hint == (
        f"Field 'x' is {name}, and parameters are float32: let the dataset give it so, or forward convert it."
    )
    assert run_through(graph_of())[0].shape == (2, 3)


def test_what_fails_in_plain_pytorch_too_is_said_to() -> None:
    with pytest.raises(WorkloadError, match="task 't': first fails on 2 samples: IndexError") as raised:
        run_through(graph_of(number=5))
    assert raised.value.hint is not None and "plain PyTorch, too" in raised.value.hint


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory"), UsageError("own")])
def test_too_little_memory_and_our_own_errors_are_left_as_they_are(error: Any) -> None:
    task = graph_of().tasks["t"]
    with pytest.raises(type(error)) as raised, failures_told(task, task.ops[0], 2):
        raise error
    assert raised.value is error


def test_a_part_of_a_layer_that_fails_is_told_with_its_class_and_what_to_do() -> None:
    task = graph_of().tasks["t"]
    with pytest.raises(WorkloadError) as raised, split_failures_told(task, task.ops[0], 2):
        raise RuntimeError("Sizes must match\nmore lines")
    told = (
        "task 't': first (Layer) fails where 2 devices have a part of it each: RuntimeError: Sizes must match"
    )
    assert raised.value.message.endswith(told)  # behind the place
    assert "Layer: {}" in str(raised.value.hint)
    for error in (MemoryError(), UsageError("own")):
        with pytest.raises(type(error)), split_failures_told(task, task.ops[0], 2):
            raise error


SPLIT = """
import torch
from torch import nn
from spindle_cli import Task, Workload

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, bias):
        return self.down(self.up(x) + bias)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.wide = Layer(), nn.Linear(4, 8)

    def forward(self, x):
        return self.layer(x, self.wide(x)).square().mean()

def build():
    plan = {"up": "colwise", "down": "rowwise"}
    return Workload("w", [Task("t", Net(), 4, [{"x": torch.randn(4)}] * 8)], (Layer,), tp_plans={Layer: plan})
"""


@pytest.mark.processes
def test_profiling_a_layer_that_does_not_stand_its_tensor_parallel_plan_ends_with_one_message(
    forker: socket.socket, tmp_path: Path
) -> None:
    """What it is given for all of its channels is not cut with its own."""
    source = tmp_path / "split.py"
    source.write_text(SPLIT)
    cluster = Path(__file__).parents[2] / "configs/clusters/cpu-2.yaml"
    options = ("--cluster", cluster, "--tp", 2, "--accept-noise", "--time-limit", 0.05)
    process = ReadyCommand(forker, "profile", f"{source}:build", "-o", tmp_path / "p.json", *options)
    _, told = process.communicate(120)
    assert process.returncode == 3
    assert "task 't': layer (Layer) fails where 2 devices have a part of it each" in told
    assert "Traceback" not in told and "tp_plans" in told


def test_glue_is_called_what_it_is() -> None:
    task = graph_of().tasks["t"]
    glue = replace(task.ops[-1], target=None)
    for is_loss, told in ((True, "its loss, with what leads to it,"), (False, "what is between its layers")):
        with (
            pytest.raises(WorkloadError, match=rf"task 't': {told} fails on 1 samples: ValueError: no\n"),
            failures_told(task, replace(glue, is_loss=is_loss), 1),
        ):
            raise ValueError("no\nmore lines")


ALONE = """
import torch
from torch import nn
from spindle_cli import Task, Workload

class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x).square().mean()

def build():
    return Workload("alone", [Task("t", Alone(), 2, [{"x": torch.randn(3, dtype=torch.float64)}] * 4)])
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_profile_of_an_op_that_fails_ends_with_one_message(forker: socket.socket, tmp_path: Path) -> None:
    """And nothing of what its workers leave behind, which Python's resource tracker would tell of."""
    out, source = tmp_path / "p.json", tmp_path / "alone.py"
    source.write_text(ALONE)
    options = ("--nproc", 1, "--time-limit", 0.05, "--accept-noise")
    process = ReadyCommand(forker, "profile", f"{source}:build", "-o", out, *options)
    _, told = process.communicate(120)
    assert process.returncode == 3
    assert "task 't': its loss, with what leads to it, fails on 2 samples: RuntimeError" in told
    assert "Field 'x' is float64" in told
    assert "Traceback" not in told and "resource_tracker" not in told
    assert not out.exists()
