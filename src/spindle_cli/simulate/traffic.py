"""What is under way: transfers between pairs of devices, and collectives.

A pair of devices carries its transfers one after another, in the order in which both ends post them; so does
a communicator its collectives. Different pairs and communicators go side by side and share the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from spindle_cli.account.types import Together
from spindle_cli.files.cluster import Cluster
from spindle_cli.program.types import Transfer
from spindle_cli.simulate.clock import Clock
from spindle_cli.simulate.network import Network, Stream
from spindle_cli.simulate.types import Collected, Passage


@dataclass(slots=True)
class _Channel:
    """A pair of devices: transfers that one end has posted and the other has not, with that end, and those to
    be carried.
    """

    half_posted: deque[tuple[int, Transfer]] = field(default_factory=deque)
    posted: deque[tuple[Transfer, float]] = field(default_factory=deque)  # by both ends, with the time
    busy: bool = False


@dataclass(slots=True)
class _Communicator:
    """A set of devices: how many have joined what not all have, and what all have, to be carried."""

    joined: dict[Together, int] = field(default_factory=dict)
    complete: deque[tuple[Together, float, int]] = field(default_factory=deque)  # since when, by whom last
    busy: bool = False


class Traffic:
    """All that is under way in one simulated step.

    `arrived` and `ended` are called when a transfer or a collective has ended.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        arrived: Callable[[Transfer, Passage], None],
        ended: Callable[[Together, Collected, int], None],
    ) -> None:
        self.passages: list[Passage] = []
        self.collected: list[Collected] = []
        self._clock = clock
        self._network = Network(cluster)
        self._arrived = arrived
        self._ended = ended
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._communicators: dict[int, _Communicator] = {}
        self._carried: dict[int, int] = {}  # by key of a transfer, in how many batches
        self._ending: dict[Stream, Callable[[], None]] = {}

    def post(self, device: int, transfer: Transfer) -> None:
        """One end posts a transfer; both ends of a pair post theirs in the same order."""
        pair = (min(transfer.source, transfer.destination), max(transfer.source, transfer.destination))
        channel = self._channels.setdefault(pair, _Channel())
        if channel.half_posted and channel.half_posted[0][0] != device:
            _, other = channel.half_posted.popleft()
            assert other == transfer, "proved programs post in one order"
            channel.posted.append((transfer, self._clock.now_s))
            self._carry_next(channel)
        else:
            channel.half_posted.append((device, transfer))

    def join(self, device: int, together: Together, communicator: int) -> None:
        """A device takes part in a collective, which starts when all of its devices do."""
        lane = self._communicators.setdefault(communicator, _Communicator())
        count = lane.joined.get(together, 0) + 1
        lane.joined[together] = count
        if count < len(together.devices):
            return
        del lane.joined[together]
        lane.complete.append((together, self._clock.now_s, device))
        self._begin_next(lane)

    def settle(self) -> None:
        """Set when everything under way ends, after all that happens at one time has happened."""
        for end_s, stream in self._network.settle(self._clock.now_s):
            self._clock.at(end_s, partial(self._end, stream, stream.version))

    def _carry_next(self, channel: _Channel) -> None:
        if channel.busy or not channel.posted:
            return
        transfer, posted_s = channel.posted.popleft()
        channel.busy = True
        start_s = self._clock.now_s
        stream = self._network.transfer(transfer.source, transfer.destination, transfer.num_bytes)
        batch = self._carried.get(transfer.key, 0)
        self._carried[transfer.key] = batch + 1

        def end() -> None:
            channel.busy = False
            passage = Passage(
                key=transfer.key,
                source=transfer.source,
                destination=transfer.destination,
                producer=transfer.producer,
                consumer=transfer.consumer,
                is_gradient=transfer.is_gradient,
                num_bytes=transfer.num_bytes,
                posted_s=posted_s,
                start_s=start_s,
                end_s=self._clock.now_s,
                batch=batch,
            )
            self.passages.append(passage)
            self._arrived(transfer, passage)
            self._carry_next(channel)

        self._begin(stream, end)

    def _begin_next(self, lane: _Communicator) -> None:
        if lane.busy or not lane.complete:
            return
        together, joined_s, last_device = lane.complete.popleft()
        lane.busy = True
        start_s = self._clock.now_s
        stream = self._network.collective(together.devices, together.num_bytes, together.rounds)

        def end() -> None:
            lane.busy = False
            done = Collected(
                kind=together.kind,
                group=together.group,
                devices=together.devices,
                num_bytes=together.num_bytes,
                joined_s=joined_s,
                start_s=start_s,
                end_s=self._clock.now_s,
            )
            self.collected.append(done)
            self._ended(together, done, last_device)
            self._begin_next(lane)

        self._begin(stream, end)

    def _begin(self, stream: Stream, end: Callable[[], None]) -> None:
        self._ending[stream] = end
        enter = partial(self._network.enter, stream)
        self._clock.at(self._clock.now_s + stream.latency_s, lambda: enter(self._clock.now_s))

    def _end(self, stream: Stream, version: int) -> None:
        if stream.version != version:
            return  # it was slowed down or sped up since; another end is set
        self._network.leave(stream)
        self._ending.pop(stream)()
