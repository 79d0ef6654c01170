"""What forward makes of numbers is in float64 what plain PyTorch makes in that, without a rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.training.precision import MadeInFloat64, constants_in, convert_module, twin_of
from spindle_cli.workload.types import Task, Workload

from .shares import gradients_of, run_cut, run_plain
from .toy import WIDTH, Block, Items

SAMPLES, LENGTH = 6, 5
Scale = Callable[[Tensor], Tensor]


class Scaled(nn.Module):
    """A loss over what a block gives, scaled by numbers that forward makes; classes have weights."""

    def __init__(self, scale: Scale | None = None) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, 2)
        self.scale = scale
        self.weight = torch.tensor([1.0, 3.1])  # no buffer

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.scale is not None:
            return self.second(hidden * self.scale(hidden)[:, None]).square().mean()
        logits = self.head(self.second(hidden).mean(1))
        made = functional.cross_entropy(logits, label, weight=torch.tensor([0.1, 0.3]))
        return made + functional.cross_entropy(logits, label, weight=self.weight)


def _changed_in_place(_: Tensor) -> Tensor:
    scale = torch.zeros(LENGTH)
    scale[1:3] = 0.1
    scale += torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    return (scale / 3).clamp_(max=0.2)


SCALES: dict[str, Scale | None] = {
    "linspace": lambda _: torch.linspace(0.0, 0.7, steps=LENGTH),
    "float32": lambda _: torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float32).float(),
    "of whole numbers": lambda _: torch.arange(LENGTH) / 3,
    "in place": _changed_in_place,
    "of several": lambda _: torch.stack([torch.linspace(0, 0.7, LENGTH).sort(descending=True).values] * 2)[0],
    "rounded to whole numbers": lambda x: x.new_ones(LENGTH) * (torch.tensor([0.29] * LENGTH) * 100).long(),
    "class weights": None,
}


def _workload(name: str) -> Workload:
    torch.manual_seed(0)
    items = Items(x=(LENGTH, WIDTH), label=((), 2))
    return Workload("wide", [Task("t", Scaled(SCALES[name]), SAMPLES, items)], operators=(Block,))


@pytest.mark.parametrize("name", SCALES)
def test_constants_are_those_of_plain_pytorch_in_float64(name: str) -> None:
    workload = _workload(name)
    plain = copy.deepcopy(workload.tasks[0].module)
    task = analysed(workload).tasks["t"]
    fields = torch.utils.data.default_collate([task.task.dataset[index] for index in range(SAMPLES)])  # type: ignore[index]
    batch = {key: value.double() if value.is_floating_point() else value for key, value in fields.items()}
    for module in (plain, task.root):
        convert_module(module, None, torch.float64)
    with constants_in(torch.float64):
        cuts = {op.index: [0, 1, SAMPLES] for op in task.ops}
        loss = run_cut(task, [batch], cuts)
        expected = run_plain(replace(task.task, module=plain), batch)  # type: ignore[arg-type]
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        found = gradients_of(loss, dict(task.root.named_parameters()))
        for key, gradient in gradients_of(expected, dict(plain.named_parameters())).items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-12, atol=1e-14)


def test_what_was_there_before_is_changed_once() -> None:
    """A tensor that has no twin is not made again; a twin that a change cannot follow is none any more."""
    before = torch.zeros(3)
    with MadeInFloat64(lambda: False):
        before.add_(1.0)
        made = torch.linspace(0.0, 0.7, 3)
        made.add_(before)
        before.contiguous()  # gives the tensor itself
    assert before.tolist() == [1.0, 1.0, 1.0] and twin_of(before) is None
    twin = twin_of(made)
    assert twin is not None
    torch.testing.assert_close(twin, torch.linspace(0.0, 0.7, 3, dtype=torch.float64) + 1, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["linspace", "class weights"])
def test_ops_with_constants_are_checked_in_float64_and_left_as_they_were(name: str) -> None:
    graph = analysed(_workload(name))
    root = graph.tasks["t"].root
    before = {key: value for key, value in vars(root).items() if isinstance(value, Tensor)}
    (check,) = check_numbers(graph, 0, CheckSettings()).tasks
    assert (check.forward_unchecked, check.unchecked, check.whole) == (None, {}, {})
    assert check.largest_difference < 1e-13
    after = {key: value for key, value in vars(root).items() if isinstance(value, Tensor)}
    assert after.keys() == before.keys() and all(after[key] is before[key] for key in before)
