"""Which parameters ops use under several keys, found in a workload; and which profiles cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from helpers.analysed import analysed
from helpers.plans import metaop_of
from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.profile.parameter_bytes import TiedParameters
from spindle_cli.profile.parameters.sizes import parameter_sizes
from spindle_cli.profile.parameters.tying import Tying
from spindle_cli.workload.graph import Op, TaskGraph, WorkloadGraph
from spindle_cli.workload.types import Task, Workload

WORDS, WIDTH = 12, 4
WORDS_BYTES, SCALE_BYTES = WORDS * WIDTH * 4, WIDTH * 4


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"words": torch.tensor([index, index + 1, index + 2])}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class Speak(nn.Module):
    """Its embedding is its head's matrix; both take the same scale, and the head has a bias of its own."""

    def __init__(self, words: nn.Embedding, scale: nn.Parameter) -> None:
        super().__init__()
        self.words, self.scale = words, scale
        self.layers = nn.ModuleList([Block(), Block()])
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) * self.scale
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(x * self.scale, self.words.weight, self.bias)
        return functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def workload(*, frozen: bool = False) -> Workload:
    """Two tasks with layers of their own and the same words."""
    words = nn.Embedding(WORDS, WIDTH).requires_grad_(not frozen)
    scale = nn.Parameter(torch.ones(WIDTH))
    tasks = [Task(name, Speak(words, scale), batch_size=4, dataset=Sentences()) for name in ("a", "b")]
    return Workload("speak", tasks, operators=(Block,))


def whole(task: TaskGraph, op: Op) -> LayerSplit | None:
    return None


def tied_of(graph: WorkloadGraph, *apart: str) -> dict[str, tuple[TiedParameters, ...]]:
    tying = Tying.find(graph, whole, frozenset(apart))
    return {metaop.name: tying.of(metaop.name) for metaop in graph.metaops}


def said(found: Sequence[TiedParameters]) -> list[tuple[int, str, int, bool]]:
    return [(each.op, each.parameter, each.num_bytes, each.is_trained) for each in found]


def test_what_the_same_ops_use_is_said_together_and_once_for_each_of_them() -> None:
    """Of both tasks' layers, which are not the same, the first op looks words up and the last one has them as
    its head.
    """
    found = tied_of(analysed(workload()))
    num_bytes = WORDS_BYTES + SCALE_BYTES
    assert list(found) == ["a/layers", "b/layers"]
    for own in found.values():
        assert said(own) == [(op, "a.words.weight", num_bytes, True) for op in (0, 1)]
        assert {each.keys for each in own} == {("layers", "layers-2")}


def test_what_may_be_gathered_and_what_is_not_trained_is_said_apart() -> None:
    for is_frozen, apart in ((False, ["a.words.weight"]), (True, [])):
        found = tied_of(analysed(workload(frozen=is_frozen)), *apart)
        assert said(found["a/layers"]) == said(found["b/layers"])
        assert said(found["b/layers"]) == [
            (op, *each)
            for op in (0, 1)
            for each in (
                ("a.scale", SCALE_BYTES, True),
                ("a.words.weight", WORDS_BYTES, not is_frozen),
            )
        ]


def test_what_tasks_use_in_the_same_block_is_tied_to_nothing() -> None:
    """Two tasks with one model: their layers are the same blocks of one key; the words are in two."""
    words, scale = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.ones(WIDTH))
    model = Speak(words, scale)
    tasks = [Task(name, model, batch_size=4, dataset=Sentences()) for name in ("a", "b")]
    found = tied_of(analysed(Workload("speak", tasks, operators=(Block,))))
    num_bytes = WORDS_BYTES + SCALE_BYTES
    for own in found.values():
        assert said(own) == [(op, "a.words.weight", num_bytes, True) for op in (0, 1)]
        assert {each.keys for each in own} == {("layers",)}


def test_a_tensor_that_an_op_has_under_two_names_counts_once() -> None:
    graph = analysed(workload())
    task = graph.tasks["a"]
    op, words = task.ops[0], task.root.get_submodule("words")
    sizes = parameter_sizes(task, [op], lambda _: None)
    assert sizes.extra_bytes == {0: WORDS_BYTES + SCALE_BYTES}
    words.register_parameter("again", task.root.get_parameter("words.weight"))
    try:
        twice = replace(op, parameters=(*op.parameters, "words.again"))
        assert parameter_sizes(task, [twice], lambda _: None) == sizes
    finally:
        del words._parameters["again"]


def test_where_tensor_parallelism_splits_them_is_said_of_each_op_and_of_all() -> None:
    """It splits the words in the last op alone: a head over some of them."""
    graph = analysed(workload())

    def head_alone(task: TaskGraph, op: Op) -> LayerSplit | None:
        return LayerSplit(2, {"words.weight": 0}, (), ()) if op.index == 1 else None

    found = Tying.find(graph, head_alone).of("b/layers")
    where = {(each.op, each.parameter): (each.is_split, each.is_split_by_any) for each in found}
    assert where == {
        (0, "a.scale"): (False, False),
        (0, "a.words.weight"): (False, True),
        (1, "a.scale"): (False, False),
        (1, "a.words.weight"): (True, True),
    }


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ({"op": 2}, r"tied: op 2; 'task/net' has 2, counted from 0"),
        ({"num_bytes": 2**20 + 11}, r"tied: 1048587 bytes for op 1 are more than .* 1048586 "),
        ({"num_bytes": 0}, "greater than or equal to 1"),
        ({"keys": []}, "at least 1 item"),
        ({"parameter": ""}, "at least 1 character"),
    ],
)
def test_what_cannot_be_is_refused(tied: dict[str, Any], message: str) -> None:
    own = {"op": 1, "parameter": "words", "num_bytes": 2**20 + 10, "keys": ["task/net", "head"]}
    curve = {1: 1.0}
    metaop_of("task/net", 2, curve, extra_param_bytes={1: 10}, tied=(own,))
    with pytest.raises(ValidationError, match=message):
        metaop_of("task/net", 2, curve, extra_param_bytes={1: 10}, tied=({**own, **tied},))


def test_a_parameter_is_tied_to_an_op_once() -> None:
    own = {"op": 0, "parameter": "words", "num_bytes": 8, "keys": ["task/net", "head"]}
    with pytest.raises(ValidationError, match="'words' is there twice for op 0 of 'task/net'"):
        metaop_of("task/net", 1, {1: 1.0}, tied=(own, own))
