"""What messages of the passes leave of network cards for sums and gathers beside them.

A card carries messages and collectives at once, each slower for the other; together they take as long as one
after the other. A collective goes as slowly as its slowest card lets it: while any of its cards has a message
under way, it is taken to stand still.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from spindle_cli.account.pass_times import Busy, Card
from spindle_cli.files.cluster import Cluster


class CardLoads:
    """What network cards carry in one run of both passes."""

    def __init__(self, busy: Iterable[Busy], cluster: Cluster) -> None:
        self._cluster = cluster
        by_card: dict[Card, list[tuple[float, float]]] = {}
        for start_s, end_s, card in sorted(busy):
            _add(by_card.setdefault(card, []), start_s, end_s)
        self._by_card = by_card
        self._of_devices: dict[tuple[int, ...], list[tuple[float, float]]] = {}

    def end_s(self, devices: tuple[int, ...], start_s: float, seconds: float) -> float:
        """When a collective of some devices ends that would take so long by itself."""
        if not self._by_card:
            return start_s + seconds
        busy = self._busy(devices)
        for place in range(bisect_right(busy, start_s, key=lambda interval: interval[1]), len(busy)):
            next_s, until_s = busy[place]
            gap_s = next_s - start_s
            if seconds <= gap_s:
                break
            seconds -= max(0.0, gap_s)
            start_s = until_s
        return start_s + seconds

    def _busy(self, devices: tuple[int, ...]) -> Sequence[tuple[float, float]]:
        """When any of the devices' cards has a message under way; never inside a node."""
        busy = self._of_devices.get(devices)
        if busy is None:
            busy = []
            if not self._cluster.is_inside_node(devices):
                cards = {self._cluster.card_of[device] for device in devices}
                # What many devices send each other at once keeps many cards busy for the same time.
                times = {interval for card in cards for interval in self._by_card.get(card, ())}
                for start_s, end_s in sorted(times):
                    _add(busy, start_s, end_s)
            self._of_devices[devices] = busy
        return busy


def _add(busy: list[tuple[float, float]], start_s: float, end_s: float) -> None:
    """One more that starts no earlier than those before."""
    if busy and start_s <= busy[-1][1]:
        busy[-1] = (busy[-1][0], max(busy[-1][1], end_s))
    else:
        busy.append((start_s, end_s))
