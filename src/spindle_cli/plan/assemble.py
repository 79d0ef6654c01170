"""From placed pieces to a plan: times in whole ticks, waves, and what the plan must know of each MetaOp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from spindle_cli.costs.shares import largest_samples, share_on_type, share_seconds, sizes
from spindle_cli.files.cluster import Cluster, is_cpu
from spindle_cli.files.sharding import ShardingOf
from spindle_cli.plan.problem import Node, Point, Problem
from spindle_cli.plan.schedule import Placed
from spindle_cli.plan.slices import rows_of
from spindle_cli.plan.types import (
    Plan,
    PlanMetaOp,
    Predicted,
    ProfileRef,
    Slice,
    StrategyName,
    Wave,
)
from spindle_cli.profile.points import DeviceType
from spindle_cli.profile.types import MetaOpProfile, Profile, ShareTime


def exact_slices(problem: Problem, placed: Placed) -> tuple[Slice, ...]:
    """Slices in order of start, each as early as its devices, its inputs and its MetaOp's slice before allow.

    Times are whole ticks of a decimal fraction of a second, durations rounded up, so that no sum of floats
    can make a slice too short or let two overlap.
    """
    ticks_per_s = problem.ticks_per_s
    device_free = [0] * problem.num_devices
    node_end = [0] * len(problem.nodes)
    after = placed.candidate.after or (0,) * len(placed.devices)
    all_ended = [0]  # by number of pieces, when all of the first so many have ended
    slices: list[tuple[int, Slice]] = []
    for slice_, members, before in zip(placed.candidate.pieces, placed.devices, after, strict=True):
        node = problem.nodes[slice_.node]
        ready = max((node_end[j] for j in node.inputs), default=0)
        start = max(ready, node_end[slice_.node], all_ended[before], *(device_free[d] for d in members))
        # One tick on top: the difference of two rounded decimals may fall short of the product by a float's
        # last bit.
        end = start + ceil(slice_.num_ops * slice_.point.op_s * ticks_per_s) + 1
        node_end[slice_.node] = end
        all_ended.append(max(all_ended[-1], end))
        for device in members:
            device_free[device] = end
        slices.append(
            (
                start,
                Slice.model_construct(
                    metaop=node.metaop.name,
                    ops=(slice_.first, slice_.last),
                    devices=members,
                    dp=slice_.point.dp,
                    tp=slice_.point.tp,
                    rows=_rows(node, slice_.point),
                    start_s=start / ticks_per_s,
                    end_s=end / ticks_per_s,
                    recompute=slice_.point.recompute,
                    selective=slice_.point.selective,
                ),
            )
        )
    slices.sort(key=lambda item: item[0])
    return tuple(slice_ for _, slice_ in slices)


def _rows(node: Node, point: Point) -> tuple[int, ...] | None:
    return rows_of(node.metaop.batch_size, point.dp) if point.counts is None else point.rows


def make_waves(slices: Sequence[Slice]) -> tuple[Wave, ...]:
    """Group slices, in order of start, into waves: a slice opens a new one when it cannot run beside the
    wave's.

    That is when it shares a device with it or starts when one of its slices has already ended.
    """
    waves: list[Wave] = []
    members: list[Slice] = []
    busy: set[int] = set()
    for slice_ in slices:
        if members and (
            slice_.start_s >= min(member.end_s for member in members) or not busy.isdisjoint(slice_.devices)
        ):
            waves.append(_wave(len(waves), members))
            members, busy = [], set()
        members.append(slice_)
        busy.update(slice_.devices)
    waves.append(_wave(len(waves), members))
    return tuple(waves)


def _wave(index: int, members: Sequence[Slice]) -> Wave:
    return Wave.model_construct(
        index=index,
        start_s=min(slice_.start_s for slice_ in members),
        end_s=max(slice_.end_s for slice_ in members),
        slices=tuple(members),
    )


def plan_metaop(metaop: MetaOpProfile, slices: Sequence[Slice], cluster: Cluster) -> PlanMetaOp:
    """The profile's entry with only the curve points, or shares, that `slices` use."""
    of_metaop = [slice_ for slice_ in slices if slice_.metaop == metaop.name]
    by_shares = [
        slice_
        for slice_ in of_metaop
        if slice_.micro_batches > 1 or slice_.rows is not None or cluster.is_mixed
    ]
    used = {(slice_.dp, slice_.tp) for slice_ in of_metaop if slice_ not in by_shares}
    parts = {part for slice_ in by_shares for part in _parts(metaop, slice_, cluster)}
    kept = PlanMetaOp.model_fields.keys() - {"curve", "shares"}
    return PlanMetaOp.model_construct(
        **{name: getattr(metaop, name) for name in PlanMetaOp.model_fields if name in kept},
        curve=tuple(point for point in metaop.curve if (point.dp, point.tp) in used),
        shares=tuple(_share(metaop, *part) for part in sorted(parts, key=_by_type)),
    )


def _by_type(part: tuple[int, int, DeviceType | None]) -> tuple[str, int, int]:
    samples, tp, device = part
    return device or "", samples, tp


def _parts(
    metaop: MetaOpProfile, slice_: Slice, cluster: Cluster
) -> Iterator[tuple[int, int, DeviceType | None]]:
    """(samples, tp, type of device) of the shares whose times a slice needs: of its largest; on a cluster of
    several types, of all.
    """
    if not cluster.is_mixed:
        yield int(largest_samples(slice_, metaop.batch_size)), slice_.tp, None
        return
    equal = metaop.batch_size // slice_.shares_of_batch
    for device, samples in zip(
        slice_.devices[:: slice_.tp], sizes(slice_) or (equal,) * slice_.dp, strict=True
    ):
        yield samples, slice_.tp, cluster.type_of[device]


def _share(metaop: MetaOpProfile, samples: int, tp: int, device: DeviceType | None) -> ShareTime:
    """As the profile has it, or between two that it has."""
    for share in metaop.shares:
        if (share.samples, share.tp, share.device) == (samples, tp, device):
            return share
    if device is None:
        op = share_seconds(metaop.shares, samples, tp)
    else:
        op = share_on_type(metaop, device, samples, tp)
    assert op is not None, "nothing else is planned"
    return ShareTime(
        samples=samples,
        tp=tp,
        forward_s=op.forward_s,
        backward_s=op.backward_s,
        source="fitted",
        communication_s=op.communication_s,
        device=device,
    )


def profile_ref(profile: Profile) -> ProfileRef:
    """Identity of a profile: the hash of its canonical JSON; and of several types of CPU their models."""
    cpus = {device.type: device.name for device in profile.devices if is_cpu(device.type)}
    return ProfileRef(sha256=profile.sha256(), processors=cpus)


def threads_of(profile: Profile) -> int | None:
    """Threads of each process in which the curves were measured; None for a profile that does not say."""
    threads = profile.environment.get("threads_per_process")
    return threads if isinstance(threads, int) and threads >= 1 else None


def _unchecked(profile: Profile, slices: Sequence[Slice]) -> dict[str, str]:
    """What the profile has not checked by numbers, but MetaOps that are not split over the batch."""
    cut = {slice_.metaop for slice_ in slices if slice_.shares_of_batch > 1}
    whole = {metaop.name for metaop in profile.metaops} - cut
    return {name: why for name, why in profile.unchecked.items() if name not in whole}


def make_plan_file(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    slices: Sequence[Slice],
    predicted: Predicted,
    notes: tuple[str, ...] = (),
    micro_batches: Mapping[str, int] | None = None,
    sharding: ShardingOf | None = None,
    *,
    sums_by_node: bool = True,
) -> Plan:
    """The plan, validated as a whole. `slices`: of the profile's MetaOps."""
    apart = any(slice_.backward_s is not None for slice_ in slices)
    return Plan(
        schema_="spindle.plan/2" if apart else "spindle.plan/1",
        strategy=strategy,
        workload=profile.workload,
        profile=profile_ref(profile),
        cluster=cluster,
        **profile.training,
        threads_per_process=threads_of(profile),
        compile=profile.compiled_by,
        unchecked=_unchecked(profile, slices),
        notes=notes,
        predicted=predicted,
        metaops=tuple(plan_metaop(metaop, slices, cluster) for metaop in profile.metaops),
        micro_batches=dict(micro_batches or {}),
        sharding=dict(sharding or {}),
        shard_weights=profile.shard_weights,
        sums_by_node=sums_by_node,
        waves=make_waves(slices),
    )
