"""The forward and backward pass of a placed schedule, with the messages between its slices.

Compute and messages overlap. A device moves one thing at a time inside its node, and a network card one
between nodes. What has been computed is sent as soon as its takers hold buffers for it, a few passes ahead of
theirs (`program/transfers.py`), the earliest first. Over NCCL, which carries what a device posts one after
another, all that one pass sends another starts together, when all of its ways are free; over gloo each way
carries its part when it is free itself. Where devices are processors that communicate and read samples
themselves, their slices take longer for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spindle_cli.account.activations import EARLY_BYTES, opened_at, pass_order
from spindle_cli.account.compute import slice_stretches
from spindle_cli.account.traffic import Exchange, Traffic, sides_of
from spindle_cli.costs.beyond_curve import Stalls, stalls
from spindle_cli.costs.links import transfer_s
from spindle_cli.costs.shares import OpSeconds, times_of_shares
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.placing.card_loads import Busy, Card
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.types import Slice

# A device's way to others of its node, or a network card: (node, card of the node); and which of two that
# carry messages beside each other: out and in, or what either half of the devices sends
# (`account/traffic.py`).
_Way = tuple[int | Card, int]


@dataclass(frozen=True)
class Times:
    """Start and end of each slice's pass, by index, and when each device is through with all."""

    start_s: list[float]
    end_s: list[float]
    free_s: list[float]


@dataclass(frozen=True)
class BothPasses:
    """`forward_starts_s`: of each slice's forward pass. `forward_ended_s`: when the last one has ended.
    `on_cards`: when messages are under way between nodes.
    """

    forward_starts_s: list[float]
    forward_ended_s: float
    backward: Times
    on_cards: list[Busy]


@dataclass(frozen=True)
class _Move:
    """An exchange between two passes, and the seconds that it keeps ways busy. Passes are numbered: the
    forward ones as their slices, behind them the backward ones.

    `is_small`: its takers hold buffers for it from the start. `at_once`: it starts on all ways together.
    """

    sender: int
    taker: int
    is_small: bool
    at_once: bool
    busy_s: tuple[tuple[_Way, float], ...]


class Passes:
    """Both passes of some slices, as often as they are asked for."""

    def __init__(self, problem: Problem, slices: Sequence[Slice], traffic: Traffic) -> None:
        self._slices = slices
        self._num_devices = problem.num_devices
        self._order = pass_order(traffic.plan, traffic.edges)
        self._moves = _moves(problem, traffic, len(slices))
        self._sent_by: list[list[int]] = [[] for _ in range(2 * len(slices))]
        self._taken_by: list[list[int]] = [[] for _ in range(2 * len(slices))]
        openers = self._openers()
        self._opener_of: list[int | None] = []  # of each move
        for number, move in enumerate(self._moves):
            self._opener_of.append(None if move.is_small else openers[move.taker])
            self._sent_by[move.sender].append(number)
            self._taken_by[move.taker].append(number)
        forward_s, backward_s = _passes_s(problem, slices)
        stretches = slice_stretches(
            problem.profile.processor,
            problem.num_devices,
            slices,
            [sum(both) for both in zip(forward_s, backward_s, strict=True)],
            problem.profile.by_name,
            traffic.messages(),
            traffic.collectives,
            problem.profile.accumulate,
        )
        for sent, passes_s in ((traffic.activations, forward_s), (traffic.gradients, backward_s)):
            for exchange in sent:
                passes_s[exchange.taker] += exchange.gather_s
        self._alone_s = forward_s, backward_s
        self.is_stretched = any(times != 1.0 for times in stretches)
        self.forward_s = [seconds * times for seconds, times in zip(forward_s, stretches, strict=True)]
        self._backward_s = [seconds * times for seconds, times in zip(backward_s, stretches, strict=True)]

    def _openers(self) -> list[int | None]:
        """For each pass, the pass with the start of which all of its devices hold buffers for what it takes:
        of those a few before it on one of them the last in order; None: they do from the start.
        """
        run_on: list[list[int]] = [[] for _ in range(self._num_devices)]
        openers: list[int | None] = [None] * (2 * len(self._slices))
        place_of: dict[int, int] = {}
        for place, (index, is_backward) in enumerate(self._order):
            this = index + len(self._slices) * is_backward
            place_of[this] = place
            first = {
                passes[opened_at(len(passes))]
                for device in self._slices[index].devices
                if (passes := run_on[device])
            }
            openers[this] = max(first, key=place_of.__getitem__, default=None)
            for device in self._slices[index].devices:
                run_on[device].append(this)
        return openers

    def run(self, not_before_s: Mapping[int, float]) -> BothPasses:
        """All passes in their order.

        Args:
            not_before_s: when slices may start their forward pass at the earliest.
        """
        return self._run(self.forward_s, self._backward_s, not_before_s)

    def without_processor_s(self) -> float:
        """Seconds of both, were there other processors to communicate and to read samples."""
        return max(self._run(*self._alone_s, {}).backward.free_s)

    def _run(
        self, forward_s: Sequence[float], backward_s: Sequence[float], not_before_s: Mapping[int, float]
    ) -> BothPasses:
        count = len(self._slices)
        run = _Run.of(2 * count, len(self._moves), self._num_devices)
        forward_ended_s = 0.0
        for index, is_backward in self._order:
            this = index + count * is_backward
            devices = self._slices[index].devices
            self._send_until(max((run.sent_s[number] for number in self._taken_by[this]), default=-1.0), run)
            there_s = [run.free_s[device] for device in devices]
            there_s += [run.arrived_s[number] for number in self._taken_by[this]]
            earliest_s = 0.0 if is_backward else not_before_s.get(index, 0.0)
            run.start_s[this] = max(earliest_s, *there_s)
            run.end_s[this] = run.start_s[this] + (backward_s if is_backward else forward_s)[index]
            if not is_backward:
                forward_ended_s = max(forward_ended_s, run.end_s[this])
            for device in devices:
                run.free_s[device] = run.end_s[this]
            self._send_from(this, run)
        backward = Times(run.start_s[count:], run.end_s[count:], run.free_s)
        return BothPasses(run.start_s[:count], forward_ended_s, backward, run.ways.on_cards)

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
            run.sent_s[number] = run.end_s[this]
            opener = self._opener_of[number]
            if opener is not None and not run.has_begun[opener]:
                run.held_back.setdefault(opener, []).append(number)
                continue
            if opener is not None:
                run.sent_s[number] = max(run.sent_s[number], run.start_s[opener])
            heapq.heappush(run.waiting, (run.sent_s[number], number))


@dataclass(frozen=True)
class _Run:
    """A run of both passes under way.

    Attributes:
        start_s, end_s: of passes, the forward ones first.
        free_s: when each device is free.
        arrived_s, sent_s: of moves.
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
    def of(cls, num_passes: int, num_moves: int, num_devices: int) -> _Run:
        """The begin of a run."""
        return cls(
            start_s=[0.0] * num_passes,
            end_s=[0.0] * num_passes,
            free_s=[0.0] * num_devices,
            arrived_s=[0.0] * num_moves,
            sent_s=[0.0] * num_moves,
            has_begun=[False] * num_passes,
            held_back={},
            waiting=[],
            ways=_Ways({}, []),
        )


def _passes_s(problem: Problem, slices: Sequence[Slice]) -> tuple[list[float], list[float]]:
    """Seconds of each slice's forward pass, and of its backward pass, on devices that do nothing else."""
    forward_s: list[float] = []
    backward_s: list[float] = []
    for slice_ in slices:
        op_s = problem.op_s_of(slice_)
        more_s = problem.beyond.op_s(slice_, problem.profile.by_name[slice_.metaop], *op_s)
        waits = _stalls(problem, slice_) if slice_.offload else Stalls()
        forward_s.append(slice_.num_ops * (op_s[0] + more_s[0]) + waits.forward_s)
        backward_s.append(slice_.num_ops * (op_s[1] + more_s[1]) + waits.backward_s)
    return forward_s, backward_s


def _moves(problem: Problem, traffic: Traffic, num_slices: int) -> list[_Move]:
    """All exchanges between passes, those of activations first."""
    cluster = problem.cluster
    seconds: dict[tuple[int, bool], float] = {}  # of a message, by bytes and whether inside a node
    pairs = ((source, destination) for source, destination, _ in traffic.messages())
    sides = sides_of(pairs) if cluster.talks_by == "nccl" else {}
    return [
        *(_move(exchange, cluster, seconds, sides) for exchange in traffic.activations),
        *(_move(exchange, cluster, seconds, sides, num_slices) for exchange in traffic.gradients),
    ]


def _stalls(problem: Problem, slice_: Slice) -> Stalls:
    """How long a slice's passes wait for copies to host memory and back."""
    metaop, cluster, point = problem.profile.by_name[slice_.metaop], problem.cluster, problem.point_of(slice_)
    again_s = point.again * point.forward_s
    op = OpSeconds(point.forward_s, point.backward_s - again_s)
    return stalls(slice_, metaop, cluster, op, times_of_shares(metaop, slice_, cluster))


class _Ways(NamedTuple):
    """When each way is free. `on_cards`: what has gone over network cards."""

    free_s: dict[_Way, float]
    on_cards: list[Busy]


def _move(
    exchange: Exchange,
    cluster: Cluster,
    seconds: dict[tuple[int, bool], float],
    sides: Mapping[int, int],
    offset: int = 0,
) -> _Move:
    """Work out which ways an exchange keeps busy, and for how long.

    Args:
        seconds: of messages that have been worked out, by bytes and whether they stay inside a node.
        sides: the half of each device, over NCCL (`account/traffic.py`).
        offset: of the numbers of passes: nothing forward, the number of slices backward.
    """
    node_of, card_of = cluster.node_of, cluster.card_of
    one_kind = cluster.has_one_kind_of_links
    at_once = cluster.talks_by == "nccl"
    out_s: dict[_Way, float] = {}
    in_s: dict[_Way, float] = {}
    received: dict[int, int] = {}
    for source, destination, num_bytes in exchange.messages:
        inside = node_of[source] == node_of[destination]
        if not one_kind:
            taken_s = transfer_s(num_bytes, cluster.link(source, destination))
        else:
            if (num_bytes, inside) not in seconds:
                seconds[num_bytes, inside] = transfer_s(num_bytes, cluster.link(source, destination))
            taken_s = seconds[num_bytes, inside]
        ports: tuple[int | Card, ...] = (source, destination)
        if not inside:
            ports = card_of[source], card_of[destination]
        # A card that several devices share carries what one sends beside what another one receives.
        ways: list[_Way] = [
            (port, sides[source] if at_once and _is_of_one(port, cluster) else way)
            for way, port in enumerate(ports)
        ]
        out_s[ways[0]] = out_s.get(ways[0], 0.0) + taken_s
        in_s[ways[1]] = in_s.get(ways[1], 0.0) + taken_s
        received[destination] = received.get(destination, 0) + num_bytes
    busy_s = {way: max(out_s.get(way, 0.0), in_s.get(way, 0.0)) for way in (*out_s, *in_s)}
    is_small = max(received.values(), default=0) <= EARLY_BYTES
    return _Move(exchange.sender + offset, exchange.taker + offset, is_small, at_once, tuple(busy_s.items()))


def _is_of_one(port: int | Card, cluster: Cluster) -> bool:
    """Whether what goes through a port is one device's alone."""
    return isinstance(port, int) or cluster.cards_of_node[port[0]] >= cluster.node_sizes[port[0]]


def _arrive(move: _Move, ready_s: float, ways: _Ways) -> float:
    """When all of a move that can start at `ready_s` has arrived; its ways are busy meanwhile."""
    free_s = ways.free_s
    if move.at_once:
        ready_s = max([ready_s, *(free_s.get(way, 0.0) for way, _ in move.busy_s)])
    arrived_s = ready_s
    for way, seconds in move.busy_s:
        start_s = max(ready_s, free_s.get(way, 0.0))
        end_s = free_s[way] = start_s + seconds
        arrived_s = max(arrived_s, end_s)
        if isinstance(way[0], tuple):
            ways.on_cards.append(Busy(start_s, end_s, way[0]))
    return arrived_s
