"""What a dataset draws follows from the seed, the task, the epoch and the sample, whoever reads it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from helpers.anything import Anything
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.training.data.reading import first_samples
from spindle_cli.training.items import DrawsError, Generators, SeededCalls, generators_kept, no_draws
from spindle_cli.workload.types import Task

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": np.random.rand,
    "python": random.random,
    "in place": lambda: float(torch.empty(1).normal_()),
    "dropout": lambda: float(nn.functional.dropout(torch.ones(64), 0.5).sum()),
    "permutation": lambda: float(torch.randperm(1000)[0]),
    "integers": lambda: float(torch.randint(10**6, ())),
    "like": lambda: float(torch.rand_like(torch.ones(1))),
    "distribution": lambda: float(torch.distributions.Gamma(1.0, 1.0).sample()),
}


class Drawing(Dataset[dict[str, Any]]):
    """Two fields of one draw."""

    def __init__(self, draw: Callable[[], float] = DRAWS["torch"], count: int = 12) -> None:
        self.draw = draw
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        crop = self.draw()
        return {"image": crop, "target": crop, "index": index}


def is_same(one: Generators, other: Generators) -> bool:
    return (
        torch.equal(one.torch, other.torch)
        and one.python == other.python
        and pickle.dumps(one.numpy) == pickle.dumps(other.numpy)
    )


def batches_of(dataset: Any, seed: int = 0, name: str = "t", **rest: Any) -> Batches:
    return Batches(Task(name, Anything(), 4, dataset, **rest), seed)


@pytest.mark.parametrize("draw", DRAWS)
def test_two_fields_read_by_two_ranks_come_from_one_draw(draw: str) -> None:
    first, second = (batches_of(Drawing(DRAWS[draw])) for _ in range(2))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # ranks are not at the same place
    image = first.rows(2, 0, 4, ["image"])["image"]
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    target = torch.cat([second.rows(2, row, row + 2, ["target"])["target"] for row in (0, 2)])
    assert torch.equal(image, target)
    assert first.draws and second.draws


def test_samples_epochs_seeds_and_tasks_have_draws_of_their_own() -> None:
    def drawn(seed: int, name: str, epoch: int) -> list[float]:
        batches = batches_of(Drawing(), seed, name)
        rows = [batches.rows(3 * epoch + position, 0, 4) for position in range(3)]
        by_sample = {
            int(i): float(x) for row in rows for i, x in zip(row["index"], row["image"], strict=True)
        }
        return [by_sample[index] for index in range(12)]

    lists = [drawn(0, "t", 0), drawn(1, "t", 0), drawn(0, "u", 0), drawn(0, "t", 1)]
    assert len({value for values in lists for value in values}) == 48
    assert drawn(0, "t", 1) == lists[3]


def test_a_run_that_goes_on_draws_what_it_would_have_drawn() -> None:
    undisturbed = batches_of(Drawing())
    expected = [undisturbed.rows(step, 1, 3)["image"] for step in range(8)]
    gone_on = batches_of(Drawing())
    assert all(torch.equal(gone_on.rows(step, 1, 3)["image"], expected[step]) for step in range(5, 8))


def masked(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = default_collate(items)
    batch["mask"] = torch.rand(len(items), 3) < 0.5
    return batch


def mixed(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = default_collate(items)
    batch["image"] = batch["image"] + batch["image"].flip(0)
    return batch


def sometimes(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Draws for one batch of three."""
    batch: dict[str, Tensor] = default_collate(items)
    if 0 in batch["index"]:
        batch["image"] = batch["image"] + torch.rand(len(items))
    return batch


@pytest.mark.parametrize("collate", [masked, mixed, sometimes, default_collate])
def test_a_collates_share_is_rows_of_the_whole_batch(collate: Any) -> None:
    items = [{"image": torch.tensor(float(index)), "index": index} for index in range(12)]
    for step in range(6):
        whole = batches_of(items, collate=collate).rows(step, 0, 4)
        for rows in ((0, 1), (1, 4), (2, 3)):
            share = batches_of(items, collate=collate).rows(step, *rows)
            if collate is sometimes and 0 in whole["index"] and 0 not in share["index"]:
                continue  # who does not read the sample cannot know
            assert all(torch.equal(share[name], whole[name][slice(*rows)]) for name in whole)


def test_a_collate_of_single_samples_reads_no_others() -> None:
    read: list[int] = []

    class Counted(Drawing):
        def __getitem__(self, index: int) -> dict[str, Any]:
            read.append(index)
            return super().__getitem__(index)

    batches = batches_of(Counted(), collate=default_collate)
    batches.rows(1, 0, 2)
    read.clear()
    batches.rows(1, 0, 2)
    assert read == batches.indices(1)[:2]


def test_the_processs_generators_go_on_as_if_nothing_had_been_read() -> None:
    before = Generators.now()
    batches_of(Drawing(), collate=masked).rows(0, 1, 2)
    first_samples(Task("t", Anything(), 4, Drawing()), 2)
    assert is_same(before, Generators.now())


def test_generators_are_put_back_after_an_error() -> None:
    before = Generators.now()
    with pytest.raises(OSError), generators_kept():
        SeededCalls(0).call(lambda: float(torch.rand(())))
        raise OSError
    assert is_same(before, Generators.now())


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_are_noticed(draw: str) -> None:
    with generators_kept():
        calls = SeededCalls(0)
        calls.call(lambda: 1.0)
        assert not calls.draws
        calls.call(DRAWS[draw])
        assert calls.draws
    with pytest.raises(DrawsError), no_draws():
        DRAWS[draw]()


def test_a_thread_draws_nothing_from_torch_before_it_is_stopped() -> None:
    before = torch.get_rng_state()
    with pytest.raises(DrawsError):
        batches_of(Drawing()).rows_without_draws(0, 0, 2)
    assert torch.equal(before, torch.get_rng_state())


def test_a_generator_of_ones_own_is_no_draw_from_the_processs() -> None:
    generator = torch.Generator().manual_seed(0)
    with no_draws():
        torch.rand(3, generator=generator)
        torch.empty(3).uniform_(generator=generator)


def test_items_that_a_seed_does_not_fix_are_refused() -> None:
    generator = np.random.default_rng(0)
    task = Task("t", Anything(), 4, Drawing(generator.random))
    with pytest.raises(WorkloadError, match="field 'image' is another each time"):
        first_samples(task, 2)


def test_items_with_numbers_that_are_none_are_what_they_are() -> None:
    items = [{"x": torch.tensor([float("nan"), 1.0])} for _ in range(4)]
    assert first_samples(Task("t", Anything(), 4, items), 2)["x"].shape == (2, 2)


def test_a_collate_that_draws_is_given_whole_batches_although_its_draw_does_not_show() -> None:
    """On the first batch, where it is tried; on others it may."""

    def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        torch.rand(())
        return dict(default_collate(items))

    assert batches_of(Drawing(lambda: 0.5))._collates_shares
    assert not batches_of(Drawing(lambda: 0.5), collate=collate)._collates_shares


NUMPY_DRAWS: dict[str, Callable[[], object]] = {
    "normal": np.random.standard_normal,
    "whole": lambda: np.random.randint(5),
    "permutation": lambda: np.random.permutation(3),
    "seed": lambda: np.random.seed(3),
    "legacy": lambda: np.random.mtrand._rand.random_sample(2),
}


@pytest.mark.parametrize("other", [False, True], ids=["its own", "another generator"])
@pytest.mark.parametrize("draw", NUMPY_DRAWS)
def test_whatever_is_drawn_of_numpy_is_noticed(draw: str, other: bool) -> None:
    own = np.random.get_bit_generator()
    if other:
        np.random.set_bit_generator(Reseeded())
    try:
        calls = SeededCalls(0)
        with generators_kept():
            calls.call(lambda: None)
            assert not calls.draws
            calls.call(NUMPY_DRAWS[draw])
        assert calls.draws
    finally:
        np.random.set_bit_generator(own)


class Reseeded(np.random.MT19937):
    """A generator of another type, which numpy seeds as its own."""
