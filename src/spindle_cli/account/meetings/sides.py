"""Two halves of the devices that exchange messages, so that as few as can be exchange them inside of a half.

What a device posts on a communicator runs in order, and a receive waits for its sender. Where a device sends
over the communicator of its own half, and those that it receives from are in the other one, no receive is
ahead of what it sends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable


def sides_of(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Of each device that exchanges messages, its half: 0 or 1. Takes time in proportion to the pairs.

    Devices are gone through from the least of each connected part outwards, and each goes to the half with
    which it exchanges fewer messages, as far as that is told, of equals to the first. So no two of one half
    exchange any wherever that can be: those that are told of its peers are then all as far from the first.

    Args:
        pairs: (source, destination) of each message, in any order.
    """
    peers: dict[int, dict[int, int]] = {}  # of each device, messages by its peers
    for (source, destination), count in Counter(pairs).items():
        for one, other in ((source, destination), (destination, source)):
            own = peers.setdefault(one, {})
            own[other] = own.get(other, 0) + count
    sides: dict[int, int] = {}
    seen: set[int] = set()
    for first in sorted(peers):
        waiting = deque(() if first in seen else (first,))
        while waiting:
            device = waiting.popleft()
            if device in seen:
                continue
            seen.add(device)
            there = [0, 0]
            for peer in peers[device].keys() & sides.keys():
                there[sides[peer]] += peers[device][peer]
            sides[device] = int(there[1] < there[0])
            waiting.extend(sorted(peers[device].keys() - seen))
    return sides
