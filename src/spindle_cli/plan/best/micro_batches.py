"""Micro-batches in the search: what one of them is, planned like a batch, and all of them, each a task of its
own whose MetaOps share their parameters with those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import TypeAlias

from spindle_cli.costs.shares import KnownShares, Same, point_of_share
from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.cutting.on_all import on_all_devices, seconds_on
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem, needs_whole_batch, parts_of
from spindle_cli.plan.search.room import CutPart
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, OpMemory, Profile, ShareTime

# Cuts the tasks of a profile, or of a part of one; raises NoPlanError where they cannot be cut so.
Cut: TypeAlias = "Callable[[Profile, Mapping[str, int]], MicroBatched]"
# Of so many MetaOps and sizes of micro-batches curves are kept.
_MOST_KEPT = 1024


@dataclass(frozen=True)
class MicroBatched:
    """A profile whose tasks are cut.

    Attributes:
        one: the profile of one micro-batch of each task that is cut, and of the whole batches of the others.
        counts: of micro-batches, by task; of those that are cut.
        cluster: that it is planned for.
    """

    one: Profile
    counts: Mapping[str, int]
    cluster: Cluster

    def count_of(self, slice_: Slice) -> int:
        """How many micro-batches the task of a slice has."""
        return self.counts.get(self.one.by_name[slice_.metaop].task, 1)

    @cached_property
    def first(self) -> Problem:
        """Return the problem of one micro-batch of each task."""
        return make_problem(self.one, self.cluster)

    @cached_property
    def all(self) -> Problem:
        """Return the problem of all micro-batches, with MetaOps for each."""
        metaops = [
            _numbered(metaop, number)
            for metaop in self.one.metaops
            for number in range(self.counts.get(metaop.task, 1))
        ]
        return make_problem(self.one.with_metaops(metaops), self.cluster)

    def numbered(self, slice_: Slice, number: int) -> Slice:
        """A slice of `one` as that of a micro-batch in `all`."""
        return slice_.model_copy(update={"metaop": _name_of(slice_.metaop, number), "micro_batch": number})

    def folded(self, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        """Slices of `all` as a plan has them."""
        whole = {
            _name_of(metaop.name, number): (metaop.name, number, count)
            for metaop in self.one.metaops
            for count in [self.counts.get(metaop.task, 1)]
            for number in range(count)
        }
        folded = []
        for slice_ in slices:
            name, number, count = whole[slice_.metaop]
            update = {"metaop": name, "micro_batch": number, "micro_batches": count}
            folded.append(slice_.model_copy(update=update))
        return tuple(folded)


def in_micro_batches(profile: Profile, counts: Mapping[str, int], cluster: Cluster) -> MicroBatched:
    """A profile whose tasks are cut into so many micro-batches, with curves as far as shares are known.

    Raises:
        NoPlanError: a task cannot be cut so.
        UsageError: there is no such task.
    """
    _require_sound(profile, counts)
    counts = {task: count for task, count in counts.items() if count > 1}
    one = on_all_devices(cut_profile(profile, counts, cluster), cluster)
    return MicroBatched(one, counts, cluster)


def cut_profile(profile: Profile, counts: Mapping[str, int], cluster: Cluster) -> Profile:
    """A profile of one micro-batch of each task, with curves as far as shares are known.

    Args:
        counts: into how many micro-batches tasks are cut, where they can be.

    Raises:
        NoPlanError: no share of a micro-batch is known.
    """
    return profile.with_metaops(
        [_part(metaop, counts.get(metaop.task, 1), cluster) for metaop in profile.metaops]
    )


def _name_of(name: str, number: int) -> str:
    return f"{name}, micro-batch {number}"


def _numbered(metaop: MetaOpProfile, number: int) -> MetaOpProfile:
    return metaop.model_copy(
        update={
            "name": _name_of(metaop.name, number),
            "inputs": tuple(_name_of(name, number) for name in metaop.inputs),
            "inputs_of_every_op": tuple(_name_of(name, number) for name in metaop.inputs_of_every_op),
            "parameters": metaop.name if metaop.parameters is None else metaop.parameters,
        }
    )


def alike_micro_batches(profile: Profile, count: int) -> dict[str, int]:
    """All tasks in so many micro-batches, or in the most below that they can be cut into; empty where none
    can be. Then each round of micro-batches has the same work, and every task a part in it.
    """
    counts: dict[str, int] = {}
    for members in in_parts(profile).values():
        most = max(cut for cut in _cuts_of(members) if cut <= count)
        if most > 1:
            counts |= {metaop.task: most for metaop in members}
    return counts


def cuts_of_parts(
    profile: Profile, cut: Cut, micro_batches: Mapping[str, int] | None = None
) -> list[list[CutPart]]:
    """Every way to cut each part of the MetaGraph, with what it takes where each MetaOp runs on its fastest
    allocation, or where the profile shares out its parameters on all devices; fewest micro-batches first.

    Args:
        micro_batches: into how many each task is cut, where only one way is to be there.
    """
    cuts: list[list[CutPart]] = []
    for members in in_parts(profile).values():
        part = profile.with_metaops(members)
        wanted = _cuts_of(members) if micro_batches is None else [micro_batches.get(members[0].task, 1)]
        ways = (_cut_part(part, count, cut) for count in wanted)
        cuts.append([way for way in ways if way is not None])
    return cuts


def _cut_part(part: Profile, count: int, cut: Cut) -> CutPart | None:
    """None where a MetaOp has no allocation."""
    counts = dict.fromkeys((metaop.task for metaop in part.metaops), count)
    try:
        micro_batched = cut(part, counts)
        nodes = micro_batched.first.nodes
    except NoPlanError:
        return None
    one, cluster = micro_batched.one, micro_batched.cluster
    points = {node.metaop.name: min(node.points, key=lambda point: point.op_s) for node in nodes}
    seconds = sum(seconds_on(metaop, points[metaop.name], cluster, one) for metaop in one.metaops)
    return CutPart(counts, one.metaops, points, count * seconds)


def in_parts(profile: Profile) -> dict[int, list[MetaOpProfile]]:
    """The MetaOps of tasks that exchange values, together."""
    part_of = parts_of(profile.metaops)
    members: dict[int, list[MetaOpProfile]] = {}
    for metaop in profile.metaops:
        members.setdefault(part_of[metaop.name], []).append(metaop)
    return members


def _cuts_of(metaops: Sequence[MetaOpProfile]) -> list[int]:
    """Into how many micro-batches these MetaOps of one batch can be cut; ascending."""
    if any(needs_whole_batch(metaop) for metaop in metaops):
        return [1]
    batch_size = metaops[0].batch_size
    fewest = max(metaop.shares[0].samples for metaop in metaops)
    return [count for count in range(1, batch_size // fewest + 1) if batch_size % count == 0]


def _require_sound(profile: Profile, counts: Mapping[str, int]) -> None:
    part_of = parts_of(profile.metaops)
    count_of: dict[int, tuple[str, int]] = {}
    tasks = {metaop.task for metaop in profile.metaops}
    for task in sorted(counts.keys() - tasks):
        raise UsageError(
            f"micro-batches of task {task!r}: the profile has no such task",
            hint=f"Its tasks are {', '.join(sorted(tasks))}.",
        )
    for metaop in profile.metaops:
        count = counts.get(metaop.task, 1)
        first_task, expected = count_of.setdefault(part_of[metaop.name], (metaop.task, count))
        if count != expected:
            raise NoPlanError(
                f"micro-batches: task {metaop.task!r} has {count}, and task {first_task!r}, whose values it "
                f"exchanges, {expected}",
                hint="Cut both into as many.",
            )
        if count > 1:
            _require_cuttable(metaop, count)


def _require_cuttable(metaop: MetaOpProfile, count: int) -> None:
    if metaop.batch_size % count:
        raise NoPlanError(
            f"{metaop.name}: a batch of {metaop.batch_size} samples is not cut into {count} equal "
            "micro-batches",
            hint="Use a divisor of the batch.",
        )
    if needs_whole_batch(metaop):
        raise NoPlanError(
            f"{metaop.name}: its batch is not cut into micro-batches: its samples depend on each other, it "
            "changes buffers, or the profile says nothing of shares",
            hint="Leave its task whole, or profile again with this version.",
        )


def _part(metaop: MetaOpProfile, count: int, cluster: Cluster) -> MetaOpProfile:
    """What one of `count` micro-batches is."""
    if count == 1:
        return metaop

    def part(num_bytes: int) -> int:
        return ceil(num_bytes / count)

    inner = metaop.inner_output_bytes
    return metaop.model_copy(
        update={
            "batch_size": metaop.batch_size // count,
            "activation_bytes_per_op": part(metaop.activation_bytes_per_op),
            "memory": tuple(_memory_of_part(entry, count) for entry in metaop.memory),
            "field_bytes": {op: part(num_bytes) for op, num_bytes in metaop.field_bytes.items()},
            "output_bytes": part(metaop.output_bytes),
            "gathered": tuple(matrix.rebatched(1 / count) for matrix in metaop.gathered),
            "inner_output_bytes": None if inner is None else part(inner),
            "flops_per_op": None if metaop.flops_per_op is None else metaop.flops_per_op / count,
            "curve": _curve_of_part(metaop, count, cluster),
            "fit": None,
        }
    )


def _memory_of_part(entry: OpMemory, count: int) -> OpMemory:
    part = entry.with_pairs(lambda fixed, whole: (fixed, ceil(whole / count)))
    return part.model_copy(update={"joined_bytes": ceil(entry.joined_bytes / count)})


def _curve_of_part(metaop: MetaOpProfile, count: int, cluster: Cluster) -> tuple[CurvePoint, ...]:
    """On every number of devices that cuts a micro-batch into shares of known times, of each type of device.

    Raises:
        NoPlanError: there is none.
    """
    samples = metaop.batch_size // count
    points = _points_of_part(Same(metaop.shares), samples, cluster.num_devices)
    if not points:
        raise NoPlanError(
            f"{metaop.name}: the profile knows no share of {samples} samples, or of a part of them, on "
            f"{cluster.num_devices} devices",
            hint="Use fewer micro-batches, or profile again with this version.",
        )
    return points


@lru_cache(_MOST_KEPT)
def _points_of_part(
    shares: Same[tuple[ShareTime, ...]], samples: int, num_devices: int
) -> tuple[CurvePoint, ...]:
    """Return the allocations of a micro-batch of so many samples; one object for equal shares."""
    points: list[CurvePoint] = []
    for device in dict.fromkeys(share.device for share in shares.of):
        of_type = [share for share in shares.of if share.device == device]
        of_device = sorted(
            _points(of_type, samples, num_devices), key=lambda point: (point.num_devices, point.tp)
        )
        points += [point.model_copy(update={"device": device}) for point in of_device]
    return tuple(points)


def _points(shares: Sequence[ShareTime], samples: int, num_devices: int) -> Iterator[CurvePoint]:
    """Yield the allocations of a micro-batch of so many samples on one type of device."""
    for tp in sorted({share.tp for share in shares}):
        known_shares = KnownShares(share for share in shares if share.tp == tp)
        for dp in range(1, min(samples, num_devices // tp) + 1):
            op = known_shares.seconds(samples // dp) if samples % dp == 0 else None
            if op is not None and op.forward_s + op.backward_s > 0:
                yield point_of_share(dp, tp, op)
