"""What a plan's weights say of the ranges of its devices, told once for devices that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from spindle_cli.files.artifact import Model
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardWeights


class WeightReport(Model):
    """Each of devices [first, last], of type `device`, has a range in proportion to `weight`."""

    devices: tuple[int, int]
    device: str
    weight: int

    def __str__(self) -> str:
        first, last = self.devices
        which = f"device {first}" if first == last else f"each of devices {first}-{last}"
        return f"{self.weight} on {which} ({self.device})"


def weight_reports(weights: ShardWeights, cluster: Cluster) -> tuple[WeightReport, ...]:
    """Neighbours of one type and weight together; none where all devices have equal ranges."""
    runs = groupby(
        zip(cluster.type_of, weights, range(len(weights)), strict=False), key=lambda each: each[:2]
    )
    reports = []
    for (kind, weight), members in runs:
        devices = [device for *_, device in members]
        reports.append(WeightReport(devices=(devices[0], devices[-1]), device=kind, weight=weight))
    return tuple(reports)


def describe_weights(reports: Sequence[WeightReport]) -> str:
    """One line; there is a report."""
    return "in ranges of " + ", ".join(str(report) for report in reports)
