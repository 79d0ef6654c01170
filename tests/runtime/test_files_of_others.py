"""Samples in files of WebDataset and of Hugging Face's datasets, on disk, through a loading process."""

from __future__ import annotations

import io
import os
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.loading import SEED, read, task_of
from spindle_cli.process.environment import without_ranks
from spindle_cli.training.data.reading import StreamBatches, first_samples
from spindle_cli.workload.settings.types import Loading
from spindle_cli.workload.types import Task

SHARDS, PER_SHARD = 4, 6


@pytest.fixture
def tars(tmp_path: Path) -> list[str]:
    """Shards of a tar each; sample n has the number n."""
    paths = [tmp_path / f"shard-{shard}.tar" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                data = str(number).encode()
                info = tarfile.TarInfo(f"{number:06d}.cls")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return list(map(str, paths))


def web_task(tars: list[str]) -> Task:
    webdataset = pytest.importorskip("webdataset", reason="pip install 'spindle-cli[data]'")
    dataset = webdataset.WebDataset(tars, shardshuffle=False).decode().to_tuple("cls")
    return task_of(dataset.map(lambda sample: {"x": torch.tensor([float(sample[0])])}))


def numbers(batch: dict[str, Tensor]) -> list[int]:
    return [int(value) for value in batch["x"].flatten()]


def expected(task: Task, workers: int, count: int) -> list[list[int]]:
    plain = StreamBatches(task, SEED, Loading(workers, 2))
    return [numbers(plain.rows(number, 0, 4)) for number in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_tar_shards_are_read_once_in_each_pass(
    tars: list[str], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under torchrun, whose ranks WebDataset would split shards over: a worker does not show them."""
    task = web_task(tars)
    order = expected(task, workers, 8)
    per_pass = 6  # of 24 samples; with two workers 12 each
    assert sorted(chain(*order[:per_pass])) == list(range(24))
    if workers == 0:
        assert order[0] == [0, 1, 2, 3]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with without_ranks(), read(task, range(8), workers) as (one,):
        assert [numbers(one.rows(number, 0, 4)) for number in range(8)] == order
        state = one.state
    assert os.environ["WORLD_SIZE"] == "4"
    assert state is not None
    with without_ranks():
        states = states_after(task, workers, 3)
        with read(task, range(3, 8), workers, state=states) as (one,):
            assert [numbers(one.rows(number, 0, 4)) for number in range(3, 8)] == order[3:]


def states_after(task: Task, workers: int, count: int) -> dict[str, Any]:
    plain = StreamBatches(task, SEED, Loading(workers, 2))
    for number in range(count):
        plain.rows(number, 0, 4)
    assert plain.state is not None
    return plain.state


@pytest.fixture
def parquets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of parquet; sample n has the number n."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets", reason="pip install 'spindle-cli[data]'")
    paths = [tmp_path / f"part-{shard}.parquet" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        values = [[float(n)] for n in range(shard * PER_SHARD, (shard + 1) * PER_SHARD)]
        datasets.Dataset.from_dict({"x": values}).to_parquet(str(path))
    return list(map(str, paths))


def test_a_dataset_of_hugging_face_is_read_by_index(parquets: list[str], tmp_path: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_parquet(parquets, cache_dir=str(tmp_path / "cache")).with_format("torch")
    with read(task_of(dataset), range(6), workers=1) as (one,):
        found = [numbers(one.rows(number, 0, 4)) for number in range(6)]
    assert sorted(chain(*found)) == list(range(24))
    assert found != [list(range(n, n + 4)) for n in range(0, 24, 4)]  # shuffled


@pytest.mark.parametrize(("workers", "shuffled"), [(0, True), (2, False)])
def test_a_streaming_dataset_of_hugging_face_goes_on_where_it_was(
    parquets: list[str], tmp_path: Path, workers: int, *, shuffled: bool
) -> None:
    """By its state, or, where a buffer is shuffled that its state does not have, by reading it again."""
    import datasets

    whole = datasets.Dataset.from_parquet(parquets, cache_dir=str(tmp_path / "cache"))
    dataset = whole.to_iterable_dataset(num_shards=SHARDS)
    shuffling = dataset.shuffle(seed=1, buffer_size=3) if shuffled else dataset
    task = task_of(shuffling.with_format("torch"))
    assert first_samples(task, 2)["x"].shape == (2, 1)
    order = expected(task, workers, 8)
    assert sorted(chain(*order[:6])) == list(range(24))
    assert (order[6:] != order[:2]) == shuffled  # set_epoch shuffles anew
    with read(task, range(2, 8), workers, state=states_after(task, workers, 2)) as (one,):
        assert [numbers(one.rows(number, 0, 4)) for number in range(2, 6)] == order[2:6]
