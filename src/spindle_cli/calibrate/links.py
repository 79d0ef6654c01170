"""Links, the optimizer's step and the processor's costs corrected by factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from spindle_cli.account.device_memory import device_memory
from spindle_cli.calibrate.reading import Run
from spindle_cli.calibrate.times.curves import EQUAL
from spindle_cli.costs.links import transfer_s
from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.profile.mixed.seen import devices_of, type_in
from spindle_cli.profile.types import MeasuredLink, ProcessorCosts, Profile
from spindle_cli.units import GB, US

# From so many times on a difference of links is said, of messages of this size.
_UNLIKE = 2.0
_MESSAGE = 2**20


def slower_links(links: Sequence[MeasuredLink], times: Mapping[str, float]) -> tuple[MeasuredLink, ...]:
    """Return a profile's links, where a message takes so many times as long, by kind. What it takes of the
    processor stays as it was.
    """
    return tuple(
        link
        if (factor := times.get(link.kind, 1.0)) == 1.0
        else link.model_copy(
            update={
                "latency_s": link.latency_s * factor,
                "points": tuple((size, speed / factor) for size, speed in link.points),
            }
        )
        for link in links
    )


def with_links_of(cluster: Cluster, links: Sequence[MeasuredLink]) -> Cluster:
    """Return a cluster with a profile's own links, of the kinds that were measured."""
    measured: dict[str, Link] = {link.kind: _as_link(link) for link in links if link.points}
    return cluster.with_links(cluster.links.model_copy(update=measured))


def _as_link(measured: MeasuredLink) -> Link:
    curve = tuple((size, speed / GB) for size, speed in measured.points)
    return Link(latency_us=measured.latency_s / US, bandwidth_gb_per_s=curve[-1][1], curve=curve)


def unlike_links(profile: Profile, cluster: Cluster) -> tuple[str, ...]:
    """Say, for people, which links of a profile's runs were much slower than a cluster's."""
    if profile.calibration is None:
        return ()
    lines: list[str] = []
    for measured in profile.links:
        if not measured.points or profile.calibration.links.get(measured.kind, 1.0) < _UNLIKE:
            continue
        planned: Link = getattr(cluster.links, measured.kind)
        times = transfer_s(_MESSAGE, _as_link(measured)) / transfer_s(_MESSAGE, planned)
        if times >= _UNLIKE:
            lines.append(
                f"{measured.kind}: the runs that the profile is calibrated by saw messages take {times:.1f} "
                f"times as long as the links of {cluster.name!r} say; `spindle calibrate --write-cluster` "
                "writes a cluster file with links as they were seen, and a profile that goes with it"
            )
    return tuple(lines)


def with_slower_links(cluster: Cluster, times: Mapping[str, float]) -> Cluster:
    """Return a cluster whose messages take so many times as long, by kind of link."""
    links, between = cluster.links, times.get("inter_node", 1.0)
    slower = {
        "intra_node": _slower(links.intra_node, times.get("intra_node", 1.0)),
        "inter_node": _slower(links.inter_node, between),
        "between": tuple(_slower(link, between) for link in links.between),
    }
    return cluster.with_links(links.model_copy(update=slower))


AnyLink = TypeVar("AnyLink", bound=Link)


def _slower(link: AnyLink, times: float) -> AnyLink:
    if times == 1.0:
        return link
    curve = None if link.curve is None else tuple((size, speed / times) for size, speed in link.curve)
    slower = {
        "latency_us": link.latency_us * times,
        "bandwidth_gb_per_s": link.bandwidth_gb_per_s / times,
        "curve": curve,
    }
    return link.model_copy(update=slower)


def with_processor_times(costs: ProcessorCosts, times: float) -> ProcessorCosts:
    """Return a profile's processor costs, all so many times as large."""
    if times == 1.0:
        return costs
    return ProcessorCosts(
        message_s=costs.message_s * times,
        s_per_byte=costs.s_per_byte * times,
        load_s={task: seconds * times for task, seconds in costs.load_s.items()},
        step_s=costs.step_s * times,
        pass_s=costs.pass_s * times,
    )


def update_s_per_byte(runs: Sequence[Run], profile: Profile) -> float | None:
    """Seconds of the optimizer's step for each byte that a device updates: all devices of all runs together,
    each run by its steps; of several types of device the slowest one's. None where no run has measured one;
    the profile's own where it comes to that, and at least it where a type of device has not run.
    """
    before = profile.optimizer_s_per_byte
    by_type = _update_by_type(runs, profile)
    if not by_type:
        return None
    slowest = max(by_type.values())
    if len(by_type) < len(devices_of(profile)):
        slowest = max(slowest, before)
    return before if abs(slowest - before) <= EQUAL * before else slowest


def _update_by_type(runs: Sequence[Run], profile: Profile) -> dict[str, float]:
    seconds: dict[str, float] = {}
    num_bytes: dict[str, float] = {}
    for run in runs:
        plan = run.plan
        held = device_memory(plan.metaops, plan.slices, plan.cluster, plan, turn=plan.turn)
        for device in run.measured.devices:
            if held[device.device].updated_bytes and device.optimizer_s:
                kind = type_in(profile, plan.cluster.type_of[device.device])
                steps = run.measured.steps
                seconds[kind] = seconds.get(kind, 0.0) + steps * device.optimizer_s
                num_bytes[kind] = num_bytes.get(kind, 0.0) + steps * held[device.device].updated_bytes
    return {kind: seconds[kind] / num_bytes[kind] for kind in seconds}
