"""Every chunk that one device sends to another in an iteration, in the one order that all devices follow,
and the communicators that a program needs.

A transfer has a time: when its data is made, but no earlier than two passes before the one that takes it on
its receiver, so that few buffers are held; small ones may come as early as they are made. Times order them.
What is made while its receiver is in a backward pass may have its place behind that pass instead: a device
posts what comes in a pass ahead of it, and sums that start inside of the pass would have to wait for it.

Communicators are as few as keep what may not share one apart:

* One of everyone, for what all devices sum.
* Two for messages, activations and gradients alike: the devices that send any are told in two halves, and
  each sends over that of its own half. Messages of one communicator go one after another, so that one that
  waits for its other end holds up those behind it. As far as no two of one half exchange any, a device's
  sends are not held up by what it waits to receive. They take no more memory than any other two that all
  messages go over.
* One for each set of devices that sums gradients; none beside that of everyone for the set of all. Where they
  do so by nodes, one for those of each node, and one for those of the same place in all of these nodes.
* One for each set of devices that gathers parameters, or sums gradients, inside of passes: beside that for
  the sums of whole gradients, which start between them.
* One for each tensor-parallel group, and one for each set of devices whose shares sum the statistics of batch
  norms, even where the same devices sum gradients: those sums start while a pass runs, between the sums that
  the pass itself takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from spindle_cli.account.activations import (
    EARLY_BYTES,
    HandedOver,
    Layout,
    edge_bytes,
    handed_over,
    opened_at,
)
from spindle_cli.account.traffic import find_communicator_ranks, peers_bytes
from spindle_cli.account.types import Edge, ParameterGroup, Purpose
from spindle_cli.costs.links import collectives_bytes
from spindle_cli.plan.types import Plan
from spindle_cli.program.clock import Compute, PassClock
from spindle_cli.program.types import Communicator, Kind, Program, Transfer


@dataclass(frozen=True)
class TimedTransfer:
    """A transfer and when both of its ends post it, in ticks of the program's clock."""

    time: int
    transfer: Transfer


def find_transfers(plan: Plan, layouts: tuple[Layout, ...], edges: tuple[Edge, ...]) -> list[Transfer]:
    """All transfers of an iteration, without their keys.

    Args:
        plan: what is planned.
        layouts: of the plan's slices.
        edges: between them.
    """
    return [
        transfer
        for is_gradient in (False, True)
        for edge in edges
        for transfer in _of_edge(plan, layouts, edge, is_gradient=is_gradient)
    ]


def gathering_s(
    plan: Plan, layouts: Sequence[Layout], edges: Iterable[Edge]
) -> dict[int, tuple[float, float]]:
    """For slices that are sent anything in parts, the seconds that their forward and backward passes gather
    it.
    """
    gather_times: dict[int, tuple[float, float]] = {}
    for edge in edges:
        for is_gradient, taker in ((False, edge.consumer), (True, edge.producer)):
            gather_s = _handed_over(plan, layouts, edge, is_gradient=is_gradient).gather_s
            if gather_s:
                forward_s, backward_s = gather_times.get(taker, (0.0, 0.0))
                more = (0.0, gather_s) if is_gradient else (gather_s, 0.0)
                gather_times[taker] = forward_s + more[0], backward_s + more[1]
    return gather_times


def in_order(
    transfers: Sequence[Transfer],
    clock: PassClock,
    computes: Mapping[int, Sequence[Compute]],
    sums_inside: Mapping[int, int] | None = None,
) -> tuple[TimedTransfer, ...]:
    """All transfers of an iteration in the order of their times, `key` ascending.

    Args:
        found: all of them.
        clock: of the passes.
        computes: by device, in the order in which it runs them.
        sums_inside: of slices, when the first sum may start inside of their backward pass: what comes in that
            pass later than this has its place behind the pass.
    """
    times = _receive_times(transfers, clock, computes)
    if sums_inside:
        ends = {device: [clock.end(compute) for compute in passes] for device, passes in computes.items()}
        for number, transfer in enumerate(transfers):
            passes, device = computes[transfer.destination], transfer.destination
            place = bisect_right(ends[device], times[number])
            if place < len(passes) and passes[place][0] is Kind.BACKWARD:
                since = sums_inside.get(passes[place][1])
                if since is not None and clock.start(passes[place]) < since <= times[number]:
                    times[number] = ends[device][place]
    timed = sorted(
        zip(times, transfers, strict=True),
        key=lambda entry: (entry[0], entry[1].is_gradient, clock.start(taker_of(entry[1]))),
    )
    return tuple(
        TimedTransfer(time, replace(transfer, key=key)) for key, (time, transfer) in enumerate(timed)
    )


def maker_of(transfer: Transfer) -> Compute:
    """The pass that makes what is transferred."""
    if transfer.is_gradient:
        return Kind.BACKWARD, transfer.consumer
    return Kind.FORWARD, transfer.producer


def taker_of(transfer: Transfer) -> Compute:
    """The pass that takes what is transferred."""
    if transfer.is_gradient:
        return Kind.BACKWARD, transfer.producer
    return Kind.FORWARD, transfer.consumer


def _of_edge(plan: Plan, layouts: tuple[Layout, ...], edge: Edge, *, is_gradient: bool) -> list[Transfer]:
    """The chunks that cross devices in one direction, without their keys."""
    return [
        Transfer(
            key=0,
            producer=edge.producer,
            consumer=edge.consumer,
            source=send.source,
            destination=send.destination,
            first=send.first,
            last=send.last,
            is_gradient=is_gradient,
            num_bytes=send.num_bytes,
            part=send.part,
        )
        for send in _handed_over(plan, layouts, edge, is_gradient=is_gradient).sends
    ]


def _handed_over(plan: Plan, layouts: Sequence[Layout], edge: Edge, *, is_gradient: bool) -> HandedOver:
    ends = layouts[edge.producer], layouts[edge.consumer]
    source, destination = ends[::-1] if is_gradient else ends
    num_bytes = edge_bytes(plan.slices[edge.producer], edge, plan.by_name)
    return handed_over(source, destination, num_bytes, plan.cluster)


def _receive_times(
    transfers: Sequence[Transfer], clock: PassClock, computes: Mapping[int, Sequence[Compute]]
) -> list[int]:
    """When each transfer is made, or when its receiver may post it, whichever is later."""
    taken: dict[int, dict[Compute, int]] = {}  # bytes by receiver and taker
    for transfer in transfers:
        by_taker = taken.setdefault(transfer.destination, {})
        taker = taker_of(transfer)
        by_taker[taker] = by_taker.get(taker, 0) + transfer.num_bytes
    opens = {device: _opening_times(computes[device], taken[device], clock) for device in taken}
    return [
        max(clock.end(maker_of(transfer)), opens[transfer.destination][taker_of(transfer)])
        for transfer in transfers
    ]


def _opening_times(
    computes: Sequence[Compute], taken: Mapping[Compute, int], clock: PassClock
) -> dict[Compute, int]:
    """From when on a device may hold buffers for what each of its passes takes: from the start of the pass so
    many before it, or of an earlier one while all that is taken after that one is small.
    """
    opening: dict[Compute, int] = {}
    first, ahead = 0, 0  # what passes first + 1 to place take
    for place, compute in enumerate(computes):
        ahead += taken.get(compute, 0) if place else 0
        while first < opened_at(place) and ahead > EARLY_BYTES:
            first += 1
            ahead -= taken.get(computes[first], 0)
        if compute in taken:
            opening[compute] = clock.start(computes[min(first, place - 1)]) if place else 0
    return opening


def find_communicators(
    num_devices: int,
    transfers: Sequence[Transfer],
    groups: Iterable[ParameterGroup],
    layouts: Iterable[Layout],
) -> tuple[Communicator, ...]:
    """All communicators, in the order in which every device makes them."""
    pairs = ((transfer.source, transfer.destination) for transfer in transfers)
    all_ranks = find_communicator_ranks(num_devices, pairs, groups, layouts)
    return tuple(Communicator(index, *ranks) for index, ranks in enumerate(all_ranks))


def communicator_memory(program: Program, device: int) -> dict[int, int]:
    """Bytes of a device's memory that each of its communicators takes, by index; nothing on gloo."""
    cluster = program.plan.cluster
    peers: dict[int, set[int]] = {}
    for action in program.actions[device]:
        if action.transfer is not None and action.communicator is not None:
            peer = action.transfer.source + action.transfer.destination - device
            peers.setdefault(action.communicator, set()).add(peer)
    joined = [communicator for communicator in program.communicators if device in communicator.ranks]
    if cluster.talks_by == "gloo":
        return {communicator.index: 0 for communicator in joined}
    return {
        communicator.index: peers_bytes(device, peers.get(communicator.index, ()), cluster)
        if communicator.purpose is Purpose.MESSAGES
        else collectives_bytes(communicator.ranks, cluster)
        for communicator in joined
    }


class Directory:
    """Communicators by what they are for and whose they are."""

    def __init__(self, communicators: Iterable[Communicator]) -> None:
        self._of: dict[tuple[Purpose, tuple[int, ...]], int] = {}
        self._sent_by: dict[int, int] = {}
        self._everyone = 0
        for communicator in communicators:
            if communicator.purpose is not Purpose.MESSAGES:
                self._of[communicator.purpose, communicator.ranks] = communicator.index
            if communicator.purpose is Purpose.EVERYONE:
                self._everyone = communicator.index
            self._sent_by |= dict.fromkeys(communicator.senders, communicator.index)

    def of_all(self) -> int:
        """Return the communicator of all devices."""
        return self._everyone

    def of_transfer(self, transfer: Transfer) -> int:
        """Return the communicator that a transfer goes over."""
        return self._sent_by[transfer.source]

    def of_sum(self, devices: tuple[int, ...]) -> int:
        """Return the communicator over which these devices, ascending, sum gradients."""
        index = self._of.get((Purpose.SUMS, devices))
        return self._of[Purpose.EVERYONE, devices] if index is None else index

    def of_shards(self, devices: tuple[int, ...]) -> int:
        """What these devices, ascending, gather parameters and sum gradients over inside of passes."""
        return self._of[Purpose.SHARDS, devices]

    def of_share(self, layout: Layout, share: int) -> int | None:
        """What the passes of a share sum over inside; None where they sum nothing."""
        partners = layout.partners(share)
        if not partners:
            return None
        purpose = Purpose.STATISTICS if layout.sums_shares else Purpose.TENSOR
        return self._of[purpose, tuple(sorted(partners))]
