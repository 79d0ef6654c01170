"""Code of a workload sees one process, wherever it runs; what talks to others is refused with its line."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn  # not imported by torch itself
from torch import Tensor, nn
from torch.distributed import all_reduce, get_rank, get_world_size, init_process_group, is_initialized
from torch.testing._internal.distributed.fake_pg import FakeStore

from spindle_cli.analysis.analyse import analyse
from spindle_cli.errors import WorkloadError
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.process.environment import without_ranks
from spindle_cli.workload.building.load import Source, build
from spindle_cli.workload.one_process import show_one_process
from spindle_cli.workload.types import Task, Workload

WIDTH = 4


@pytest.fixture(autouse=True)
def third_of_four() -> Iterator[None]:
    """This process is rank 2 of 4, of which there are no others."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    show_one_process()
    yield
    dist.destroy_process_group()


class Asking(nn.Module):
    """Asks between operators; or, as an operator, inside of one."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        made = self.ask(x.sum())
        return x if made is None else x * made


class Model(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.asking = nn.Linear(WIDTH, WIDTH), Asking(ask)

    def forward(self, x: Tensor) -> Tensor:
        return self.asking(self.first(x)).square().mean()


def workload(ask: Callable[[Tensor], Any], *, inside: bool) -> Workload:
    items = [{"x": torch.randn(WIDTH)} for _ in range(4)]
    return Workload("asking", [Task("t", Model(ask), 4, items)], (Asking,) if inside else (nn.Linear,))


def answers(_: object = None) -> list[Any]:
    """By functions that were imported by name, and by those of torch.distributed."""
    return [
        is_initialized(),
        dist.is_initialized(),
        get_rank(),
        dist.get_rank(),
        get_world_size(),
        dist.get_world_size(),
        dist.GroupMember.WORLD,
        dist.group.WORLD,
    ]


SEEN: list[list[Any]] = []  # a forward's own lists are as before once it was looked at
ALONE = [False, False, 0, 0, 1, 1, None, None]


def test_a_script_of_its_own_sees_what_is_there() -> None:
    assert answers()[:6] == [True, True, 2, 2, 4, 4]
    assert dist.get_backend() == "fake"


@pytest.mark.parametrize("inside", [False, True])
def test_forward_sees_one_process(inside: bool) -> None:
    SEEN.clear()
    analyse(workload(lambda x: SEEN.append(answers()), inside=inside))
    assert SEEN and all(each == ALONE for each in SEEN)
    assert answers()[:6] == [True, True, 2, 2, 4, 4]


def test_build_sees_one_process() -> None:
    def make() -> Workload:
        assert answers() == ALONE
        return workload(lambda x: None, inside=True)

    assert build(Source("make", make)).name == "asking"


def test_threads_and_backward_passes_of_user_code_see_one_process() -> None:
    """Nobody of ours is below them on the stack: autograd's threads on CUDA begin like this."""
    seen: list[list[Any]] = []
    thread = threading.Thread(target=lambda: seen.append(answers()))
    thread.start()
    thread.join()
    assert seen == [ALONE]


def test_a_thread_that_is_torchs_alone_sees_what_is_there() -> None:
    """Nobody's code is between torch.distributed and Python's threads: it is part of a collective of ours."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(dist.get_rank).result() == 2


def test_layers_of_torch_that_ask_for_others_see_one_process() -> None:
    """Batch norms that are converted for data parallelism are plain ones."""
    seen: list[list[Any]] = []

    class Watched(nn.SyncBatchNorm):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(answers())
            return super().forward(x)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), Watched(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x)).square().mean()

    items = [{"x": torch.randn(WIDTH)} for _ in range(4)]
    graph = analyse(Workload("normed", [Task("t", Normed(), 4, items)], (nn.Linear, nn.SyncBatchNorm)))
    assert seen and all(each == ALONE for each in seen)
    assert [op.target for op in graph.tasks["t"].ops] == ["linear", "norm"]


def test_our_own_groups_talk_to_others_meanwhile() -> None:
    """An operator that is split sums inside of a forward that sees one process."""
    group = TensorGroup((0, 1, 2, 3), 2, torch.device("cpu"))
    group.join(dist.group.WORLD)

    def make() -> Workload:
        group.sum_(torch.ones(2), is_gradient=False)
        assert answers() == ALONE
        return workload(lambda x: None, inside=True)

    build(Source("make", make))


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x)], x),
    "_AllGather": lambda x: sum(torch.distributed.nn.all_gather(x)),
    "all_gather_object": lambda x: dist.all_gather_object([None], 1),
    "barrier": lambda x: dist.barrier(),
    "new_group": lambda x: dist.new_group(),
    "get_backend": lambda x: dist.get_backend(),
    "init_process_group": lambda x: init_process_group("gloo", rank=0, world_size=1),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_talks_to_others_is_refused_with_its_line(name: str, inside: bool) -> None:
    with pytest.raises(WorkloadError) as refused:
        analyse(workload(CALLS[name], inside=inside))
    line = CALLS[name].__code__.co_firstlineno
    called = "all_gather" if name == "_AllGather" and inside else name
    assert f"test_one_process.py:{line}: torch.distributed.{called} is called" in refused.value.message
    assert "is_initialized()" in str(refused.value)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("group", [[0], [[0]]], ids=str)
def test_a_functional_collective_is_refused(group: Any, inside: bool) -> None:
    with pytest.raises(
        WorkloadError, match=r"test_one_process\.py:\d+: torch\.distributed\.all_reduce is called"
    ):
        analyse(workload(lambda x: functional.all_reduce(x, "sum", group), inside=inside))


def test_a_function_imported_by_name_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"distributed\.all_reduce is called"):
        analyse(workload(lambda x: all_reduce(x), inside=False))


def test_the_guard_that_the_refusal_advises_is_taken() -> None:
    def ask(count: Tensor) -> Tensor:
        if torch.distributed.is_initialized():
            dist.all_reduce(count)
        return count.sigmoid() / dist.get_world_size()

    (task,) = analyse(workload(ask, inside=False)).tasks.values()
    assert [op.target for op in task.ops] == ["first", "asking.linear", None]


def test_ranks_are_not_in_the_environment_where_user_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"),
        *("SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_SIZE"),
    )
    for name in names:
        monkeypatch.setenv(name, "3")
    with pytest.raises(KeyError), without_ranks():
        assert not any(name in os.environ for name in names)
        assert not dist.is_torchelastic_launched()
        raise KeyError
    assert {os.environ[name] for name in names} == {"3"}
