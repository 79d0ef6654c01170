"""Curves of one type of device are no curves of another."""

from __future__ import annotations

from spindle_cli.costs.flops import arithmetic_of
from spindle_cli.errors import InputError
from spindle_cli.files.cluster import Cluster, is_cpu
from spindle_cli.profile.machine.devices import cluster_device_name, require_precision
from spindle_cli.profile.mixed.seen import devices_of, is_known_as, seen_on
from spindle_cli.profile.types import Profile


def is_of_devices(profile: Profile, cluster: Cluster) -> bool:
    """Whether a profile has curves of every type of device that a cluster has."""
    devices = devices_of(profile)
    return all(any(is_known_as(device, name) for device in devices) for name in cluster.types)


def require_same_device(profile: Profile, cluster: Cluster) -> None:
    """Refuse a profile of one type of device for a cluster of another, or of arithmetic that a type lacks.

    Raises:
        InputError: they differ, or one lacks it.
    """
    if not is_of_devices(profile, cluster) and (cluster.is_mixed or profile.devices):
        seen_on(profile, cluster)  # says which type is missing
    if not is_of_devices(profile, cluster):
        raise InputError(
            f"the profile is of {_named(profile)}, and the devices of the cluster {cluster.name!r} are "
            f"{cluster.device_type!r}: its times do not hold there",
            hint="Profile on such a device, or for it with --estimate; with --assume-same-device the times "
            "are taken as they are.",
        )
    arithmetic = arithmetic_of(profile.environment)
    if arithmetic is not None:
        require_precision(cluster.types, arithmetic)


def assumption(profile: Profile, cluster: Cluster) -> str | None:
    """What a plan says of a profile of another type of device; None where the types are the same."""
    if is_of_devices(profile, cluster):
        return None
    return f"Times of {_named(profile)} are taken for those of {cluster.device_type}."


def _named(profile: Profile) -> str:
    name = cluster_device_name(profile.device)
    return repr(name) if is_cpu(profile.device.type) else f"{name!r} ({profile.device.name})"
