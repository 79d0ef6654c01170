"""Plans written by hand, for tests that need one whatever the planner does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spindle_cli.account.device_memory import MEMORY_FORMULA, device_memory
from spindle_cli.costs.beyond_curve import share_again
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.plan.types import Plan, PlanMetaOp, Predicted, ProfileRef, Slice, Wave
from spindle_cli.profile.types import CurvePoint, Device, MetaOpProfile, OpMemory, Profile, WorkloadRef

# Of MetaOps of whose forward passes a quarter runs again where they keep what takes longest: nothing.
SELECTIVE: dict[str, Any] = {
    "selective_share": 0.25,
    "memory": (
        OpMemory(
            kept_bytes=(0, 0),
            forward_bytes=(0, 0),
            backward_bytes=(0, 0),
            first_backward_bytes=(0, 0),
            selective_bytes=(0, 0),
        ),
    ),
}
FINGERPRINT = "sha256:" + "0" * 64


def cluster_of(num_devices: int, *, devices_per_node: int | None = None, memory_gib: float = 4.0) -> Cluster:
    """A CPU cluster of equal nodes; one node unless told."""
    per_node = devices_per_node or num_devices
    return Cluster(
        name="test",
        nodes=(
            NodeGroup(count=num_devices // per_node, devices=per_node, device="cpu", memory_gib=memory_gib),
        ),
        links=Links(
            intra_node=Link(latency_us=10, bandwidth_gb_per_s=5),
            inter_node=Link(latency_us=20, bandwidth_gb_per_s=1),
        ),
    )


def curve_of(op_s: Mapping[int, float]) -> tuple[CurvePoint, ...]:
    """Data-parallel points from {devices: seconds per op}; a third of it forward."""
    return tuple(
        CurvePoint(num_devices=n, dp=n, forward_s=s / 3, backward_s=s * 2 / 3, source="measured")
        for n, s in sorted(op_s.items())
    )


def metaop_of(name: str, num_ops: int, op_s: Mapping[int, float], **more: Any) -> MetaOpProfile:
    """A MetaOp of the task before the '/' in its name, with a batch of 8 and 1 MiB of parameters an op."""
    settings = {
        "batch_size": 8,
        "parameters": name,
        "param_bytes_per_op": 2**20,
        "activation_bytes_per_op": 2**18,
        **more,
    }
    return MetaOpProfile(
        name=name,
        task=name.split("/")[0],
        num_ops=num_ops,
        curve=curve_of(op_s),
        output_bytes=2**16,
        **settings,
    )


def profile_of(*metaops: MetaOpProfile) -> Profile:
    """A profile of a workload named 'test'."""
    return Profile(
        workload=WorkloadRef(name="test", fingerprint=FINGERPRINT, source="tests:build"),
        device=Device(type="cpu", name="test", memory_bytes=2**32),
        metaops=metaops,
    )


def slice_of(
    metaop: MetaOpProfile,
    ops: tuple[int, int],
    devices: Sequence[int],
    start_s: float,
    *,
    recompute: bool = False,
    selective: bool = False,
    tp: int = 1,
) -> Slice:
    """A slice that lasts exactly as long as its curve says; data-parallel, but for `tp`."""
    point = next(point for point in metaop.curve if (point.num_devices, point.tp) == (len(devices), tp))
    again = share_again(metaop, selective=selective) if recompute else 0.0
    op_s = point.op_s + again * point.forward_s
    return Slice(
        metaop=metaop.name,
        ops=ops,
        devices=tuple(devices),
        dp=len(devices) // tp,
        tp=tp,
        start_s=start_s,
        end_s=start_s + (ops[1] - ops[0]) * op_s,
        recompute=recompute,
        selective=selective,
    )


def plan_of(
    profile: Profile, cluster: Cluster, waves: Sequence[Sequence[Slice]], lower_bound_s: float = 0.0
) -> Plan:
    """A plan of these slices, with predictions that agree with them."""
    slices = [piece for wave in waves for piece in wave]
    end_s = max(piece.end_s for piece in slices)
    memory = device_memory(profile.metaops, slices, cluster, profile)
    return Plan(
        strategy="spindle",
        workload=profile.workload,
        profile=ProfileRef(sha256=profile.sha256()),
        cluster=cluster,
        **profile.training,
        predicted=Predicted(
            iteration_s=end_s,
            compute_s=end_s,
            lower_bound_s=lower_bound_s,
            peak_memory_bytes=tuple(device.total_bytes for device in memory),
            memory_formula=MEMORY_FORMULA,
        ),
        metaops=tuple(
            PlanMetaOp.model_validate(metaop.model_dump(include=set(PlanMetaOp.model_fields)))
            for metaop in profile.metaops
        ),
        waves=tuple(
            Wave(
                index=index,
                start_s=min(piece.start_s for piece in wave),
                end_s=max(piece.end_s for piece in wave),
                slices=tuple(wave),
            )
            for index, wave in enumerate(waves)
        ),
    )


def two_towers() -> tuple[Profile, Plan]:
    """Two encoders side by side on 4 devices, then the loss of both; solved by hand.

    vision: 4 ops, 2 s each on 1 device, 1 s on 2, 0.6 s on 4. text: 3 ops, 1 s, 0.5 s, 0.3 s. loss: 1 op,
    0.2 s on 1. Wave 0: vision [0, 3) on 0-1 and text [0, 3) on 2-3; wave 1: vision [3, 4) on 0-3; wave 2:
    the loss on 0.
    """
    vision = metaop_of("pairs/vision", 4, {1: 2.0, 2: 1.0, 4: 0.6})
    text = metaop_of("pairs/text", 3, {1: 1.0, 2: 0.5, 4: 0.3})
    loss = metaop_of(
        "pairs/loss", 1, {1: 0.2}, inputs=(vision.name, text.name), parameters=None, param_bytes_per_op=0
    )
    profile = profile_of(vision, text, loss)
    waves = (
        (slice_of(vision, (0, 3), (0, 1), 0.0), slice_of(text, (0, 3), (2, 3), 0.0)),
        (slice_of(vision, (3, 4), (0, 1, 2, 3), 3.0),),
        (slice_of(loss, (0, 1), (0,), 3.6),),
    )
    # Work: 4 x 2 (vision on 1) + 3 x 1 (text on 1) + 0.2 = 11.2 device-seconds over 4 devices = 2.8 s.
    return profile, plan_of(profile, cluster_of(4), waves, lower_bound_s=2.8)
