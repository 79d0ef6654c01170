"""Batches that another process loads: the same samples in the same order, let go in time, and why not."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from helpers import data_toys
from helpers.loading import SEED, read, task_of
from spindle_cli.errors import InputError, PeerLostError, RunFailedError, WorkerLostError, WorkloadError
from spindle_cli.runtime.loading import wire
from spindle_cli.runtime.loading.packed import PackedBatch
from spindle_cli.runtime.loading.reader import ClosedError, Loaded, PrefetchBuffer
from spindle_cli.runtime.loading.start import _state_of
from spindle_cli.runtime.loading.wire import Failure
from spindle_cli.training.batches import Batches
from spindle_cli.training.data.reading import StreamBatches
from spindle_cli.workload.settings.types import Loading


class OfItsSeed(IterableDataset[dict[str, torch.Tensor]]):
    """Samples of the number that torch has given the worker to draw by."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        assert worker is not None
        while True:
            yield {"x": torch.tensor([worker.seed])}


def test_what_workers_draw_by_is_not_what_their_parent_has_drawn() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with read(task_of(OfItsSeed()), range(1), workers=1) as (taker,):
            found.append(taker.rows(0, 0, 4)["x"].tolist())
    assert found[0] == found[1]


def packed(*values: float) -> Loaded:
    return Loaded(PackedBatch.of({"x": torch.tensor(values)}), None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.complex64])
def test_a_packed_batch_has_every_field_as_it_was(dtype: torch.dtype) -> None:
    batch = {
        "a": torch.arange(15).reshape(5, 3).to(dtype),
        "empty": torch.zeros(5, 0),
        "b": torch.rand(3, 5).T,
    }
    made = PackedBatch.of(batch)
    for first, last in ((0, 5), (1, 3), (4, 5)):
        rows = made.rows(first, last)
        assert rows.keys() == batch.keys()
        for name, value in batch.items():
            assert rows[name].dtype == value.dtype
            assert torch.equal(rows[name], value[first:last])
    assert made.rows(0, 2, ["b"]).keys() == {"b"}
    made.close()


def test_fields_begin_where_kernels_read_them_at_full_speed() -> None:
    made = PackedBatch.of(
        {
            "a": torch.zeros(65, dtype=torch.uint8),
            "b": torch.zeros(1),
            "c": torch.zeros(0),
            "d": torch.zeros(2),
        }
    )
    assert [field.offset for field in made.fields] == [0, 128, 192, 192]
    made.close()


def test_a_batch_goes_through_a_pickle_of_processes_without_its_values() -> None:
    value = torch.rand(1000, 100)
    data = bytes(ForkingPickler.dumps(PackedBatch.of({"x": value})))
    assert len(data) < 2000
    assert torch.equal(pickle.loads(data).rows(0, 1000)["x"], value)


def test_rows_are_copies() -> None:
    made = PackedBatch.of({"x": torch.zeros(2)})
    made.rows(0, 2)["x"] += 1
    assert made.rows(0, 2)["x"].tolist() == [0, 0]
    made.close()


def test_a_batch_is_let_go_when_all_takers_have_asked_for_a_later_one() -> None:
    buffer = PrefetchBuffer(5, 3, range(2))
    first, second = packed(1), packed(2)
    buffer.put(first)
    buffer.put(second)
    assert buffer.take(0, 5) is first and buffer.take(0, 6) is second
    assert first.batch.rows(0, 1)["x"].tolist() == [1]  # the other taker has not had it
    assert buffer.take(1, 5) is first
    assert buffer.take(1, 6) is second
    with pytest.raises(OSError):
        os.fstat(first.batch.descriptor)
    buffer.leave(0)
    buffer.leave(1)
    with pytest.raises(OSError):
        os.fstat(second.batch.descriptor)


def test_a_prefetch_buffer_holds_as_many_batches_as_it_has_room_for() -> None:
    buffer = PrefetchBuffer(0, 2, range(1))
    buffer.put(packed(0))
    buffer.put(packed(1))
    putting = threading.Thread(target=buffer.put, args=(packed(2),), daemon=True)
    putting.start()
    buffer.take(0, 0)
    putting.join(0.2)
    assert putting.is_alive()
    buffer.take(0, 1)
    putting.join(120)
    assert not putting.is_alive()
    buffer.leave(0)
    with pytest.raises(ClosedError):
        buffer.put(packed(3))


def test_a_taker_that_has_gone_holds_nobody_up() -> None:
    buffer = PrefetchBuffer(0, 1, range(2))
    buffer.put(packed(0))
    buffer.take(0, 0)
    buffer.leave(1)
    buffer.take(0, 0)
    putting = threading.Thread(target=buffer.put, args=(packed(1),), daemon=True)
    putting.start()
    assert isinstance(buffer.take(0, 1), Loaded)
    buffer.leave(0)


def test_batches_before_a_failure_are_handed_out() -> None:
    buffer = PrefetchBuffer(0, 3, range(1))
    first, failure = packed(0), Failure("why", None, "RunFailedError")
    buffer.put(first)
    buffer.fail(failure)
    assert buffer.take(0, 0) is first
    assert buffer.take(0, 1) is failure
    buffer.leave(0)


def test_the_other_side_gone_is_no_answer() -> None:
    one, other = socket.socketpair()
    wire.ask(one, 2**40)
    assert wire.receive_request(other) == 2**40
    made = PackedBatch.of({"x": torch.tensor([1.0, 2.0])})
    wire.send_answer(other, {"fields": made.to_json()}, made.descriptor)
    made.close()
    answer = wire.receive_answer(one)
    assert answer is not None and answer[1] is not None
    received = PackedBatch.from_json(answer[1], answer[0]["fields"])
    assert received.rows(1, 2)["x"].tolist() == [2.0]
    received.close()
    wire.send_answer(other, {"failure": {}}, None)
    assert wire.receive_answer(one) == ({"failure": {}}, None)
    other.close()
    assert wire.receive_answer(one) is None
    one.close()


def test_what_ours_raises_keeps_its_kind_and_what_users_raise_has_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = Failure.of("t", WorkloadError("bad items", hint="do so")).raised()
    assert (type(ours), ours.message, ours.hint) == (WorkloadError, "bad items", "do so")
    assert type(Failure.of("t", PeerLostError("gone")).raised()) is RunFailedError
    try:
        data_toys.ByIndex(fails_at=2)[2]
    except ValueError as error:
        error.add_note("at sample 2")
        theirs = Failure.of("t", error).raised()
    assert type(theirs) is RunFailedError
    assert "data_toys.py:" in theirs.message
    assert theirs.message.endswith(
        "task 't': its dataset raised ValueError: sample 2 is broken\n  at sample 2"
    )
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_and_draws_are_those_of_one_process(workers: int) -> None:
    task = task_of(data_toys.ByIndex())
    plain = Batches(task, SEED)
    with read(task, range(3, 9), workers, takers=2) as (one, other):
        for number in range(3, 9):  # over the end of the first of its epochs of 5
            expected = plain.rows(number, 0, 4)
            assert torch.equal(one.rows(number, 1, 3, ["x"])["x"], expected["x"][1:3])
            assert torch.equal(other.rows(number, 0, 4)["y"], expected["y"])
            assert torch.equal(one.rows(number, 0, 1)["x"], expected["x"][:1])
        assert one.state is None and not one.draws


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [data_toys.Stream(), data_toys.Stateful()], ids=["stream", "stateful"])
def test_a_stream_goes_on_where_it_was_with_the_same_draws(dataset: Any, workers: int) -> None:
    task = task_of(dataset)
    plain = StreamBatches(task, SEED, Loading(workers, 2))
    expected = [plain.rows(number, 0, 4) for number in range(9)]
    with read(task, range(6), workers) as (one,):
        for number in range(3):
            assert torch.equal(one.rows(number, 0, 4)["x"], expected[number]["x"])
        state = one.state
        one.rows(3, 0, 4)
    assert state is not None and state["workers"] == workers
    with read(task, range(3, 9), workers, state=state) as (one,):
        for number in range(3, 9):  # into the next epoch
            assert torch.equal(one.rows(number, 0, 4)["x"], expected[number]["x"]), number
    with read(task, range(3, 9), workers) as (one,):  # without a state: read from its beginning
        assert torch.equal(one.rows(3, 0, 4)["x"], expected[3]["x"])


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_tell_the_epoch_of_every_batch_that_they_load_ahead(workers: int) -> None:
    class Curriculum(data_toys.ByIndex):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"epoch": torch.tensor(self.epoch)}

    with read(task_of(Curriculum(9)), range(3, 11), workers, takers=2) as takers:  # 2 steps an epoch
        for number in range(3, 11):
            for taker in takers:
                assert taker.rows(number, 0, 4)["epoch"].tolist() == [number // 2] * 4


def test_a_stream_read_by_another_number_of_workers_is_not_gone_on_with() -> None:
    states = {"t": {"workers": 2}}
    assert _state_of(task_of([]), states, 2) == {"workers": 2}
    assert _state_of(task_of([]), {}, 1) is None
    with pytest.raises(InputError, match=r"read by 2 loader workers .* now says 3"):
        _state_of(task_of([]), states, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_raises_is_told_to_every_taker_when_its_batch_is_taken(workers: int) -> None:
    order = Batches(task_of(data_toys.ByIndex()), SEED)
    task = task_of(data_toys.ByIndex(fails_at=order.indices(2)[1]))
    with read(task, range(4), workers, takers=2) as takers:
        for taker in takers:
            taker.rows(0, 0, 4)
            taker.rows(1, 0, 4)
            with pytest.raises(RunFailedError, match=r"data_toys.py:\d+: task 't': its dataset raised Val"):
                taker.rows(2, 0, 4)


def test_a_reader_that_is_killed_is_named_by_its_parent_alone() -> None:
    with read(task_of(data_toys.ByIndex(decode_s=0.05)), range(4), takers=2) as (one, other):
        assert one._child is not None
        os.kill(one._child, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=r"loads its batches \(process \d+\) was killed by SIGKILL"):
            one.rows(3, 0, 4)
        with pytest.raises(PeerLostError, match="lost contact with the process that loads task 't'"):
            other.rows(3, 0, 4)


def test_workers_that_read_the_same_samples_are_refused() -> None:
    with (
        read(task_of(data_toys.Stream(sharded=False)), range(4), workers=2) as (one,),
        pytest.raises(WorkloadError, match="several loader workers read the same samples of the stream"),
    ):
        one.rows(0, 0, 4)
        one.rows(1, 0, 4)


@pytest.mark.parametrize(
    ("dataset", "number", "message"),
    [
        (data_toys.Stream(3), 0, "ends before it has given a batch of 4 samples"),
        (
            data_toys.Stream(9, once=True),
            2,
            r"gives no batch of 4 samples when it is read again \(pass 2\)",
        ),
    ],
)
def test_a_stream_without_another_batch_is_one_message(dataset: Any, number: int, message: str) -> None:
    with read(task_of(dataset), range(4)) as (one,), pytest.raises(WorkloadError, match=message):
        for each in range(number + 1):
            one.rows(each, 0, 4)


def test_workers_end_with_their_reader() -> None:
    with read(task_of(data_toys.ByIndex(decode_s=0.05)), range(4), workers=2) as (one,):
        one.rows(0, 0, 4)
        assert one._child is not None
        children = children_of(one._child)
        assert len(children) == 2
        os.kill(one._child, signal.SIGKILL)
        until = time.monotonic() + 120
        while any(map(is_alive, children)) and time.monotonic() < until:
            time.sleep(0.01)
        assert not any(map(is_alive, children))


def children_of(process: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(process).children()]


def is_alive(process: int) -> bool:
    import psutil

    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_samples_of_a_stream_draw_otherwise_at_each_place() -> None:
    class Noise(data_toys.Stream):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for _ in range(8):
                yield {"x": torch.rand(1)}

    batches = StreamBatches(task_of(Noise()), SEED)
    drawn = torch.cat([batches.rows(number, 0, 4)["x"] for number in range(4)])
    assert drawn.unique().numel() == 16  # in the second pass too


def test_a_stream_goes_on_in_the_pass_that_it_was_in() -> None:
    task = task_of(data_toys.Stateful())
    plain = StreamBatches(task, SEED)
    expected = [plain.rows(number, 0, 4)["x"] for number in range(6)]  # a pass has 5
    with read(task, range(6, 8), state=plain.state) as (one,):
        assert torch.equal(one.rows(6, 0, 4)["x"], plain.rows(6, 0, 4)["x"])
    assert not torch.equal(expected[0], expected[5])


class SharedEpoch(data_toys.Stream):
    """As a dataset of Hugging Face: one epoch for all processes, which is set by adding what is missing."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        missing = epoch - self._epoch
        time.sleep(0.2)
        self._epoch += missing
        time.sleep(0.2)
        self.epoch = int(self._epoch)


def test_workers_do_not_set_an_epoch_that_they_share() -> None:
    """Two of them at once would end with twice of it."""
    datasets = SharedEpoch(), data_toys.Stream()
    batches, alone = (StreamBatches(task_of(dataset), SEED, Loading(2, 2)) for dataset in datasets)
    for number in range(6):  # a pass has 4
        assert torch.equal(batches.rows(number, 0, 4)["x"], alone.rows(number, 0, 4)["x"])
