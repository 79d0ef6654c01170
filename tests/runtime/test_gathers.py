"""Gathers: where each bucket lies, and when one of several broadcasts is through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from alone import world_of_one
from torch import nn

from helpers.torch_versions import exchanges_storages
from spindle_cli.account.types import ParameterGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.communication import bucket_maker
from spindle_cli.runtime.communication.bucket_maker import lay_out
from spindle_cli.runtime.communication.collectives import Members, start_gather
from spindle_cli.runtime.communication.pass_bucket import PassBucket
from spindle_cli.runtime.step.sharded import ForwardWalk, Use, Uses


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def used_by(index: int, op: int, sharding: Sharding) -> ParameterGroup:
    """By one op of one slice."""
    return ParameterGroup(index, (0, 1), (), 1, 1, (0,), (op,), (0, 1), (op,), sharding)


def bucket_of(num_elements: int, sharding: Sharding) -> PassBucket:
    weight = nn.Parameter(torch.arange(float(num_elements)))
    return PassBucket({"weight": weight}, Members(1, 0, None), sharding, None)


def address_of(bucket: PassBucket) -> int:
    """Where its parameters are gathered."""
    bucket.start_fetch()
    bucket.finish_fetch()
    address = bucket.parameters[0].data_ptr()
    bucket.give_up()
    return address


@exchanges_storages
def test_what_two_ops_in_a_row_use_lies_apart_and_what_is_kept_elsewhere() -> None:
    """Four ops, of 256, 128, 512 and 128 elements; the last one's are kept. Backward groups come first."""
    levels = [Sharding.PARAMETERS] * 3 + [Sharding.KEPT]
    sizes = (256, 128, 512, 128)
    buckets = {3 - op: (bucket_of(sizes[op], levels[op]),) for op in range(4)}
    groups = [used_by(3 - op, op, levels[op]) for op in (3, 2, 1, 0)]
    memory = lay_out(groups, buckets)
    assert memory is not None
    assert memory.flat.nbytes == 4 * (512 + 128)
    begin = memory.flat.data_ptr()
    places = [address_of(buckets[3 - op][0]) - begin for op in range(4)]
    assert places[:3] == [0, 2048, 0]
    assert not 0 <= places[3] < memory.flat.nbytes


def test_nothing_is_set_apart_where_nothing_is_gathered() -> None:
    group = used_by(0, 0, Sharding.GRADIENTS)
    assert lay_out([group], {0: (bucket_of(4, Sharding.GRADIENTS),)}) is None


def test_what_one_slice_keeps_another_that_needs_no_gradients_leaves_there() -> None:
    """A frozen tower of two tasks, of which one trains something before it, and runs backward later."""
    bucket = bucket_of(4, Sharding.KEPT)
    (weight,) = bucket.parameters
    keeping, passing = (
        Uses([Use(bucket, 0, 0, is_reached=is_reached)], (0, 1)) for is_reached in (True, False)
    )
    for _ in range(2):
        ForwardWalk(keeping, keeps=True).through()
        ForwardWalk(passing, keeps=True).through()
        assert weight.tolist() == [0.0, 1.0, 2.0, 3.0]
        bucket.end_keeping()
        assert weight.untyped_storage().nbytes() == 0
        ForwardWalk(passing, keeps=True).through()
        assert weight.untyped_storage().nbytes() == 0


class Slow:
    """A broadcast that ends when it is waited for."""

    def __init__(self) -> None:
        self.is_through = False
        self.future: torch.futures.Future[None] = torch.futures.Future()

    def wait(self, _: Any) -> bool:
        if not self.is_through:
            self.future.set_result(None)
        self.is_through = True
        return True

    def is_completed(self) -> bool:
        return self.is_through

    def get_future(self) -> torch.futures.Future[None]:
        return self.future


def test_a_gather_is_through_when_all_have_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three ranks its range of 2."""
    begun: list[tuple[int, list[float], Slow]] = []

    def broadcast(own: torch.Tensor, *, group: object, group_src: int, async_op: bool) -> Slow:
        assert async_op
        begun.append((group_src, own.tolist(), Slow()))
        return begun[-1][2]

    monkeypatch.setattr(dist, "broadcast", broadcast)
    work = start_gather(torch.arange(6.0), Members(3, 1, None))
    assert [each[:2] for each in begun] == [(0, [0.0, 1.0]), (1, [2.0, 3.0]), (2, [4.0, 5.0])]
    future = work.get_future()
    begun[0][2].wait(None)
    begun[1][2].wait(None)
    assert not work.is_completed()
    assert not future.done()
    work.wait()
    assert work.is_completed()
    assert future.done()


def test_a_torch_that_cannot_exchange_storages_gathers_into_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket_maker, "EXCHANGES_STORAGES", False)
    buckets = {op: (bucket_of(4, Sharding.PARAMETERS),) for op in range(2)}
    assert lay_out([used_by(op, op, Sharding.PARAMETERS) for op in range(2)], buckets) is None
    for (bucket,) in buckets.values():
        bucket.start_fetch()
        bucket.finish_fetch()
        assert bucket.parameters[0].tolist() == [0.0, 1.0, 2.0, 3.0]
        bucket.give_up()
        assert bucket.parameters[0].untyped_storage().nbytes() == 0
