"""What of a GPU is tried without one: where ops put their tensors, and walks back in other threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gpu_rehearsal
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS = """
import torch
from torch import nn
from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.synthetic import FloatField, SyntheticDataset

class Fine(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)
    def forward(self, x):
        return self.map(x) + torch.arange(8.0, device=x.device)

class OnTheHost(Fine):
    def forward(self, x):
        return self.map(x) + torch.arange(8.0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = Fine(), OnTheHost()
    def forward(self, x):
        return self.other(self.one(x)).square().mean()

def build():
    data = SyntheticDataset({"x": FloatField((8,))}, 64)
    return Workload("w", [Task("t", Model(), 4, data)], operators=(Fine, OnTheHost))
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA, not even for fake tensors")
def test_an_op_that_mixes_devices_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "layers.py").write_text(LAYERS)
    workload = tmp_path / "w.yaml"
    workload.write_text("schema: spindle.workload/1\nmodel: layers.py:build\n")
    assert gpu_rehearsal.main(["placement", str(workload)]) == 1
    out = capsys.readouterr().out
    assert "w t/1: RuntimeError" in out and "cuda:0, cpu" in out
    assert "w t/0" not in out


def test_a_build_without_cuda_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_rehearsal.main(["placement"]) == 3
    assert "nothing was tried" in capsys.readouterr().out


def without_values(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class Doubled(torch.autograd.Function):
    """Notes the thread of its backward pass."""

    seen: threading.Thread | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        Doubled.seen = threading.current_thread()
        if not without_values(gradient) and gradient.isnan().any():
            raise ValueError("not a number")
        return 2 * gradient


def test_walks_back_are_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)  # as it was behind the test
    gpu_rehearsal.run_backward_elsewhere()
    x = torch.ones(3, requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]
    assert Doubled.seen not in (None, threading.current_thread())
    for empty in (torch.ones(3, device="meta"), FakeTensorMode().from_tensor(torch.ones(3))):
        Doubled.apply(empty.requires_grad_()).sum().backward()
        assert Doubled.seen is threading.current_thread()
    with torch.autograd.set_multithreading_enabled(False):  # CUDA's threads are then in no use either
        Doubled.apply(x).sum().backward()
    assert Doubled.seen is threading.current_thread()
    with pytest.raises(ValueError, match="not a number"):
        (Doubled.apply(x) * float("nan")).sum().backward()


class Seeing(TorchDispatchMode):
    """Notes in which threads operations are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.threads: set[threading.Thread] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.current_thread())
        return func(*args, **(kwargs or {}))


def test_modes_are_taken_along_as_torchs_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)  # as it was behind the test
    gpu_rehearsal.run_backward_elsewhere()
    with Seeing() as seen:
        Doubled.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert seen.threads == {threading.current_thread(), Doubled.seen}


def test_compiled_layers_are_traced_where_they_began_and_walk_back_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)  # as it was behind the test
    gpu_rehearsal.run_backward_elsewhere()
    layers, x = nn.Sequential(nn.Linear(3, 1), nn.Tanh()), torch.ones(2, 3, requires_grad=True)
    gradients = []
    for each in (layers, torch.compile(layers, backend="aot_eager")):
        Doubled.seen = None
        each(Doubled.apply(x)).sum().backward()
        assert Doubled.seen not in (None, threading.current_thread())
        gradients.append([leaf.grad for leaf in (x, *layers.parameters())])
        x.grad = None
        layers.zero_grad()
    torch.testing.assert_close(*gradients)


WALK = """
import threading, torch
x = torch.ones(2, requires_grad=True)
x.register_hook(lambda _: print(threading.current_thread() is threading.main_thread()))
x.sum().backward()
"""


def test_processes_that_are_started_walk_back_in_other_threads_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    here = subprocess.run([sys.executable, "-c", WALK], check=True, capture_output=True, text=True)
    gpu_rehearsal.tell_children(tmp_path)
    there = subprocess.run([sys.executable, "-c", WALK], check=True, capture_output=True, text=True)
    assert (here.stdout.strip(), there.stdout.strip()) == ("True", "False")
