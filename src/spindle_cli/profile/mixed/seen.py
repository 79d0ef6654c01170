"""Profiles of several types of device: which these are, and what a cluster's types see of them. Curves of one
type are no curves of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from spindle_cli.costs.flops import arithmetic_of
from spindle_cli.errors import InputError
from spindle_cli.files.cluster import Cluster, is_cpu
from spindle_cli.profile.machine.devices import cluster_device_name, is_same_device, require_precision
from spindle_cli.profile.points import CurvePoint, OfDevice, ShareTime
from spindle_cli.profile.types import Device, MetaOpProfile, Profile


def devices_of(profile: Profile) -> tuple[Device, ...]:
    """Return the types of device that a profile has curves of, `device` first."""
    return profile.devices or (profile.device,)


def is_known_as(device: Device, name: str) -> bool:
    """Whether a cluster file calls a device so."""
    return device.type == name or is_same_device(device, name)


def is_of_devices(profile: Profile, cluster: Cluster) -> bool:
    """Whether a profile has curves of every type of device that a cluster has."""
    devices = devices_of(profile)
    return all(any(is_known_as(device, name) for device in devices) for name in cluster.types)


def type_in(profile: Profile, name: str) -> str:
    """Return what a profile calls the type that a cluster calls `name`.

    Raises:
        InputError: it has no curves of it.
    """
    return _known_as(profile, name).type


def of_types(profile: Profile) -> dict[str, Profile]:
    """Return a profile apart, by its types of device: the entries of one type alone each, which name none."""
    if not profile.devices:
        return {profile.device.type: profile}
    return {
        device.type: profile.model_copy(update={"device": device, "devices": ()}).with_metaops(
            [
                metaop.model_copy(
                    update={
                        "curve": tuple(_entries_of(metaop.curve, profile, device, None)),
                        "shares": tuple(_entries_of(metaop.shares, profile, device, None)),
                    }
                )
                for metaop in profile.metaops
            ]
        )
        for device in profile.devices
    }


def together(profile: Profile, parts: Mapping[str, Sequence[MetaOpProfile]]) -> tuple[MetaOpProfile, ...]:
    """Return the MetaOps of a profile with other entries for each type of device, which name it as they did.

    Args:
        parts: by type, the MetaOps with entries that name none: those that `of_types` has with other times,
            and maybe more shares between these.
    """
    if not profile.devices:
        (metaops,) = parts.values()
        return tuple(metaops)
    return tuple(
        metaop.model_copy(
            update={
                "curve": _replaced(metaop.curve, profile, {k: m[place].curve for k, m in parts.items()}),
                "shares": _replaced(metaop.shares, profile, {k: m[place].shares for k, m in parts.items()}),
            }
        )
        for place, metaop in enumerate(profile.metaops)
    )


def _replaced(
    entries: Sequence[OfDevice], profile: Profile, others: Mapping[str, Sequence[OfDevice]]
) -> tuple[OfDevice, ...]:
    """Put each type's entries in the places of a profile's, and new ones ahead of the next greater one."""
    left = {kind: deque(of_kind) for kind, of_kind in others.items()}
    result: list[OfDevice] = []
    for entry in entries:
        remaining, place = left[entry.device or profile.device.type], _place(entry)
        while remaining and _place(remaining[0]) <= place:
            result.append(remaining.popleft().model_copy(update={"device": entry.device}))
    return tuple(result)


def _place(entry: CurvePoint | ShareTime) -> tuple[int, int]:
    """Entries of a type ascend by this."""
    return (entry.samples if isinstance(entry, ShareTime) else entry.num_devices), entry.tp


def seen_on(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile as a cluster's types of device see it: of one type alone, its entries, which name
    none; of several, those of all, which name the types as the cluster does.

    Raises:
        InputError: it has no curves of one of the types, or no allocation of a MetaOp there.
    """
    if not profile.devices and not cluster.is_mixed:
        return profile
    source = {name: _known_as(profile, name) for name in cluster.types}
    metaops = tuple(_seen(metaop, profile, source, cluster) for metaop in profile.metaops)
    sha256 = profile.sha256()
    devices = [device.model_copy(update={"type": name}) for name, device in source.items()]
    if cluster.is_mixed:
        seen = profile.model_copy(update={"device": devices[0], "devices": tuple(devices)})
    else:
        seen = profile.model_copy(update={"device": source[cluster.types[0]], "devices": ()})
    return seen.with_metaops(metaops).of_file(sha256)


def _known_as(profile: Profile, name: str) -> Device:
    """Return the profile's device that a cluster file calls so."""
    devices = devices_of(profile)
    for device in devices:
        if is_known_as(device, name):
            return device
    have = ", ".join(repr(cluster_device_name(device)) for device in devices)
    raise InputError(
        f"the cluster has devices {name!r}, of which the profile has no curves; it has those of {have}",
        hint=f"Profile on a {name} too, or for it with --estimate, and put both together: "
        "spindle profile --merge A.json --merge B.json -o BOTH.json",
    )


def _seen(
    metaop: MetaOpProfile, profile: Profile, source: dict[str, Device], cluster: Cluster
) -> MetaOpProfile:
    curve: list[CurvePoint] = []
    shares = []
    for name, device in source.items():
        said = name if cluster.is_mixed else None
        points = _entries_of(metaop.curve, profile, device, said)
        if not points:
            raise InputError(
                f"metaops: {metaop.name}: no point of its curve is of {device.type!r}, whose devices the "
                "profile says it is of",
                hint="Profile it there, and merge again.",
            )
        curve += points
        shares += _entries_of(metaop.shares, profile, device, said)
    return metaop.model_copy(update={"curve": tuple(curve), "shares": tuple(shares)})


def _entries_of(
    entries: Sequence[OfDevice], profile: Profile, device: Device, said: str | None
) -> list[OfDevice]:
    """Return the entries of one type of device, which they then call `said`."""
    of_device = [entry for entry in entries if (entry.device or profile.device.type) == device.type]
    return [entry.model_copy(update={"device": said}) for entry in of_device]


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
    require_arithmetic(profile, cluster)


def require_arithmetic(profile: Profile, cluster: Cluster) -> None:
    """Refuse a cluster with a type of device that lacks a profile's arithmetic.

    Raises:
        InputError: one lacks it.
    """
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
