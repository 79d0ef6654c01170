"""Samples that forward works through one after another, where that is the same as all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.tracing.proxies.rows import filled_by_sample
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

from .shares import assert_trains_as_plain
from .toy import WIDTH, Block

BATCH, PLACES, LENGTH = 4, 2, 5
Join = Callable[[Tensor], Tensor]


def _check(condition: Any) -> None:
    """As transformers has its checks."""
    if callable(condition):
        condition = condition()
    if isinstance(condition, Tensor):
        torch._check_tensor_all_with(ValueError, condition, lambda: "unlike")
    else:
        torch._check_with(ValueError, condition, lambda: "unlike")


class Net(nn.Module):
    """Puts what one block makes of pictures into the places among words, as LLaVA does; `join`s it before."""

    def __init__(self, join: Join) -> None:
        super().__init__()
        self.pictures, self.words, self.join = Block(), Block(), join

    def forward(self, x: Tensor, y: Tensor, marks: Tensor) -> Tensor:
        shown = self.join(self.pictures(x))
        is_place = (marks > 0).unsqueeze(-1)
        _check(is_place.sum() * WIDTH == shown.numel())
        return self.words(y.masked_scatter(is_place, shown.to(y.dtype))).pow(2).mean()


class Marked(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Words with places at other positions in each sample."""

    def __init__(self, places: int = PLACES) -> None:
        self.places = places

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        marks = torch.zeros(LENGTH, dtype=torch.long)
        marks[torch.randperm(LENGTH, generator=generator)[: self.places]] = 1
        x = torch.randn(PLACES, WIDTH, generator=generator)
        return {"x": x, "y": torch.randn(LENGTH, WIDTH, generator=generator), "marks": marks}


def _task(join: Join) -> Task:
    torch.manual_seed(0)
    return Task("t", Net(join), BATCH, Marked())


def _batch(dataset: Marked) -> dict[str, Tensor]:
    return torch.utils.data.default_collate([dataset[index] for index in range(BATCH)])


def _traced(join: Join) -> TaskGraph:
    return analysed(Workload("w", [_task(join)], (Block,))).tasks["t"]


JOINED: dict[str, Join] = {
    "cat of a list": lambda x: torch.cat(list(x), dim=0),
    "cat of a tuple": lambda x: torch.cat(tuple(x)),
    "stack": lambda x: torch.stack(list(x)).flatten(0, 1),
    "loop": lambda x: torch.cat([row for row in x], 0),  # noqa: C416 - a loop is meant
}


@pytest.mark.parametrize("name", JOINED)
def test_a_batch_that_is_taken_apart_and_joined_is_split(name: str) -> None:
    task, graph = _task(JOINED[name]), _traced(JOINED[name])
    assert not any(op.coupled for op in graph.ops)
    assert_trains_as_plain(task, graph, _batch(task.dataset), [0, 1, BATCH])


NOT_JOINED: dict[str, Join] = {
    "another order": lambda x: torch.cat(list(x)[::-1]),
    "some are left out": lambda x: torch.cat(list(x)[1:] + list(x)[1:2]),
    "some come twice": lambda x: torch.cat([*x, *x])[: len(x) * PLACES],
    "side by side": lambda x: torch.cat(list(x), dim=1).view(-1, WIDTH),
    "each by itself": lambda x: torch.cat([row * 2 for row in x]),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_samples_that_are_worked_through_otherwise_are_run_whole(name: str) -> None:
    task, graph = _task(NOT_JOINED[name]), _traced(NOT_JOINED[name])
    assert [op.target for op in graph.ops if op.coupled] == ["words"]
    assert_trains_as_plain(task, graph, _batch(task.dataset), [0, 1, BATCH])


@pytest.mark.parametrize("shape", [(1,), (WIDTH,)])
def test_places_are_filled_as_masked_scatter_fills_them(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(3, 6, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(3, 6, *shape, dtype=torch.bool)
    for sample, (first, second) in enumerate([(0, 5), (2, 3), (4, 1)]):
        mask[sample, [first, second]] = True
    values = torch.randn(3 * 2, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    made, wanted = filled_by_sample(tensor, mask, values), tensor.masked_scatter(mask, values)
    assert torch.equal(made, wanted)
    weights = torch.randn(made.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), (tensor, values)) for each in (made, wanted))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("places", [(2, 1), (1, 3)])
def test_a_sample_with_other_places_than_values_ends_the_run(places: tuple[int, int]) -> None:
    mask = torch.zeros(2, 6, 1, dtype=torch.bool)
    for sample, count in enumerate(places):
        mask[sample, :count] = True
    with pytest.raises(RuntimeError, match="more or fewer places than values"):
        filled_by_sample(torch.zeros(2, 6, WIDTH), mask, torch.ones(2 * 2, WIDTH))


def test_values_that_are_not_rows_of_samples_are_no_fill_by_sample() -> None:
    class Whole(Net):
        def forward(self, x: Tensor, y: Tensor, marks: Tensor) -> Tensor:
            shown = self.pictures(torch.ones(BATCH * PLACES, WIDTH))
            return self.words(y.masked_scatter((marks > 0).unsqueeze(-1), shown) + x.mean()).mean()

    def task() -> Task:
        torch.manual_seed(0)
        return Task("t", Whole(lambda x: x), BATCH, Marked())

    graph = analysed(Workload("w", [task()], (Block,))).tasks["t"]
    assert [op.coupled for op in graph.ops if op.target == "words"] == [True]
    assert_trains_as_plain(task(), graph, _batch(Marked()), [0, 1, BATCH])
