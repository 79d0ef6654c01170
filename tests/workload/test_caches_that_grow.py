"""Layers that keep what they make of sizes alone may be split; what is kept of samples is another matter."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from spindle_cli.analysis.analyse import analyse
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.attributes import watching
from spindle_cli.workload.types import Task, Workload

from .shares import assert_steps_as_plain
from .toy import Block, Items

WIDTH, LENGTH, SAMPLES = 4, 6, 4
SHARED: dict[int, Tensor] = {}


class Keeping(nn.Module):
    """Adds a table of as many rows as there are positions; `table` makes or finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.zeros(2, WIDTH), persistent=False)
        self.register_buffer("rates", torch.linspace(0, 1, WIDTH))
        self.cached = 2
        self.kept: dict[Any, Tensor] = {}
        self._hidden: dict[Any, dict[int, Tensor]] = defaultdict(dict)
        self.made: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.table(x))

    def table(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def made(count: int) -> Tensor:
    return torch.arange(count)[:, None] * torch.linspace(0, 1, WIDTH)


class ByCounter(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.cached:
            self.register_buffer("rows", made(x.shape[1]) * self.rates, persistent=False)
            self.cached = x.shape[1]
        return self.rows[: x.shape[1]]


class InBlocks(Keeping):
    """As many rows more as are missing, in new memory that it writes to."""

    def table(self, x: Tensor) -> Tensor:
        missing = x.shape[1] - len(self.rows)
        if missing > 0:
            more = torch.empty(missing, WIDTH)
            more.copy_(made(missing))
            self.rows = torch.cat([self.rows, more])
        return self.rows[: x.shape[1]]


class ByKey(Keeping):
    def table(self, x: Tensor) -> Tensor:
        key = x.shape[1], x.device, x.dtype
        if key not in self.kept:
            self.kept[key] = made(x.shape[1]).to(x)
        return self.kept[key]


class Hidden(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self._hidden["tables"]:
            self._hidden["tables"][x.shape[1]] = made(x.shape[1])
        return self._hidden["tables"][x.shape[1]]


class Lazily(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if self.made is None or len(self.made) < x.shape[1]:
            self.made = made(x.shape[1])
        return self.made[: x.shape[1]]


class Remembered(Keeping):
    @functools.lru_cache(maxsize=8)  # noqa: B019 - as people write it
    def of(self, count: int) -> Tensor:
        return made(count)

    def table(self, x: Tensor) -> Tensor:
        return self.of(x.shape[1])


@functools.cache
def remembered(count: int) -> Tensor:
    return made(count)


class RememberedBeside(Keeping):
    def table(self, x: Tensor) -> Tensor:
        return remembered(x.shape[1])


class InTheFile(Keeping):
    def table(self, x: Tensor) -> Tensor:
        return SHARED.setdefault(x.shape[1], made(x.shape[1]))


class InTheClass(Keeping):
    tables: dict[int, Tensor] = {}  # noqa: RUF012 - as people write it

    def table(self, x: Tensor) -> Tensor:
        return self.tables.setdefault(x.shape[1], made(x.shape[1]))


class Store:
    def __init__(self) -> None:
        self.tables: dict[int, Tensor] = {}
        self.last: Tensor | None = None


class InAnObject(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store()

    def table(self, x: Tensor) -> Tensor:
        self.store.last = self.store.tables.setdefault(x.shape[1], made(x.shape[1]))
        return self.store.last


TABLES = (
    ByCounter,
    InBlocks,
    ByKey,
    Hidden,
    Lazily,
    Remembered,
    RememberedBeside,
    InTheFile,
    InTheClass,
    InAnObject,
)


class OfSamples(Keeping):
    """What it keeps is made of the first batch."""

    def table(self, x: Tensor) -> Tensor:
        if self.cached == 2:
            self.rows = x.detach().mean(0)
            self.cached = 3
        return self.rows[: x.shape[1]]


class OfParameters(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if self.cached == 2:
            self.rows = self.linear.weight.detach().sum(0).expand(x.shape[1], -1).clone()
            self.cached = 3
        return self.rows


class OfChance(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.cached:
            self.rows = torch.randn(x.shape[1], WIDTH)
            self.cached = x.shape[1]
        return self.rows


class WrittenOfSamples(Keeping):
    """New memory, into which samples are written afterwards."""

    def table(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.cached:
            self.rows = torch.zeros(x.shape[1], WIDTH)
            self.rows[0] = x.detach().mean((0, 1))
            self.cached = x.shape[1]
        return self.rows


class OtherOnceWarm(Keeping):
    """From its second forward on it looks at all samples."""

    def table(self, x: Tensor) -> Tensor:
        if self.cached == 2:
            self.cached = 3
            return made(x.shape[1])
        return x.mean(0)


class Counting(Keeping):
    def table(self, x: Tensor) -> Tensor:
        self.cached += 1
        return made(x.shape[1]) * self.cached


class GoingOn(Keeping):
    """Each forward makes its numbers of those of the one before."""

    def table(self, x: Tensor) -> Tensor:
        self.made = torch.ones(WIDTH) if self.made is None else self.made + 1.0
        return self.made


class EveryOther(Keeping):
    """Every other forward forgets it."""

    def table(self, x: Tensor) -> Tensor:
        self.made = torch.ones(WIDTH) if self.made is None else None
        return x.new_ones(WIDTH) if self.made is None else self.made + 1.0


class OnceOfSamples(Keeping):
    """All forwards compute with what the first has made of its samples."""

    def table(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = x.detach().mean((0, 1))
        return self.made


class OnceOfParameters(Keeping):
    def table(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = self.linear.weight.detach().sum(0)
        return self.made


OTHERS = (OfSamples, OfParameters, OfChance, WrittenOfSamples, OtherOnceWarm, Counting)


class Model(nn.Module):
    def __init__(self, cls: type[Keeping]) -> None:
        super().__init__()
        self.layers = nn.Sequential(cls(), cls())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def workload(cls: type[Keeping]) -> Workload:
    items = [{"x": torch.randn(LENGTH, WIDTH)} for _ in range(SAMPLES)]
    return Workload("keeping", [Task("t", Model(cls), SAMPLES, items)], (cls,))


@pytest.mark.parametrize("cls", TABLES)
def test_what_is_made_of_sizes_alone_is_no_reason_not_to_split(cls: type[Keeping]) -> None:
    (task,) = analyse(workload(cls)).tasks.values()
    assert [(op.coupled, op.changes) for op in task.ops[:2]] == [(False, ()), (False, ())]


@pytest.mark.parametrize("cls", TABLES)
def test_nothing_without_values_stays_in_a_cache(cls: type[Keeping]) -> None:
    made = workload(cls)
    analyse(made)
    (task,) = made.tasks
    (layer, _) = task.module.layers
    assert layer.cached == 2 and layer.rows.shape == (2, WIDTH) and layer.made is None
    assert not (layer.kept or layer._hidden or SHARED or InTheClass.tables)
    assert not remembered.cache_info().currsize and not Remembered.of.cache_info().currsize
    found = layer(torch.zeros(2, LENGTH, WIDTH))
    assert type(found) is Tensor and not isinstance(found, FakeTensor) and not found.is_meta
    clear()


class Between(nn.Module):
    """Its layers are given a table that is made between them, in a module that is no operator."""

    def __init__(self, cls: type[Keeping]) -> None:
        super().__init__()
        self.a, self.b, self.tables = Block(WIDTH), Block(WIDTH), cls()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * self.tables.table(x)).square().mean()


class InForward(nn.Module):
    """The table is the model's own; `asks`: how forward finds out that it has to make one."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.a, self.b, self.asks = Block(WIDTH), Block(WIDTH), asks
        self.register_buffer("rows", torch.zeros(2, WIDTH), persistent=False)
        self.cached, self.made = 2, None

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        h = self.a(x)
        if self.asks == "a counter":
            if count > self.cached:
                self.register_buffer("rows", made(count), persistent=False)
                self.cached = count
            return self.b(h * self.rows[:count]).square().mean()
        if self.made is None or len(self.made) < count or self.made.device != x.device:
            self.made = made(count).to(x.device)
        return self.b(h * self.made[:count]).square().mean()


def between(net: Callable[[], nn.Module]) -> Workload:
    torch.manual_seed(0)
    items = Items(x=(LENGTH, WIDTH))
    return Workload("between", [Task("t", net(), SAMPLES, items)], (Block,))


@pytest.mark.parametrize("cls", TABLES)
def test_tables_between_operators_are_those_of_plain_pytorch(cls: type[Keeping]) -> None:
    assert_steps_as_plain(lambda: between(partial(Between, cls)), 2)
    (task,) = analyse(between(partial(Between, cls))).tasks.values()
    assert [op.target for op in task.ops] == ["a", "b"] and not task.ops[0].coupled
    clear()


@pytest.mark.parametrize("asks", ["a counter", "the table"])
def test_a_table_that_forward_makes_itself_is_that_of_plain_pytorch(asks: str) -> None:
    assert_steps_as_plain(lambda: between(partial(InForward, asks)), 2)


@pytest.mark.parametrize("cls", [OtherOnceWarm, Counting])
def test_what_goes_on_between_operators_is_no_table(cls: type[Keeping]) -> None:
    with pytest.raises(WorkloadError, match=r"sets self\.cached of .* reads what an earlier one has"):
        analyse(between(partial(Between, cls)))


@pytest.mark.parametrize("cls", [GoingOn, EveryOther, OnceOfSamples, OnceOfParameters])
def test_a_tensor_that_another_run_would_make_otherwise_is_no_table(cls: type[Keeping]) -> None:
    with pytest.raises(
        WorkloadError, match=r"computes .* with what an earlier forward has left in self\.made"
    ):
        analyse(between(partial(Between, cls)))


def clear() -> None:
    SHARED.clear()
    InTheClass.tables.clear()
    remembered.cache_clear()
    Remembered.of.cache_clear()


@pytest.mark.parametrize("cls", OTHERS)
def test_what_is_made_of_samples_parameters_or_chance_is_not_split(cls: type[Keeping]) -> None:
    (task,) = analyse(workload(cls)).tasks.values()
    assert [op.coupled for op in task.ops[:2]] == [True, True]


def test_what_was_kept_before_is_there_afterwards() -> None:
    layer, kept = Hidden(), torch.ones(1)
    layer._hidden["tables"][3] = kept
    SHARED[5] = kept
    with watching(layer) as changes:
        layer._hidden["tables"].clear()
        layer._hidden["others"][1] = torch.zeros(1)
        SHARED[6] = torch.zeros(1)
    assert list(layer._hidden) == ["tables"] and layer._hidden["tables"] == {3: kept}
    assert list(SHARED) == [5] and SHARED[5] is kept
    assert changes.counted == ["_hidden"]
    clear()


@pytest.mark.parametrize("is_of_users", [True, False])
def test_what_hooks_note_goes_but_for_what_this_package_notes_itself(is_of_users: bool) -> None:
    """It looks at how layers are called by hooks of its own, and reads what these have noted afterwards."""

    def note(noted: list[int], *given: object) -> None:
        noted.append(len(given))

    if not is_of_users:
        note.__module__ = "spindle_cli.operators"
    layer, noted = nn.Linear(2, 2), [0]
    layer.register_forward_hook(partial(note, noted))
    with watching(layer) as changes:
        layer(torch.zeros(1, 2))
        assert noted == [0, 3]
    assert noted == ([0] if is_of_users else [0, 3])
    assert bool(changes) == is_of_users


def asked() -> None:
    """Has no attributes at first."""


def asked_before() -> None:
    """Has one."""


def asked_as_well() -> None:
    """Comes by the name of another."""


def test_functions_of_the_file_get_their_attributes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time, and also one that another has come in the place of."""
    functions: tuple[Any, ...] = (asked, asked_before)
    monkeypatch.setitem(vars(asked_before), "calls", 1)
    layer = InAnObject()
    for one, other in (functions, functions, (asked_as_well, asked_before)):
        monkeypatch.setitem(globals(), "asked", one)
        with watching(layer) as changes:
            one.calls, other.calls = 1, 2
        noted = [name.rpartition(".")[2] for name in sorted(changes.elsewhere)]
        assert noted == [one.__name__, "asked_before"]
        assert not vars(one) and other.calls == 1
        with watching(layer) as changes:
            pass
        assert not changes


class OfTheFile:
    """No code of a layer names it."""

    count = 0


def test_a_class_of_the_file_that_a_layer_does_not_name_gets_its_values_back() -> None:
    layer = InAnObject()
    for _ in range(2):
        with watching(layer) as changes:
            OfTheFile.count = 1
        assert [name.rpartition("OfTheFile")[2] for name in changes.elsewhere] == [".count"]
        assert OfTheFile.count == 0


def test_an_object_of_the_file_gets_its_attributes_back() -> None:
    layer: Any = InAnObject()
    before: Callable[[], object] = lambda: (layer.store.last, dict(layer.store.tables))  # noqa: E731
    assert before() == (None, {})
    with watching(layer):
        layer(torch.zeros(2, LENGTH, WIDTH))
        assert layer.store.last is not None
    assert before() == (None, {})
