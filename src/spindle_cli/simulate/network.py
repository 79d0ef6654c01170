"""The links as a fluid: everything under way moves at once, and slower where it shares a port; and what is
due next.

Every device has a port out and a port in towards its own node, and every network card one out and one in
towards the other nodes. A stream alone moves as costs/links.py says. It *demands*
of each of its ports the share of the port's large-message bandwidth that it would take alone; where the
demands on a port add up to more than 1, all streams through it are slowed down by that sum, and a stream
goes as slowly as its slowest port lets it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spindle_cli.costs.links import per_node, transfer_s
from spindle_cli.costs.parameters import parts_collective_s
from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.units import GB

Event = Callable[[], None]
StillDue = Callable[[], bool]


class Clock:
    """Events by time; those of one time run in the order in which they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Event, StillDue | None]] = []
        self._count = 0

    def at(self, time_s: float, event: Event, still_due: StillDue | None = None) -> None:
        """Let `event` happen at `time_s`, if it is still due then."""
        heapq.heappush(self._due, (time_s, self._count, event, still_due))
        self._count += 1

    def next_moment(self) -> list[Event]:
        """Go on to the next time at which anything is due; all that is due then. Empty at the end.

        What is no longer due takes no time: behind all that happens it would make that last longer.
        """
        events: list[Event] = []
        while self._due and (not events or self._due[0][0] == self.now_s):
            time_s, _, event, still_due = heapq.heappop(self._due)
            if still_due is None or still_due():
                self.now_s = time_s
                events.append(event)
        return events


class Use(NamedTuple):
    """How much of a port a stream would take alone, 0 to 1."""

    port: int
    demand: float


@dataclass(eq=False, slots=True)
class Stream:
    """Something under way. `latency_s` passes first, and loads no port; then `left_s` seconds at full
    rate.
    """

    latency_s: float
    left_s: float
    uses: tuple[Use, ...]
    rate: float = 0.0
    since_s: float = 0.0  # when `left_s` was true
    version: int = 0  # grows whenever the end is expected at another time

    def is_expected(self, version: int) -> bool:
        """Whether it was neither slowed down nor sped up since that end was expected."""
        return self.version == version


class _Message(NamedTuple):
    """A message alone on its link: seconds before and after its first byte, and its demand of the ports."""

    latency_s: float
    left_s: float
    demand: float

    @classmethod
    def of(cls, num_bytes: int, link: Link) -> _Message:
        left_s = max(0.0, transfer_s(num_bytes, link) - link.latency_s)
        if not left_s:
            return cls(0.0, 0.0, 0.0)
        return cls(link.latency_s, left_s, min(1.0, num_bytes / left_s / _peak_bytes_per_s(link)))


@dataclass
class Network:
    """The ports' loads and the streams on them."""

    cluster: Cluster
    _load: dict[int, float] = field(default_factory=dict)
    _streams: dict[int, dict[Stream, None]] = field(default_factory=dict)  # by port, in order of entry
    _changed: dict[Stream, None] = field(default_factory=dict)
    _messages: dict[tuple[int, bool], _Message] = field(default_factory=dict)  # by bytes, inside a node

    def transfer(self, source: int, destination: int, num_bytes: int) -> Stream:
        """One message between two devices."""
        inside = self.cluster.node_of[source] == self.cluster.node_of[destination]
        message = self._messages.get((num_bytes, inside)) if self.cluster.has_one_kind_of_links else None
        if message is None:
            message = _Message.of(num_bytes, self.cluster.link(source, destination))
            self._messages[num_bytes, inside] = message
        if not message.left_s:
            return Stream(0.0, 0.0, ())
        out, into = self._port(source, inside, out=True), self._port(destination, inside, out=False)
        uses = (Use(out, message.demand), Use(into, message.demand))
        return Stream(message.latency_s, message.left_s, uses)

    def collective(
        self,
        devices: Sequence[int],
        num_bytes: int,
        rounds: int,
        weights: Sequence[int] = (),
        *,
        by_node: bool = False,
    ) -> Stream:
        """A sum (2 rounds), scatter or gather (1) over devices: as long as the formula says when alone.

        Inside a node every member passes on what a ring does; between k nodes each node passes on (k-1)/k of
        the bytes a round, over as many cards as it has for its members: these members' own, and then others.

        `weights`: what the devices' parts of a scatter or gather are in proportion to; none: they are equal.
        `by_node`: it goes inside of nodes and between them by itself.
        """
        spread = per_node(devices, self.cluster)
        latency_s = parts_collective_s(1, spread, rounds, self.cluster, by_node=by_node)
        alone_s = parts_collective_s(num_bytes, spread, rounds, self.cluster, weights, by_node=by_node)
        left_s = max(0.0, alone_s - latency_s)
        if not left_s:
            return Stream(latency_s, 0.0, ())
        on_node: dict[int, list[int]] = {}
        for device in devices:
            on_node.setdefault(self.cluster.node_of[device], []).append(device)
        uses: dict[int, float] = {}
        links = self.cluster.links_among(on_node)
        for node, members in on_node.items():
            moved_inside = rounds * (len(members) - 1) / len(members) * num_bytes
            cards = self._cards_for(node, members)
            moved_between = rounds * (len(on_node) - 1) / len(on_node) * num_bytes / len(cards)
            passed_on = [(_device_port(device), moved_inside, links.intra_node) for device in members]
            passed_on += [(self._card_port(node, card), moved_between, links.inter_node) for card in cards]
            for port, moved, link in passed_on:
                if moved:
                    demand = min(1.0, moved / left_s / _peak_bytes_per_s(link))
                    uses.update({port + out: demand for out in (True, False)})
        return Stream(latency_s, left_s, tuple(Use(port, demand) for port, demand in uses.items()))

    def enter(self, stream: Stream, now_s: float) -> None:
        """Put a stream on its ports; `settle` then says when it ends."""
        stream.since_s = now_s
        self._changed[stream] = None
        for port, demand in stream.uses:
            streams = self._streams.setdefault(port, {})
            streams[stream] = None
            self._load[port] = self._load.get(port, 0.0) + demand
            if self._load[port] > 1.0:
                self._changed.update(streams)

    def leave(self, stream: Stream) -> None:
        """Take a stream that has ended off its ports."""
        self._changed.pop(stream, None)
        for port, demand in stream.uses:
            streams = self._streams[port]
            del streams[stream]
            if self._load[port] > 1.0:
                self._changed.update(streams)
            self._load[port] = self._load[port] - demand if streams else 0.0

    def settle(self, now_s: float) -> list[tuple[float, Stream]]:
        """Set the rates after streams have entered or left; returns the new ends of those whose rate
        changed.
        """
        ends: list[tuple[float, Stream]] = []
        for stream in self._changed:
            rate = 1.0 / max(1.0, max((self._load[port] for port, _ in stream.uses), default=1.0))
            if abs(rate - stream.rate) <= 1e-9 * rate:
                continue
            stream.left_s = max(0.0, stream.left_s - (now_s - stream.since_s) * stream.rate)
            stream.since_s = now_s
            stream.rate = rate
            stream.version += 1
            ends.append((now_s + stream.left_s / rate, stream))
        self._changed.clear()
        return ends

    def _port(self, device: int, inside: bool, *, out: bool) -> int:
        return (_device_port(device) if inside else self._card_port(*self.cluster.card_of[device])) + out

    def _cards_for(self, node: int, members: Sequence[int]) -> list[int]:
        """The cards of a node over which a collective of some of its devices goes: NCCL prefers those that
        are close to them, so that collectives of other devices of the node go over other cards.
        """
        count = self.cluster.cards_of_node[node]
        close = [self.cluster.card_of[device][1] for device in members]
        return list(dict.fromkeys([*close, *range(count)]))[: min(len(members), count)]

    def _card_port(self, node: int, card: int) -> int:
        # Numbered by a device of the node: there are never more cards than devices.
        return 4 * (self.cluster.first_device_of[node] + card)


def _device_port(device: int) -> int:
    return 4 * device + 2


def _peak_bytes_per_s(link: Link) -> float:
    return max(link.bandwidth_bytes_per_s, max((speed for _, speed in link.curve or ()), default=0.0) * GB)
