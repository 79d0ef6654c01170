"""A layer that reads what it kept of an earlier batch stays whole; what is kept otherwise is no matter."""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items


def _hidden_state(layer: Any, y: Tensor) -> Tensor:
    if layer.kept is not None:
        y = y + layer.kept[0]
    layer.kept = (y.detach(), None)
    return y


def _memory_of_equal_shape(layer: Any, y: Tensor) -> Tensor:
    """No share of a sample fails, and none differs where all batches are cut alike."""
    if layer.kept is not None and layer.kept.shape == y.shape:
        y = y + layer.kept
    layer.kept = y.detach()
    return y


def _running_mean(layer: Any, y: Tensor) -> Tensor:
    before = torch.zeros_like(y[0]) if layer.kept is None else layer.kept
    layer.kept = 0.9 * before + 0.1 * y.detach().mean(0)
    return y - before


def _map_for_others(layer: Any, y: Tensor) -> Tensor:
    layer.kept = y.softmax(-1).detach()
    return y


def _angles_that_save_work(layer: Any, y: Tensor) -> Tensor:
    if layer.kept is None:
        layer.kept = torch.arange(y.shape[1], device=y.device)[:, None].cos()
    kept: Tensor = layer.kept
    return y * kept


def _weight_of_before(layer: Any, y: Tensor) -> Tensor:
    """The same in every share; in micro-batches it would be that of the step itself."""
    before = 0.0 if layer.kept is None else layer.kept
    layer.kept = layer.block.linear.weight.detach().sum(0)
    return y + before


def _noise_of_before(layer: Any, y: Tensor) -> Tensor:
    before = 0.0 if layer.kept is None else layer.kept
    layer.kept = torch.randn(y.shape[-1], device=y.device)
    return y + before


def _numbers_of_before(layer: Any, y: Tensor) -> Tensor:
    before = 0.0 if layer.kept is None else layer.kept
    layer.kept = torch.arange(y.shape[-1], device=y.device).to(y)
    return y + 0 * before


CASES: dict[Callable[[Any, Tensor], Tensor], bool] = {
    _hidden_state: True,
    _memory_of_equal_shape: True,
    _running_mean: True,
    _weight_of_before: True,
    _noise_of_before: True,
    _numbers_of_before: False,
    _map_for_others: False,
    _angles_that_save_work: False,
}


class Keeping(nn.Module):
    def __init__(self, keep: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.keep = Block(), keep
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(self, self.block(x))


class Net(nn.Module):
    def __init__(self, keep: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = Block(), Keeping(keep)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out.pow(2).mean()


@pytest.mark.parametrize("keep", CASES, ids=lambda keep: keep.__name__)
def test_a_layer_that_reads_what_it_kept_of_another_batch_stays_whole(
    keep: Callable[[Any, Tensor], Tensor],
) -> None:
    net = Net(keep)
    graph = analysed(Workload("w", [Task("t", net, 6, Items(x=(4, WIDTH)))], (Block, Keeping)))
    coupled = {op.target: op.coupled_because for op in graph.tasks["t"].ops if op.coupled}
    if CASES[keep]:
        of_what = "parameters, or drawn" if keep in (_weight_of_before, _noise_of_before) else "its own batch"
        assert f"reads self.kept, which an earlier one has made of {of_what}" in (coupled["second"] or "")
    else:
        assert coupled == {}
    assert net.second.kept is None


class Memory:
    """A plain class, as people write queues."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []
        self.last: Tensor | None = None
        self.count = 0
        self.bank = torch.zeros(WIDTH)


@dataclass
class Record:
    memory: Memory = field(default_factory=Memory)
    mean: Tensor | None = None


class Slotted:
    """As one that is to be small."""

    __slots__ = ("__weakref__", "items", "last")

    def __init__(self) -> None:
        self.items: list[Tensor] = []


class DerivedFromSlots(Slotted):
    __slots__ = "__mean"  # one name

    @property
    def mean(self) -> Any:
        return getattr(self, "_DerivedFromSlots__mean", 0.0)

    def keep(self, mean: Tensor) -> None:
        self.__mean = mean


class SlotsAndMore(Slotted):
    """Without slots of its own, so with a dict, too."""


@dataclass(slots=True)
class SlottedRecord:
    mean: Any = 0.0
    slots: DerivedFromSlots = field(default_factory=DerivedFromSlots)


@dataclass(slots=True, frozen=True)
class FrozenRecord:
    held: SlottedRecord = field(default_factory=SlottedRecord)
    mean: Any = 0.0


class OwnDict(dict[str, Any]):
    def clear(self) -> None:
        raise AssertionError("no user asks for that")

    def __getitem__(self, key: str) -> Any:
        return {"own": super().__getitem__(key)}


IN_FILE: deque[Tensor] = deque(maxlen=2)
SLOTTED_IN_FILE = SlottedRecord()
CALLS = 0
BY_NAME: dict[str, Tensor] = {}
MEAN: Any = 0.0


def _list_of_an_object(keeper: Any, y: Tensor) -> Any:
    items = keeper.record.memory.items
    found = torch.stack(items).mean(0) if items else 0.0
    items.append(y.detach()[0])
    del items[:-3]
    return found


def _attribute_of_an_object(keeper: Any, y: Tensor) -> Any:
    found = 0.0 if keeper.record.memory.last is None else keeper.record.memory.last
    keeper.record.memory.last = y.detach().mean(0)
    return found


def _noise_in_an_object(keeper: Any, y: Tensor) -> Any:
    found = 0.0 if keeper.record.memory.last is None else keeper.record.memory.last
    keeper.record.memory.last = torch.randn(y.shape[-1], device=y.device)
    return found


def _field_of_a_dataclass(keeper: Any, y: Tensor) -> Any:
    found = 0.0 if keeper.record.mean is None else keeper.record.mean
    keeper.record.mean = y.detach().mean(0)
    return found


def _deque_of_the_file(keeper: Any, y: Tensor) -> Any:
    found = torch.stack(list(IN_FILE)).mean(0) if IN_FILE else 0.0
    IN_FILE.append(y.detach().mean(0))
    return found


def _dict_of_the_file(keeper: Any, y: Tensor) -> Any:
    found = BY_NAME.get("mean", 0.0)
    BY_NAME["mean"] = y.detach().mean(0)
    return found


def _name_of_the_file(keeper: Any, y: Tensor) -> Any:
    global MEAN
    found = MEAN
    MEAN = y.detach().mean(0)
    return found


def _list_of_the_class(keeper: Any, y: Tensor) -> Any:
    found = keeper.of_all[-1] if keeper.of_all else 0.0
    keeper.of_all.append(y.detach().mean(0))
    return found


def _attribute_of_the_class(keeper: Any, y: Tensor) -> Any:
    found = type(keeper).mean
    type(keeper).mean = y.detach().mean(0)
    return found


def _entry_of_a_list(keeper: Any, y: Tensor) -> Any:
    found = keeper.pair[0]
    keeper.pair[0] = y.detach().mean(0)
    return found


def _number_in_a_dict(keeper: Any, y: Tensor) -> Any:
    keeper.counts["n"] += 1
    return y / keeper.counts["n"]


def _number_of_an_object(keeper: Any, y: Tensor) -> Any:
    keeper.record.memory.count += 1
    return y / keeper.record.memory.count


def _variable_of_a_function(keeper: Any, y: Tensor) -> Any:
    return keeper.closure(y)


def _memory_of_a_tensor(keeper: Any, y: Tensor) -> Any:
    found = keeper.record.memory.bank.clone()
    keeper.record.memory.bank.copy_(y.detach().mean(dim=(0, 1)))
    return found


def _slot(keeper: Any, y: Tensor) -> Any:
    found = getattr(keeper.slots.slots, "last", 0.0)
    keeper.slots.slots.last = y.detach().mean(0)
    return found


def _list_in_a_slot(keeper: Any, y: Tensor) -> Any:
    items = keeper.slots.slots.items
    items.append(y.detach().mean(0))
    return items[-2] if len(items) > 1 else 0.0


def _private_slot(keeper: Any, y: Tensor) -> Any:
    found = keeper.slots.slots.mean
    keeper.slots.slots.keep(y.detach().mean(0))
    return found


def _slot_of_a_dataclass(keeper: Any, y: Tensor) -> Any:
    found = keeper.slots.mean
    keeper.slots.mean = y.detach().mean(0)
    return found


def _slot_of_a_frozen_dataclass(keeper: Any, y: Tensor) -> Any:
    found = keeper.frozen.mean
    object.__setattr__(keeper.frozen, "mean", y.detach().mean(0))
    return found


def _slot_that_is_left_empty(keeper: Any, y: Tensor) -> Any:
    found = 0.0
    if hasattr(keeper.more, "last"):
        found = keeper.more.last
        del keeper.more.last
    else:
        keeper.more.last = y.detach().mean(0)
    return found


def _attribute_beside_slots(keeper: Any, y: Tensor) -> Any:
    found = getattr(keeper.more, "mean", 0.0)
    keeper.more.mean = y.detach().mean(0)
    return found


def _slot_in_the_file(keeper: Any, y: Tensor) -> Any:
    found = SLOTTED_IN_FILE.mean
    SLOTTED_IN_FILE.mean = y.detach().mean(0)
    return found


def _list_in_a_tuple(keeper: Any, y: Tensor) -> Any:
    items = keeper.tuple[1]
    items.append(y.detach().mean(0))
    return items[-2] if len(items) > 1 else 0.0


def _dict_of_a_class_of_ones_own(keeper: Any, y: Tensor) -> Any:
    found = keeper.own["mean"]["own"]
    keeper.own["mean"] = y.detach().mean(0)
    return found


def _attribute_of_a_dict(keeper: Any, y: Tensor) -> Any:
    found = getattr(keeper.own, "mean", 0.0)
    keeper.own.mean = y.detach().mean(0)
    return found


def _namespace(keeper: Any, y: Tensor) -> Any:
    found = keeper.namespace.mean
    keeper.namespace.mean = y.detach().mean(0)
    return found


def _counter(keeper: Any, y: Tensor) -> Any:
    keeper.counter["calls"] += 1
    return y / keeper.counter["calls"]


def _array(keeper: Any, y: Tensor) -> Any:
    keeper.array[0] += 1
    return y / float(keeper.array[0])


def _argument_of_a_partial(keeper: Any, y: Tensor) -> Any:
    return keeper.partial(y)


def _remember(state: dict[str, Any], y: Tensor) -> Any:
    found = state.get("mean", 0.0)
    state["mean"] = y.detach().mean(0)
    return found


def _object_of_a_bound_method(keeper: Any, y: Tensor) -> Any:
    return keeper.bound(y)


def _variable_that_is_bound_anew(keeper: Any, y: Tensor) -> Any:
    return keeper.anew(y)


def _default_of_a_method(keeper: Any, y: Tensor) -> Any:
    return keeper.with_default(y)


def _count_of_the_file(keeper: Any, y: Tensor) -> Any:
    global CALLS
    CALLS += 1
    return y / CALLS


def _count_of_the_class(keeper: Any, y: Tensor) -> Any:
    type(keeper).calls += 1
    return y / type(keeper).calls


KEPT = {
    _slot: "self.slots.slots",
    _list_in_a_slot: "self.slots.slots.items",
    _private_slot: "self.slots.slots",
    _slot_of_a_dataclass: "self.slots",
    _slot_of_a_frozen_dataclass: "self.frozen",
    _slot_that_is_left_empty: "self.more",
    _attribute_beside_slots: "self.more",
    _slot_in_the_file: "test_carried.SLOTTED_IN_FILE",
    _list_in_a_tuple: "self.tuple[1]",
    _dict_of_a_class_of_ones_own: "self.own",
    _attribute_of_a_dict: "self.own",
    _namespace: "self.namespace",
    _counter: "self.counter",
    _array: "self.array",
    _argument_of_a_partial: "self.partial",
    _object_of_a_bound_method: "self.bound",
    _variable_that_is_bound_anew: "self.anew: mean",
    _default_of_a_method: "Keeper.with_default's default",
    _count_of_the_file: "test_carried.CALLS",
    _count_of_the_class: "Keeper.calls",
    _list_of_an_object: "self.record.memory.items",
    _attribute_of_an_object: "self.record.memory",
    _noise_in_an_object: "self.record.memory",
    _field_of_a_dataclass: "self.record",
    _deque_of_the_file: "test_carried.IN_FILE",
    _dict_of_the_file: "test_carried.BY_NAME",
    _name_of_the_file: "test_carried.MEAN",
    _list_of_the_class: "Keeper.of_all",
    _attribute_of_the_class: "Keeper.mean",
    _entry_of_a_list: "self.pair",
    _number_in_a_dict: "self.counts",
    _number_of_an_object: "self.record.memory",
    _variable_of_a_function: "self.closure: state",
}


def _table_of_an_object(keeper: Any, y: Tensor) -> Any:
    memory = keeper.record.memory
    if memory.last is None:
        memory.last = torch.arange(y.shape[-1], dtype=torch.float32, device=y.device).cos()
    return memory.last


def _table_of_the_file(keeper: Any, y: Tensor) -> Any:
    key = f"{y.shape[-1]}"
    if key not in BY_NAME:
        BY_NAME[key] = torch.arange(y.shape[-1], dtype=torch.float32, device=y.device).cos()
    return BY_NAME[key]


def _map_in_an_object(keeper: Any, y: Tensor) -> Any:
    keeper.record.mean = y.detach()
    return 0.0


TABLES = (_table_of_an_object, _table_of_the_file, _map_in_an_object)
Keep = Callable[[Any, Tensor], Any]


class Hidden:
    def __init__(self) -> None:
        self.mean: Any = 0.0

    def remember(self, y: Tensor) -> Any:
        found, self.mean = self.mean, y.detach().mean(0)
        return found


class Keeper(nn.Module):
    """Adds what `keep` gives, which keeps something for the next forward."""

    of_all: list[Tensor] = []  # noqa: RUF012 - as people write it
    mean: Any = 0.0
    calls = 0

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.block, self.keep, self.record = Block(), keep, Record()
        self.slots, self.frozen, self.more = SlottedRecord(), FrozenRecord(), SlotsAndMore()
        self.tuple: Any = (0, [])
        self.own, self.namespace = OwnDict(mean=0.0), SimpleNamespace(mean=0.0)
        self.counter, self.array = Counter[str](), np.zeros(2)
        self.partial, self.bound = partial(_remember, {}), Hidden().remember
        self.pair: list[Any] = [0.0, None]
        self.counts = {"n": 0}
        state: dict[str, Any] = {"mean": 0.0}

        def closure(y: Tensor) -> Any:
            found = state["mean"]
            state["mean"] = y.detach().mean(0)
            return found

        mean: Any = 0.0

        def anew(y: Tensor) -> Any:
            nonlocal mean
            found, mean = mean, y.detach().mean(0)
            return found

        def itself() -> Any:
            return itself

        self.closure, self.itself, self.anew = closure, itself, anew

    def with_default(self, y: Tensor, seen: list[Tensor] = []) -> Any:  # noqa: B006 - as people write it
        seen.append(y.detach().mean(0))
        return seen[-2] if len(seen) > 1 else 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y + self.keep(self, y)  # type: ignore[no-any-return]


class Around(nn.Module):
    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.first, self.keeper = Block(), Keeper(keep)

    def forward(self, x: Tensor) -> Tensor:
        return self.keeper(self.first(x)).pow(2).mean()  # type: ignore[no-any-return]


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """What is left in the class and in this file, a test says; the next finds nothing of it."""
    yield
    left = [*IN_FILE, *BY_NAME, *Keeper.of_all, *(Keeper.with_default.__defaults__ or ([],))[0]]
    left += [each for each in (MEAN, Keeper.mean, SLOTTED_IN_FILE.mean, CALLS, Keeper.calls) if each != 0.0]
    assert not left, "analysis has put back what forwards have left"


@pytest.mark.parametrize("keep", [*KEPT, _memory_of_a_tensor], ids=lambda keep: keep.__name__)
def test_a_layer_that_keeps_it_elsewhere_stays_whole_too(keep: Keep, nothing_kept: None) -> None:
    net = Around(keep)
    graph = analysed(Workload("w", [Task("t", net, 6, Items(x=(4, WIDTH)))], (Block, Keeper)))
    held = net.keeper
    assert (held.array.sum(), held.counter["calls"], held.counts["n"], held.pair[0]) == (0, 0, 0, 0.0)
    assert (held.slots.mean, held.frozen.mean, held.namespace.mean, held.own["mean"]["own"]) == (0, 0, 0, 0)
    first, keeper = graph.tasks["t"].ops
    assert not first.coupled and keeper.coupled
    assert KEPT.get(keep, "what it keeps") in (keeper.coupled_because or "")
    assert not first.kept
    kept = KEPT.get(keep, "what it keeps")
    assert any(kept.replace("self.", "keeper.") in name for name in keeper.kept)
    (line,) = graph.kept
    assert line.startswith("task 't': keeper keeps ")
    assert "no checkpoint has" in line and line in graph.notes


@pytest.mark.parametrize("keep", KEPT, ids=lambda keep: keep.__name__)
def test_forward_is_refused_where_it_reads_what_an_earlier_one_has_left(
    keep: Keep, nothing_kept: None
) -> None:
    workload = Workload("w", [Task("t", Around(keep), 6, Items(x=(4, WIDTH)))], (Block,))
    with pytest.raises(WorkloadError, match="what an earlier forward has left in") as raised:
        analysed(workload)
    what = KEPT[keep].replace("self.", "self.keeper.")
    assert f"{what}, of which a trace knows nothing" in raised.value.message
    assert "list its class in the workload's `operators`" in str(raised.value.hint)


def _after_three(keeper: Any, y: Tensor) -> Any:
    keeper.namespace.mean += 1
    return y if keeper.namespace.mean > 3 else 0.5 * y


def _after_three_in_a_list(keeper: Any, y: Tensor) -> Any:
    keeper.tuple[1].append(y.detach())
    return y if len(keeper.tuple[1]) > 3 else 0.5 * y


def _after_three_in_a_dict(keeper: Any, y: Tensor) -> Any:
    keeper.counts["n"] += 1
    return y if keeper.counts["n"] == 3 else 0.5 * y


def _after_three_in_the_file(keeper: Any, y: Tensor) -> Any:
    global CALLS
    CALLS += 1
    return y if CALLS > 3 else 0.5 * y


def _after_three_of_the_class(keeper: Any, y: Tensor) -> Any:
    type(keeper).calls += 1
    return y if keeper.calls > 3 else 0.5 * y


AFTER_THREE = [
    _after_three,
    _after_three_in_a_list,
    _after_three_in_a_dict,
    _after_three_in_the_file,
    _after_three_of_the_class,
]


@pytest.mark.parametrize("keep", AFTER_THREE)
def test_forward_is_refused_where_it_changes_after_some_steps(keep: Keep, nothing_kept: None) -> None:
    """The first forwards compute the same."""
    workload = Workload("w", [Task("t", Around(keep), 6, Items(x=(4, WIDTH)))], (Block,))
    with pytest.raises(WorkloadError, match="what an earlier forward has left in"):
        analysed(workload)


def _counted_everywhere(keeper: Any, y: Tensor) -> Any:
    keeper.namespace.mean += 1
    keeper.counts["n"] += 1
    keeper.tuple[1].append(y.detach())
    keeper.counter["calls"] += 1
    return y


def test_what_goes_on_growing_and_nobody_reads_is_no_matter(nothing_kept: None) -> None:
    net = Around(_counted_everywhere)
    graph = analysed(Workload("w", [Task("t", net, 6, Items(x=(4, WIDTH)))], (Block,)))
    assert not any(op.coupled or op.kept for op in graph.tasks["t"].ops)
    assert (net.keeper.namespace.mean, net.keeper.counts["n"], net.keeper.tuple[1]) == (0.0, 0, [])
    assert net.keeper.counter["calls"] == 0


def _generator(keeper: Any, y: Tensor) -> Any:
    return y * next(keeper.generator)


def _count_without_end(keeper: Any, y: Tensor) -> Any:
    return y * next(keeper.endless)


def _cycle(keeper: Any, y: Tensor) -> Any:
    return y * next(keeper.cycle)


def _iterator_of_a_list(keeper: Any, y: Tensor) -> Any:
    return y * next(keeper.iterator)


def _both(keeper: Any, y: Tensor) -> Any:
    number, factor = next(keeper.both)
    return y * factor / (number + 1)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("keep", [_generator, _count_without_end, _cycle, _iterator_of_a_list, _both])
def test_iterators_that_forward_moves_are_refused(keep: Keep, inside: bool) -> None:
    net = Around(keep)
    net.keeper.generator = (1 + each / 10 for each in range(1000))
    net.keeper.endless = itertools.count(1)
    net.keeper.cycle = itertools.cycle([1.0, 0.5, 0.25])
    net.keeper.iterator = iter([1.0] * 1000)
    net.keeper.both = enumerate(itertools.chain([1.0] * 1000, [0.5]))
    operators = (Block, Keeper) if inside else (Block,)
    with pytest.raises(WorkloadError) as raised:
        analysed(Workload("w", [Task("t", net, 6, Items(x=(4, WIDTH)))], operators))
    said = "from call to call; looking at a forward moves it"
    assert said in raised.value.message
    assert re.match(r".*test_carried\.py:\d+: task 't': forward goes on in self\.", raised.value.message)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("keep", TABLES, ids=lambda keep: keep.__name__)
def test_tables_and_what_nobody_reads_are_no_matter_wherever_they_are(
    keep: Keep, inside: bool, nothing_kept: None
) -> None:
    operators = (Block, Keeper) if inside else (Block,)
    graph = analysed(Workload("w", [Task("t", Around(keep), 6, Items(x=(4, WIDTH)))], operators))
    assert not any(op.coupled for op in graph.tasks["t"].ops)


class Counts(nn.Module):
    """A norm over the batch, beside a part in eval mode and a number that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen, self.calls = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.frozen.eval()
        y: Tensor = self.frozen(self.norm(x))
        return y


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts, self.head = Counts(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.counts(x)).square().mean()  # type: ignore[no-any-return]


def test_a_norm_of_a_layer_that_counts_is_summed_over_shares() -> None:
    """One sample, which is tried too, has too few values for it."""
    graph = analysed(Workload("w", [Task("t", Normed(), 8, Items(x=(WIDTH,)))], (Counts,)))
    (op, *_) = graph.tasks["t"].ops
    assert not op.coupled and op.batch_norms == ("counts.norm",)


class Counted:
    calls = 0


class Notes:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.calls, self.seen, self.last = 0, list[Tensor](), None

    def __call__(self, layer: nn.Module, given: Any, result: Tensor) -> None:
        self.calls += 1
        self.seen.append(result.detach())
        self.last = result


def _note_in(noted: dict[str, Tensor], layer: nn.Module, given: Any, result: Tensor) -> None:
    noted["result"] = result


def _hook_of(kind: str) -> Any:
    counted, sizes, calls = [0], [0], 0

    def counts(layer: nn.Module, given: Any, result: Tensor) -> None:
        nonlocal calls
        counted[0] += 1
        calls += 1
        sizes.append(len(result))

    def after_three(layer: nn.Module, given: Any, result: Tensor) -> Tensor:
        counted[0] += 1
        return result if counted[0] > 3 else 0.5 * result

    def after_three_calls(layer: nn.Module, given: Any, result: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return result if calls > 3 else 0.5 * result

    def after_three_sizes(layer: nn.Module, given: Any, result: Tensor) -> Tensor:
        sizes.append(len(result))
        return result if len(sizes) > 3 else 0.5 * result

    def after_three_of_the_file(layer: nn.Module, given: Any, result: Tensor) -> Tensor:
        Counted.calls += 1
        return result if Counted.calls > 3 else 0.5 * result

    hooks = (counts, after_three, after_three_calls, after_three_sizes, after_three_of_the_file)
    return {hook.__name__: hook for hook in hooks}[kind]


NOTING = {"object": Notes, "partial": lambda: partial(_note_in, {}), "counts": lambda: _hook_of("counts")}
READING = ("after_three", "after_three_calls", "after_three_sizes", "after_three_of_the_file")


def hooked(*hooks: Any) -> list[bool]:
    """Whether each of two layers with these hooks stays whole."""
    net = Around(lambda keeper, y: 0.0)
    for hook, layer in zip(hooks, (net.first, net.keeper), strict=True):
        layer.register_forward_hook(hook)
    graph = analysed(Workload("w", [Task("t", net, 6, Items(x=(4, WIDTH)))], (Block, Keeper)))
    assert Counted.calls == 0
    return [op.coupled for op in graph.tasks["t"].ops[:2]]


@pytest.mark.parametrize("kind", NOTING)
def test_what_hooks_note_and_do_not_read_is_no_matter(kind: str) -> None:
    """As people look at activations: one hook for all layers, or one for each."""
    noting = NOTING[kind]()
    assert hooked(noting, noting) == hooked(NOTING[kind](), NOTING[kind]()) == [False, False]


@pytest.mark.parametrize("kind", READING)
def test_a_layer_whose_hook_reads_what_it_has_noted_stays_whole(kind: str) -> None:
    assert hooked(NOTING["counts"](), _hook_of(kind)) == [False, True]
