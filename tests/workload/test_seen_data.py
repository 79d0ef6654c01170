"""A dataset that has changed since is noticed by its length and by a few samples' values."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spindle_cli.errors import WorkloadError
from spindle_cli.files.request import SeenData
from spindle_cli.training.data.streams import UNREADABLE, changes, digest_of, from_json, look_at, to_json
from spindle_cli.workload.types import Task


class Data:
    """`count` samples, each what `item` gives for its number."""

    def __init__(self, count: int, item: Callable[[int], Any]) -> None:
        self.count, self.item = count, item

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def seen(
    count: int, item: Callable[[int], Any] = lambda index: {"x": torch.tensor([index, 2.0])}
) -> SeenData:
    return look_at(Task("a", nn.Identity(), 2, Data(count, item)))


def test_a_state_comes_back_from_json_as_it_was() -> None:
    state = {
        "place": (3, [b"seen", None], {"inner": (True,)}),
        "by shard": {0: 1.5, "spindle:tuple": "a key like a tag"},
        "order": torch.arange(6).reshape(2, 3),
        "drawn": np.array([0.5, 2.0], dtype=np.float32),
    }
    back = from_json(json.loads(json.dumps(to_json(state, "a"))))
    assert back["place"] == state["place"] and back["by shard"] == state["by shard"]
    assert torch.equal(back["order"], torch.arange(6).reshape(2, 3))
    assert back["drawn"].dtype == np.float32 and back["drawn"].tolist() == [0.5, 2.0]


def test_a_state_with_something_else_is_refused_by_its_type() -> None:
    with pytest.raises(WorkloadError, match="task 'a': its dataset's state_dict\\(\\) has a set"):
        to_json({"seen": [{1, 2}]}, "a")


def test_the_first_the_last_and_two_between_are_looked_at() -> None:
    assert (seen(10).num_samples, list(seen(10).samples)) == (10, [0, 3, 6, 9])
    assert list(seen(2).samples) == [0, 1]
    assert list(seen(1).samples) == [0]
    assert seen(0) == SeenData(num_samples=0)


def test_another_length_and_another_value_are_told() -> None:
    before = seen(10)
    assert changes(before, seen(10)) == ()
    assert changes(before, seen(9)) == ("it had 10 samples, and has 9 now",)
    assert changes(before, seen(1234)) == ("it had 10 samples, and has 1,234 now",)
    other = seen(10, lambda index: {"x": torch.tensor([index, 2.0 + (index == 6) * 1e-6])})
    assert changes(before, other) == ("sample 6 is another than it was",)
    unseen = seen(10, lambda index: {"x": torch.tensor([index, 2.0 + (index == 5)])})
    assert changes(before, unseen) == ()


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(3), lambda: np.random.rand(3), lambda: random.random()],
    ids=["torch", "np", "py"],
)
def test_what_a_sample_draws_is_the_same_each_time_and_leaves_the_generators_alone(draw) -> None:
    torch.manual_seed(1)
    states = torch.get_rng_state(), random.getstate()
    first = seen(10, lambda index: {"x": draw()})
    torch.manual_seed(2)
    assert seen(10, lambda index: {"x": draw()}) == first
    assert len(set(first.samples.values())) == 4
    torch.manual_seed(1)
    seen(10, lambda index: {"x": draw()})
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_sample_that_cannot_be_read_is_not_the_end_here() -> None:
    def item(index: int) -> Any:
        if index == 9:
            raise OSError("the disk is gone")
        return {"x": torch.tensor(index)}

    before = seen(10, lambda index: {"x": torch.tensor(index)})
    now = seen(10, item)
    assert now.samples[9] == UNREADABLE
    assert changes(before, now) == ("sample 9 is another than it was",)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([1, 3])},
        {"x": torch.tensor([1.0, 2.0])},
        {"x": torch.tensor([[1, 2]])},
        {"y": torch.tensor([1, 2])},
        {"x": torch.tensor([1, 2]), "y": 0},
        {"x": np.array([1, 2])},
        {"x": [1, 2]},
        {"x": "1, 2"},
        [torch.tensor([1, 2])],
        None,
    ],
    ids=repr,
)
def test_any_other_value_has_another_digest(other: Any) -> None:
    assert digest_of({"x": torch.tensor([1, 2])}) == digest_of({"x": torch.tensor([1, 2])})
    assert digest_of(other) != digest_of({"x": torch.tensor([1, 2])})


def test_texts_and_numbers_of_every_kind_have_digests() -> None:
    items = ["a", b"a", 1, 1.0, True, 1j, np.float32(1), np.array([1]), torch.tensor(1), ("a",), "\ud800"]
    assert len({digest_of(item) for item in items}) == len(items)
    assert digest_of(torch.randn(4, 6).t()[:, ::2]) != digest_of(torch.zeros(6, 2))
    assert digest_of(torch.empty(0, 3)) != digest_of(torch.empty(3, 0))
    assert digest_of(torch.ones(3, device="meta")) == digest_of(torch.ones(3, device="meta"))
    assert digest_of(np.array([None, {}], dtype=object)) == digest_of(np.array([None, {}], dtype=object))


def test_of_other_types_the_type_is_known() -> None:
    task = Task("a", nn.Identity(), 2, None)
    assert digest_of(task) == digest_of(replace(task, name="b")) != digest_of(nn.Identity())
