"""Saving the trained parameters: one file with every parameter once, whichever ranks hold it."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from spindle_cli.checkpoint.tensors import TensorSpec
from spindle_cli.errors import InputError
from spindle_cli.files.run_files import model_path, newest_model
from spindle_cli.runtime.backends.host_group import join_host_group
from spindle_cli.runtime.backends.strict_backend import STRICT, OperationQueue, register_strict_backends
from spindle_cli.runtime.measuring.gathering import gather_json
from spindle_cli.runtime.measuring.timeline import clock_offsets
from spindle_cli.runtime.part.replicas import check_replicas
from spindle_cli.runtime.saving import checkpoints
from spindle_cli.runtime.saving.save import save_model, write_model

ZERO = torch.zeros(1)
HELD = (("a", "b"), ("b", "c"))  # by rank; nobody holds "d"


def save_as_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(HELD))
    held = {name: torch.full((2, 3), 10.0 * rank + ord(name), requires_grad=True) for name in HELD[rank]}
    save_model(Path(folder), 40, ("a", "b", "c", "d"), held)
    dist.destroy_process_group()


def save_lent_as_rank(rank: int, folder: str) -> None:
    """Values are there as long alone as `whole` lends the memory for them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(HELD))
    held = {name: torch.zeros(2, 3) for name in HELD[rank]}

    @contextmanager
    def lend(keys: Collection[str]) -> Iterator[bool]:
        lent = {key: held[key] for key in keys if key in held}
        for key, tensor in lent.items():
            tensor.fill_(10.0 * rank + ord(key))
        yield True
        for tensor in lent.values():
            tensor.fill_(-1.0)

    save_model(Path(folder), 40, ("a", "b", "c", "d"), held, lend)
    dist.destroy_process_group()


def on_ranks(save: Callable[[int, str], None], folder: Path) -> None:
    """In a process for each rank of `HELD`, forked from one that has imported what they need."""
    multiprocessing.set_forkserver_preload([save_model.__module__])
    torch.multiprocessing.start_processes(
        save, args=(str(folder),), nprocs=len(HELD), start_method="forkserver"
    )


@pytest.mark.processes
@pytest.mark.parametrize("save", [save_as_rank, save_lent_as_rank])
def test_every_parameter_is_taken_from_the_first_rank_that_holds_it(
    save: Callable[[int, str], None], tmp_path: Path
) -> None:
    on_ranks(save, tmp_path)
    saved = load_file(model_path(tmp_path, 40))
    expected = {"a": ord("a"), "b": ord("b"), "c": 10 + ord("c")}
    assert {name: tensor.unique().tolist() for name, tensor in saved.items()} == {
        name: [value] for name, value in expected.items()
    }
    assert [path.name for path in model_path(tmp_path, 40).parent.iterdir()] == ["model.safetensors"]


def save_over_hosts_as_rank(rank: int, folder: str) -> None:
    """The world is over a backend that is as NCCL, and takes nothing from the moment on when steps begin."""
    register_strict_backends()
    dist.init_process_group(STRICT, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    join_host_group(60)

    def refuse(*_: object) -> None:
        raise AssertionError("an operation of the world's communicator")

    OperationQueue.post = refuse
    held = {name: torch.full((2, 3), 10.0 * rank + ord(name)) for name in HELD[rank]}
    save_model(Path(folder), 40, ("a", "b", "c", "d"), held)
    check_replicas(["b"], {"b": nn.Parameter(torch.ones(2))})
    offsets, told = clock_offsets(), gather_json({"rank": rank})
    assert (offsets is None) == (told is None) == (rank == 1)
    assert told is None or told == [{"rank": 0}, {"rank": 1}]
    assert offsets is None or len(offsets) == 2
    assert checkpoints._gather(rank) == [0, 1]
    (Path(folder) / f"done-{rank}").touch()
    os._exit(0)  # torch would end the world with an operation


@pytest.mark.processes
def test_what_is_no_part_of_a_step_goes_from_host_to_host(tmp_path: Path) -> None:
    on_ranks(save_over_hosts_as_rank, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]
    saved = load_file(model_path(tmp_path, 40))
    assert {name: tensor.unique().tolist() for name, tensor in saved.items()} == {
        "a": [97.0],
        "b": [98.0],
        "c": [109.0],
    }


COUNT, MIB = 48, 2**20  # tensors, of 4 MiB each


def save_much_as_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    names = tuple(f"t{number:02d}" for number in range(COUNT))
    held = {name: torch.ones(MIB) for name in names} if rank == 1 else {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save_model(Path(folder), 1, names, held)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    (Path(folder) / f"grown-{rank}").write_text(str(grown_kib))
    dist.destroy_process_group()


@pytest.mark.processes
def test_the_first_rank_holds_little_more_than_one_parameter_of_the_others_at_a_time(tmp_path: Path) -> None:
    on_ranks(save_much_as_rank, tmp_path)
    assert model_path(tmp_path, 1).stat().st_size > COUNT * 4 * MIB
    assert int((tmp_path / "grown-0").read_text()) * 1024 < 10 * 4 * MIB


def test_the_newest_model_is_that_of_the_most_steps(tmp_path: Path) -> None:
    for step in (9, 10, 200):
        write_model(model_path(tmp_path, step), {"a": TensorSpec.of(ZERO)}, lambda _: ZERO)
    assert newest_model(tmp_path) == model_path(tmp_path, 200)


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(InputError, match="the trained parameters cannot be written"):
        write_model(model_path(tmp_path, 1), {"a": TensorSpec.of(ZERO)}, lambda _: ZERO)
