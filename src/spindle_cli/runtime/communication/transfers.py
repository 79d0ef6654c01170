"""Chunks on their way between slices: posted as the program says, put together where they are needed.

Activations and gradients differ only in their direction: an *arrival* is the share of one edge's values that
this rank takes, with the chunks it comes in. Chunks that this rank holds itself are never sent. Both ends
post the messages of a transfer in the same order, with the same tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spindle_cli.account.activations import WHOLE, Chunk, part_of, route
from spindle_cli.errors import PeerLostError
from spindle_cli.operators.tensor_group import TensorGroup, as_sent, fill_with_nothing, unless_nothing
from spindle_cli.program.types import Transfer
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.rows import Samples, empty_share, take_rows
from spindle_cli.runtime.communication.wiring import WiredEdge, Wiring
from spindle_cli.workload.graph import ValueSpec

if TYPE_CHECKING:
    from torch import Tensor

# (value, samples) -> what this rank holds of it; None: of a gradient that has not come
Held = Callable[[ValueSpec, Samples], "Tensor | None"]
Part = tuple[int, int]  # of a chunk: (i, n), the i-th of n


class Batch:
    """Messages that start together. With NCCL one work stands for all of them."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def start(self, messages: list[dist.P2POp]) -> None:
        """Start the messages of the batch together."""
        if messages:
            self._works = dist.batch_isend_irecv(messages)

    def wait(self) -> None:
        """Wait for all of them; does nothing the second time, when gloo would wait for ever."""
        for work in self._works:
            wait_for(work)
        self._works.clear()


class Sending:
    """What is sent, kept until it is given up: its memory is needed until it has left.

    Nothing is asked whether it has: gloo's works say so only to who waits for them, and NCCL's to a host that
    is far ahead of its device. With NCCL it is the device that waits, so that what is given up then is taken
    again at the same place in every step.
    """

    def __init__(self) -> None:
        self._batches: dict[int, tuple[Batch, list[Tensor]]] = {}  # by the first key
        self._first_keys: dict[int, int] = {}  # of the batch, by each of its keys

    def add(self, batch: Batch, tensors: list[Tensor], keys: Sequence[int]) -> None:
        """Keep the tensors of a batch of messages with these keys."""
        self._batches[keys[0]] = batch, tensors
        self._first_keys.update(dict.fromkeys(keys, keys[0]))

    def give_up(self, keys: Iterable[int]) -> None:
        """Wait until the messages with these keys have left, with those that started together with them."""
        for first in dict.fromkeys(self._first_keys.pop(key) for key in keys):
            if first in self._batches:
                self._batches.pop(first)[0].wait()

    def finish(self) -> None:
        """Wait until all that was posted has left this rank."""
        for batch, _ in self._batches.values():
            batch.wait()
        self._batches.clear()
        self._first_keys.clear()


@dataclass
class _Incoming:
    """A message under way: `view` is where it belongs, `buffer` where it lands (the same where memory
    allows). `first`: the first of its samples. `batch`: that it was started in. `parts`: of one that is a
    part, the memory of `buffer` with room behind it, so that all parts are equal.
    """

    view: Tensor
    buffer: Tensor
    first: int
    batch: Batch
    parts: Tensor | None = None


@dataclass
class Arrival:
    """This rank's share of one value that comes over an edge, until it is complete.

    `samples`: of the share. `chunks`: all it is put together from, this rank's own included. `may_lack`: it
    is a gradient that need not come.
    """

    spec: ValueSpec
    samples: Samples
    chunks: tuple[Chunk, ...]
    rank: int
    device: torch.device
    may_lack: bool = False
    under_way: list[_Incoming] = field(default_factory=list)
    share: Tensor | None = None

    def make_room(self, samples: Samples, batch: Batch, part: Part = WHOLE) -> Tensor:
        """Where the rows of `samples`, or this part of them, are to land that another rank sends as one of a
        batch.
        """
        if part != WHOLE:
            return self._room_for_part(samples, batch, part)
        view = self._place(samples)
        buffer = (
            view if view.is_contiguous() else torch.empty_like(view, memory_format=torch.contiguous_format)
        )
        self.under_way.append(_Incoming(view, buffer, samples[0], batch))
        return buffer

    def _room_for_part(self, samples: Samples, batch: Batch, part: Part) -> Tensor:
        shape = self.spec.shape_of(samples[1] - samples[0])
        size = prod(shape)
        part_size = -(-size // part[1])
        parts = torch.empty(part[1] * part_size, dtype=self.spec.dtype, device=self.device)
        whole = parts[:size].view(shape)
        is_share = self.spec.batch_dim is None or samples == self.samples
        if is_share and self.spec.batch_dim is not None:
            self.share = whole
        view = whole if is_share else self._place(samples)
        self.under_way.append(_Incoming(view, whole, samples[0], batch, parts))
        return parts[slice(*part_of(size, part))]

    def complete(self, held: Held, *, is_gradient: bool, group: TensorGroup | None = None) -> Tensor | None:
        """Wait for what is under way and add what this rank holds itself: the whole share; None where no
        gradient has come for any of it. What comes in parts is gathered with `group`, the devices that hold
        the same share, chunk by chunk.

        A share that lies in one chunk on this rank is handed on as a view. Chunks of a value without a batch
        dimension are the whole value each: of the copies of several producers' shares the one that comes with
        the share's first sample is taken; gradients from several consumers' shares are added up (see
        `rows.gradient_of_copy`).
        """
        self._receive(group)
        mine = [(chunk.first, chunk.last) for chunk in self.chunks if chunk.source == self.rank]
        local = [held(self.spec, samples) for samples in mine]
        if self.spec.batch_dim is None:
            copies = [(first, tensor) for (first, _), tensor in zip(mine, local, strict=True)]
            return self._sum_of_copies(copies, is_gradient=is_gradient)
        if len(self.chunks) == 1 and local:
            return local[0]
        for samples, tensor in zip(mine, local, strict=True):
            place = self._place(samples)
            fill_with_nothing(place) if tensor is None else place.copy_(tensor)
        assert self.share is not None, "a share of several chunks has been allocated for the first of them"
        return self._come(self.share)

    def _receive(self, group: TensorGroup | None) -> None:
        """Wait for the chunks that other ranks send, and put them in their places, in the order of their
        samples.
        """
        self.under_way.sort(key=lambda incoming: incoming.first)
        for incoming in self.under_way:
            incoming.batch.wait()
            if incoming.parts is not None:
                assert group is not None, "those that are sent parts are a group"
                group.complete(incoming.parts)
            if incoming.buffer is not incoming.view:
                incoming.view.copy_(incoming.buffer)

    def _sum_of_copies(
        self, local: Sequence[tuple[int, Tensor | None]], *, is_gradient: bool
    ) -> Tensor | None:
        """The sum of the chunks of a value without a batch dimension, this rank's and the received ones: all
        gradients that have come, or the one copy of a value that comes with the share's first sample.

        `local`: this rank's, with the first sample of each.
        """
        copies = [*local, *((incoming.first, incoming.view) for incoming in self.under_way)]
        taken = [self._come(copy) for first, copy in copies if is_gradient or first == self.samples[0]]
        come = [copy for copy in taken if copy is not None]
        return torch.stack(come).sum(dim=0) if len(come) > 1 else come[0] if come else None

    def _come(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor, or None where it is a gradient that need not come and stands for none."""
        return unless_nothing(tensor) if self.may_lack and tensor is not None else tensor

    def _place(self, samples: Samples) -> Tensor:
        if self.spec.batch_dim is None:
            return empty_share(self.spec, samples, self.device)
        if self.share is None:
            self.share = empty_share(self.spec, self.samples, self.device)
        return take_rows(self.share, self.spec, self.samples, samples)


class Exchange:
    """All transfers of this rank in one iteration."""

    def __init__(self, wiring: Wiring, rank: int, device: torch.device, communicators: Communicators) -> None:
        self._wiring = wiring
        self._edges = dict(wiring.edges)
        self._communicators = communicators
        self._rank = rank
        self._device = device
        self._routes: dict[_Key, tuple[Samples, tuple[Chunk, ...]]] = {}
        self._arrivals: dict[_Key, tuple[Arrival, ...]] = {}
        self._sending = Sending()

    def carry(self, edges: Mapping[tuple[int, int], WiredEdge]) -> None:
        """From here on these edges carry values of other shapes; every rank at the same batch."""
        self._edges.update(edges)

    def post_receives(self, transfers: Sequence[Transfer], communicator: int) -> None:
        """Start receiving some transfers' chunks of every value that their edges carry, all at once."""
        group = self._communicators.of(communicator)
        batch = Batch()
        messages = [
            dist.P2POp(
                dist.irecv,
                as_sent(room),
                transfer.source,
                group,
                self._tag(transfer, position),
            )
            for transfer in transfers
            for position, arrival in enumerate(
                self._arrivals_of(self._edge(transfer), is_gradient=transfer.is_gradient)
            )
            if (room := arrival.make_room((transfer.first, transfer.last), batch, transfer.part)).numel()
        ]
        batch.start(messages)

    def post_sends(
        self, transfers: Sequence[Transfer], held_of: Callable[[Transfer], Held], communicator: int
    ) -> None:
        """Start sending some transfers' chunks of every value that their edges carry, all at once.

        `held_of`: what this rank holds of what a transfer carries.
        """
        group = self._communicators.of(communicator)
        messages = [
            dist.P2POp(dist.isend, rows, transfer.destination, group, self._tag(transfer, position))
            for transfer in transfers
            for position, rows in enumerate(self._rows(transfer, held_of(transfer)))
            if rows.numel()
        ]
        batch = Batch()
        batch.start(messages)
        tensors = [message.tensor for message in messages]
        self._sending.add(batch, tensors, [transfer.key for transfer in transfers])

    def give_up(self, keys: Iterable[int]) -> None:
        """Wait until what was sent as these transfers has left, and keep it no longer."""
        self._sending.give_up(keys)

    def _rows(self, transfer: Transfer, held: Held) -> list[Tensor]:
        """A transfer's chunk of every value that its edge carries, or its part of them."""
        specs = _carried(self._edge(transfer), is_gradient=transfer.is_gradient)
        samples = (transfer.first, transfer.last)
        rows = [self._sent(held(spec, samples), spec, samples) for spec in specs]
        if transfer.part != WHOLE:
            rows = [tensor.view(-1)[slice(*part_of(tensor.numel(), transfer.part))] for tensor in rows]
        return [as_sent(tensor) for tensor in rows]

    def _sent(self, tensor: Tensor | None, spec: ValueSpec, samples: Samples) -> Tensor:
        if tensor is not None:
            return tensor.detach().to(spec.dtype).contiguous()
        made = empty_share(spec, samples, self._device)
        fill_with_nothing(made)
        return made

    def complete(
        self, wired: WiredEdge, held: Held, *, is_gradient: bool, group: TensorGroup | None
    ) -> dict[str, Tensor]:
        """This rank's share of every value that an edge carries (or of its gradient, if one has come), by
        name. `group`: the devices that hold the same share of what takes it.
        """
        arrivals = self._arrivals_of(wired, is_gradient=is_gradient)
        del self._arrivals[_key(wired, is_gradient)]
        arrived = (
            (arrival.spec.name, arrival.complete(held, is_gradient=is_gradient, group=group))
            for arrival in arrivals
        )
        return {name: share for name, share in arrived if share is not None}

    def finish(self) -> None:
        """Wait until everything that was sent has left; the next iteration starts afresh."""
        self._sending.finish()
        assert not self._arrivals, "everything received was used by a slice of the same iteration"

    def _edge(self, transfer: Transfer) -> WiredEdge:
        return self._edges[transfer.producer, transfer.consumer]

    def _tag(self, transfer: Transfer, position: int) -> int:
        return transfer.key * self._wiring.width + position

    def _arrivals_of(self, wired: WiredEdge, *, is_gradient: bool) -> tuple[Arrival, ...]:
        key = _key(wired, is_gradient)
        if key not in self._arrivals:
            samples, chunks = self._route_of(wired, is_gradient=is_gradient)
            self._arrivals[key] = tuple(
                Arrival(
                    spec,
                    samples,
                    chunks,
                    self._rank,
                    self._device,
                    may_lack=is_gradient and spec.name in wired.may_lack,
                )
                for spec in _carried(wired, is_gradient=is_gradient)
            )
        return self._arrivals[key]

    def _route_of(self, wired: WiredEdge, *, is_gradient: bool) -> tuple[Samples, tuple[Chunk, ...]]:
        """The samples of this rank's share and the chunks it comes in; the same in every iteration."""
        key = _key(wired, is_gradient)
        if key not in self._routes:
            source = self._wiring.slices[wired.edge.producer].layout
            destination = self._wiring.slices[wired.edge.consumer].layout
            if is_gradient:
                source, destination = destination, source
            chunks = tuple(chunk for chunk in route(source, destination) if chunk.destination == self._rank)
            self._routes[key] = (destination.rows_of(self._rank), chunks)
        return self._routes[key]


_Key = tuple[int, int, bool]  # producer, consumer, is_gradient


def _carried(wired: WiredEdge, *, is_gradient: bool) -> tuple[ValueSpec, ...]:
    return wired.differentiable if is_gradient else wired.values


def _key(wired: WiredEdge, is_gradient: bool) -> _Key:
    return wired.edge.producer, wired.edge.consumer, is_gradient


def wait_for(work: dist.Work) -> None:
    """Wait for a message or collective.

    Raises:
        PeerLostError: the other side is gone, or did not answer within the timeout.
    """
    try:
        work.wait()
    except RuntimeError as error:  # torch raises DistBackendError and plain RuntimeErrors alike
        raise PeerLostError(f"lost contact with another worker: {error}") from error
