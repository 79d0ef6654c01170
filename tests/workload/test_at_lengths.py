"""At every length what runs is what forward does at this length, whatever a trace has written down."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import length_toys
from helpers.analysed import analysed
from spindle_cli.analysis.at_lengths import LengthTracer, is_same_graph, module_over
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.errors import WorkloadError
from spindle_cli.training.data.reading import find_lengths, open_batches
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.settings.types import Looking
from spindle_cli.workload.types import Task, Workload


def planned(workload: Workload, **looking: Any) -> WorkloadGraph:
    return analysed(workload, find_lengths(workload, 0, Looking(**looking)))


def loss_by_ops(graph: WorkloadGraph, tracer: LengthTracer, name: str, batch: dict[str, Tensor]) -> Tensor:
    """Of the task's ops at the length of a batch, over the planned task's modules; the loss in two shares."""
    found = tracer.at(name, {field: batch[field].shape[1:] for field in graph.tasks[name].varying})
    task = found.over(graph.tasks[name])
    shares = task.loss_shares
    counts: tuple[Tensor, ...] = ()
    if shares.counts is not None:
        counter = LossCounter(module_over(shares.counts, found.constants, task.root), shares)
        counts = counter.count(batch, 1.0).unbind()
    total = torch.zeros(())
    for rows in (slice(0, 1), slice(1, None)):
        known = {field: value[rows] for field, value in batch.items()}
        for op in task.ops:
            arguments = [known[value] for value in (*op.fields, *op.inputs)]
            if op.shares is not None:
                share = len(arguments[0]) / task.task.batch_size
                total = total + module_over(op.shares.graph, found.constants, task.root)(
                    *arguments, share, *counts
                )
                break
            made = module_over(op.graph, found.constants, task.root)(*arguments)
            known.update(zip(op.outputs, made, strict=True))
    found.forget()
    return total


@pytest.mark.parametrize("name", ["text", "score"])
@pytest.mark.parametrize("percentile", [1, 100])
def test_the_loss_and_its_gradients_are_those_of_forward(name: str, percentile: float) -> None:
    workload = length_toys.build([name])
    graph = planned(workload, percentile=percentile)
    (task,) = workload.tasks
    tracer = LengthTracer(length_toys.build([name]), graph)
    batches = open_batches(task, 0, varies=True)
    lengths = set()
    for step in range(4):
        batch = batches.rows(step, 0, task.batch_size)
        lengths.add(batch["ids"].shape[1])
        losses = [task.module(**batch), loss_by_ops(graph, tracer, name, batch)]
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        parameters = [p for p in task.module.parameters() if p.requires_grad]
        one, other = (torch.autograd.grad(loss, parameters) for loss in losses)
        for expected, found in zip(one, other, strict=True):
            assert torch.allclose(found, expected, atol=1e-6)
    assert len(lengths) > 2


def test_the_other_build_keeps_no_constants_of_the_lengths_that_were_traced() -> None:
    graph = planned(length_toys.build(["text"]))
    other = length_toys.build(["text"])
    tracer = LengthTracer(other, graph)
    before = set(vars(other.tasks[0].module))
    for length in (2, 3):
        found = tracer.at("text", {"ids": (length,), "labels": (length,)})
        assert {tuple(constant.shape) for constant in found.constants.values()} == {(length, length)}
        found.forget()
    assert set(vars(other.tasks[0].module)) == before


class Layer(nn.Module):
    """A linear map, which gives something else of long batches, as `what` says."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.float())
        if x.shape[1] > 3:
            y = y.half() if self.what == "halves" else y.detach() if self.what == "gradients" else y
        return y


class Branching(nn.Module):
    """Does something else for long batches, as `what` says."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(what), Layer()])
        self.what = what

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        what = self.what if x.shape[1] > 3 else ""
        y = self.layers[0](x[..., None])
        if what == "fields":
            y = y + z[..., None]
        if what != "layers":
            y = self.layers[1](y)
        mask = (x > 0)[..., None]
        return (y * mask).mean() if what == "mean" else (y * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("layers", "it runs layers.0, layers.1 in place of layers.0$"),
        ("fields", "layers.0 takes or gives other values$"),
        ("mean", "what layers.1 is a sum or a mean over$"),
        ("halves", r"the value layers_0 is torch.float32 \(2, 3, 1\) and was torch.float16 \(2, 5, 1\)$"),
        ("gradients", "the value layers_0 is"),
    ],
)
def test_a_forward_that_is_another_at_another_length_is_refused(what: str, message: str) -> None:
    items = [{"x": torch.ones(5), "z": torch.ones(5)} for _ in range(4)]

    def build() -> Workload:
        return Workload("w", [Task("t", Branching(what), 2, items)], operators=(Layer,))

    tracer = LengthTracer(build(), analysed(build()))
    assert tracer.at("t", {"x": (4,), "z": (4,)}).abstract.ops
    with pytest.raises(WorkloadError) as caught:
        tracer.at("t", {"x": (3,), "z": (3,)})
    assert re.search(message, caught.value.message)
    assert "for samples with x of (3,), z of (3,)" in caught.value.message


def test_a_name_is_taken_from_the_constants_then_from_the_first_that_has_it() -> None:
    first, last = nn.Linear(1, 1), nn.Linear(2, 2)
    last.extra, last.constant = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    graph = torch.fx.Graph()
    graph.output(tuple(graph.get_attr(name) for name in ("weight", "extra", "constant")))
    weight, extra, constant = module_over(graph, {"constant": torch.zeros(5)}, first, last)()
    assert (weight is first.weight, extra is last.extra, constant.tolist()) == (True, True, [0.0] * 5)
    with pytest.raises(AttributeError, match="nothing has extra"):
        module_over(graph, {}, first)


def test_graphs_with_constants_of_their_own_are_never_taken_for_the_same() -> None:
    def graph(holder: nn.Module, name: str) -> torch.fx.Graph:
        made = torch.fx.Graph()
        made.output(made.call_function(torch.add, (made.placeholder("x"), made.get_attr(name))))
        return made

    holder = nn.Module()
    assert is_same_graph(graph(holder, "bias"), graph(holder, "bias"))
    assert not is_same_graph(graph(holder, "bias"), graph(holder, "other"))
    assert not is_same_graph(graph(holder, "_tensor_constant0"), graph(holder, "_tensor_constant0"))
