"""What a backward pass has come to: parameters by hooks, and values between slices as the trace says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alone import world_of_one
from saving_toys import WIDTH, Scaled
from torch import Tensor, nn

from helpers.analysed import analysed
from helpers.layers import Stop
from spindle_cli.analysis.autograd import SavedTensorsHooks
from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.assembling import reached_alike
from spindle_cli.runtime.communication import reached
from spindle_cli.runtime.communication.buckets import Bucket, Flags, ShardedBucket
from spindle_cli.runtime.communication.collectives import Members
from spindle_cli.runtime.communication.reached import Agreement, Reached
from spindle_cli.runtime.part.shards import Cut, Cuts
from spindle_cli.runtime.step.compute import require_planned_gradients
from spindle_cli.workload.graph import ParameterTable, WorkloadGraph
from spindle_cli.workload.types import Task, Workload


@pytest.fixture
def world() -> Iterator[None]:
    with world_of_one():
        yield


def test_a_function_that_ends_with_none_comes_to_no_parameter() -> None:
    stopped, used = (nn.Parameter(torch.ones(2)) for _ in range(2))
    for parameter in (stopped, used):
        parameter.grad = torch.zeros(2)  # as buckets give them
    noted = Reached([stopped, used])
    (Stop.apply(2 * stopped) + used).sum().backward()  # type: ignore[no-untyped-call]
    assert noted.flags == [False, True]
    (2 * stopped).sum().backward()
    assert noted.flags == [True, True]
    noted.reset()
    assert noted.flags == [False, False]


@pytest.mark.parametrize(
    "hooks", [nullcontext, lambda: SavedTensorsHooks(Tensor.detach, lambda saved: saved)]
)
def test_a_parameter_that_a_function_in_python_has_saved_is_noted_in_every_step(
    hooks: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Before 2.10 torch itself takes hooks on its gradient away."""
    weight = nn.Parameter(torch.ones(WIDTH))
    noted = Reached([weight])
    for _ in range(2):
        with hooks():
            y = Scaled.apply(torch.ones(2, WIDTH), weight)  # type: ignore[no-untyped-call]
        assert noted.flags == [False]
        y.sum().backward()
        assert noted.flags == [True]
        noted.reset()


def test_a_gradient_that_is_asked_for_and_not_accumulated_comes_to_no_parameter() -> None:
    weight = nn.Parameter(torch.ones(2))
    noted = Reached([weight])
    torch.autograd.grad((3 * weight).sum(), weight)
    assert noted.flags == [False]


class Ranks:
    """The agreements of several ranks, which tell each other without processes."""

    def __init__(self, count: int, names: Sequence[str | None]) -> None:
        self.ranks = [Agreement(names) for _ in range(count)]
        self.readers: list[int] = []  # of the step that was last

    def step(
        self, *own: tuple[bool, ...], asked: Sequence[bool] | None = None
    ) -> list[tuple[bool, ...] | WorkloadError]:
        """What each rank takes to have a gradient, or raises."""
        told = [(*each, rank.tell(each, asked)) for rank, each in zip(self.ranks, own, strict=True)]
        together = [any(flags) for flags in zip(*told, strict=True)]
        self.readers = []

        def outcome(number: int, rank: Agreement) -> tuple[bool, ...] | WorkloadError:
            def read() -> Sequence[bool]:
                self.readers.append(number)
                return together

            try:
                return tuple(rank.outcome(read))
            except WorkloadError as error:
                return error

        return [outcome(number, rank) for number, rank in enumerate(self.ranks)]

    def turn_to(self, program: int) -> None:
        for rank in self.ranks:
            rank.turn_to(program)


def test_ranks_read_once_what_stays_as_it_is() -> None:
    """The first rank reaches one of three, the second another; nobody reaches the third."""
    ranks, own = Ranks(2, ["a", "b", "c"]), ((True, False, False), (False, True, False))
    assert ranks.step(*own) == [(True, True, False)] * 2
    assert ranks.readers == [0, 1]
    for _ in range(2):
        assert ranks.step(*own) == [(True, True, False)] * 2
        assert ranks.readers == []


def test_who_reaches_everything_reads_nothing() -> None:
    ranks = Ranks(2, ["a", None])
    for _ in range(2):
        assert ranks.step((True, True), (False, False)) == [(True, True)] * 2
        assert ranks.readers == [1]  # the second does not know of the one that values decide of


def test_what_values_decide_of_is_read_in_every_step() -> None:
    """An expert that gets no tokens has no gradient; whoever has some for it knows that it has one."""
    ranks = Ranks(2, ["a", None])
    assert ranks.step((True, False), (True, False)) == [(True, False)] * 2
    assert ranks.step((True, True), (True, False)) == [(True, True)] * 2
    assert ranks.readers == [1]
    assert ranks.step((True, False), (True, False)) == [(True, False)] * 2
    assert ranks.readers == [0, 1]


def test_each_program_has_an_outcome_of_its_own() -> None:
    ranks = Ranks(1, ["a", "b"])
    assert ranks.step((True, False)) == [(True, False)]
    ranks.turn_to(1)
    assert ranks.step((False, True)) == [(False, True)]
    assert ranks.readers == [0]
    for program, own in ((0, (True, False)), (1, (False, True))):
        ranks.turn_to(program)
        assert ranks.step(own) == [own]
        assert ranks.readers == []


def test_what_a_program_does_not_train_is_not_asked_for() -> None:
    ranks = Ranks(2, ["a", None])
    for _ in range(2):
        assert ranks.step((True, False), (True, False), asked=[True, False]) == [(True, False)] * 2
        assert ranks.readers == []


def test_all_that_go_elsewhere_together_find_out_anew() -> None:
    ranks = Ranks(2, ["a"])
    assert ranks.step((False,), (False,)) == [(False,)] * 2
    assert ranks.step((True,), (True,)) == [(True,)] * 2
    assert ranks.readers == [0, 1]
    for _ in range(2):
        assert ranks.step((True,), (True,)) == [(True,)] * 2
        assert ranks.readers == []


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (((True,), (False,)), ((False,), (False,)), "a: it had a gradient when this run began, and has none"),
        (((False,), (False,)), ((True,), (False,)), "a: it had no gradient when this run began, and has one"),
    ],
)
def test_a_rank_that_goes_elsewhere_while_others_do_not_know_ends_the_run(
    first: tuple[tuple[bool, ...], ...], then: tuple[tuple[bool, ...], ...], said: str
) -> None:
    ranks = Ranks(2, ["a"])
    ranks.step(*first)
    error, _ = ranks.step(*then)
    assert isinstance(error, WorkloadError)
    assert error.message.startswith(said)
    assert ranks.readers == [0]


def test_a_rank_that_goes_elsewhere_without_another_outcome_goes_on() -> None:
    ranks = Ranks(2, ["a"])
    ranks.step((True,), (True,))
    assert ranks.step((True,), (False,)) == [(True,)] * 2
    assert ranks.readers == [1]
    assert ranks.step((True,), (True,)) == [(True,)] * 2
    assert ranks.readers == []


def test_buckets_read_flags_once(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole and of a sharded bucket: a parameter that no pass comes to has no gradient in any step."""
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    read = list[Tensor]()

    def reading(flags: Tensor) -> list[bool]:
        read.append(flags)
        return [flag > 0 for flag in flags.tolist()]

    monkeypatch.setattr(reached, "read_flags", reading)
    names, alone = {used: "used", unused: "unused"}, Members(1, 0, None)
    parameters = {"used": used, "unused": unused}
    whole = Bucket(parameters, alone, names)
    for _ in range(3):
        (3 * used).sum().backward()
        whole.start_sum()
        whole.finish_sum()
        assert used.grad is not None and used.grad.tolist() == [3.0, 3.0]
        assert unused.grad is None
        whole.reset()
    assert len(read) == 1
    sharded = ShardedBucket(parameters, alone)
    flags = Flags([sharded], None, names)
    for _ in range(3):
        (3 * used).sum().backward()
        flags.start([sharded])
        flags.finish([sharded])
        assert used.grad is not None and used.grad.tolist() == [3.0, 3.0]
        assert unused.grad is None
        sharded.reset()
        flags.reset()
    assert len(read) == 2


def test_what_was_handed_out_is_handed_out_again(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step whose gradients are captured. Another rank has reached what this one has not."""
    monkeypatch.setattr(reached, "read_flags", lambda _: [True, False])
    parameter = nn.Parameter(torch.ones(2))
    sharded = ShardedBucket({"p": parameter}, Members(1, 0, None))
    flags = Flags([sharded], None)
    flags.start([sharded])
    for _ in range(2):
        flags.finish([sharded])
        assert parameter.grad is not None
    flags.finish([])
    assert parameter.grad is None


def test_flags_of_what_a_program_leaves_out_are_not_read(
    world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values decide of what it leaves out."""
    read = list[Tensor]()

    def reading(flags: Tensor) -> list[bool]:
        read.append(flags)
        return [flag > 0 for flag in flags.tolist()]

    monkeypatch.setattr(reached, "read_flags", reading)
    trained, left_out = (nn.Parameter(torch.ones(2)) for _ in range(2))
    buckets = [ShardedBucket({"p": each}, Members(1, 0, None)) for each in (trained, left_out)]
    flags = Flags(buckets, None, {trained: "trained"})
    for _ in range(3):
        trained.sum().backward()
        flags.start(buckets[:1])
        flags.finish(buckets[:1])
        assert trained.grad is not None
        assert left_out.grad is None
        for each in (*buckets, flags):
            each.reset()
    assert read == []


def wired(*names: str, sees: bool = True) -> Any:
    edge = SimpleNamespace(
        differentiable=[SimpleNamespace(name=name) for name in names],
        may_lack=frozenset[str]() if sees else frozenset(names),
    )
    op = SimpleNamespace(inputs=("h", "context"), target="fuse")
    return SimpleNamespace(incoming=[edge], ops=(op,), slice=SimpleNamespace(label="t/fuse[0:1]"))


@pytest.mark.parametrize(
    ("planned", "found", "said"),
    [
        (("h", "context"), ("h",), "'context' it gave one, and none comes in this step"),
        (("h",), ("h", "context"), "'context' it gave none, and one comes in this step"),
    ],
)
def test_other_gradients_than_were_traced_end_the_run(
    planned: tuple[str, ...], found: tuple[str, ...], said: str
) -> None:
    require_planned_gradients(wired(*planned), planned)
    require_planned_gradients(wired(*planned, sees=False), set(planned) & set(found))
    with pytest.raises(
        WorkloadError, match=rf"t/fuse\[0:1\]: fuse gives other gradients .* {said}"
    ) as raised:
        require_planned_gradients(wired(*planned), found)
    assert "x + keep * y" in str(raised.value.hint)


class Decides(nn.Module):
    """Uses its scale only where there is something to scale; what is before it may get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.map = nn.Parameter(torch.ones(())), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x) * self.scale if x.abs().max() > 0.5 else self.map(x)


class Decided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.decides, self.last = nn.Linear(2, 2), Decides(), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.decides(self.first(x))).square().mean()


def test_what_values_or_lengths_decide_of_is_not_reached_alike() -> None:
    data = [{"x": torch.randn(2)} for _ in range(8)]
    graph = analysed(Workload("w", [Task("t", Decided(), 4, data)], (nn.Linear, Decides)))
    table = ParameterTable.of(graph)
    cuts = Cuts({name: Cut(name, 0, 2, 2 if name == "t.last.weight" else 1) for name in table.parameters})

    def alike(graph: WorkloadGraph) -> set[str]:
        model: Any = SimpleNamespace(graph=graph, cuts=cuts, table=table)
        return set(reached_alike(model))

    assert alike(graph) == {
        "t.last.bias",
        *(cuts.by_name["t.last.weight"].key(index) for index in (0, 1)),
    }
    task = replace(graph.tasks["t"], varying={"x": (True,)})
    assert alike(replace(graph, tasks={"t": task})) == set()
