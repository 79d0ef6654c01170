"""A vocabulary that the devices of a group share out gives the loss and the gradients of the whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import head_toys
import pytest
import torch
from head_toys import task_of
from test_loss_chunks import EXACT, SHARE, arguments_of, passed, same
from torch import Tensor, nn

from helpers.thread_groups import Meeting, in_threads
from spindle_cli.operators.heads.chunked import loss_in_chunks
from spindle_cli.operators.split_op import PartialOp, View
from spindle_cli.operators.tensor_parallel import LayerSplit, layer_split
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.metaops.ops import share_module
from spindle_cli.workload.types import Workload

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
LOSSES: tuple[str, ...] = ("causal", "smoothed", "weighted", "shifted", "rooted", "twice", "two_results")


def split_of(task: TaskGraph, op: int, degree: int) -> LayerSplit:
    found = layer_split(Workload("w", [], tp_vocabulary=2), task, task.ops[op], degree)
    assert found is not None
    return found


def part_of(
    task: TaskGraph, split: LayerSplit, group: Any, setting: LossChunks = 1, op: int = -1
) -> nn.Module:
    """One device's part of an op, with leaves of its own (uneven where the words are)."""
    own_task = copy.deepcopy(task)  # names of the same modules, other objects
    found = loss_in_chunks(own_task, own_task.ops[op], SHARE, setting, split.own_words(group))
    views: dict[str, View] = {}
    known: dict[int, View] = {}
    for name, whole in found.module.named_parameters(remove_duplicate=False):
        if name in split.dims:
            size = len(whole)
            first, last = (size * (group.member + i) // split.degree for i in (0, 1))
            if id(whole) not in known:
                known[id(whole)] = View((nn.Parameter(whole.detach()[first:last].clone()),))
            views[name] = known[id(whole)]
    return PartialOp(found.module, views, None)


@dataclass
class Joined:
    """What the devices found: the first one's, and the parts of what is cut put together."""

    found: dict[str, Tensor]
    meeting: Meeting
    widest: int


def run_parts(task: TaskGraph, degree: int, setting: LossChunks = 1) -> Joined:
    """A pass of the loss op on all devices."""
    split = split_of(task, -1, degree)

    def one(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        module = part_of(task, split, group, setting)
        arguments = arguments_of(task)
        found = passed(module, module, arguments)
        views = {name: view.leaves[0].grad for name, view in module._views.items()}
        return found, views

    results, meeting = in_threads(degree, one)
    first = results[0][0]
    for found, _ in results[1:]:
        assert same(
            {"loss": found["loss"], "hidden": found["hidden"]},
            {k: first[k] for k in ("loss", "hidden")},
            EXACT,
        )
    joined = {
        name.removeprefix("op."): tensor
        for name, tensor in first.items()
        if tensor is not None and not name.startswith("leaves.")
    }
    for name in results[0][1]:
        joined[name] = torch.cat([views[name] for _, views in results])
    return Joined(joined, meeting, 0)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_a_head_in_parts_has_the_loss_and_the_gradients_of_the_whole(name: str, degree: int) -> None:
    """41 words are cut unevenly by each of these."""
    task = task_of(getattr(head_toys, name), bias=name == "smoothed")
    task.root.double()
    whole = share_module(task, task.ops[-1])
    expected = passed(whole, whole, arguments_of(task))
    assert same_named(run_parts(task, degree).found, expected)


def same_named(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    names = expected.keys() & found.keys()
    assert {"loss", "hidden"} < names and names >= {n for n in expected if "head" in n}
    return same({name: found[name] for name in names}, {name: expected[name] for name in names}, EXACT)


@pytest.mark.parametrize("setting", [2, 5, 1000])
@pytest.mark.parametrize("name", ["causal", "smoothed", "weighted", "shifted"])
def test_in_chunks_as_well(name: str, setting: int) -> None:
    task = task_of(getattr(head_toys, name))
    task.root.double()
    whole = share_module(task, task.ops[-1])
    expected = passed(whole, whole, arguments_of(task))
    assert same_named(run_parts(task, 2, setting).found, expected)
