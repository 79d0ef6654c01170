"""Gathers: where each bucket lies, and when one of several broadcasts is through."""

from __future__ import annotations

import threading
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


class Message:
    """A message that is through as soon as `arrive` is called, and is never waited for twice."""

    def __init__(self) -> None:
        self._through = threading.Event()
        self._was_waited_for = False

    def arrive(self) -> None:
        self._through.set()

    def wait(self, _: Any) -> bool:
        assert not self._was_waited_for
        self._was_waited_for = True
        assert self._through.wait(60)
        return True


class Lost:
    """A message to a rank that is gone."""

    def wait(self, _: Any) -> bool:
        raise RuntimeError("connection closed")


def test_a_gather_is_through_when_every_message_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three ranks takes the others' ranges of 2, and sends each of them its own."""
    begun: dict[tuple[str, int], tuple[list[float], Message]] = {}

    def isend(own: torch.Tensor, *, group: object, group_dst: int, tag: int) -> Message:
        begun["to", group_dst] = own.tolist(), Message()
        return begun["to", group_dst][1]

    def irecv(other: torch.Tensor, *, group: object, group_src: int, tag: int) -> Message:
        begun["from", group_src] = other.tolist(), Message()
        return begun["from", group_src][1]

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    work = start_gather(torch.arange(6.0), Members(3, 1, None))
    own = [2.0, 3.0]
    assert {way: values for way, (values, _) in begun.items()} == {
        ("from", 0): [0.0, 1.0],
        ("from", 2): [4.0, 5.0],
        ("to", 0): own,
        ("to", 2): own,
    }
    future = work.get_future()
    *early, last = (message for _, message in begun.values())
    for message in early:
        message.arrive()
    assert not work.is_completed()
    assert not future.done()
    last.arrive()
    work.wait()
    future.wait()
    assert work.is_completed()
    work.wait()


def test_whoever_waits_for_a_gather_of_a_lost_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "isend", lambda *_, **__: Lost())
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: Lost())
    work = start_gather(torch.arange(4.0), Members(2, 0, None))
    with pytest.raises(RuntimeError, match="connection closed"):
        work.get_future().wait()
    with pytest.raises(RuntimeError, match="connection closed"):
        work.wait()


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
