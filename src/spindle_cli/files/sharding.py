"""How much of a component the devices that hold it share out among themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import groupby

from spindle_cli.files.artifact import Model
from spindle_cli.files.cluster import Cluster


class Sharding(StrEnum):
    """What each of the devices has a range of alone (Rajbhandari et al. 2020, stages 1 to 3)."""

    is_by_pass: bool  # gradients are summed in each backward pass, so that none stay whole behind it
    is_fetched: bool  # parameters are gathered for the passes that use them

    NONE = "none"  # of nothing: each has the optimizer's state whole, too
    OPTIMIZER = "optimizer"  # of the optimizer's state
    GRADIENTS = "gradients"  # and of the gradients, as soon as a backward pass has made them
    KEPT = "parameters-kept"  # and of the parameters, but from a slice's forward pass to its backward pass
    PARAMETERS = "parameters"  # and of the parameters, but where and while an op uses them

    def __init__(self, value: str) -> None:
        # Set once: the account of memory asks millions of times.
        self.is_fetched = value.startswith("parameters")
        self.is_by_pass = self.is_fetched or value == "gradients"


# By key of parameters; what is not there is as the train settings say.
ShardingOf = Mapping[str, Sharding]

# Of each device of the cluster, how much it has of what devices share out: each of those that hold a
# component has a range of it in proportion to its own among theirs. None at all: equal ranges.
ShardWeights = tuple[int, ...]
LARGEST_WEIGHT = 1_000_000


class WeightReport(Model):
    """How much of what devices share out each of some devices has.

    Attributes:
        devices: The first and the last device.
        device: Their type.
        weight: What their ranges are in proportion to.
    """

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
        zip(cluster.type_of, weights, range(len(weights)), strict=False), key=lambda entry: entry[:2]
    )
    reports = []
    for (kind, weight), members in runs:
        devices = [device for *_, device in members]
        reports.append(WeightReport(devices=(devices[0], devices[-1]), device=kind, weight=weight))
    return tuple(reports)


def describe_weights(reports: Sequence[WeightReport]) -> str:
    """Write the weights of a report that is not empty as one line."""
    return "in ranges of " + ", ".join(str(report) for report in reports)
