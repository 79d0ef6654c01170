"""Where compute above the bound comes from, on devices of several types."""

from __future__ import annotations

from spindle_cli.plan.mixed.bound import mixed_bound
from spindle_cli.plan.mixed.problem import make_mixed_problem
from spindle_cli.plan.types import Plan
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile


def idle_s(plan: Plan, profile: Profile) -> float:
    """What the devices that a plan leaves idle while others compute are worth: seconds of the iteration, by
    the bound's prices.
    """
    cluster = plan.cluster
    prices = mixed_bound(make_mixed_problem(seen_on(profile, cluster), cluster)).prices
    busy_s = [0.0] * cluster.num_devices
    for piece in plan.slices:
        seconds = piece.end_s - piece.start_s
        if piece.backward_start_s is not None and piece.backward_end_s is not None:
            seconds += piece.backward_end_s - piece.backward_start_s
        for device in piece.devices:
            busy_s[device] += seconds
    price_of = dict(zip(cluster.types, prices, strict=True))
    return sum(
        price_of[cluster.type_of[device]] * (plan.predicted.compute_s - seconds)
        for device, seconds in enumerate(busy_s)
    )
