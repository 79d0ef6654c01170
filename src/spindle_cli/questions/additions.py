"""Which kind of device to add: the cluster as it is, and with more nodes of one type or another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from rich import box
from rich.table import Table

from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.artifact import Artifact
from spindle_cli.files.cluster import MAX_DEVICES, Cluster
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.mixed.seen import devices_of, is_known_as
from spindle_cli.profile.types import Profile, TaskShare
from spindle_cli.questions.compare import of_sets
from spindle_cli.questions.edit import with_more_nodes
from spindle_cli.questions.on_cluster import OnCluster, on_cluster
from spindle_cli.questions.spending import FIGURES, PRICE, known_figures
from spindle_cli.units import format_bytes, format_seconds, parse_counts

Aim = Literal["time", "money", "energy"]


class Addition(OnCluster):
    """The cluster with more devices of one type.

    Attributes:
        group: The group of nodes that they are added to, by its name or else its type.
        device: Their type.
        num_added: How many.
        num_nodes: How many nodes of the group's size these make.
        speedup: The iteration without them over this one; null where there is no plan without.
        best_by: Measures by which no other addition is better, and the cluster as it is is not as good.
    """

    group: str
    device: str
    num_added: int
    num_nodes: int
    speedup: float | None = None
    best_by: tuple[Aim, ...] = ()


class Additions(Artifact):
    """The document of `spindle sweep --add --json`.

    Attributes:
        workload: Name of the workload.
        cluster: Name of the cluster.
        strategy: The strategy that plans.
        price_per_device_hour: Price of every device, where it was given instead of the prices of the cluster
            file.
        task_sets: Where not every step runs all tasks, the sets of them that seconds are the mean of, by
            their shares.
        as_it_is: The cluster without any addition.
        additions: Each addition by itself.
        none_better_by: Measures by which the cluster as it is is as good as with any of the additions, or
            better.
    """

    KIND: ClassVar[str] = "additions"

    schema_: Annotated[Literal["spindle.additions/1"], Field(alias="schema")] = "spindle.additions/1"
    workload: str
    cluster: str
    strategy: StrategyName
    price_per_device_hour: float | None
    task_sets: tuple[TaskShare, ...] = ()
    as_it_is: OnCluster
    additions: tuple[Addition, ...]
    none_better_by: tuple[Aim, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """`num_added` devices for the group of nodes at `place` in the cluster file."""

    place: int
    num_added: int


@dataclass(frozen=True)
class _Measure:
    """What an addition is evaluated by: the less, the better. `than`: in words, so many times the value of
    the cluster as it is.
    """

    value: Callable[[OnCluster], float | None]
    than: Callable[[float], str]


_MEASURES: dict[Aim, _Measure] = {
    "time": _Measure(lambda row: row.iteration_s, lambda times: f"{1 / times:.2f}x as fast as without"),
    "money": _Measure(lambda row: row.cost, lambda times: f"an iteration costs {_more(times)} than without"),
    "energy": _Measure(
        lambda row: row.energy_j, lambda times: f"an iteration draws {_more(times)} than without"
    ),
}


def parse_additions(texts: Sequence[str], profile: Profile, cluster: Cluster) -> tuple[Wanted, ...]:
    """Return what to add, each once, from 'TYPE=N' or 'TYPE=N,N,...'; TYPE is also a group's name.

    Devices come as whole nodes: of a type's groups the last whose nodes N is a multiple of gets them.

    Raises:
        UsageError: not of this form; no nodes of such a type; no whole number of nodes; more devices than can
            be planned for.
    """
    wanted = []
    for text in texts:
        name, _, listed = text.rpartition("=")
        counts = parse_counts(listed)
        if not name or counts is None:
            raise UsageError(
                f"--add {text}: expected TYPE=N with a positive whole number of devices, or several with "
                f"commas between, for example --add {cluster.types[-1]}={cluster.nodes[-1].devices}"
            )
        for count in counts:
            wanted.append(_wanted(name, count, profile, cluster))
    return tuple(dict.fromkeys(wanted))


def _wanted(name: str, num_added: int, profile: Profile, cluster: Cluster) -> Wanted:
    option = f"--add {name}={num_added}"
    groups = cluster.nodes
    places = [place for place, group in enumerate(groups) if group.name == name] or [
        place for place, group in enumerate(groups) if group.device == name
    ]
    if not places:
        raise _no_nodes_of(name, option, profile, cluster)
    fitting = [place for place in places if num_added % groups[place].devices == 0]
    if not fitting:
        sizes = " or ".join(str(size) for size in dict.fromkeys(groups[place].devices for place in places))
        raise UsageError(
            f"{option}: a node of {name} in {cluster.name!r} has {sizes} devices; expected a multiple of "
            "that",
            hint="Whole nodes are added, of the size that the cluster file gives.",
        )
    if cluster.num_devices + num_added > MAX_DEVICES:
        raise UsageError(
            f"{option}: {cluster.num_devices + num_added} devices together; at most {MAX_DEVICES} can be "
            "planned for"
        )
    return Wanted(fitting[-1], num_added)


def _no_nodes_of(name: str, option: str, profile: Profile, cluster: Cluster) -> UsageError:
    """Refuse a type that the cluster does not have: nothing says its nodes, links and price."""
    have = ", ".join(
        f"{group.device} (group {group.name})" if group.name else group.device for group in cluster.nodes
    )
    has_curves = any(is_known_as(device, name) for device in devices_of(profile))
    curves = "" if has_curves else "profile on one, or for it with --estimate, and --merge; then "
    return UsageError(
        f"{option}: {cluster.name!r} has no nodes of {name}, so that their size, links and price are not "
        f"known; it has {have}",
        hint=f"The profile has {'its curves' if has_curves else 'no curves of it either'}: {curves}"
        "write a second cluster file with a group of such nodes, and ask `spindle compare` with each.",
    )


def additions(
    profile: Profile,
    cluster: Cluster,
    wanted: Sequence[Wanted],
    strategy: StrategyName = "spindle",
    price_per_device_hour: float | None = None,
) -> Additions:
    """Plan for the cluster as it is, and for each addition alone.

    Args:
        price_per_device_hour: in any currency, instead of the prices that the cluster has.

    Raises:
        NoPlanError: there is a plan for none of them.
    """
    before = on_cluster(profile, cluster, strategy, price_per_device_hour, tell_types=True)
    rows = []
    for addition in wanted:
        group = cluster.nodes[addition.place]
        num_nodes = addition.num_added // group.devices
        grown = with_more_nodes(cluster, addition.place, num_nodes)
        after = on_cluster(profile, grown, strategy, price_per_device_hour, tell_types=True)
        rows.append(
            Addition(
                **dict(after),
                group=group.label,
                device=group.device,
                num_added=addition.num_added,
                num_nodes=num_nodes,
                speedup=None
                if before.iteration_s is None or after.iteration_s is None
                else before.iteration_s / after.iteration_s,
            )
        )
    last = (before, *rows)[-1]
    if all(row.iteration_s is None for row in (before, *rows)):
        raise NoPlanError(
            f"there is no plan for {cluster.name!r}, with none of the additions: {last.failure}"
        )
    return Additions(
        workload=profile.workload.name,
        cluster=cluster.name,
        strategy=strategy,
        price_per_device_hour=price_per_device_hour,
        task_sets=profile.task_sets,
        as_it_is=before,
        additions=_with_best(before, rows),
        none_better_by=tuple(
            aim for aim, low in _least(rows).items() if not _is_better(low, _MEASURES[aim].value(before))
        ),
    )


def _least(rows: Sequence[Addition]) -> dict[Aim, float]:
    """Return what the best of the additions has, by each measure that is known."""
    values_by_aim = {
        aim: [value for row in rows if (value := measure.value(row)) is not None]
        for aim, measure in _MEASURES.items()
    }
    return {aim: min(values) for aim, values in values_by_aim.items() if values}


def _is_better(value: float, before: float | None) -> bool:
    """Than what the cluster has as it is; anything is better than no plan."""
    return before is None or value < before


def _with_best(before: OnCluster, rows: Sequence[Addition]) -> tuple[Addition, ...]:
    """Say of each addition by which aims it is best; what is as good as the best is best, too."""
    least = {aim: low for aim, low in _least(rows).items() if _is_better(low, _MEASURES[aim].value(before))}
    return tuple(
        row.model_copy(
            update={"best_by": tuple(aim for aim, low in least.items() if _MEASURES[aim].value(row) == low)}
        )
        for row in rows
    )


def additions_table(result: Additions) -> Table:
    """Return a row for the cluster as it is, and for each addition; the best are marked."""
    rows: tuple[OnCluster, ...] = (result.as_it_is, *result.additions)
    figures = known_figures(rows, (PRICE, *FIGURES))
    table = Table(
        title=f"{result.workload} on {result.cluster}, strategy {result.strategy}: with more devices"
        + of_sets(result.task_sets),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    titles = ("devices", "iteration", "speed-up", *(figure.title for figure in figures), "peak memory")
    for name in ("added", *titles, "best by"):
        table.add_column(name, justify="right" if name in titles else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            added(row),
            str(row.num_devices),
            "no plan" if row.iteration_s is None else format_seconds(row.iteration_s),
            f"{row.speedup:.2f}x" if isinstance(row, Addition) and row.speedup is not None else "",
            *(figure.cell(row) for figure in figures),
            "" if row.peak_memory_bytes is None else format_bytes(row.peak_memory_bytes),
            ", ".join(row.best_by if isinstance(row, Addition) else result.none_better_by),
        )
    return table


def added(row: OnCluster) -> str:
    """Return what a row has more than the cluster, as the cluster file calls it."""
    return f"{row.num_added} {row.group}" if isinstance(row, Addition) else "nothing"


def _added_in_full(row: Addition) -> str:
    return f"{row.num_added} more {row.group}" + (f" ({row.device})" if row.group != row.device else "")


def best_lines(result: Additions) -> str:
    """Return a line for each measure that is known: the additions that are best by it, against adding
    nothing; or that none is better than that.
    """
    lines = []
    for aim, low in _least(result.additions).items():
        measure = _MEASURES[aim]
        before = measure.value(result.as_it_is)
        best = [row for row in result.additions if measure.value(row) == low]
        named = " or ".join(map(_added_in_full, best))
        told = f"{named}: {measure.than(low / before)}" if before else named
        if aim in result.none_better_by:
            told = f"nothing added, as no addition is better ({told})"
        lines.append(f"best by {aim}: {told}")
    return "\n".join(lines)


def _more(ratio: float) -> str:
    return f"{ratio - 1:.1%} more" if ratio >= 1 else f"{1 - ratio:.1%} less"
