"""An op of an evaluation takes the parameters and buffers that it has in training, and no others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from helpers.cross_layer import Cross
from spindle_cli.analysis.evaluation import trace_evaluations
from spindle_cli.analysis.metaops.finding import Finder
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

WIDTH = 3


class Items:
    """Six samples."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((WIDTH,), float(index))}


class Chain(nn.Module):
    """Layers over a first value, and a loss that takes it or not."""

    mean: Tensor

    def __init__(self, kind: str, *, joins: bool) -> None:
        super().__init__()
        self.kind, self.joins = kind, joins
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Parameter(torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Cross(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.kind == "fixed":
            x = x - self.mean
        first = {
            "fixed": lambda: self.norm(self.embed(x)),
            "plain": lambda: self.embed(x) + self.position,
            "norm": lambda: self.norm(self.embed(x) + self.position),
            "running": lambda: self.norm(x),
            "dropout": lambda: self.dropout(self.embed(x) + self.position),
            "functional": lambda: functional.dropout(self.embed(x), 0.1, self.training) + self.position,
            "returned": lambda: self.dropout(self.embed(x)),
            "in eval": lambda: self.embed(x) if self.training else self.embed(x) + self.position,
        }[self.kind]()
        x = first if self.kind != "returned" else self.layers[0](first, first)
        for layer in self.layers[1:]:
            x = layer(x if self.kind == "returned" else first, x)
        loss = (x + first if self.joins else x).square().mean()
        if self.kind == "fixed" and not self.training:
            first = x + self.mean
        return {"loss": loss, "first": first}


def tensors_of(
    kind: str, *, joins: bool, kind_of: type[Chain] = Chain
) -> tuple[list[set[str]], list[set[str]]]:
    """Those of each op in training and in eval mode."""
    module = kind_of(kind, joins=joins)
    task = Task("score", module, 2, Items(), eval_dataset=Items(), metrics={"first": lambda out: 0.0})
    graph = analysed(Workload(name="chain", tasks=[task], operators=(Cross,)))
    both = graph.tasks["score"], trace_evaluations(graph, Finder())["score"]
    one, other = ([{*op.parameters, *op.buffers} for op in task.ops] for task in both)
    return one, other


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("kind", ["plain", "norm", "running", "dropout", "functional", "returned"])
def test_ops_take_in_eval_mode_what_they_have_in_training(kind: str, joins: bool) -> None:
    """Where training computes something once (it draws, or its statistics are the batch's), eval mode could
    compute it anew in every op that uses it, and others' devices have not what that takes.
    """
    trained, evaluated = tensors_of(kind, joins=joins)
    assert all(now <= before for before, now in zip(trained, evaluated, strict=True))


def test_what_only_eval_mode_takes_is_refused_with_its_name() -> None:
    with pytest.raises(WorkloadError, match=r"in eval mode layers\.1 takes 'position', which it does not in"):
        tensors_of("in eval", joins=False)


def test_buffers_that_nothing_changes_may_be_taken_anywhere() -> None:
    """Every device has them as they are built: what was taken off at the beginning is put back at the end."""
    trained, evaluated = tensors_of("fixed", joins=False)
    assert ["mean" in names for names in trained] == [True, False]
    assert ["mean" in names for names in evaluated] == [True, True]


class Supervised(Chain):
    """Takes what a layer in between gives, too, for a loss that training alone has."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        middle = self.layers[1](x, x)
        end = self.layers[2](x, middle)
        loss = self.embed(end).square().mean()
        if self.training:
            loss = loss + 0.1 * (middle + self.position).abs().mean()
        return {"loss": loss, "end": end, "first": self.embed(end)}


def test_a_loss_that_takes_less_in_eval_mode_stays_an_op_of_its_own() -> None:
    trained, evaluated = tensors_of("", joins=False, kind_of=Supervised)
    assert len(trained) == len(evaluated) == 3
    assert all(now <= before for before, now in zip(trained, evaluated, strict=True))


class ShiftedInEval(Chain):
    """Every layer takes the input, which a buffer shifts in eval mode alone."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = x if self.training else x - self.mean
        end = self.layers[1](first, self.layers[0](first, first))
        return {"loss": end.square().mean(), "first": end}


def test_every_layer_may_take_a_buffer_that_nothing_changes_by_itself() -> None:
    """No layer has it from another, which it does not take in training."""
    trained, evaluated = tensors_of("", joins=False, kind_of=ShiftedInEval)
    assert ["mean" in names for names in trained] == [False, False]
    assert ["mean" in names for names in evaluated] == [True, True]


class JoinsOutputs(Chain):
    """What takes no layer's output is added to a layer's: it is computed with that one."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        middle = self.layers[0](x, x) + self.embed(x)
        end = self.layers[2](middle, self.layers[1](middle, middle))
        return {"loss": end.square().mean(), "end": end}


def test_glue_of_no_layer_stays_with_the_layer_whose_output_it_joins() -> None:
    trained, evaluated = tensors_of("", joins=False, kind_of=JoinsOutputs)
    assert ["embed.weight" in names for names in trained] == [True, False, False]
    assert all(now <= before for before, now in zip(trained, evaluated, strict=True))


class DrawsInTraining(JoinsOutputs):
    """Dropout is drawn once for the layers that take it, and what it joins goes with the first of them."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.dropout(self.embed(x))
        middle = self.layers[0](x, x) + first
        end = self.layers[2](middle, self.layers[1](middle, middle))
        return {"loss": end.square().mean(), "end": end}


def test_what_training_draws_for_a_layer_stays_with_it_in_eval_mode() -> None:
    trained, evaluated = tensors_of("", joins=False, kind_of=DrawsInTraining)
    assert all(now <= before for before, now in zip(trained, evaluated, strict=True))
