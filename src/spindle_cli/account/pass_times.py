"""When passes run, with the messages between them.

Compute and messages overlap. A device moves one thing at a time inside its node, and a network card one
between nodes. What has been computed is sent as soon as its takers hold buffers for it, a few passes ahead of
theirs (`program/transfers.py`), the earliest first. Over NCCL, which carries what a device posts one after
another, all that one pass sends another starts together, when all of its ways are free; over gloo each way
carries its part when it is free itself.

Times have the unit of the durations: seconds for a prediction, whole nanoseconds for a program's clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from spindle_cli.account.activations import EARLY_BYTES, opened_at
from spindle_cli.account.traffic import Exchange, sides_of
from spindle_cli.account.types import Pass
from spindle_cli.costs.links import transfer_s
from spindle_cli.files.cluster import Cluster

Card: TypeAlias = tuple[int, int]  # (node, card of the node)
# A device's way to others of its node, or a network card; and which of two that carry messages beside each
# other: out and in, or what either half of the devices sends (`account/traffic.py`).
Way: TypeAlias = tuple[int | Card, int]


class Busy(NamedTuple):
    """A card has a message under way."""

    start_s: float
    end_s: float
    card: Card


@dataclass(frozen=True)
class Move:
    """An exchange between two passes, and how long it keeps ways busy. Passes are numbered: the forward ones
    as their slices, behind them the backward ones.

    Attributes:
        is_small: its takers hold buffers for it from the start.
        at_once: it starts on all ways together.
        busy_s: by ways.
    """

    sender: int
    taker: int
    is_small: bool
    at_once: bool
    busy_s: tuple[tuple[Way, float], ...]


@dataclass(frozen=True)
class PassTimes:
    """A run of all passes.

    Attributes:
        start_s, end_s: of passes, the forward ones first.
        free_s: when each device is through with all.
        on_cards: when messages are under way between nodes.
    """

    start_s: list[float]
    end_s: list[float]
    free_s: list[float]
    on_cards: list[Busy]


class PassRunner:
    """Runs the passes of some slices, as often as asked to."""

    def __init__(
        self, order: Sequence[Pass], devices: Sequence[Sequence[int]], num_devices: int, moves: Sequence[Move]
    ) -> None:
        """`order`: of all passes. `devices`: of each slice."""
        self._order, self._devices, self._num_devices, self._moves = order, devices, num_devices, moves
        num_passes = 2 * len(devices)
        self._sent_by: list[list[int]] = [[] for _ in range(num_passes)]
        self._taken_by: list[list[int]] = [[] for _ in range(num_passes)]
        openers = self._openers()
        self._opener_of: list[int | None] = []  # of each move
        for number, move in enumerate(moves):
            self._opener_of.append(None if move.is_small else openers[move.taker])
            self._sent_by[move.sender].append(number)
            self._taken_by[move.taker].append(number)

    def _openers(self) -> list[int | None]:
        """For each pass, the pass with the start of which all of its devices hold buffers for what it takes:
        of those a few before it on one of them the last in order; None: they do from the start.
        """
        run_on: list[list[int]] = [[] for _ in range(self._num_devices)]
        openers: list[int | None] = [None] * (2 * len(self._devices))
        place_of: dict[int, int] = {}
        for place, (index, is_backward) in enumerate(self._order):
            this = index + len(self._devices) * is_backward
            place_of[this] = place
            first = {
                passes[opened_at(len(passes))]
                for device in self._devices[index]
                if (passes := run_on[device])
            }
            openers[this] = max(first, key=place_of.__getitem__, default=None)
            for device in self._devices[index]:
                run_on[device].append(this)
        return openers

    def run(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        not_before_s: Mapping[int, float],
        posted_s: Sequence[float] | None = None,
    ) -> PassTimes:
        """All passes in their order.

        Args:
            forward_s, backward_s: how long each slice's passes take.
            not_before_s: when slices may start their forward pass at the earliest.
            posted_s: when each move may be sent at the earliest.
        """
        count = len(self._devices)
        run = _Run.of(2 * count, len(self._moves), self._num_devices, posted_s)
        for index, is_backward in self._order:
            this = index + count * is_backward
            devices = self._devices[index]
            self._send_until(max((run.sent_s[number] for number in self._taken_by[this]), default=-1), run)
            there_s = [run.free_s[device] for device in devices]
            there_s += [run.arrived_s[number] for number in self._taken_by[this]]
            earliest_s = 0 if is_backward else not_before_s.get(index, 0)
            run.start_s[this] = max(earliest_s, *there_s)
            run.end_s[this] = run.start_s[this] + (backward_s if is_backward else forward_s)[index]
            for device in devices:
                run.free_s[device] = run.end_s[this]
            self._send_from(this, run)
        return PassTimes(run.start_s, run.end_s, run.free_s, run.ways.on_cards)

    def _send_until(self, last_s: float, run: _Run) -> None:
        """Send what can be sent by some time, what can be sent first before the others."""
        while run.waiting and run.waiting[0][0] <= last_s:
            ready_s, number = heapq.heappop(run.waiting)
            run.arrived_s[number] = _arrive(self._moves[number], ready_s, run.ways)

    def _send_from(self, this: int, run: _Run) -> None:
        """Let what has been held back for the start of a pass wait to be sent, and what the pass has made, or
        hold that back for the start of another one.
        """
        run.has_begun[this] = True
        for number in run.held_back.pop(this, ()):
            run.sent_s[number] = max(run.sent_s[number], run.start_s[this])
            heapq.heappush(run.waiting, (run.sent_s[number], number))
        for number in self._sent_by[this]:
            run.sent_s[number] = max(run.sent_s[number], run.end_s[this])
            opener = self._opener_of[number]
            if opener is not None and not run.has_begun[opener]:
                run.held_back.setdefault(opener, []).append(number)
                continue
            if opener is not None:
                run.sent_s[number] = max(run.sent_s[number], run.start_s[opener])
            heapq.heappush(run.waiting, (run.sent_s[number], number))


@dataclass
class _Ways:
    """When each way is free. `on_cards`: what has gone over network cards."""

    free_s: dict[Way, float] = field(default_factory=dict)
    on_cards: list[Busy] = field(default_factory=list)


@dataclass(frozen=True)
class _Run:
    """A run of all passes under way.

    Attributes:
        start_s, end_s: of passes, the forward ones first.
        free_s: when each device is free.
        arrived_s: of moves; `sent_s`: when each is sent at the earliest, as far as that is known.
        has_begun: of passes.
        held_back: moves that have been computed, by the pass that they wait for.
        waiting: a heap of (can be sent at, move).
        ways: when each is free.
    """

    start_s: list[float]
    end_s: list[float]
    free_s: list[float]
    arrived_s: list[float]
    sent_s: list[float]
    has_begun: list[bool]
    held_back: dict[int, list[int]]
    waiting: list[tuple[float, int]]
    ways: _Ways

    @classmethod
    def of(cls, num_passes: int, num_moves: int, num_devices: int, posted_s: Sequence[float] | None) -> _Run:
        """The begin of a run. Whole numbers, so that runs of whole numbers stay such."""
        return cls(
            start_s=[0] * num_passes,
            end_s=[0] * num_passes,
            free_s=[0] * num_devices,
            arrived_s=[0] * num_moves,
            sent_s=[0] * num_moves if posted_s is None else list(posted_s),
            has_begun=[False] * num_passes,
            held_back={},
            waiting=[],
            ways=_Ways(),
        )


def moves_of(
    activations: Iterable[Exchange],
    gradients: Iterable[Exchange],
    cluster: Cluster,
    num_slices: int,
    time: Callable[[float], float] = float,
) -> list[Move]:
    """All exchanges between passes, those of activations first.

    Args:
        time: from seconds to the times of a run.
    """
    activations, gradients = tuple(activations), tuple(gradients)
    times: dict[tuple[int, bool], float] = {}  # of a message, by bytes and whether inside a node
    pairs = (
        (message.source, message.destination)
        for exchange in (*activations, *gradients)
        for message in exchange.messages
    )
    sides = sides_of(pairs) if cluster.talks_by == "nccl" else {}
    return [
        *(_move(exchange, cluster, times, sides, time) for exchange in activations),
        *(_move(exchange, cluster, times, sides, time, num_slices) for exchange in gradients),
    ]


def _move(
    exchange: Exchange,
    cluster: Cluster,
    times: dict[tuple[int, bool], float],
    sides: Mapping[int, int],
    time: Callable[[float], float],
    offset: int = 0,
) -> Move:
    """Work out which ways an exchange keeps busy, and for how long.

    Args:
        times: of messages that have been worked out, by bytes and whether they stay inside a node.
        sides: the half of each device, over NCCL (`account/traffic.py`).
        offset: of the numbers of passes: nothing forward, the number of slices backward.
    """
    node_of, card_of = cluster.node_of, cluster.card_of
    one_kind = cluster.has_one_kind_of_links
    at_once = cluster.talks_by == "nccl"
    out_s: dict[Way, float] = {}
    in_s: dict[Way, float] = {}
    received: dict[int, int] = {}
    for source, destination, num_bytes in exchange.messages:
        inside = node_of[source] == node_of[destination]
        if not one_kind:
            taken_s = time(transfer_s(num_bytes, cluster.link(source, destination)))
        else:
            if (num_bytes, inside) not in times:
                times[num_bytes, inside] = time(transfer_s(num_bytes, cluster.link(source, destination)))
            taken_s = times[num_bytes, inside]
        ports: tuple[int | Card, ...] = (source, destination)
        if not inside:
            ports = card_of[source], card_of[destination]
        # A card that several devices share carries what one sends beside what another one receives.
        ways: list[Way] = [
            (port, sides[source] if at_once and _is_of_one(port, cluster) else way)
            for way, port in enumerate(ports)
        ]
        out_s[ways[0]] = out_s.get(ways[0], 0) + taken_s
        in_s[ways[1]] = in_s.get(ways[1], 0) + taken_s
        received[destination] = received.get(destination, 0) + num_bytes
    busy_s = {way: max(out_s.get(way, 0), in_s.get(way, 0)) for way in (*out_s, *in_s)}
    is_small = max(received.values(), default=0) <= EARLY_BYTES
    return Move(exchange.sender + offset, exchange.taker + offset, is_small, at_once, tuple(busy_s.items()))


def _is_of_one(port: int | Card, cluster: Cluster) -> bool:
    """Whether what goes through a port is one device's alone."""
    return isinstance(port, int) or cluster.cards_of_node[port[0]] >= cluster.node_sizes[port[0]]


def _arrive(move: Move, ready_s: float, ways: _Ways) -> float:
    """When all of a move that can start at `ready_s` has arrived; its ways are busy meanwhile."""
    free_s = ways.free_s
    if move.at_once:
        ready_s = max([ready_s, *(free_s.get(way, 0) for way, _ in move.busy_s)])
    arrived_s = ready_s
    for way, seconds in move.busy_s:
        start_s = max(ready_s, free_s.get(way, 0))
        end_s = free_s[way] = start_s + seconds
        arrived_s = max(arrived_s, end_s)
        if isinstance(way[0], tuple):
            ways.on_cards.append(Busy(start_s, end_s, way[0]))
    return arrived_s
