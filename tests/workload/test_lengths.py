"""Which lengths batches have: looked for when a workload is profiled, kept to when it is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.training.batches import Batches, SampleShapes
from spindle_cli.training.data import reading
from spindle_cli.training.data.reading import at_shapes, find_lengths, known_shapes
from spindle_cli.workload.settings.types import FieldLengths, LoaderSettings, Looking, TaskLengths, TaskLoader
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


def lengths_of(sizes: list[int], batch_size: int = 1, **looking: Any) -> dict[str, TaskLengths]:
    return find_lengths(workload(sizes, batch_size), 0, Looking(**looking))


def test_batches_of_one_length_have_none_to_tell() -> None:
    assert lengths_of([3, 3, 3, 3], 2) == {}


@pytest.mark.parametrize("error", [KeyError, OSError, IndexError])
def test_a_sample_that_cannot_be_read_is_named(error: type[Exception]) -> None:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 5:
                raise error("gone")
            return super().__getitem__(index)

    task = Task("t", Net(), 2, Broken([{"x": torch.ones(1)}] * 6))
    with pytest.raises(WorkloadError, match=r"test_lengths\.py:\d+: task 't': the dataset fails") as caught:
        find_lengths(Workload("w", [task], operators=(Layer,)), 0, Looking())
    assert f"at sample 5 of the dataset: {error.__name__}: " in caught.value.message


def test_a_field_that_only_some_batches_have_is_refused() -> None:
    def collate(items: list[Any]) -> dict[str, Tensor]:
        batch = padded(items)
        return batch if batch["x"].max() < 3 else {**batch, "z": torch.ones(len(items))}

    items = [{"x": torch.full((1,), float(number))} for number in range(4)]
    task = Task("t", Net(), 1, items, collate=collate)
    with pytest.raises(
        WorkloadError, match=r"task 't': batches have other parts .*: x: tensor, and x: tensor, z: t"
    ):
        find_lengths(Workload("w", [task], operators=(Layer,)), 0, Looking())


def test_the_longest_batch_is_planned_for_and_the_shortest_is_known() -> None:
    found = lengths_of([3, 3, 6, 3, 3, 5, 4, 3])["t"]
    assert (found.batches, found.planned, found.shortest) == (8, {"x": (6,)}, {"x": (3,)})
    assert found.line("t") == (
        "t: planned for lengths of 6 (x), the longest of 8 batches; others run as they are"
    )


@pytest.mark.parametrize(("percentile", "length"), [(1, 1), (25, 1), (26, 2), (75, 3), (76, 9), (100, 9)])
def test_a_percentile_is_that_of_the_nearest_rank(percentile: float, length: int) -> None:
    found = lengths_of([1, 2, 3, 9], percentile=percentile)["t"]
    assert found.planned == {"x": (length,)}
    assert found.fields["x"].longest == (9,)
    assert ("the longest" in found.line("t")) == (percentile == 100)


def test_no_more_batches_are_looked_at_than_asked_for() -> None:
    assert lengths_of([1, 2, 3, 9], batches=1) == {}
    assert lengths_of([1, 2, 3, 9], batches=3)["t"].batches == 3


def test_batches_that_are_all_longer_than_the_first_samples_are_planned_for() -> None:
    """Two samples are traced, unless it is known that batches are longer."""
    assert lengths_of([2, 2, 4, 4], 4)["t"].planned == {"x": (4,)}


@pytest.mark.parametrize("last", [3, 4])
def test_samples_of_a_large_batch_are_looked_at_some_at_a_time(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five samples of which one may be longer, each by itself: of no batch are all put together."""
    monkeypatch.setattr(reading, "_AT_ONCE", 1)
    seen: list[int] = []
    rows = Batches.rows

    def counted(self: Batches, step: int, first: int, last: int) -> dict[str, Tensor]:
        seen.append(last - first)
        return rows(self, step, first, last)

    monkeypatch.setattr(Batches, "rows", counted)
    items = [{"x": torch.ones(length)} for length in (3, 3, 3, 3, last)]
    made = Workload("w", [Task("t", Net(), 5, items)], operators=(Layer,))
    if last == 3:
        assert find_lengths(made, 0, Looking()) == {}
        assert seen == [1] * 5
    else:
        with pytest.raises(WorkloadError, match=r"several shapes in one batch: \(\d,\) and \(\d,\)"):
            find_lengths(made, 0, Looking())


def test_a_dataset_of_less_than_a_batch_can_be_planned_for() -> None:
    assert lengths_of([3, 3], 4) == {}


def test_other_numbers_of_dimensions_are_refused() -> None:
    items = [{"x": torch.ones(2)} for _ in range(4)]

    def grows(some: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.ones((len(some), 2) if len(some) == 2 else (len(some), 2, 1))}

    task = Task("t", Net(), 1, items, collate=grows)
    with pytest.raises(WorkloadError, match=r"field 'x' has other numbers of dimensions"):
        find_lengths(Workload("w", [task], operators=(Layer,)), 0, Looking())


def test_a_field_s_planned_sizes_are_within_what_was_seen() -> None:
    FieldLengths(planned=(2, 3), shortest=(2, 3), longest=(2, 4))
    for planned, shortest, longest in (((5,), (2,), (4,)), ((2,), (2,), (2,)), ((2, 1), (2,), (4,))):
        with pytest.raises(ValidationError):
            FieldLengths(planned=planned, shortest=shortest, longest=longest)


def test_the_fingerprint_is_of_the_planned_length() -> None:
    made = workload([3, 3, 5, 3])
    found = find_lengths(made, 0, Looking())
    assert analysed(made, found).tasks["t"].fields["x"].shape == (2, 5)
    assert analysed(made, found).fingerprint != analysed(made).fingerprint
    assert known_shapes(analysed(made, found).tasks["t"]) == {"x": (None,)}
    assert known_shapes(analysed(made).tasks["t"]) == {"x": (3,)}


def test_a_batch_is_cut_or_filled_up_to_a_shape() -> None:
    batch = {"x": torch.ones(2, 3, 2), "y": torch.ones(2)}
    found = at_shapes(batch, {"x": (2, 3)})
    assert found["x"].tolist() == [[[1, 1, 0], [1, 1, 0]]] * 2
    assert found["y"] is batch["y"]


def test_training_keeps_to_the_shapes_that_were_profiled() -> None:
    task = workload([3, 3, 3, 3]).tasks[0]
    Batches(task, 0, {"x": (3,)}).rows(0, 0, 2)
    with pytest.raises(WorkloadError, match=r"other shapes from batch to batch: \(4,\) and \(3,\)"):
        Batches(task, 0, {"x": (4,)}).rows(0, 0, 2)
    with pytest.raises(WorkloadError, match=r"other shapes from batch to batch: \(any, 2\) and \(3,\)"):
        Batches(task, 0, {"x": (None, 2)}).rows(0, 0, 2)


def test_whoever_takes_a_share_has_the_longest_of_the_whole_batch() -> None:
    """Also where the first batch's shares are padded alike, which says nothing of later ones."""
    task = workload([3, 3, 3, 3, 1, 1, 1, 5], 4).tasks[0]
    own = [Batches(task, 0, {"x": (None,)}) for _ in range(2)]
    for step in range(4):
        shares = [batches.rows(step, 2 * k, 2 * k + 2)["x"] for k, batches in enumerate(own)]
        whole = Batches(task, 0, one_shape=False).rows(step, 0, 4)["x"]
        assert torch.equal(torch.cat(shares), whole)
        assert own[0].shapes(step) == own[1].shapes(step) == {"x": tuple(whole.shape[1:])}


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
