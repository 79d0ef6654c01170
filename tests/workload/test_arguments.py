"""How what a dataset gives becomes the arguments of forward, in other people's ways."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.training.data.reading import first_samples, open_batches
from spindle_cli.workload.arguments import arguments_of, call_forward
from spindle_cli.workload.types import Task, Workload

WIDTH, CLASSES = 6, 3
X = torch.arange(8.0 * WIDTH).reshape(8, WIDTH)
Item = namedtuple("Item", "y x")  # as people write it, in another order than forward's


class Given(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Streamed(IterableDataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(8))


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    names: list[str]
    mask: Tensor | None = None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(WIDTH, CLASSES)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.layers(x)), y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y)


class OfBatches(Net):
    def forward(self, batch: Any, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return scale * self.loss(batch["x"], batch["y"])


class OfObjects(Net):
    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        assert isinstance(batch, Batch) and batch.mask is None
        return self.loss(batch.x, batch.y)


class OfPairs(Net):
    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        x, y = batch
        return self.loss(x, y)


class OfTargets(Net):
    def forward(self, x: Tensor, target: dict[str, Any]) -> Tensor:  # type: ignore[override]
        first, second = target["shifts"]
        return self.loss(x + first[:, None] + second, target["y"])


class OfMany(Net):
    def forward(self, *batch: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(*batch)


class OfMore(Net):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.loss(x, y) if mask is None else self.loss(x * mask, y)


def as_batch(items: list[tuple[Tensor, int]]) -> Batch:
    return Batch(torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items]), ["a"] * len(items))


def as_user_dict(items: list[tuple[Tensor, int]]) -> UserDict[str, Any]:
    batch = as_batch(items)
    return UserDict(x=batch.x, y=batch.y, names=batch.names)


def as_tuple(items: list[tuple[Tensor, int]]) -> tuple[Tensor, ...]:
    return as_batch(items).x, as_batch(items).y


def without_mask(items: list[tuple[Tensor, int]]) -> dict[str, Any]:
    return {"x": as_batch(items).x, "y": as_batch(items).y, "mask": None}


def pair(index: int) -> tuple[Tensor, int]:
    return X[index], index % CLASSES


TAKEN: dict[str, tuple[type[Net], Callable[[int], Any], Any, set[str], tuple[str, ...]]] = {
    "tuple": (Net, pair, None, {"x", "y"}, ()),
    "list": (Net, lambda i: list(pair(i)), None, {"x", "y"}, ()),
    "numpy": (Net, lambda i: (X[i].numpy(), np.int64(i % CLASSES)), None, {"x", "y"}, ()),
    "text behind": (Net, lambda i: (*pair(i), f"{i}.jpg"), None, {"x", "y"}, ("entry 2",)),
    "text between": (Net, lambda i: (X[i], f"{i}.jpg", i % CLASSES), None, {"x", "y"}, ("entry 1",)),
    "object": (Net, lambda i: (*pair(i), Path(f"{i}.jpg")), None, {"x", "y"}, ("entry 2",)),
    "named tuple": (Net, lambda i: Item(i % CLASSES, X[i]), None, {"x", "y"}, ()),
    "text by name": (Net, lambda i: {"x": X[i], "y": i % 3, "id": f"{i}"}, None, {"x", "y"}, ("id",)),
    "texts in a dict": (Net, lambda i: {"x": X[i], "y": i % 3, "m": {"a": "b"}}, None, {"x", "y"}, ("m",)),
    "none": (Net, lambda i: {"x": X[i], "y": i % 3, "more": None}, None, {"x", "y"}, ("more",)),
    "whole": (
        OfBatches,
        lambda i: {"x": X[i], "y": i % CLASSES, "id": "a"},
        None,
        {"batch_x", "batch_y"},
        ("batch_id",),
    ),
    "pair": (OfPairs, pair, None, {"batch_0", "batch_1"}, ()),
    "nested": (
        OfTargets,
        lambda i: (X[i], {"y": i % CLASSES, "shifts": (torch.tensor(0.1), X[i]), "file": "a"}),
        None,
        {"x", "target_y", "target_shifts_0", "target_shifts_1"},
        ("target_file",),
    ),
    "any number": (OfMany, pair, None, {"batch_0", "batch_1"}, ()),
    "optional": (OfMore, pair, None, {"x", "y"}, ()),
    "dataclass": (OfObjects, pair, as_batch, {"batch_x", "batch_y"}, ("batch_names",)),
    "dataclass by name": (OfMore, pair, as_batch, {"x", "y"}, ("names",)),
    "mapping": (Net, pair, as_user_dict, {"x", "y"}, ("names",)),
    "whole mapping": (OfBatches, pair, as_user_dict, {"batch_x", "batch_y"}, ("batch_names",)),
    "collated tuple": (Net, pair, as_tuple, {"x", "y"}, ()),
    "collated none": (OfMore, pair, without_mask, {"x", "y"}, ()),
}


@pytest.mark.parametrize("kind", [Given, Streamed], ids=["by index", "stream"])
@pytest.mark.parametrize("name", TAKEN)
def test_what_people_give_reaches_forward_as_in_plain_pytorch(name: str, kind: Any) -> None:
    module, make, collate, fields, left_out = TAKEN[name]
    net = module()
    task = Task("t", net, 4, kind(make), collate=collate)
    graph = analysed(Workload("w", [task], (Layer,)))
    assert set(graph.tasks["t"].fields) == fields
    assert graph.tasks["t"].left_out_of_items == left_out
    assert [note for note in graph.notes if "left out" in note][:1] == [
        f"task 't': {', '.join(map(repr, left_out))} of the dataset's items: no tensors, and forward does "
        "not take them, so they are left out"
    ][: len(left_out)]
    batch = open_batches(task, 0).rows(0, 0, 4)
    numbers = Batches(task, 0).indices(0) if kind is Given else list(range(4))
    x, y = X[numbers], torch.tensor(numbers) % CLASSES
    expected = net.loss(x + 0.1 + x if name == "nested" else x, y)
    assert torch.allclose(call_forward(task, batch).to(expected.dtype), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["tuple", "nested", "whole", "text by name"])
def test_rows_and_fields_of_them_are_those_of_the_whole_batch(name: str) -> None:
    module, make, collate, fields, _ = TAKEN[name]
    batches = Batches(Task("t", module(), 4, Given(make), collate=collate), 0)
    whole = batches.rows(1, 0, 4)
    for field in fields:
        assert torch.equal(batches.rows(1, 1, 3, [field])[field], whole[field][1:3])
        assert batches.rows(1, 1, 3, [field]).keys() == {field}


class Reads(Net):
    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self.loss(batch["x"], batch["y"]) * len(batch["name"])


class TakesText(Net):
    def forward(self, x: Tensor, y: Tensor, name: Any) -> Tensor:  # type: ignore[override]
        return self.loss(x, y)


class ByText(Net):
    def forward(self, x: Tensor, y: Tensor, mode: str = "train") -> Tensor:
        return self.loss(x, y)


class OfFlags(Net):
    def forward(self, x: Tensor, flag: bool = False, y: Tensor | None = None) -> Tensor:  # type: ignore[override]
        assert y is not None
        return self.loss(x, y)


class InBetween(Net):
    def forward(self, x: Tensor, name: Any = None, y: Any = None) -> Tensor:  # type: ignore[override]
        return self.loss(x, y)


@pytest.mark.parametrize(
    ("module", "make", "collate", "said"),
    [
        (Net, lambda i: (X[i], i, i), None, r"a list of 3 \(tensor, tensor, tensor\), .* takes 'x', 'y'"),
        (Net, lambda i: (X[i],), None, "a list of 1"),
        (InBetween, lambda i: (X[i], "a", i % 3), None, r"\(tensor, text, tensor\), .* cannot be told"),
        (ByText, lambda i: (X[i], i % 3, "a"), None, r"\(tensor, tensor, text\)"),
        (OfFlags, pair, None, r"takes 'x', 'flag', 'y'"),
        (Net, lambda i: {"x": X[i], "y": i, "i": i}, None, "forward does not take 'i'"),
        (TakesText, lambda i: {"x": X[i], "y": i, "name": "a"}, None, "takes 'name', .* a str and no tensor"),
        (TakesText, lambda i: {"x": X[i], "y": i, "name": None}, None, "takes 'name', which is None in the"),
        (TakesText, lambda i: (X[i], i, "a"), None, r"\(tensor, tensor, text\)"),
        (Reads, lambda i: {"x": X[i], "y": i % 3, "name": "a"}, None, "forward uses 'batch_name'"),
        (Net, pair, lambda items: tuple(zip(*items, strict=True)), "list with an entry for each sample"),
        (OfBatches, pair, lambda items: items, "list with an entry for each sample"),
        (Net, pair, lambda items: items[0][0], "a batch is a Tensor"),
    ],
)
def test_what_cannot_be_told_is_refused_with_a_way_out(
    module: type[Net], make: Any, collate: Any, said: str
) -> None:
    with pytest.raises(WorkloadError, match=said) as raised:
        analysed(Workload("w", [Task("t", module(), 4, Given(make), collate=collate)], (Layer,)))
    assert raised.value.hint


def test_a_tensor_dataset_is_taken_by_order() -> None:
    task = Task("t", Net(), 4, TensorDataset(X, torch.arange(8) % CLASSES))
    assert first_samples(task, 2).keys() == {"x", "y"}


def test_another_form_in_a_later_batch_is_refused() -> None:
    def collate(items: list[tuple[Tensor, int]]) -> dict[str, Any]:
        made = without_mask(items)
        if any(y == 2 for _, y in items):
            made["mask"] = torch.ones(len(items), WIDTH)
        return made

    task = Task("t", OfMore(), 2, Given(pair), collate=collate)
    batches = Batches(task, 0)
    with pytest.raises(WorkloadError, match=r"other parts .* mask: (None|tensor), and .* mask: "):
        for step in range(8):
            batches.rows(step, 0, 2)


def test_names_that_would_be_the_same_are_told_apart() -> None:
    class Both(Net):
        def forward(self, x: Tensor, y: Tensor, x_a: Tensor) -> Tensor:  # type: ignore[override]
            return self.loss(x["a"] + x_a, y)  # type: ignore[index]

    items = Given(lambda i: {"x": {"a": X[i], "a ": X[i]}, "x_a": 2 * X[i], "y": i % CLASSES})
    task = Task("t", Both(), 4, items)
    batch = first_samples(task, 4)
    assert set(batch) == {"x_a", "x_a_", "x_a__", "y"}
    expected = task.module.loss(3 * X[:4], torch.arange(4) % CLASSES)
    assert torch.allclose(call_forward(task, batch), expected)
    assert str(arguments_of(task)) == "x: dict(a: tensor, a : tensor), x_a: tensor, y: tensor"
