"""Clusters and profiles of several types of device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from helpers.plans import FINGERPRINT
from helpers.random_plans import plan_on
from spindle_cli.costs.shares import times_of
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.plan.types import Plan, PlanMetaOp, Slice
from spindle_cli.profile.types import Device, MetaOpProfile, Profile, ShareTime, WorkloadRef


def cluster_of_types(
    counts: Mapping[str, int], *, devices_per_node: int | None = None, memory_gib: float = 5000.0
) -> Cluster:
    """A group of nodes for each type, one node each unless told."""
    return Cluster(
        name="mixed",
        nodes=tuple(
            NodeGroup(
                count=count // (devices_per_node or count),
                devices=devices_per_node or count,
                device=device,
                memory_gib=memory_gib,
            )
            for device, count in counts.items()
        ),
        links=Links(
            intra_node=Link(latency_us=10, bandwidth_gb_per_s=50),
            inter_node=Link(latency_us=20, bandwidth_gb_per_s=10),
        ),
    )


def metaop_on_types(
    name: str, num_ops: int, sample_s: Mapping[str, float], *, batch_size: int = 8, **more: object
) -> MetaOpProfile:
    """A MetaOp of the task before the '/', whose shares take so many seconds for each sample on each type, a
    third of it forward.
    """
    shares = tuple(
        ShareTime(
            samples=samples,
            forward_s=samples * seconds / 3,
            backward_s=samples * seconds * 2 / 3,
            source="measured",
            device=device,
        )
        for device, seconds in sample_s.items()
        for samples in range(1, batch_size + 1)
    )
    curve = [
        {
            "num_devices": dp,
            "dp": dp,
            "forward_s": batch_size / dp * seconds / 3,
            "backward_s": batch_size / dp * seconds * 2 / 3,
            "source": "measured",
            "device": device,
        }
        for device, seconds in sample_s.items()
        for dp in range(1, batch_size + 1)
        if batch_size % dp == 0
    ]
    settings = {
        "parameters": name,
        "param_bytes_per_op": 2**10,
        "activation_bytes_per_op": 2**10,
        "output_bytes": 2**6,
        **more,
    }
    return MetaOpProfile.model_validate(
        {
            "name": name,
            "task": name.split("/")[0],
            "num_ops": num_ops,
            "batch_size": batch_size,
            "shares": shares,
            "curve": curve,
            **settings,
        }
    )


def profile_on_types(*metaops: MetaOpProfile) -> Profile:
    """A profile of the types that the MetaOps' curves name."""
    types = tuple(dict.fromkeys(point.device or "" for point in metaops[0].curve))
    devices = tuple(Device(type=device, name=device, memory_bytes=2**40) for device in types)
    return Profile(
        workload=WorkloadRef(name="test", fingerprint=FINGERPRINT, source="tests:build"),
        device=devices[0],
        devices=devices,
        metaops=metaops,
        optimizer_state_sharded=True,
    )


def on_types(profile: Profile, times: Mapping[str, float]) -> Profile:
    """A profile of one type as one of several, each taking so many times as long."""

    def entries(metaop: MetaOpProfile, key: str) -> tuple[object, ...]:
        return tuple(
            entry.model_copy(
                update={
                    "device": device,
                    "forward_s": entry.forward_s * factor,
                    "backward_s": entry.backward_s * factor,
                }
            )
            for device, factor in times.items()
            for entry in getattr(metaop, key)
        )

    metaops = tuple(
        metaop.model_copy(update={"curve": entries(metaop, "curve"), "shares": entries(metaop, "shares")})
        for metaop in profile.metaops
    )
    devices = tuple(Device(type=device, name=device, memory_bytes=2**40) for device in times)
    update = {"metaops": metaops, "device": devices[0], "devices": devices, "optimizer_state_sharded": True}
    return profile.model_copy(update=update)


def plan_in_rows(metaop: MetaOpProfile, rows: Sequence[int], *, recompute: bool = False) -> Plan:
    """All ops of a MetaOp in one slice, on a device of each type that it has times of."""
    profile = profile_on_types(metaop)
    cluster = cluster_of_types({device.type: 1 for device in profile.devices})
    piece = Slice(
        metaop=metaop.name,
        ops=(0, metaop.num_ops),
        devices=tuple(range(cluster.num_devices)),
        dp=cluster.num_devices,
        rows=tuple(rows),
        start_s=0.0,
        end_s=0.0,
        backward_start_s=0.0,
        backward_end_s=0.0,
        recompute=recompute,
    )
    op = times_of(metaop, piece, cluster)
    assert op is not None
    forward_s = metaop.num_ops * op.forward_s
    backward_s = metaop.num_ops * (op.backward_s + (op.forward_s if recompute else 0.0))
    times = {"end_s": forward_s, "backward_start_s": forward_s, "backward_end_s": forward_s + backward_s}
    needed = {name: getattr(metaop, name) for name in PlanMetaOp.model_fields}
    return plan_on(cluster, (PlanMetaOp(**needed),), [piece.model_copy(update=times)], {})
