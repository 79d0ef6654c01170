"""Parameters of complex numbers are trained as in plain PyTorch, neither half of them is lost, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from spindle_cli.analysis.analyse import analyse
from spindle_cli.errors import WorkloadError
from spindle_cli.files.request import capture_path
from spindle_cli.runtime.update.masters import Masters
from spindle_cli.runtime.update.optimizers import Optimizers
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.training.optimizing.groups import OptimizerGroups, groups_of_graph
from spindle_cli.verify.plain import write_tensors
from spindle_cli.verify.stepping.arithmetic import float32_copies
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.types import Task, Workload

NUMBERS = torch.tensor([1.0 + 2.0j, -3.0 + 0.5j])
SLOPES = torch.tensor([0.5 - 4.0j, 2.0 + 1.0j])


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_step_of_complex_numbers_is_that_of_torch(name: str) -> None:
    """torch's fused kernels take real numbers alone."""
    train = TrainSettings(optimizer=name, lr=0.1, ema={"decay": 0.5})
    ours, plain = (nn.Parameter(NUMBERS.clone()) for _ in range(2))
    owned = OwnedRange("a", None, ours)
    optimizers = Optimizers.of(train, OptimizerGroups(train.choices, {"a": 0}), [owned])
    expected = getattr(torch.optim, name)([plain], lr=0.1)
    averaged = torch.zeros_like(plain)
    for step in range(3):
        ours.grad, plain.grad = SLOPES * (step + 1), SLOPES * (step + 1)
        optimizers.step()
        expected.step()
        averaged = plain.detach().lerp(averaged, 0.5) if step else plain.detach().clone()
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert optimizers.average is not None
    torch.testing.assert_close(optimizers.average.of(owned), averaged)


def test_masters_of_complex_numbers_keep_both_halves() -> None:
    held = nn.Parameter(NUMBERS.clone())
    masters = Masters([OwnedRange("a", None, held)])
    held.grad = SLOPES.clone()
    masters.take_gradients()
    (master,) = masters.owned_ranges
    assert torch.equal(master.tensor.detach(), NUMBERS)
    assert master.tensor.grad is not None and torch.equal(master.tensor.grad, SLOPES)
    with torch.no_grad():
        master.tensor.add_(1j)
    masters.hand_back()
    assert torch.equal(held.detach(), NUMBERS + 1j)
    copies = float32_copies({"a": held, "b": nn.Parameter(torch.ones(2, dtype=torch.bfloat16))})
    assert [copy.dtype for copy in copies.values()] == [torch.complex64, torch.float32]


def test_the_plain_run_hands_in_complex_numbers_as_the_plans_run_does(tmp_path: Path) -> None:
    """In pairs: files have no name for those of float64."""
    capture_path(tmp_path, "final", 0).parent.mkdir(exist_ok=True)
    write_tensors(tmp_path, "final", {"a": NUMBERS.to(torch.complex128)})
    assert load_file(capture_path(tmp_path, "final", 0))["a"].tolist() == [[1.0, 2.0], [-3.0, 0.5]]


class Turned(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(2, 2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.turn).abs().mean()


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": NUMBERS * index}


@pytest.mark.parametrize(
    ("settings", "dtype", "says"),
    [
        (
            {"optimizer": "Muon"},
            torch.complex64,
            "Muon trains real numbers, and parameter t.turn is complex64",
        ),
        ({"optimizer": "Adafactor"}, torch.complex64, "Adafactor trains real numbers"),
        ({"local_sgd": {"islands": 2, "every": 2}}, torch.complex64, "local_sgd averages real numbers"),
        ({"clip_value": 0.1}, torch.complex64, "clip_value clips real numbers"),
        ({"precision": "fp16-autocast"}, torch.complex64, "float32, and t.turn is complex64"),
        ({}, torch.complex128, "parameter t.turn is complex128, which checkpoints have no name for"),
    ],
)
def test_what_takes_no_complex_numbers_is_refused(
    settings: dict[str, object], dtype: torch.dtype, says: str
) -> None:
    graph = analyse(Workload("w", [Task("t", Turned(dtype), 4, Points())]))
    with pytest.raises(WorkloadError, match=says):
        groups_of_graph(TrainSettings.model_validate(settings), graph)
