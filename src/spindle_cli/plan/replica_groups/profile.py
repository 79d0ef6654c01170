"""What a replica group's devices take together, as a profile in which the replica group is one device.

All parameters are shared out by the replica group, so that MetaOps which have any run on all of its devices,
in shares as equal as can be; others on as many of them as are fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spindle_cli.costs.flops import reached_by_gradients
from spindle_cli.costs.links import collectives_bytes
from spindle_cli.costs.shares import OpSeconds, point_of_share, share_seconds
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.best.sharding import keys_with_parameters
from spindle_cli.plan.cutting.on_all import key_of, longer_on
from spindle_cli.plan.replica_groups.cluster import ReplicaGroup
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, OpMemory, Profile

# Over so many more sets of devices a device sums and gathers than a replica group's does: inside of its
# replica group, and with the replica groups that hold the same, and for flags, which differs by component.
COMMUNICATORS = 4


class Way(NamedTuple):
    """How a MetaOp runs on a replica group: on how many of its devices, and what one op takes there without
    gathers and scatters.
    """

    dp: int
    op: OpSeconds


def shared_out(profile: Profile) -> dict[str, Sharding]:
    """By key, what replica groups share out: all parameters."""
    return dict.fromkeys(keys_with_parameters(profile), Sharding.PARAMETERS)


def beside_bytes(profile: Profile, cluster: Cluster) -> float:
    """How much of each device's memory comes on top of a replica group's plan as one device: room to gather
    the parameters of two ops, the gradients of two that are being scattered, and communicators.
    """
    largest = max(
        metaop.param_bytes_per_op + extra
        for metaop in profile.metaops
        for extra in (0, *metaop.extra_param_bytes.values())
    )
    return 2 * largest * (1 + profile.gradient_bytes_per_param) + _communicators_bytes(cluster)


def _communicators_bytes(cluster: Cluster) -> int:
    """Bytes of each device's communicators, all taken as large as one of all devices of the cluster, or of
    its largest node.
    """
    if cluster.talks_by == "gloo":
        return 0
    first, size = max(zip(cluster.first_device_of, cluster.node_sizes, strict=True), key=lambda node: node[1])
    dearest = max(
        collectives_bytes(devices, cluster)
        for devices in (range(cluster.num_devices), range(first, first + size))
    )
    return COMMUNICATORS * dearest


def way_on(metaop: MetaOpProfile, size: int, sharding: ShardingOf) -> Way | None:
    """How a MetaOp runs on a replica group of `size` devices; None: it cannot, or nothing is known of such
    shares.
    """
    samples = metaop.batch_size
    if key_of(metaop) in sharding:
        op = _seconds(metaop, size) if samples >= size else None
        return None if op is None else Way(size, op)
    widths = range(1, min(size, samples) + 1)
    ways = [Way(dp, op) for dp in widths if (op := _seconds(metaop, dp)) is not None]
    return min(ways, key=lambda way: way.op.forward_s + way.op.backward_s, default=None)


def _seconds(metaop: MetaOpProfile, dp: int) -> OpSeconds | None:
    """Seconds of one op: of equal shares, as plans say them, by the curve."""
    if metaop.batch_size % dp:
        return share_seconds(metaop.shares, -(-metaop.batch_size // dp), 1)
    for point in metaop.curve:
        if (point.dp, point.tp) == (dp, 1):
            return OpSeconds(point.forward_s, point.backward_s, point.communication_s)
    return None


def on_replica_groups(profile: Profile, replica_groups: Sequence[ReplicaGroup]) -> Profile | None:
    """The profile of devices that are as fast as replica groups, each of its kind; None: a MetaOp cannot run
    on one.

    Args:
        profile: with what replica groups share out; of whole batches or of micro-batches.
        replica_groups: as `cluster_of` has them.
    """
    profile = profile.weighted(())  # those of a replica group, of one type, have equal parts
    kinds = {replica_group.kind: replica_group for replica_group in replica_groups}
    seen = {kind: _on_kind(profile, replica_group) for kind, replica_group in kinds.items()}
    on_kinds = {kind: of_kind for kind, of_kind in seen.items() if of_kind is not None}
    if len(on_kinds) < len(seen):
        return None
    metaops = [
        _of_kinds(metaop, {kind: of_kind[place] for kind, of_kind in on_kinds.items()})
        for place, metaop in enumerate(profile.metaops)
    ]
    least = min(replica_group.size for replica_group in replica_groups)
    update = {"optimizer_s_per_byte": profile.optimizer_s_per_byte / least, "devices": ()}
    if len(kinds) > 1:
        devices = tuple(profile.device.model_copy(update={"type": kind}) for kind in kinds)
        update |= {"device": devices[0], "devices": devices}
    return profile.model_copy(update=update).with_metaops(metaops).sharded({})


class _Together(NamedTuple):
    """What a MetaOp takes of all devices of a replica group.

    Attributes:
        dp: how many have a share.
        ratio: how many times the batch there would be if all had as much as the largest share.
    """

    forward_s: float
    backward_s: float
    dp: int
    ratio: float


def _on_kind(profile: Profile, replica_group: ReplicaGroup) -> list[_Together] | None:
    seen = seen_on(profile, replica_group.cluster)
    reached = reached_by_gradients(profile.metaops)
    on_kind = []
    for metaop in seen.metaops:
        way = way_on(metaop, replica_group.size, profile.sharding)
        if way is None:
            return None
        point = point_of_share(way.dp, 1, way.op)
        longer = longer_on(metaop, point, replica_group.cluster, profile, is_reached=reached[metaop.name])
        forward_s, backward_s = (pass_s / metaop.num_ops for pass_s in longer)
        ratio = way.dp * -(-metaop.batch_size // way.dp) / metaop.batch_size
        on_kind.append(_Together(point.forward_s + forward_s, point.backward_s + backward_s, way.dp, ratio))
    return on_kind


def _of_kinds(metaop: MetaOpProfile, on: Mapping[str, _Together]) -> MetaOpProfile:
    """The MetaOp with one allocation on a replica group of each kind, and memory as of all devices of one: of
    several kinds what is fixed as of the smallest, as plans are evaluated by the real account in any case.
    """
    curve = tuple(
        CurvePoint(
            num_devices=1,
            dp=1,
            forward_s=on_replica_group.forward_s,
            backward_s=on_replica_group.backward_s,
            source="fitted",
            device=kind if len(on) > 1 else None,
        )
        for kind, on_replica_group in on.items()
    )
    dp, ratio = (
        min(on_replica_group.dp for on_replica_group in on.values()),
        min(on_replica_group.ratio for on_replica_group in on.values()),
    )
    return metaop.model_copy(
        update={
            "curve": curve,
            "shares": (),
            "fit": None,
            "activation_bytes_per_op": round(ratio * metaop.activation_bytes_per_op),
            "memory": tuple(_of_shares(entry, dp, ratio) for entry in metaop.memory if entry.tp == 1),
        }
    )


def _of_shares(entry: OpMemory, dp: int, ratio: float) -> OpMemory:
    """What so many shares take together."""
    return entry.with_pairs(lambda fixed, whole: (dp * fixed, round(ratio * whole)))
