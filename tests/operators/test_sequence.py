"""A trunk that devices share out along the sequence gives the loss and the gradients of the whole."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sequence_toys import BATCH, DEPTH, WIDTH, workload_of
from torch import Tensor, nn

from helpers.analysed import analysed
from helpers.thread_groups import Meeting, in_threads
from spindle_cli.operators.split_op import PartialOp, View, region_of
from spindle_cli.operators.tensor_group import SequencePart, part_sizes
from spindle_cli.operators.tensor_parallel import LayerSplit, layer_split
from spindle_cli.runtime.step.compute import run_backward, run_forward
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Workload

EXACT = 1e-12


def splits_of(task: TaskGraph, workload: Workload, degree: int) -> list[LayerSplit | None]:
    return [layer_split(workload, task, op, degree) for op in task.ops]


def part_of(
    task: TaskGraph, index: int, split: LayerSplit | None, group: Any, leaves: dict[str, nn.Parameter]
) -> nn.Module:
    """One device's op over leaves of its own; notes those whose gradients count."""
    module = task.op_module(task.ops[index])
    views: dict[str, View] = {}
    for name, whole in module.named_parameters(remove_duplicate=False):
        first = group.member == 0
        is_own = split is not None and split.finds_own_gradient(name)
        leaf = leaves.setdefault(name, whole)
        if split is not None and name in split.dims and leaf is whole:
            part = whole.detach().chunk(split.degree, split.dims[name])[group.member]
            leaf = leaves[name] = nn.Parameter(part.clone())
        is_zero = split is not None and not first and name in split.added_once
        views[name] = View((leaf,), counts=first or is_own, is_zero=is_zero)
    return PartialOp(module, views, None if split is None else region_of(module, split, group))


def trained(
    task: TaskGraph, splits: list[LayerSplit | None], group: Any, recompute: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients that one device finds, as a slice of all ops runs."""
    own = copy.deepcopy(task)
    leaves: dict[str, nn.Parameter] = {}
    runnable = tuple(part_of(own, index, split, group, leaves) for index, split in enumerate(splits))
    piece = SimpleNamespace(ops=(0, len(own.ops)), recompute=recompute, selective=False)
    wired = SimpleNamespace(inputs=(), outputs=(), slice=piece, ops=own.ops)
    local: Any = SimpleNamespace(wired=wired, runnable=runnable)
    items = own.task.dataset
    words = torch.stack([items[index]["words"] for index in range(BATCH)])
    run = run_forward(local, {"words": words}, {}, {}, lambda _: None)
    assert run.loss is not None
    run_backward(run, {}, 1.0)
    return run.loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def compare(name: str, positions: int, degree: int, recompute: bool = False) -> Meeting:
    workload = workload_of(name, positions)
    plain = copy.deepcopy(workload.tasks[0].module).double()  # type: ignore[union-attr]
    workload.tasks[0].module.double()  # type: ignore[union-attr]
    task = analysed(workload).tasks["task"]
    splits = splits_of(task, workload, degree)
    assert all(split.sequence for split in splits if split is not None)
    assert sum(split is not None for split in splits) >= DEPTH
    items = workload.tasks[0].dataset
    loss = plain(torch.stack([items[index]["words"] for index in range(BATCH)]))
    loss.backward()
    found, meeting = in_threads(degree, lambda group: trained(task, splits, group, recompute))
    dims = {name: dim for split in splits if split is not None for name, dim in split.dims.items()}
    for each, _ in found:
        assert torch.allclose(each, loss, rtol=EXACT, atol=0.0)
    for parameter_name, parameter in plain.named_parameters():
        parts = [gradients[parameter_name] for _, gradients in found if parameter_name in gradients]
        dim = dims.get(parameter_name)
        whole = torch.stack(parts).sum(0) if dim is None else torch.cat(parts, dim)
        assert parameter.grad is not None
        error = float((whole - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(min=1e-3))
        assert error <= EXACT, (parameter_name, error)
    return meeting


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ["encoder", "language", "direct", "latent", "captions"])
def test_parts_of_a_sequence_train_as_the_whole(name: str, degree: int) -> None:
    compare(name, 8, degree)


@pytest.mark.parametrize(
    ("name", "positions", "degree"),
    [("language", 7, 2), ("language", 11, 4), ("captions", 5, 2), ("captions", 9, 4)],
)
def test_positions_need_not_divide(name: str, positions: int, degree: int) -> None:
    compare(name, positions, degree)


@pytest.mark.parametrize("name", ["encoder", "captions"])
def test_recomputed_layers_train_as_the_whole(name: str) -> None:
    compare(name, 5, 2, recompute=True)


def test_a_trunk_is_joined_once_at_the_end_and_nothing_is_summed() -> None:
    """Two split parts in each layer, each with a gather and a scatter of the trunk in both passes; one more
    gather behind the last layer, and one of the gradient of what is cut before the first.
    """
    meeting = compare("encoder", 8, 2)
    kinds = [kind for kind, _ in meeting.sums]
    passes, edges = 2, 2
    assert kinds.count("gather") == passes * DEPTH * 2 + edges
    assert kinds.count("scatter") == passes * DEPTH * 2
    assert len(kinds) == kinds.count("gather") + kinds.count("scatter")
    assert {shape for kind, shape in meeting.sums if kind == "gather"} == {(1, BATCH, 4, WIDTH)}


def test_the_first_devices_have_one_position_more() -> None:
    assert part_sizes(9, 4) == (3, 2, 2, 2)
    assert part_sizes(8, 4) == (2, 2, 2, 2)
    assert part_sizes(5, 2) == (3, 2)
    for size in range(1, 40):
        for degree in (2, 3, 4, 8):
            sizes = part_sizes(size, degree)
            assert sum(sizes) == size
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) == sizes[0]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_cut_and_joined_is_the_same_and_its_gradient_comes_once(dim: int, rows: int) -> None:
    shape = [rows, 5, 2]
    shape[dim] = 5
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    def one(group: Any) -> tuple[Tensor, Tensor, Tensor]:
        part = SequencePart(2, dim, group)
        leaf = whole.clone().requires_grad_()
        shared = part.cut(leaf)
        assert shared.shape == whole.shape
        assert shared.size(dim) == 5
        assert shared.tensor.is_contiguous()
        joined = shared.whole()
        (joined * whole).sum().backward()
        assert leaf.grad is not None
        return shared.tensor, joined.detach(), leaf.grad

    found, _ = in_threads(2, one)
    assert torch.equal(torch.cat([own for own, _, _ in found], dim), whole)
    for own, joined, gradient in found:
        assert own.shape[dim] in (2, 3)
        assert torch.equal(joined, whole)
        assert torch.equal(gradient, whole)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_gathered_takes_the_sum_of_all_gradients_and_what_is_scattered_gives_all_its_own(
    dim: int,
) -> None:
    whole = torch.arange(10.0).reshape(5, 2) if dim == 0 else torch.arange(10.0).reshape(2, 5)

    def one(group: Any) -> tuple[Tensor, Tensor]:
        part = SequencePart(2, dim, group)
        leaf = whole.clone().requires_grad_()
        gathered = part.gather(part.cut(leaf))
        assert torch.equal(gathered, whole)
        shared = part.scatter_sum(gathered * (group.member + 1))
        shared.tensor.sum().backward()
        assert leaf.grad is not None
        return shared.tensor.detach(), leaf.grad

    found, _ = in_threads(2, one)
    assert torch.equal(torch.cat([own for own, _ in found], dim), 3 * whole)
    for _, gradient in found:
        assert torch.equal(gradient, torch.full_like(whole, 3.0))
