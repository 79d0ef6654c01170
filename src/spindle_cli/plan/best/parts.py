"""Parts of a cluster: so many nodes of each group; and plans for them as plans of the whole cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.micro_batches import MicroBatched, cut_profile
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.search.evaluate import measure_as_they_are
from spindle_cli.plan.search.passes_apart import apart
from spindle_cli.profile.types import Profile
from spindle_cli.units import counted

# Numbers of nodes of a group that are tried, beside none and all.
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Part:
    """Some nodes of a cluster.

    Attributes:
        cluster: of these alone.
        devices: of the whole cluster, by their numbers in the part.
        bound_s: no schedule of whole batches in it ends earlier.
    """

    cluster: Cluster
    devices: tuple[int, ...]
    bound_s: float = 0.0


def parts_of(cluster: Cluster) -> Iterator[Part]:
    """Parts of a cluster, but the whole."""
    yield from _of_sizes(
        cluster,
        [sorted({0, group.count, *(n for n in NODES if n < group.count)}) for group in cluster.nodes],
    )


def groups_of(cluster: Cluster) -> Iterator[Part]:
    """The parts that are whole groups of nodes."""
    yield from _of_sizes(cluster, [[0, group.count] for group in cluster.nodes])


def _of_sizes(cluster: Cluster, sizes: Sequence[Sequence[int]]) -> Iterator[Part]:
    """Parts with so many nodes of each group, but the whole."""
    everything = tuple(group.count for group in cluster.nodes)
    for counts in product(*sizes):
        if any(counts) and counts != everything:
            yield _part(cluster, counts)


def _part(cluster: Cluster, counts: Sequence[int]) -> Part:
    """The first nodes of each group."""
    devices: list[int] = []
    first = 0
    for group, count in zip(cluster.nodes, counts, strict=True):
        devices += range(first, first + count * group.devices)
        first += group.count * group.devices
    nodes = tuple(
        group.model_copy(update={"count": count})
        for group, count in zip(cluster.nodes, counts, strict=True)
        if count
    )
    labels = {group.label for group in nodes}
    between = tuple(link for link in cluster.links.between if labels.issuperset(link.groups))
    links = cluster.links.model_copy(update={"between": between})
    return Part(cluster.changed(nodes=nodes, links=links), tuple(devices))


def on_all(profile: Profile, cluster: Cluster, part: Part, result: PlanResult) -> PlanResult | None:
    """The plan for a part as one of the whole cluster; None if that does not fit."""
    profile = profile.sharded(result.sharding)
    cut = None
    if result.cut is not None:  # of a part of one type, it knows nothing of the others
        counts = result.cut.counts
        cut = MicroBatched(cut_profile(profile, counts, cluster), counts, cluster)
    problem = make_problem(profile, cluster) if cut is None else cut.all
    slices = tuple(
        slice_.model_copy(update={"devices": tuple(part.devices[device] for device in slice_.devices)})
        for slice_ in result.best.slices
    )
    evaluated = measure_as_they_are(problem, "spindle", slices, result.best.after)
    if evaluated is not None and cluster.is_mixed and not evaluated.is_apart:
        evaluated = apart(problem, evaluated)
    return None if evaluated is None else replace(result, best=evaluated, cut=cut)


def with_idle(result: PlanResult, idle: int, why: str) -> PlanResult:
    """The plan with a note of how many devices stay idle, and why."""
    note = f"{counted(idle, 'device')} {'stays' if idle == 1 else 'stay'} idle: {why}."
    return replace(result, note=note if result.note is None else f"{result.note} {note}")
