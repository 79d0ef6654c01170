"""What is under way: transfers between pairs of devices, and gradient sums.

A pair of devices carries its transfers one after another, in the order in which both ends post them; so does
a communicator its sums. Different pairs and communicators go side by side and share the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from spindle_cli.account.types import ParameterGroup
from spindle_cli.program.types import Program, Transfer
from spindle_cli.simulate.clock import Clock
from spindle_cli.simulate.network import Network, Stream
from spindle_cli.simulate.types import GroupSum, Passage


@dataclass(slots=True)
class _Channel:
    """A pair of devices: transfers that one end has posted and the other has not, and those to be carried."""

    half_posted: deque[Transfer] = field(default_factory=deque)
    posted: deque[tuple[Transfer, float]] = field(default_factory=deque)  # by both ends, with the time
    busy: bool = False


@dataclass(slots=True)
class _Communicator:
    """A set of devices: sums that all have joined, to be carried."""

    joined: deque[tuple[ParameterGroup, float]] = field(default_factory=deque)
    busy: bool = False


class Traffic:
    """All that is under way in one simulated iteration.

    `arrived` and `summed` are called when a transfer or a sum has ended.
    """

    def __init__(
        self,
        program: Program,
        clock: Clock,
        arrived: Callable[[Transfer, Passage], None],
        summed: Callable[[GroupSum, int], None],
    ) -> None:
        self.passages: list[Passage] = []
        self.sums: list[GroupSum] = []
        self._program = program
        self._clock = clock
        self._network = Network(program.plan.cluster)
        self._arrived = arrived
        self._summed = summed
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._communicators: dict[tuple[int, ...], _Communicator] = {}
        self._joined = [0] * len(program.groups)
        self._ending: dict[Stream, Callable[[], None]] = {}

    def post(self, transfer: Transfer) -> None:
        """One end posts a transfer; both ends of a pair post theirs in the same order."""
        pair = (min(transfer.source, transfer.destination), max(transfer.source, transfer.destination))
        channel = self._channels.setdefault(pair, _Channel())
        if channel.half_posted and channel.half_posted[0] == transfer:
            channel.half_posted.popleft()
            channel.posted.append((transfer, self._clock.now_s))
            self._carry_next(channel)
        else:
            channel.half_posted.append(transfer)

    def join(self, device: int, group: ParameterGroup) -> None:
        """A device starts a sum; the sum itself starts when all of its devices have."""
        self._joined[group.index] += 1
        if self._joined[group.index] < len(group.devices):
            return
        communicator = self._communicators.setdefault(group.devices, _Communicator())
        communicator.joined.append((group, self._clock.now_s))
        self._sum_next(communicator, device)

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
            )
            self.passages.append(passage)
            self._arrived(transfer, passage)
            self._carry_next(channel)

        self._begin(stream, end)

    def _sum_next(self, communicator: _Communicator, last_device: int) -> None:
        if communicator.busy or not communicator.joined:
            return
        group, joined_s = communicator.joined.popleft()
        communicator.busy = True
        start_s = self._clock.now_s
        stream = self._network.all_reduce(group.devices, group.num_bytes)

        def end() -> None:
            communicator.busy = False
            done = GroupSum(group.index, group.devices, group.num_bytes, joined_s, start_s, self._clock.now_s)
            self.sums.append(done)
            self._summed(done, last_device)
            self._sum_next(communicator, last_device)

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
