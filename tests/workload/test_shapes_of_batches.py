"""Plans are for batches of one shape: others are refused when a workload is profiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.workload.data import shapes
from spindle_cli.workload.data.shapes import planned_shapes, require_one_shape
from spindle_cli.workload.settings.loader import LoaderSettings, TaskLoader
from spindle_cli.workload.training.batches import Batches, SampleShapes
from spindle_cli.workload.types import Task, Workload


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[..., None]).mean((1, 2)).mean()


def padded(items: list[Any]) -> dict[str, Tensor]:
    return {"x": nn.utils.rnn.pad_sequence([item["x"] for item in items], batch_first=True)}


def workload(lengths: list[int], batch_size: int = 2) -> Workload:
    items = [{"x": torch.ones(length)} for length in lengths]
    return Workload("w", [Task("t", Net(), batch_size, items, collate=padded)], operators=(Layer,))


def test_batches_of_one_length_pass() -> None:
    graph = analysed(workload([3, 3, 3, 3]))
    require_one_shape(graph, 0)
    assert planned_shapes(graph.tasks["t"]) == {"x": (3,)}


def test_one_longer_batch_is_refused_with_the_longest_that_was_seen() -> None:
    graph = analysed(workload([3, 3, 3, 3, 3, 5, 4, 3], 1))
    with pytest.raises(
        WorkloadError, match=r"'x' has other .* \(3,\), \(4,\), \(5,\) in the first 8 b"
    ) as error:
        require_one_shape(graph, 0)
    assert "The longest seen here is (5,)" in str(error.value.hint)


def test_batches_that_are_all_longer_than_the_samples_that_were_traced_are_refused() -> None:
    """The first two samples are traced; a whole batch always has a longer one."""
    graph = analysed(workload([2, 2, 4, 4], 4))
    with pytest.raises(WorkloadError, match=r"\(2,\), \(4,\) in the first"):
        require_one_shape(graph, 0)


@pytest.mark.parametrize("last", [3, 4])
def test_samples_of_a_large_batch_are_looked_at_some_at_a_time(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five samples of which one may be longer, each by itself: of no batch are all put together."""
    monkeypatch.setattr(shapes, "_AT_ONCE", 1)
    seen: list[int] = []
    rows = Batches.rows

    def counted(self: Batches, step: int, first: int, last: int) -> dict[str, Tensor]:
        seen.append(last - first)
        return rows(self, step, first, last)

    monkeypatch.setattr(Batches, "rows", counted)
    items = [{"x": torch.ones(length)} for length in (3, 3, 3, 3, last)]
    graph = analysed(Workload("w", [Task("t", Net(), 5, items)], operators=(Layer,)))
    if last == 3:
        require_one_shape(graph, 0)
    else:
        with pytest.raises(WorkloadError, match=r"\(3,\), \(4,\) in the first 8 b"):
            require_one_shape(graph, 0)
    assert seen == [1] * 5 * 8


def test_a_dataset_of_less_than_a_batch_can_be_planned_for() -> None:
    require_one_shape(analysed(workload([3, 3], 4)), 0)


def test_training_keeps_to_the_shapes_that_were_profiled() -> None:
    task = workload([3, 3, 3, 3]).tasks[0]
    Batches(task, 0, {"x": (3,)}).rows(0, 0, 2)
    with pytest.raises(WorkloadError, match=r"other shapes from batch to batch: \(4,\) and \(3,\)"):
        Batches(task, 0, {"x": (4,)}).rows(0, 0, 2)


def test_the_first_shape_of_a_field_is_that_of_all_later_ones() -> None:
    shapes = SampleShapes("t", {"x": (2,)})
    shapes.require({"x": (2,), "y": ()})
    shapes.require({"y": ()})
    with pytest.raises(WorkloadError, match=r"field 'y' .* \(\) and \(1,\)"):
        shapes.require({"x": (2,), "y": (1,)})


def test_a_task_s_own_settings_go_before_the_others() -> None:
    settings = LoaderSettings(
        workers=2, prefetch=3, tasks={"a": TaskLoader(workers=0), "b": TaskLoader(prefetch=1)}
    )
    found = {name: (settings.of(name).workers, settings.of(name).prefetch) for name in "abc"}
    assert found == {"a": (0, 3), "b": (2, 1), "c": (2, 3)}


def test_settings_of_a_task_that_is_not_there_are_refused() -> None:
    settings = LoaderSettings(tasks={"a": TaskLoader(workers=1)})
    settings.require_known(["a", "b"], "w.yaml")
    with pytest.raises(InputError, match=r"w.yaml: train.loader.tasks has 'a'"):
        settings.require_known(["b"], "w.yaml")
