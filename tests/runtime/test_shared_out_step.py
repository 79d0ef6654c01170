"""What a step does with parameters that are shared out: when they are there, and what is added up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from alone import world_of_one
from torch import nn

from helpers.torch_versions import exchanges_storages
from spindle_cli.account.types import ParameterGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.communication import pass_bucket
from spindle_cli.runtime.communication.collectives import Members
from spindle_cli.runtime.communication.flat_bucket import FrozenBucket
from spindle_cli.runtime.communication.pass_bucket import PassBucket
from spindle_cli.runtime.memory.gather_memory import GatherMemory
from spindle_cli.runtime.step.sharded import BackwardWalk, ForwardWalk, Use, Uses, uses_in


def group_of(index: int, devices: tuple[int, ...]) -> ParameterGroup:
    """Of parameters that one slice uses, in its only op."""
    return ParameterGroup(index, devices, (), 1, 1, (0,), (0,), (0, 1), (0,), Sharding.PARAMETERS)


# In a circle, if each rank began with another one; and one of all.
CIRCLE = tuple(map(group_of, range(5), [(0, 1, 2, 3), (0, 1), (1, 2), (2, 3), (0, 3)]))


@pytest.mark.parametrize("groups", list(permutations(CIRCLE))[::7])
def test_all_ranks_gather_smaller_groups_first_and_equal_ones_by_their_numbers(
    groups: tuple[ParameterGroup, ...],
) -> None:
    """In whichever order a rank comes upon them."""
    pieces = (SimpleNamespace(devices=(0, 1, 2, 3), ops=(0, 1)),)
    program = SimpleNamespace(groups=groups, slices=pieces, reached=(True,))
    pool = SimpleNamespace(in_passes=lambda _, index: (index,))
    found = {rank: uses_in(program, rank, pool, 0)[0] for rank in range(4)}  # type: ignore[arg-type]
    assert {rank: list(uses.from_op(0)) for rank, uses in found.items()} == {
        0: [1, 4, 0],
        1: [1, 2, 0],
        2: [2, 3, 0],
        3: [3, 4, 0],
    }


class Noted:
    """A bucket that notes what is asked of it."""

    def __init__(
        self,
        name: str,
        events: list[str],
        *,
        is_fetched: bool = True,
        is_kept: bool = False,
        is_trained: bool = True,
    ) -> None:
        self.is_fetched, self.is_kept = is_fetched, is_kept
        self._name, self._events, self._is_trained = name, events, is_trained

    @property
    def __class__(self) -> type:  # what isinstance() looks at
        return PassBucket if self._is_trained else FrozenBucket

    def __getattr__(self, what: str):
        return lambda: self._events.append(f"{what} {self._name}")


def walked() -> tuple[Uses, list[str]]:
    """Three ops: a in the first, b in the second, c in all, whole gradients of w alone in the last two."""
    events: list[str] = []
    a, b, c = (Noted(name, events) for name in "abc")
    w = Noted("w", events, is_fetched=False)
    return Uses([Use(a, 4, 4), Use(b, 5, 5), Use(c, 4, 6), Use(w, 5, 6)], (4, 7)), events


def test_forward_fetches_an_op_ahead_and_gives_up_behind_the_last_use() -> None:
    uses, events = walked()
    walk = ForwardWalk(uses)
    expected = {
        4: ["start_fetch a", "start_fetch c", "finish_fetch a", "finish_fetch c", "start_fetch b"],
        5: ["finish_fetch b"],
        6: [],
    }
    given_up = {4: ["give_up a"], 5: ["give_up b"], 6: ["give_up c"]}
    for op in (4, 5, 6):
        walk.enter(op)
        assert events == expected[op]
        events.clear()
        walk.leave(op)
        assert events == given_up[op]
        events.clear()


def kept() -> tuple[Uses, list[str]]:
    """Two ops: a, which is kept, in both, b in the last."""
    events: list[str] = []
    a, b = Noted("a", events, is_kept=True), Noted("b", events)
    return Uses([Use(a, 0, 1), Use(b, 1, 1)], (0, 2)), events


def test_what_is_kept_stays_from_the_forward_pass_to_the_end_of_the_backward_pass() -> None:
    uses, events = kept()
    walk = ForwardWalk(uses, keeps=True)
    walk.through()
    assert events == ["start_keeping a", "finish_fetch a", "start_fetch b", "finish_fetch b", "give_up b"]
    events.clear()
    back = BackwardWalk(uses)
    back.begin()
    back.end()
    assert events == [
        "start_fetch b",
        "open_gradients a",
        "finish_fetch b",
        "open_gradients b",
        "give_up b",
        "start_scatter b",
        "end_keeping a",
        "finish_scatter b",
        "start_scatter a",
        "finish_scatter a",
    ]


def test_what_is_frozen_is_fetched_for_both_passes_and_has_no_gradients() -> None:
    events: list[str] = []
    a, b = Noted("a", events, is_trained=False), Noted("b", events, is_trained=False, is_kept=True)
    uses = Uses([Use(a, 0, 0), Use(b, 0, 1)], (0, 2))
    ForwardWalk(uses, keeps=True).through()
    expected = ["start_fetch a", "start_keeping b", "finish_fetch a", "finish_fetch b", "give_up a"]
    assert events == expected
    events.clear()
    back = BackwardWalk(uses)
    back.begin()
    back.end()
    assert events == ["start_fetch a", "finish_fetch a", "give_up a", "end_keeping b"]


def test_where_no_gradients_come_nothing_is_fetched_backward_nor_kept_for_it() -> None:
    events: list[str] = []
    a = Noted("a", events, is_trained=False, is_kept=True)
    uses = Uses([Use(a, 0, 1, is_reached=False)], (0, 2))
    ForwardWalk(uses, keeps=True).through()
    assert events == ["start_keeping a", "finish_fetch a", "end_keeping a"]
    back = BackwardWalk(uses)
    back.begin()
    back.reach(0)
    back.end()
    assert events[3:] == []


def test_in_an_evaluation_nothing_is_kept() -> None:
    uses, events = kept()
    ForwardWalk(uses).through()
    assert events == [
        "start_keeping a",
        "finish_fetch a",
        "start_fetch b",
        "finish_fetch b",
        "end_keeping a",
        "give_up b",
    ]


def test_a_share_without_samples_gathers_what_the_others_do() -> None:
    uses, events = walked()
    ForwardWalk(uses).through()
    alone, own = walked()
    walk = ForwardWalk(alone)
    for op in (4, 5, 6):
        walk.enter(op)
        walk.leave(op)
    assert events == own


BACKWARD = [
    "start_fetch c",
    "finish_fetch c",
    "open_gradients c",
    "open_gradients w",
    "start_fetch b",
    # op 6 is through
    "finish_fetch b",
    "open_gradients b",
    "start_fetch a",
    # op 5 is through
    "give_up b",
    "start_scatter b",
    "finish_scatter b",
    "start_scatter w",
    "finish_fetch a",
    "open_gradients a",
    # op 4 is through
    "give_up a",
    "finish_scatter w",
    "start_scatter a",
    "give_up c",
    "finish_scatter a",
    "start_scatter c",
    # the pass is through
    "finish_scatter c",
]


@pytest.mark.parametrize("reached", [(5, 4), (4,), (), (5, 5, 4, 4)])
def test_backward_does_the_same_whichever_gradients_come(reached: tuple[int, ...]) -> None:
    """An op without gradients is gone through with the next, or at the end: the others may have some there.
    One sum at a time is under way.
    """
    uses, events = walked()
    walk = BackwardWalk(uses)
    walk.begin()
    assert events == BACKWARD[:5]
    for op in reached:
        walk.reach(op)
    walk.end()
    assert events == BACKWARD


def test_an_op_is_come_to_when_the_first_gradient_of_what_it_made_is_there() -> None:
    """Op 5 gives two values, of which the later op takes one and the loss the other."""
    uses, _ = walked()
    walk = BackwardWalk(uses)
    come_to: list[int] = []
    walk.reach = come_to.append  # type: ignore[method-assign]
    weight = torch.ones(2, requires_grad=True)
    first = weight * 2
    walk.watch(4, [first])
    one, other = first * 3, first * 5
    walk.watch(5, [one, other, torch.zeros(1)])
    third = one * 7
    walk.watch(6, [third])
    (third.sum() + other.sum()).backward()
    assert come_to[0] == 6
    assert come_to[-1] == 4
    assert set(come_to[1:-1]) == {5}


@pytest.fixture
def world() -> Iterator[None]:
    with world_of_one():
        yield


def bucket_of(sharding: Sharding) -> tuple[PassBucket, nn.Parameter, nn.Parameter]:
    weight, bias = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), nn.Parameter(torch.tensor([5.0]))
    bucket = PassBucket({"weight": weight, "bias": bias}, Members(1, 0, None), sharding, None)
    return bucket, weight, bias


def one_pass(bucket: PassBucket, weight: nn.Parameter, factor: float) -> None:
    """Adds `factor` to each element's gradient of weight, and none to bias'."""
    if bucket.is_fetched:
        bucket.start_fetch()
        bucket.finish_fetch()
    bucket.open_gradients()
    (weight * factor).sum().backward()
    bucket.start_scatter()
    bucket.finish_scatter()
    if bucket.is_fetched:
        bucket.give_up()


def test_parameters_take_memory_while_they_are_fetched_alone(world: None) -> None:
    bucket, weight, bias = bucket_of(Sharding.PARAMETERS)
    assert weight.untyped_storage().nbytes() == 0
    bucket.start_fetch()
    bucket.finish_fetch()
    assert weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert bias.tolist() == [5.0]
    bucket.give_up()
    assert weight.untyped_storage().nbytes() == bias.untyped_storage().nbytes() == 0


def test_what_the_optimizer_has_stepped_is_what_is_fetched_next(world: None) -> None:
    bucket, weight, _ = bucket_of(Sharding.PARAMETERS)
    by_name = {owned.name: owned for owned in bucket.owned_ranges}
    assert by_name["weight"].part == (0, 4)
    with torch.no_grad():
        by_name["weight"].tensor.mul_(10)
    bucket.start_fetch()
    bucket.finish_fetch()
    assert weight.tolist() == [[10.0, 20.0], [30.0, 40.0]]


@exchanges_storages
def test_parameters_are_gathered_into_the_memory_they_are_given_unless_it_is_lent(world: None) -> None:
    """Two buckets with the same place, as if nothing used both at once."""
    (one, weight, _), (other, second, _) = (bucket_of(Sharding.PARAMETERS) for _ in range(2))
    memory = GatherMemory(1024, torch.device("cpu"))
    for bucket in (one, other):
        bucket.gather_into(memory, 512)
    place = memory.flat.data_ptr() + 512
    one.start_fetch()
    one.finish_fetch()
    assert weight.data_ptr() == place
    other.start_fetch()
    other.finish_fetch()
    assert second.data_ptr() != place
    assert weight.tolist() == second.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    one.give_up()
    other.give_up()
    assert weight.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    other.start_fetch()
    other.finish_fetch()
    assert second.data_ptr() == place


def test_what_several_slices_keep_is_gathered_once_and_goes_with_the_last(world: None) -> None:
    bucket, weight, _ = bucket_of(Sharding.KEPT)
    by_name = {owned.name: owned.tensor for owned in bucket.owned_ranges}
    bucket.start_keeping()
    bucket.finish_fetch()
    with torch.no_grad():
        by_name["weight"].mul_(10)  # a second gather would show it
    bucket.start_keeping()
    bucket.finish_fetch()
    bucket.end_keeping()
    assert weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    bucket.end_keeping()
    assert weight.untyped_storage().nbytes() == 0
    bucket.start_keeping()
    bucket.finish_fetch()
    assert weight.tolist() == [[10.0, 20.0], [30.0, 40.0]]


def test_what_nobody_fetches_or_keeps_is_not_waited_for(world: None) -> None:
    bucket, *_ = bucket_of(Sharding.KEPT)
    with pytest.raises(AssertionError, match="a fetch was started"):
        bucket.finish_fetch()


class Alone:
    """The sum over one rank."""

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("sharding", [Sharding.GRADIENTS, Sharding.PARAMETERS])
def test_passes_add_up_and_what_no_pass_has_reached_has_no_gradient(
    world: None, sharding: Sharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_bucket, "start_scatter", lambda flat, members: Alone())
    bucket, weight, bias = bucket_of(sharding)
    one_pass(bucket, weight, 2.0)
    one_pass(bucket, weight, 0.5)
    assert weight.grad is None
    bucket.hand_out([True, False])
    grads = {owned.name: owned.tensor.grad for owned in bucket.owned_ranges}
    assert grads["weight"].tolist() == [2.5] * 4
    assert grads["bias"] is None
    bucket.gather_gradients()
    assert weight.grad.tolist() == [[2.5, 2.5], [2.5, 2.5]]
    assert bias.grad is None
    bucket.reset()
    one_pass(bucket, weight, 1.0)
    bucket.hand_out([True, True])
    grads = {owned.name: owned.tensor.grad for owned in bucket.owned_ranges}
    assert grads["weight"].tolist() == [1.0] * 4
    assert grads["bias"].tolist() == [0.0]


def test_parameters_whose_gradients_alone_are_shared_out_stay_there(world: None) -> None:
    bucket, weight, _ = bucket_of(Sharding.GRADIENTS)
    assert weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert not bucket.is_gathering
    bucket.start_gather()
    assert bucket.is_gathering
    bucket.finish_gather()
    assert not bucket.is_gathering
    assert weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_what_autograd_has_kept_of_parameters_is_there_again(world: None) -> None:
    """A view that the forward pass has saved, given up between the passes."""
    bucket, weight, _ = bucket_of(Sharding.PARAMETERS)
    bucket.start_fetch()
    bucket.finish_fetch()
    value = torch.ones(1, 2, requires_grad=True)
    made = value @ weight.t()
    bucket.give_up()
    bucket.start_fetch()
    bucket.finish_fetch()
    bucket.open_gradients()
    made.sum().backward()
    assert value.grad.tolist() == [[4.0, 6.0]]
    assert weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
