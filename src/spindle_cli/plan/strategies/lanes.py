"""What the strategies with fixed shares of the devices have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spindle_cli.plan.problem import Node, Point

# Seconds that something takes when it has so many devices; never more with more devices.
Seconds = Callable[[int], float]


def best_point(node: Node, num_devices: int) -> Point | None:
    """The fastest allocation on at most so many devices."""
    best = None
    for point in node.points:
        if point.num_devices > num_devices:
            break
        best = point
    return best


Devices = tuple[int, ...]


def all_or_none(devices: Sequence[Devices | None]) -> tuple[Devices, ...] | None:
    """The devices of a draft's pieces; None, which leaves all of them to the placement, if one has none."""
    found = tuple(each for each in devices if each is not None)
    return found if len(found) == len(devices) else None


def split_evenly_in_time(seconds: Sequence[Seconds], num_devices: int) -> list[int] | None:
    """Devices for each of several things that run side by side, so that the slowest is as fast as can be.

    One at a time, the slowest gets the fewest more that make it faster. Returns None if they do not fit side
    by side at all.
    """
    shares = [_fewest(of, num_devices) for of in seconds]
    left = num_devices - sum(shares)
    if left < 0:
        return None
    while True:
        slowest = max(range(len(shares)), key=lambda i: (seconds[i](shares[i]), -i))
        more = _next_faster(seconds[slowest], shares[slowest], left)
        if more is None:
            return shares
        shares[slowest] += more
        left -= more


def _fewest(seconds: Seconds, num_devices: int) -> int:
    return next((n for n in range(1, num_devices + 1) if seconds(n) < float("inf")), num_devices + 1)


def _next_faster(seconds: Seconds, share: int, left: int) -> int | None:
    now_s = seconds(share)
    return next((more for more in range(1, left + 1) if seconds(share + more) < now_s), None)
