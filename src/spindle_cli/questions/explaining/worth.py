"""What binds an iteration, from the dual values of the allocation program, checked by solving again.

In the optimum of `plan/bound/bound.py`, one second of the bound is made of N p (the price of a
device-second times the devices) and of the flow over the MetaOps without consumers: the two add up to 1.
So N p is the part of the bound that more devices would shorten; the rest is held by the critical MetaOps,
whatever the devices.
"""

from __future__ import annotations

from spindle_cli.errors import NoPlanError
from spindle_cli.files.artifact import Model
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.reasons import bound_on
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.questions.edit import with_devices, with_one_more


class OtherSize(Model):
    """The question of a plan solved again with another number of devices.

    Attributes:
        num_devices: How many devices.
        lower_bound_s: Seconds that no schedule can be shorter than; null where there is no plan.
        iteration_s: Seconds of an iteration; null where there is no plan.
    """

    num_devices: int
    lower_bound_s: float | None
    iteration_s: float | None


class OfType(Model):
    """What one more device of a type is worth.

    Attributes:
        device: The type.
        num_devices: Devices of the type.
        device_value_s: Seconds by which the bound falls per device added, by the dual value.
        more: One device more, solved again.
    """

    device: str
    num_devices: int
    device_value_s: float
    more: OtherSize


class Worth(Model):
    """What devices are worth.

    Attributes:
        lower_bound_s: Seconds that no schedule can be shorter than.
        device_part: Part of the bound that is held by the number of devices; chains of MetaOps hold the rest.
        device_value_s: Seconds by which the bound falls per device added, by the dual value.
        fewer: One device fewer, solved again; of devices of several types, at the cluster's end.
        more: One device more, solved again; of devices of several types, at the cluster's end.
        of_types: What each type is worth, where there are several.
    """

    lower_bound_s: float
    device_part: float
    device_value_s: float
    fewer: OtherSize | None
    more: OtherSize
    of_types: tuple[OfType, ...] = ()


def worth_of(plan: Plan, profile: Profile) -> Worth:
    """Ask the program, then solve it again for one device fewer and one more; of several types also for one
    more of each.
    """
    cluster = plan.cluster
    bound = bound_on(profile, cluster)
    count = cluster.num_devices
    part = sum(bound.device_value_s[kind] * number for kind, number in cluster.num_of_type.items())
    of_types = tuple(
        OfType(
            device=kind,
            num_devices=number,
            device_value_s=bound.device_value_s[kind],
            more=_planned_on(plan, profile, with_one_more(cluster, kind)),
        )
        for kind, number in cluster.num_of_type.items()
        if cluster.is_mixed
    )
    return Worth(
        lower_bound_s=bound.lower_bound_s,
        device_part=min(1.0, part / bound.lower_bound_s),
        device_value_s=part / count,
        fewer=_with(plan, profile, cluster, count - 1) if count > 1 else None,
        more=_with(plan, profile, cluster, count + 1),
        of_types=of_types,
    )


def _with(plan: Plan, profile: Profile, cluster: Cluster, num_devices: int) -> OtherSize:
    return _planned_on(plan, profile, with_devices(cluster, num_devices))


def _planned_on(plan: Plan, profile: Profile, cluster: Cluster) -> OtherSize:
    num_devices = cluster.num_devices
    try:
        bound_s = bound_on(profile, cluster).lower_bound_s
        iteration_s = make_plan(profile, cluster, plan.strategy).predicted.iteration_s
    except NoPlanError:  # an answer: with so many devices nothing fits
        return OtherSize(num_devices=num_devices, lower_bound_s=None, iteration_s=None)
    return OtherSize(num_devices=num_devices, lower_bound_s=bound_s, iteration_s=iteration_s)
