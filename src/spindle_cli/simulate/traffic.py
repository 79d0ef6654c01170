"""What is under way: transfers between devices, and collectives.

Over gloo a pair of devices carries its transfers one after another, in the order in which both ends post
them. Over NCCL a device carries all that it has on a communicator one after another, whatever its peers, but
for neighbours that start together. A communicator carries its collectives one after another; and over NCCL a
device all gathers of parameters, whatever their communicators. All others go side by side and share the
network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from spindle_cli.account.types import Collective, Together
from spindle_cli.files.cluster import Cluster
from spindle_cli.program.types import Transfer
from spindle_cli.simulate.network import Clock, Network, Stream
from spindle_cli.simulate.types import Collected, Passage

_Message = tuple[int, int]  # key of a transfer, and of which of the step's batches
_Lane = tuple[int, object]  # a device, and what it carries one after another there


@dataclass(slots=True)
class _Posted:
    """A transfer that an end has posted. `since_s`: when the second one did."""

    transfer: Transfer
    batch: int
    lanes: list[_Lane] = field(default_factory=list)
    since_s: float | None = None
    has_begun: bool = False


@dataclass(slots=True)
class _Order:
    """What a lane carries, in order: what starts together, by the name of that, not through yet."""

    together: deque[tuple[object, set[_Message]]] = field(default_factory=deque)

    def add(self, message: _Message, name: object) -> None:
        """Put a message behind all others, or beside the last ones if it starts together with them."""
        if self.together and self.together[-1][0] == name:
            self.together[-1][1].add(message)
        else:
            self.together.append((name, {message}))

    def has_first(self, message: _Message) -> bool:
        """Say whether a message is among those that may begin now."""
        return message in self.together[0][1]

    def end(self, message: _Message) -> set[_Message]:
        """A message is through; those that may begin then."""
        first = self.together[0][1]
        first.remove(message)
        if first:
            return set()
        self.together.popleft()
        return self.together[0][1] if self.together else set()


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
        self._in_order = cluster.talks_by == "nccl"
        self._orders: dict[_Lane, _Order] = {}
        self._posted: dict[_Message, _Posted] = {}
        self._times: dict[tuple[int, int], int] = {}  # by device and key, how often it was posted
        self._communicators: dict[int, _Communicator] = {}
        self._gathers: dict[int, deque[Together]] = {}  # of each device over NCCL, those not through
        self._ending: dict[Stream, Callable[[], None]] = {}

    def post(self, device: int, transfer: Transfer, communicator: int, together: object) -> None:
        """One end posts a transfer.

        Args:
            device: that end.
            transfer: what it posts.
            communicator: that it goes over.
            together: the same for all that the device posts to start together; their neighbours have others.
        """
        batch = self._times.get((device, transfer.key), 0)
        self._times[device, transfer.key] = batch + 1
        message = (transfer.key, batch)
        posted = self._posted.setdefault(message, _Posted(transfer, batch))
        lane: _Lane = (device, communicator)
        if not self._in_order:  # each by itself, in the order of the pair
            lane, together = (device, frozenset((transfer.source, transfer.destination))), message
        self._orders.setdefault(lane, _Order()).add(message, together)
        posted.lanes.append(lane)
        if len(posted.lanes) == 2:
            posted.since_s = self._clock.now_s
            self._begin_if_first(message)

    def join(self, device: int, together: Together, communicator: int) -> None:
        """A device takes part in a collective, which starts when all of its devices do."""
        lane = self._communicators.setdefault(communicator, _Communicator())
        if self._in_order and together.kind is Collective.GATHER:
            self._gathers.setdefault(device, deque()).append(together)
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
            self._clock.at(end_s, partial(self._end, stream), partial(stream.is_expected, stream.version))

    def _begin_if_first(self, message: _Message) -> None:
        posted = self._posted[message]
        if posted.since_s is None or posted.has_begun:
            return
        if not all(self._orders[lane].has_first(message) for lane in posted.lanes):
            return
        posted.has_begun = True
        transfer, start_s = posted.transfer, self._clock.now_s
        stream = self._network.transfer(transfer.source, transfer.destination, transfer.num_bytes)
        self._begin(stream, partial(self._end_transfer, message, start_s))

    def _end_transfer(self, message: _Message, start_s: float) -> None:
        posted = self._posted.pop(message)
        transfer = posted.transfer
        assert posted.since_s is not None, "it has begun"
        passage = Passage(
            key=transfer.key,
            source=transfer.source,
            destination=transfer.destination,
            producer=transfer.producer,
            consumer=transfer.consumer,
            is_gradient=transfer.is_gradient,
            num_bytes=transfer.num_bytes,
            posted_s=posted.since_s,
            start_s=start_s,
            end_s=self._clock.now_s,
            batch=posted.batch,
        )
        self.passages.append(passage)
        self._arrived(transfer, passage)
        for lane in posted.lanes:
            for waiting in sorted(self._orders[lane].end(message)):
                self._begin_if_first(waiting)

    def _begin_next(self, lane: _Communicator) -> None:
        if lane.busy or not lane.complete or not self._is_their_turn(lane.complete[0][0]):
            return
        together, joined_s, last_device = lane.complete.popleft()
        lane.busy = True
        start_s = self._clock.now_s
        stream = self._network.collective(
            together.devices,
            together.num_bytes,
            together.rounds,
            together.weights,
            by_node=together.by_node,
        )

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
            self._end_turn(together)

        self._begin(stream, end)

    def _is_their_turn(self, together: Together) -> bool:
        """Whether none of a collective's devices has gathers ahead of it."""
        queues = (self._gathers.get(device) for device in together.devices)
        return together.kind is not Collective.GATHER or all(
            not queue or queue[0] is together for queue in queues
        )

    def _end_turn(self, together: Together) -> None:
        """Let the gathers begin that have waited for one that is through."""
        if not self._in_order or together.kind is not Collective.GATHER:
            return
        for device in together.devices:
            self._gathers[device].popleft()
        for lane in self._communicators.values():
            self._begin_next(lane)

    def _begin(self, stream: Stream, end: Callable[[], None]) -> None:
        self._ending[stream] = end
        enter = partial(self._network.enter, stream)
        self._clock.at(self._clock.now_s + stream.latency_s, lambda: enter(self._clock.now_s))

    def _end(self, stream: Stream) -> None:
        self._network.leave(stream)
        self._ending.pop(stream)()
