"""Iteration time and cost over numbers of devices, with the knee marked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from rich import box
from rich.table import Table

from spindle_cli import units
from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.artifact import Artifact
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile, TaskShare
from spindle_cli.questions.compare import of_sets
from spindle_cli.questions.edit import with_devices
from spindle_cli.questions.on_cluster import OnCluster, on_cluster
from spindle_cli.questions.spending import COST, Figure, known_figures
from spindle_cli.units import format_bytes, format_seconds

# A step to more devices is worth it while each added one brings this part of what those before brought.
KNEE_EFFICIENCY = 0.5


class SweepPoint(OnCluster):
    """A plan's prediction on some number of devices, and what an iteration takes of them.

    Attributes:
        device_s: Device-seconds of an iteration.
        efficiency: Speed per device over that of the smallest number of devices that has a plan.
    """

    device_s: float | None = None
    efficiency: float | None = None


class Sweep(Artifact):
    """The document of `spindle sweep --json`.

    Attributes:
        workload: Name of the workload.
        cluster: Name of the cluster.
        strategy: The strategy that plans.
        price_per_device_hour: Price of every device, where it was given instead of the prices of the cluster
            file.
        task_sets: Where not every step runs all tasks, the sets of them that seconds are the mean of, by
            their shares.
        points: By number of devices, ascending.
        knee: The last number of devices up to which each added device brings at least half the speed per
            device before it.
    """

    KIND: ClassVar[str] = "sweep"

    schema_: Annotated[Literal["spindle.sweep/1"], Field(alias="schema")] = "spindle.sweep/1"
    workload: str
    cluster: str
    strategy: StrategyName
    price_per_device_hour: float | None
    task_sets: tuple[TaskShare, ...] = ()
    points: tuple[SweepPoint, ...]
    knee: int


def default_counts(cluster: Cluster) -> tuple[int, ...]:
    """1, 2, 4, ... and the cluster's own number of devices."""
    counts = [1]
    while counts[-1] * 2 < cluster.num_devices:
        counts.append(counts[-1] * 2)
    return tuple(dict.fromkeys([*counts, cluster.num_devices]))


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers of devices from '8,16,32'.

    Raises:
        UsageError: not a list of positive whole numbers.
    """
    counts = units.parse_counts(text)
    if counts is None:
        raise UsageError(
            f"--devices {text}: expected positive whole numbers with commas between, for example 8,16,32"
        )
    return counts


def sweep(
    profile: Profile,
    cluster: Cluster,
    counts: Sequence[int],
    strategy: StrategyName = "spindle",
    price_per_device_hour: float | None = None,
) -> Sweep:
    """Plan for each number of devices; those beyond the cluster's are added to its last node.

    Args:
        price_per_device_hour: in any currency, instead of the prices that the cluster has.

    Raises:
        UsageError: more devices than a cluster of several types has: it is not clear of which type.
        NoPlanError: there is a plan for none of them.
    """
    _require_clear(cluster, counts)
    points = [
        _point(profile, cluster, count, strategy, price_per_device_hour) for count in sorted(set(counts))
    ]
    planned = [(point.num_devices, point.iteration_s) for point in points if point.iteration_s is not None]
    if not planned:
        raise NoPlanError(
            f"there is no plan for any of {', '.join(map(str, counts))} devices: {points[-1].failure}"
        )
    first_device_s = planned[0][0] * planned[0][1]
    return Sweep(
        workload=profile.workload.name,
        cluster=cluster.name,
        strategy=strategy,
        price_per_device_hour=price_per_device_hour,
        task_sets=profile.task_sets,
        points=tuple(
            point
            if point.device_s is None
            else point.model_copy(update={"efficiency": first_device_s / point.device_s})
            for point in points
        ),
        knee=find_knee(planned),
    )


def _require_clear(cluster: Cluster, counts: Sequence[int]) -> None:
    if cluster.is_mixed and max(counts) > cluster.num_devices:
        raise UsageError(
            f"--devices {max(counts)}: {cluster.name!r} has {cluster.num_devices} devices, of several types "
            f"({', '.join(cluster.types)}), and it is not clear of which the others are",
            hint=f"Add to a type: --add {cluster.types[-1]}=N; or ask for at most {cluster.num_devices}.",
        )


def _point(
    profile: Profile, cluster: Cluster, count: int, strategy: StrategyName, price: float | None
) -> SweepPoint:
    outcome = on_cluster(profile, with_devices(cluster, count), strategy, price, tell_types=cluster.is_mixed)
    device_s = None if outcome.iteration_s is None else count * outcome.iteration_s
    return SweepPoint(**dict(outcome), device_s=device_s)


def find_knee(planned: Sequence[tuple[int, float]]) -> int:
    """Return the last number of devices before a step stops being worth it.

    Args:
        planned: (devices, seconds per iteration), ascending in devices.
    """
    for (devices, seconds), (more, fewer_seconds) in pairwise(planned):
        speed = 1 / seconds
        gained_per_device = (1 / fewer_seconds - speed) / (more - devices)
        if gained_per_device < KNEE_EFFICIENCY * speed / devices:
            return devices
    return planned[-1][0]


def sweep_table(result: Sweep) -> Table:
    """Return a row for each number of devices; the knee is marked. What is known of energy, and which devices
    they are of several types, are columns of their own.
    """
    figures = (COST, *(figure for figure in known_figures(result.points) if figure is not COST))
    is_mixed = any(point.of_types for point in result.points)
    names = ("iteration", "lower bound", "device time", *(figure.title for figure in figures), "efficiency")
    table = Table(
        title=f"{result.workload} on {result.cluster}, strategy {result.strategy}"
        + of_sets(result.task_sets),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("devices", *(["of types"] if is_mixed else []), *names, "peak memory", ""):
        table.add_column(name, justify="right" if name and name != "of types" else "left", no_wrap=True)
    for point in result.points:
        types = [_types_of(point)] if is_mixed else []
        mark = "<- knee" if point.num_devices == result.knee else ""
        table.add_row(str(point.num_devices), *types, *_cells(point, figures, mark))
    return table


def _cells(point: SweepPoint, figures: Sequence[Figure], mark: str) -> tuple[str, ...]:
    """Return the cells of a row behind its devices; `mark`: the last one, where there is a plan."""
    if point.iteration_s is None:
        return ("no plan", *[""] * (len(figures) + 4), point.failure or "")
    return (
        format_seconds(point.iteration_s),
        format_seconds(point.lower_bound_s or 0.0),
        format_seconds(point.device_s or 0.0),
        *(figure.cell(point) for figure in figures),
        f"{point.efficiency or 0.0:.0%}",
        format_bytes(point.peak_memory_bytes or 0),
        mark,
    )


def _types_of(point: SweepPoint) -> str:
    return ", ".join(f"{count} {device}" for device, count in point.of_types.items())
