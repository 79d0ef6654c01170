"""Losses that compare all samples with all: which are found, and that their shares add up to the whole."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from helpers.analysed import analysed
from spindle_cli.analysis.pairs.follow import arguments_of, record
from spindle_cli.analysis.pairs.recipe import make_recipe
from spindle_cli.analysis.rules.types import MixesError
from spindle_cli.operators.batch_dependent import PairsOverShares, pairs_over_shares
from spindle_cli.profile.checking.in_turn import InTurn
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

from .contrasts import BATCH, SPLIT, WHOLE, Loss, clip, task_of, two_views, views_apart

CUTS = ((0, 1, BATCH), (0, 3, 4, BATCH), (0, BATCH))
BATCHES = 2  # of a step


def inputs_of(task: TaskGraph) -> list[Tensor]:
    torch.manual_seed(1)
    specs = [task.values[name] for name in task.ops[-1].inputs]
    numbers = torch.arange(BATCH) % 3
    return [
        torch.randn(spec.shape, dtype=spec.dtype)
        if spec.dtype.is_floating_point
        else numbers.view(spec.shape)
        for spec in specs
    ]


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_(tensor.is_floating_point())


def gradients(loss: Tensor, leaves: list[Tensor], root: nn.Module) -> list[Tensor]:
    wanted = [*(tensor for tensor in leaves if tensor.requires_grad), root.scale, root.bias]
    return list(torch.autograd.grad(loss, wanted, materialize_grads=True, retain_graph=True))


def of_shares(task: TaskGraph, inputs: list[Tensor], cuts: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The sum of the shares' parts, and the gradients: joined of inputs, summed of parameters."""
    op, group = task.ops[-1], InTurn(len(cuts) - 1)
    dims = [task.values[name].batch_dim for name in op.inputs]
    module = pairs_over_shares(task.share_module(op), task, op, group, cuts)
    leaves, calls = [], []
    for first, last in pairwise(cuts):
        own = [
            leaf(tensor.narrow(dim, first, last - first)) for tensor, dim in zip(inputs, dims, strict=True)
        ]
        leaves.append(own)
        calls.append(partial(module, *own, (last - first) / BATCH / BATCHES))
    parts = group.run(calls)
    found = group.run([partial(gradients, *each, task.root) for each in zip(parts, leaves, strict=True)])
    trained = [dim for tensor, dim in zip(inputs, dims, strict=True) if tensor.is_floating_point()]
    by_leaf = list(zip(*found, strict=True))
    joined = [torch.cat(each, dim) for each, dim in zip(by_leaf, trained, strict=False)]
    summed = [torch.stack(each).sum(0) for each in by_leaf[len(trained) :]]
    return torch.stack(parts).sum(), [*joined, *summed]


@pytest.mark.parametrize("name", SPLIT)
def test_shares_of_a_contrastive_loss_add_up_to_it_and_so_do_their_gradients(name: str) -> None:
    task = task_of(SPLIT[name])
    op = task.ops[-1]
    assert (op.coupled, op.contrasts) == (False, True), op.coupled_because
    inputs = inputs_of(task)
    leaves = [leaf(tensor) for tensor in inputs]
    loss = task.op_module(op)(*leaves)
    expected = gradients(loss, leaves, task.root)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected)
    for cuts in CUTS:
        part, found = of_shares(task, inputs, cuts)
        torch.testing.assert_close(part * BATCHES, loss, rtol=1e-12, atol=1e-13)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one * BATCHES, other, rtol=1e-11, atol=1e-13)


def why_whole(task: TaskGraph) -> str:
    op = task.ops[-1]
    module = fx.GraphModule(task.root, op.graph)
    with pytest.raises(MixesError) as raised:
        make_recipe(record(module, module, arguments_of(task, op), BATCH))
    return str(raised.value)


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_cut_into_pairs_stays_whole(name: str) -> None:
    loss, why = WHOLE[name]
    task = task_of(loss)
    assert task.ops[-1].coupled and not task.ops[-1].contrasts
    assert why in why_whole(task)


class AsOperator(nn.Module):
    """A loss as an operator."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss, self.scale = loss, nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.loss(self, a, b)


class Towers(nn.Module):
    def __init__(self, loss: Loss, then: Any = lambda x: x) -> None:
        super().__init__()
        self.one, self.two, self.loss, self.then = nn.Linear(3, 4), nn.Linear(3, 4), AsOperator(loss), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.loss(self.one(x), self.two(x)))


def last_op(loss: Loss, batch: int = BATCH, then: Any = lambda x: x, **classes: tuple[type, ...]) -> Any:
    task = Task("t", Towers(loss, then), batch, [{"x": torch.randn(3)} for _ in range(16)])
    return analysed(Workload("w", [task], operators=(nn.Linear,), **classes)).tasks["t"].ops[-1]


def test_a_named_operator_is_split_and_says_why_it_cannot_be() -> None:
    named = last_op(clip, contrastive=(AsOperator,))
    assert (named.target, named.contrasts, named.coupled) == ("loss", True, False)
    whole = last_op(two_views, contrastive=(AsOperator,))
    assert whole.coupled and not whole.contrasts
    assert whole.coupled_because.startswith("it is named as contrastive, but it cannot be split: it compares")
    assert "contrasts.py" in whole.coupled_because


def test_two_views_in_one_batch_are_told_the_way_out_which_computes_the_same() -> None:
    said = task_of(two_views).ops[-1].coupled_because or ""
    assert "as a comparison of samples neither: it compares what is no single row for each sample" in said
    assert "contrasts.py" in said and "torch.logaddexp" in said
    module, (a, b) = SimpleNamespace(scale=torch.tensor(1.3)), torch.randn(2, BATCH, 4, dtype=torch.float64)
    torch.testing.assert_close(two_views(module, a, b), views_apart(module, a, b), rtol=1e-12, atol=1e-13)


def test_a_listed_operator_stays_whole() -> None:
    listed = last_op(clip, coupled=(AsOperator,))
    assert (listed.coupled, listed.contrasts) == (True, False)


def counting(m: Any, a: Tensor, b: Tensor) -> Tensor:
    """A loss whose operator counts its calls: every share would be a call."""
    m.calls = getattr(m, "calls", 0) + 1
    return clip(m, a, b)


def test_an_operator_that_keeps_something_stays_whole() -> None:
    kept = last_op(counting, contrastive=(AsOperator,))
    assert kept.coupled and not kept.contrasts
    assert "calls" in kept.coupled_because


def test_one_sample_has_nobody_to_be_compared_with() -> None:
    assert not last_op(clip, batch=1).contrasts
    assert last_op(clip, batch=2).contrasts


def test_a_loss_scaled_behind_its_operator_is_split() -> None:
    op = last_op(clip, then=lambda loss: loss * 3, contrastive=(AsOperator,))
    assert op.contrasts


class _Shapes(torch.utils._python_dispatch.TorchDispatchMode):
    """Shapes of all that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.seen.add(tuple(tensor.shape))
        return made


def test_no_share_has_an_entry_for_every_pair_in_either_pass() -> None:
    """64 samples, 8 to a share, of 4 numbers each: 8 x 64 pairs at most, not 64 x 64."""
    task = Task("t", Towers(clip).double(), 64, [{"x": torch.randn(3).double()} for _ in range(64)])
    graph = analysed(Workload("w", [task], operators=(nn.Linear,), contrastive=(AsOperator,))).tasks["t"]
    op, group = graph.ops[-1], InTurn(8)
    module = pairs_over_shares(graph.share_module(op), graph, op, group, tuple(range(0, 65, 8)))
    inputs = [torch.randn(8, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    group.run([partial(module, *inputs, 1 / 8)] * 8)  # recorded before it is looked at
    with _Shapes() as shapes:
        parts = group.run([partial(module, *inputs, 1 / 8)] * 8)
        group.run([lambda part=part: torch.autograd.grad(part, inputs, retain_graph=True) for part in parts])
    assert {(8, 64), (64, 8), (64, 4)} <= shapes.seen
    assert (64, 64) not in shapes.seen


def test_one_device_runs_the_loss_as_it_is() -> None:
    task = task_of(clip)
    module = task.op_module(task.ops[-1])
    assert pairs_over_shares(module, task, task.ops[-1], None, (0, BATCH)) is module
    assert pairs_over_shares(module, task, task.ops[0], InTurn(2), (0, 1, BATCH)) is module
    assert isinstance(
        pairs_over_shares(module, task, task.ops[-1], InTurn(2), (0, 1, BATCH)), PairsOverShares
    )


def test_recording_saves_nothing_for_a_layer_that_is_to_recompute_its_activations() -> None:
    """It may come up within its forward pass, for a batch of another length, and not when it runs again."""
    task = task_of(clip)
    module = fx.GraphModule(task.root, task.ops[-1].graph)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        record(module, module, arguments_of(task, task.ops[-1]), BATCH)
    assert saved == []
