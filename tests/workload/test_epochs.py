"""Data with `set_epoch`: the epoch that they are told before their items are read, whoever reads them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, default_collate

from helpers.anything import Anything
from helpers.feeds import feed_of
from spindle_cli.analysis.evaluation import InOrder, StreamInOrder
from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.step.counting import Portion
from spindle_cli.training import items
from spindle_cli.training.batches import Batches
from spindle_cli.training.data.reading import StreamBatches, find_lengths, require_epochs
from spindle_cli.training.data.streams import look_at
from spindle_cli.training.items import DrawsError, told_of
from spindle_cli.workload.settings.types import Looking
from spindle_cli.workload.types import Task, Workload

SEED = 3


class Curriculum(Dataset[dict[str, Tensor]]):
    """Items that say of which epoch they are; `told`: all epochs, in order."""

    def __init__(self, count: int = 9) -> None:
        self.count = count
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"i": torch.tensor(index), "epoch": torch.tensor(self.epoch)}


class Wrapped(Dataset[dict[str, Tensor]]):
    """As people write one: it knows of no epochs."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        return self.base[index]


def task_of(dataset: Any, batch_size: int = 4, name: str = "t", **rest: Any) -> Task:
    return Task(name, Anything(), batch_size, dataset, **rest)


def epoch_of(batch: dict[str, Tensor]) -> int:
    (epoch,) = set(batch["epoch"].tolist())
    return int(epoch)


def test_every_step_reads_its_own_epoch() -> None:
    dataset = Curriculum()
    batches = Batches(task_of(dataset), SEED)  # 9 samples: 2 steps an epoch, and one sample left out
    dataset.told.clear()
    found = [batches.rows(step, 0, 4) for step in range(6)]
    assert [epoch_of(batch) for batch in found] == [0, 0, 1, 1, 2, 2]
    assert [batch["i"].tolist() for batch in found] == [batches.indices(step) for step in range(6)]
    assert dataset.told == [1, 2]  # once each; the first it was told to be counted


def test_a_run_that_goes_on_tells_its_own_epoch() -> None:
    dataset = Curriculum()
    batches = Batches(task_of(dataset), SEED)
    assert epoch_of(batches.rows(5, 1, 3)) == 2
    assert dataset.told == [0, 2]


def test_readers_of_one_dataset_read_epochs_of_their_own() -> None:
    """Tasks whose epochs have other lengths, an evaluation, and what was looked at."""
    dataset = Curriculum(8)
    short = Batches(task_of(dataset, 4, "short"), SEED)
    long = Batches(task_of(dataset, 2, "long"), SEED)
    evaluated = InOrder(task_of(dataset, 8), SEED)
    for step in range(8):
        assert epoch_of(short.rows(step, 0, 4)) == step // 2
        assert epoch_of(long.rows(step, 0, 2)) == step // 4
        assert epoch_of(evaluated.rows(0, 0, 8)) == 0
    first = look_at(task_of(dataset))
    long.rows(9, 0, 2)
    assert look_at(task_of(dataset)) == first


@pytest.mark.parametrize(
    "wrap",
    [
        lambda base: Subset(base, range(len(base))),
        lambda base: ConcatDataset([Curriculum(1), base]),
        lambda base: StackDataset(base, base),
        lambda base: StackDataset(a=base),
        Wrapped,
        lambda base: Wrapped(Subset(Wrapped(ConcatDataset([base])), range(len(base)))),
    ],
    ids=["subset", "concat", "stack", "stack by name", "own", "several"],
)
def test_what_datasets_hold_is_told(wrap: Any) -> None:
    base = Curriculum()
    wrapped = wrap(base)
    assert sum(each is base for each in told_of(task_of(wrapped))) == 1
    batches = Batches(task_of(wrapped, collate=lambda items: {"n": torch.zeros(len(items))}), SEED)
    for step in (0, batches.steps_per_epoch):
        batches.rows(step, 0, 4)
    assert base.told == [0, 1]


def test_a_dataset_with_set_epoch_hands_it_on_itself() -> None:
    class Own(Wrapped):
        def set_epoch(self, epoch: int) -> None:
            self.base.set_epoch(10 * epoch)

    base = Curriculum()
    batches = Batches(task_of(Own(base)), SEED)
    assert [epoch_of(batches.rows(step, 0, 4)) for step in (0, 2)] == [0, 10]


def test_what_has_a_set_epoch_and_is_no_dataset_is_told() -> None:
    class Crop:
        def set_epoch(self, epoch: int) -> None:
            self.size = epoch

    class Anything:  # has an attribute of every name
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    crop, wrapped = Crop(), Wrapped([{"i": 0}] * 9)
    wrapped.crop, wrapped.other = crop, Anything()  # type: ignore[attr-defined]
    assert told_of(task_of(wrapped)) == (crop,)
    assert told_of(task_of([{"i": 0}] * 9)) == ()


def test_a_collate_with_set_epoch_is_told() -> None:
    class Masking:
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
            return {**default_collate(items), "epoch": torch.full((len(items),), self.epoch)}

        def collate(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
            return self(items)

    items = [{"i": index} for index in range(9)]
    made = Masking()
    for collate in (made, made.collate):
        batches = Batches(task_of(items, collate=collate), SEED)
        assert [epoch_of(batches.rows(step, 1, 3)) for step in (0, 3, 4, 1)] == [0, 1, 2, 0]
        assert epoch_of(InOrder(task_of(items, collate=collate), SEED).rows(1, 0, 4)) == 0


class Drawing(Curriculum):
    """Negatives that are drawn anew in each epoch, from one of the process's generators."""

    def __init__(self, draw: Any) -> None:
        super().__init__(8)
        self.draw = draw

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.negatives = self.draw()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "negative": torch.as_tensor(self.negatives[index])}


DRAWS = [lambda: torch.rand(8), lambda: np.random.rand(8)]


@pytest.mark.parametrize("draw", DRAWS, ids=["torch", "numpy"])
def test_what_set_epoch_draws_follows_from_the_seed_and_the_epoch(draw: Any) -> None:
    dataset = Drawing(draw)
    one = Batches(task_of(dataset, name="one"), SEED)
    expected = [one.rows(step, 0, 4)["negative"] for step in range(6)]
    assert one.draws
    assert len({float(each[0]) for each in expected}) == 6
    torch.rand(1), np.random.rand(1)
    for begin in (5, 2, 0):  # alone, and by another task, in other turns
        other = Batches(task_of(Drawing(draw), name="one"), SEED)
        for step in range(begin, 6):
            assert torch.equal(other.rows(step, 0, 4)["negative"], expected[step])
    elsewhere = Batches(task_of(dataset, name="other"), SEED + 1)
    assert not torch.equal(elsewhere.rows(4, 0, 4)["negative"].sort()[0], expected[4].sort()[0])
    assert torch.equal(one.rows(4, 0, 4)["negative"], expected[4])


@pytest.mark.parametrize("draw", DRAWS, ids=["torch", "numpy"])
def test_a_thread_leaves_a_set_epoch_that_draws_to_the_main_thread(draw: Any) -> None:
    batches = Batches(task_of(Drawing(draw)), SEED)
    expected = batches.rows(2, 0, 4)["negative"]
    other = Batches(task_of(Drawing(draw)), SEED)
    with pytest.raises(DrawsError):
        other.rows_without_draws(2, 0, 4)
    assert torch.equal(other.rows(2, 0, 4)["negative"], expected)


class Noisy(Curriculum):
    """Every third item draws: the main thread reads some batches and another one the others."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.rand(()) if index % 3 == 0 else torch.tensor(0.5)
        return {**super().__getitem__(index), "noise": noise}


@pytest.mark.parametrize("kind", [Curriculum, Noisy])
def test_a_thread_that_reads_ahead_into_the_next_epoch_changes_nothing(kind: type[Curriculum]) -> None:
    dataset = kind(8)
    tasks = [task_of(dataset, 4, "short"), task_of(dataset, 2, "long"), task_of(Noisy(8), 2, "noisy")]
    sources = {task.name: Batches(task, SEED) for task in tasks}
    portions = [Portion(task.name, (0, task.batch_size), ("i", "epoch")) for task in tasks]
    feed = feed_of(sources, portions, range(24))
    alone = {task.name: Batches(task_of(kind(8), task.batch_size, task.name), SEED) for task in tasks}
    for step in range(24):
        taken = feed.take()
        for task in tasks:
            batch = taken.fields(task.name, (0, task.batch_size), ("i", "epoch"))
            assert epoch_of(batch) == step // (8 // task.batch_size)
            assert batch["i"].tolist() == alone[task.name].indices(step)
    feed.close()


def test_a_dataset_that_is_gone_is_forgotten() -> None:
    gc.collect()
    before = len(items._last_told)
    batches = Batches(task_of(Curriculum()), SEED)
    assert len(items._last_told) == before + 1
    del batches
    gc.collect()
    assert len(items._last_told) == before


def test_one_that_cannot_be_remembered_is_told_each_time() -> None:
    class Slots:
        __slots__ = ("epoch", "told")

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"epoch": torch.tensor(self.epoch)}

    batches = Batches(task_of(Slots()), SEED)
    assert [epoch_of(batches.rows(step, 0, 4)) for step in range(4)] == [0, 0, 1, 1]


class Growing(Curriculum):
    """More samples in each epoch from `since` on."""

    def __init__(self, since: int) -> None:
        super().__init__(8)
        self.since = since

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.count = 8 + max(0, epoch - self.since + 1)


def test_another_length_in_a_later_epoch_is_refused() -> None:
    with pytest.raises(
        WorkloadError, match=r"has 9 samples after set_epoch\(1\), and 8 after set_epoch\(0\)"
    ):
        require_epochs(task_of(Growing(1)), 2)
    late = task_of(Growing(3))
    require_epochs(late, 2)
    batches = Batches(late, SEED)
    batches.rows(5, 0, 4)
    with pytest.raises(WorkloadError, match=r"has 9 samples after set_epoch\(3\)") as raised:
        batches.rows(6, 0, 4)
    assert raised.value.hint is not None and "IterableDataset" in raised.value.hint


def test_the_way_out_is_a_stream_whose_passes_have_other_lengths() -> None:
    class GrowingStream(IterableDataset[dict[str, Tensor]]):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return ({"epoch": torch.tensor(self.epoch)} for _ in range(4 + 4 * self.epoch))

    batches = StreamBatches(task_of(GrowingStream()), SEED)
    assert [epoch_of(batches.rows(step, 0, 4)) for step in range(6)] == [0, 1, 1, 2, 2, 2]


def test_a_set_epoch_that_adds_to_what_it_was_told_before_is_refused() -> None:
    class Harder(Curriculum):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch += 1

    with pytest.raises(WorkloadError, match=r"after set_epoch\(1\) and then set_epoch\(0\) .* are others"):
        find_lengths(Workload("w", [task_of(Harder())]), SEED, Looking())
    require_epochs(task_of(Curriculum()), 2)


def test_a_set_epoch_that_raises_is_named() -> None:
    class Failing(Curriculum):
        def set_epoch(self, epoch: int) -> None:
            if epoch == 1:
                raise ValueError("no such epoch")
            super().set_epoch(epoch)

    with pytest.raises(WorkloadError, match=r"test_epochs.py:\d+: .* its second epoch: ValueError: no such"):
        require_epochs(task_of(Failing()), 2)
    batches = Batches(task_of(Failing()), SEED)
    with pytest.raises(ValueError, match="no such epoch") as raised:
        batches.rows(2, 0, 4)
    assert raised.value.__notes__ == ["in set_epoch(1) of Failing"]


def test_lengths_of_later_epochs_are_found() -> None:
    class Larger(Curriculum):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": torch.zeros(2 + self.epoch)}

    found = find_lengths(Workload("w", [task_of(Larger(8))]), SEED, Looking(batches=6))["t"]
    assert found.fields["x"].shortest == (2,) and found.fields["x"].longest == (4,)


def test_a_stream_that_wraps_another_is_told_before_each_pass() -> None:
    class Base(IterableDataset[dict[str, Tensor]]):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return ({"epoch": torch.tensor(self.epoch)} for _ in range(9))

    class Mapped(IterableDataset[dict[str, Tensor]]):
        def __init__(self, base: Base) -> None:
            self.base = base

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter(self.base)

    task = task_of(Mapped(Base()))
    batches = StreamBatches(task, SEED)
    assert [epoch_of(batches.rows(step, 0, 4)) for step in range(5)] == [0, 0, 1, 1, 2]
    evaluated = StreamInOrder(task, SEED)
    for _ in range(2):
        found = [epoch_of(dict(each.rows(0, each.size, ("epoch",)))) for each in evaluated.batches()]
        assert found == [0, 0, 0]
    assert epoch_of(batches.rows(5, 0, 4)) == 2
