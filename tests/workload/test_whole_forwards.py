"""Forwards as libraries write them are taken as they are: modules made in forward, decisions by the batch's
size, its length, outputs that hooks hand on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.training.batches import Batches
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

from .shares import assert_trains_as_plain, run_cut, run_plain
from .toy import WIDTH, Block, Items

CLASSES, BATCH = 7, 4
Forward = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A chain of blocks with a forward of the test's."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.run = nn.Linear(WIDTH, CLASSES), run
        self.register_buffer("weights", torch.arange(1.0, CLASSES + 1))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.run(self, x, label)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _task(run: Forward, batch_size: int = BATCH) -> Task:
    torch.manual_seed(0)
    return Task("t", Net(run), batch_size, Items(x=(5, WIDTH), label=((5,), CLASSES)))


def _traced(run: Forward) -> TaskGraph:
    return analysed(Workload("w", [_task(run)], (Block,))).tasks["t"]


def _assert_exact(run: Forward, graph: TaskGraph) -> None:
    """In shares of one sample and of three: what forward gives for the whole batch, and its gradients."""
    task = _task(run)
    assert_trains_as_plain(task, graph, Batches(task, seed=1).rows(0, 0, BATCH), [0, 1, BATCH])


def _loss_of_class_weights(self: Net, x: Tensor, label: Tensor) -> Tensor:
    weighed = nn.CrossEntropyLoss(weight=self.weights, ignore_index=3)
    return weighed(self.head(self.hidden(x)).flatten(0, 1), label.flatten())


MADE: dict[str, Forward] = {
    "a loss": lambda self, x, label: nn.CrossEntropyLoss()(
        self.head(self.hidden(x)).flatten(0, 1), label.flatten()
    ),
    "a loss with class weights": _loss_of_class_weights,
    "an activation": lambda self, x, label: nn.Softplus(beta=2.0)(self.hidden(x)).mean(),
}


@pytest.mark.parametrize("name", MADE)
def test_a_module_that_forward_makes_is_traced_into(name: str) -> None:
    graph = _traced(MADE[name])
    assert not any(op.coupled for op in graph.ops)
    _assert_exact(MADE[name], graph)


def test_a_module_with_parameters_that_forward_makes_is_run_as_it_is_written() -> None:
    run: Forward = lambda self, x, label: nn.LayerNorm(WIDTH)(self.hidden(x)).square().mean()  # noqa: E731
    graph = _traced(run)
    assert any(op.coupled for op in graph.ops)
    _assert_exact(run, graph)


def _expands(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """As transformers' masks: positions of one row are for all samples."""
    positions = torch.arange(x.shape[1])[None]
    if x.shape[0] != positions.shape[0]:
        positions = positions.expand(x.shape[0], -1)
    return (self.hidden(x) * positions.unsqueeze(-1)).mean()


DECIDED: dict[str, Forward] = {
    "rows for every sample": _expands,
    "more than a share has": lambda self, x, label: self.hidden(x if x.shape[0] > 3 else 2 * x).mean(),
    "by its length": lambda self, x, label: self.hidden(x if len(x) == BATCH else 2 * x).mean(),
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_decision_by_the_batchs_size_is_that_of_the_whole_batch(name: str) -> None:
    graph = _traced(DECIDED[name])
    assert len(graph.decided) == 1 and Path(__file__).name in graph.decided[0]
    assert not any(op.coupled for op in graph.ops)
    _assert_exact(DECIDED[name], graph)


def test_a_decision_that_is_another_for_few_samples_is_checked_on_the_whole_batch() -> None:
    run = lambda self, x, label: self.hidden(x if x.shape[0] > 6 else 2 * x).mean()  # noqa: E731
    graph = analysed(Workload("w", [_task(run, batch_size=8)], (Block,)))
    (check,) = check_numbers(graph, 0, CheckSettings()).tasks
    assert check.forward_unchecked is None and check.checked == ("t/blocks",)
    (check,) = check_numbers(graph, 0, CheckSettings(max_bytes=80_000)).tasks
    assert "decides by the size of the batch" in str(check.forward_unchecked)


def test_a_trace_that_is_another_function_is_refused_whatever_it_decides() -> None:
    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        scale = 1.0 if isinstance(x, torch.fx.Proxy) else 2.0
        return self.hidden(x if x.shape[0] > 6 else 2 * x).mean() * scale

    graph = analysed(Workload("w", [_task(run, batch_size=8)], (Block,)))
    with pytest.raises(WorkloadError, match="not what its forward computes"):
        check_numbers(graph, 0, CheckSettings())


def test_the_limits_of_a_dtype_are_those_of_the_tensor() -> None:
    """As transformers' eager masks are made."""

    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        hidden = self.hidden(x)
        mask = torch.where(label > 3, torch.finfo(hidden.dtype).min, 0.0)
        return (hidden.sum(-1) + mask).softmax(-1).pow(2).mean()

    graph = _traced(run)
    assert not any(op.coupled for op in graph.ops)
    _assert_exact(run, graph)


def test_handles_of_hooks_that_a_model_keeps_are_none() -> None:
    """As transformers' gradient checkpointing keeps them."""
    task = _task(lambda self, x, label: self.hidden(x).mean())
    task.module._require_grads_hooks = [object()]
    assert len(analysed(Workload("w", [task], (Block,))).tasks["t"].ops) == 3
    assert len(task.module._require_grads_hooks) == 1


def test_a_cache_is_refused_with_the_way_out() -> None:
    made: Any = type("Cache", (), {"__module__": "transformers.cache_utils"})

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Keeping()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x, past=made()).mean()

    class Keeping(Block):
        def forward(self, x: Tensor, past: Any = None) -> Tensor:
            return super().forward(x)

    with pytest.raises(WorkloadError) as caught:
        analysed(Workload("w", [Task("t", Caching(), BATCH, Items(x=(5, WIDTH)))], (Keeping,)))
    assert "use_cache=False" in str(caught.value) and Path(__file__).name in str(caught.value)


def test_the_length_of_a_batch_is_that_of_whoever_computes_it() -> None:
    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        hidden = self.hidden(x)
        assert len(hidden.shape) == 3 and len([1, 2]) == 2
        return hidden.sum() / len(hidden)

    graph = _traced(run)
    assert not any(op.coupled for op in graph.ops)
    _assert_exact(run, graph)


def test_a_contrastive_loss_by_the_length_of_the_batch_is_split() -> None:
    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        pooled = self.hidden(x).mean(1)
        return nn.functional.cross_entropy(pooled @ pooled.t(), torch.arange(len(pooled)))

    graph = _traced(run)
    assert not any(op.coupled for op in graph.ops) and graph.ops[-1].contrasts
    _assert_exact(run, graph)


class Recording(Net):
    """Hands its blocks' outputs on as transformers does: by hooks that forward sets, for its own list."""

    def hidden(self, x: Tensor) -> Tensor:
        recorded: list[Any] = []
        _hook.asked.append(recorded)
        try:
            if not getattr(self, "_output_capturing_hooks_installed", False):
                for block in self.blocks:
                    block.register_forward_hook(_hook)
                self._output_capturing_hooks_installed = True
            super().hidden(x)
        finally:
            _hook.asked.pop()
        assert len(recorded) == 3
        return torch.stack(recorded).sum(0)


class _Hook:
    """`asked`: lists of those who want to know, the innermost last."""

    __module__ = "transformers.utils.output_capturing"

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.asked and not isinstance(output, torch._subclasses.FakeTensor):
            self.asked[-1].append(output)


_hook = _Hook()


def test_outputs_that_hooks_record_are_known_to_a_trace() -> None:
    run: Forward = lambda self, x, label: self.hidden(x).pow(2).mean()  # noqa: E731

    def task() -> Task:
        torch.manual_seed(0)
        return Task("t", Recording(run), BATCH, Items(x=(5, WIDTH), label=((5,), CLASSES)))

    made = task()
    graph = analysed(Workload("w", [made], (Block,))).tasks["t"]
    assert not any(block._forward_hooks for block in made.module.blocks)
    plain = task()
    batch = Batches(plain, seed=1).rows(0, 0, BATCH)
    expected = run_plain(plain, batch)
    loss = run_cut(graph, [batch], {op.index: [0, 1, BATCH] for op in graph.ops})
    torch.testing.assert_close(loss, expected)
